"""The configuration of `method: "windowed_mtp"`: its own keys, and how it travels in vLLM's config.

`speculative_config={"method": "windowed_mtp", ...}` becomes vLLM's `method: "mtp"` before
`SpeculativeConfig` is built, because many branches of vLLM (asynchronous scheduling, block hashing,
grouping) key on that name; `windowed_eagle3` and the others likewise. The plugin's own keys travel in
`additional_config`, vLLM's public field for plugins, which reaches every process of an engine.
"""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

METHOD: Literal["windowed_mtp"] = "windowed_mtp"
Method = Literal["windowed_mtp", "windowed_eagle", "windowed_eagle3", "windowed_draft_model"]
METHODS: tuple[Method, ...] = get_args(Method)
"""Each is vLLM's method of the same name without `windowed_`, whose draft reads a window."""
LARGEST = 1 << 29
"""Tokens or blocks at most: their sums with a context's length stay within 32 bits on every device."""


class WindowedMTPConfig(BaseModel):
    """The keys of the speculative config that are the plugin's own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    method: Method = METHOD
    draft_window_size: int = Field(default=4032, ge=1, le=LARGEST)
    """W: most recent tokens that the draft attends to."""
    draft_sink_size: int = Field(default=64, ge=0, le=LARGEST)
    """S: first tokens of the request that the draft always attends to; 0 for none."""
    draft_kv_cache: Literal["ring", "full"] = "ring"
    """Where the draft's KV lives: in a fixed-size ring of blocks for each request, or in vLLM's own
    full draft KV cache, of which only the sink and the window are read."""
    draft_ring_cache_blocks: int | None = Field(default=None, ge=0, le=LARGEST)
    """Blocks of the ring pool for the rings of requests that have ended, so that a later request which
    shares their prefix starts warm; None for a budget of every eighth sequence."""
    draft_prefill: Literal["auto", "full"] = "auto"
    """Which prompt tokens the draft runs on: those whose KV will be read, where the head allows it, or
    all."""
    draft_attention_backend: Literal["native", "xformers"] = "native"
    """What computes the draft's attention: the backend that vLLM chose for it, or xFormers."""

    @property
    def native_method(self) -> str:
        """vLLM's own method for the same draft."""
        return self.method.removeprefix("windowed_")


class Selection(dict[str, Any]):
    """What `additional_config` carries: the plugin's keys, and what selecting it entails.

    A dictionary, since vLLM hashes `additional_config` as JSON. Unpickling one (which is how it gets
    to the engine core and to workers that are spawned, whatever the executor) selects the plugin in
    that process too: it puts the seams in place.
    """

    def __reduce__(self) -> tuple[Callable[..., "Selection"], tuple[dict[str, Any]]]:
        return _arrive, (dict(self),)

    @property
    def config(self) -> WindowedMTPConfig:
        return WindowedMTPConfig(**self)


def _arrive(values: dict[str, Any]) -> Selection:
    from wmtp_vllm import selection

    arrived = Selection(values)
    selection.put_in_place(arrived.config)
    return arrived


def selected(vllm_config: Any) -> WindowedMTPConfig | None:
    """The plugin's configuration in a `VllmConfig`, or None where it is not selected."""
    additional_config = vllm_config.additional_config
    if not isinstance(additional_config, dict) or METHOD not in additional_config:
        return None
    refuse_foreign(additional_config)
    return additional_config[METHOD].config


def deselected(additional_config: Any) -> Any:
    """`additional_config` for another method: an earlier config may have left a selection in it."""
    if isinstance(additional_config, dict) and isinstance(additional_config.get(METHOD), Selection):
        return {key: value for key, value in additional_config.items() if key != METHOD}
    return additional_config


def refuse_foreign(additional_config: Any) -> None:
    """Refuse an `additional_config` that has no room for a selection, or one of the user's own.

    Raises:
        ValueError: it is such a one.

    """
    if not isinstance(additional_config, dict):
        raise ValueError(
            f"{METHOD} needs a dictionary as additional_config, to travel in; found a "
            f"{type(additional_config).__name__}. Give a dictionary, or none."
        )
    if METHOD in additional_config and not isinstance(additional_config[METHOD], Selection):
        raise ValueError(
            f'additional_config["{METHOD}"] is not for users to set; found '
            f"{additional_config[METHOD]!r}. "
            f'Select the method with speculative_config={{"method": "{METHOD}", ...}}.'
        )


def split_keys(
    speculative_config: dict[str, Any], vllm_config_class: type
) -> tuple[WindowedMTPConfig, dict[str, Any]]:
    """The plugin's keys, validated, and the rest, which is vLLM's own.

    Args:
        speculative_config: the user's dictionary, with one of `METHODS`.
        vllm_config_class: vLLM's `SpeculativeConfig`, for the names of its keys.

    Raises:
        ValueError: a key that neither knows, or a value that its key does not take.

    """
    own = WindowedMTPConfig.model_fields
    vllm = {field.name for field in dataclasses.fields(vllm_config_class)}
    for key in speculative_config.keys() - own.keys() - vllm:
        close = difflib.get_close_matches(key, [*own, *vllm], n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"speculative_config has the key {key!r}, which {METHOD} does not know. {hint}"
            f"Its own keys are {', '.join(k for k in own if k != 'method')}; the others are vLLM's."
        )
    try:
        config = WindowedMTPConfig(**{k: v for k, v in speculative_config.items() if k in own})
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()
        )
        raise ValueError(
            f"speculative_config of {METHOD}: {problems}. draft_window_size is an integer of at "
            'least 1, draft_sink_size one of at least 0, draft_kv_cache "ring" or "full", '
            'draft_ring_cache_blocks an integer of at least 0, draft_prefill "auto" or "full", '
            f'draft_attention_backend "native" or "xformers"; no number is above {LARGEST:,}.'
        ) from None
    rest = {k: v for k, v in speculative_config.items() if k not in own}
    return config, rest | {"method": config.native_method}
