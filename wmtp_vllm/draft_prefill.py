"""No draft work on prompt tokens whose draft KV nobody will read.

The KV of an MTP head with one layer of attention depends on its inputs alone. Of a prompt, what counts
of the draft comes from its last token on, which sees the sink and the window only. So prefill chunks
between the two need no draft: a batch of such chunks is skipped, and in other batches each shrinks to
its last row, whose proposal nobody asks for. The ring has no blocks for what is left out
(`wmtp_vllm.kv_manager.manager`); both sides go by `Window.unread_blocks`.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from wmtp_vllm import seams
from wmtp_vllm.config import WindowedMTPConfig
from wmtp_vllm.kv_manager.spec import RingSpec
from wmtp_vllm.pace import Pace
from wmtp_vllm.window import Window

logger = init_logger("vllm.wmtp_vllm.draft_prefill")


def may_skip(
    vllm_config: VllmConfig, config: WindowedMTPConfig, draft_layer_names: Collection[str]
) -> bool:
    """Whether the draft may leave out prompt tokens; where it may not, the log says why."""
    if config.draft_prefill == "full" or config.draft_kv_cache != "ring":
        return False
    parallel = vllm_config.parallel_config
    reasons = (
        (
            len(draft_layer_names) != 1,
            f"its head has {len(draft_layer_names)} layers of attention, so that the KV of one depends "
            "on what another reads",
        ),
        (
            parallel.data_parallel_size > 1,
            "under data parallelism every rank must run the draft alike",
        ),
        (
            config.native_method == "draft_model",
            "a model of its own is given more tokens than the target's",
        ),
        (
            config.draft_window_size <= vllm_config.speculative_config.num_speculative_tokens,
            "its window is smaller than a step",
        ),
        (parallel.enable_eplb, "experts are balanced by what the draft routes"),
        (
            vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL,
            "FULL CUDA graphs of prefills read the whole batch",
        ),
    )
    for applies, why in reasons:
        if applies:
            logger.info_once("windowed_mtp: the draft runs on the whole prompt: %s.", why)
            return False
    return True


@dataclass(frozen=True)
class Rows:
    """The rows of a batch that the draft runs on.

    Args:
        kept: [num_kept] int64, increasing; none where the whole step is skipped.
        starts: [num_reqs + 1] int32, cumulative numbers of kept rows.

    """

    kept: np.ndarray
    starts: np.ndarray


def rows_to_run(
    window: Window, starts: np.ndarray, num_computed: np.ndarray, prefill_lens: np.ndarray
) -> Rows | None:
    """Choose the rows of a batch that the draft runs on; None for all of them.

    Args:
        window: in ring blocks.
        starts: [num_reqs + 1], cumulative numbers of the batch's tokens.
        num_computed: [num_reqs], tokens of each request before this step.
        prefill_lens: [num_reqs], tokens of each request's prefill.

    """
    prefilling = np.flatnonzero(num_computed < prefill_lens)
    if not len(prefilling):  # most steps, and on a CPU the rest shows in a tiny model's
        return None
    lens = np.diff(starts)
    ends = num_computed + lens
    num_read = lens.copy()
    for i in prefilling:
        num_read[i] = window.num_read(int(num_computed[i]), int(ends[i]), int(prefill_lens[i]))
    if (num_read == lens).all():
        return None
    if not num_read.any():
        return Rows(np.empty(0, np.int64), np.zeros_like(starts))
    num_read = num_read.clip(min=1)
    new_starts = np.concatenate([[0], np.cumsum(num_read)]).astype(np.int32)
    # A request's rows that are left out stand before its kept ones.
    kept = np.arange(new_starts[-1]) + np.repeat(starts[1:] - new_starts[1:], num_read)
    return Rows(kept, new_starts)


def multimodal_rows(
    inputs: tuple[list[torch.Tensor], torch.Tensor] | None, rows: Rows
) -> tuple[list[torch.Tensor], torch.Tensor] | None:
    """Of embeddings that stand in for tokens of the batch, those of the kept rows.

    Args:
        inputs: embeddings, each [n, hidden_size], in the order of the rows that have one; and
            [num_tokens] bool on the host, which rows these are. None for a text-only draft.
        rows: that are kept.

    """
    if inputs is None:
        return None
    embeddings, has_embedding = inputs
    is_kept = torch.zeros_like(has_embedding)
    is_kept[rows.kept] = True
    index = is_kept[has_embedding].nonzero().flatten()
    if embeddings:
        embeddings = [torch.cat(embeddings)[to_device(index.numpy(), embeddings[0].device)]]
    return embeddings if len(index) else [], has_embedding[rows.kept]


class Skipping:
    """In place of a proposer's `propose`: the same, on fewer rows."""

    def __init__(self, proposer: Any) -> None:
        self.proposer = proposer
        self.propose = proposer.propose
        self.num_rows_run = 0
        self.num_rows_skipped = 0
        self._pace = Pace()

    def count(self, num_tokens: int, rows: Rows | None) -> None:
        num_run = num_tokens if rows is None else len(rows.kept)
        self.num_rows_run += num_run
        self.num_rows_skipped += num_tokens - num_run
        if num_run < num_tokens and self._pace.is_due():
            logger.info(
                "windowed_mtp: the draft did not run on %d prompt tokens whose KV it never reads",
                self.num_rows_skipped,
            )


