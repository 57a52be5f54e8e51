"""The compact table: each request's kept blocks, listed in order with the gap cut out.

Two forms that agree bit for bit: `compact_table_reference`, a loop in NumPy, which is what runs on a
CPU (it is made at every draft step, and torch takes ten times as long), and one Triton kernel, one
program a request, whose work is proportional to the kept blocks whatever the context. The kernel
never synchronises with the host, reads lengths and tables from persistent device tensors and writes
persistent ones, and so can be recorded in a CUDA graph. The rule itself is
`wmtp_vllm.window.Window.compact_table`.
"""

import numpy as np
import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

from wmtp_vllm.window import Window, ceil_div


def compact_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    window: Window,
    num_null_blocks: int,
    out_table: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    """Write the compact table of every request into `out_table`, its length into `out_lens`.

    Args:
        block_table: [num_reqs, max_blocks] int32, the logical table.
        seq_lens: [num_reqs] int32, tokens a request, this step's included; 0 for a padding row.
        query_start_loc: [num_reqs + 1] int32, cumulative query lengths.
        window: in blocks of the size that `block_table` lists.
        num_null_blocks: block ids below this stand for KV that is not held, and are left out.
        out_table: [num_reqs, width] int32, each row contiguous; unused entries become 0.
        out_lens: [num_reqs] int32, tokens in the kept blocks.

    """
    if not HAS_TRITON:
        _compact_rows(
            block_table.numpy(),
            seq_lens.numpy(),
            query_start_loc.numpy(),
            out_table.numpy(),
            out_lens.numpy(),
            window,
            num_null_blocks,
        )
        return
    num_reqs, width = out_table.shape
    _compact_table_kernel[(num_reqs,)](
        block_table,
        block_table.stride(0),
        seq_lens,
        query_start_loc,
        out_table,
        out_table.stride(0),
        out_lens,
        window.size,
        window.sink_blocks,
        num_null_blocks,
        width,
        BLOCK_SIZE=window.block_size,
        CHUNK=256,
    )


def is_compact(
    block_table: torch.Tensor, seq_lens: torch.Tensor, window: Window, num_null_blocks: int
) -> bool:
    """Whether the window keeps all of every request and no block is missing; for tensors on the host.

    Arguments are those of `compact_table`. The logical table is then the compact one.
    """
    table, lens = block_table.numpy(), seq_lens.numpy()
    if window.first_window_block(int(lens.max(initial=0)) - 1) > window.sink_blocks:
        return False
    ends = (ceil_div(length, window.block_size) for length in lens.tolist())
    return all((row[:end] >= num_null_blocks).all() for row, end in zip(table, ends, strict=True))


def compact_table_reference(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    window: Window,
    num_null_blocks: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in NumPy; returns the table [num_reqs, width] and the lengths [num_reqs]."""
    table, lens, starts = (t.cpu().numpy() for t in (block_table, seq_lens, query_start_loc))
    compact, tokens = np.empty((len(table), width), table.dtype), np.empty_like(lens)
    _compact_rows(table, lens, starts, compact, tokens, window, num_null_blocks)
    device = block_table.device
    return torch.from_numpy(compact).to(device), torch.from_numpy(tokens).to(device)


def _compact_rows(
    table: np.ndarray,
    lens: np.ndarray,
    starts: np.ndarray,
    out_table: np.ndarray,
    out_lens: np.ndarray,
    window: Window,
    num_null_blocks: int,
) -> None:
    b, sink = window.block_size, window.sink_blocks
    bounds = starts.tolist()
    for row, length in enumerate(lens.tolist()):
        query_len, end = bounds[row + 1] - bounds[row], ceil_div(length, b)
        first = window.first_window_block(length - query_len)
        ids = np.concatenate((table[row, : min(sink, end)], table[row, first:end]))
        kept = ids[ids >= num_null_blocks]
        out_table[row, : len(kept)] = kept
        out_table[row, len(kept) :] = 0
        unfilled = end * b - length if end and table[row, end - 1] >= num_null_blocks else 0
        out_lens[row] = max(len(kept) * b - unfilled, min(query_len, length))


# Not compiled anew where a size is 1 or a multiple of 16: the width changes while serving, and the
# others from engine to engine.
@triton.jit(do_not_specialize=["window_size", "sink_blocks", "num_null_blocks", "width"])
def _compact_table_kernel(  # type: ignore[no-untyped-def]
    block_table,
    block_table_stride,
    seq_lens,
    query_start_loc,
    out_table,
    out_table_stride,
    out_lens,
    window_size,
    sink_blocks,
    num_null_blocks,
    width,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + row)
    query_len = tl.load(query_start_loc + row + 1) - tl.load(query_start_loc + row)
    end = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    # Triton divides towards zero, so a window that starts before token 0 is cut off there first.
    window_start = tl.maximum(length - query_len - window_size + 1, 0)
    first = tl.maximum(window_start // BLOCK_SIZE, sink_blocks)

    source = block_table + row * block_table_stride
    target = out_table + row * out_table_stride
    num_kept = 0
    has_last = 0  # of the row's blocks, the last one is not full
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        logical = tl.where(column < sink_blocks, column, first + column - sink_blocks)
        inside = (column < width) & (logical < end)
        ids = tl.load(source + logical, mask=inside, other=0)
        keep = inside & (ids >= num_null_blocks)
        place = num_kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(target + place, ids, mask=keep)
        num_kept += tl.sum(keep.to(tl.int32), 0)
        has_last += tl.sum((keep & (logical == end - 1)).to(tl.int32), 0)
    for start in range(0, width, CHUNK):
        column = start + tl.arange(0, CHUNK)
        tl.store(target + column, 0, mask=(column >= num_kept) & (column < width))
    tokens = num_kept * BLOCK_SIZE - has_last * (end * BLOCK_SIZE - length)
    tl.store(out_lens + row, tl.maximum(tokens, tl.minimum(query_len, length)))
