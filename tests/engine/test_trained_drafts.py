"""A model that has learned something: its draft is worth having, with a window that sees enough.

The plain engine also says that the model that was trained is the model that vLLM runs.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.support.engine import engine, native, windowed
from wmtp_vllm.tiny_models import heldout
from wmtp_vllm.tiny_models.checkpoint import tokenizer
from wmtp_vllm.tiny_models.shipped import FOLDER
from wmtp_vllm.tiny_models.transformer import Sizes, Transformer

pytestmark = pytest.mark.engine

K, MAX_TOKENS = 3, 96
COVERING_WINDOW = 1024
ENGINE = {"max_model_len": 4096, "max_num_batched_tokens": 2048}
KINDS = ("text", "copy")


def made(kind: str) -> list[heldout.Prompt]:
    """Of a copy the source is some 600 tokens back, and within 1,024."""
    distance = None if kind == "text" else 1100
    return [heldout.make(kind, 1600, seed, distance) for seed in range(8)]


def prompts(kind: str) -> list[list[int]]:
    return [tokenizer().encode(asked.prompt).ids for asked in made(kind)]


def run(model: str, speculative: dict | None) -> tuple[dict, dict]:
    """Answers and acceptance lengths by kind."""
    answers, lengths = {}, {}
    with engine(model, speculative, **ENGINE) as running:
        for kind in KINDS:
            answers[kind] = running.generate(prompts(kind), MAX_TOKENS)
            if speculative:
                lengths[kind] = running.acceptance_length()
    return answers, lengths


@pytest.fixture(scope="module")
def torch_model() -> Transformer:
    model = Transformer(Sizes())
    weights = load_file(FOLDER / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model


@pytest.fixture(scope="module")
def plain(tiny_model, torch_model) -> dict:
    """Plain decoding's answers, from an engine whose logits are the torch model's."""
    with engine(tiny_model("trained"), **ENGINE) as running:
        [prompt] = prompts("copy")[:1]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        [output] = running.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        found = [
            at[token].logprob
            for at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            logits, _ = torch_model.target(tokens, torch.arange(len(prompt))[None])
        expected = logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-3, rtol=1e-3)
        return {kind: running.generate(prompts(kind), MAX_TOKENS) for kind in KINDS}


@pytest.fixture(scope="module")
def native_lengths(tiny_model, plain) -> dict:
    answers, lengths = run(tiny_model("trained"), native(K))
    assert answers == plain
    return lengths


@torch.no_grad()
def test_the_target_repeats_a_passage_from_far_back_token_by_token(torch_model):
    """Given the right tokens so far; left to itself it strays to another place where they stand."""
    right = asked = 0
    for recall in made("copy"):
        start = len(tokenizer().encode(recall.prompt).ids)
        tokens = torch.tensor([tokenizer().encode(recall.prompt + recall.answer).ids])
        logits, _ = torch_model.target(tokens[:, :-1], torch.arange(tokens.shape[1] - 1)[None])
        said = logits[0, start - 1 :].argmax(-1)
        right += int((said == tokens[0, start:]).sum())
        asked += len(said)
    print(f"copied: {right} of {asked} tokens", end=" ")
    assert right > 0.95 * asked


def test_native_acceptance_on_what_it_has_not_seen(native_lengths):
    print(f"native: {native_lengths}", end=" ")
    assert min(native_lengths.values()) >= 2.5


def test_a_window_that_covers_the_source_is_as_good_as_none(tiny_model, plain, native_lengths):
    answers, lengths = run(tiny_model("trained"), windowed(K, COVERING_WINDOW, 16))
    assert answers == plain
    assert lengths == pytest.approx(native_lengths, rel=0.1)


@pytest.mark.parametrize("window", [1, 256])
def test_a_window_short_of_the_source_costs_acceptance_and_no_output(
    tiny_model, plain, native_lengths, window
):
    answers, lengths = run(tiny_model("trained"), windowed(K, window, 0))
    print(f"W={window}: {lengths}", end=" ")
    assert answers == plain
    assert lengths["text"] > 0.85 * native_lengths["text"]
    assert lengths["copy"] < 0.8 * native_lengths["copy"]


def test_a_draft_that_learned_nothing_is_told_by_its_acceptance(tiny_model, plain, tmp_path):
    """Negative control: the acceptance asserted here is that of what was learned."""
    model = shutil.copytree(tiny_model("trained"), tmp_path / "unlearned")
    weights = load_file(model / "model.safetensors")
    name = "model.mtp_layers.0.input_proj.weight"
    save_file(weights | {name: -weights[name]}, model / "model.safetensors", {"format": "pt"})
    answers, lengths = run(str(model), native(K))
    assert answers == plain
    assert lengths["text"] < 1.5


def test_vllm_drafts_what_the_training_drafts(tiny_model, torch_model):
    """The first draft after a prompt, step by step as `Transformer.draft` has it."""
    [prompt] = prompts("text")[:1]
    drafted = []
    with engine(tiny_model("trained"), native(K), **ENGINE) as running:
        proposer, propose = running.proposer, running.proposer.propose
        proposer.propose = lambda *a, **k: drafted.append(propose(*a, **k)) or drafted[-1]
        [[first]] = running.generate([prompt], 1)
        del proposer.propose
    tokens, start = [*prompt, first], torch.tensor([len(prompt) - 1])
    for _ in range(K):
        ids = torch.tensor([tokens])
        positions = torch.arange(len(tokens) - 1)[None]
        with torch.no_grad():
            _, hidden = torch_model.target(ids[:, :-1], positions)
            steps = torch_model.draft(
                hidden, ids[:, 1:], positions, start, len(tokens) - len(prompt)
            )
        said = steps[-1][0, start if len(steps) == 1 else 0]
        tokens.append(int(said.argmax()))
    assert drafted[0][0].tolist() == tokens[-K:]
