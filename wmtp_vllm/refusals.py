"""What windowed MTP does not do, said before weights load.

Each message says what is wrong, what was found and what to do.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from wmtp_vllm import seams
from wmtp_vllm.config import METHOD, WindowedMTPConfig

logger = init_logger("vllm.wmtp_vllm.refusals")

KV_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Types of KV that are stored token by token, with scales that are the layer's."""


def before_config(
    config: WindowedMTPConfig, vllm_keys: dict[str, Any], engine_args: Any, target: Any
) -> None:
    """Refuse what the keys and engine arguments show.

    Args:
        config: the plugin's keys.
        vllm_keys: the keys that are vLLM's own.
        engine_args: vLLM's `EngineArgs`.
        target: vLLM's `ModelConfig` of the target.

    Raises:
        ValueError: one of the reasons.

    """
    method, native = config.method, config.native_method
    if vllm_keys.get("num_speculative_tokens") is None:
        raise ValueError(
            f"speculative_config of {method} has no num_speculative_tokens (K, the tokens to draft a "
            "step). Give one, for example 3."
        )
    if method != METHOD and not vllm_keys.get("model"):
        raise ValueError(
            f"speculative_config of {method} has no model. Give the draft's, a path or a name of the "
            f'hub, with the key "model"; only {METHOD} has its draft in the target\'s checkpoint.'
        )
    for key, size in (
        ("decode_context_parallel_size", engine_args.decode_context_parallel_size),
        ("prefill_context_parallel_size", engine_args.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ValueError(
                f"{method} does not work with context parallelism, which spreads one request's KV "
                f"over ranks; found {key}={size}. Set it to 1."
            )
    if config.draft_kv_cache == "ring":
        connector = engine_args.kv_transfer_config
        offloading = engine_args.kv_offloading_size
        if connector is not None or offloading:
            found = (
                f"kv_transfer_config with {getattr(connector, 'kv_connector', connector)}"
                if connector is not None
                else f"kv_offloading_size={offloading}"
            )
            raise ValueError(
                f"{method} cannot transfer KV while the draft's KV is in a ring, which holds no "
                f'whole prefix; found {found}. Set "draft_kv_cache": "full", or remove it.'
            )
    # "auto" is what the checkpoint's quantization says.
    dtype = seams.original("resolve_kv_cache_dtype_string")(engine_args.kv_cache_dtype, target)
    is_own = engine_args.kv_cache_dtype == "auto"
    for found, where in (
        (dtype, "kv_cache_dtype of the checkpoint" if is_own else "kv_cache_dtype"),
        (vllm_keys.get("kv_cache_dtype") or "auto", "kv_cache_dtype of the speculative config"),
    ):
        if found not in KV_DTYPES:
            raise ValueError(
                f"{method} does not handle KV that is stored with scales of its own for each token; "
                f"found {where}={found!r}. Use one of {', '.join(KV_DTYPES)}, or method "
                f'"{native}".'
            )
    if vllm_keys.get("enable_adaptive_verification"):
        raise ValueError(
            f"{method} has not been tried with adaptive verification; found "
            "enable_adaptive_verification in the speculative config. Remove it, or use method "
            f'"{native}".'
        )
    if vllm_keys.get("parallel_drafting"):
        raise ValueError(
            f"{method} does not handle drafts of one pass over all K tokens, which pay for the "
            "context once a step; found parallel_drafting in the speculative config. Remove it, or "
            f'use method "{native}".'
        )
    if method == METHOD and engine_args.load_format != "dummy":
        _refuse_without_mtp_weights(target, vllm_keys.get("model"))


def after_config(config: WindowedMTPConfig, speculative_config: Any, target: Any) -> None:
    """Refuse, or warn of, what the finished speculative config shows.

    Raises:
        ValueError: the draft is of a kind that is not handled.

    """
    draft = speculative_config.draft_model_config
    native, taken = config.native_method, speculative_config.method
    if taken != native:
        raise ValueError(
            f"{config.method} needs a draft of method {native!r}, but vLLM took {draft.model} for one "
            f"of {taken!r}, by its name or its configuration. Give it a name that does not say "
            f"{taken!r}, or use that method."
        )
    reasons = (
        (
            hasattr(draft.hf_text_config, "index_topk"),
            "sparse attention with an indexer",
            "it reads a bounded number of tokens already, which the indexer chooses among all",
        ),
        (
            config.draft_attention_backend == "xformers" and draft.use_mla,
            "multi-head latent attention (MLA)",
            'xFormers ("draft_attention_backend") has no operator for it',
        ),
        (
            speculative_config.parallel_drafting,
            "one pass over all K tokens",
            "it pays for the context once a step",
        ),
        (
            speculative_config.use_gemma4_mtp(),
            "queries only, over the target's KV",
            "there is no draft KV to window",
        ),
        (
            speculative_config.use_step3p5_mtp(),
            "a draft loop of its own (Step-3.5)",
            "it does not read through one attention backend",
        ),
    )
    for found, what, why in reasons:
        if found:
            raise ValueError(
                f"{config.method} does not handle the draft {', '.join(draft.architectures)}: it has "
                f'{what}, and {why}. Use method "{native}".'
            )
    reach = config.draft_window_size + config.draft_sink_size
    if reach >= target.max_model_len:
        logger.warning_once(
            "windowed_mtp: draft_window_size %d + draft_sink_size %d cover max_model_len %d, so the "
            "window never acts and nothing is gained. Lower draft_window_size, or use method "
            '"%s".',
            config.draft_window_size,
            config.draft_sink_size,
            target.max_model_len,
            native,
        )


def without_mtp_head(target: Any) -> ValueError:
    """The refusal of a model that vLLM knows no MTP head for."""
    found = ", ".join(target.architectures)
    return ValueError(
        f"{METHOD} needs a model that has an MTP head which vLLM can run; found {found}, whose "
        "configuration names none. Use a model that has one, or another method."
    )


def _refuse_without_mtp_weights(target: Any, draft_model: str | None) -> None:
    """vLLM itself would load an untrained head, and then accept nothing."""
    model = draft_model or target.model_weights or target.model
    names = checkpoint_tensor_names(model, None if draft_model else target.revision)
    if names is None:
        logger.debug("no local safetensors checkpoint to look for MTP weights in")
        return
    num_layers = target.get_total_num_hidden_layers()
    if not any(is_mtp_tensor(name, num_layers) for name in names):
        raise ValueError(
            f"{METHOD} needs the model's own MTP head, but the checkpoint {model} has no MTP "
            f"weights: none of its {len(names)} tensors is named for an MTP module or for a layer "
            f"past its {num_layers}. Some repackaged checkpoints leave the head out. Use one that "
            "has it, or no speculative decoding."
        )


def is_mtp_tensor(name: str, num_hidden_layers: int) -> bool:
    """Whether a checkpoint's tensor belongs to an MTP head.

    Heads are named for MTP (Qwen, MiMo, Nemotron-H, ERNIE) or stand behind the last of the target's
    layers, as layer `num_hidden_layers` and up (DeepSeek, GLM, and what follows their form).
    """
    parts = name.lower().split(".")
    if any("mtp" in part or "nextn" in part for part in parts):
        return True
    for kind, index in itertools.pairwise(parts):
        if kind == "layers" and index.isdigit():
            return int(index) >= num_hidden_layers
    return False


def checkpoint_tensor_names(model: str, revision: str | None = None) -> set[str] | None:
    """Names of all tensors in a local safetensors checkpoint; None where there is none to read."""
    folder = Path(model) if Path(model).is_dir() else _hub_folder(model, revision)
    if folder is None:
        return None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text())["weight_map"])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names


def _hub_folder(model: str, revision: str | None) -> Path | None:
    """Where a model of the hub lies in the local cache, if its weights' index or file is there."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("model.safetensors.index.json", "model.safetensors"):
        found = try_to_load_from_cache(model, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None
