"""A model taken apart, and its KV planned, from its configuration alone.

vLLM's own classes of the target and its draft are built without storage (PyTorch's meta device),
so layers, weights and KV cache specs are the real ones; then vLLM's planning, and the plugin's, run
on the specs as they do in an engine. It takes neither weights nor a GPU. `wmtp_vllm.planner.anatomy`
runs it in a process of its own, since a process that once selected the method keeps it.
"""

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pydantic import ValidationError

from wmtp_vllm import child, seams
from wmtp_vllm.config import WindowedMTPConfig
from wmtp_vllm.planner.anatomy import Memory, Question
from wmtp_vllm.planner.models import quantization_of
from wmtp_vllm.planner.roofline import HEAD_BITS, Attention, Experts, Part


def _study(question: Question) -> dict[str, Any]:
    from wmtp_vllm import proposers
    from wmtp_vllm.kv_manager.planning import only_rings

    asked = question.speculative_config
    vllm_config, refusal, target, draft, draft_layers = _built(question)
    try:
        proposers.equip_layers(vllm_config, draft_layers)
    except ValueError as error:
        refusal = str(error)
    specs = seams.original("get_kv_cache_spec")(vllm_config)
    rings = only_rings(specs)
    native = {n: rings[n].native if n in rings else s for n, s in specs.items()}
    target_layers = [name for name in native if name not in draft_layers]

    target_part = _take_apart(vllm_config, target, native, target_layers)
    draft_part = _take_apart(vllm_config, draft, native, draft_layers)
    shared = _numel(_vocabulary(target))
    stored = _numel(target.parameters()) - shared + _numel(draft.parameters())
    if question.draft_config is None:  # an MTP head's embeddings and output head are the target's
        draft_part = replace(draft_part, head_params=target_part.head_params)
        stored -= _numel(_vocabulary(draft))
    elif not vllm_config.speculative_config.uses_draft_model():  # an EAGLE head's embeddings are
        stored -= _numel(_vocabulary(draft)) - _numel(_vocabulary(draft, only_head=True))
    weights = stored * question.weight_bits / 8 + shared * HEAD_BITS / 8
    kv_bytes = question.kv_bytes
    kv_bytes = question.gpu_bytes - weights if kv_bytes is None else kv_bytes

    native_plan, _ = _plan(vllm_config, native, kv_bytes)
    windowed_plan, problem = _plan(vllm_config, specs, kv_bytes) if rings else (None, "")
    if native_plan and not windowed_plan:
        refusal = refusal or problem
    max_model_len = vllm_config.model_config.max_model_len

    def usage(names: Collection[str]) -> float:
        each = (native[n].max_memory_usage_bytes(vllm_config) for n in names)
        return float(question.batch * sum(each))

    states = [name for name in target_layers if _is_state(native[name])]
    memory = Memory(
        weights=weights,
        kv=kv_bytes,
        target=usage([n for n in target_layers if n not in states]),
        states=usage(states),
        draft=usage(draft_layers),
        ring=(
            question.batch
            * sum(
                ring.draft_window.ring_budget(ring.num_speculative_tokens, max_model_len)
                * ring.page_size_bytes
                for ring in rings.values()
            )
            if rings
            else None
        ),
        ring_pool=_ring_pool(windowed_plan) if windowed_plan else None,
        native_capacity=_capacity(vllm_config, native_plan),
        windowed_capacity=_capacity(vllm_config, windowed_plan),
    )
    reads = asked["draft_window_size"] + asked["draft_sink_size"]
    return {
        "architecture": vllm_config.model_config.architecture,
        "params": (stored + shared) * vllm_config.parallel_config.tensor_parallel_size,
        "target": asdict(target_part),
        "draft": asdict(draft_part),
        "draft_reads": max(
            (ring.draft_window.max_compact_length(1) for ring in rings.values()), default=reads
        ),
        "memory": asdict(memory),
        "refusal": refusal,
    }


class RefusedAnyway(ValueError):
    """A model that cannot be built on this machine, and whose draft is refused by its configuration."""


