"""Engines that are up at once work one at a time, by turns, at the same answer."""

import pytest

from wmtp_vllm.bench import turns
from wmtp_vllm.child import ChildFailed

pytestmark = pytest.mark.unit

MODULE = "tests.support.turn_taker"


@pytest.fixture
def said(tmp_path):
    return tmp_path / "said"


def request(name, answers, said, **more):
    return {"name": name, "answers": answers, "file": str(said), **more}


def test_arms_alternate_step_by_step_and_who_is_through_with_an_answer_waits(said):
    found = turns.play(MODULE, [request("a", [2, 3], said), request("b", [4, 1], said)])
    assert found == ["a is through", "b is through"]
    assert said.read_text().split() == ["a0", "b0", "a0", "b0", "b0", "b0", "a1", "b1", "a1", "a1"]


def test_an_arm_that_has_less_to_answer_does_not_stop_the_others(said):
    found = turns.play(MODULE, [request("a", [], said), request("b", [2, 2], said)])
    assert found == ["a is through", "b is through"]
    assert said.read_text().split() == ["b0", "b0", "b1", "b1"]


def test_an_arm_that_fails_fails_the_run_with_its_log(said):
    failing = request("a", [1], said, fails=True)
    with pytest.raises(ChildFailed, match="planted"):
        turns.play(MODULE, [failing, request("b", [1, 3], said)])


def test_an_arm_that_does_not_even_start_fails_the_run(said):
    with pytest.raises(ChildFailed, match="KeyError"):
        turns.play(MODULE, [{}, request("b", [1], said)])


def test_without_others_it_is_always_its_turn():
    alone = turns.Turns()
    alone.pass_on(within_an_answer=True)
    assert not alone.are_taken
