"""The console script `wmtp`."""

import argparse
import sys
from collections.abc import Callable, Sequence

from wmtp_vllm import __version__, check, demo, doctor
from wmtp_vllm.bench import command as bench
from wmtp_vllm.planner import command as plan


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="wmtp", description="Windowed-MTP speculative decoding for stock vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command, what in (
        ("check", check, "does the plugin fit the installed vLLM? exits 0 or 1"),
        ("doctor", doctor, "what will go wrong with a model, or does with a server, and the fix"),
        ("demo", demo, "generate with no speculation, native MTP and windowed MTP, and compare"),
        ("bench", bench, "measure the three over contexts, windows and depths"),
        ("plan", plan, "predict memory and step cost for a model and a GPU, without either"),
    ):
        subparser = commands.add_parser(name, help=what)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.main)
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
