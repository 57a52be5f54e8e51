"""The planner: real model classes without weights, vLLM's own planning, and a roofline."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmtp_vllm import cli
from wmtp_vllm.config import METHOD
from wmtp_vllm.planner import command, models, paper, prediction, roofline
from wmtp_vllm.planner.anatomy import Anatomy, Memory, Question, study
from wmtp_vllm.planner.hardware import GPUS
from wmtp_vllm.planner.roofline import Attention, Constants, Experts, Part, Workload

pytestmark = pytest.mark.unit

SPECULATIVE = {
    "method": METHOD,
    "num_speculative_tokens": 3,
    "draft_window_size": 4032,
    "draft_sink_size": 64,
}
PARAMS = {  # billions, by the makers' model cards, without drafts but for these' output heads
    "deepseek-v3": 671,
    "glm-4.5": 355,
    "glm-4.7-flash": 30,
    "llama-3.1-8b-eagle3": 8.03 + 0.13,
    "llama-3.1-8b-with-1b": 8.03 + 0.26,
    "mimo-7b": 7.6,
    "mimo-v2-flash": 309,
    "nemotron-3-super-120b-a12b": 120.6,
    "qwen3-next-80b-a3b": 80,
    "qwen3.5-122b-a10b": 122,
    "qwen3.6-27b": 27,
    "qwen3.6-35b-a3b": 35,
}
DRAFT_SHARE = {
    "deepseek-v3": 1 / 62,
    "glm-4.5": 1 / 93,
    "glm-4.7-flash": 1 / 48,
    "llama-3.1-8b-eagle3": 1 / 33,
    "llama-3.1-8b-with-1b": 1 / 5,
    "mimo-7b": 1 / 37,
    "qwen3.6-27b": 1 / 17,
}


@pytest.fixture(scope="module")
def paper_anatomies() -> dict[str, Anatomy]:
    return paper.anatomies()


@pytest.fixture(scope="module")
def presets() -> dict[str, Anatomy]:
    names = models.presets()
    engine = {"max_model_len": 131_072, "max_num_seqs": 1}
    questions = []
    for model in map(models.find, names):
        speculative = SPECULATIVE | {"method": model.method}
        question = Question(model.config, engine, speculative, 1, 16, gpu_bytes=0, kv_bytes=200e9)
        questions.append(replace(question, draft_config=model.draft))
    return dict(zip(names, study(questions), strict=True))


def test_every_preset_has_the_weights_of_its_model_card(presets):
    assert presets.keys() == PARAMS.keys()
    for name, anatomy in presets.items():
        draft = anatomy.draft.dense_params + sum(e.params for e in anatomy.draft.experts)
        assert (anatomy.params - draft) / 1e9 == pytest.approx(PARAMS[name], rel=0.02), name


def test_every_preset_gives_the_drafts_share_of_kv(presets):
    for name, share in DRAFT_SHARE.items():
        assert presets[name].memory.tax == pytest.approx(share, rel=0.01), name


def test_what_the_plugin_refuses_is_planned_natively_with_the_reason(presets):
    refused = {name for name, anatomy in presets.items() if anatomy.refusal}
    assert refused == {"mimo-v2-flash"}
    anatomy = presets["mimo-v2-flash"]
    assert anatomy.memory.native_capacity
    assert anatomy.memory.windowed_capacity is None


def test_the_memory_table_is_the_papers_to_a_fifth_of_a_point(paper_anatomies):
    for reported in paper.REPORTED:
        memory = paper_anatomies[reported.preset].memory
        assert 100 * memory.tax == pytest.approx(reported.draft_share, abs=0.2)
        assert memory.ring is not None
        assert 1 - memory.ring / memory.draft > 0.99, "given back at 1M, as the paper says"


def test_constants_fitted_at_261k_predict_the_wins_at_1m_within_six_points(paper_anatomies):
    constants = paper.fit(paper_anatomies)
    assert constants.attention_efficiency == pytest.approx(
        Constants().attention_efficiency, rel=0.02
    ), "the defaults are the fit"
    assert constants.layer_seconds == pytest.approx(Constants().layer_seconds, rel=0.02)
    for reported in paper.REPORTED:
        found = paper.predicted(paper_anatomies[reported.preset], paper.LONG, constants)
        assert found.win == pytest.approx(reported.win_long, abs=6), reported.preset


def test_wins_at_1m_are_missed_when_only_bytes_are_counted(paper_anatomies):
    """The control, fitted anew: a roofline of bytes does not meet them."""
    endless = replace(paper.GPU, flops=1e30, exponentials=1e30)
    constants = paper.fit(paper_anatomies, endless)
    errors = [
        paper.predicted(paper_anatomies[r.preset], paper.LONG, constants, endless).win - r.win_long
        for r in paper.REPORTED
    ]
    assert max(map(abs, errors)) > 6


def test_a_shard_has_its_part_of_weights_and_heads():
    config = models.find("qwen3-next-80b-a3b").config
    speculative = SPECULATIVE
    one, two = study(
        [
            Question(
                config,
                {"max_model_len": 8192, "max_num_seqs": 1, "tensor_parallel_size": size},
                speculative,
                1,
                16,
                gpu_bytes=0,
                kv_bytes=40e9,
            )
            for size in (1, 2)
        ]
    )
    assert two.params == pytest.approx(one.params, rel=0.01)
    assert two.memory.weights == pytest.approx(one.memory.weights / 2, rel=0.01)
    assert [a.num_heads for a in two.target.attention] == [8]
    assert two.memory.draft == pytest.approx(one.memory.draft / 2, rel=0.1)


LAYER = Attention(1, 16, 2, 128, 128, token_bytes=1024)
TARGET = Part(32, 7 * 10**9, 5 * 10**8, attention=(replace(LAYER, layers=32),))
DRAFT = Part(1, 2 * 10**8, 5 * 10**8, attention=(LAYER,))


def steps(context, k=3, reads=4096, batch=1, gpu="H200"):
    load = Workload(context, batch, k)
    of = (GPUS[gpu], 16, Constants())
    return (
        roofline.step(TARGET, DRAFT, load, context, *of),
        roofline.step(TARGET, DRAFT, load, min(reads, context), *of),
    )


@given(
    context=st.integers(1, 2_000_000),
    k=st.integers(0, 16),
    batch=st.integers(1, 512),
    gpu=st.sampled_from(sorted(GPUS)),
)
def test_a_windowed_step_never_costs_more_and_differs_in_the_draft_alone(context, k, batch, gpu):
    native, windowed = steps(context, k, 4096, batch, gpu)
    assert windowed.seconds <= native.seconds
    assert (native.weights, native.states, native.target_attention, native.fixed) == (
        (windowed.weights, windowed.states, windowed.target_attention, windowed.fixed)
    )
    if k == 0:
        assert native.draft_attention == 0
    if context <= 4096:
        assert native == windowed


def test_the_windowed_draft_costs_the_same_at_any_context():
    assert steps(8_192)[1].draft_attention == steps(1_000_000)[1].draft_attention
    assert steps(8_192)[0].draft_attention * 100 < steps(1_000_000)[0].draft_attention


def test_a_sliding_window_of_the_models_own_bounds_the_read():
    sliding = replace(LAYER, reach=128)
    gpu = GPUS["H200"]
    assert sliding.seconds(1_000_000, 1, gpu) == LAYER.seconds(129, 1, gpu)


@given(tokens=st.integers(1, 10_000))
def test_tokens_reach_between_their_own_and_all_experts(tokens):
    layer = Experts(experts=256, top_k=8, params=256_000)
    assert 8_000 * (1 - 1e-9) <= layer.read(tokens) <= min(256_000, tokens * 8_000 * (1 + 1e-9))


def test_large_batches_are_bound_by_arithmetic():
    gpu = GPUS["H200"]
    assert TARGET.weights_seconds(1, gpu, 16) == TARGET.weights_seconds(8, gpu, 16)
    assert TARGET.weights_seconds(4096, gpu, 16) > 4 * TARGET.weights_seconds(8, gpu, 16)


def test_the_best_depth_is_deeper_where_drafting_is_cheaper():
    dear = [(k, 10 + 3 * k) for k in range(1, 10)]
    cheap = [(k, 10 + 0.5 * k) for k in range(1, 10)]
    assert roofline.best_depth(dear, 0.8) < roofline.best_depth(cheap, 0.8)
    assert roofline.acceptance_length(0.5, 2) == 1.75


ROOMY = Memory(1e10, 1e10, 9e9, 0, 1e9, 1e7, 1e8, 10_000_000, 11_000_000)


def advice_at(context, *, refusal="", memory=ROOMY, target=TARGET, batch=1):
    studied = Anatomy("M", 7 * 10**9, target, DRAFT, 4159, memory, refusal)
    load = Workload(context, batch, 3)
    plan = prediction.predict(studied, GPUS["H200"], load, sink=64, weight_bits=16)
    return " ".join(prediction.advice(plan))


def test_the_advice_says_when_not_to_use_it():
    assert "the window covers the whole context" in advice_at(4000)
    assert "Not worth it for speed" in advice_at(8000)
    assert "Worth it" not in advice_at(8000)


def test_the_advice_for_a_draft_that_dominates_is_to_use_it():
    light = replace(TARGET, attention=(replace(LAYER, layers=2),))
    text = advice_at(1_000_000, target=light)
    assert text.startswith("10.0% more tokens fit. Worth it")


def test_the_advice_for_what_is_refused_is_the_refusal():
    text = advice_at(1_000_000, refusal="has MLA", memory=replace(ROOMY, windowed_capacity=None))
    assert text.startswith("windowed_mtp would be refused: has MLA")
    assert "Worth it" not in text


@pytest.mark.parametrize(
    ("memory", "batch", "said"),
    [
        (replace(ROOMY, kv=-1.0), 1, "The weights do not fit"),
        (replace(ROOMY, native_capacity=None, windowed_capacity=None), 1, "do not fit at once"),
        (ROOMY, 64, "64 x 1,000,000 tokens do not fit at once"),
        (replace(ROOMY, native_capacity=None), 1, "with windowed MTP only"),
        (replace(ROOMY, windowed_capacity=10_000_000), 1, "Lower max_num_seqs"),
    ],
)
def test_the_advice_begins_with_what_does_not_fit(memory, batch, said):
    first = advice_at(1_000_000, memory=memory, batch=batch).partition("orth it")[0]
    assert said in first
    assert "more tokens fit" not in first


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "gptq", "bits": 4}, 4),
    ],
)
def test_bits_a_weight_are_those_of_the_config(quantization, bits):
    for config in (
        {"quantization_config": quantization},
        {"text_config": {"quantization_config": quantization}},
    ):
        assert models.Model("m", config).weight_bits == bits


def test_unknown_quantization_asks_for_the_bits():
    with pytest.raises(ValueError, match=r"'odd'.*Give --weight-bits"):
        _ = models.Model("m", {"quantization_config": {"quant_method": "odd"}}).weight_bits


def test_a_model_is_a_preset_a_folder_or_a_config_file(tmp_path):
    assert "Qwen/Qwen3.6-27B" in models.find("qwen3.6-27b").source
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    for name in (tmp_path, tmp_path / "config.json"):
        assert models.find(str(name)).config == {"model_type": "x"}


def test_an_unknown_model_is_refused_with_the_presets():
    with pytest.raises(ValueError, match=r"qwen3\.6-27b"):
        models.find("qwen3.6-28b")


def test_a_config_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        models.find(str(tmp_path))


def mimo(**changes):
    """A small MiMo's config."""
    config = models.find("mimo-7b").config
    return config | {"num_hidden_layers": 2, "vocab_size": 1024, "hidden_size": 256} | changes