def _built(question: Question) -> tuple[Any, str, Any, Any, list[str]]:
    """The engine's configuration, why windowed MTP is refused, and what `_build` makes."""
    with tempfile.TemporaryDirectory(prefix="wmtp-plan-") as scratch:
        arguments = _engine_arguments(question, Path(scratch))
        speculative_config = _speculative_config(question, Path(scratch))
        vllm_config, refusal = _engine_config(arguments, speculative_config)
        try:
            return vllm_config, refusal, *_build(vllm_config)
        except Exception as error:
            if refusal:
                raise RefusedAnyway(refusal) from error
            raise


def draft_kinds(question: Question) -> dict[str, Any]:
    """What kind of draft a model has, and why windowed MTP would refuse it, if it would."""
    from wmtp_vllm import proposers

    try:
        vllm_config, refusal, _, draft, names = _built(question)
    except RefusedAnyway as refused:
        nothing = {"attention": "", "layers": 0, "token_bytes": 0, "positions": ""}
        return nothing | {"reason": str(refused)}
    layers = vllm_config.compilation_config.static_forward_context
    specs = {name: layers[name].get_kv_cache_spec(vllm_config) for name in names}
    try:
        proposers.equip_layers(vllm_config, names)
    except ValueError as error:
        refusal = refusal or str(error)
    modules = {type(module).__name__ for module in draft.modules()}
    positions = "RoPE" if any("Rotary" in name for name in modules) else "none"
    if positions != "none" and vllm_config.model_config.uses_mrope:
        positions = "M-RoPE"
    kinds = sorted({_kind(layers[name], spec) for name, spec in specs.items()})
    return {
        "attention": " and ".join(kinds) or "no KV of its own",
        "layers": len(names),
        "token_bytes": max((_token_bytes(spec) for spec in specs.values()), default=0),
        "positions": positions,
        "reason": refusal,
    }


def _kind(layer: Any, spec: Any) -> str:
    """An attention layer's kind, in words."""
    name = "MLA" if hasattr(layer, "kv_lora_rank") else type(layer).__name__
    if name == "Attention":
        name = "full" if spec.num_kv_heads == layer.num_heads else "full, grouped queries"
    if getattr(layer, "indexer", None) is not None:
        name += ", sparse by an indexer"
    if window := getattr(spec, "sliding_window", None):
        name = name.replace("full", "sliding window") + f" ({window:,} tokens)"
    return name


def _token_bytes(spec: Any) -> int:
    return int(replace(spec, block_size=1, page_size_padded=None).page_size_bytes)


def _engine_arguments(question: Question, scratch: Path) -> dict[str, Any]:
    """Arguments for a model of which there is nothing but a `config.json`, in `scratch`."""
    config = dict(question.config)
    arguments: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    arguments |= question.engine_arguments
    # How weights are stored changes no layer, and many a build cannot make those of all formats. But
    # a checkpoint can also say how its KV is to be quantized.
    quantization = quantization_of(config)
    if quantization and arguments.get("kv_cache_dtype", "auto") == "auto":
        model_config = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=quantization))
        resolve = seams.original("resolve_kv_cache_dtype_string")
        arguments["kv_cache_dtype"] = resolve("auto", model_config)
    config.pop("quantization_config", None)
    if "text_config" in config:
        text_config = config["text_config"].items()
        config["text_config"] = {k: v for k, v in text_config if k != "quantization_config"}
    (scratch / "config.json").write_text(json.dumps(config))
    if arguments.get("tensor_parallel_size", 1) > 1:
        # Else vLLM counts this machine's GPUs, to choose one.
        arguments["distributed_executor_backend"] = "mp"
    return arguments | {"model": str(scratch)}


def _speculative_config(question: Question, scratch: Path) -> dict[str, Any]:
    """The question's; the draft, where it is a checkpoint of its own, is a `config.json` too."""
    if question.draft_config is None:
        return question.speculative_config
    folder = scratch / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(question.draft_config))
    return question.speculative_config | {"model": str(folder)}


