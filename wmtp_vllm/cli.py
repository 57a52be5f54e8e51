"""The console script `wmtp`."""

import argparse
import sys
from collections.abc import Sequence

from wmtp_vllm import __version__, check, demo


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="wmtp", description="Windowed-MTP speculative decoding for stock vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    check_parser = commands.add_parser(
        "check", help="does the plugin fit the installed vLLM? exits 0 or 1"
    )
    check.add_arguments(check_parser)
    demo_parser = commands.add_parser(
        "demo", help="generate with no speculation, native MTP and windowed MTP, and compare"
    )
    demo.add_arguments(demo_parser)
    options = parser.parse_args(arguments)
    return check.main(options) if options.command == "check" else demo.main(options)


if __name__ == "__main__":
    sys.exit(main())
