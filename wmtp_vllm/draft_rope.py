"""Positions of the draft: what overrides of the target's config must reach the draft's too."""

from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.wmtp_vllm.draft_rope")

ROPE_AND_LENGTH_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "max_position_embeddings",
    "original_max_position_embeddings",
)


def follow_target(speculative_config: Any, target_model_config: Any) -> None:
    """Give the draft the target's rope and length keys where the user overrode any by a dictionary.

    vLLM passes callable `hf_overrides` on to the draft, but not dictionaries. A target stretched by
    YaRN then drafts with unstretched positions, and past the draft's native length acceptance falls
    to zero for the whole batch, silently (vLLM issue 58080).
    """
    overrides = target_model_config.hf_overrides
    if not isinstance(overrides, dict) or not _mentions_positions(overrides):
        return
    draft_model_config = speculative_config.draft_model_config
    target_config = target_model_config.hf_text_config
    copied = set()
    # Often one and the same object; of a multimodal model, two.
    for draft_config in (draft_model_config.hf_config, draft_model_config.hf_text_config):
        for key in ROPE_AND_LENGTH_KEYS:
            value = getattr(target_config, key, None)
            if value is not None and getattr(draft_config, key, None) != value:
                setattr(draft_config, key, value)
                copied.add(key)
    if speculative_config.max_model_len is None:
        draft_model_config.max_model_len = target_model_config.max_model_len
    if copied:
        logger.info("windowed_mtp: the draft follows the target's %s", ", ".join(sorted(copied)))


def _mentions_positions(overrides: dict[str, Any]) -> bool:
    return any(
        key in ROPE_AND_LENGTH_KEYS or (isinstance(value, dict) and _mentions_positions(value))
        for key, value in overrides.items()
    )
