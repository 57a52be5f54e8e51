"""vLLM's own metadata builders, wrapped: of a batch they make what they make of short requests.

A windowed batch is equivalent to one of short requests: their tables are the compact tables, their
lengths the compact lengths. What a wrapped builder makes of the one is compared, in all fields, with
what the unwrapped builder makes of the other. The builders are vLLM's; what is replaced in their
modules, for want of a device and of FlashInfer, stands in `native`. No kernel runs.
"""

import importlib.util
import random
import sys
from dataclasses import is_dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from vllm.config import CUDAGraphMode
from vllm.utils.torch_utils import is_strictly_contiguous
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from wmtp_vllm.attention_backends import windowed as module
from wmtp_vllm.attention_backends.windowed import NOT_OVER_A_RING, name_of, windowed_backend
from wmtp_vllm.window import Window

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch):
    """On a GPU nobody looks whether there is anything to leave out."""
    monkeypatch.setattr(module, "LENGTHS_ARE_ON_HOST", False)


K, REQS, BLOCK, BLOCKS, COLUMNS, MAX_LEN = 3, 5, 16, 200, 64, 1024
WINDOW, STATES = Window(100, 20, BLOCK), 20
BACKENDS = (
    *("FLASH_ATTN 2", "FLASH_ATTN 3", "FLASH_ATTN 4", "TRITON_ATTN", "FLEX_ATTENTION"),
    *("FLASHINFER native", "FLASHINFER XQA", "FLASHINFER TRTLLM_GEN"),
    *("ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_SEGMENTED_ATTN"),
    *("CPU_MLA", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"),
)
UPDATED_IN_PLACE = (*BACKENDS[:4], "FLASHINFER TRTLLM_GEN", "TRITON_MLA")


class Planner:
    """In place of FlashInfer's wrappers: remembers what it was to plan."""

    is_cuda_graph_enabled, planned = False, None

    def __init__(self, *args, **kwargs): ...

    def plan(self, **kwargs):
        self.planned = {k: v.clone() if torch.is_tensor(v) else v for k, v in kwargs.items()}


class Absent(ModuleType):
    """In place of a module that is not here: its names are planners, but for one function."""

    def __getattr__(self, name):
        return type(name, (Planner,), {}) if name[0] != "_" else super().__getattribute__(name)

    @staticmethod
    def get_seq_lens(indptr, last_page_len, page_size):
        return (indptr.diff() - 1).clamp(min=0) * page_size + last_page_len


def copy_page_indices(indices, table, row_distance, indptr, BLOCK_SIZE):
    """What vLLM's Triton kernel of this name does: rows are found by their distance."""
    for row, pages in enumerate(indptr.diff().tolist()):
        indices[indptr[row] :][:pages] = table.as_strided((pages,), (1,), row * row_distance)


@pytest.fixture
def native(request, monkeypatch):
    """A backend, from a copy of its module of which no other test sees what is replaced in it."""
    name, _, variant = request.param.partition(" ")
    package = ("", ".decode", ".prefill", ".utils") if "FLASHINFER" in name else ()
    for absent in ("vllm.platforms.rocm", *("flashinfer" + part for part in package)):
        monkeypatch.setitem(sys.modules, absent, Absent(absent))
    for function in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(fa_utils, function, None, raising=False)
    path, _, backend = AttentionBackendEnum[name].value.rpartition(".")
    spec = importlib.util.find_spec(path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path, module)
    spec.loader.exec_module(module)

    # No memory is pinned, and what is not written is the same for both builders.
    def zeros(*shape, pin_memory=False, **kwargs):
        return torch.zeros(*shape, **kwargs)

    module.torch = SimpleNamespace(**vars(torch) | {"zeros": zeros, "empty": zeros})
    if name == "FLASHMLA":
        module.get_mla_metadata = lambda lengths, *args, **kwargs: (lengths.clone(), None)
        module.num_compute_units = lambda *args: 8
    if name.startswith("FLASH_ATTN"):
        module.get_flash_attn_version = lambda *args, **kwargs: int(variant or 3)
        module.get_scheduler_metadata = lambda **of: of["cache_seqlens"].clone()
    if name == "FLASHINFER":
        module.get_per_layer_parameters = lambda *args: None
        alike = Config(has_same_window_lefts=True, has_same_all_params=True)
        module.infer_global_hyperparameters = lambda _: alike
        module._copy_page_indices_kernel = {(n,): copy_page_indices for n in range(REQS + 1)}
        module.can_use_trtllm_attention = lambda *args, **kwargs: variant != "native"
        module.use_trtllm_attention = lambda *args, **kwargs: variant == "TRTLLM_GEN"
        kernel = getattr(module.FlashInferDecodeKernel, variant, None)
        builder = module.FlashInferMetadataBuilder
        builder._get_flashinfer_trtllm_api_decode_kernel = staticmethod(lambda: kernel)
        builder._get_workspace_buffer = lambda self: None
    return getattr(module, backend)


class Config(SimpleNamespace):
    """All parts of a configuration in one; what is not set is None."""

    def __getattr__(self, name):
        return self if name.endswith("_config") else None


class Latent(SimpleNamespace):
    """What builders ask an MLA layer and its prefill backend for."""

    num_heads, q_lora_rank, kv_lora_rank, qk_rope_head_dim = 4, None, 512, 64
    qk_nope_head_dim = v_head_dim = 128

    @property
    def prefill_backend(self):
        return self

    def clone(self):
        return self

    def prepare_metadata(self, metadata): ...


class Builders:
    """A wrapped builder and an unwrapped one; with a ring's null blocks if the backend can."""

    def __init__(self, native, drafted=K):
        torch.manual_seed(0)
        self.ring = name_of(native) not in NOT_OVER_A_RING
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.half)
        if native.is_mla():
            spec = MLAAttentionSpec(
                block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.half
            )
        config = Config(dtype=torch.half, max_num_seqs=REQS, max_num_batched_tokens=512)
        config.block_size = BLOCK
        config.cache_dtype, config.num_gpu_blocks, config.max_model_len = "auto", BLOCKS, MAX_LEN
        config.num_speculative_tokens, config.decode_context_parallel_size = drafted, 1
        config.cudagraph_mode, config.cudagraph_capture_sizes = CUDAGraphMode.FULL, [REQS]
        config.flash_attn_max_num_splits_for_cuda_graph, config.static_forward_context = 8, {}
        config.static_forward_context["draft"] = Latent()
        config.prefill_context_parallel_size = config.cp_kv_cache_interleave_size = 1
        config.get_num_attention_heads, config.get_num_kv_heads = lambda _: 4, lambda _: 2
        config.get_head_size = lambda: 576 if native.is_mla() else 64
        config.get_resolved_kv_cache_layout = lambda: Config(name="LBNHC")
        windowed = windowed_backend(native, WINDOW.size, WINDOW.sink, int(self.ring))
        args = spec, ["draft"], config, torch.device("cpu")
        self.wrapped, self.unwrapped = (b.get_builder_cls()(*args) for b in (windowed, native))

    def batch(self, rng, widest):
        """Random requests of up to `widest` queries, ordered as vLLM does, prompts last."""
        queries = sorted(rng.randrange(1, widest + 1) for _ in range(rng.randrange(REQS) + 1))
        lengths = [q + rng.randrange(1, MAX_LEN - q - K) for q in queries]
        lengths[-1] = queries[-1] if queries[-1] > K + 1 else lengths[-1]
        padding = [0] * (REQS - len(queries) if widest == 1 and self.ring else 0)
        queries, lengths, tokens = queries + padding, lengths + padding, sum(queries) + len(padding)
        # The host assumes that every draft was accepted; of prompts it knows the lengths.
        slack = [rng.randrange(K + 1) * (0 < query <= K + 1) for query in queries]
        table = torch.stack([torch.randperm(BLOCKS - 1)[:COLUMNS] + 1 for _ in queries]).int()
        for row, length, query in zip(table, lengths, queries, strict=True):
            before = (length - query) // BLOCK * self.ring
            row[: rng.choice([0, before, rng.randrange(before + 1)])] = 0
            row[:before][torch.rand(before) < rng.choice([0, 0.3])] = 0
        starts, slots = torch.tensor([0, *queries]).cumsum(0).int(), torch.arange(tokens)
        seq_lens, bounds = torch.tensor([lengths, slack]).cumsum(0).int()
        counts = len(queries), tokens, max(queries), MAX_LEN
        batch = CommonAttentionMetadata(starts, starts, seq_lens, *counts, table, slots)
        batch.seq_lens_cpu_upper_bound = bounds
        batch.compute_num_computed_tokens()  # cached, as another group's builder leaves it
        return batch

    def short(self, logical):
        """The equivalent batch of short requests."""
        # Beyond its blocks a row ends in leavings: they may be the same.
        table = self.wrapped.compactor.table[: logical.num_reqs].clone()
        lengths, nulls = torch.zeros_like(logical.seq_lens), [0] if self.ring else []
        for i, query in enumerate(logical.query_start_loc.diff().tolist()):
            row, length = logical.block_table_tensor[i].tolist(), int(logical.seq_lens[i])
            ids, lengths[i] = WINDOW.compact_table(row, length, query, nulls)
            table[i, : len(ids)] = torch.tensor(ids)
        return logical.replace(
            block_table_tensor=table,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            max_seq_len=min(MAX_LEN, WINDOW.max_compact_length(logical.max_query_len)),
            _num_computed_tokens_cache=None,
        )