def _engine_config(
    arguments: dict[str, Any], speculative_config: dict[str, Any]
) -> tuple[Any, str]:
    """The engine's configuration, and why it is native MTP's where windowed MTP is refused."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        args = EngineArgs(**arguments, speculative_config=speculative_config)
        config, refusal = args.create_engine_config(), ""
    except ValueError as error:
        own = WindowedMTPConfig.model_fields
        native = {k: v for k, v in speculative_config.items() if k not in own}
        native["method"] = WindowedMTPConfig(method=speculative_config["method"]).native_method
        args = EngineArgs(**arguments, speculative_config=native)
        try:
            config, refusal = args.create_engine_config(), str(error)
        except (ValueError, NotImplementedError, ZeroDivisionError):
            raise error from None  # not windowed MTP's alone, and its message is the better one
    if config.cache_config.kv_cache_layout is None:
        # The engine asks its workers; all layouts have the same bytes.
        config.cache_config.kv_cache_layout = "LBNHC"
    return config, refusal


def _build(vllm_config: Any) -> tuple[Any, Any, list[str]]:
    """The target and the draft without storage, as rank 0 has them, and the draft's KV layers."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    initialize = seams.original("initialize_model")
    parallel = vllm_config.parallel_config
    layers = vllm_config.compilation_config.static_forward_context
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as scratch:
        # One process, which builds what the first of so many would: nothing is ever exchanged.
        if not model_parallel_is_initialized():
            world_size, parallel.world_size = parallel.world_size, 1
            init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
            initialize_model_parallel(1)
            parallel.world_size = world_size
        get_tp_group().world_size = parallel.tensor_parallel_size
        dtype = vllm_config.model_config.dtype
        with torch.device("meta"), set_default_torch_dtype(dtype), _as_if_kernels_were_there():
            target = initialize(vllm_config)
            target_layers = set(layers)
            draft = _draft(initialize, vllm_config)
        # As the executor does once the model is loaded.
        current_platform.update_block_size_for_backend(vllm_config)
    new = [name for name in layers if name not in target_layers]
    with_kv = [n for n in new if getattr(layers[n], "get_kv_cache_spec", None)]
    return target, draft, [n for n in with_kv if layers[n].get_kv_cache_spec(vllm_config)]


def _draft(initialize: Callable[..., Any], vllm_config: Any) -> Any:
    """The draft as vLLM's proposers make it."""
    from vllm.config.utils import replace as replace_config

    speculative_config = vllm_config.speculative_config
    model_config = speculative_config.draft_model_config
    if not speculative_config.uses_draft_model():
        return initialize(vllm_config, model_config=model_config)
    own = replace_config(vllm_config, quant_config=None, model_config=model_config)
    return initialize(own, prefix="draft_model")


def _as_if_kernels_were_there() -> contextlib.AbstractContextManager[Any]:
    """A CPU has no kernel for experts without gates (Nemotron), and vLLM says so when they are made;
    here none runs."""
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.platforms import current_platform

    patches = contextlib.ExitStack()
    if not (current_platform.is_cuda_alike() or current_platform.is_xpu()):
        able = SimpleNamespace(is_cuda_alike=lambda: True)
        chosen = (UnquantizedMoeBackend.CPU, None)
        name = "select_unquantized_moe_backend"
        patches.enter_context(mock.patch.object(config, "current_platform", able))
        patches.enter_context(
            mock.patch.object(unquantized_fused_moe_method, name, return_value=chosen)
        )
    return patches


