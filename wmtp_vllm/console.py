"""What the commands share: which model and engine, and progress while a person watches."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def add_model_arguments(
    parser: argparse.ArgumentParser, tiny: Sequence[str] = ("dense", "hybrid")
) -> Any:
    """`--engine-arguments`, and `--model` or `--tiny`, to whose group alternatives may be added.

    Args:
        parser: of a command.
        tiny: the embedded models that the command can use.

    """
    add_engine_arguments(parser)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="your own checkpoint with an MTP head (a path or hub name)")
    model.add_argument(
        "--tiny",
        choices=tuple(tiny),
        default="dense",
        help="the embedded tiny model to use without --model (default: dense)",
    )
    return model


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """`--engine-arguments`."""
    parser.add_argument(
        "--engine-arguments",
        type=json_object,
        default={},
        metavar="JSON",
        help="""further arguments of vLLM's LLM, such as '{"gpu_memory_utilization": 0.5}'""",
    )


def json_object(text: str) -> dict[str, Any]:
    """An argparse type."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def positive_int(text: str) -> int:
    """An argparse type: at least 1."""
    return int(_above_zero(int(text)))


def natural(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    return int(_above_zero(int(text) + 1)) - 1


def positive(text: str) -> float:
    """An argparse type: more than 0."""
    return _above_zero(float(text))


def share(text: str) -> float:
    """An argparse type: more than 0, at most 1."""
    if (value := _above_zero(float(text))) > 1:
        raise ValueError(f"{value} is more than 1")
    return value


def _above_zero(value: float) -> float:
    if not value > 0:
        raise ValueError(f"{value} is not positive")
    return value


def progress(items: Sequence[T], title: Callable[[T], str]) -> Iterator[T]:
    """Go through the items: with a bar where a person watches, else a line for each."""
    from tqdm import tqdm

    bar = tqdm(items, disable=not sys.stderr.isatty(), leave=False)
    for number, item in enumerate(bar, start=1):
        bar.set_description(title(item))
        if bar.disable:
            print(f"{number}/{len(items)}: {title(item)}", file=sys.stderr, flush=True)
        yield item
