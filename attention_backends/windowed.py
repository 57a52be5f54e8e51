"""A native attention backend wrapped so that it reads the sink and the window only.

The wrapped metadata builder hands the native builder a compact table and compact lengths in place
of the logical ones. The native kernel then reads S + W tokens whatever the context, and needs no
change: KV writes go by the slot mapping, which stays logical, and the causal mask is aligned at the
end of the row. vLLM's own `chunked_local_attention.py` wraps backends in the same way.
"""

import functools
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    subclass_attention_backend,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec

from wmtp_vllm.attention_backends.compact_table import compact_table, is_compact
from wmtp_vllm.window import Window, ceil_div

SUPPORTED_BACKENDS = (
    "CPU_ATTN",
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "ROCM_ATTN",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
    "ROCM_SEGMENTED_ATTN",
    "FLEX_ATTENTION",
    "CPU_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "TRITON_MLA",
)
"""Native backends, by vLLM's names, whose builders read nothing but what is made compact here."""

NOT_OVER_A_RING = {
    "ROCM_AITER_FA": "it fails where none of a prompt's earlier tokens are held, as after a hit",
    "FLEX_ATTENTION": "it takes the number of the draft's blocks from the target's cache",
}
"""Supported backends that read vLLM's full draft KV only, and why."""

LENGTHS_ARE_ON_HOST = not HAS_TRITON
"""Whether lengths and tables can be looked at without waiting for a device."""


def name_of(native: type[AttentionBackend]) -> str:
    """The name in vLLM's registry: ROCM_AITER_FA calls itself FLASH_ATTN."""
    path = ".".join(native.full_cls_name())
    return next((b.name for b in AttentionBackendEnum if b.value == path), native.get_name())


@functools.cache
def windowed_backend(
    native: type[AttentionBackend], window_size: int, sink_size: int, num_null_blocks: int
) -> type[AttentionBackend]:
    """The backend `native`, attending to `sink_size` first and `window_size` last tokens only.

    Args:
        native: a backend that vLLM chose for a draft layer.
        window_size: W, tokens.
        sink_size: S, tokens.
        num_null_blocks: block ids below this are never attended: 1 over a ring, whose rows have
            null blocks; 0 over vLLM's full draft KV, whose rows have none.

    Raises:
        ValueError: `native` is not one of `SUPPORTED_BACKENDS`, or cannot read a ring.

    """
    takes_compact_tables = getattr(native, "takes_compact_tables", False)  # our own
    name = name_of(native)
    if name not in SUPPORTED_BACKENDS and not takes_compact_tables:
        raise ValueError(
            f"windowed_mtp does not handle the attention backend {name} that vLLM "
            f"chose for the draft. Choose one of {', '.join(SUPPORTED_BACKENDS)} with the key "
            '"attention_backend" of the speculative config, or use method "mtp".'
        )
    if num_null_blocks and name in NOT_OVER_A_RING:
        raise ValueError(
            f"The attention backend {name} that vLLM chose for the draft cannot read a ring: "
            f'{NOT_OVER_A_RING[name]}. Set "draft_kv_cache": "full", or choose another with the key '
            '"attention_backend" of the speculative config.'
        )
    native_builder = native.get_builder_cls()

    class WindowedMetadataBuilder(native_builder):  # type: ignore[misc, valid-type]
        # That shortcut would put another group's logical table into compact metadata.
        supports_update_block_table = False

        def __init__(
            self,
            kv_cache_spec: AttentionSpec,
            layer_names: list[str],
            vllm_config: VllmConfig,
            device: torch.device,
            **kwargs: Any,
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)
            window = Window(window_size, sink_size, kv_cache_spec.block_size)
            is_mla = isinstance(self, MLACommonMetadataBuilder)
            longest_decode = self.reorder_batch_threshold if is_mla else None
            self.compactor = Compactor(window, num_null_blocks, vllm_config, device, longest_decode)

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            compact = self.compactor.compact(common_attn_metadata)
            metadata = super().build(0, compact, fast_build)
            metadata.windowed_mtp_logical = common_attn_metadata
            return metadata

        def build_for_drafting(
            self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
        ) -> Any:
            self.compactor.is_further_step = draft_index > 1
            if native_builder.build_for_drafting is AttentionMetadataBuilder.build_for_drafting:
                return super().build_for_drafting(common_attn_metadata, draft_index)  # by build()
            # ROCM_AITER_FA's passes build() by.
            compact = self.compactor.compact(common_attn_metadata)
            metadata = super().build_for_drafting(compact, draft_index)
            metadata.windowed_mtp_logical = common_attn_metadata
            return metadata

        def update_draft_decode_metadata(self, metadata: Any) -> None:
            """Refresh the compact table in place, then what the native builder derives from it."""
            self.compactor.compact(metadata.windowed_mtp_logical)
            super().update_draft_decode_metadata(metadata)

    assert issubclass(WindowedMetadataBuilder, AttentionMetadataBuilder)
    return subclass_attention_backend("WindowedMTP", native, WindowedMetadataBuilder)


