"""`wmtp check` says, in one screen and an exit code, whether windowed MTP would run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wmtp_vllm import __version__, check, cli, seams

pytestmark = pytest.mark.unit


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `wmtp` in this process; returns its exit code and what it printed."""

    def wmtp(*arguments: str) -> tuple[int, str]:
        code = cli.main(arguments)
        return code, capsys.readouterr().out

    return wmtp


Run = Callable[..., tuple[int, str]]


def test_all_is_well(run: Run) -> None:
    code, out = run("check")
    assert code == 0
    first, *rest = out.splitlines()
    assert first == f"vLLM {seams.vllm_version()}, wmtp-vllm {__version__}"
    table = [line.split() for line in rest if line.startswith("ok ")]
    minor = seams.minor_version()
    expected = [(seam, place) for seam in seams.SEAMS for place in seam.places[minor]]
    for words, (seam, place) in zip(table, expected, strict=True):
        assert (words[1], words[-1]) == (seam.use, place)
        assert seam.name in " ".join(words)
    assert rest[len(table) :] == [
        "model runner: V1",
        "draft attention backend: CPU_ATTN, windowed",
        "draft: MiMoMTPModel",
    ]


def test_a_users_model_of_short_context(run: Run, tiny_model: Callable[..., str]) -> None:
    code, out = run("check", "--model", tiny_model("hybrid", max_position_embeddings=2048))
    assert code == 0
    assert "draft: Qwen3NextMTP" in out


def test_a_broken_seam(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(nothing: Any) -> None: ...

    monkeypatch.setattr("vllm.v1.core.kv_cache_utils.get_kv_cache_capacity", moved)
    code, out = run("check")
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("MISSING")]
    assert line.split()[1:3] == ["called", "get_kv_cache_capacity"]
    assert line.endswith("takes (nothing), expected (vllm_config, kv_cache_config)")
    assert "windowed_mtp would be refused" in out


def test_another_version(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    code, out = run("check")
    assert code == 1
    assert out.startswith(f"vLLM 0.99.1, wmtp-vllm {__version__}\n")
    assert "runs in vLLM 0.32.x and 0.33.x, but vLLM 0.99.1 is installed" in out


def test_no_vllm(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "vllm_version", lambda: "")
    code, out = run("check")
    assert code == 1
    assert out.startswith("vLLM not installed, ")
    assert "but no vLLM is installed" in out


@pytest.mark.parametrize("allowed", ["", "lora_filesystem_resolver", "not_wmtp_vllm"])
def test_left_out_by_vllm_plugins(run: Run, monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    code, out = run("check")
    assert code == 1
    assert "MISSING the plugin is not registered" in out
    assert "VLLM_PLUGINS leaves it out" in out


@pytest.mark.parametrize("allowed", ["wmtp_vllm", "other,wmtp_vllm"])
def test_let_in_by_vllm_plugins(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert check._registered()


def test_not_an_entry_point(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.importlib.metadata, "entry_points", lambda **_: ())
    code, out = run("check")
    assert code == 1
    assert "no entry point wmtp_vllm in the group vllm.general_plugins" in out


def test_a_model_that_is_refused(run: Run, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out = run("check", "--model", str(tmp_path))
    assert code == 1
    assert "REFUSED  windowed_mtp needs a model that has an MTP head" in out


def test_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    code, out = run("check", "--model", str(tmp_path / "nowhere"))
    assert code == 1
    assert "REFUSED " in out
    assert "nowhere" in out


def test_a_backend_that_is_not_handled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wmtp_vllm.attention_backends.windowed.SUPPORTED_BACKENDS", ("OTHER",))
    code, out = run("check")
    assert code == 1
    assert "REFUSED  vLLM would choose the attention backend CPU_ATTN" in out
    assert '"attention_backend" in the speculative config to one of OTHER' in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 2
    assert "command" in capsys.readouterr().err
