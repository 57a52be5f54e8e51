"""The induction model: MiMo's form, float32, copies text; its acceptance says what the draft sees.

Three tokens ago the text read "a b c", and the last three tokens are "a b c" again: what follows
now is what followed then. Target and draft both do this *induction* by attention, each on its own
KV. Given N random tokens followed by their own first 16, the target repeats the text; every draft
is right if its KV of the source, N tokens back, is in view, and wrong if not: at K = 7 an
acceptance length of 8.0 or 1.0.

The hidden state is five fields of 10 channels: codes of the current token, of the three before it,
and of the predicted next one. Target: layer 0 fills in the previous tokens by looking 1, 2 and 3
tokens back; the last layer finds the place and copies the token after it. Draft: the current token
is its embedding, the previous ones come from the hidden state it is given, and its block does the
same induction.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wmtp_vllm.tiny_models import mimo
from wmtp_vllm.tiny_models.checkpoint import VOCAB_SIZE, Checkpoint
from wmtp_vllm.tiny_models.mimo import HEAD_DIM, HEADS, HIDDEN_SIZE, KV_HEADS
from wmtp_vllm.tiny_models.rotary import content_channels, landmark, look_back

BITS = 8
CODE_SIZE = BITS + 2
FIELDS = [slice(CODE_SIZE * i, CODE_SIZE * (i + 1)) for i in range(5)]
CURRENT, PREDICTED = FIELDS[0], FIELDS[4]
TEXT = FIELDS[:4]
"""The current token, then the tokens 1, 2 and 3 before it."""

POSITION_SHARPNESS = 28.0
MATCH_SHARPNESS = 10.0
LOGIT_SCALE = 5.0


@dataclass(frozen=True)
class InductionOptions:
    """Options of the induction model.

    Attributes:
        draft_match: tokens, 1 to 3, that must agree for the draft to copy. With 1 the draft takes
            any earlier place with the same token, and errs where tokens repeat.
        target_match: the same for the target.
        pad_layers: target layers that do nothing but hold KV, to give the target more of it.
        max_position_embeddings: longest context, in tokens.

    Raises:
        ValueError: an option is out of range.
    """

    draft_match: int = 3
    target_match: int = 3
    pad_layers: int = 0
    max_position_embeddings: int = 524_288

    def __post_init__(self) -> None:
        if not (1 <= self.draft_match <= 3 and 1 <= self.target_match <= 3):
            raise ValueError(f"draft_match and target_match must be 1, 2 or 3: {self}")
        if self.pad_layers < 0 or self.max_position_embeddings < 1:
            raise ValueError(f"pad_layers must be >= 0 and positions >= 1: {self}")


def induction(options: InductionOptions) -> Checkpoint:
    """Make the induction model. There is no chance in it: same options, same weights."""
    embedding = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    embedding[:, CURRENT] = bit_codes()
    unembedding = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    unembedding[:, PREDICTED] = bit_codes() * LOGIT_SCALE

    attentions = [
        _previous_tokens(),
        *(mimo.blank_attention() for _ in range(options.pad_layers)),
        _induction(options.target_match),
    ]
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": unembedding,
    }
    for layer, attention in enumerate(attentions):
        tensors |= mimo.decoder_layer(f"model.layers.{layer}", attention, mimo.blank_mlp())

    draft = _induction(options.draft_match)
    tensors |= mimo.decoder_layer(mimo.MTP_LAYER, draft, mimo.blank_mlp())
    # The hidden state belongs to the token before the embedded one: its text moves by one token.
    from_hidden = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
    for older, newer in zip(TEXT[1:], TEXT[:-1], strict=True):
        from_hidden[older, newer] = torch.eye(CODE_SIZE) / _norm_gain(fields=5)
    from_embedding = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
    from_embedding[CURRENT, CURRENT] = torch.eye(CODE_SIZE) / _norm_gain(fields=1)
    tensors |= mimo.mtp_entry(from_hidden, from_embedding)
    return Checkpoint(mimo.config(len(attentions), options.max_position_embeddings), tensors)


def bit_codes() -> Tensor:
    """Each token's id in bits and two parities, as +-1: float32[VOCAB_SIZE, CODE_SIZE].

    Thanks to the parities two codes differ in at least two channels.
    """
    ids = torch.arange(VOCAB_SIZE)[:, None]
    bits = ((ids >> torch.arange(BITS)) & 1) * 2.0 - 1.0
    low, high = bits[:, : BITS // 2], bits[:, BITS // 2 :]
    return torch.cat([bits, low.prod(1, keepdim=True), high.prod(1, keepdim=True)], dim=1)


def _norm_gain(fields: int) -> float:
    """What RMSNorm multiplies a hidden state by in which `fields` fields hold codes."""
    return float((HIDDEN_SIZE / (fields * CODE_SIZE)) ** 0.5)


def _previous_tokens() -> dict[str, Tensor]:
    """Heads 0, 1 and 2 look 1, 2 and 3 tokens back, and write what they find to that field."""
    weights = mimo.blank_attention()
    code = torch.eye(CODE_SIZE)
    for kv_head in range(KV_HEADS):
        start = kv_head * HEAD_DIM
        weights["v_proj.weight"][start : start + CODE_SIZE, CURRENT] = code / _norm_gain(fields=1)
    queries = look_back(torch.arange(1, HEADS + 1), HEAD_DIM)
    weights["q_proj.bias"] = queries.flatten() * POSITION_SHARPNESS
    weights["k_proj.bias"] = landmark(HEAD_DIM).repeat(KV_HEADS) * POSITION_SHARPNESS
    for head, field in enumerate(TEXT[1:]):
        start = head * HEAD_DIM
        weights["o_proj.weight"][field, start : start + CODE_SIZE] = code
    return weights


def _induction(match: int) -> dict[str, Tensor]:
    """Head 0 finds the place whose `match` *previous* tokens are now the *latest*, and copies.

    The comparison runs on channels that rotary embedding leaves alone, so it holds at any distance.
    """
    weights = mimo.blank_attention()
    code = torch.eye(CODE_SIZE) / _norm_gain(fields=4)
    channels = content_channels(HEAD_DIM)
    for i in range(match):
        compared = channels[CODE_SIZE * i : CODE_SIZE * (i + 1)]
        weights["q_proj.weight"][compared, TEXT[i]] = code * MATCH_SHARPNESS
        weights["k_proj.weight"][compared, TEXT[i + 1]] = code * MATCH_SHARPNESS
    weights["v_proj.weight"][:CODE_SIZE, CURRENT] = code
    weights["o_proj.weight"][PREDICTED, :CODE_SIZE] = torch.eye(CODE_SIZE)
    return weights
