"""What a GPU can do at best, by its maker's data sheet."""

from dataclasses import dataclass

RESERVE = 6 << 30
"""Bytes of a GPU for activations and CUDA graphs, unless told otherwise."""


@dataclass(frozen=True)
class GPU:
    """Peak rates of one GPU.

    Args:
        name: as people say it.
        memory: bytes, as the driver reports them.
        bandwidth: bytes of memory read a second.
        flops: dense bfloat16 matrix operations a second.
        exponentials: exp() a second; attention needs one for each query and key.

    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    exponentials: float


def _gpu(
    name: str, gib: float, terabytes: float, teraflops: float, units: int, gigahertz: float
) -> GPU:
    # 16 exponentials a clock for each multiprocessor, from Volta to Blackwell (CUDA C++ programming
    # guide, "Arithmetic Instructions"); a compute unit of CDNA 3 has as many (quarter rate of 64).
    exponentials = 16 * units * gigahertz * 1e9
    return GPU(name, gib * 2**30, terabytes * 1e12, teraflops * 1e12, exponentials)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-80GB", 79, 2.039, 312, 108, 1.41),
        _gpu("L40S", 44, 0.864, 362, 142, 2.52),
        _gpu("H100-SXM", 79, 3.35, 989, 132, 1.83),
        _gpu("H20", 95, 4.0, 148, 78, 1.83),
        _gpu("H200", 139, 4.8, 989, 132, 1.83),
        _gpu("B200", 178, 8.0, 2250, 148, 1.85),
        _gpu("RTX-PRO-6000", 95, 1.792, 503, 188, 2.6),
        _gpu("MI300X", 191, 5.3, 1307, 304, 2.1),
    )
}
