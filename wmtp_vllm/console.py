"""What the commands share: which model and engine, and progress while a person watches."""

import argparse
import json
import sys
from typing import Any


def add_model_arguments(parser: argparse.ArgumentParser) -> Any:
    """`--engine-arguments`, and `--model` or `--tiny`, to whose group alternatives may be added."""
    add_engine_arguments(parser)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="your own checkpoint with an MTP head (a path or hub name)")
    model.add_argument(
        "--tiny",
        choices=("dense", "hybrid"),
        default="dense",
        help="the embedded tiny model to use without --model (default: dense)",
    )
    return model


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """`--engine-arguments`."""
    parser.add_argument(
        "--engine-arguments",
        type=json.loads,
        default={},
        metavar="JSON",
        help="""further arguments of vLLM's LLM, such as '{"gpu_memory_utilization": 0.5}'""",
    )


def say(line: str) -> None:
    """Progress, on one line where a person watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)
