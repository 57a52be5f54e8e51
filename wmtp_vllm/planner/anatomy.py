"""What a model is made of, and what there is room for, as the planner needs it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wmtp_vllm import child
from wmtp_vllm.planner.roofline import Attention, Experts, Part

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Past the native length, as with YaRN: no matter for a plan.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Memory:
    """What one GPU holds, in bytes and tokens.

    Args:
        weights: of the target and its MTP head.
        kv: what is left for the KV cache.
        target: KV of the target's attention, for the sequences asked for.
        states: their recurrent states.
        draft: KV of native MTP's draft.
        ring: KV that the windowed draft holds for them; None where windowed MTP is refused.
        ring_pool: all that the ring pool takes: rings of `max_num_seqs` requests, their tokens in
            flight, and rings kept for later turns; None also where it does not fit.
        native_capacity: tokens that the KV cache has room for with native MTP; None where not even one
            sequence fits.
        windowed_capacity: with windowed MTP; None also where it is refused.

    """

    weights: float
    kv: float
    target: float
    states: float
    draft: float
    ring: float | None
    ring_pool: float | None
    native_capacity: int | None
    windowed_capacity: int | None

    @property
    def room(self) -> int:
        """Tokens that there is room for at most, with either method."""
        return max(self.native_capacity or 0, self.windowed_capacity or 0)

    @property
    def tax(self) -> float:
        """The draft's share of the KV that grows with the context."""
        return self.draft / (self.draft + self.target)


@dataclass(frozen=True)
class Anatomy:
    """A model, as one GPU has it.

    Args:
        architecture: of the target.
        params: weights of target and MTP head on all GPUs.
        target: what a pass of the target reads.
        draft: what a pass of the draft reads.
        draft_reads: tokens at most that a pass of the windowed draft reads of a sequence.
        memory: see there.
        refusal: why windowed MTP would be refused; empty where it would run.

    """

    architecture: str
    params: int
    target: Part
    draft: Part
    draft_reads: int
    memory: Memory
    refusal: str


@dataclass(frozen=True)
class Question:
    """A model and what is asked of it.

    Args:
        config: the model's `config.json`.
        engine_arguments: of vLLM's `LLM`, with `max_model_len` and perhaps `tensor_parallel_size`.
        speculative_config: one of windowed MTP, with window and sink.
        batch: sequences of the maximum length that are asked for.
        weight_bits: bits a weight; embeddings and output head have 16.
        gpu_bytes: memory of a GPU for weights and KV.
        kv_bytes: memory of a GPU for KV, or None for what the weights leave of `gpu_bytes`.
        draft_config: `config.json` of a draft that is a checkpoint of its own.

    """

    config: dict[str, Any]
    engine_arguments: dict[str, Any]
    speculative_config: dict[str, Any]
    batch: int
    weight_bits: float
    gpu_bytes: float
    kv_bytes: float | None = None
    draft_config: dict[str, Any] | None = None


def study(questions: Sequence[Question]) -> list[Anatomy]:
    """Build each model and plan its KV.

    Raises:
        ValueError: vLLM does not know a model or its MTP head, or refuses the arguments.
        ChildFailed: anything else went wrong; the message is the log.

    """
    found = child.call(
        "wmtp_vllm.planner.dissection",
        {"questions": [asdict(question) for question in questions]},
        child.ENVIRONMENT | ENVIRONMENT,
    )
    return [_anatomy(values) for values in found]


def _anatomy(values: dict[str, Any]) -> Anatomy:
    if "error" in values:
        raise ValueError(values["error"])
    parts = {name: _part(values[name]) for name in ("target", "draft")}
    return Anatomy(**values | parts | {"memory": Memory(**values["memory"])})


def _part(values: dict[str, Any]) -> Part:
    kinds = {
        "experts": tuple(Experts(**e) for e in values["experts"]),
        "attention": tuple(Attention(**a) for a in values["attention"]),
    }
    return Part(**values | kinds)
