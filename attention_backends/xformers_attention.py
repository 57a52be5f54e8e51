"""The draft's attention by xFormers: its split-K Triton operator over the pages of the ring.

For GPUs whose native kernels are poor at few long rows, and as an implementation of attention that
shares no code with vLLM's to check those by. Batches of at most `MAX_QUERY_LEN` queries a request, the
same for all requests (draft steps, verification), go to xFormers; prefill chunks, which it does not
take, to vLLM's own Triton attention over the same cache. Selected by
`draft_attention_backend: "xformers"`, as vLLM's backend `CUSTOM`.
"""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from xformers.ops.fmha.attn_bias import (
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
)
from xformers.ops.fmha.common import Inputs
from xformers.ops.fmha.triton_splitk import FwOp

from wmtp_vllm.window import ceil_div

PAGE_SIZE = 64
"""Tokens: a page of the operator is a multiple of its tile of keys."""
MAX_QUERY_LEN = 16
"""Queries a request: the operator's smallest tile of queries, over which it masks causally."""
HEAD_SIZES = (32, 64, 128, 256, 512)
"""Those that both xFormers and vLLM's Triton attention take."""


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of each request's last queries over the keys in its row of blocks.

    Never synchronises with the host, and reads lengths and tables on the device, so that a CUDA graph
    may record it.

    Args:
        query: [num_reqs * query_len, num_heads, head_size], the same `query_len` for all requests, at
            most `MAX_QUERY_LEN`.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], keys before values, in the
            layout LBNHC or LBHNC; block_size a multiple of `PAGE_SIZE`.
        block_table: [num_reqs, width] int32.
        seq_lens: [num_reqs] int32, at least `query_len`.
        scale: of the scores.

    Returns:
        [num_reqs * query_len, num_heads, head_size].

    """
    num_reqs, width = block_table.shape
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    query = query.view(num_reqs, -1, num_kv_heads, num_heads // num_kv_heads, head_size)
    query_len = query.shape[1]

    # A page is block_size tokens at one distance from each other. Where a token's heads lie together
    # (LBNHC) that is a block; where a head's tokens do (LBHNC) it is one head of a block, and a row is
    # one head of a request.
    heads_apart = kv_cache.stride(1) > kv_cache.stride(2)
    if heads_apart:
        head = torch.arange(num_kv_heads, dtype=block_table.dtype, device=block_table.device)
        block_table = (block_table[:, None] * num_kv_heads + head[:, None]).flatten(0, 1)
        seq_lens = seq_lens.repeat_interleave(num_kv_heads)
        query = query.transpose(1, 2).flatten(0, 1)[:, :, None]
        pages = kv_cache.view(1, -1, 1, 1, 2 * head_size)
    else:
        pages = kv_cache.transpose(1, 2).view(1, -1, num_kv_heads, 1, 2 * head_size)
    query = query.flatten(0, 1)[None]
    key, value = pages.expand(-1, -1, -1, query.shape[3], -1).split(head_size, dim=-1)

    # The host's copies of lengths are for other operators: this one asks for the two maxima only.
    mask = PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(
        q_seqinfo=_SeqLenInfo(
            seqstart=seq_lens, max_seqlen=query_len, min_seqlen=query_len, seqstart_py=[0]
        ),
        k_seqinfo=_PaddedSeqLenInfo(
            seqstart=seq_lens,
            max_seqlen=width * block_size,
            min_seqlen=0,
            seqstart_py=[0],
            seqlen=seq_lens,
            seqlen_py=[],
            padding=width * block_size,
        ),
        block_tables=block_table,
        page_size=block_size,
    )
    inputs = Inputs(query=query, key=key, value=value, attn_bias=mask, scale=scale)
    output, _ = FwOp.apply(inputs, needs_gradient=False)
    if heads_apart:
        output = output.view(num_reqs, num_kv_heads, query_len, -1, head_size).transpose(1, 2)
    return output.reshape(num_tokens, num_heads, head_size)


class XFormersMetadataBuilder(TritonAttentionMetadataBuilder):
    """Triton attention's metadata, and the one query length that all requests have, if they do."""

    # Of a FULL graph only uniform batches: which kernel runs is decided when it is captured.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        query_lens = common_attn_metadata.query_start_loc_cpu.diff()
        query_len = common_attn_metadata.max_query_len
        is_uniform = query_len <= MAX_QUERY_LEN and bool((query_lens == query_len).all())
        metadata.uniform_query_len = query_len if is_uniform else None
        return metadata


class XFormersImpl(TritonAttentionImpl):
    """Attention over the cache that Triton attention writes, by xFormers where it can."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        found = {
            "a sliding window of its own": self.sliding_window != (-1, -1),
            "a soft cap on its logits": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            "ALiBi": self.alibi_slopes is not None,
            f"heads of {self.head_size}": self.head_size not in HEAD_SIZES,
        }
        if any(found.values()):
            raise ValueError(
                'windowed_mtp: draft_attention_backend "xformers" does not do '
                f"{' or '.join(what for what, is_so in found.items() if is_so)}, which this draft "
                "has. Leave the key out."
            )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query_len = attn_metadata and attn_metadata.uniform_query_len
        if not query_len:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        assert output_scale is None, "fused output quantization is not announced"
        num_tokens = len(attn_metadata.seq_lens) * query_len
        # A padding row has length 0. It must not come out as NaN, which a mixture of experts spreads.
        seq_lens = attn_metadata.seq_lens.clamp(min=query_len)
        # The operator splits the table's whole width, most of which is for prefill chunks.
        width = ceil_div(attn_metadata.max_seq_len, kv_cache.shape[2])
        table = attn_metadata.block_table[:, :width]
        output[:num_tokens] = paged_attention(
            query[:num_tokens], kv_cache, table, seq_lens, self.scale
        )
        return output

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


class XFormersBackend(TritonAttentionBackend):
    """What vLLM asks of a backend before it uses `XFormersImpl`."""

    takes_compact_tables = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[XFormersImpl]:
        return XFormersImpl

    @staticmethod
    def get_builder_cls() -> type[XFormersMetadataBuilder]:
        return XFormersMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_SIZE)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % PAGE_SIZE == 0

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES
