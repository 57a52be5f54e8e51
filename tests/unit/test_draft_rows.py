"""Which rows of a batch the draft runs on, and what goes with them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wmtp_vllm.draft_prefill import Rows, multimodal_rows, rows_to_run
from wmtp_vllm.window import Window

pytestmark = pytest.mark.unit


@st.composite
def batches(draw):
    window = Window(
        draw(st.integers(1, 80)), draw(st.integers(0, 40)), draw(st.sampled_from([1, 16]))
    )
    requests = draw(
        st.lists(
            st.tuples(st.integers(1, 300), st.integers(0, 299), st.integers(1, 200)),
            min_size=1,
            max_size=5,
        )
    )
    # Prefill length, computed tokens, scheduled ones; past the prefill a few are decoded.
    return window, [
        (p, min(c, p + 20), min(n, p - c) if c < p else 1 + n % 8) for p, c, n in requests
    ]


@given(batches())
@settings(max_examples=300, deadline=None)
def test_every_row_that_is_read_is_kept_and_each_request_keeps_its_last(batch):
    window, requests = batch
    prefill, computed, scheduled = map(np.array, zip(*requests, strict=True))
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    rows = rows_to_run(window, starts, computed, prefill)
    kept = set(range(starts[-1])) if rows is None else set(rows.kept.tolist())
    needed = set()
    for p, c, start, n in zip(prefill, computed, starts, scheduled, strict=False):
        unread = window.unread_blocks(int(p))
        for i in range(n):
            if c >= p or (c + i) // window.block_size not in unread:
                needed.add(start + i)
    assert needed <= kept
    if rows is not None and len(rows.kept):
        assert set((starts[1:] - 1).tolist()) <= kept
        for i, (first, last) in enumerate(zip(rows.starts, rows.starts[1:], strict=False)):
            mine = rows.kept[first:last]
            assert (np.diff(mine) == 1).all(), "one piece, as input ids are shifted by one"
            assert mine[-1] == starts[i + 1] - 1
    if not kept:
        assert not needed


def test_a_batch_that_nobody_reads_is_left_out_whole_and_a_decode_in_it_keeps_all_last_rows():
    window = Window(64, 16, 16)
    starts = np.array([0, 100, 200], np.int32)
    nobody = rows_to_run(window, starts, np.array([100, 200]), np.array([5000, 5000]))
    assert nobody is not None
    assert len(nobody.kept) == 0
    mixed = rows_to_run(
        window, np.array([0, 100, 104], np.int32), np.array([100, 900]), np.array([5000, 800])
    )
    assert mixed is not None
    assert mixed.kept.tolist() == [99, 100, 101, 102, 103]
    assert mixed.starts.tolist() == [0, 1, 5]


def test_embeddings_go_with_the_rows_that_they_stand_for():
    has = torch.tensor([False, True, True, False, True, True])
    embeddings = [torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0], [5.0]])]
    rows = Rows(np.array([2, 3, 5]), np.array([0, 3], np.int32))
    found = multimodal_rows((embeddings, has), rows)
    assert found is not None
    assert torch.cat(found[0]).flatten().tolist() == [2.0, 5.0]
    assert found[1].tolist() == [True, False, True]
    none_left = multimodal_rows((embeddings, has), Rows(np.array([3]), np.array([0, 1], np.int32)))
    assert none_left is not None
    assert none_left[0] == []
    assert multimodal_rows(([], torch.zeros(6, dtype=torch.bool)), rows) is not None
    assert multimodal_rows(None, rows) is None
