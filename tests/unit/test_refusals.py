"""What windowed MTP does not do is said before weights load, and what it does differently once.

Nothing here starts an engine: a refusal that a test reads was raised while the engine's
configuration was made. Most checkpoints here have no weights at all.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import logger as vllm_logger
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from tests.support.engine import native, windowed
from wmtp_vllm import draft_prefill, draft_rope, proposers
from wmtp_vllm.config import METHOD, Selection, WindowedMTPConfig
from wmtp_vllm.kv_manager.spec import RingSpec
from wmtp_vllm.refusals import checkpoint_tensor_names, is_mtp_tensor

pytestmark = pytest.mark.unit

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}


def config_of(
    model: str, speculative: dict[str, Any] | None = None, **arguments: Any
) -> VllmConfig:
    speculative = speculative or windowed(3, window=128, sink=16)
    arguments = {"dtype": "float32", "max_model_len": 8192} | arguments
    return EngineArgs(model, speculative_config=speculative, **arguments).create_engine_config()


@pytest.fixture(scope="module")
def dense(tiny_model: Callable[..., str]) -> str:
    return tiny_model("dense")


@pytest.fixture
def without_weights(tiny_model: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """Makes a folder with everything of a tiny model but its weights, its config changed."""

    def make(name: Any = "dense", folder: str = "model", **changes: Any) -> str:
        path = tmp_path / folder
        shutil.copytree(
            tiny_model(name), path, ignore=shutil.ignore_patterns("*.safetensors", "tiny_model*")
        )
        config = json.loads((path / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    return make


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The warnings of the plugin, as vLLM's loggers would print them."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.wmtp_vllm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    vllm_logger._print_warning_once.cache_clear()
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def save_tensors(folder: str, *names: str, file: str = "model.safetensors") -> None:
    save_file({name: torch.zeros(1) for name in names}, Path(folder) / file)


class TestArguments:
    @pytest.mark.parametrize("keys", [{}, {"num_speculative_tokens": None}])
    def test_missing_number_of_tokens(self, dense: str, keys: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"has no num_speculative_tokens .* Give one"):
            config_of(dense, {"method": METHOD, **keys})

    @pytest.mark.parametrize(
        ("arguments", "found"),
        [
            (
                {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
                "decode_context_parallel_size=2",
            ),
            ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ],
    )
    def test_context_parallelism(self, dense: str, arguments: dict[str, Any], found: str) -> None:
        with pytest.raises(ValueError, match=f"context parallelism.*{found}. Set it to 1"):
            config_of(dense, **arguments)

    @pytest.mark.parametrize(
        ("arguments", "found"),
        [
            (
                {
                    "kv_transfer_config": KVTransferConfig(
                        kv_connector="ExampleConnector", kv_role="kv_both"
                    )
                },
                "kv_transfer_config with ExampleConnector",
            ),
            (
                {
                    "kv_transfer_config": {
                        "kv_connector": "ExampleConnector",
                        "kv_role": "kv_both",
                    }
                },
                "kv_transfer_config with .*ExampleConnector",
            ),
            ({"kv_offloading_size": 1.0}, "kv_offloading_size=1.0"),
        ],
        ids=["connector", "connector as a dictionary", "offloading"],
    )
    def test_kv_transfer_from_a_ring_but_not_from_vllms_own_cache(
        self, dense: str, arguments: dict[str, Any], found: str
    ) -> None:
        with pytest.raises(ValueError, match=f"cannot transfer KV.*{found}") as refusal:
            config_of(dense, **arguments)
        assert 'Set "draft_kv_cache": "full", or remove it' in str(refusal.value)
        config_of(dense, windowed(3, 128, 16, draft_kv_cache="full"), **arguments)

    @pytest.mark.parametrize("dtype", ["int8_per_token_head", "nvfp4"])
    def test_kv_with_scales_of_its_own(self, dense: str, dtype: str) -> None:
        with pytest.raises(ValueError, match=f"scales .* found kv_cache_dtype={dtype!r}.*Use one"):
            config_of(dense, kv_cache_dtype=dtype)
        with pytest.raises(ValueError, match=f'of the speculative config={dtype!r}.* "mtp"'):
            config_of(dense, windowed(3, 128, 16, kv_cache_dtype=dtype))

    def test_kv_that_only_the_checkpoint_says_has_scales_of_its_own(
        self, without_weights: Callable[..., str]
    ) -> None:
        quantization = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "NVFP4",
        }
        model = without_weights(quantization_config=quantization)
        with pytest.raises(ValueError, match="found kv_cache_dtype of the checkpoint='nvfp4'"):
            config_of(model, load_format="dummy", dtype="bfloat16")
        config_of(model, load_format="dummy", dtype="bfloat16", kv_cache_dtype="bfloat16")

    @pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "fp8", "fp8_e5m2"])
    def test_kv_of_another_type_is_taken(self, dense: str, dtype: str) -> None:
        config_of(dense, kv_cache_dtype=dtype)
        config_of(dense, windowed(3, 128, 16, kv_cache_dtype=dtype))

    def test_a_draft_of_its_own_has_to_be_named(self, dense: str) -> None:
        keys = windowed(3, 128, 16) | {"method": "windowed_eagle3"}
        with pytest.raises(ValueError, match=r"windowed_eagle3 has no model\. Give the draft's"):
            config_of(dense, keys)

    def test_drafts_of_one_pass(self, dense: str) -> None:
        with pytest.raises(
            ValueError, match=r"one pass over all K tokens.*found parallel_drafting"
        ):
            config_of(dense, windowed(3, 128, 16, parallel_drafting=True))

    def test_what_is_refused_here_is_left_to_mtp(self, dense: str) -> None:
        config = config_of(dense, native(3), kv_offloading_size=1.0)
        assert config.additional_config == {}


class TestWeights:
    """vLLM would load an untrained head, and then accept nothing."""

    def test_dense_checkpoint_without_its_head(self, without_weights: Callable[..., str]) -> None:
        model = without_weights()
        save_tensors(model, "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight")
        with pytest.raises(ValueError, match=f"the checkpoint {model} has no MTP weights") as e:
            config_of(model)
        assert "none of its 2 tensors is named for an MTP module or for a layer past its 2" in str(
            e.value
        )
        assert "Use one that has it, or no speculative decoding" in str(e.value)
        config_of(model, native(3))

    def test_hybrid_checkpoint_without_its_head(
        self, tiny_model: Callable[..., str], without_weights: Callable[..., str]
    ) -> None:
        names = checkpoint_tensor_names(tiny_model("hybrid"))
        assert names is not None
        heads = {name for name in names if name.startswith("mtp.")}
        assert heads
        model = without_weights("hybrid")
        save_tensors(model, *(names - heads))
        with pytest.raises(ValueError, match="has no MTP weights"):
            config_of(model, dtype="bfloat16")
        save_tensors(model, *names)
        config_of(model, dtype="bfloat16")

    @pytest.mark.parametrize("has_head", [True, False])
    def test_sharded_checkpoint_is_read_by_its_index(
        self, without_weights: Callable[..., str], has_head: bool
    ) -> None:
        model = without_weights()
        shard = "model-00001-of-00002.safetensors"
        names = ["model.layers.0.x", *(["model.mtp_layers.0.x"] if has_head else [])]
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
        (Path(model) / "model.safetensors.index.json").write_text(json.dumps(index))
        if has_head:
            config_of(model)
        else:
            with pytest.raises(ValueError, match="none of its 1 tensors"):
                config_of(model)

    def test_shards_without_an_index_are_all_read(
        self, without_weights: Callable[..., str]
    ) -> None:
        model = without_weights()
        save_tensors(model, "model.layers.0.x", file="a.safetensors")
        with pytest.raises(ValueError, match="has no MTP weights"):
            config_of(model)
        save_tensors(model, "model.mtp_layers.0.x", file="b.safetensors")
        config_of(model)

    def test_a_draft_in_a_checkpoint_of_its_own_is_looked_for_there(
        self, dense: str, without_weights: Callable[..., str]
    ) -> None:
        headless = without_weights()
        save_tensors(headless, "model.layers.0.x")
        config_of(headless, windowed(3, 128, 16, model=dense))
        with pytest.raises(ValueError, match=f"the checkpoint {headless} has no MTP weights"):
            config_of(dense, windowed(3, 128, 16, model=headless))

    def test_no_weights_to_look_at_are_no_reason(self, without_weights: Callable[..., str]) -> None:
        model = without_weights()
        config_of(model)
        save_tensors(model, "model.layers.0.x")
        config_of(model, load_format="dummy")

    def test_a_model_of_the_hub_is_looked_for_in_the_cache_by_revision(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def try_to_load_from_cache(model: str, name: str, revision: str | None) -> str | None:
            asked.append((model, revision))
            return str(tmp_path / name) if name == "model.safetensors" else None

        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", try_to_load_from_cache)
        save_tensors(str(tmp_path), "mtp.x")
        assert checkpoint_tensor_names("owner/model", "v2") == {"mtp.x"}
        assert set(asked) == {("owner/model", "v2")}

    def test_a_model_that_is_nowhere_has_no_names(self) -> None:
        assert checkpoint_tensor_names("no-such-owner/no-such-model") is None

    @pytest.mark.parametrize(
        ("name", "is_mtp"),
        [
            ("mtp.layers.0.self_attn.q_proj.weight", True),
            ("model.mtp_layers.0.input_proj.weight", True),
            ("model.mtp_block.0.mlp.up_proj.weight", True),
            ("model.nextn_predict_layers.0.x", True),
            ("model.layers.61.self_attn.kv_a_proj_with_mqa.weight", True),
            ("language_model.model.layers.62.x", True),
            ("model.layers.60.mlp.experts.99.up_proj.weight", False),
            ("model.layers.0.x", False),
            ("model.embed_tokens.weight", False),
            ("lm_head.weight", False),
        ],
    )
    def test_names_of_tensors_of_a_head_on_61_layers(self, name: str, is_mtp: bool) -> None:
        assert is_mtp_tensor(name, 61) == is_mtp


class TestDrafts:
    def test_sparse_attention(self, without_weights: Callable[..., str]) -> None:
        config_of(without_weights(**DEEPSEEK), load_format="dummy")
        model = without_weights(folder="sparse", **DEEPSEEK, index_topk=64)
        with pytest.raises(ValueError, match="the draft DeepSeekMTPModel") as refusal:
            config_of(model, load_format="dummy")
        assert "sparse attention with an indexer" in str(refusal.value)
        assert "a bounded number of tokens already" in str(refusal.value)
        assert 'Use method "mtp"' in str(refusal.value)

    def test_a_draft_that_vllm_takes_for_another_method(
        self, tiny_model: Callable[..., str], without_weights: Callable[..., str]
    ) -> None:
        model = without_weights("llama", folder="an-eagle3-like-one")
        keys = {"model": model, "method": "windowed_draft_model"}
        with pytest.raises(ValueError, match=r"of method 'draft_model', but .* one of 'eagle3'"):
            config_of(tiny_model("llama"), windowed(3, 128, 16) | keys)

    @pytest.mark.parametrize(
        ("kind", "named"),
        [("use_gemma4_mtp", "queries only"), ("use_step3p5_mtp", "Step-3.5")],
    )
    def test_drafts_of_another_make(
        self, dense: str, monkeypatch: pytest.MonkeyPatch, kind: str, named: str
    ) -> None:
        monkeypatch.setattr(f"vllm.config.SpeculativeConfig.{kind}", lambda _: True)
        with pytest.raises(ValueError, match=f'does not handle the draft .*{named}.*"mtp"'):
            config_of(dense)

    @pytest.mark.parametrize(
        "changes",
        [LLAMA, {"num_nextn_predict_layers": 0}, DEEPSEEK | {"num_nextn_predict_layers": 0}],
        ids=["no head of its kind", "MiMo without", "DeepSeek without"],
    )
    def test_model_that_has_no_head(
        self, without_weights: Callable[..., str], changes: dict[str, Any]
    ) -> None:
        model = without_weights(**changes)
        architecture = changes.get("architectures", ["MiMoForCausalLM"])[0]
        with pytest.raises(ValueError, match=f"an MTP head .* found {architecture}") as refusal:
            config_of(model, load_format="dummy")
        assert "Use a model that has one, or another method" in str(refusal.value)
        assert not isinstance(refusal.value, NotImplementedError)

    def test_model_that_vllm_takes_for_another_method_by_its_folder(
        self, without_weights: Callable[..., str]
    ) -> None:
        model = without_weights(folder="my-dspark")
        with pytest.raises(ValueError, match=rf"vLLM took {model} for one of 'dspark'.*name"):
            config_of(model, load_format="dummy")


def test_adaptive_verification_is_refused(tiny_model: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="enable_adaptive_verification in the speculative config"):
        config_of(
            tiny_model("dense"), windowed(3, 128, 16) | {"enable_adaptive_verification": True}
        )


class FakeLayer(Attention):
    """A draft's attention layer that has only what is looked at."""

    def __init__(self, spec: Any, sliding_window: int | None = None, backend: Any = None) -> None:
        torch.nn.Module.__init__(self)
        self.spec, self.sliding_window = spec, sliding_window
        self.attn_backend = backend or CPUAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


