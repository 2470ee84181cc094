"""Triton's interpreter, made quicker for tests: what it computes stays as it is.

Not here: which kernels run in it (`tests/kernels`, `tests/pretend`).
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any


class Lasting:
    """The end of a launch, which leaves the language as it is."""

    def restore(self) -> None:
        pass


def of_plain(look_up: Callable[[Any], Any], plain: type) -> Callable[[Any], Any]:
    """The same function, which looks a plain type up once, and not in a table that it makes anew."""
    known = cache(look_up)
    return lambda kind: known(kind) if type(kind) is plain else look_up(kind)


def quicken() -> None:
    """Let the interpreter change Triton's language once for each file of kernels, and look a type up once.

    By itself it changes the language at every launch and at every call of a device function, a sum's and a maximum's
    among them: a pass over some hundred names, which takes longer than most kernels do. Nobody in this process needs
    the language as it was.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "is_quick") or not hasattr(interpreter, "_patch_lang"):
        return
    patch, files = interpreter._patch_lang, set[int]()

    def once(fn: Any) -> Lasting:
        if id(fn.__globals__) not in files:
            patch(fn)
            files.add(id(fn.__globals__))
        return Lasting()

    interpreter._patch_lang = once
    interpreter._get_np_dtype = of_plain(interpreter._get_np_dtype, interpreter.tl.dtype)
    interpreter.is_quick = True
