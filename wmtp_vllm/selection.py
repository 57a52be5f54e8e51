"""Selecting `windowed_mtp`: make and check vLLM's speculative config, put the seams in place."""

import copy
from typing import Any

from vllm.logger import init_logger

from wmtp_vllm import draft_rope, refusals, seams
from wmtp_vllm.config import METHOD, Selection, split_keys

logger = init_logger("vllm.wmtp_vllm.selection")


def create_speculative_config(
    original: Any, engine_args: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    """vLLM's method of this name on `EngineArgs`, for `method: "windowed_mtp"`.

    The engine arguments keep the user's dictionary, so that making a config twice works.

    Raises:
        ValueError: the configuration, the model or this vLLM does not allow windowed MTP.

    """
    from vllm.config import SpeculativeConfig

    seams.apply()
    asked = {k.replace("-", "_"): v for k, v in (engine_args.speculative_config or {}).items()}
    if engine_args.spec_method and "method" in asked:
        raise ValueError(
            "--spec-method and --speculative-config['method'] are mutually exclusive: give one."
        )
    asked["method"] = METHOD
    if engine_args.spec_tokens is not None:
        asked.setdefault("num_speculative_tokens", engine_args.spec_tokens)
    config, vllm_keys = split_keys(asked, SpeculativeConfig)
    if config.draft_kv_cache == "ring":
        # vLLM drops the last block of a prefix hit, for the draft to rebuild the KV that it shares
        # with other requests there. A ring shares none, so the target keeps its whole hit.
        vllm_keys["disable_eagle_block_drop"] = True
    refusals.before_config(config, vllm_keys, engine_args, target_model_config)

    normalised = copy.copy(engine_args)
    normalised.speculative_config = vllm_keys
    normalised.spec_method = normalised.spec_tokens = None
    speculative_config = original(normalised, target_model_config, target_parallel_config)
    draft_rope.follow_target(speculative_config, target_model_config)
    refusals.after_config(config, speculative_config, engine_args, target_model_config)

    engine_args.additional_config = {
        **engine_args.additional_config,
        METHOD: Selection(config.model_dump()),
    }
    return speculative_config
