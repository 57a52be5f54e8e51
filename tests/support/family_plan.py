"""A head that no test runs: its ring's spec, plan and metadata, from vLLM's real class without storage.

Run by `wmtp_vllm.child`, in a process of its own for each head.
"""

import random
from dataclasses import asdict
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from wmtp_vllm import child, proposers, seams
from wmtp_vllm.kv_manager.planning import ALIGNMENT, pool_bytes
from wmtp_vllm.kv_manager.spec import RingSpec
from wmtp_vllm.planner import dissection, families

WINDOW, SINK, K = 1024, 64, 1
MEMORY = 1 << 40


def examine(values: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a head's plan, and what its metadata keeps of requests; asserts what must agree."""
    seams.apply()
    question = families.question(families.Target(**values))
    config, refusal, _, _, names = dissection._built(question)
    assert not refusal, refusal
    proposers.equip_layers(config, names)
    specs = seams.original("get_kv_cache_spec")(config)
    plan, problem = dissection._plan(config, specs, MEMORY)
    assert plan is not None, problem

    [group] = [g for g in plan.kv_cache_groups if isinstance(g.kv_cache_spec, RingSpec)]
    spec = group.kv_cache_spec
    assert sorted(group.layer_names) == sorted(names)
    assert not any(set(names) & set(g.layer_names) for g in plan.kv_cache_groups if g is not group)
    own = [tensor for tensor in plan.kv_cache_tensors if set(tensor.layers) & set(names)]
    others = [tensor for tensor in plan.kv_cache_tensors if tensor not in own]
    ring_bytes = pool_bytes(spec, len(names))
    assert all(tensor.offset >= ring_bytes for tensor in others), "the ring lies in front"
    size = max(tensor.size for tensor in plan.kv_cache_tensors)
    assert size <= MEMORY
    assert size - ring_bytes - ALIGNMENT <= plan.num_blocks * sum(
        s.page_size_bytes for n, s in specs.items() if n not in names
    )
    return {
        "spec": {k: v for k, v in asdict(spec).items() if isinstance(v, int)},
        "layers": len(names),
        "ring_bytes": ring_bytes,
        "kept": _kept(config, names[0], spec),
    }


def _kept(config: Any, name: str, spec: RingSpec) -> list[tuple[int, int, int]]:
    """(length, queries, kept tokens) of random requests, by the metadata of the layer's own backend."""
    layer = config.compilation_config.static_forward_context[name]
    builder = layer.attn_backend.get_builder_cls()(spec, [name], config, torch.device("cpu"))
    rng, found = random.Random(0), []
    columns = config.model_config.max_model_len // spec.block_size
    for query in (1, K + 1, 300):
        length = rng.randrange(2048, config.model_config.max_model_len)
        table = torch.arange(1, columns + 1, dtype=torch.int32)[None]
        starts = torch.tensor([0, query], dtype=torch.int32)
        seq_lens = torch.tensor([length], dtype=torch.int32)
        batch = CommonAttentionMetadata(
            starts, starts, seq_lens, 1, query, query, length, table, torch.arange(query)
        )
        batch.seq_lens_cpu_upper_bound = seq_lens
        built = builder.build(0, batch)
        # MLA has the lengths of steps in a part of their own, those of chunks in several.
        built = getattr(built, "decode", built)
        if built is not None:
            found.append((length, query, int(built.seq_lens[0])))
    return found


if __name__ == "__main__":
    child.answer(examine)