class SkippingV1(Skipping):
    """For `SpecDecodeBaseProposer`; its runner hands these two over before each call."""

    num_computed: np.ndarray
    """[num_reqs], tokens before this step"""
    num_tokens: np.ndarray
    """[num_reqs], tokens that existed before this step; in a prefill these are its own"""

    def __call__(self, **inputs: Any) -> torch.Tensor:
        metadata = inputs["common_attn_metadata"]
        num_reqs = metadata.num_reqs
        window = self.proposer.draft_attn_groups[0].kv_cache_spec.draft_window
        starts = metadata.query_start_loc_cpu[: num_reqs + 1].numpy()
        rows = rows_to_run(window, starts, self.num_computed[:num_reqs], self.num_tokens[:num_reqs])
        self.count(int(starts[-1]), rows)
        if rows is None:
            return self.propose(**inputs)
        next_tokens = inputs["next_token_ids"]
        if not len(rows.kept):
            self.proposer._last_draft_probs = None
            k = inputs["num_speculative_tokens"]
            return torch.zeros(num_reqs, k, dtype=torch.int64, device=next_tokens.device)
        return self.propose(**self._reduced(inputs, starts, rows))

    def _reduced(self, inputs: dict[str, Any], starts: np.ndarray, rows: Rows) -> dict[str, Any]:
        metadata = inputs["common_attn_metadata"]
        device = metadata.slot_mapping.device
        kept = to_device(rows.kept, device)
        shifts = to_device(starts[1:] - rows.starts[1:], device)
        reduced = metadata.replace(
            query_start_loc=to_device(rows.starts, device),
            query_start_loc_cpu=torch.from_numpy(rows.starts),
            num_actual_tokens=len(kept),
            max_query_len=int(np.diff(rows.starts).max()),
            slot_mapping=metadata.slot_mapping[kept],
            positions=None if metadata.positions is None else metadata.positions[kept],
            _token_to_req_indices_cache=None,
            _num_computed_tokens_cache=None,
        )
        last = inputs["token_indices_to_sample"]
        return inputs | {
            "target_token_ids": inputs["target_token_ids"][kept],
            "target_positions": inputs["target_positions"][..., kept],
            "target_hidden_states": inputs["target_hidden_states"][kept],
            "token_indices_to_sample": None if last is None else last - shifts.to(last.dtype),
            "common_attn_metadata": reduced,
            "mm_embed_inputs": multimodal_rows(inputs.get("mm_embed_inputs"), rows),
        }


class SkippingV2(Skipping):
    """For `DraftModelSpeculator`. Nothing here waits for the device."""

    def __call__(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows = None
        if input_batch.has_prefill and not kwargs.get("dummy_run"):
            rows = rows_to_run(
                self._window,
                input_batch.query_start_loc_np[: input_batch.num_reqs + 1],
                input_batch.num_computed_tokens_np,
                input_batch.prefill_len_np,
            )
        if not kwargs.get("dummy_run"):
            self.count(input_batch.num_tokens, rows)
        if rows is None:
            return self.propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                *args,
                **kwargs,
            )
        if not len(rows.kept):
            return self.proposer.draft_tokens[: input_batch.num_reqs]
        kept = to_device(rows.kept, last_hidden_states.device)
        reduced = self._reduced(input_batch, rows, kept)
        slots = self._slots(input_batch, kept)
        if "mm_inputs" in kwargs:
            kwargs["mm_inputs"] = multimodal_rows(kwargs["mm_inputs"], rows)
        return self.propose(
            reduced,
            self._metadata(reduced, slots),
            dict.fromkeys(self.proposer.draft_attn_layer_names, slots[self._group]),
            last_hidden_states[kept],
            aux_hidden_states and [states[kept] for states in aux_hidden_states],
            *args,
            **kwargs,
        )

    def _slots(self, input_batch: Any, kept: torch.Tensor) -> torch.Tensor:
        """[num_groups, num_kept]: in the buffer that vLLM writes anew for each forward pass.

        In place, since graphs that were captured with the write to the KV cache read that buffer, as far
        as they were padded.
        """
        buffer = self.proposer.block_tables.slot_mappings
        buffer[:, : len(kept)] = buffer[:, kept]
        buffer[:, len(kept) : input_batch.num_tokens_after_padding] = PAD_SLOT_ID
        return buffer[:, : len(kept)]

    @property
    def _group(self) -> int:
        groups = self.proposer.kv_cache_config.kv_cache_groups
        return next(i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, RingSpec))

    @property
    def _window(self) -> Window:
        return self.proposer.kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.draft_window

    def _reduced(self, input_batch: Any, rows: Rows, kept: torch.Tensor) -> Any:
        return replace(
            input_batch,
            num_scheduled_tokens=np.diff(rows.starts),
            num_tokens=len(rows.kept),
            num_tokens_after_padding=len(rows.kept),
            query_start_loc=to_device(rows.starts, kept.device),
            query_start_loc_np=rows.starts,
            input_ids=input_batch.input_ids[kept],
            positions=input_batch.positions[kept],
            is_padding=input_batch.is_padding[kept],
        )

    def _metadata(self, batch: Any, slot_mappings: torch.Tensor) -> dict[str, Any]:
        return seams.original("build_attn_metadata")(
            attn_groups=self.proposer.attn_groups,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            query_start_loc_gpu=batch.query_start_loc,
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np),
            max_query_len=int(batch.num_scheduled_tokens.max()),
            seq_lens=batch.seq_lens,
            max_seq_len=int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max()),
            block_tables=[
                table[: batch.num_reqs] for table in self.proposer.block_tables.input_block_tables
            ],
            slot_mappings=slot_mappings,
            kv_cache_config=self.proposer.kv_cache_config,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            positions=batch.positions,
            is_prefilling=torch.from_numpy(batch.is_prefilling_np),
        )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
