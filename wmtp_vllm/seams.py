"""Every reach into vLLM that is not a public extension point, in one table.

Each seam says where it is in each supported release of vLLM and what parameters it has there. Both
are checked before anything is changed, so that a release which moved something is refused at
start-up, never half-patched. `wmtp check` prints the table; `docs/architecture.md` says why each
seam is needed, and `wmtp_vllm/replacements.py` is what stands in their places.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

VERSIONS = ("0.32", "0.33")
"""Minor releases of vLLM that are tested."""


class UnsupportedVLLM(ValueError):
    """This vLLM is not one that the plugin can run in; the message says why and what to do."""


@dataclass(frozen=True)
class Seam:
    """A non-public part of vLLM that the plugin wraps, calls or overrides.

    Args:
        name: the name of what it is in vLLM; for a wrapped one also that of its replacement.
        places: by minor release, `module:qualified.name`; several where modules import it by name.
        parameters: by minor release, the names of its parameters in order.
        use: "selects" (wrapped in every process that loads the plugin: it recognises the method
            name), "wrapped" (only where windowed_mtp was selected), "called" or "overridden".

    """

    name: str
    use: str
    places: dict[str, tuple[str, ...]]
    parameters: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Verdict:
    """What was found at one place of a seam; `problem` is empty where it is as expected."""

    seam: Seam
    place: str
    problem: str = ""


def _same(name: str, use: str, place: str, parameters: str) -> Seam:
    """A seam that is the same in every supported release."""
    return Seam(
        name,
        use,
        dict.fromkeys(VERSIONS, tuple(place.split())),
        dict.fromkeys(VERSIONS, tuple(parameters.split())),
    )


_PLANNING = {"0.32": "vllm.v1.core.kv_cache_utils", "0.33": "vllm.v1.core.kv_cache_planning"}
_CONFIGS = "vllm_config kv_cache_specs available_memory"

SEAMS = (
    _same(
        "create_speculative_config",
        "selects",
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        "self target_model_config target_parallel_config",
    ),
    _same("add_cli_args", "selects", "vllm.engine.arg_utils:EngineArgs.add_cli_args", "parser"),
    _same(
        "load_model_v1",
        "wrapped",
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model",
        "self target_model",
    ),
    _same(
        "load_model_v2",
        "wrapped",
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
        "self target_model",
    ),
    Seam(
        "get_kv_cache_configs",
        "wrapped",
        dict.fromkeys(VERSIONS, ("vllm.v1.engine.core:get_kv_cache_configs",)),
        {
            "0.32": tuple(_CONFIGS.split()),
            "0.33": (*_CONFIGS.split(), "global_kv_cache_groups"),
        },
    ),
    Seam(
        "get_global_kv_cache_groups",
        "wrapped",
        {"0.32": (), "0.33": ("vllm.v1.engine.core:get_global_kv_cache_groups",)},
        {"0.32": (), "0.33": ("vllm_config", "kv_cache_specs")},
    ),
    Seam(
        "get_kv_cache_groups",
        "wrapped",
        {v: (f"{module}:get_kv_cache_groups",) for v, module in _PLANNING.items()},
        dict.fromkeys(VERSIONS, ("vllm_config", "kv_cache_spec")),
    ),
    Seam(
        "get_kv_cache_config_from_groups",
        "wrapped",
        {v: (f"{module}:get_kv_cache_config_from_groups",) for v, module in _PLANNING.items()},
        dict.fromkeys(VERSIONS, ("vllm_config", "kv_cache_groups", "available_memory")),
    ),
    _same(
        "zero_kv_blocks",
        "wrapped",
        "vllm.v1.worker.utils:KVBlockZeroer.__init__",
        "self device attn_groups_iter kernel_block_sizes static_forward_context num_blocks "
        "runner_only_attn_layers",
    ),
    _same(
        "copy_kv_cache_blocks_inplace",
        "wrapped",
        "vllm.v1.worker.gpu_model_runner:copy_kv_cache_blocks_inplace "
        "vllm.v1.worker.gpu.model_runner:copy_kv_cache_blocks_inplace",
        "kv_caches num_blocks kv_cache_block_copies",
    ),
    _same(
        "get_kv_cache_capacity",
        "called",
        "vllm.v1.core.kv_cache_utils:get_kv_cache_capacity",
        "vllm_config kv_cache_config",
    ),
    _same(
        "get_kv_cache_spec",
        "called",
        "vllm.v1.worker.gpu.attn_utils:get_kv_cache_spec",
        "vllm_config",
    ),
    _same(
        "initialize_model",
        "called",
        "vllm.model_executor.model_loader.utils:initialize_model",
        "vllm_config prefix model_class model_config",
    ),
    _same(
        "update_block_size_for_backend",
        "called",
        "vllm.platforms.interface:Platform.update_block_size_for_backend",
        "vllm_config",
    ),
    _same(
        "select_unquantized_moe_backend",
        "called",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
        "select_unquantized_moe_backend",
        "moe_config",
    ),
    _same(
        "resolve_kv_cache_dtype_string",
        "called",
        "vllm.utils.torch_utils:resolve_kv_cache_dtype_string",
        "kv_cache_dtype model_config",
    ),
    _same(
        "num_blocks_of",
        "overridden",
        "vllm.v1.kv_cache_interface:KVCacheConfig.num_blocks_of",
        "self tensor",
    ),
    _same(
        "get_num_blocks_to_allocate",
        "overridden",
        "vllm.v1.core.single_type_kv_cache_manager:"
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        "self request_id num_tokens new_computed_blocks total_computed_tokens "
        "num_local_computed_tokens num_tokens_main_model apply_admission_cap prefill_end",
    ),
    _same(
        "propose_draft_token_ids",
        "wrapped",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
        "self scheduler_output sampled_token_ids sampling_metadata hidden_states "
        "sample_hidden_states aux_hidden_states spec_decode_metadata common_attn_metadata "
        "slot_mappings",
    ),
    _same(
        "propose_v1",
        "called",
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose",
        "self num_speculative_tokens target_token_ids target_positions target_hidden_states "
        "next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata "
        "mm_embed_inputs num_rejected_tokens_gpu slot_mappings",
    ),
    _same(
        "propose_v2",
        "called",
        "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.propose",
        "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
        "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state "
        "dummy_run skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens",
    ),
    _same(
        "build_attn_metadata",
        "called",
        "vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
        "attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu max_query_len "
        "seq_lens max_seq_len block_tables slot_mappings kv_cache_config seq_lens_cpu_upper_bound "
        "dcp_local_seq_lens dcp_local_seq_lens_cpu_upper_bound positions is_prefilling "
        "mm_req_doc_ranges model_specific_attn_metadata for_cudagraph_capture causal "
        "rswa_prefix_lens ubatch_idx fast_prefill req_idx",
    ),
    _same(
        "cache_blocks",
        "overridden",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks",
        "self request num_tokens retention_interval replay_boundaries",
    ),
    _same(
        "allocate_new_blocks",
        "overridden",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.allocate_new_blocks",
        "self request_id num_tokens num_tokens_main_model",
    ),
    _same(
        "block made findable",
        "called",
        "vllm.v1.core.block_pool:BlockPool._insert_block_hash",
        "self block_hash_with_group_id block num_tokens",
    ),
    _same(
        "reset of all pools",
        "called",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.reset_prefix_cache",
        "self",
    ),
    _same(
        "remove_skipped_blocks",
        "overridden",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks",
        "self request_id processed_computed_tokens num_prompt_tokens",
    ),
    _same(
        "add_local_computed_blocks",
        "overridden",
        "vllm.v1.core.single_type_kv_cache_manager:"
        "SingleTypeKVCacheManager.add_local_computed_blocks",
        "self request_id new_computed_blocks num_local_computed_tokens "
        "num_external_computed_tokens",
    ),
    _same(
        "make_stats",
        "wrapped",
        "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
        "self spec_decoding_stats kv_connector_stats cudagraph_stats perf_stats ec_connector_stats",
    ),
    _same(
        "stat_logger_manager",
        "wrapped",
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        "self vllm_config engine_idxs custom_stat_loggers enable_default_loggers "
        "aggregate_engine_logging client_count",
    ),
    _same(
        "block returned to its own pool",
        "called",
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        "block_id ref_cnt _block_hash _block_hash_num_tokens prev_free_block next_free_block "
        "is_null pool",
    ),
)


def vllm_version() -> str:
    """The installed vLLM's version, or an empty string."""
    try:
        return str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return ""


