"""The lock of a run's folder: one process at a time, and a name for whoever waits.

Not here: whose the folder is (`results/files.py`).
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import parse_json
from kvbench.results.files import HOLDER, LOCK


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder's lock; null where it has not written its name yet."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return "another process" if self.pid is None else f"process {self.pid} on {self.host}"


def acquire(path: Path, wait: bool, on_wait: Callable[[Holder], None] | None) -> FileLock:
    """Hold the folder's lock. The kernel releases it when a process dies, however it dies."""
    lock = FileLock(path / LOCK, thread_local=False, poll_interval=0.2)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = holder_of(path)
        if holder == Holder(os.getpid(), socket.gethostname()):
            raise ConfigError(
                f"{path} is in use twice by this command; give each of its runs another out=DIR"
            ) from None
        if not wait:
            raise ConfigError(f"{path} is in use by {holder}; wait for it to end or choose another out=DIR") from None
        if on_wait is not None:
            on_wait(holder)
        lock.acquire()
    return lock


def holder_of(path: Path) -> Holder:
    """Who holds the lock, asked only while it is held: a killed process leaves its name behind."""
    try:
        data = parse_json((path / HOLDER).read_bytes(), is_ours=True)
        return Holder(int(data["pid"]), str(data["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(None, None)  # it has the lock and has not written its name yet