def ask(config, **engine_arguments):
    engine = {"max_model_len": 8192, "max_num_seqs": 1} | engine_arguments
    return Question(config, engine, SPECULATIVE, 1, 4, gpu_bytes=0, kv_bytes=4e9)


def test_tied_and_untied_embeddings_are_read_alike_and_stored_once():
    untied, tied = study([ask(mimo()), ask(mimo(tie_word_embeddings=True))])
    assert tied.target == untied.target
    assert untied.params - tied.params == untied.target.head_params


def test_kv_that_the_checkpoint_quantizes_takes_half_in_draft_and_ring():
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    config = mimo(quantization_config=quantization)
    plain, quantized = study([ask(mimo()), ask(config)])
    assert not quantized.refusal
    assert quantized.memory.draft == pytest.approx(plain.memory.draft / 2)
    assert quantized.memory.ring == pytest.approx(plain.memory.ring / 2)


def test_a_model_without_an_mtp_head_is_refused_by_that_reason():
    config = mimo(architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ValueError, match="needs a model that has an MTP head"):
        study([ask(config)])


def test_more_sequences_take_more_of_the_ring_pool_and_leave_fewer_tokens():
    few, many = study([ask(mimo(), max_num_seqs=n) for n in (1, 16)])
    assert few.memory.ring_pool < many.memory.ring_pool
    assert few.memory.windowed_capacity > many.memory.windowed_capacity
    assert few.memory.native_capacity == many.memory.native_capacity