def minor_version() -> str:
    """The minor release of vLLM, such as "0.32".

    Raises:
        UnsupportedVLLM: it is not one of `VERSIONS`.

    """
    version = vllm_version()
    minor = _minor(version)
    if minor not in VERSIONS:
        raise UnsupportedVLLM(
            f"windowed_mtp runs in vLLM {' and '.join(f'{v}.x' for v in VERSIONS)}, but "
            f"{f'vLLM {version}' if version else 'no vLLM'} is installed. Install a supported "
            'vLLM, a newer wmtp-vllm, or select method "mtp".'
        )
    return minor


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check() -> list[Verdict]:
    """Look at every seam of the installed vLLM, by name and signature.

    Raises:
        UnsupportedVLLM: the release is not a tested one.

    """
    minor = minor_version()
    return [_verdict(seam, place, minor) for seam in SEAMS for place in seam.places[minor]]


def apply() -> None:
    """Put all replacements in place, in this process; all of them or none. Idempotent.

    Raises:
        UnsupportedVLLM: vLLM is not a tested release, or a seam is not as expected.

    """
    _refuse_misfits(check())
    from wmtp_vllm.kv_manager import manager

    manager.register()
    _put_in_place(("selects", "wrapped"), minor_version())


def apply_selection() -> None:
    """Put only the seams in place that recognise the method name. Idempotent.

    In a release that is not a tested one too, if it has them: whoever selects the method there is
    told what is wrong by `apply`.

    Raises:
        UnsupportedVLLM: one of these seams is not as expected.

    """
    minor = _minor(vllm_version())
    if minor not in VERSIONS:
        minor = VERSIONS[-1]
    seams = [seam for seam in SEAMS if seam.use == "selects"]
    _refuse_misfits(
        [_verdict(seam, place, minor) for seam in seams for place in seam.places[minor]]
    )
    _put_in_place(("selects",), minor)


