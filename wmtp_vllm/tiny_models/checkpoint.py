"""What every tiny model shares: the tokenizer, and a checkpoint folder written whole.

A checkpoint is a Hugging Face folder: config.json, generation_config.json, model.safetensors and
the tokenizer's files. Nothing in it depends on where or when it was written, so the same options
give the same bytes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_bytes
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 256
FIRST_TEXT_TOKEN = len(SPECIAL_TOKENS)
"""First token id that stands for text; all ids from here to VOCAB_SIZE do."""

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What `save` writes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Checkpoint:
    """A model in memory: the contents of config.json and the named weights."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def text_tokens() -> tuple[str, ...]:
    """What the ids from FIRST_TEXT_TOKEN on stand for, in order.

    Newline and every printable ASCII character, so that any English prompt has tokens; then
    syllables (ba, be, ..., Pa) up to the size of the vocabulary. Whatever a model emits is
    printable, and encodes back to the same ids except where it spells out a syllable. Syllables
    are a consonant and a vowel: no two overlap, so the order of merges does not matter.
    """
    characters = ["\n", *map(chr, range(0x20, 0x7F))]
    consonants = "bcdfghjklmnpqrstvwxz"
    onsets = [*consonants, *consonants.upper()]
    syllables = [onset + vowel for onset in onsets for vowel in "aeiou"]
    return tuple([*characters, *syllables][: VOCAB_SIZE - FIRST_TEXT_TOKEN])


def tokenizer() -> Tokenizer:
    """The tokenizer of all tiny models: byte-level BPE, in which decoding is concatenation.

    Its form is that of Qwen2's because transformers 5 loads every `model_type: "qwen2"` folder,
    MiMo's included, as that class: of tokenizer.json it keeps vocabulary and merges, and rebuilds
    the rest. Characters that have no token are left out.
    """
    written = {" ": "\u0120", "\n": "\u010a"}  # how the byte-level alphabet spells the two
    texts = [written.get(text, text) for text in text_tokens()]
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *texts))}
    merges = [(text[0], text[1]) for text in texts if len(text) == 2]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return made


def save(checkpoint: Checkpoint, folder: Path) -> None:
    """Write `checkpoint` with its tokenizer into the existing `folder`."""
    special_ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    config = special_ids | {"vocab_size": VOCAB_SIZE} | checkpoint.config
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_ids)
    # safetensors refuses views that share memory, and hand-wired weights are full of slices.
    tensors = {name: tensor.clone().contiguous() for name, tensor in checkpoint.tensors.items()}
    weights = to_bytes(tensors, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)
    tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "pad_token": SPECIAL_TOKENS[PAD],
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[EOS],
            "unk_token": SPECIAL_TOKENS[UNK],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
