"""The keys of `method: "windowed_mtp"`, and how they travel through vLLM's configuration."""

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support.engine import native, windowed
from wmtp_vllm.config import (
    METHOD,
    Selection,
    WindowedMTPConfig,
    deselected,
    selected,
    split_keys,
)

pytestmark = pytest.mark.unit

OWN_KEYS = {
    "draft_window_size": 128,
    "draft_sink_size": 0,
    "draft_kv_cache": "full",
    "draft_attention_backend": "native",
}
VLLM_KEYS = {field.name for field in dataclasses.fields(SpeculativeConfig)} - {"method"}
MADE_BY_VLLM = {
    "target_model_config",
    "target_parallel_config",
    "draft_model_config",
    "draft_parallel_config",
}


@pytest.fixture(scope="module")
def engine_args(tiny_model: Callable[..., str]) -> Callable[..., EngineArgs]:
    model = tiny_model("dense")

    def make(speculative: dict[str, Any] | None, **arguments: Any) -> EngineArgs:
        return EngineArgs(
            model, max_model_len=8192, speculative_config=speculative, dtype="float32", **arguments
        )

    return make


def selection_of(config: VllmConfig) -> Selection:
    selection = config.additional_config[METHOD]
    assert isinstance(selection, Selection)
    return selection


class TestKeys:
    def test_defaults_are_the_papers(self) -> None:
        config = WindowedMTPConfig()
        assert (config.draft_window_size, config.draft_sink_size) == (4032, 64)
        assert config.draft_kv_cache == "ring"

    def test_sink_may_be_0_and_window_1(self) -> None:
        config, _ = split_keys(windowed(3, window=1, sink=0), SpeculativeConfig)
        assert (config.draft_window_size, config.draft_sink_size) == (1, 0)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("draft_window_size", 0),
            ("draft_window_size", -4032),
            ("draft_window_size", "4032"),
            ("draft_window_size", 4032.0),
            ("draft_window_size", True),
            ("draft_window_size", None),
            ("draft_sink_size", -1),
            ("draft_sink_size", "64"),
            ("draft_sink_size", 0.5),
            ("draft_kv_cache", "Ring"),
            ("draft_kv_cache", None),
            ("draft_kv_cache", 1),
            ("draft_attention_backend", "xFormers"),
        ],
    )
    def test_ill_typed_value_is_refused_by_key_and_value(self, key: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"{key}={value!r}: ") as refusal:
            split_keys({"method": METHOD, key: value}, SpeculativeConfig)
        message = str(refusal.value)
        assert "draft_window_size is an integer of at least 1" in message
        assert "draft_sink_size one of at least 0" in message
        assert 'draft_kv_cache "ring" or "full"' in message
        assert 'draft_attention_backend "native" or "xformers"' in message

    def test_every_bad_value_is_named_at_once(self) -> None:
        with pytest.raises(ValueError, match=r"draft_window_size=0: .*; draft_sink_size=-1: "):
            split_keys(windowed(3, window=0, sink=-1), SpeculativeConfig)

    @pytest.mark.parametrize(
        ("misspelt", "meant"),
        [
            ("draft_windowsize", "draft_window_size"),
            ("window_size", "draft_window_size"),
            ("draft_sink_tokens", "draft_sink_size"),
            ("draft_kv_caches", "draft_kv_cache"),
            ("num_speculative_token", "num_speculative_tokens"),
        ],
    )
    def test_misspelt_key_is_refused_with_the_one_meant(self, misspelt: str, meant: str) -> None:
        with pytest.raises(ValueError, match=f"{misspelt!r}.*Did you mean {meant!r}") as refusal:
            split_keys({"method": METHOD, misspelt: 3}, SpeculativeConfig)
        own = WindowedMTPConfig.model_fields.keys() - {"method"}
        assert all(key in str(refusal.value) for key in own)

    def test_key_like_no_other_is_refused_without_a_guess(self) -> None:
        with pytest.raises(
            ValueError, match="the key 'xyzzy', which windowed_mtp does not know"
        ) as e:
            split_keys({"method": METHOD, "xyzzy": 3}, SpeculativeConfig)
        assert "Did you mean" not in str(e.value)

    @given(
        vllm=st.dictionaries(st.sampled_from(sorted(VLLM_KEYS)), st.integers() | st.booleans()),
        own=st.sets(st.sampled_from(sorted(OWN_KEYS))),
    )
    def test_whatever_is_not_ours_is_vllms(self, vllm: dict[str, Any], own: set[str]) -> None:
        ours = {key: OWN_KEYS[key] for key in own}
        given_keys = {"method": METHOD, **vllm, **ours}
        before = dict(given_keys)
        config, rest = split_keys(given_keys, SpeculativeConfig)
        assert rest == {"method": "mtp", **vllm}
        assert config == WindowedMTPConfig(**ours)
        assert given_keys == before

    def test_no_key_of_ours_is_one_of_vllms(self) -> None:
        assert not WindowedMTPConfig.model_fields.keys() & VLLM_KEYS


