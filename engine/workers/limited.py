"""`Limited`: asks one question at a time of a worker process that can be killed.

What works on a file or on what a model wrote may never come back, take all memory or end its process. So it runs in a
process of its own: a question goes in as a line of JSON, the reply comes out as one. A worker that uses up its limit is
killed, one that died is replaced, and either costs this reply and nothing else.

The limit is of processor time, and the kernel holds it (`serve.py`): a reply must not depend on who else computes. For
a worker that waits instead of computing there is a limit on the clock too, some times longer. Both begin when the
worker is ready, hence without the seconds of its imports. It ends with whoever started it: at the end of its input, or
by the kernel's limit.

Not here: what is asked and answered; the modules that serve say so.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.checkout import ROOT
from kvbench.engine.errors import RunError

PATIENCE = 6  # times as long on the clock
START_S = 120.0  # of a worker's imports: two seconds on an idle machine
PIECE = 1 << 16


class Limited:
    """One worker, started with the first question and again whenever it is gone."""

    def __init__(self, module: str, limit_s: float, paths: Sequence[Path] = ()) -> None:
        """`module` serves; it finds packages in `paths` first. A reply may take `limit_s` on a processor."""
        self.module, self.limit_s, self.paths = module, limit_s, paths
        self.process: subprocess.Popen[bytes] | None = None
        self._ends: weakref.finalize[..., Limited] | None = None

    def ask(self, question: Mapping[str, Any], limit_s: float | None = None) -> tuple[str, Any]:
        """The reply after "ok"; None after "timeout", or after "died" where the worker ended.

        One that may take longer, or less, says its own limit.
        """
        process, limit_s = self._worker(), limit_s or self.limit_s
        line = json.dumps({**question, "limit_s": limit_s}).encode()
        answer = talk(process, line + b"\n", PATIENCE * limit_s)
        if answer is None:
            in_time = process.poll() not in (None, -signal.SIGPROF)
            self.close()
            return "died" if in_time else "timeout", None
        return "ok", json.loads(answer)

    def close(self) -> None:
        """End the worker, whatever it does."""
        if self._ends is not None:
            self._ends()
        self.process = self._ends = None

    def _worker(self) -> "subprocess.Popen[bytes]":
        """The worker, ready to be asked; `RunError` where none can be started, which no question is to blame for."""
        if self.process is not None and self.process.poll() is None:
            return self.process
        for _ in range(2):  # a machine short of memory may kill the first one
            self.close()
            process = start(self.module, self.paths)
            self.process = process
            self._ends = weakref.finalize(self, end, process)
            if talk(process, b"", START_S) is not None:
                return process
        self.close()
        raise RunError(f"the worker process {self.module} does not start; try `python -m {self.module}` by hand")


def start(module: str, paths: Sequence[Path] = ()) -> "subprocess.Popen[bytes]":
    """A worker with pipes that never block us."""
    every = [*map(str, paths), ROOT, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, every)), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment, bufsize=0,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)
    return process


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a worker and collect it; its pipes too."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def talk(process: "subprocess.Popen[bytes]", question: bytes, limit_s: float) -> bytes | None:
    """Write all of `question` and read one line; None where the worker dies or the time is up before."""
    assert process.stdin is not None and process.stdout is not None
    deadline, answer = time.monotonic() + limit_s, b""
    rest = memoryview(question)
    with selectors.DefaultSelector() as pipes:
        pipes.register(process.stdout, selectors.EVENT_READ)
        if rest:
            pipes.register(process.stdin, selectors.EVENT_WRITE)
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in pipes.select(left):
                if key.fileobj is process.stdin:
                    rest = written(process.stdin, rest)
                    if not rest:
                        pipes.unregister(process.stdin)
                    continue
                piece = process.stdout.read(PIECE)
                if not piece:
                    settle(process)
                    return None
                answer += piece
                if answer.endswith(b"\n"):
                    return answer
    return None


def written(pipe: Any, rest: memoryview) -> memoryview:
    """What remains to be written; nothing, where nobody reads it any more."""
    try:
        return rest[pipe.write(rest[:PIECE]) or 0 :]
    except BrokenPipeError:
        return rest[:0]


def settle(process: "subprocess.Popen[bytes]") -> None:
    """Wait a moment for a process that closed its pipes to be gone."""
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
