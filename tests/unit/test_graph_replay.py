"""What a CUDA graph would replay: only the in-graph update, over persistent inputs that changed.

Metadata is built once, as at capture. Then lengths and tables change in place, only
`update_draft_decode_metadata` runs, and what the metadata holds is compared with a fresh build's.
"""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from wmtp_vllm.attention_backends import windowed
from wmtp_vllm.attention_backends.windowed import windowed_backend
from wmtp_vllm.window import Window, ceil_div

# In the V2 process the compact table is the Triton kernel's.
pytestmark = [pytest.mark.unit, pytest.mark.v2]

MAX_REQS, MAX_LEN, BLOCK = 6, 4096, 16
STATES = 60 if HAS_TRITON else 500


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch):
    """Where there are graphs nobody looks whether there is anything to leave out."""
    monkeypatch.setattr(windowed, "LENGTHS_ARE_ON_HOST", False)


@dataclass
class NativeMetadata:
    """What a native builder hands its kernel: references, and something that it derives."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    pages: torch.Tensor


class NativeBuilder(AttentionMetadataBuilder[NativeMetadata]):
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.pages = torch.zeros(MAX_REQS, dtype=torch.int32)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = NativeMetadata(
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.seq_lens,
            common_attn_metadata.max_seq_len,
            self.pages[: common_attn_metadata.num_reqs],
        )
        NativeBuilder.update_draft_decode_metadata(self, metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata):
        metadata.pages.copy_((metadata.seq_lens + BLOCK - 1) // BLOCK)


class NativeBackend(AttentionBackend):
    get_name = staticmethod(lambda: "TRITON_ATTN")
    get_builder_cls = staticmethod(lambda: NativeBuilder)
    get_impl_cls = staticmethod(lambda: None)


class Inputs:
    """A speculator's persistent tensors, and the logical metadata over them."""

    def __init__(self) -> None:
        columns = ceil_div(MAX_LEN, BLOCK)
        self.table = torch.zeros(MAX_REQS, columns, dtype=torch.int32)
        self.seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.starts = torch.arange(MAX_REQS + 1, dtype=torch.int32)

    def randomize(self, rng: random.Random, active: int) -> None:
        """A random state: lengths, tables with cold starts, padding rows behind `active`."""
        self.table.random_(1, 10_000)
        self.seq_lens.zero_()
        for row in range(active):
            length = rng.randrange(1, MAX_LEN)
            self.seq_lens[row] = length
            self.table[row, : rng.choice([0, rng.randrange(0, (length - 1) // BLOCK + 1)])] = 0

    def logical(self) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts,
            seq_lens=self.seq_lens,
            num_reqs=MAX_REQS,
            num_actual_tokens=MAX_REQS,
            max_query_len=1,
            max_seq_len=MAX_LEN,
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(MAX_REQS, dtype=torch.int64),
            seq_lens_cpu_upper_bound=torch.full((MAX_REQS,), MAX_LEN, dtype=torch.int32),
        )


def builder_for(window: Window):
    backend = windowed_backend(NativeBackend, window.size, window.sink, 1)
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
    )
    spec = SimpleNamespace(block_size=BLOCK)
    return backend.get_builder_cls()(spec, ["draft"], vllm_config, torch.device("cpu"))


@pytest.mark.parametrize("window", [Window(256, 64, BLOCK), Window(70, 0, BLOCK)], ids=str)
def test_a_replayed_update_leaves_what_a_fresh_build_would(window):
    rng = random.Random(0)
    torch.manual_seed(0)
    inputs, captured = Inputs(), builder_for(window)
    inputs.randomize(rng, MAX_REQS)
    metadata = captured.build_for_drafting(inputs.logical(), draft_index=1)
    addresses = [metadata.block_table.data_ptr(), metadata.seq_lens.data_ptr()]
    for _ in range(STATES // 2):
        inputs.randomize(rng, active=rng.randrange(1, MAX_REQS + 1))
        captured.update_draft_decode_metadata(metadata)
        fresh = builder_for(window).build_for_drafting(inputs.logical(), draft_index=1)
        assert torch.equal(metadata.block_table, fresh.block_table)
        assert torch.equal(metadata.seq_lens, fresh.seq_lens)
        assert torch.equal(metadata.pages, fresh.pages)
        assert metadata.max_seq_len == fresh.max_seq_len >= int(metadata.seq_lens.max())
        assert [metadata.block_table.data_ptr(), metadata.seq_lens.data_ptr()] == addresses
        for row in range(MAX_REQS):
            length = int(inputs.seq_lens[row])
            if length:
                ids, tokens = window.compact_table(inputs.table[row].tolist(), length, 1)
                assert metadata.seq_lens[row] == tokens
                assert metadata.block_table[row, : len(ids)].tolist() == ids


def test_rows_keep_their_address_and_distance_whatever_the_queries():
    """A graph captured at one query length is replayed for batches of shorter queries too."""
    inputs, captured = Inputs(), builder_for(Window(256, 64, BLOCK))
    inputs.randomize(random.Random(0), MAX_REQS)
    places = set()
    for queries in (1, 8, 60):
        logical = inputs.logical().replace(max_query_len=queries)
        table = captured.build(0, logical).block_table
        places.add((table.data_ptr(), table.stride()))
    assert len(places) == 1


def test_without_the_update_the_comparison_fails():
    """Negative control: metadata that is not refreshed is stale."""
    inputs, captured = Inputs(), builder_for(Window(256, 64, BLOCK))
    inputs.randomize(random.Random(0), MAX_REQS)
    metadata = captured.build_for_drafting(inputs.logical(), draft_index=1)
    inputs.randomize(random.Random(1), MAX_REQS)
    fresh = builder_for(Window(256, 64, BLOCK)).build_for_drafting(inputs.logical(), draft_index=1)
    assert not torch.equal(metadata.block_table, fresh.block_table)