def original(name: str) -> Callable[..., Any]:
    """What vLLM itself has at the seam `name`."""
    seam = next(seam for seam in SEAMS if seam.name == name)
    owner, attribute = _locate(seam.places[minor_version()][0])
    return _unwrapped(getattr(owner, attribute))


def _refuse_misfits(verdicts: Sequence[Verdict]) -> None:
    problems = [f"{verdict.place}: {verdict.problem}" for verdict in verdicts if verdict.problem]
    if problems:
        raise UnsupportedVLLM(
            f"windowed_mtp does not fit vLLM {vllm_version()}: {'; '.join(problems)}. Something "
            "else may have patched it, or this build differs from the release. `wmtp check` prints "
            'all seams. Install an unchanged supported vLLM, or select method "mtp".'
        )


def _put_in_place(uses: Collection[str], minor: str) -> None:
    from wmtp_vllm import replacements

    for seam in SEAMS:
        for place in seam.places[minor] if seam.use in uses else ():
            _replace(*_locate(place), getattr(replacements, seam.name))


def _replace(owner: Any, attribute: str, replacement: Callable[..., Any]) -> None:
    found = getattr(owner, attribute)
    if hasattr(found, "_wmtp_vllm_original"):
        return

    @functools.wraps(found)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return replacement(found, *args, **kwargs)

    stand_in._wmtp_vllm_original = found  # type: ignore[attr-defined]
    is_static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
    setattr(owner, attribute, staticmethod(stand_in) if is_static else stand_in)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, "_wmtp_vllm_original", function)


def _locate(place: str) -> tuple[Any, str]:
    """The object that has the attribute at `place`, and the attribute's name."""
    module, _, qualified = place.partition(":")
    *path, attribute = qualified.split(".")
    owner = importlib.import_module(module)
    for name in path:
        owner = getattr(owner, name)
    return owner, attribute


def _verdict(seam: Seam, place: str, minor: str) -> Verdict:
    try:
        owner, attribute = _locate(place)
        found = _unwrapped(getattr(owner, attribute))
    except (ImportError, AttributeError) as error:
        return Verdict(seam, place, f"not found ({error})")
    if not callable(found):
        return Verdict(seam, place, f"is no function: {found!r}")
    parameters = tuple(inspect.signature(found).parameters)
    if parameters != seam.parameters[minor]:
        return Verdict(
            seam,
            place,
            f"takes ({', '.join(parameters)}), expected ({', '.join(seam.parameters[minor])})",
        )
    return Verdict(seam, place)


@dataclass(frozen=True)
class Draft:
    """The draft of a worker: its attention layers, and what builds their metadata."""

    layer_names: list[str]
    metadata_builders: list[Any]
    kv_cache_config: Any
    num_rows_skipped: int
    """Prompt tokens that it did not run on, so far."""


def proposing(worker: Any) -> tuple[Any, str]:
    """The object and attribute that a runner calls once a step to draft."""
    runner = worker.model_runner
    speculator = getattr(runner, "speculator", None)
    return (speculator, "propose") if speculator else (runner, "propose_draft_token_ids")


def draft_of(worker: Any) -> Draft:
    """Find the draft in a worker of either runner, whatever its method; for the demo and tests."""
    runner = worker.model_runner
    proposer: Any = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    if hasattr(proposer, "draft_attn_layer_names"):  # V2
        names = proposer.draft_attn_layer_names
        groups = [group for groups in proposer.attn_groups for group in groups]
    else:
        names = getattr(proposer, "_draft_attn_layer_names", set())
        groups = getattr(proposer, "draft_attn_groups", [])
    builders = [builder for group in groups for builder in group.metadata_builders]
    skipped = getattr(getattr(proposer, "propose", None), "num_rows_skipped", 0)
    return Draft(sorted(names), builders, runner.kv_cache_config, skipped)


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an `LLM` whose engine core is in this process, or None."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return core and core.scheduler


def ring_of(scheduler: Any) -> Any:
    """The `RingManager` of a scheduler, or None."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return next((m for m in managers if hasattr(m, "num_warm_starts")), None)
