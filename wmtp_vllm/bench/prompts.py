"""The prompts of a benchmark: generated, from a file, or of one of vLLM's own datasets."""

import argparse
import json
from pathlib import Path
from typing import Any

from wmtp_vllm.bench import workloads
from wmtp_vllm.bench.arms import Prompt


def generated(model: str, task: str, contexts: list[int], seed: int) -> list[Prompt]:
    """One prompt of exactly each length, in tokens.

    Raises:
        ValueError: the task does not fit in a length.

    """
    tokenizer = _tokenizer(model)
    prompts = []
    for context in contexts:

        def count(text: str) -> int:
            return len(tokenizer.encode(text))

        sample = workloads.make(task, context, seed, count)
        ids = tokenizer.encode(sample.prompt)
        # To the token, so that arms and rounds of one context are of one length: the front is cheap.
        prompts.append(Prompt(context, ids[:1] * (context - len(ids)) + ids))
    return prompts


def from_file(model: str, file: Path) -> list[Prompt]:
    """The prompts of a file: JSON lines with a key "prompt", or one prompt as plain text.

    Raises:
        ValueError: there is none in it.
        OSError: it cannot be read.

    """
    text = file.read_text()
    texts = [text] if text.strip() else []
    if file.suffix in (".jsonl", ".json"):
        try:
            texts = [json.loads(line)["prompt"] for line in text.splitlines() if line.strip()]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{file} does not have an object with the key "prompt" in each line: {error!r}'
            ) from error
    if not texts:
        raise ValueError(f"{file} has no prompt")
    return _as_one_set(model, texts)


def of_dataset(model: str, options: list[str]) -> list[Prompt]:
    """Prompts of a dataset of vLLM's own benchmark.

    Args:
        model: whose tokenizer counts.
        options: as `vllm bench` takes them, such as `--dataset-name sharegpt --dataset-path FILE`.

    Raises:
        ValueError: vLLM does not find the dataset, or not what reads it.

    """
    from vllm.benchmarks.datasets import add_dataset_parser, get_samples

    parser = argparse.ArgumentParser(prog="--dataset", add_help=False, exit_on_error=False)
    add_dataset_parser(parser)
    parser.set_defaults(num_prompts=8)
    try:
        arguments = parser.parse_args(options)
        samples = get_samples(arguments, _tokenizer(model))
    except (argparse.ArgumentError, ImportError, AttributeError, OSError) as error:
        raise ValueError(
            f"vLLM's benchmark does not give the dataset {' '.join(options)}: {error}. "
            "pip install 'vllm[bench]' brings what its datasets need."
        ) from error
    return _as_one_set(model, [sample.prompt for sample in samples])


def _as_one_set(model: str, texts: list[Any]) -> list[Prompt]:
    """Prompts of any length count for one context, their mean: what differs is the arm."""
    tokenizer = _tokenizer(model)
    ids = [tokenizer.encode(text) if isinstance(text, str) else list(text) for text in texts]
    mean = round(sum(map(len, ids)) / len(ids))
    return [Prompt(mean, tokens) for tokens in ids]


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
