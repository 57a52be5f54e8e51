"""Generate offline, in a batch, with windowed MTP.

python examples/offline_batch.py [MODEL]    a checkpoint with an MTP head; default: a tiny one
"""

import argparse
import tempfile

from vllm import LLM, SamplingParams

from wmtp_vllm import tiny_models

PROMPTS = [
    "A river does not hurry, and yet it reaches the sea.",
    "The miller counts sacks, the ferryman counts crossings.",
    "When the frost comes the reeds turn the colour of old rope. " * 40,
]


def generate(model: str, **arguments: object) -> None:
    llm = LLM(
        model,
        speculative_config={
            "method": "windowed_mtp",
            "num_speculative_tokens": 3,  # K
            "draft_window_size": 512,  # W, the most recent tokens; default 4032
            "draft_sink_size": 64,  # S, the first tokens; default 64
        },
        disable_log_stats=False,  # for the acceptance length
        **arguments,
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=48))
    for output in outputs:
        print(f"{output.prompt[:60]!r} ({len(output.prompt_token_ids)} tokens)")
        print(f"    {output.outputs[0].text!r}")

    counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafts = counters["vllm:spec_decode_num_drafts"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    print(f"acceptance length: {1 + accepted / drafts:.2f} tokens a step")


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate offline with windowed MTP.")
    parser.add_argument("model", nargs="?", help="path or hub name; default: a tiny model")
    model = parser.parse_args().model
    if model:
        return generate(model)
    with tempfile.TemporaryDirectory() as folder:
        path = str(tiny_models.build("dense", f"{folder}/dense"))
        generate(
            path,
            enforce_eager=True,
            max_model_len=8192,
            max_num_seqs=8,  # the ring pool is sized by it
            kv_cache_memory_bytes=256 << 20,
        )


# vLLM may start its engine in a process that imports this file.
if __name__ == "__main__":
    main()
