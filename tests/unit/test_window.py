"""The arithmetic of windows and rings, against what they promise, over all small cases' corners."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmtp_vllm.window import Window, ceil_div

pytestmark = pytest.mark.unit

windows = st.builds(
    Window,
    size=st.integers(1, 300),
    sink=st.integers(0, 150),
    block_size=st.sampled_from([1, 2, 3, 16, 32, 64]),
)
lengths = st.integers(1, 3000)


def visible_tokens(window: Window, length: int, query_len: int) -> set[int]:
    """Positions in the kept blocks, by the definition of a block."""
    b = window.block_size
    kept = window.kept_blocks(length, query_len)
    return {p for block in kept for p in range(block * b, min((block + 1) * b, length))}


@given(windows, lengths, st.integers(1, 400))
def test_every_query_sees_the_sink_its_window_and_its_own_step(window, length, query_len):
    query_len = min(query_len, length)
    visible = visible_tokens(window, length, query_len)
    assert set(range(min(window.sink, length))) <= visible
    for query in range(length - query_len, length):
        assert set(range(max(0, query - window.size + 1), query + 1)) <= visible


@given(windows, lengths, st.integers(1, 400))
def test_no_more_is_kept_than_the_bounds_say(window, length, query_len):
    query_len = min(query_len, length)
    kept = window.kept_blocks(length, query_len)
    assert kept == sorted(set(kept))
    assert len(kept) <= window.max_kept_blocks(query_len)
    assert len(visible_tokens(window, length, query_len)) <= window.max_compact_length(query_len)


@given(windows, lengths, st.integers(1, 400))
def test_the_number_of_tokens_kept_is_that_of_the_kept_blocks(window, length, query_len):
    query_len = min(query_len, length)
    assert window.num_kept(length, query_len) == len(visible_tokens(window, length, query_len))


@given(windows, lengths)
def test_a_draft_step_reads_at_most_sink_window_and_two_blocks(window, length):
    read = len(visible_tokens(window, length, query_len=1))
    assert read <= window.sink + window.size + 2 * window.block_size


@given(windows, lengths, st.integers(1, 400), st.data())
def test_the_compact_table_lists_exactly_the_kept_blocks_that_are_held(
    window, length, query_len, data
):
    query_len = min(query_len, length)
    num_blocks = ceil_div(length, window.block_size)
    first_new = (length - query_len) // window.block_size
    row = [data.draw(st.integers(0, 3)) * 1000 + i + 1 for i in range(num_blocks)]
    nulls = data.draw(st.sets(st.integers(0, first_new - 1))) if first_new else set()
    row = [0 if i in nulls else block for i, block in enumerate(row)]
    ids, compact_length = window.compact_table(row, length, query_len)
    assert ids == [row[i] for i in window.kept_blocks(length, query_len) if i not in nulls]
    held = {
        p for p in visible_tokens(window, length, query_len) if p // window.block_size not in nulls
    }
    assert compact_length == len(held)


@given(windows, lengths, st.integers(0, 400))
def test_what_may_be_freed_is_never_read_again(window, processed, ahead):
    freed_below = window.first_window_block(processed)
    for query_len in (1, 8):
        length = processed + ahead + query_len
        later = window.kept_blocks(length, query_len)
        assert not [b for b in later if window.sink_blocks <= b < freed_below]


@given(windows, st.integers(0, 2000), st.integers(1, 10), st.integers(0, 300))
def test_the_budget_covers_what_a_request_must_hold_at_every_alignment(
    window, processed, k, in_flight
):
    allocated_tokens = processed + in_flight + k
    held = window.kept_blocks(allocated_tokens, allocated_tokens - processed)
    max_model_len = 10_000
    assert len(held) <= window.max_held_blocks(k, in_flight, max_model_len)


@pytest.mark.parametrize(("size", "sink", "block"), [(0, 0, 16), (1, -1, 16), (1, 0, 0)])
def test_nonsense_is_refused(size, sink, block):
    with pytest.raises(ValueError, match="not a window"):
        Window(size, sink, block)


def test_a_row_without_any_block_has_as_many_tokens_as_queries():
    """vLLM's dummy runs have such rows; fewer keys than queries would be nonsense to a kernel."""
    assert Window(size=6, sink=5, block_size=4).compact_table([0] * 6, 21, 1) == ([], 1)


def test_a_window_by_hand():
    # b = 4, S = 5 (blocks 0, 1), W = 6: the query at 20 sees 15..20, which begin in block 3.
    window = Window(size=6, sink=5, block_size=4)
    assert window.kept_blocks(length=21, query_len=1) == [0, 1, 3, 4, 5]
    assert window.compact_table([9, 8, 7, 6, 5, 4], 21, 1) == ([9, 8, 6, 5, 4], 17)
    assert window.compact_table([9, 0, 7, 6, 5, 4], 21, 1) == ([9, 6, 5, 4], 13)
