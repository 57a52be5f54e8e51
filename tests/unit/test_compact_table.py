"""The compact table in torch (and, in the V2 process, in Triton) against the naive definition."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import CommonAttentionMetadata

from wmtp_vllm.attention_backends.compact_table import (
    compact_table,
    compact_table_reference,
    is_compact,
)
from wmtp_vllm.attention_backends.windowed import Compactor
from wmtp_vllm.window import Window, ceil_div

# Without Triton `compact_table` is the reference; the V2 process runs the kernel in the interpreter.
pytestmark = [pytest.mark.unit, pytest.mark.v2]


@st.composite
def batches(draw):
    """A window, requests as (length, query length, row with nulls), and a padding row at times."""
    window = Window(
        size=draw(st.integers(1, 100)),
        sink=draw(st.integers(0, 40)),
        block_size=draw(st.sampled_from([1, 4, 16, 32])),
    )
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        query_len = draw(st.integers(1, 40))
        length = query_len + draw(st.integers(0, 400))
        computed_blocks = (length - query_len) // window.block_size
        nulls = draw(st.integers(0, computed_blocks))
        scattered = draw(st.booleans())
        row = []
        for i in range(ceil_div(length, window.block_size)):
            null = i < computed_blocks and (draw(st.booleans()) if scattered else i < nulls)
            row.append(0 if null else draw(st.integers(1, 2**31 - 1)))
        requests.append((length, query_len, row))
    return window, requests, draw(st.booleans())


def as_tensors(window, requests, padded):
    rows = [row for _, _, row in requests] + ([[]] if padded else [])
    width = max(map(len, rows)) + 3
    # What is beyond a request's blocks is another request's leavings.
    table = torch.full((len(rows), width), 77, dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lengths = [length for length, _, _ in requests] + ([0] if padded else [])
    queries = [query_len for _, query_len, _ in requests] + ([0] if padded else [])
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    columns = min(window.max_kept_blocks(max(queries)), width)
    return table, torch.tensor(lengths, dtype=torch.int32), starts, columns


def check(window, requests, padded, table, lens):
    for i, (length, query_len, row) in enumerate(requests):
        ids, compact_length = window.compact_table(row, length, query_len)
        assert lens[i] == compact_length
        assert table[i].tolist() == ids + [0] * (table.shape[1] - len(ids))
    if padded:
        assert lens[-1] == 0
        assert not table[-1].any()


@given(batches())
@settings(max_examples=300, deadline=None)
def test_the_numpy_form_is_the_definition(batch):
    window, requests, padded = batch
    block_table, seq_lens, starts, width = as_tensors(*batch)
    table, lens = compact_table_reference(block_table, seq_lens, starts, window, 1, width)
    check(window, requests, padded, table, lens)


@given(batches())
@settings(max_examples=300, deadline=None)
def test_a_table_that_is_said_to_be_compact_is_its_own_compact_table(batch):
    window = batch[0]
    block_table, seq_lens, starts, width = as_tensors(*batch)
    table, lens = compact_table_reference(block_table, seq_lens, starts, window, 1, width)
    if is_compact(block_table, seq_lens, window, 1):
        assert torch.equal(lens, seq_lens)
        for row, kept, length in zip(block_table, table, seq_lens.tolist(), strict=True):
            blocks = ceil_div(length, window.block_size)
            assert torch.equal(row[:blocks], kept[:blocks])


def test_a_table_is_compact_while_the_window_covers_it_and_nothing_is_missing():
    window = Window(size=8, sink=4, block_size=4)
    full, hole = (torch.tensor([ids], dtype=torch.int32) for ids in ([5, 6, 7, 8], [5, 0, 7, 8]))
    for length, covered in ((1, True), (15, True), (16, False)):
        lengths = torch.tensor([length])
        assert is_compact(full, lengths, window, 1) is covered
        assert is_compact(hole, lengths, window, 1) is (length <= 4)
        assert is_compact(hole, lengths, window, 0) is covered


@given(batches())
@settings(max_examples=60 if HAS_TRITON else 5, deadline=None)
def test_the_form_in_use_agrees_with_the_numpy_form_bit_for_bit(batch):
    window, requests, padded = batch
    block_table, seq_lens, starts, width = as_tensors(*batch)
    expected = compact_table_reference(block_table, seq_lens, starts, window, 1, width)
    table = torch.full((len(seq_lens), width), -1, dtype=torch.int32)
    lens = torch.full((len(seq_lens),), -1, dtype=torch.int32)
    compact_table(block_table, seq_lens, starts, window, 1, table, lens)
    assert torch.equal(table, expected[0])
    assert torch.equal(lens, expected[1])
    check(window, requests, padded, table, lens)


@pytest.mark.skipif(not HAS_TRITON, reason="without Triton the NumPy form is the one in use")
def test_two_thousand_random_tables_agree_also_of_split_blocks_and_long_rows():
    """A kernel's block may be a part of the manager's: then several ids stand for the null block."""
    rng = random.Random(0)
    differences = 0
    for launch in range(200):
        parts = rng.choice([1, 1, 2, 4])
        block_size = rng.choice([16, 32, 64])
        window = Window(rng.randrange(1, 9000), rng.choice([0, 1, 64, 500]), block_size)
        longest = 40_000 if launch % 4 == 0 else 2_000
        queries = [rng.choice([0, 1, 1, 4, 8, 700]) for _ in range(10)]
        lengths = [q and q + rng.randrange(longest) for q in queries]
        columns = ceil_div(max(lengths), block_size * parts) + 1
        manager_ids = torch.randint(1, 2**31 // parts, (10, columns))
        manager_ids *= torch.rand(10, columns) > rng.choice([0, 0.1, 0.9])
        ids = (manager_ids[..., None] * parts + torch.arange(parts)).flatten(1).int()
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        width = min(window.max_kept_blocks(max(queries)), ids.shape[1])
        expected = compact_table_reference(ids, seq_lens, starts, window, parts, width)
        # Rows a fixed distance apart, wider than what is used of them, as in the captured graphs.
        table = torch.full((10, width + 5), -1, dtype=torch.int32)
        lens = torch.full((10,), -1, dtype=torch.int32)
        compact_table(ids, seq_lens, starts, window, parts, table[:, :width], lens)
        assert (table[:, width:] == -1).all()
        same = (table[:, :width] == expected[0]).all(1) & (lens == expected[1])
        differences += int((~same).sum())
    assert differences == 0


def test_a_null_block_that_is_kept_is_caught():
    """Negative control: with no null blocks declared, the leavings behind id 0 would be attended."""
    window = Window(size=8, sink=0, block_size=4)
    block_table = torch.tensor([[5, 0, 7]], dtype=torch.int32)
    lengths, starts = torch.tensor([12]), torch.tensor([0, 1])
    table, lens = compact_table_reference(block_table, lengths, starts, window, 0, 3)
    with pytest.raises(AssertionError):
        check(window, [(12, 1, [5, 0, 7])], False, table, lens)


def test_a_window_one_block_short_is_caught():
    """Negative control: a window that begins a block late differs from the definition."""
    window, late = Window(size=8, sink=0, block_size=4), Window(size=4, sink=0, block_size=4)
    block_table = torch.tensor([[5, 6, 7]], dtype=torch.int32)
    lengths, starts = torch.tensor([12]), torch.tensor([0, 1])
    table, lens = compact_table_reference(block_table, lengths, starts, late, 1, 3)
    with pytest.raises(AssertionError):
        check(window, [(12, 1, [5, 6, 7])], False, table, lens)


def compactor(window: Window) -> Compactor:
    parts = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        model_config=SimpleNamespace(max_model_len=4096),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=0),
    )
    return Compactor(window, 1, parts, torch.device("cpu"))


@pytest.mark.skipif(HAS_TRITON, reason="on a device no step is taken for a further one")
@pytest.mark.parametrize("is_further_step", [True, False])
def test_a_further_draft_step_reads_what_a_build_anew_would(is_further_step):
    """Of the same batch a token longer, of one with another request, and across blocks."""
    rng, taken = random.Random(0), 0
    for _ in range(200):
        window = Window(rng.randrange(1, 200), rng.choice([0, 20]), 16)
        stepping, anew = compactor(window), compactor(window)
        table = torch.randint(1, 1000, (3, 256), dtype=torch.int32)
        lengths = torch.tensor([rng.randrange(1, 2000) for _ in range(3)], dtype=torch.int32)
        starts = torch.arange(4, dtype=torch.int32)
        for step in range(8):
            batch = CommonAttentionMetadata(
                *(starts, starts, lengths, 3, 3, 1, int(lengths.max()), table, starts[:3].long())
            )
            stepping.is_further_step = is_further_step and step > 0
            taken += is_further_step and stepping._is_a_token_later(lengths.tolist())
            got, expected = stepping.compact(batch), anew.compact(batch)
            assert torch.equal(got.seq_lens, expected.seq_lens)
            assert got.max_seq_len == expected.max_seq_len
            used = -(-int(got.seq_lens.max()) // 16)
            tables = got.block_table_tensor, expected.block_table_tensor
            assert torch.equal(*(table[:, :used] for table in tables))
            lengths = lengths + 1
            lengths[rng.randrange(3)] += rng.choice([0, 0, 0, 0, 5])
    assert taken > 500 or not is_further_step
