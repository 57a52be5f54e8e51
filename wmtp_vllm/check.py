"""`wmtp check`: whether the plugin fits the installed vLLM, seam by seam, and what would run."""

import argparse
import importlib.metadata
import os
import tempfile

from wmtp_vllm import seams
from wmtp_vllm.config import METHOD


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="check with this model's configuration instead of an embedded tiny one's; "
        "no weights are loaded",
    )


def main(options: argparse.Namespace) -> int:
    """Print what was found; returns 0 when windowed MTP can run."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(f"vLLM {seams.vllm_version() or 'not installed'}", end="")
    print(f", wmtp-vllm {importlib.metadata.version('wmtp-vllm')}")
    try:
        verdicts = seams.check()
    except seams.UnsupportedVLLM as error:
        print(error)
        return 1
    width = max(len(verdict.seam.name) for verdict in verdicts)
    for verdict in verdicts:
        mark = "MISSING" if verdict.problem else "ok"
        line = f"{mark:8}{verdict.seam.use:11}{verdict.seam.name:{width}}  {verdict.place}"
        print(f"{line}: {verdict.problem}" if verdict.problem else line)
    if any(verdict.problem for verdict in verdicts):
        print("windowed_mtp would be refused: this vLLM is not as its release.")
        return 1
    if not _registered():
        print(
            "MISSING the plugin is not registered with vLLM: no entry point wmtp_vllm in the group "
            "vllm.general_plugins, or VLLM_PLUGINS leaves it out."
        )
        return 1
    try:
        for line in _what_would_run(options.model):
            print(line)
    except (OSError, ValueError) as error:
        print(f"REFUSED  {error}")
        return 1
    return 0


def _registered() -> bool:
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    allowed = os.environ.get("VLLM_PLUGINS")
    return any(entry.name == "wmtp_vllm" for entry in group) and (
        allowed is None or "wmtp_vllm" in allowed.split(",")
    )


def _what_would_run(model: str | None) -> list[str]:
    """The runner and the draft's attention backend for a model, from its configuration alone."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.selector import get_attn_backend

    from wmtp_vllm.attention_backends.windowed import SUPPORTED_BACKENDS

    with tempfile.TemporaryDirectory(prefix="wmtp-check-") as scratch:
        if model is None:
            from wmtp_vllm import tiny_models

            model = str(tiny_models.build("dense", f"{scratch}/dense"))
        config = EngineArgs(
            model=model,
            enforce_eager=True,
            speculative_config={"method": METHOD, "num_speculative_tokens": 3},
        ).create_engine_config()
    draft = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        backend = get_attn_backend(draft.get_head_size(), draft.dtype, "auto").get_name()
    if backend not in SUPPORTED_BACKENDS:
        raise ValueError(
            f"vLLM would choose the attention backend {backend} for the draft, which {METHOD} does "
            f'not handle. Set "attention_backend" in the speculative config to one of '
            f"{', '.join(SUPPORTED_BACKENDS)}."
        )
    return [
        f"model runner: {'V2' if config.use_v2_model_runner else 'V1'}",
        f"draft attention backend: {backend}, windowed",
        f"draft: {', '.join(draft.architectures)}",
    ]
