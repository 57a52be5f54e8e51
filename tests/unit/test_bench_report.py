"""What a benchmark says of what it measured: medians, ratios, a table, JSON and plots."""

import argparse
import json

import pytest

from wmtp_vllm.bench import plots, report
from wmtp_vllm.bench.arms import Arm, Measurement, Run
from wmtp_vllm.bench.command import _arms, _at_once, _measure_server, add_arguments
from wmtp_vllm.config import METHOD

pytestmark = pytest.mark.unit

NONE, NATIVE, WINDOWED = Arm("none"), Arm("mtp", 3), Arm(METHOD, 3, 512, 64)


def measured(
    context: int, tpot: float, drafts: int = 0, accepted: int = 0, draft_phase: float = 0.0
) -> Measurement:
    """An answer of as many tokens as its steps brought, and the prompt's one."""
    generated = 1 + (drafts + accepted or 64)
    return Measurement(context, generated, 0.5, tpot, drafts, accepted, [], draft_phase)


@pytest.fixture
def results() -> report.Results:
    found = report.Results()
    # Three rounds at 1,000 tokens, the middle one an outlier; one at 8,000.
    for tpot in (0.010, 0.050, 0.012):
        found.add(NONE, Run([measured(1000, tpot)], 100, 1 << 20, "CPU"))
        found.add(NATIVE, Run([measured(1000, tpot, 20, 40)], 80, 1 << 20, "CPU"))
        found.add(WINDOWED, Run([measured(1000, tpot / 2, 20, 20)], 95, 1 << 20, "CPU"))
    found.add(NATIVE, Run([measured(8000, 0.030, 20, 40, 0.050)], 80, 1 << 20, "CPU"))
    found.add(WINDOWED, Run([measured(8000, 0.030, 20, 20, 0.010)], 95, 1 << 20, "CPU"))
    return found


def test_tokens_past_the_end_of_an_answer_do_not_lengthen_its_steps():
    # 10 steps of 8 tokens each would be 80; the answer was cut at 75.
    cut = Measurement(1000, 76, 0.5, 0.010, 10, 70, [])
    assert cut.acceptance_length == 8
    assert cut.step_cost == pytest.approx(0.075)


def test_step_cost_is_tpot_times_tokens_a_step(results):
    cell = results.cell(NATIVE, 1000)
    assert cell is not None
    assert cell.acceptance_length == 3.0
    assert cell.tpot == 0.012, "the median, not the outlier"
    assert cell.step_cost == pytest.approx(0.036)


def test_the_win_is_native_over_windowed_less_one(results):
    cell = results.cell(WINDOWED, 1000)
    assert cell is not None
    assert results.win(cell) == pytest.approx(0.036 / 0.012 - 1)
    native = results.cell(NATIVE, 1000)
    assert native is not None
    assert results.win(native) is None


def test_a_round_in_which_the_machine_is_slow_is_slow_for_both_arms():
    found = report.Results()
    # Windowed costs 0.8 of native in every round; the machine's speed changes between rounds.
    for speed in (1.0, 3.0, 1.0, 3.0):
        found.add(NATIVE, Run([measured(1000, 0.010 * speed, 20, 40)], 0, 0, "CPU"))
        found.add(WINDOWED, Run([measured(1000, 0.008 * speed, 20, 40)], 0, 0, "CPU"))
    # In a fifth something slowed one of them down.
    found.add(NATIVE, Run([measured(1000, 0.010, 20, 40)], 0, 0, "CPU"))
    found.add(WINDOWED, Run([measured(1000, 0.100, 20, 40)], 0, 0, "CPU"))
    cell = found.cell(WINDOWED, 1000)
    assert cell is not None
    assert found.win(cell) == pytest.approx(1 / 0.8 - 1)
    # Medians of each arm by itself would say otherwise.
    native = found.cell(NATIVE, 1000)
    assert native is not None
    assert cell.step_cost / native.step_cost > 2


def test_arms_of_unequally_many_rounds_are_compared_by_their_medians(results):
    results.add(WINDOWED, Run([measured(1000, 0.006, 20, 20)], 95, 0, "CPU"))
    cell = results.cell(WINDOWED, 1000)
    assert cell is not None
    assert results.ratio(cell, NATIVE, lambda m: m.tpot) == pytest.approx(0.006 / 0.012)


def test_the_table_has_ratios_before_times(results):
    header, *rows = report.table(results).splitlines()
    assert header.index("step / native") < header.index("TPOT", header.index("AL"))
    (row,) = [row for row in rows if row.lstrip().startswith("8,000  windowed")]
    assert "0.67" in row  # 0.030 x 2 over 0.030 x 3


def test_the_table_has_the_draft_phase_and_its_growth(results):
    text = report.table(results)
    (row,) = [row for row in text.splitlines() if row.lstrip().startswith("8,000  windowed")]
    assert "0.20" in row
    assert "10.0 ms" in row
    results.add(WINDOWED, Run([measured(16_000, 0.03, 20, 20, 0.012)], 95, 0, "CPU"))
    text = report.table(results)
    assert f"draft phase of {WINDOWED.title}, relative: 1.00 at 8,000, 1.20 at 16,000" in text


def test_raw_json_has_every_measurement_and_where_it_comes_from(results, tmp_path):
    document = json.loads(report.save(results, {"seed": 0}, tmp_path).read_text())
    assert sum(len(run["measurements"]) for run in document["runs"]) == 11
    assert document["provenance"]["packages"]["torch"]


def test_plots_are_drawn_of_what_has_two_points(results, tmp_path):
    files = plots.draw_all(results, tmp_path, middle=1000)
    assert [file.name for file in files] == ["step_cost.png", "win.png"]
    assert all(file.stat().st_size > 5000 for file in files)


def test_every_depth_and_window_is_run_and_the_headline_at_all_contexts():
    plan = _arms([1, 7], [128, 1024], [64])
    everywhere = [arm for arm, is_headline in plan if is_headline]
    assert everywhere == [NONE, Arm("mtp", 7), Arm(METHOD, 7, 1024, 64)]
    assert len({arm for arm, _ in plan}) == len(plan) == 7


def test_arms_of_all_contexts_take_turns_and_the_others_run_alone():
    plan = _arms([1, 7], [1024], [64])
    together, *alone = _at_once(plan, in_turns=True)
    assert together == ([NONE, Arm("mtp", 7), Arm(METHOD, 7, 1024, 64)], True)
    assert all(len(arms) == 1 and not is_headline for arms, is_headline in alone)
    assert [arms for arms, _ in _at_once(plan, in_turns=False)] == [[arm] for arm, _ in plan]


def test_turns_are_of_no_arm_where_none_is_asked_for_that_runs_at_all_contexts():
    full_kv = [(Arm(METHOD, 7, 1024, 64, "full"), False)]
    assert _at_once(full_kv, in_turns=True) == _at_once(full_kv, in_turns=False)


def test_turns_are_refused_for_a_server_that_is_measured_as_it_is():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--base-url", "http://localhost:1/v1", "--in-turns"])
    with pytest.raises(SystemExit, match="--in-turns is for engines that are started here"):
        _measure_server(options, rounds=1, max_tokens=8)


def test_arms_that_differ_in_the_sink_alone_keep_lines_of_their_own(results, tmp_path):
    without = Arm(METHOD, 3, 512, 0)
    results.add(without, Run([measured(1000, 0.02, 20, 10)], 95, 1 << 20, "CPU"))
    assert without.title != WINDOWED.title
    files = plots.draw_all(results, tmp_path, middle=1000)
    assert [file.name for file in files][:2] == ["step_cost.png", "win.png"]
