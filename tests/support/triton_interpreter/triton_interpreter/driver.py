"""The driver half of the stand-in backend."""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is compiled here")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "interpreter", 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        from triton.testing import do_bench

        return do_bench
