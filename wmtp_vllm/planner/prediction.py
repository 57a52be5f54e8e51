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

    by_window = {n - sink: steps(load, n).seconds for n in SIZES if n > sink}
    cheapest = min(by_window.values())
    return Plan(
        anatomy,
        plain=steps(replace(load, k=0), 0),
        native=steps(load, load.context),
        windowed=steps(load, anatomy.draft_reads),
        best_native=best(load.context),
        best_windowed=best(anatomy.draft_reads),
        best_window=max(w for w, s in by_window.items() if s <= cheapest * (1 + NO_MATTER)),
        wins={c: {b: win(c, b) for b in BATCHES} for c in CONTEXTS},
    )


def advice(plan: Plan, context: int, k: int, acceptance: float) -> list[str]:
    """What the prediction means, in sentences."""
    anatomy, memory = plan.anatomy, plan.anatomy.memory
    if anatomy.refusal:
        return [
            f"windowed_mtp would be refused: {anatomy.refusal}",
            f"(if it ran: {100 * plan.win:+.1f}% a step.)",
        ]
    gained = 0.0
    if memory.native_capacity and memory.windowed_capacity:
        gained = memory.windowed_capacity / memory.native_capacity - 1
    lines = []
    if context <= anatomy.draft_reads:
        lines.append("Not worth it: the window covers the whole context and never acts.")
    elif plan.win >= WORTH_IT:
        lines.append(
            f"Worth it: a native step costs {100 * plan.win:.1f}% more than a windowed one, and "
            f"{100 * gained:.1f}% more tokens fit. It pays as long as the acceptance length stays above "
            f"{100 / (1 + plan.win):.0f}% of native's."
        )
    else:
        lines.append(
            f"Not worth it for speed: {100 * plan.win:+.1f}% a step, less than a change of input makes. "
            f"{100 * gained:+.1f}% tokens fit."
        )
    lengths = {depth: roofline.acceptance_length(acceptance, depth) for depth in (0, k)}
    plain = plan.plain.seconds
    lines.append(
        f"At an acceptance of {acceptance:g} a draft (AL {lengths[k]:.2f} at K={k}) speed over no "
        f"speculation, at best: native {plain * lengths[k] / plan.native.seconds:.2f}x, windowed "
        f"{plain * lengths[k] / plan.windowed.seconds:.2f}x; best K: native {plan.best_native}, "
        f"windowed {plan.best_windowed}."
    )
    lines.append(
        f"Largest window that costs less than {100 * NO_MATTER:.0f}% more than the smallest: "
        f"W={plan.best_window}."
    )
    return lines
