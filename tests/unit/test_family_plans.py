"""Heads that no test runs: what vLLM's real classes make of them is planned and read as it should be."""

import pytest

from tests.support.family_plan import SINK, WINDOW, K
from wmtp_vllm.planner import families
from wmtp_vllm.window import Window

pytestmark = pytest.mark.unit

HEADS = {
    "ExaoneMoeMTP": "a sliding window of its own",
    "HYV3MTPModel": "a mixture of experts",
    "LongCatFlashMTPModel": "MLA",
    "NemotronHMTPModel": "a hybrid with Mamba2, and no positions",
    "Qwen3_5MTP": "a hybrid with a gated delta net",
}


@pytest.mark.parametrize("head", HEADS)
def test_spec_plan_and_metadata_of_a_head_that_is_not_run(head):
    found = families.examined("tests.support.family_plan", families.TARGETS[head])
    spec = found["spec"]
    window = Window(spec["window"], spec["sink"], spec["block_size"])
    is_sliding = (window.size, window.sink) != (WINDOW, SINK)
    assert not is_sliding or (window.size <= WINDOW and window.sink == 0), "the smaller window"
    assert spec["pool_blocks"] > window.ring_budget(K, 8192)
    page = found["ring_bytes"] // found["layers"] // spec["pool_blocks"]
    assert page * spec["pool_blocks"] * found["layers"] == found["ring_bytes"]
    assert page % (spec["block_size"] * spec["num_kv_heads"] * spec["head_size"]) == 0
    assert found["kept"]
    for length, query, kept in found["kept"]:
        assert kept == window.num_kept(length, query) < length