NO_MATTER = ("windowed_mtp_logical", "workspace")  # the latter is memory as it was found


def values(it, name=""):
    """All that native metadata holds, as {path: value}, and the mask of FlexAttention's."""
    if isinstance(it, BlockMask):
        mask = it.mask_mod(0, 0, *torch.meshgrid(*map(torch.arange, it.seq_lengths), indexing="ij"))
        it = {"mask": mask, "blocks": it.kv_indices, "num_blocks": it.kv_num_blocks}
    elif is_dataclass(it) or isinstance(it, Planner):
        it = {k: v for k, v in vars(it).items() if k not in NO_MATTER and not callable(v)}
    elif isinstance(it, list | tuple):
        it = dict(enumerate(it))
    if isinstance(it, dict):
        parts = (values(part, f"{name}.{key}") for key, part in it.items())
        return {path: value for part in parts for path, value in part.items()}
    return {name: it}


def same(got, expected):
    got, expected = values(got), values(expected)
    return got.keys() == expected.keys() and all(
        torch.equal(got[k], v) if torch.is_tensor(v) else got[k] == v for k, v in expected.items()
    )


@pytest.mark.parametrize("native", BACKENDS, indirect=True)
@pytest.mark.parametrize("widest", [1, K + 1, 90], ids=["draft steps", "verification", "prompts"])
def test_a_batch_is_built_as_its_short_requests_are(native, widest):
    rng, builders = random.Random(widest), Builders(native)
    for _ in range(STATES):
        logical = builders.batch(rng, widest)
        built, short = builders.wrapped.build(0, logical), builders.short(logical)
        assert same(built, builders.unwrapped.build(0, short))
        # Kernels of FlashInfer's and ROCm's find a row by the width of the table.
        tables = [v for k, v in values(built).items() if "block_table" in k and v is not None]
        assert all(is_strictly_contiguous(table) for table in tables)
        drafting = builders.wrapped.build_for_drafting(logical, 1)
        assert same(drafting, builders.unwrapped.build_for_drafting(short, 1))


