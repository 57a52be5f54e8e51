"""The two proposers, V1's and V2's: vLLM's own, with the draft's attention layers re-equipped.

Both runners load the draft (the model's own MTP head, an EAGLE head beside it, or a model of its own)
and then know the names of its attention layers. There, each layer gets a windowed attention backend and,
with `draft_kv_cache: "ring"`, a ring spec; and the proposer leaves out the prompt tokens whose draft KV
nobody will read. Nothing else of the proposers changes, neither of vLLM's V1 `SpecDecodeBaseProposer`
nor of its V2 `DraftModelSpeculator`.
"""

import functools
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from wmtp_vllm import draft_prefill
from wmtp_vllm.attention_backends.windowed import windowed_backend
from wmtp_vllm.config import WindowedMTPConfig, selected
from wmtp_vllm.kv_manager.spec import RingSpec

logger = init_logger("vllm.wmtp_vllm.proposers")

ring_layers: weakref.WeakSet[Attention | MLAAttention] = weakref.WeakSet()
"""The draft layers of this process whose KV is in a ring."""

draft_models: weakref.WeakSet[Any] = weakref.WeakSet()
"""V1's proposers of this process whose draft is a model of its own, over a ring. V1's runner gives them
the block ids of the first group, since otherwise draft models share the target's."""

HANDLED_SPECS = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)


def equip_v1(proposer: Any) -> None:
    """Make V1's `SpecDecodeBaseProposer` windowed, once it has loaded its model.

    Raises:
        ValueError: a layer whose kind of attention the plugin does not handle; or a ring under M-RoPE.

    """
    refuse_slots_by_position(proposer.vllm_config)
    if equip_layers(proposer.vllm_config, proposer._draft_attn_layer_names):
        proposer.propose = draft_prefill.SkippingV1(proposer)
    config = selected(proposer.vllm_config)
    if config and config.native_method == "draft_model" and config.draft_kv_cache == "ring":
        draft_models.add(proposer)


def equip_v2(speculator: Any) -> None:
    """The same for V2's `DraftModelSpeculator`."""
    if equip_layers(speculator.vllm_config, speculator.draft_attn_layer_names):
        speculator.propose = draft_prefill.SkippingV2(speculator)


def refuse_slots_by_position(vllm_config: VllmConfig) -> None:
    """V1 writes what it drafts under M-RoPE to the slots of its positions, which images put behind the
    tokens' places: in a ring these may be another request's by then.

    Raises:
        ValueError: the draft has such positions, a ring, and more than one step.

    """
    config, speculative_config = selected(vllm_config), vllm_config.speculative_config
    if (
        config is not None
        and config.draft_kv_cache == "ring"
        and speculative_config.draft_model_config.uses_mrope
        and speculative_config.num_speculative_tokens > 1
    ):
        raise ValueError(
            f"{config.method} has no ring under M-RoPE on vLLM's Model Runner V1, which writes draft "
            "KV by position and not by place. Use Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1), set "
            '"draft_kv_cache": "full", or draft one token a step.'
        )


def equip_layers(vllm_config: VllmConfig, draft_layer_names: Collection[str]) -> bool:
    """Make the draft's attention layers windowed, if this engine selected `windowed_mtp`.

    Args:
        vllm_config: the engine's configuration.
        draft_layer_names: its draft's attention layers that have KV of their own.

    Returns:
        Whether the draft may leave out prompt tokens that nobody reads.

    Raises:
        ValueError: a layer whose kind of attention the plugin does not handle.

    """
    config = selected(vllm_config)
    if config is None:
        return False
    skips_unread = draft_prefill.may_skip(vllm_config, config, draft_layer_names)
    for name in sorted(draft_layer_names):
        _equip_layer(vllm_config, config, name, skips_unread)
    return skips_unread


def _equip_layer(
    vllm_config: VllmConfig, config: WindowedMTPConfig, name: str, skips_unread: bool
) -> None:
    layer = vllm_config.compilation_config.static_forward_context[name]
    native_spec = layer.get_kv_cache_spec(vllm_config)
    if (
        not isinstance(layer, Attention | MLAAttention)
        or type(native_spec) not in HANDLED_SPECS
        or getattr(layer, "indexer", None) is not None
    ):
        raise ValueError(
            f"{config.method} does not handle the attention of the draft layer {name}: a "
            f"{type(layer).__name__} with a {type(native_spec).__name__}. It handles full, "
            "sliding-window and multi-head latent attention (MLA) with a KV cache of its own and no "
            f'indexer. Use method "{config.native_method}".'
        )
    if getattr(getattr(layer, "impl", None), "alibi_slopes", None) is not None:
        raise ValueError(
            f"{config.method} does not handle ALiBi, whose biases are distances that the compact "
            f"table does not keep; found it in the draft layer {name}. Use method "
            f'"{config.native_method}".'
        )
    window, sink = config.draft_window_size, config.draft_sink_size
    if getattr(layer, "sliding_window", None) is not None:
        logger.warning_once(
            "windowed_mtp: the draft has a sliding window of its own, of %d tokens, so it reads the "
            "last %d tokens and no sink.",
            layer.sliding_window,
            min(window, layer.sliding_window),
        )
        window, sink = min(window, layer.sliding_window), 0

    native_backend = layer.attn_backend
    speculative_config = vllm_config.speculative_config
    k = speculative_config.num_speculative_tokens
    # Modules in a row run again on up to K - 1 tokens before the first new one, since what they made
    # of these was from drafts; the ring still holds the windows of those.
    held = window + (k - 1 if speculative_config.use_multi_module_mtp() else 0)
    is_ring = config.draft_kv_cache == "ring"
    layer.attn_backend = windowed_backend(native_backend, window, sink, 1 if is_ring else 0)
    if is_ring:
        layer.get_kv_cache_spec = functools.partial(
            _ring_spec,
            layer.get_kv_cache_spec,
            native_backend,
            window=held,
            sink=sink,
            num_speculative_tokens=k,
            skips_unread=skips_unread,
            cache_blocks=config.draft_ring_cache_blocks,
        )
        ring_layers.add(layer)


def _ring_spec(
    native_spec_of: Callable[[VllmConfig], Any],
    backend: type[AttentionBackend],
    vllm_config: VllmConfig,
    **ring: Any,
) -> KVCacheSpec:
    native = native_spec_of(vllm_config)
    sizes = backend.get_supported_kernel_block_sizes(native)
    unit = vllm_config.cache_config.prefix_match_unit
    # The runner customises the spec that it gets from a layer; the budget compares like with like.
    return replace(
        RingSpec.replacing(native, sizes, unit, **ring), native=backend.customize_spec(native)
    )
