"""`draft_attention_backend: "xformers"` is refused, by what is missing, before weights load."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms
import vllm.triton_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.support.engine import windowed
from wmtp_vllm import xformers_draft

pytestmark = pytest.mark.unit

KEYS = {"draft_attention_backend": "xformers"}
LEAVE_OUT = "eave the key out"


@pytest.fixture(scope="module")
def config_of(tiny_model: Callable[..., str]) -> Callable[..., Any]:
    def make(keys: dict[str, Any] | None = None, **arguments: Any) -> Any:
        speculative = windowed(3, 128, 16, **(KEYS | (keys or {})))
        arguments = {"dtype": "bfloat16", "max_model_len": 8192, "block_size": 64} | arguments
        return EngineArgs(
            tiny_model("dense"), speculative_config=speculative, **arguments
        ).create_engine_config()

    return make


@pytest.fixture
def with_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU with xFormers; the registry of backends is put back at the end."""
    monkeypatch.setattr(xformers_draft, "operator_problem", lambda: None)
    yield
    AttentionBackendEnum.CUSTOM.clear_override()


def test_without_a_gpu(config_of: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"compute capability 8.0 .* platform 'cpu'") as refusal:
        config_of()
    assert LEAVE_OUT in str(refusal.value)


@pytest.mark.parametrize("capability", [(8, 0), (7, 5)])
def test_without_xformers_or_on_an_old_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    gpu = SimpleNamespace(
        is_cuda=lambda: True,
        has_device_capability=lambda c: DeviceCapability(*capability).to_int() >= c,
        device_name="cuda",
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", gpu, raising=False)
    problem = xformers_draft.operator_problem()
    assert problem is not None
    assert ("pip install 'wmtp-vllm[xformers]'" in problem) == (capability == (8, 0))


@pytest.mark.parametrize("block_size", [None, 16, 96])
def test_blocks_that_are_no_pages(
    config_of: Callable[..., Any], with_operator: None, block_size: int | None
) -> None:
    with pytest.raises(
        ValueError, match=f"found block_size={block_size}. Set block_size to a multi"
    ):
        config_of(block_size=block_size)


def test_a_type_that_the_operator_does_not_take(
    config_of: Callable[..., Any], with_operator: None
) -> None:
    with pytest.raises(ValueError, match=r"float16 or bfloat16; found float32. Set dtype"):
        config_of(dtype="float32")


def test_vllms_own_key_beside_it(config_of: Callable[..., Any], with_operator: None) -> None:
    with pytest.raises(ValueError, match=r'"attention_backend": .*FLASH_ATTN.* mutually exclusive'):
        config_of({"attention_backend": "FLASH_ATTN"})


def test_another_backend_in_its_place(config_of: Callable[..., Any], with_operator: None) -> None:
    AttentionBackendEnum.CUSTOM.clear_override()
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "another.Backend")
    with pytest.raises(ValueError, match=r"CUSTOM .* another.Backend has already. Register that"):
        config_of()


def test_where_it_can_run_the_draft_and_nothing_else_gets_it(
    config_of: Callable[..., Any], with_operator: None
) -> None:
    config = config_of()
    assert config.speculative_config.attention_backend == AttentionBackendEnum.CUSTOM
    assert config.attention_config.backend is None
    assert AttentionBackendEnum.CUSTOM.get_path() == xformers_draft.BACKEND


def test_without_the_key_vllms_registry_is_left_alone(config_of: Callable[..., Any]) -> None:
    AttentionBackendEnum.CUSTOM.clear_override()
    config_of({"draft_attention_backend": "native"})
    assert not AttentionBackendEnum.CUSTOM.is_overridden()
