"""`draft_attention_backend: "xformers"`: what it needs, said before weights load, and its choosing.

The backend itself is `wmtp_vllm.attention_backends.xformers_attention`, which cannot be imported
without xFormers.
"""

import importlib
from typing import Any

from wmtp_vllm.config import METHOD

BACKEND = "wmtp_vllm.attention_backends.xformers_attention.XFormersBackend"
DTYPES = ("float16", "bfloat16")
PAGE_SIZE = 64
"""Tokens, as there."""
KEY = f'{METHOD}: "draft_attention_backend": "xformers"'


def choose(vllm_keys: dict[str, Any], engine_args: Any, target: Any) -> None:
    """Make vLLM build the draft with xFormers' attention: as its backend CUSTOM.

    Args:
        vllm_keys: the keys of the speculative config that are vLLM's own; gets `attention_backend`.
        engine_args: vLLM's `EngineArgs`.
        target: vLLM's `ModelConfig` of the target.

    Raises:
        ValueError: something that it needs is missing, or taken.

    """
    chosen = vllm_keys.get("attention_backend")
    if chosen is not None:
        raise ValueError(
            f'{KEY} and "attention_backend": {str(chosen)!r} in the speculative config are mutually '
            "exclusive: give one."
        )
    problem = operator_problem()
    if problem:
        raise ValueError(
            f"{KEY} needs xFormers' split-K Triton operator, but {problem}, or leave the key out."
        )
    dtype = str(target.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(
            f"{KEY} needs a model in {' or '.join(DTYPES)}; found {dtype}. Set dtype, or leave the "
            "key out."
        )
    block_size = engine_args.block_size
    if not block_size or block_size % PAGE_SIZE:
        raise ValueError(
            f"{KEY} reads pages of {PAGE_SIZE} tokens; found block_size={block_size}. Set block_size "
            f"to a multiple of {PAGE_SIZE}, or leave the key out."
        )
    vllm_keys["attention_backend"] = "CUSTOM"


def operator_problem() -> str | None:
    """Why xFormers' operator cannot run in this environment, and what to do; None where it can."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import tl

    if not (current_platform.is_cuda() and current_platform.has_device_capability(80)):
        return (
            "it runs on NVIDIA GPUs of compute capability 8.0 or higher; found the platform "
            f"{current_platform.device_name!r}. Use such a GPU"
        )
    try:
        importlib.import_module(BACKEND.rpartition(".")[0])
    except ImportError as error:
        return (
            f"it cannot be imported ({error}). Install the extra: pip install 'wmtp-vllm[xformers]'"
        )
    if not hasattr(tl, "make_block_ptr"):
        import triton

        return (
            f"it is written with block pointers, which Triton {triton.__version__} no longer has. "
            "Install a Triton before 3.9"
        )
    return None


def register() -> None:
    """Put the backend into vLLM's registry. Idempotent.

    As CUSTOM, the one member of vLLM's enumeration that is free for others: a new one would have to be
    there before a configuration that names it is unpickled.

    Raises:
        ValueError: another backend has that place.

    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        raise ValueError(
            f"{KEY} takes the place CUSTOM among vLLM's attention backends, which "
            f"{custom.get_path()} has already. Register that one elsewhere, or leave the key out."
        )
    register_backend(custom, BACKEND)