class Compactor:
    """Makes attention metadata compact, in device buffers that live as long as CUDA graphs do."""

    def __init__(
        self,
        window: Window,
        num_null_blocks: int,
        vllm_config: VllmConfig,
        device: torch.device,
        longest_decode: int | None = None,
    ) -> None:
        scheduler = vllm_config.scheduler_config
        self.window = window
        self.num_null_blocks = num_null_blocks
        self.longest_decode = longest_decode
        """Most queries of a request up to which the host's lengths may be bounds; None for any. MLA
        plans the earlier tokens of a chunk on the host, from lengths that it takes for exact."""
        self.is_further_step = False
        """Whether the next call is for the batch of the last one, a draft step later."""
        self._lengths: list[int] | None = None
        max_width = min(
            window.max_kept_blocks(scheduler.max_num_batched_tokens),
            ceil_div(vllm_config.model_config.max_model_len, window.block_size),
        )
        # FlashInfer's MLA kernels want whole units of 128 tokens.
        unit = max(1, 128 // window.block_size)
        max_width = ceil_div(max_width, unit) * unit
        # A batch padded to a captured size can have more rows than there are sequences.
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        max_num_reqs = max(scheduler.max_num_seqs, captured)
        self.table = torch.zeros(max_num_reqs, max_width, dtype=torch.int32, device=device)
        self.lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def compact(self, logical: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The metadata of the same batch with table, lengths and bounds of the kept blocks.

        The result is valid until the next call: both write the same buffers. Where there is nothing to
        leave out it is `logical` itself.
        """
        window, num_reqs = self.window, logical.num_reqs
        lengths = logical.seq_lens[:num_reqs]
        # Whole rows: a captured graph reads them by their distance at capture, and FlashInfer's and
        # ROCm's kernels take that for the width. Beyond what is used lie leavings, as in vLLM's.
        table, lens = self.table[:num_reqs], self.lens[:num_reqs]
        is_further_step, self.is_further_step = self.is_further_step, False
        if LENGTHS_ARE_ON_HOST and is_further_step and self._is_a_token_later(lengths.tolist()):
            lens += 1
        else:
            self._lengths = None
            rows = logical.block_table_tensor[:num_reqs]
            may_be_compact = (
                window.first_window_block(logical.max_seq_len - 1) == window.sink_blocks
            )
            if (
                LENGTHS_ARE_ON_HOST
                and may_be_compact
                and is_compact(rows, lengths, window, self.num_null_blocks)
            ):
                return logical
            width = min(
                window.max_kept_blocks(logical.max_query_len),
                logical.block_table_tensor.shape[1],
                self.table.shape[1],
            )
            compact_table(
                rows,
                lengths,
                logical.query_start_loc,
                window,
                self.num_null_blocks,
                table[:, :width],
                lens,
            )
        if LENGTHS_ARE_ON_HOST:
            self._lengths = lengths.tolist()
        return logical.replace(
            block_table_tensor=table,
            seq_lens=lens,
            max_seq_len=min(logical.max_seq_len, window.max_compact_length(logical.max_query_len)),
            seq_lens_cpu_upper_bound=self._cpu_lengths(logical, lens),
            _num_computed_tokens_cache=None,
        )

    def _cpu_lengths(
        self, logical: CommonAttentionMetadata, lens: torch.Tensor
    ) -> torch.Tensor | None:
        if LENGTHS_ARE_ON_HOST:
            return lens
        if self.longest_decode is not None:
            query_lens = logical.query_start_loc_cpu.diff()
            used = query_lens[query_lens > 0]
            # The same of all, or some are taken for chunks.
            if logical.max_query_len > self.longest_decode or (used != used[:1]).any():
                # Which blocks are held only the device knows: this waits for it, while prompts are read.
                return lens.cpu()
        return self._cpu_upper_bound(logical)

    def _is_a_token_later(self, lengths: list[int]) -> bool:
        """Whether each request keeps the blocks of the last call and has one token more.

        Of a draft's steps few begin a block or leave one behind, and on a CPU making the table again is
        some hundredths of a tiny model's step.
        """
        b, size = self.window.block_size, self.window.size
        return (
            self._lengths is not None
            and len(lengths) == len(self._lengths)
            and all(
                length == before + 1 and (length - 1) % b and (length - size) % b
                for length, before in zip(lengths, self._lengths, strict=True)
            )
        )

    def _cpu_upper_bound(self, logical: CommonAttentionMetadata) -> torch.Tensor | None:
        """The host's bound on the compact lengths: of the logical ones, and of the kept blocks."""
        lengths = logical.seq_lens_cpu_upper_bound
        if lengths is None:
            return None
        starts = logical.query_start_loc_cpu[: len(lengths) + 1]
        return torch.minimum(lengths, self.window.max_compact_length(0) + starts.diff())