@pytest.mark.parametrize("native", BACKENDS, indirect=True)
def test_without_the_wrapper_they_differ(native):
    """Negative control."""
    builders = Builders(native)
    logical = builders.batch(random.Random(0), K + 1)
    builders.wrapped.build(0, logical)
    expected = builders.unwrapped.build(0, builders.short(logical))
    assert not same(Builders(native).unwrapped.build(0, logical), expected)


@pytest.mark.parametrize("native", UPDATED_IN_PLACE, indirect=True)
def test_an_update_in_place_leaves_what_a_build_would(native):
    rng, builders = random.Random(0), Builders(native)
    assert builders.wrapped.supports_draft_decode_metadata_update
    logical = builders.batch(rng, 1)
    captured = builders.wrapped.build(0, logical)
    for _ in range(STATES):
        later = builders.batch(rng, 1)
        for name in ("seq_lens", "block_table_tensor", "query_start_loc", "slot_mapping"):
            getattr(logical, name).copy_(getattr(later, name))
        builders.wrapped.update_draft_decode_metadata(captured)
        assert same(captured, builders.unwrapped.build(0, builders.short(logical)))


@pytest.mark.parametrize("native", ["FLASHINFER native"], indirect=True)
@pytest.mark.parametrize(("drafted", "exact"), [(K, True), (0, False)])
def test_flashinfer_plans_the_compact_tokens_where_tokens_are_drafted(native, drafted, exact):
    """And what the host assumes where vLLM takes that for exact, which compact bounds are not."""
    rng, builders = random.Random(0), Builders(native, drafted)
    logical = builders.batch(rng, 1)
    plan = builders.wrapped.build(0, logical).decode.wrapper.planned
    short = builders.short(logical)
    assert torch.equal(plan["seq_lens"], short.seq_lens) == exact
    assert torch.equal(plan["indptr"].diff(), -(-short.seq_lens // BLOCK)) == exact


@pytest.mark.parametrize("native", NOT_OVER_A_RING, indirect=True)
def test_a_backend_that_cannot_read_a_ring_says_why(native):
    """By its name in the registry: ROCM_AITER_FA calls itself FLASH_ATTN."""
    name = name_of(native)
    with pytest.raises(ValueError, match=f"{name} .* cannot read a ring: {NOT_OVER_A_RING[name]}"):
        windowed_backend(native, WINDOW.size, WINDOW.sink, 1)
