"""The compact table's kernel, compiled ahead of time for GPUs that are not here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

INTERPRETER = Path(__file__).parents[1] / "support" / "triton_interpreter"
TARGETS = ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"]


def compile_for(name: str) -> dict[str, int]:
    """Registers and spilled bytes of the kernel on one GPU; runs where vLLM finds Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from wmtp_vllm.attention_backends import compact_table

    kernel = compact_table._compact_table_kernel
    constants = {"BLOCK_SIZE": 16, "CHUNK": 256}
    tensors = {"block_table", "seq_lens", "query_start_loc", "out_table", "out_lens"}
    signature = {
        argument: "constexpr" if argument in constants else "*i32" if argument in tensors else "i32"
        for argument in kernel.arg_names
    }
    target = GPUTarget("hip", name, 64) if name[0] == "g" else GPUTarget("cuda", int(name[3:]), 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=target)
    if target.backend == "hip":
        found = dict(re.findall(r"\.(\w+_count):\s*(\d+)", compiled.asm["amdgcn"]))
        spilled = int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"])
        return {"registers": int(found["vgpr_count"]), "spilled": spilled}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = Path(os.environ["CUBIN"])
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    found = dict(re.findall(r"(REG|LOCAL|STACK):(\d+)", usage))
    return {"registers": int(found["REG"]), "spilled": int(found["LOCAL"]) + int(found["STACK"])}


@pytest.fixture(scope="module")
def usage(tmp_path_factory):
    """Every target's, from one process in which vLLM finds Triton: here it finds none."""
    script = (
        "import json, tests.unit.test_kernel_compiles as t; "
        "print(json.dumps({name: t.compile_for(name) for name in t.TARGETS}))"
    )
    folder = tmp_path_factory.mktemp("kernel")
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ
        | {
            "PYTHONPATH": str(INTERPRETER),
            "TRITON_CACHE_DIR": str(folder / "cache"),
            "CUBIN": str(folder / "cubin"),
        },
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_without_spills(usage, target):
    print(f"{target}: {usage[target]}", end=" ")
    assert 0 < usage[target]["registers"] <= 64
    assert usage[target]["spilled"] == 0