@pytest.fixture
def run(presets, monkeypatch, capsys):
    """`wmtp plan` on a preset that is already taken apart; the questions that it asks."""
    asked = []

    def answer(questions):
        asked.extend(questions)
        return [presets["qwen3.6-27b"]]

    monkeypatch.setattr(command, "study", answer)

    def call(*arguments):
        assert cli.main(["plan", "qwen3.6-27b", *arguments]) == 0
        return capsys.readouterr().out, asked[-1]

    return call


def test_the_report_has_memory_step_table_and_advice(run):
    text, question = run("--gpu", "B200", "--context", "262144")
    assert "16 layers of 4,096 bytes a token" in text
    assert "5.9% of all attention KV" in text
    rows = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert {"weights", "draft attention", "all"} <= rows.keys()
    assert "Worth it" in text
    assert question.engine_arguments["max_model_len"] == 262_144


def test_json_has_bytes_seconds_and_tokens(run):
    text, question = run("--json", "--weight-bits", "4", "--kv-cache-memory", "100")
    document = json.loads(text)
    assert document["steps"]["native"]["seconds"] > document["steps"]["windowed"]["seconds"] > 0
    assert document["draft_kv_tax"] == pytest.approx(1 / 17, rel=0.01)
    assert (question.weight_bits, question.kv_bytes) == (4, 100 * 2**30)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "0"], "argument --context"),
        (["--k", "0"], "argument --k"),
        (["--sink", "-1"], "argument --sink"),
        (["--acceptance", "1.5"], "argument --acceptance"),
        (["--bandwidth", "0"], "argument --bandwidth"),
        (["--engine-arguments", "[1]"], "argument --engine-arguments"),
        (["--engine-arguments", '{"max_model_len": 5}'], "give --context"),
        (["--engine-arguments", '{"pipeline_parallel_size": 2}'], "pipelines are not planned"),
    ],
)
def test_bad_options_are_refused_by_name(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "mimo-7b", *arguments])
    assert said in capsys.readouterr().err + str(stopped.value)


def test_a_sink_beyond_all_window_sizes_still_has_a_best_window():
    plan = prediction.predict(
        Anatomy("M", 7 * 10**9, TARGET, DRAFT, 9000, ROOMY, ""),
        GPUS["H200"],
        Workload(100_000, 1, 3),
        sink=8192,
        weight_bits=16,
    )
    assert plan.best_window == 4096
