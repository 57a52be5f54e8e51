"""The parity table of docs/support.md: what each feature's test found, on both runners.

Tests call `record`; where WMTP_PARITY names a file, a line is added to it. `make parity-table` runs the
tests on both runners and then this module, which writes the table between its two marks.
"""

import json
import os
import sys
from pathlib import Path

from tests.conftest import RUNNER

BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"


def record(feature: str, against: str, result: str) -> None:
    if path := os.environ.get("WMTP_PARITY"):
        line = {"feature": feature, "runner": RUNNER, "against": against, "result": result}
        with Path(path).open("a") as file:
            print(json.dumps(line), file=file)


def table(lines: list[str]) -> str:
    """Markdown, in the order in which the features were first recorded."""
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        found = json.loads(line)
        row = rows.setdefault(found["feature"], {"V1": "not run", "V2": "not run"})
        row |= {"against": found["against"], found["runner"]: found["result"]}
    body = [f"| {name} | {r['against']} | {r['V1']} | {r['V2']} |" for name, r in rows.items()]
    return "\n".join(["| feature | compared with | V1 | V2 |", "| --- | --- | --- | --- |", *body])


def main(recorded: Path, document: Path) -> None:
    before, _, rest = document.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    made = table(recorded.read_text().splitlines())
    document.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
