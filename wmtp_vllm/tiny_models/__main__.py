"""Make a tiny checkpoint from the command line, and print its folder."""

import argparse
import sys

from wmtp_vllm.tiny_models import GENERATORS, build


def option(text: str) -> tuple[str, int]:
    """Parse "layers=4"."""
    name, _, value = text.partition("=")
    return name, int(value)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m wmtp_vllm.tiny_models", description=__doc__)
    parser.add_argument("name", choices=sorted(GENERATORS))
    parser.add_argument("path", help="folder of the checkpoint")
    parser.add_argument("options", nargs="*", type=option, metavar="option=number")
    parsed = parser.parse_args(arguments)
    try:
        print(build(parsed.name, parsed.path, **dict(parsed.options)))
    except (ValueError, TypeError, FileExistsError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
