"""What can be reached from an object: its parts, theirs, and the tensors among them.

Not here: what becomes of it (`engine/books/audit.py`, `engine/turns/state.py`).
"""

from collections import deque
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor


def parts_of(thing: Any) -> list[Any]:
    """The parts of an object or a container."""
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | deque | Set):
        return [*thing]
    return [getattr(thing, name) for name in attributes(thing)]


def attributes(thing: Any) -> list[str]:
    """The names of an object's own attributes; none of what is no plain object."""
    if isinstance(thing, type) or type(thing).__module__.split(".")[0] in FOREIGN:
        return []
    names = list(getattr(thing, "__dict__", ()))
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if hasattr(thing, name)]


# Their objects are handles and immutable values: to functions, threads, streams, fractions, paths.
FOREIGN = {"builtins", "torch", "threading", "concurrent", "fractions", "pathlib", "functools", "types", "_thread"}


def tensors_of(thing: Any, known: set[int], skipped: set[int]) -> list[Tensor]:
    """Tensors that can be reached from here, each memory once, but none that is known or lies in what is `skipped`."""
    found, left, seen = list[Tensor](), parts_of(thing), set(skipped)
    while left:
        one = left.pop()
        if id(one) in seen or one is None or isinstance(one, str | bytes | int | float | complex | range | slice):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            where = one.untyped_storage().data_ptr()
            if where not in known:
                known.add(where)
                found.append(one)
        elif hasattr(one, "result") and hasattr(one, "done"):
            left += [one.result()] if one.done() else []
        elif isinstance(one, dict | list | tuple | set | frozenset) or type(one).__module__ not in FOREIGN:
            left += parts_of(one)
    return found
