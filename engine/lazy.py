"""torch, loaded when something is first done with it: a wrong command is answered before that.

A command line is checked by the classes of methods, whose files import torch as any other does. That takes seconds, so
after `wait_for_torch` a module stands in for torch, which loads it when an attribute is looked up. Classes that
annotations name have stand-ins too, as annotations are evaluated while a file is imported; once torch is there, names
bound to them are bound to its own. So a file that methods import looks nothing else up in torch at its top level: no
constant, no decorator, no default of a parameter, nothing of a module below torch.

Python's own `importlib.util.LazyLoader` would load torch at `from torch import Tensor`, and at a second `import torch`.

Not here: who waits (`evals/settings.py`), and until when at most (`evals/runner.py`).
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType
from typing import Any

LOCK = RLock()


class Named(type):
    """A class of torch, known by its name alone: whatever else is done with it is done with torch's own."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, getattr(load_torch(), cls.__name__))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return getattr(load_torch(), cls.__name__)(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(getattr(load_torch(), cls.__name__), name)


STAND_INS = {name: Named(name, (), {}) for name in ("Generator", "Size", "Tensor", "device", "dtype")}


class Waiting(ModuleType):
    """torch before it is loaded."""

    has_begun = False  # to load

    def __getattr__(self, name: str) -> Any:
        if name in STAND_INS and not self.has_begun:
            return STAND_INS[name]
        load_torch()
        return ModuleType.__getattribute__(self, name)


class Below(MetaPathFinder, Loader):
    """Finds modules below torch once torch is loaded. One that torch itself has imported is not run a second time."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("torch."):
            return None
        load_torch()
        if (module := sys.modules.pop(fullname, None)) is None:  # left there, its own spec would run it again
            return None
        return ModuleSpec(fullname, self, loader_state=(module, module.__spec__))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return spec.loader_state[0]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state[1]


def wait_for_torch() -> None:
    """From here on, `import torch` loads nothing yet; unless it is loaded."""
    if "torch" not in sys.modules and (spec := find_spec("torch")):
        waiting = Waiting("torch")
        vars(waiting).update(vars(module_from_spec(spec)))
        sys.modules["torch"] = waiting
        sys.meta_path.insert(0, Below())


def load_torch() -> ModuleType:
    """torch itself. Names that modules have bound to stand-ins are bound to its classes."""
    torch = import_module("torch")
    if not isinstance(torch, Waiting):
        return torch
    with LOCK:
        if torch.has_begun:  # by this thread, or it has ended
            return torch
        torch.has_begun = True
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Below)]
        assert torch.__spec__ is not None and torch.__spec__.loader is not None
        torch.__spec__.loader.exec_module(torch)
        object.__setattr__(torch, "__class__", ModuleType)
        for module in [*sys.modules.values()]:
            names = getattr(module, "__dict__", {})
            for name, stand_in in STAND_INS.items():
                if names.get(name) is stand_in:
                    names[name] = getattr(torch, name)
    return torch
