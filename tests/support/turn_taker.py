"""A child that takes turns: it writes its name to a file at every step of its answers."""

from pathlib import Path
from typing import Any

from wmtp_vllm import child
from wmtp_vllm.bench import turns


def take(request: dict[str, Any]) -> str:
    mine = turns.Turns(*request["turns"])
    said = Path(request["file"])
    for answer, steps in enumerate(request["answers"]):
        mine.pass_on(within_an_answer=False)
        for _ in range(steps):
            mine.pass_on(within_an_answer=True)
            with said.open("a") as file:
                file.write(f"{request['name']}{answer} ")
    if request.get("fails"):
        raise ValueError("planted")
    return f"{request['name']} is through"


if __name__ == "__main__":
    child.answer(take)
