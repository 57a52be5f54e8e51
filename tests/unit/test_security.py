"""Nothing that a user writes into a configuration is run, loaded or imported."""

import ast
from pathlib import Path

import pytest
from vllm.config import SpeculativeConfig

import wmtp_vllm
from wmtp_vllm.config import LARGEST, WindowedMTPConfig, split_keys

pytestmark = pytest.mark.unit

RUN_OR_LOAD = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "runpy", "code"}
IMPORTS_BY_NAME = {
    "seams.py": "places of its own table",
    "xformers_draft.py": "a constant",
}


def sources() -> list[Path]:
    package = Path(wmtp_vllm.__file__).parent
    top = package.parent if (package.parent / "kv_manager").is_dir() else package
    folders = {package, top / "kv_manager", top / "attention_backends"}
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def problems(file: Path, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found += [name for name in names if name.partition(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if isinstance(node.func, ast.Name) and called in RUN_OR_LOAD:
                found.append(called)
            if called == "import_module" and file.name not in IMPORTS_BY_NAME:
                found.append(called)
            weights_only = [k.value for k in node.keywords if k.arg == "weights_only"]
            if called == "load" and ast.unparse(node.func) == "torch.load" and not weights_only:
                found.append("torch.load")
            if any(k.arg == "shell" for k in node.keywords):
                found.append("shell")
    return found


def test_no_source_runs_unpickles_or_imports_what_a_configuration_names():
    files = sources()
    assert len(files) > 40
    assert {str(f): p for f in files if (p := problems(f, f.read_text()))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "eval(key)",
        "importlib.import_module(name)",
        "torch.load(path)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_check_can_fail(text):
    assert problems(Path("some.py"), text)


@pytest.mark.parametrize("key", ["draft_window_size", "draft_sink_size", "draft_ring_cache_blocks"])
def test_numbers_are_bounded(key):
    assert getattr(WindowedMTPConfig(**{key: LARGEST}), key) == LARGEST
    with pytest.raises(ValueError, match=f"{key}={LARGEST + 1}.*no number is above 536,870,912"):
        split_keys({"method": "windowed_mtp", key: LARGEST + 1}, SpeculativeConfig)
