"""Every MTP head that the installed vLLM has, by what matters to windowed MTP.

    python -m wmtp_vllm.planner.families               # the table of docs/support.md
    python -m wmtp_vllm.planner.families --json        # the same to compare two releases by

Each head in vLLM's registry is built by vLLM on the meta device, from a preset or from the defaults
of its configuration class, and then equipped as in an engine: what is refused is refused by the same
code, with the same words.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wmtp_vllm import child
from wmtp_vllm.config import METHOD
from wmtp_vllm.console import progress
from wmtp_vllm.planner import models
from wmtp_vllm.planner.anatomy import ENVIRONMENT, Question

RUN = {"MiMoMTPModel", "Qwen3NextMTP", "DeepSeekMTPModel", "Glm4MoeMTPModel"}
"""Heads of which the tests run a tiny one."""


@dataclass(frozen=True)
class Target:
    """A target whose head it is.

    Args:
        preset: its name, where there is one.
        model_type: else of its configuration, whose class has defaults.
        architecture: of its configuration.
        keys: of its configuration, in place of the defaults.

    """

    preset: str = ""
    model_type: str = ""
    architecture: str = ""
    keys: dict[str, Any] = field(default_factory=dict)


ONE = {"num_nextn_predict_layers": 1}
HY_V3 = {"first_k_dense_replace": 1, "expert_hidden_dim": 1024, "route_norm": True}
TARGETS = {
    "BailingMoeV25MTPModel": Target("", "bailing_hybrid", "BailingMoeV2_5ForCausalLM", ONE),
    "BailingMoeV3MTPModel": Target("", "bailing_hybrid", "BailingMoeV3ForCausalLM", ONE),
    "DeepSeekMTPModel": Target("deepseek-v3"),
    "DeepSeekV4MTPModel": Target("", "deepseek_v4", "DeepseekV4ForCausalLM", ONE),
    "DeepseekV32MTPModel": Target(
        "",
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        ONE | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    ),
    "Dots3NoteMTPModel": Target("", "dots3_note", "Dots3NoteForCausalLM", ONE),
    "ErnieMTPModel": Target("", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", ONE),
    "Exaone4_5_MTP": Target("", "exaone4_5", "Exaone4_5_ForConditionalGeneration", ONE),
    "ExaoneMoeMTP": Target("", "exaone_moe", "ExaoneMoeForCausalLM", ONE),
    "Gemma4MTPModel": Target("", "gemma4_assistant", "Gemma4AssistantForCausalLM"),
    "Glm4MoeLiteMTPModel": Target("glm-4.7-flash"),
    "Glm4MoeMTPModel": Target("glm-4.5"),
    "Glm5NextMTPModel": Target("", "glm5_next", "Glm5NextForCausalLM", ONE),
    "GlmOcrMTPModel": Target("", "glm_ocr", "GlmOcrForConditionalGeneration", ONE),
    "HYV3MTPModel": Target("", "hy_v3", "HYV3ForCausalLM", ONE | HY_V3),
    "HYV4MTPModel": Target("", "hy_v4", "HYV4ForCausalLM", ONE),
    "InklingMTPModel": Target("", "inkling_model", "InklingForCausalLM", ONE),
    "InternS2MobiusMTP": Target("", "interns2_mobius", "InternS2MobiusForConditionalGeneration"),
    "KimiK3MTPModel": Target("", "kimi_k3", "KimiK3ForConditionalGeneration", ONE),
    "LongCatFlashMTPModel": Target(
        "",
        "longcat_flash",
        "LongcatFlashForCausalLM",
        ONE
        | dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), True)
        | {"zero_expert_type": "identity"},
    ),
    "MiMoMTPModel": Target("mimo-7b"),
    "MiMoV2MTPModel": Target("mimo-v2-flash"),
    "MiMoV2OmniMTPModel": Target("", "mimo_v2", "MiMoV2OmniForCausalLM", ONE),
    "MiniMaxM3MTP": Target("", "minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
    "NemotronHMTPModel": Target("nemotron-3-super-120b-a12b"),
    "OpenPanguMTPModel": Target("", "pangu_ultra_moe", "PanguUltraMoEForCausalLM", ONE),
    "Qwen3NextMTP": Target("qwen3-next-80b-a3b"),
    "Qwen3_5MTP": Target("", "qwen3_5_text", "Qwen3_5ForCausalLM", {"mtp_num_hidden_layers": 1}),
    "Qwen3_5MoeMTP": Target(
        "", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {"mtp_num_hidden_layers": 1}
    ),
    "Qwen4ExpMTP": Target("", "qwen4_exp", "Qwen4ExpForCausalLM", ONE),
    "Step3p5MTP": Target("", "step3p5", "Step3p5ForCausalLM", ONE),
}


NO_TORCHVISION = """
import importlib.abc, importlib.machinery, sys, types
__version__ = "0.0"

