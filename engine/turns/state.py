"""Copies of what a variant knows of a sample, so that it can go back to a moment: `fork_of`.

What the trace holds is shared by all variants and never written to, so that copies share it too. All the rest is
copied: slots, windows, rings, tails, caches, counters, scores, codes, generators. Tensors that share memory share it in
the copy as well. The books are not part of it: a copy begins a ledger of its own.

A copy that stands for another request (`request_like`) shares nothing but the model and the method's plan: of the
prompt's K and V, and of all that was made of them, it has its own.

A method needs to do nothing for this as long as its state is made of tensors, numbers, containers, plain objects and
generators. One whose state lies elsewhere says `rolls_back = False`.

Not here: when a row goes back (`evals/batch/answers.py`).
"""

import copy
import random
from collections import deque
from concurrent.futures import Future
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvbench.engine.books.ledger import Ledger
from kvbench.engine.books.reached import attributes, parts_of, tensors_of
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.errors import ConfigError
from kvbench.engine.row import Row

T = TypeVar("T")
R = TypeVar("R", bound=Row)
PLAIN = (str, bytes, int, float, complex, bool, type(None), range, slice)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def fork_of(row: R) -> R:
    """A second row that goes on from here, whatever becomes of the first."""
    check_copies(row)
    with torch.inference_mode():
        return _Copier(row).copy_row()


def request_like(row: R) -> R:
    """Another request with the same prompt, whose memory is its own to the last token of the host tier."""
    check_copies(row)
    with torch.inference_mode():
        return _Copier(row, is_apart=True).copy_row()


def request_tensors(row: Row) -> list[Tensor]:
    """What `request_like` copies: a tensor for each piece of memory."""
    copier = _Copier(row, is_apart=True)
    found = tensors_of(row, {*copier.memory}, {*copier.copies})
    return [x for x in found if x.untyped_storage().nbytes()]


def check_copies(row: Row) -> None:
    """Raise `ConfigError` where a method says that it cannot be copied."""
    if not row.traits.rolls_back:
        raise ConfigError(
            f"{row.title} cannot be put back to where it was, as it says with rolls_back=False; use "
            "task.mode=dialogue with it, or another method"
        )


class _Copier:
    """Copies a graph of objects, each once, but for what the trace holds; apart, that too."""

    def __init__(self, row: Row, is_apart: bool = False) -> None:
        self.row = row
        self.copies: dict[int, Any] = {}  # by the original's id
        self.originals: list[Any] = []  # kept, so that no id is used twice
        self.memory: dict[int, Tensor | None] = {}  # bytes, by where the original's begin; None: shared
        trace = row.trace
        for part in (trace.shape, row.variant, row.params, row.plan, row.budget):
            self.share(part)
        if not is_apart:
            return self.share(trace)
        for one in (trace, trace.exact):
            for name, part in vars(one).items():
                if name not in one.of_prompt:
                    self.share(part)

    def copy_row(self) -> Any:
        store = self.row.store
        _ = store.ledger.entries  # what an accelerator owes is paid before
        synchronize([self.row.trace.device, *self.row.trace.layer_devices])  # other streams may be writing to them
        self.copies[id(store.ledger)] = Ledger()
        return self.copy(self.row)

    def share(self, thing: Any) -> None:
        """Leave what can be reached from here as it is in the copy."""
        left = [thing]
        while left:
            one = left.pop()
            if isinstance(one, PLAIN) or id(one) in self.copies:
                continue
            self.copies[id(one)] = one
            if isinstance(one, Tensor):
                self.memory[one.untyped_storage().data_ptr()] = None
            elif isinstance(one, Future):
                if one.done() and not one.cancelled() and one.exception() is None:
                    left.append(one.result())
            else:
                left += parts_of(one)

    def copy(self, thing: T) -> T:
        """The thing's copy: itself where it cannot change or is shared."""
        if isinstance(thing, PLAIN):
            return thing
        if id(thing) in self.copies:
            return self.copies[id(thing)]
        self.originals.append(thing)
        made = self.make(thing)
        self.copies[id(thing)] = made
        return made

    def make(self, thing: Any) -> Any:
        import numpy as np  # slow to import, and a refused command copies nothing

        if isinstance(thing, Tensor):
            return self.tensor(thing)
        if isinstance(thing, torch.Generator):
            return thing.clone_state()
        if isinstance(thing, Future):  # of a thread that works for this row alone
            made = Future[Any]()
            made.set_result(self.copy(thing.result()))
            return made
        if isinstance(thing, np.ndarray | np.random.Generator | random.Random):
            return copy.deepcopy(thing)
        if isinstance(thing, CONTAINERS):
            return self.container(thing)
        if isinstance(thing, MethodType):
            return MethodType(thing.__func__, self.copy(thing.__self__))
        if isinstance(thing, partial):
            given = {key: self.copy(value) for key, value in thing.keywords.items()}
            return partial(thing.func, *(self.copy(value) for value in thing.args), **given)
        names = attributes(thing)
        return self.object(thing, names) if names else thing  # functions, classes, threads, streams

    def container(self, thing: Any) -> Any:
        if isinstance(thing, dict):
            made = copy.copy(thing)
            self.copies[id(thing)] = made
            for key, value in thing.items():
                made[key] = self.copy(value)
            return made
        if isinstance(thing, tuple | frozenset):
            parts = [self.copy(part) for part in thing]
            if all(one is other for one, other in zip(parts, thing, strict=True)):
                return thing
            return tuple.__new__(type(thing), parts) if isinstance(thing, tuple) else type(thing)(parts)
        made = copy.copy(thing)
        self.copies[id(thing)] = made
        parts = [self.copy(part) for part in thing]
        made.clear()
        (made.update if isinstance(made, set) else made.extend)(parts)
        return made

    def object(self, thing: Any, names: list[str]) -> Any:
        made = object.__new__(type(thing))
        self.copies[id(thing)] = made
        for name in names:
            object.__setattr__(made, name, self.copy(getattr(thing, name)))
        return made

    def tensor(self, x: Tensor) -> Tensor:
        """This view of copied memory."""
        if x.layout != torch.strided or x.numel() == 0:
            return x.clone()
        where = x.untyped_storage()
        if where.data_ptr() not in self.memory:
            flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(where)
            made = torch.empty(flat.shape, dtype=torch.uint8, device=x.device, pin_memory=x.is_pinned())
            self.memory[where.data_ptr()] = made.copy_(flat)
            self.originals.append(x)
        flat = self.memory[where.data_ptr()]
        if flat is None:
            return x
        made = torch.empty(0, dtype=x.dtype, device=x.device)
        return made.set_(flat.untyped_storage(), x.storage_offset(), x.shape, x.stride())
