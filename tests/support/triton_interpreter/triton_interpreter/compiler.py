"""The compiler half of the stand-in backend: it takes the target, and compiles nothing."""

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this stand-in backend cannot compile: set TRITON_INTERPRET=1")

    hash = parse_options = add_stages = load_dialects = get_module_map = _refuse