class Sparse(FakeLayer):
    indexer = object()


ENGINE: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_match_unit=None))


def fake_config(layers: dict[str, Any], modules: int = 1, **keys: Any) -> Any:
    own = WindowedMTPConfig(**{"draft_window_size": 256, "draft_sink_size": 32} | keys)
    return SimpleNamespace(
        additional_config={METHOD: Selection(own.model_dump())},
        compilation_config=SimpleNamespace(
            static_forward_context=layers, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, enable_eplb=False),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=3, use_multi_module_mtp=lambda: modules > 1
        ),
    )


def equip(layer: Any, **keys: Any) -> None:
    """What happens to a draft's layer after loading."""
    proposers.equip_layers(fake_config({"mtp.attn": layer}, **keys), {"mtp.attn"})


def shape(**more: Any) -> dict[str, Any]:
    return {
        "block_size": 32,
        "num_kv_heads": 1,
        "head_size": 64,
        "dtype": torch.float32,
        **more,
    }


class TestDraftLayers:
    def test_full_attention_gets_window_and_sink(self, warnings: list[str]) -> None:
        layer = FakeLayer(FullAttentionSpec(**shape()))
        equip(layer)
        ring = layer.get_kv_cache_spec(ENGINE)
        assert isinstance(ring, RingSpec)
        assert (ring.window, ring.sink) == (256, 32)
        assert not warnings

    def test_modules_in_a_row_hold_what_they_run_on_again(self) -> None:
        layer = FakeLayer(FullAttentionSpec(**shape()))
        equip(layer, modules=2)
        assert layer.get_kv_cache_spec(ENGINE).window == 256 + 3 - 1

    @pytest.mark.parametrize(("own", "acts"), [(100, 100), (1000, 256)])
    def test_of_two_windows_the_smaller_wins_without_a_sink_and_warns_once(
        self, warnings: list[str], own: int, acts: int
    ) -> None:
        for _ in range(2):
            layer = FakeLayer(SlidingWindowSpec(**shape(sliding_window=own)), own)
            equip(layer)
            ring = layer.get_kv_cache_spec(ENGINE)
            assert isinstance(ring, RingSpec)
            assert (ring.window, ring.sink) == (acts, 0)
        (warning,) = warnings
        assert f"a sliding window of its own, of {own} tokens" in warning
        assert f"reads the last {acts} tokens and no sink" in warning

    @pytest.mark.parametrize(
        ("layer", "found"),
        [
            (Sparse(MLAAttentionSpec(**shape())), "a Sparse with a MLAAttentionSpec"),
            (FakeLayer(None), "a FakeLayer with a NoneType"),
            (
                SimpleNamespace(get_kv_cache_spec=lambda _: FullAttentionSpec(**shape())),
                "a SimpleNamespace with a FullAttentionSpec",
            ),
        ],
        ids=["sparse", "the target's KV", "no attention layer"],
    )
    def test_other_kinds_are_refused_by_layer_and_kind(self, layer: Any, found: str) -> None:
        with pytest.raises(ValueError, match=f"of the draft layer mtp.attn: {found}") as refusal:
            equip(layer)
        assert "It handles full, sliding-window and multi-head latent" in str(refusal.value)
        assert 'Use method "mtp"' in str(refusal.value)

    def test_attention_backends_that_are_not_handled_are_named(self) -> None:
        class Exotic(CPUAttentionBackend):
            @staticmethod
            def get_name() -> str:
                return "EXOTIC"

        with pytest.raises(ValueError, match="the attention backend EXOTIC") as refusal:
            equip(FakeLayer(FullAttentionSpec(**shape()), backend=Exotic))
        assert "CPU_ATTN" in str(refusal.value)
        assert '"attention_backend"' in str(refusal.value)


