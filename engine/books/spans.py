"""Where the time of a pass goes: named stretches, noted only while somebody records.

    with recording() as record:
        prefill(…)
    record.seconds()

A span costs a look-up while nobody records. Inside each other they nest, and a name's seconds are without those of the
spans inside, so that the names of a pass add up to it. On a GPU the marks are events, read once at the end, and nothing
waits. Threads are told apart; one that works for a recorded pass starts with `following()`. Its spans are marked on the
stream that it is in, and where it is in none of its own, by the CPU's clock: it works there, and the GPU's queue is the
other thread's.

Not here: what the names mean (`docs/cost.md`), tables and figures of them.
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any, TypeVar

import torch

from kvbench.engine.books.stopwatch import between, now

T = TypeVar("T")


@dataclass(frozen=True)
class Stretch:
    """One span as it was: seconds since the recording began, and who was inside whom by depth."""

    name: str
    layer: int | None
    start: float
    stop: float
    depth: int
    thread: int


class Record:
    """Spans that were noted, in the order in which they ended."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.thread = get_ident()
        self.marks: list[tuple[str, int | None, Any, Any, int, int]] = []
        self.depths: dict[int, int] = {}
        # The same moment by both clocks: nothing is asked of the GPU yet.
        self.began, self.began_on_cpu = now(self.device), perf_counter()

    def now(self) -> Any:
        """A moment on the clock of what works here: the GPU's stream, or the CPU."""
        device = self.device
        if device.type == "cuda" and get_ident() != self.thread:
            is_own = torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
            return now(device if is_own else torch.device("cpu"))
        return now(device)

    def stretches(self) -> list[Stretch]:
        """All spans by their start; waits for the GPU, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = [
            Stretch(name, layer, self.since(start), self.since(stop), depth, thread)
            for name, layer, start, stop, depth, thread in self.marks
        ]
        return sorted(found, key=lambda span: (span.start, span.depth))

    def since(self, moment: Any) -> float:
        """Seconds from the beginning to a moment on either clock."""
        return moment - self.began_on_cpu if isinstance(moment, float) else between(self.began, moment)

    def seconds(self, root: str | None = None) -> dict[str, float]:
        """Seconds per name without the spans inside, of the thread that recorded, largest first.

        With `root`, only of outermost spans of that name and what is inside them.
        """
        mine, totals, open_spans = get_ident(), {}, []
        for span in self.stretches():
            if span.thread != mine:
                continue
            del open_spans[span.depth :]
            if root is not None and (open_spans or [span.name])[0] != root:
                continue
            length = span.stop - span.start
            totals[span.name] = totals.get(span.name, 0.0) + length
            if open_spans:
                totals[open_spans[-1]] -= length
            open_spans.append(span.name)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def write_chrome_trace(self, path: Path) -> None:
        """Write the spans as Chrome's and Perfetto's viewers read them: microseconds, a lane per thread."""
        threads = {get_ident(): 0}
        events: list[dict[str, Any]] = []
        for span in self.stretches():
            lane = threads.setdefault(span.thread, len(threads))
            events.append(
                {
                    "name": span.name,
                    "cat": "kvbench",
                    "ph": "X",
                    "ts": span.start * 1e6,
                    "dur": (span.stop - span.start) * 1e6,
                    "pid": 0,
                    "tid": lane,
                    "args": {} if span.layer is None else {"layer": span.layer},
                }
            )
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane,
             "args": {"name": "model" if lane == 0 else f"worker {lane}"}}
            for lane in threads.values()
        ]  # fmt: skip
        path.write_text(json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}))


_record: contextvars.ContextVar[Record | None] = contextvars.ContextVar("record", default=None)


def is_recording() -> bool:
    return _record.get() is not None


@contextmanager
def recording(device: torch.device | None = None) -> Iterator[Record]:
    """Inside, spans are noted."""
    token = _record.set(Record(device))
    try:
        record = _record.get()
        assert record is not None
        yield record
    finally:
        _record.reset(token)


def following(work: Callable[[], T]) -> Callable[[], T]:
    """`work` for another thread, noted by whoever records here and now."""
    here = contextvars.copy_context()
    return lambda: here.run(work)


class span:
    """`with span("attention", layer):` notes how long the block takes, if somebody records."""

    __slots__ = ("layer", "name", "record", "start")

    def __init__(self, name: str, layer: int | None = None) -> None:
        self.name, self.layer = name, layer

    def __enter__(self) -> None:
        self.record = _record.get()
        if self.record is not None:
            thread = get_ident()
            self.record.depths[thread] = self.record.depths.get(thread, 0) + 1
            self.start = self.record.now()

    def __exit__(self, *_: object) -> None:
        record = self.record
        if record is not None:
            stop, thread = record.now(), get_ident()
            record.depths[thread] -= 1
            record.marks.append((self.name, self.layer, self.start, stop, record.depths[thread], thread))


class stretches:  # as `span`
    """`with stretches(layer) as begin: begin("append"); …; begin("attention")`: spans that follow each other."""

    __slots__ = ("layer", "open", "record")

    def __init__(self, layer: int) -> None:
        self.layer, self.open, self.record = layer, None, _record.get()

    def __enter__(self) -> Callable[[str], None]:
        return self.begin

    def begin(self, name: str) -> None:
        if self.record is not None:
            self.__exit__()
            self.open = span(name, self.layer)
            self.open.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.open is not None:
            self.open.__exit__()
