"""Where a benchmark's prompts come from, and what it refuses."""

import json

import pytest

from wmtp_vllm import cli
from wmtp_vllm.bench import prompts

pytestmark = pytest.mark.unit


def test_generated_prompts_have_exactly_the_length(tiny_model):
    found = prompts.generated(tiny_model("dense"), "variable_tracking", [1024, 1500], seed=3)
    assert [(p.context, len(p.token_ids)) for p in found] == [(1024, 1024), (1500, 1500)]


def test_a_file_of_lines_is_one_set_that_counts_for_its_mean_length(tiny_model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a" * n}) + "\n" for n in (10, 30)))
    found = prompts.from_file(tiny_model("dense"), file)
    assert [len(p.token_ids) for p in found] == [10, 30]
    assert {p.context for p in found} == {20}


def test_a_text_file_is_one_prompt(tiny_model, tmp_path):
    (tmp_path / "prompt.txt").write_text("One prompt\nof two lines")
    [found] = prompts.from_file(tiny_model("dense"), tmp_path / "prompt.txt")
    assert found.context == len(found.token_ids) > 10


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n", '["a"]\n'])
def test_a_file_without_prompts_is_refused(tiny_model, tmp_path, text):
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(ValueError, match="prompt"):
        prompts.from_file(tiny_model("dense"), tmp_path / "prompts.jsonl")


def test_a_dataset_of_vllms_benchmark_gives_its_prompts(tiny_model):
    options = ["--dataset-name", "random", "--random-input-len", "50", "--num-prompts", "3"]
    found = prompts.of_dataset(tiny_model("dense"), options)
    assert len(found) == 3
    assert all(p.token_ids for p in found)


def test_an_unknown_dataset_is_refused_by_its_options(tiny_model):
    with pytest.raises(ValueError, match="does not give the dataset --dataset-name odd"):
        prompts.of_dataset(tiny_model("dense"), ["--dataset-name", "odd"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["--rounds", "0"], "argument --rounds"),
        (["--base-url", "http://localhost:1/v1", "--depths", "3"], "--depths is for engines"),
        (["--base-url", "http://localhost:1/v1"], "no server answers"),
        (["--contexts", "100", "--rounds", "1"], "takes at least"),
        (["--prompt-file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(arguments, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--out", str(tmp_path), *arguments])
    assert said in capsys.readouterr().err + str(stopped.value)
