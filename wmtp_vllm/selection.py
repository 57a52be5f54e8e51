"""Selecting `windowed_mtp` or its like: make and check vLLM's speculative config, place the seams."""

import copy
from typing import Any

from wmtp_vllm import draft_rope, refusals, seams, xformers_draft
from wmtp_vllm.config import METHOD, Selection, WindowedMTPConfig, refuse_foreign, split_keys


def put_in_place(config: WindowedMTPConfig) -> None:
    """Make this process one of an engine that selected `windowed_mtp`. Idempotent.

    Raises:
        ValueError: vLLM is not a tested release, a seam is not as expected, or xFormers is selected and
            its place is taken.

    """
    seams.apply()
    if config.draft_attention_backend == "xformers":
        xformers_draft.register()


def create_speculative_config(
    original: Any, engine_args: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    """vLLM's method of this name on `EngineArgs`, for a `method` of `METHODS`.

    The engine arguments keep the user's dictionary, so that making a config twice works.

    Raises:
        ValueError: the configuration, the model or this vLLM does not allow windowed MTP.

    """
    from vllm.config import SpeculativeConfig

    seams.apply()
    refuse_foreign(engine_args.additional_config)
    config, vllm_keys = split_keys(_asked(engine_args), SpeculativeConfig)
    if config.draft_kv_cache == "ring":
        # vLLM drops the last block of a prefix hit, for the draft to rebuild the KV that it shares
        # with other requests there. A ring shares none, so the target keeps its whole hit.
        vllm_keys.setdefault("disable_eagle_block_drop", True)
    refusals.before_config(config, vllm_keys, engine_args, target_model_config)
    if config.draft_attention_backend == "xformers":
        xformers_draft.choose(vllm_keys, engine_args, target_model_config)
    put_in_place(config)

    normalised = copy.copy(engine_args)
    normalised.speculative_config = vllm_keys
    normalised.spec_method = normalised.spec_model = normalised.spec_tokens = None
    try:
        speculative_config = original(normalised, target_model_config, target_parallel_config)
    except (NotImplementedError, ZeroDivisionError) as error:
        if config.method != METHOD:
            raise
        raise refusals.without_mtp_head(target_model_config) from error
    if config.method == METHOD:
        draft_rope.follow_target(speculative_config, target_model_config)
    refusals.after_config(config, speculative_config, target_model_config)

    engine_args.additional_config = {
        **engine_args.additional_config,
        METHOD: Selection(config.model_dump()),
    }
    return speculative_config


def _asked(engine_args: Any) -> dict[str, Any]:
    """The user's keys, of the dictionary and of vLLM's three flags for the most common ones."""
    asked = {k.replace("-", "_"): v for k, v in (engine_args.speculative_config or {}).items()}
    for flag, key, value in (
        ("--spec-method", "method", engine_args.spec_method),
        ("--spec-model", "model", engine_args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is None:
            continue
        if key in asked:
            raise ValueError(
                f"{flag} {value} and {key!r}: {asked[key]!r} in the speculative config are "
                "mutually exclusive: give one."
            )
        asked[key] = value
    return asked
