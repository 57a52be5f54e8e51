"""The package as it is imported: installed, or straight out of a checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def test_a_checkout_as_working_directory_has_all_subpackages():
    """There Python finds the checkout's folder before any installed package (-S: none is)."""
    code = "import wmtp_vllm.attention_backends, wmtp_vllm.kv_manager, wmtp_vllm.window"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)


def test_a_wheel_has_all_subpackages_inside_the_package(tmp_path):
    source = tmp_path / "source"  # building leaves files behind
    for name in ("wmtp_vllm", "attention_backends", "kv_manager"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path]
    subprocess.run([*build, source], check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    folders = {str(Path(name).parent) for name in zipfile.ZipFile(wheel).namelist()}
    packages = {folder for folder in folders if "dist-info" not in folder}
    assert packages == {
        "wmtp_vllm",
        "wmtp_vllm/attention_backends",
        "wmtp_vllm/bench",
        "wmtp_vllm/kv_manager",
        "wmtp_vllm/planner",
        "wmtp_vllm/planner/presets",
        "wmtp_vllm/tiny_models",
        "wmtp_vllm/tiny_models/trained",
    }