class TestWarnings:
    @pytest.mark.parametrize(("window", "warned"), [(8192 - 64, True), (8192 - 65, False)])
    def test_window_that_can_never_act(
        self, dense: str, warnings: list[str], window: int, warned: bool
    ) -> None:
        for _ in range(2):
            config_of(dense, windowed(3, window, 64))
        assert len(warnings) == warned
        if warned:
            assert (
                f"draft_window_size {window} + draft_sink_size 64 cover max_model_len 8192"
                in (warnings[0])
            )
            assert "Lower draft_window_size, or use method" in warnings[0]


class TestRope:
    """Positions that the user overrides for the target reach its draft (vLLM issue 58080)."""

    def test_yarn_and_length_reach_the_draft(self, dense: str) -> None:
        overrides = {"rope_parameters": YARN, "max_position_embeddings": 16384}
        config = config_of(dense, hf_overrides=overrides, max_model_len=16384)
        draft = config.speculative_config.draft_model_config
        for hf_config in (draft.hf_config, draft.hf_text_config):
            assert hf_config.rope_parameters == YARN
            assert hf_config.max_position_embeddings == 16384
            assert hf_config.architectures == ["MiMoMTPModel"]
        assert draft.max_model_len == 16384

    def test_a_longer_context_than_the_checkpoints_reaches_the_draft(
        self, tiny_model: Callable[..., str]
    ) -> None:
        short = tiny_model("dense", max_position_embeddings=4096)
        overrides = {"rope_parameters": YARN, "max_position_embeddings": 16384}
        for speculative, length in ((windowed(3, 128, 16), 16384), (native(3), 4096)):
            config = config_of(short, speculative, hf_overrides=overrides, max_model_len=16384)
            assert config.model_config.max_model_len == 16384
            assert config.speculative_config.draft_model_config.max_model_len == length

    def test_the_users_own_length_of_the_draft_is_kept(self, dense: str) -> None:
        overrides = {"rope_parameters": YARN, "max_position_embeddings": 16384}
        speculative = windowed(3, 128, 16, max_model_len=2048)
        config = config_of(dense, speculative, hf_overrides=overrides, max_model_len=16384)
        assert config.speculative_config.draft_model_config.max_model_len == 2048

    def test_other_overrides_stay_the_targets(self, dense: str) -> None:
        config = config_of(dense, hf_overrides={"rms_norm_eps": 0.5})
        draft = config.speculative_config.draft_model_config.hf_config
        assert config.model_config.hf_config.rms_norm_eps == 0.5
        assert draft.rms_norm_eps == 1e-6
        both = {"rms_norm_eps": 0.5, "max_position_embeddings": 16384}
        draft = config_of(dense, hf_overrides=both).speculative_config.draft_model_config.hf_config
        assert (draft.rms_norm_eps, draft.max_position_embeddings) == (1e-6, 16384)

    def test_nothing_overridden_changes_nothing(self, dense: str) -> None:
        ours, vllms = (
            config_of(dense, speculative).speculative_config.draft_model_config
            for speculative in (windowed(3, 128, 16), native(3))
        )
        assert ours.hf_config.to_dict() == vllms.hf_config.to_dict()
        assert ours.compute_hash() == vllms.compute_hash()

    def test_overrides_of_a_nested_text_config_count(self) -> None:
        def of(**values: Any) -> Any:
            config = SimpleNamespace(rope_parameters={"rope_type": "default"})
            vars(config).update(values)
            return config

        for overrides, reached in (
            ({"text_config": {"rope_parameters": YARN}}, True),
            ({"text_config": {"rms_norm_eps": 0.5}}, False),
        ):
            text, outer = of(), of()
            draft = SimpleNamespace(hf_config=outer, hf_text_config=text, max_model_len=4096)
            target: Any = SimpleNamespace(
                hf_overrides=overrides, hf_text_config=of(rope_parameters=YARN), max_model_len=8192
            )
            speculative: Any = SimpleNamespace(draft_model_config=draft, max_model_len=None)
            draft_rope.follow_target(speculative, target)
            assert (text.rope_parameters == YARN) == reached
            assert draft.max_model_len == (8192 if reached else 4096)

    def test_a_callable_is_passed_on_by_vllm_alone(self, dense: str) -> None:
        ours, vllms = (
            config_of(dense, speculative, hf_overrides=stretched)
            for speculative in (windowed(3, 128, 16), native(3))
        )
        assert ours.speculative_config.draft_model_config.hf_config.rope_parameters == YARN
        assert (
            ours.speculative_config.draft_model_config.hf_config.to_dict()
            == vllms.speculative_config.draft_model_config.hf_config.to_dict()
        )


