"""Four gaps of Triton's interpreter, which vLLM's and xFormers' kernels meet.

Done only with TRITON_INTERPRET=1.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any


def apply() -> None:
    """Mend the interpreter, once a process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.runtime.interpreter as interpreter

    if getattr(interpreter, "_wmtp_mended", False):
        return
    interpreter._wmtp_mended = True
    _make_range_yield_tensors(interpreter)
    _make_comparisons_boolean(interpreter)
    _multiply_bfloat16_by_value(interpreter)
    _patch_language_once(interpreter)


def _make_range_yield_tensors(interpreter: Any) -> None:
    """`tl.range` yields Python ints in the interpreter, but kernels call tensor methods on them."""
    patch_core = interpreter._patch_lang_core

    def patch_core_and_range(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        int_range = lang.range

        def tensor_range(*args: Any, **kwargs: Any) -> Iterator[Any]:
            return map(interpreter._implicit_cvt, int_range(*args, **kwargs))

        scope.set_attr(lang, "range", tensor_range)

    interpreter._patch_lang_core = patch_core_and_range


def _make_comparisons_boolean(interpreter: Any) -> None:
    """A comparison keeps its operands' type in the interpreter, and `tl.store` refuses such a mask."""
    import triton.language as tl

    binary_op = interpreter.InterpreterBuilder.binary_op

    def binary_op_with_boolean_type(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        result = binary_op(self, lhs, rhs, op)
        if result.data.dtype == bool:
            result.dtype = tl.int1
        return result

    interpreter.InterpreterBuilder.binary_op = binary_op_with_boolean_type


def _multiply_bfloat16_by_value(interpreter: Any) -> None:
    """`tl.dot` multiplies the bit patterns of bfloat16, which the interpreter keeps as integers."""
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def as_float32(self: Any, operand: Any) -> Any:
        is_bfloat16 = operand.dtype.scalar == tl.bfloat16
        return self.cast_impl(operand, tl.float32) if is_bfloat16 else operand

    def create_dot_by_value(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return create_dot(self, as_float32(self, a), as_float32(self, b), *args)

    builder.create_dot = create_dot_by_value


def _patch_language_once(interpreter: Any) -> None:
    """Speed: `triton.language` is patched and restored at every launch and device call, which costs
    more than the kernels; here every kernel of the process is interpreted, so once is enough."""
    import triton.language as tl

    patch_language = interpreter._patch_lang
    patched: dict[frozenset[int], Any] = {}

    class KeepPatched:
        def restore(self) -> None:
            pass

    def patch_language_once(function: Any) -> KeepPatched:
        used = frozenset(
            id(value)
            for value in function.__globals__.values()
            if inspect.ismodule(value) and value in (tl, tl.core)
        )
        if used not in patched:
            patched[used] = patch_language(function)
        return KeepPatched()

    interpreter._patch_lang = patch_language_once
