"""Measure a server that is running: as its clients see it, and by its own counters."""

import time
import urllib.request
import uuid
from typing import Any

from wmtp_vllm.bench.arms import Measurement, Prompt

COUNTERS = "vllm:spec_decode_num_"


def measure(base_url: str, prompts: list[Prompt], max_tokens: int) -> list[Measurement]:
    """Ask the server for each prompt, one at a time.

    Args:
        base_url: such as `http://localhost:8000/v1`.
        prompts: what to ask.
        max_tokens: to generate for each, past the end of sequence.

    Raises:
        openai.OpenAIError: the server does not answer, or refuses.

    """
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    return [_measure(client, model, base_url, prompt, max_tokens) for prompt in prompts]


def served_model(base_url: str) -> tuple[str, int]:
    """The name or path of the served model, and its maximum length in tokens."""
    from openai import OpenAI

    card = OpenAI(base_url=base_url, api_key="none").models.list().data[0]
    extra = card.model_extra or {}
    return extra.get("root") or card.id, int(extra.get("max_model_len") or 1 << 62)


def _measure(
    client: Any, model: str, base_url: str, prompt: Prompt, max_tokens: int
) -> Measurement:
    before = counters(base_url)
    started = time.perf_counter()
    stream = client.completions.create(
        model=model,
        prompt=prompt.token_ids,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        # A salt of its own, so that no earlier answer leaves a prefix to hit.
        extra_body={"ignore_eos": True, "cache_salt": uuid.uuid4().hex},
    )
    first = last = started
    generated = 0
    for chunk in stream:
        if chunk.choices:
            last = time.perf_counter()
            first = last if first == started else first
        if chunk.usage is not None:
            generated = chunk.usage.completion_tokens
    after = counters(base_url)
    return Measurement(
        context=prompt.context,
        generated=generated,
        ttft=first - started,
        tpot=(last - first) / max(1, generated - 1),
        drafts=after["drafts"] - before["drafts"],
        accepted=after["accepted_tokens"] - before["accepted_tokens"],
        accepted_per_position=[],
    )


def counters(base_url: str) -> dict[str, int]:
    """Drafts and accepted tokens so far; 0 where nothing speculates."""
    values = metrics(base_url)
    names = ("drafts", "accepted_tokens")
    return {name: int(values.get(f"{COUNTERS}{name}_total", 0)) for name in names}


def metrics(base_url: str, label: str | None = None) -> dict[str, float]:
    """What the server's `/metrics` has, by name, summed over labels.

    Args:
        base_url: with `/v1` or without.
        label: name of a label whose value is appended to the names that have it, as `name[value]`.

    Raises:
        OSError: nothing answers there.

    """
    from prometheus_client.parser import text_string_to_metric_families

    root = base_url.rstrip("/").removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/metrics", timeout=30) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            value = sample.labels.get(label) if label else None
            name = sample.name if value is None else f"{sample.name}[{value}]"
            found[name] = found.get(name, 0) + sample.value
    return found