def stretched(hf_config: Any) -> Any:
    hf_config.rope_parameters = YARN
    return hf_config


class TestPromptTokensLeftOut:
    def test_where_the_head_has_one_layer_of_attention_and_its_kv_is_in_a_ring(self) -> None:
        layer = FakeLayer(FullAttentionSpec(**shape()))
        assert proposers.equip_layers(fake_config({"mtp.attn": layer}), {"mtp.attn"})
        assert layer.get_kv_cache_spec(ENGINE).skips_unread

    @pytest.mark.parametrize(
        ("part", "change", "why"),
        [
            ("parallel_config", {"data_parallel_size": 2}, "under data parallelism"),
            ("parallel_config", {"enable_eplb": True}, "experts are balanced"),
            ("compilation_config", {"cudagraph_mode": CUDAGraphMode.FULL}, "FULL CUDA graphs"),
            ("speculative_config", {"num_speculative_tokens": 256}, "smaller than a step"),
            (None, {}, "its head has 2 layers of attention"),
        ],
    )
    def test_not_where_more_depends_on_them_and_the_log_says_why(
        self, monkeypatch: pytest.MonkeyPatch, part: str | None, change: dict[str, Any], why: str
    ) -> None:
        said: list[str] = []
        monkeypatch.setattr(
            draft_prefill.logger, "info_once", lambda line, *args: said.append(line % args)
        )
        layers = {f"mtp.{i}.attn": FakeLayer(FullAttentionSpec(**shape())) for i in range(2)}
        config = fake_config(layers)
        if part is not None:
            layers.popitem()
            vars(getattr(config, part)).update(change)
        assert not proposers.equip_layers(config, layers)
        assert not layers["mtp.0.attn"].get_kv_cache_spec(ENGINE).skips_unread
        (line,) = said
        assert line.startswith("windowed_mtp: the draft runs on the whole prompt")
        assert why in line

    @pytest.mark.parametrize("key", [{"draft_prefill": "full"}, {"draft_kv_cache": "full"}])
    def test_not_where_the_user_wants_the_whole_prompt(self, key: dict[str, str]) -> None:
        layer = FakeLayer(FullAttentionSpec(**shape()))
        assert not proposers.equip_layers(fake_config({"mtp.attn": layer}, **key), {"mtp.attn"})