def _take_apart(
    vllm_config: Any, model: Any, specs: dict[str, Any], names: Collection[str]
) -> Part:
    attention = Counter(
        _attention(vllm_config, name, specs[name]) for name in names if not _is_state(specs[name])
    )
    experts: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        if hasattr(module, "top_k") and hasattr(module, "global_num_experts"):
            weights = sum(p.numel() for p in module.parameters())
            experts[module.global_num_experts, module.top_k] += weights
    model = _language_model(model)
    vocabulary = _vocabulary(model)
    # Where the embeddings serve as the head there may be no module of its class.
    head = _numel(_vocabulary(model, only_head=True)) or _numel(vocabulary)
    dense = _numel(model.parameters()) - _numel(vocabulary) - sum(experts.values())
    return Part(
        layers=_num_layers(model) or len(names),
        dense_params=dense,
        head_params=head,
        experts=tuple(Experts(n, k, weights) for (n, k), weights in experts.items()),
        attention=tuple(replace(kind, layers=count) for kind, count in attention.items()),
        state_bytes=sum(
            prod(shape) * dtype.itemsize
            for name in names
            if _is_state(specs[name])
            for shape, dtype in zip(specs[name].shapes, specs[name].dtypes, strict=True)
        ),
    )


def _attention(vllm_config: Any, name: str, spec: Any) -> Attention:
    layer = vllm_config.compilation_config.static_forward_context[name]
    # Latent attention: one row of KV a token, of which the values are the front part.
    value_size = getattr(layer, "kv_lora_rank", None) or spec.head_size_v or spec.head_size
    return Attention(
        layers=1,
        num_heads=layer.num_heads,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        value_size=value_size,
        token_bytes=_token_bytes(spec),
        reach=getattr(spec, "sliding_window", None),
    )


def _num_layers(model: Any) -> int:
    """Entries of its longest list of modules."""
    from torch.nn import ModuleList

    return max((len(m) for m in model.modules() if isinstance(m, ModuleList)), default=0)


def _language_model(model: Any) -> Any:
    """Without what only images and the like pass through."""
    found = getattr(model, "get_language_model", None)
    return found() if found else model


def _vocabulary(model: Any, only_head: bool = False) -> list[Any]:
    """Weights of embeddings and output head, one where they are tied; or of the head's class alone."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    kind = ParallelLMHead if only_head else VocabParallelEmbedding
    modules = (m for m in model.modules() if isinstance(m, kind))
    return list({id(m.weight): m.weight for m in modules}.values())


def _numel(weights: Iterable[Any]) -> int:
    return sum(weight.numel() for weight in weights)


def _is_state(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)


def _plan(vllm_config: Any, specs: dict[str, Any], kv_bytes: float) -> tuple[Any, str]:
    """The KV cache config of one worker; or None, and why not one sequence fits."""
    from vllm.v1.engine import core

    arguments: list[Any] = [vllm_config, [specs], [int(kv_bytes)]]
    if hasattr(core, "get_global_kv_cache_groups"):  # vLLM 0.33
        arguments.append(core.get_global_kv_cache_groups(vllm_config, [specs]))
    try:
        [plan] = core.get_kv_cache_configs(*arguments)
    except ValueError as error:
        return None, str(error)
    return plan, ""


def _capacity(vllm_config: Any, plan: Any) -> int | None:
    """Tokens that the plan has room for."""
    return int(seams.original("get_kv_cache_capacity")(vllm_config, plan)[0]) if plan else None


def _ring_pool(plan: Any) -> float:
    """Bytes of the ring pool in a plan."""
    from wmtp_vllm.kv_manager.planning import pool_bytes
    from wmtp_vllm.kv_manager.spec import RingSpec

    return float(
        sum(
            pool_bytes(group.kv_cache_spec, len(group.layer_names))
            for group in plan.kv_cache_groups
            if isinstance(group.kv_cache_spec, RingSpec)
        )
    )


def _study_each(request: dict[str, Any]) -> list[dict[str, Any]]:
    seams.apply()
    return [answer(Question(**values), _study) for values in request["questions"]]


def answer(question: Question, study: Callable[[Question], dict[str, Any]]) -> dict[str, Any]:
    """What `study` makes of the question, or the error that vLLM or the plugin has for it."""
    try:
        return study(question)
    except ValidationError as error:  # pydantic's own text names its classes and addresses
        return {"error": "; ".join(problem["msg"] for problem in error.errors())}
    except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
        return {"error": str(error) or repr(error)}


if __name__ == "__main__":
    child.answer(_study_each)
