"""`python -m kvbench.evals.submission.jail NAME SCRATCH < FILE`: the conformance kit on a stranger's method.

It runs where it can reach nothing: no network, no file that it may write but an empty folder's, no other process,
little memory and time.

Linux gives that to everybody: name spaces of a user, a network without devices, mounts that are read-only. Where a
machine does not allow them nothing is run. What the method tries to reach is named: Python tells of it before it fails.

The first line of the input is a word that stands in the output once the kit has ended, which a method that ends the
process does not know.

exit code: that of the kit; 3 the method reached for what it must not, 4 this machine has no such name spaces

Not here: what a method must hold (`tests/conformance.py`).
"""

import ctypes
import importlib
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

CPU_S = 240
MEMORY_BYTES = 12 << 30  # of addresses; torch reserves some of them
FILE_BYTES = 16 << 20
SCRATCH = "size=64m"
LARGEST = 1 << 20  # of the method's file
# sched.h, sys/mount.h, linux/mount.h
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RECURSIVE_PRIVATE, READ_ONLY, RECURSIVE, HERE, MOUNT_SETATTR = 0x44000, 1, 0x8000, -100, 442
REACHES, NO_ROOM = 3, 4
# What Python tells of before it does it, by the first word.
FORBIDDEN = {
    "socket": "the network", "subprocess": "another program", "os.system": "another program",
    "os.exec": "another program", "os.posix_spawn": "another program", "os.spawn": "another program",
    "os.fork": "another process", "os.forkpty": "another process", "pty.spawn": "another program",
    "os.kill": "another process", "urllib.Request": "the network", "http.client": "the network",
    "smtplib": "the network", "ftplib": "the network",
}  # fmt: skip


def enter(scratch: str) -> None:
    """Leave the network and all other processes behind, with `scratch` the only place to write; OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(found: int, what: str) -> None:
        if found:
            raise OSError(ctypes.get_errno(), what)

    user, group = os.getuid(), os.getgid()
    call(libc.unshare(NEW_USER | NEW_NETWORK | NEW_MOUNTS | NEW_IPC | NEW_PROCESSES), "unshare")
    for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{file}").write_text(line)
    call(libc.mount(None, b"/", None, RECURSIVE_PRIVATE, None), "mount")
    call(libc.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, struct.pack("4Q", READ_ONLY, 0, 0, 0), 32), "mount_setattr")
    call(libc.mount(b"scratch", scratch.encode(), b"tmpfs", 0, SCRATCH.encode()), "tmpfs")
    os.chdir(scratch)


def limit() -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))


def tell(words: str) -> None:
    """Write by the system's own call, as the method may have put another one in the place of Python's."""
    os.write(2, f"\njail: {words}\n".encode())


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, which nothing in the process can take away."""
    what = FORBIDDEN.get(event) or FORBIDDEN.get(event.split(".")[0])
    if what:
        tell(f"the method reaches for {what} ({event})")
        os._exit(REACHES)


def inside(name: str, word: bytes, source: bytes) -> NoReturn:
    """The first process of its own: imports the kit, then lets the method in."""
    limit()
    kit = importlib.import_module("kvbench.tests.conformance")  # which may open what it likes
    Path(name).write_bytes(source)
    sys.addaudithook(watch)
    found = kit.main([name])
    sys.stdout.flush()
    os.write(1, b"\n" + word)
    os._exit(found)


def main(name: str, scratch: str) -> int:
    word, source = sys.stdin.buffer.readline(), sys.stdin.buffer.read(LARGEST)
    try:
        enter(scratch)
    except OSError as error:
        tell(f"this machine has no name spaces for a stranger's code ({error})")
        return NO_ROOM
    child = os.fork()
    if child == 0:
        inside(name, word, source)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        tell(f"ended by {signal.Signals(os.WTERMSIG(status)).name}")
        return 1
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
