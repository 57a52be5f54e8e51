"""Every family of drafts that a CPU can run, by the measures of the first: lossless, and worth it.

Output is plain decoding's token for token, acceptance native's within a tenth where the window covers
what the rule looks back at, no request holds more blocks than its budget; and a window that is too
small is told by its acceptance.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.engine import Engine, engine, watch_scheduled

pytestmark = [pytest.mark.engine, pytest.mark.v2]

Model = Callable[..., str]
REACH, MAX_TOKENS, CHUNK = 192, 24, 192
LENGTHS = [1, 2, 31, 33, 150, 255, 290, 321, 352, 500, 700, 901]
COVERING, SMALLEST = (256, 64), (1, 0)
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Family:
    """A kind of draft.

    Args:
        method: vLLM's own.
        target: name and options of the tiny model.
        draft: of the draft's checkpoint, where it has one of its own.
        k: tokens drafted a step.
        keys: further ones of the speculative config.
        arguments: of the engine.

    """

    method: str
    target: tuple[str, dict[str, int]]
    draft: tuple[str, dict[str, int]] | None = None
    k: int = 3
    keys: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


MLA = {
    "block_size": 16,  # the only one of vLLM's CPU kernel
    # vLLM's rotary kernel for CPUs leaves three-dimensional queries, which MLA has, as they are.
    "compilation_config": {"custom_ops": ["none"]},
    "max_num_batched_tokens": MAX_MODEL_LEN,  # prompts whole: vLLM has no chunks there
}
FAMILIES = {
    "GLM-4.5 form, one module": Family("mtp", ("glm", {})),
    "GLM-4.5 form, two modules": Family("mtp", ("glm", {"modules": 2}), k=2),
    "GLM-4.5 form, two modules twice": Family("mtp", ("glm", {"modules": 2}), k=4),
    "MLA, float32": Family("mtp", ("mla", {}), arguments=MLA),
    "MLA, bfloat16": Family("mtp", ("mla", {}), arguments=MLA | {"dtype": "bfloat16"}),
    "EAGLE-3": Family("eagle3", ("llama", {"layers": 4}), ("eagle3", {"layers": 4})),
    "draft model": Family("draft_model", ("llama", {"layers": 4}), ("llama", {"layers": 1})),
    "fp8 KV": Family("mtp", ("dense", {}), arguments={"kv_cache_dtype": "fp8"}),
    "fp8 KV of the draft": Family("mtp", ("dense", {}), keys={"kv_cache_dtype": "fp8"}),
    "dynamic depth": Family(
        "mtp",
        ("dense", {}),
        keys={"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 3, 2], [4, 4, 1]]},
    ),
}


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 256) for _ in range(n)] for n in LENGTHS]


def run(
    tiny_model: Model, family: Family, window: tuple[int, int] | None = None, drafts: bool = True
) -> tuple[list[list[int]], float]:
    """Answers and acceptance length of plain decoding, native drafts, or windowed ones."""
    name, options = family.target
    speculative: dict[str, Any] | None = None
    if drafts:
        speculative = {"method": family.method, "num_speculative_tokens": family.k, **family.keys}
        if family.draft:
            speculative["model"] = tiny_model(family.draft[0], **family.draft[1])
        if window:
            speculative["method"] = f"windowed_{family.method}"
            speculative |= {"draft_window_size": window[0], "draft_sink_size": window[1]}
    arguments = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": CHUNK, "max_num_seqs": 4}
    with engine(
        tiny_model(name, **options), speculative, **arguments | family.arguments
    ) as running:
        if window:
            hold_to_budget(running, family.k)
        answers = running.generate(prompts(), MAX_TOKENS)
        return answers, running.acceptance_length() if drafts else 1.0


def hold_to_budget(running: Engine, k: int) -> None:
    """Assert before each step that no request holds more of the ring than its budget."""
    scheduler, ring = running.core.scheduler, running.ring

    def check(_: Any) -> None:
        for request in scheduler.running:
            row = ring.req_to_blocks[request.request_id]
            held = sum(not block.is_null for block in row)
            in_flight = request.num_in_flight_tokens
            assert held <= ring.window.max_held_blocks(k, in_flight, MAX_MODEL_LEN)

    watch_scheduled(running, check)


@pytest.mark.parametrize("name", FAMILIES)
def test_output_is_plain_decodings_acceptance_is_natives_and_blocks_stay_in_budget(
    tiny_model, name
):
    family = FAMILIES[name]
    plain, _ = run(tiny_model, family, drafts=False)
    native, native_length = run(tiny_model, family)
    assert native == plain, "vLLM's own drafts change the output"
    covering, length = run(tiny_model, family, COVERING)
    small, small_length = run(tiny_model, family, SMALLEST)
    print(f"{name}: native AL {native_length:.2f}, windowed {length:.2f}, W=1 {small_length:.2f}")
    assert covering == small == plain
    assert native_length > 1.5
    assert length == pytest.approx(native_length, rel=0.1)
    # Negative control: the acceptance asserted above is that of what is seen.
    assert small_length < 0.9 * native_length
