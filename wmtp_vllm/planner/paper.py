"""The paper's figures (arXiv 2607.21535), and the planner's beside them.

`python -m wmtp_vllm.planner.paper` prints the tables of docs/reproduction.md. The two constants of the
roofline are fitted to what is reported at 261K tokens alone; everything at 1M tokens is predicted.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wmtp_vllm.config import METHOD
from wmtp_vllm.planner import hardware, models
from wmtp_vllm.planner.anatomy import Anatomy, Question, study
from wmtp_vllm.planner.prediction import predict
from wmtp_vllm.planner.roofline import Constants, Workload

GPU = hardware.GPUS["B200"]
WINDOW, SINK, WEIGHT_BITS = 4032, 64, 4.5
K = 6
"""Drafted tokens: the paper's depth d = 7 counts the verified token too (6 draft passes)."""
SHORT, LONG = 261_000, 1_040_000


@dataclass(frozen=True)
class Reported:
    """What is reported of a model: wins and the draft's share of KV in percent, steps in ms.

    The saving at 261K (native step less windowed) is from a reader's account of the paper's figure 3.
    """

    preset: str
    win_short: float
    saving_short: float
    win_long: float
    native_long: float
    windowed_long: float
    draft_share: float
    windowed_al: float
    """tokens a step at 1M"""
    over_plain: float
    """speed over no speculation at 1M, windowed"""


REPORTED = (
    Reported("qwen3.6-35b-a3b", 27, 3.4, 44.3, 26.4, 18.3, 9.1, 4.74, 2.55),
    Reported("qwen3.5-122b-a10b", 24, 3.5, 30.2, 34.5, 26.5, 7.7, 4.74, 1.75),
    Reported("nemotron-3-super-120b-a12b", 17, 3.2, 28.3, 33.1, 25.8, 11.1, 3.61, 1.58),
)


@dataclass(frozen=True)
class Predicted:
    """Steps in milliseconds."""

    plain: float
    native: float
    windowed: float

    @property
    def win(self) -> float:
        """Percent."""
        return 100 * (self.native / self.windowed - 1)


def predicted(
    anatomy: Anatomy, context: int, constants: Constants, gpu: hardware.GPU = GPU
) -> Predicted:
    """The paper's set-up at `context` tokens: one B200, one sequence."""
    load = Workload(context, batch=1, k=K)
    plan = predict(anatomy, gpu, load, sink=SINK, weight_bits=WEIGHT_BITS, constants=constants)
    steps = (plan.plain, plan.native, plan.windowed)
    return Predicted(*(1e3 * step.seconds for step in steps))


def anatomies() -> dict[str, Anatomy]:
    """The presets as the paper ran them."""
    speculative = {
        "method": METHOD,
        "num_speculative_tokens": K,
        "draft_window_size": WINDOW,
        "draft_sink_size": SINK,
    }
    engine = {"max_model_len": LONG, "max_num_seqs": 1}
    questions = [
        Question(
            models.find(reported.preset).config, engine, speculative, 1, WEIGHT_BITS, GPU.memory
        )
        for reported in REPORTED
    ]
    names = [reported.preset for reported in REPORTED]
    return dict(zip(names, study(questions), strict=True))


def fit(studied: dict[str, Anatomy], gpu: hardware.GPU = GPU) -> Constants:
    """The constants with the least squares of relative errors, of wins and savings at 261K."""

    def error(constants: Constants) -> float:
        total = 0.0
        for reported in REPORTED:
            found = predicted(studied[reported.preset], SHORT, constants, gpu)
            total += (found.win / reported.win_short - 1) ** 2
            total += ((found.native - found.windowed) / reported.saving_short - 1) ** 2
        return total

    best, spread = Constants(0.15, 40e-6), 1.5
    while spread > 1.001:  # a shrinking grid around the best so far
        best = min(_around(best, spread), key=error)
        spread **= 0.5
    return best


def _around(constants: Constants, spread: float) -> Iterator[Constants]:
    factors = [spread**i for i in range(-4, 5)]
    for a in factors:
        for b in factors:
            yield Constants(constants.attention_efficiency * a, constants.layer_seconds * b)


def main() -> int:
    """Print the tables."""
    studied = anatomies()
    constants = fit(studied)
    print(
        f"fitted at 261K: attention efficiency {constants.attention_efficiency:.3f}, "
        f"{1e6 * constants.layer_seconds:.1f} us a layer and pass"
    )

    def at(reported: Reported, context: int) -> Predicted:
        return predicted(studied[reported.preset], context, constants)

    def given_back(reported: Reported) -> float:
        memory = studied[reported.preset].memory
        return 1 - (memory.ring or memory.draft) / memory.draft

    _table(
        ["draft's share of KV: paper", "planner", "given back at 1M by a request's ring"],
        lambda r: [
            f"{r.draft_share}%",
            f"{100 * studied[r.preset].memory.tax:.1f}%",
            f"{100 * given_back(r):.1f}%",
        ],
    )
    _table(
        ["win at 261K: paper", "fit", "win at 1M: paper", "predicted", "error, points"],
        lambda r: [
            f"+{r.win_short}%",
            f"{at(r, SHORT).win:+.1f}%",
            f"+{r.win_long}%",
            f"{at(r, LONG).win:+.1f}%",
            f"{at(r, LONG).win - r.win_long:+.1f}",
        ],
    )
    _table(
        ["saving at 261K, ms: paper", "fit", "steps at 1M, ms: paper", "predicted"],
        lambda r: [
            str(r.saving_short),
            f"{at(r, SHORT).native - at(r, SHORT).windowed:.1f}",
            f"{r.native_long} -> {r.windowed_long}",
            f"{at(r, LONG).native:.1f} -> {at(r, LONG).windowed:.1f}",
        ],
    )
    _table(
        ["AL at 1M, measured", "over no speculation: paper", "predicted"],
        lambda r: [
            str(r.windowed_al),
            f"{r.over_plain}x",
            f"{at(r, LONG).plain * r.windowed_al / at(r, LONG).windowed:.2f}x",
        ],
    )
    return 0


def _table(columns: list[str], row: Callable[[Reported], list[str]]) -> None:
    lines = [["model", *columns], ["---"] * (len(columns) + 1)]
    lines += [[reported.preset, *row(reported)] for reported in REPORTED]
    print("\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
