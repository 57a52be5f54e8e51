"""Four plots of what a benchmark found."""

from pathlib import Path
from typing import Any

from wmtp_vllm.bench.report import Results

Lines = dict[str, list[tuple[float, float]]]
"""Points (x, y) by the label of their line."""


def draw_all(results: Results, folder: Path, middle: int) -> list[Path]:
    """Draw step cost and win against the context, and at one context AL and TPOT against W and K.

    Args:
        results: of a benchmark; a plot of which there is no line to show is left out.
        folder: for the files.
        middle: the context at which windows and depths are compared, in tokens.

    Raises:
        ImportError: there is no matplotlib.

    """
    cells = {arm: results.cells([arm]) for arm in results.runs}
    step_cost: Lines = {
        a.title: [(c.context, 1000 * c.step_cost) for c in cs] for a, cs in cells.items()
    }
    win: Lines = {
        a.title: [(c.context, 100 * w) for c in cs if (w := results.win(c)) is not None]
        for a, cs in cells.items()
    }
    context = "context, tokens"
    drawn = [
        _draw(folder / "step_cost.png", [("step cost, ms", step_cost)], context, is_log=True),
        _draw(folder / "win.png", [("win over native MTP, %", win)], context, is_log=True),
        _draw(
            folder / "acceptance_by_window.png",
            [(f"acceptance length at {middle:,} tokens", _by_window(results, middle))],
            "window W, tokens",
            is_log=True,
        ),
        _draw(
            folder / "by_depth.png",
            [
                (f"acceptance length at {middle:,} tokens", _by_depth(results, middle, "AL")),
                (f"TPOT at {middle:,} tokens, ms", _by_depth(results, middle, "TPOT")),
            ],
            "depth K, tokens",
            is_log=False,
        ),
    ]
    return [file for file in drawn if file]


def _by_window(results: Results, middle: int) -> Lines:
    """Acceptance over W, a line for each S; native MTP's, which has no window, is level."""
    at_middle = [cell for arm in results.runs if (cell := results.cell(arm, middle))]
    deepest = max((cell.arm.k for cell in at_middle), default=0)
    lines: Lines = {}
    for cell in at_middle:
        arm = cell.arm
        if arm.window and arm.kv == "ring" and arm.k == deepest:
            points = lines.setdefault(f"windowed, K={arm.k}, S={arm.sink}", [])
            points.append((arm.window, cell.acceptance_length))
    windows = sorted({w for points in lines.values() for w, _ in points})
    for cell in at_middle:
        if cell.arm.method == "mtp" and cell.arm.k == deepest and len(windows) > 1:
            ends = (windows[0], windows[-1])
            lines[cell.arm.title] = [(w, cell.acceptance_length) for w in ends]
    return lines


def _by_depth(results: Results, middle: int, of: str) -> Lines:
    """AL or TPOT (ms) over K: native MTP's, and the headline window's."""
    widest = max((arm.window for arm in results.runs), default=0)
    sink = max((arm.sink for arm in results.runs), default=0)
    lines: Lines = {}
    for arm in results.runs:
        cell = results.cell(arm, middle)
        is_headline = (arm.window, arm.sink, arm.kv) == (widest, sink, "ring")
        if cell and arm.k and (arm.method == "mtp" or is_headline):
            title = "native MTP" if arm.method == "mtp" else f"windowed, W={widest}, S={sink}"
            y = cell.acceptance_length if of == "AL" else 1000 * cell.tpot
            lines.setdefault(title, []).append((arm.k, y))
    return lines


def _draw(file: Path, panels: list[tuple[str, Lines]], xlabel: str, is_log: bool) -> Path | None:
    """One figure of panels beside each other; None where no line has two points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kept = [
        (ylabel, {label: sorted(ps) for label, ps in lines.items() if len(ps) > 1})
        for ylabel, lines in panels
    ]
    if not any(lines for _, lines in kept):
        return None
    figure, axes = pyplot.subplots(
        1, len(kept), figsize=(7 * len(kept) ** 0.5, 4.5), layout="constrained", squeeze=False
    )
    for panel, (ylabel, lines) in zip(axes[0], kept, strict=True):
        _fill(panel, lines, is_log)
        panel.set(xlabel=xlabel, ylabel=ylabel)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file


def _fill(panel: Any, lines: Lines, is_log: bool) -> None:
    for label, points in lines.items():
        panel.plot(*zip(*points, strict=True), marker="o", label=label)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    if is_log:
        panel.set_xscale("log", base=2)
        panel.minorticks_off()
    panel.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    panel.set_ylim(bottom=min(0, panel.get_ylim()[0]))
    panel.grid(alpha=0.3)
    panel.legend()
