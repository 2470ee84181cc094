"""What a stretch of code asked of a device, with the line of the project that asked.

Not here: what counts as what (`benchmarks/pretend/tensors.py`, `benchmarks/pretend/cuda.py`).
"""

import sys
from collections import Counter
from pathlib import Path
from threading import Lock, get_ident
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
HERE = f"{Path(__file__).parent}/"
WAITS = (  # the CPU does not go on before the device has
    "copy to the host",
    "copy from pageable memory",
    "value read",
    "shape from values",
    "synchronize",
)
OTHERS = ("launch", "copy to pinned memory", "copy from pinned memory", "event", "pinned allocation", "graph")


class Counts:
    """How often each kind of request was made, and where."""

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()
        self.by_line: Counter[tuple[str, str]] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.thread = get_ident()
        self.lock = Lock()

    def note(self, kind: str, nbytes: int = 0, n: int = 1) -> None:
        """A request; one that waits counts only in the thread that opened the counts, others are free to wait."""
        assert kind in WAITS or kind in OTHERS, kind
        if kind in WAITS and get_ident() != self.thread:
            return
        with self.lock:
            self.by_kind[kind] += n
            self.nbytes[kind] += nbytes
            self.by_line[kind, line_of(sys._getframe(1))] += n

    @property
    def launches(self) -> int:
        """Kernels that were launched: one per Triton kernel and graph, two for flash attention, an operator's own."""
        return self.by_kind["launch"]

    @property
    def waits(self) -> int:
        """How often the thread stood still until the device had done its work."""
        return sum(self.by_kind[kind] for kind in WAITS)

    def lines(self, what: str) -> list[tuple[str, int]]:
        """Lines of the project that caused a kind of request ("wait": any that waits), most frequent first."""
        kinds = WAITS if what == "wait" else (what,)
        found: Counter[str] = Counter()
        for (kind, line), n in self.by_line.items():
            if kind in kinds:
                found[f"{line} ({kind})"] += n
        return found.most_common()


def line_of(frame: FrameType | None) -> str:
    """The innermost line of the project that is running, `file:line`."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{ROOT}/") and not name.startswith((HERE, f"{ROOT}/.venv/")):
            return f"{name[len(str(ROOT)) + 1 :].removeprefix('kvbench/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
