"""Ask a running server, such as `examples/serve.sh`, through the `openai` package.

python examples/openai_client.py [--base-url http://localhost:8000/v1]
"""

import argparse
import os
import sys

from openai import APIConnectionError, OpenAI

PROMPT = "The river reached the sea because"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a running server.")
    parser.add_argument(
        "--base-url",
        default=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
        help="default: OPENAI_BASE_URL, or http://localhost:8000/v1",
    )
    url = parser.parse_args().base_url
    # vLLM asks for a key only where it was started with --api-key.
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"No server answers at {url}. Start one with examples/serve.sh.")
    print(f"model: {model}")
    sampling = {"model": model, "max_tokens": 32, "temperature": 0}

    answer = client.completions.create(prompt=PROMPT, **sampling)
    print(f"completion: {answer.choices[0].text!r} ({answer.usage.completion_tokens} tokens)")

    # The tokens that one step of speculation accepted arrive together, in one chunk.
    stream = client.completions.create(prompt=PROMPT, stream=True, **sampling)
    print("streamed:  ", *(repr(chunk.choices[0].text) for chunk in stream))

    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(messages=messages, **sampling)
    print(f"chat: {answer.choices[0].message.content!r}")

    stream = client.chat.completions.create(messages=messages, stream=True, **sampling)
    print("streamed:", *(repr(chunk.choices[0].delta.content) for chunk in stream))


if __name__ == "__main__":
    main()
