"""From a model's anatomy and a GPU to steps, best depths and window, and advice."""

from dataclasses import dataclass, replace

from wmtp_vllm.planner import roofline
from wmtp_vllm.planner.anatomy import Anatomy
from wmtp_vllm.planner.hardware import GPU
from wmtp_vllm.planner.roofline import Constants, Step, Workload

DEPTHS = range(1, 10)
SIZES = (1024, 2048, 4096)
"""W + S, in tokens, among which one is advised; more gained no acceptance in the paper's sweep."""
NO_MATTER = 0.03
"""Share of a step by which a larger window may make it longer, and is still advised."""
CONTEXTS = (4096, 16_384, 65_536, 262_144, 1_048_576)
BATCHES = (1, 8, 64)
WORTH_IT = 0.05
"""Least predicted win at which windowed MTP is advised for speed."""


@dataclass(frozen=True)
class Plan:
    """Everything predicted; `native` and `windowed` are steps of K drafts, `plain` one of none."""

    anatomy: Anatomy
    load: Workload
    acceptance: float
    plain: Step
    native: Step
    windowed: Step
    best_native: int
    best_windowed: int
    best_window: int
    wins: dict[int, dict[int, float]]
    """by context and batch"""

    @property
    def win(self) -> float:
        """Native step cost over windowed, less 1."""
        return self.native.seconds / self.windowed.seconds - 1


def predict(
    anatomy: Anatomy,
    gpu: GPU,
    load: Workload,
    *,
    sink: int,
    weight_bits: float,
    acceptance: float = 0.8,
    constants: Constants | None = None,
) -> Plan:
    """Predict the steps of a studied model, the best depths and window, and how the win varies.

    Args:
        anatomy: of the model.
        gpu: on which it runs.
        load: what is decoded.
        sink: S in tokens.
        weight_bits: bits a weight.
        acceptance: chance of a draft once those before it were accepted.
        constants: of the roofline; by default those that were fitted.

    """
    constants = constants or Constants()

    def steps(at: Workload, reads: int) -> Step:
        reads = min(reads, at.context)
        return roofline.step(anatomy.target, anatomy.draft, at, reads, gpu, weight_bits, constants)

    def best(reads: int) -> int:
        seconds = [(k, steps(replace(load, k=k), reads).seconds) for k in DEPTHS]
        return roofline.best_depth(seconds, acceptance)

    def win(context: int, batch: int) -> float:
        at = replace(load, context=context, batch=batch)
        return steps(at, context).seconds / steps(at, anatomy.draft_reads).seconds - 1

    sizes = [n for n in SIZES if n > sink] or [SIZES[-1] + sink]
    by_window = {n - sink: steps(load, n).seconds for n in sizes}
    cheapest = min(by_window.values())
    return Plan(
        anatomy,
        load,
        acceptance,
        plain=steps(replace(load, k=0), 0),
        native=steps(load, load.context),
        windowed=steps(load, anatomy.draft_reads),
        best_native=best(load.context),
        best_windowed=best(anatomy.draft_reads),
        best_window=max(w for w, s in by_window.items() if s <= cheapest * (1 + NO_MATTER)),
        wins={c: {b: win(c, b) for b in BATCHES} for c in CONTEXTS},
    )


def advice(plan: Plan) -> list[str]:
    """What the prediction means, in sentences."""
    anatomy, memory, load = plan.anatomy, plan.anatomy.memory, plan.load
    if memory.kv <= 0:
        return ["The weights do not fit: take more GPUs, or fewer bits a weight."]
    lines = _on_room(plan)
    if anatomy.refusal:
        lines.append(f"windowed_mtp would be refused: {anatomy.refusal}")
        return [*lines, f"(If it ran, a native step would cost {100 * plan.win:.1f}% more.)"]
    if load.context <= anatomy.draft_reads:
        lines.append("Not worth it: the window covers the whole context and never acts.")
    elif plan.win >= WORTH_IT:
        lines.append(
            f"Worth it: a native step costs {100 * plan.win:.1f}% more than a windowed one. It pays as "
            f"long as the acceptance length stays above {100 / (1 + plan.win):.0f}% of native's."
        )
    else:
        lines.append(
            f"Not worth it for speed: a native step costs {100 * plan.win:.1f}% more, less than inputs "
            "differ from each other."
        )
    k, rate = load.k, plan.acceptance
    length = roofline.acceptance_length(rate, k)
    native, windowed = (
        plan.plain.seconds * length / step.seconds for step in (plan.native, plan.windowed)
    )
    lines.append(
        f"At an acceptance of {rate:g} a draft (AL {length:.2f} at K={k}) speed over no speculation, at "
        f"best: native {native:.2f}x, windowed {windowed:.2f}x; best K: native {plan.best_native}, "
        f"windowed {plan.best_windowed}."
    )
    lines.append(
        f"Largest window that costs less than {100 * NO_MATTER:.0f}% more than the smallest: "
        f"W={plan.best_window}."
    )
    return lines


def _on_room(plan: Plan) -> list[str]:
    """Whether the load fits, and what windowed MTP changes in that."""
    memory, load = plan.anatomy.memory, plan.load
    asked = load.batch * load.context
    native, windowed = memory.native_capacity or 0, memory.windowed_capacity or 0
    if asked > memory.room:
        return [
            f"{load.batch} x {load.context:,} tokens do not fit at once: there is room for "
            f"{memory.room:,}."
        ]
    if windowed and asked > native:
        return [f"It fits with windowed MTP only: native MTP has room for {native:,} tokens."]
    if windowed and (gained := windowed / native - 1) < 0.005:
        return [
            f"No tokens are gained ({100 * gained:+.1f}%): the ring pool has room for max_num_seqs "
            "requests, and takes what native MTP would have taken. Lower max_num_seqs."
        ]
    return [f"{100 * (windowed / native - 1):.1f}% more tokens fit."] if windowed else []
