"""The draft's attention by xFormers, on a CPU: its own kernels, in Triton's interpreter.

Run by `make test-xformers`, which lays xFormers and a Triton that it can use over the environment.
"""

import random

import pytest
import torch

from tests.support.engine import engine, windowed
from wmtp_vllm import xformers_draft
from wmtp_vllm.attention_backends.compact_table import compact_table_reference
from wmtp_vllm.window import Window

# Loading the plugins also mends Triton's interpreter.
pytestmark = [
    pytest.mark.xformers,
    pytest.mark.usefixtures("plugin_registered"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:tl.make_block_ptr"),
]

BLOCK, HEADS, KV_HEADS, HEAD_SIZE, NUM_BLOCKS = 64, 4, 2, 64, 48
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative error, of the norms."""


def random_ring_state(rng: random.Random, query_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compact table and lengths of requests whose rows have gaps and null blocks."""
    window = Window(rng.randrange(1, 400), rng.randrange(0, 160), BLOCK)
    lengths = [rng.randrange(query_len, 1500) for _ in range(rng.randrange(1, 4))]
    table = torch.zeros(len(lengths), 1500 // BLOCK + 1, dtype=torch.int32)
    for row, length in zip(table, lengths, strict=True):
        for index in window.kept_blocks(length, query_len):
            # A null block now and then, never the one that this step writes.
            is_null = rng.random() < 0.3 and (index + 1) * BLOCK <= length - query_len
            row[index] = 0 if is_null else rng.randrange(1, NUM_BLOCKS)
    return compact_table_reference(
        table,
        torch.tensor(lengths, dtype=torch.int32),
        torch.arange(len(lengths) + 1, dtype=torch.int32) * query_len,
        window,
        num_null_blocks=1,
        width=window.max_kept_blocks(query_len),
    )


def naive_attention(query, kv_cache, table, lens, scale):
    """The same in float64, one query at a time."""
    query_len = len(query) // len(table)
    group = query.shape[1] // kv_cache.shape[1]
    rows = []
    for i, q in enumerate(query.double()):
        row, offset = divmod(i, query_len)
        visible = int(lens[row]) - query_len + 1 + offset
        kv = kv_cache[table[row].long()].transpose(1, 2).flatten(0, 1)[:visible].double()
        key, value = kv.repeat_interleave(group, dim=1).split(HEAD_SIZE, dim=-1)
        weights = torch.einsum("hd,thd->ht", q, key).mul(scale).softmax(-1)
        rows.append(torch.einsum("ht,thd->hd", weights, value))
    return torch.stack(rows)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_operator_agrees_with_float64_over_random_ring_states(dtype, layout):
    from wmtp_vllm.attention_backends.xformers_attention import paged_attention

    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    shape = (NUM_BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
    worst = 0.0
    for state in range(18):
        query_len = (1, 1, 2, 4, 8, 16)[state % 6]
        table, lens = random_ring_state(rng, query_len)
        kv_cache = torch.randn(shape, generator=generator).to(dtype)
        # What the null block holds is another request's: as large as to spoil any sum.
        kv_cache[0] = 1e4
        if layout == "LBNHC":
            kv_cache = kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
        query = torch.randn(len(lens) * query_len, HEADS, HEAD_SIZE, generator=generator).to(dtype)
        arguments = query, kv_cache, table, lens, HEAD_SIZE**-0.5
        worst = max(worst, relative_error(paged_attention(*arguments), naive_attention(*arguments)))
    print(f"worst relative error in {dtype}, {layout}: {worst:.1e}")
    assert worst < TOLERANCE[dtype]


def test_an_attended_null_block_is_caught():
    """Negative control: the comparison fails where the lengths count a null block."""
    from wmtp_vllm.attention_backends.xformers_attention import paged_attention

    kv_cache = torch.randn(NUM_BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
    kv_cache[0] = 1e4
    query, scale = torch.randn(1, HEADS, HEAD_SIZE), HEAD_SIZE**-0.5
    table = torch.tensor([[5, 7, 0]], dtype=torch.int32)
    held, counted = (torch.tensor([n], dtype=torch.int32) for n in (100, 140))
    expected = naive_attention(query, kv_cache, table, held, scale)
    assert relative_error(paged_attention(query, kv_cache, table, counted, scale), expected) > 0.1


@pytest.fixture
def on_a_cpu(monkeypatch):
    """What only GPUs have is done without: the platform's choice of backends, and 16-bit types."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose = CpuPlatform.get_attn_backend_cls.__func__

    def choose_custom(cls, selected_backend, *args, **kwargs):
        if selected_backend == AttentionBackendEnum.CUSTOM:
            return AttentionBackendEnum.CUSTOM.get_path()
        return choose(cls, selected_backend, *args, **kwargs)

    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(choose_custom))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(xformers_draft, "operator_problem", lambda: None)
    monkeypatch.setattr(xformers_draft, "DTYPES", ("float32",))


ENGINE = {"block_size": BLOCK, "max_num_seqs": 2}
PROMPTS = [[(i * i * 7 + j * 13) % 250 + 4 for i in range(n)] for j, n in enumerate((150, 420))]
MAX_TOKENS = 24


def test_a_whole_engine_drafts_with_it_losslessly_and_as_well_as_natively(
    tiny_model, on_a_cpu, monkeypatch
):
    from wmtp_vllm.attention_backends import xformers_attention

    calls = []
    paged_attention = xformers_attention.paged_attention

    def counted(query, kv_cache, block_table, *args):
        calls.append(len(query) // len(block_table))
        return paged_attention(query, kv_cache, block_table, *args)

    monkeypatch.setattr(xformers_attention, "paged_attention", counted)
    answers, acceptance = {}, {}
    for name, config in {
        "plain": None,
        "native attention": windowed(3, 256, 64),
        "xformers": windowed(3, 256, 64, draft_attention_backend="xformers"),
    }.items():
        with engine(tiny_model("dense"), config, **ENGINE) as running:
            answers[name] = running.generate(PROMPTS, MAX_TOKENS)
            if config:
                acceptance[name] = running.acceptance_length()
    assert answers["xformers"] == answers["plain"]
    assert acceptance["xformers"] == pytest.approx(acceptance["native attention"], rel=0.05)
    assert acceptance["xformers"] > 2
    assert {1, 4} <= set(calls), "draft steps (1 query) and verified drafts (K + 1) go to xFormers"