class TestEngineConfig:
    @settings(max_examples=25, deadline=None)
    @given(
        keys=st.fixed_dictionaries(
            {"num_speculative_tokens": st.integers(1, 8)},
            optional={
                "enforce_eager": st.booleans(),
                "draft_tensor_parallel_size": st.just(1),
                "max_model_len": st.integers(1, 8192),
                "disable_padded_drafter_batch": st.booleans(),
                "disable_eagle_block_drop": st.booleans(),
                "use_local_argmax_reduction": st.booleans(),
                "moe_backend": st.sampled_from(["auto", "triton"]),
                "attention_backend": st.sampled_from(["CPU_ATTN", "FLASH_ATTN", "auto"]),
                "kv_cache_dtype": st.sampled_from(["auto", "bfloat16"]),
                "draft_sample_method": st.sampled_from(["greedy", "probabilistic"]),
                "rejection_sample_method": st.sampled_from(["standard", "block"]),
            },
        )
    )
    def test_vllms_keys_do_what_they_do_for_mtp(
        self, engine_args: Callable[..., EngineArgs], keys: dict[str, Any]
    ) -> None:
        ours = engine_args({"method": METHOD, **OWN_KEYS, **keys}).create_engine_config()
        vllms = engine_args({"method": "mtp", **keys}).create_engine_config()
        assert selected(vllms) is None
        for field in {"method", *VLLM_KEYS} - MADE_BY_VLLM:
            value = getattr(ours.speculative_config, field)
            assert value == getattr(vllms.speculative_config, field), field

    def test_only_a_ring_keeps_the_last_block_of_a_prefix_hit(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        def dropped(**keys: Any) -> bool:
            config = engine_args(windowed(3, 128, 0, **keys)).create_engine_config()
            return bool(config.speculative_config.use_eagle_block_drop())

        assert not dropped()
        assert dropped(draft_kv_cache="full")
        assert dropped(disable_eagle_block_drop=False)

    def test_keys_may_have_dashes(self, engine_args: Callable[..., EngineArgs]) -> None:
        keys = json.loads(
            '{"method": "windowed_mtp", "num-speculative-tokens": 3, "draft-window-size": 256}'
        )
        config = engine_args(keys).create_engine_config()
        assert config.speculative_config.num_speculative_tokens == 3
        assert selection_of(config).config == WindowedMTPConfig(draft_window_size=256)

    def test_making_it_twice_works_and_leaves_the_users_dictionary(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        keys = windowed(3, 128, 16) | {"draft-kv-cache": "full"}
        before = copy.deepcopy(keys)
        arguments = engine_args(keys)
        first, second = (arguments.create_engine_config() for _ in range(2))
        assert keys == before
        assert arguments.speculative_config is keys
        assert selection_of(first) == selection_of(second)
        assert first.compute_hash() == second.compute_hash()

    def test_arguments_used_again_for_another_method_select_nothing(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        arguments = engine_args(windowed(3, 128, 16), additional_config={"theirs": 1})
        arguments.create_engine_config()
        for other in (native(3), None):
            again = dataclasses.replace(arguments, speculative_config=other)
            assert again.create_engine_config().additional_config == {"theirs": 1}

    def test_selects_in_the_config_what_was_asked(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        config = engine_args(windowed(7, 128, 16, draft_kv_cache="full")).create_engine_config()
        assert config.speculative_config.method == "mtp"
        assert config.speculative_config.num_speculative_tokens == 7
        assert selected(config) == WindowedMTPConfig(
            draft_window_size=128, draft_sink_size=16, draft_kv_cache="full"
        )

    @pytest.mark.parametrize(
        "speculative", [None, native(3), {"method": "ngram", "num_speculative_tokens": 2}]
    )
    def test_other_methods_select_nothing(
        self, engine_args: Callable[..., EngineArgs], speculative: dict[str, Any] | None
    ) -> None:
        config = engine_args(copy.copy(speculative)).create_engine_config()
        assert config.additional_config == {}
        assert selected(config) is None

    def test_the_users_additional_config_is_kept(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        theirs = {"theirs": {"nested": 1}}
        arguments = engine_args(windowed(3, 128, 16), additional_config=theirs)
        config = arguments.create_engine_config()
        assert config.additional_config.keys() == {"theirs", METHOD}
        assert config.additional_config["theirs"] == {"nested": 1}
        assert theirs == {"theirs": {"nested": 1}}

    def test_a_selection_of_the_users_own_making_is_refused(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        theirs = {METHOD: {"draft_window_size": 1}}
        with pytest.raises(ValueError, match="not for users to set") as refusal:
            engine_args(windowed(3, 128, 16), additional_config=theirs).create_engine_config()
        assert "found {'draft_window_size': 1}" in str(refusal.value)
        assert 'speculative_config={"method": "windowed_mtp", ...}' in str(refusal.value)

        config = engine_args(native(3), additional_config=theirs).create_engine_config()
        with pytest.raises(ValueError, match="not for users to set"):
            selected(config)

    def test_additional_config_that_is_no_dictionary(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        class Theirs:
            def compute_hash(self) -> str:
                return "theirs"

        theirs = Theirs()
        assert deselected(theirs) is theirs
        config = engine_args(native(3), additional_config=theirs).create_engine_config()
        assert selected(config) is None
        with pytest.raises(ValueError, match=r"needs a dictionary as additional_config.*Theirs"):
            engine_args(windowed(3, 128, 16), additional_config=theirs).create_engine_config()


class TestSelection:
    selection = Selection(WindowedMTPConfig(draft_window_size=128).model_dump())

    @pytest.mark.parametrize(
        "travel", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy, copy.copy]
    )
    def test_survives_travel(self, travel: Callable[[Selection], Selection]) -> None:
        arrived = travel(self.selection)
        assert isinstance(arrived, Selection)
        assert arrived.config == self.selection.config

    def test_is_plain_json(self) -> None:
        assert Selection(json.loads(json.dumps(self.selection))).config == self.selection.config

    def test_a_config_survives_pickling_with_it(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        config = engine_args(windowed(3, 128, 16)).create_engine_config()
        arrived = pickle.loads(pickle.dumps(config))
        assert selected(arrived) == selected(config)
        assert arrived.compute_hash() == config.compute_hash()

    def test_the_hash_of_a_config_tells_windows_apart(
        self, engine_args: Callable[..., EngineArgs]
    ) -> None:
        hashes = {
            engine_args(speculative).create_engine_config().compute_hash()
            for speculative in (windowed(3, 128, 16), windowed(3, 256, 16), native(3))
        }
        assert len(hashes) == 3


class TestCommandLine:
    @pytest.fixture(scope="class")
    def parser(self) -> FlexibleArgumentParser:
        """The parser of `vllm serve`, as far as it is the engine's."""
        parser: FlexibleArgumentParser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        return parser

    @pytest.fixture
    def config_of(
        self, parser: FlexibleArgumentParser, tiny_model: Callable[..., str]
    ) -> Callable[..., VllmConfig]:
        def make(*arguments: str) -> VllmConfig:
            common = ("--model", tiny_model("dense"), "--max-model-len", "8192")
            parsed = parser.parse_args([*common, *arguments])
            return AsyncEngineArgs.from_cli_args(parsed).create_engine_config()

        return make

    def test_method_by_flag(self, config_of: Callable[..., VllmConfig]) -> None:
        config = config_of("--spec-method", "windowed_mtp", "--spec-tokens", "5")
        assert selected(config) == WindowedMTPConfig()
        assert config.speculative_config.method == "mtp"
        assert config.speculative_config.num_speculative_tokens == 5

    def test_method_by_flag_and_keys_by_json(self, config_of: Callable[..., VllmConfig]) -> None:
        keys = '{"draft-window-size": 128, "num_speculative_tokens": 2}'
        config = config_of("--spec-method", "windowed_mtp", "--speculative-config", keys)
        assert selected(config) == WindowedMTPConfig(draft_window_size=128)
        assert config.speculative_config.num_speculative_tokens == 2

    def test_keys_by_dotted_flags(self, config_of: Callable[..., VllmConfig]) -> None:
        prefix = "--speculative-config"
        config = config_of(
            *(f"{prefix}.method", "windowed_mtp", f"{prefix}.num_speculative_tokens", "2"),
            *(f"{prefix}.draft_window_size", "128", f"{prefix}.draft_sink_size", "0"),
        )
        assert selected(config) == WindowedMTPConfig(draft_window_size=128, draft_sink_size=0)

    @pytest.mark.parametrize(
        ("flag", "value", "key"),
        [
            ("--spec-method", "windowed_mtp", "method"),
            ("--spec-tokens", "2", "num_speculative_tokens"),
            ("--spec-model", "elsewhere", "model"),
        ],
    )
    def test_the_same_by_flag_and_by_key_is_refused(
        self, config_of: Callable[..., VllmConfig], flag: str, value: str, key: str
    ) -> None:
        keys = {"method": METHOD, "num_speculative_tokens": 3, "model": "here"}
        with pytest.raises(ValueError, match=f"{flag} {value} and {key!r}: .* give one"):
            config_of(flag, value, "--speculative-config", json.dumps(keys))

    def test_other_methods_parse_as_ever(
        self, parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert parser.parse_args(["--spec-method", "ngram"]).spec_method == "ngram"
        with pytest.raises(SystemExit):
            parser.parse_args(["--spec-method", "windowed"])
        assert "invalid choice: 'windowed'" in capsys.readouterr().err

    def test_the_name_is_added_once(self, parser: FlexibleArgumentParser) -> None:
        actions = [a for a in parser._actions if "--spec-method" in a.option_strings]
        assert [list(action.choices or ()).count(METHOD) for action in actions] == [1]
