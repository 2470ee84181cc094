"""Which specialisations of kernels a stretch of code asks for, noted in Triton's interpreter.

Triton compiles a kernel anew for other constants and types, for a tensor that begins at no multiple of 16 bytes, and
for an integer that becomes 1 or a multiple of 16 or is so no longer, unless the kernel says that it is not to look.

Not here: compiling them (`kernels/aot.py`).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor


def key_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What of each argument Triton compiles for."""
    parameters, fixed = inspect.signature(kernel.fn).parameters, kernel.kwargs["do_not_specialize"]
    key = {name: x for name, x in kwargs.items() if name not in ("grid", "warmup")}
    for (name, parameter), x in zip(parameters.items(), args, strict=True):
        if "constexpr" in str(parameter.annotation):
            key[name] = x
        elif isinstance(x, Tensor):
            key[name] = x.dtype, x.data_ptr() % 16 == 0
        else:
            is_number = type(x) is int
            wide = is_number and not -(1 << 31) <= x < 1 << 31
            key[name] = type(x), wide, is_number and name not in fixed and (x == 1, x % 16 == 0)
    return key


class Noted(dict[str, list[dict[str, Any]]]):
    """Different keys of each kernel, in the order of their first launches."""

    def changing(self) -> dict[str, set[str]]:
        """Kernels with more than one, and the arguments that differ."""
        several = {name: keys for name, keys in self.items() if len(keys) > 1}
        return {name: {what for what in keys[0] for key in keys if key[what] != keys[0][what]}
                for name, keys in several.items()}  # fmt: skip


@contextmanager
def noting(runs: bool = True) -> Iterator[Noted]:
    """Inside, launches are noted, and run if `runs`."""
    from triton.runtime.interpreter import InterpretedFunction

    noted, run = Noted(), InterpretedFunction.run

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        key, keys = key_of(kernel, args, kwargs), noted.setdefault(kernel.fn.__name__, [])
        if key not in keys:
            keys.append(key)
        return run(kernel, *args, **kwargs) if runs else None

    with patch.object(InterpretedFunction, "run", launched):
        yield noted
