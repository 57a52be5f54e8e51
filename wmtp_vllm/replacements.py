"""What stands in the place of each wrapped seam of `wmtp_vllm.seams`, under the seam's name.

Each takes vLLM's own function first, then that function's arguments. None does anything for an
engine that did not select `windowed_mtp`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from wmtp_vllm import seams
from wmtp_vllm.config import METHODS, deselected, selected

Function = Any
"""A function of vLLM."""


def create_speculative_config(
    original: Function, engine_args: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    # In every process, also of a vLLM that is no tested one: ask for nothing that may be missing.
    method = getattr(engine_args, "spec_method", None)
    method = method or (engine_args.speculative_config or {}).get("method")
    if method not in METHODS:
        engine_args.additional_config = deselected(engine_args.additional_config)
        return original(engine_args, target_model_config, target_parallel_config)
    from wmtp_vllm import selection

    return selection.create_speculative_config(
        original, engine_args, target_model_config, target_parallel_config
    )


def add_cli_args(original: Function, parser: Any) -> Any:
    parser = original(parser)
    for action in parser._actions:
        if "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, *METHODS]
    return parser


def load_model_v1(original: Function, proposer: Any, target_model: Any) -> None:
    original(proposer, target_model)
    from wmtp_vllm import proposers

    proposers.equip_v1(proposer)


def load_model_v2(original: Function, speculator: Any, target_model: Any) -> None:
    original(speculator, target_model)
    from wmtp_vllm import proposers

    proposers.equip_v2(speculator)


def propose_draft_token_ids(
    original: Function,
    runner: Any,
    scheduler_output: Any,
    sampled_token_ids: Any,
    sampling_metadata: Any,
    hidden_states: Any,
    sample_hidden_states: Any,
    aux_hidden_states: Any,
    spec_decode_metadata: Any,
    common_attn_metadata: Any,
    slot_mappings: Any,
) -> Any:
    """V1's proposer does not know the requests of its batch, nor a draft model the ring's block ids."""
    from wmtp_vllm.draft_prefill import SkippingV1
    from wmtp_vllm.proposers import draft_models

    if runner.drafter in draft_models:
        table = runner.input_batch.block_table[runner.drafter.kv_cache_gid]
        own = table.get_device_tensor(common_attn_metadata.num_reqs)
        common_attn_metadata = common_attn_metadata.replace(block_table_tensor=own)
    propose = getattr(runner.drafter, "propose", None)
    if isinstance(propose, SkippingV1):
        batch = runner.input_batch
        propose.num_computed = batch.num_computed_tokens_cpu
        propose.num_tokens = batch.num_tokens_no_spec
        if isinstance(sampled_token_ids, list):  # drafts unpadded, after these were booked
            num_sampled = [len(tokens) for tokens in sampled_token_ids]
            propose.num_tokens = batch.num_tokens_no_spec[: len(num_sampled)] - num_sampled
    return original(
        runner,
        scheduler_output,
        sampled_token_ids,
        sampling_metadata,
        hidden_states,
        sample_hidden_states,
        aux_hidden_states,
        spec_decode_metadata,
        common_attn_metadata,
        slot_mappings,
    )


def get_kv_cache_configs(original: Function, *args: Any) -> Any:
    from wmtp_vllm.kv_manager import planning

    return planning.get_kv_cache_configs(original, _planner(), *args)


def get_global_kv_cache_groups(
    original: Function, vllm_config: Any, kv_cache_specs: list[dict[str, Any]]
) -> Any:
    from wmtp_vllm.kv_manager import planning

    return original(vllm_config, [planning.without_rings(specs) for specs in kv_cache_specs])


def get_kv_cache_groups(original: Function, vllm_config: Any, kv_cache_spec: Any) -> Any:
    from wmtp_vllm.kv_manager import planning

    return planning.get_kv_cache_groups(_planner(), vllm_config, kv_cache_spec)


def get_kv_cache_config_from_groups(
    original: Function, vllm_config: Any, kv_cache_groups: Any, available_memory: int
) -> Any:
    from wmtp_vllm.kv_manager import planning

    return planning.get_kv_cache_config_from_groups(
        _planner(), vllm_config, kv_cache_groups, available_memory
    )


def zero_kv_blocks(
    original: Function, zeroer: Any, device: Any, attn_groups_iter: Iterable[Any], **kwargs: Any
) -> None:
    """The zeroer goes by the target's block ids, which mean other bytes in a ring."""
    from wmtp_vllm.kv_manager.spec import RingSpec

    groups = [group for group in attn_groups_iter if not isinstance(group.kv_cache_spec, RingSpec)]
    original(zeroer, device, groups, **kwargs)


def copy_kv_cache_blocks_inplace(
    original: Function, kv_caches: Iterable[Any], num_blocks: int, kv_cache_block_copies: Sequence
) -> None:
    """Copies go by the target's block ids, which mean other bytes in a ring."""
    if not kv_cache_block_copies:
        return
    from wmtp_vllm import proposers

    rings = {layer.kv_cache.data_ptr() for layer in proposers.ring_layers}
    targets = [cache for cache in kv_caches if cache.data_ptr() not in rings]
    original(targets, num_blocks, kv_cache_block_copies)


def make_stats(original: Function, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    stats = original(scheduler, *args, **kwargs)
    ring = seams.ring_of(scheduler) if stats is not None else None
    if ring is not None:
        from wmtp_vllm import metrics

        metrics.to_scheduler_stats(stats, ring)
    return stats


def stat_logger_manager(
    original: Function,
    manager: Any,
    vllm_config: Any,
    engine_idxs: Any = None,
    custom_stat_loggers: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Ours goes first: it takes the ring's numbers out of the statistics again."""
    if selected(vllm_config) is not None:
        from wmtp_vllm.metrics import WindowedMTPStats

        custom_stat_loggers = [WindowedMTPStats, *(custom_stat_loggers or ())]
    original(manager, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)


def _planner() -> Any:
    from wmtp_vllm.kv_manager.planning import Planner

    return Planner(
        groups=seams.original("get_kv_cache_groups"),
        config_from_groups=seams.original("get_kv_cache_config_from_groups"),
        capacity=seams.original("get_kv_cache_capacity"),
    )