class Nothing(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

class Stub(metaclass=Nothing): ...

class Module(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        return getattr(Stub, name)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module): ...

sys.meta_path.insert(0, Finder())
__getattr__ = lambda name: getattr(Stub, name)
"""
"""Models with eyes import image transforms, which no draft has; a CPU's vLLM often has none."""


@dataclass(frozen=True)
class Family:
    """An MTP head.

    Args:
        architecture: its name in vLLM's registry.
        attention: kinds of attention of its layers.
        layers: of attention with KV of their own, in all its modules.
        token_bytes: of KV, a token and layer.
        positions: how it knows them.
        verdict: "supported", "supported, not run here", "refused" or "not built here".
        reason: why it is refused, or was not built.

    """

    architecture: str
    attention: str
    layers: int
    token_bytes: int
    positions: str
    verdict: str
    reason: str = ""


def registered() -> list[str]:
    """MTP heads in the installed vLLM's registry."""
    from vllm.model_executor.models.registry import ModelRegistry

    return sorted(name for name in ModelRegistry.get_supported_archs() if "MTP" in name)


def family(architecture: str) -> Family:
    """Build one head, in a process of its own, and see what becomes of it."""
    target = TARGETS.get(architecture)
    if target is None:
        return _not_built(architecture, "new in this vLLM: no target of it is known here")
    try:
        found = examined("wmtp_vllm.planner.families", target)
    except child.ChildFailed as failed:
        found = {"error": str(failed).strip().splitlines()[-1]}
    if "error" in found:
        return _not_built(architecture, found["error"])
    verdict = "refused" if found["reason"] else "supported"
    if verdict == "supported" and architecture not in RUN:
        verdict += ", not run here"
    return Family(architecture=architecture, verdict=verdict, **found)


def examined(module: str, target: Target) -> Any:
    """What `module` says of a target, in a process of its own.

    Raises:
        ChildFailed: it failed; the message is its log.

    """
    environment = child.ENVIRONMENT | ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="wmtp-families-") as scratch:
        if importlib.util.find_spec("torchvision") is None:
            stub = Path(scratch) / "torchvision" / "__init__.py"
            stub.parent.mkdir()
            stub.write_text(NO_TORCHVISION)
            found = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = f"{scratch}{os.pathsep}{found}" if found else scratch
        return child.call(module, asdict(target), environment)


def _not_built(architecture: str, reason: str) -> Family:
    return Family(architecture, "", 0, 0, "", "not built here", reason)


def _examine(values: dict[str, Any]) -> dict[str, Any]:
    """The child's side: a `Target`, and all of its `Family` but name and verdict, or an error."""
    from wmtp_vllm import seams
    from wmtp_vllm.planner import dissection

    seams.apply()
    return dissection.answer(question(Target(**values)), dissection.draft_kinds)


def question(target: Target) -> Question:
    """What the planner is asked for a target."""
    config = models.find(target.preset).config if target.preset else _default_config(target)
    speculative_config = {"method": METHOD, "num_speculative_tokens": 1, "draft_window_size": 1024}
    arguments = {"max_model_len": 8192, "max_num_seqs": 1}
    return Question(config, arguments, speculative_config, 1, 16, 1e15)


def _default_config(target: Target) -> dict[str, Any]:
    from transformers import AutoConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    is_own = target.model_type in _CONFIG_REGISTRY  # a lazy dictionary: only its `[]` imports
    make = _CONFIG_REGISTRY[target.model_type] if is_own else None
    made = make() if make else AutoConfig.for_model(target.model_type)
    config: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return config | {"architectures": [target.architecture]} | target.keys


def table(families: list[Family]) -> str:
    """Markdown."""
    lines = [
        "| MTP head | attention of the draft | layers | KV, bytes a token and layer | positions | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for f in families:
        # A refusal's first sentence says what and why; vLLM's errors list all that it knows.
        reason = f.reason.split(". ")[0].removesuffix(".")[:200]
        verdict = f"{f.verdict}: {reason}" if reason else f.verdict
        sizes = [f"{f.layers}", f"{f.token_bytes:,}"] if f.layers else ["", ""]
        cells = [f"`{f.architecture}`", f.attention, *sizes, f.positions, verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m wmtp_vllm.planner.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one head a line")
    parser.add_argument("heads", nargs="*", help="these only")
    parsed = parser.parse_args(arguments)
    asked = parsed.heads or registered()
    families = [family(name) for name in progress(asked, str)]
    if parsed.json:
        print("\n".join(json.dumps(asdict(f)) for f in families))
    else:
        print(table(families))
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith(".json"):
        child.answer(_examine)
    else:
        sys.exit(main())
