"""Python processes that find torch and transformers imported: each is a fork of one that did nothing else.

They are processes as `subprocess` makes them, but for two seconds of imports: with their own environment and folder,
they can be killed, and nothing of the tests' own process is in them. Each test process starts what they are forked from
once, with the first of them.

Not here: processes of tests on what a start imports, or on what is read while it does (such as HF_HUB_OFFLINE and
TRITON_INTERPRET), which `subprocess` starts.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from kvbench.checkout import ROOT

IMPORTED = ["torch", "transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto"]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(IMPORTED)


def begin(words: Sequence[str], cwd: str, environment: Mapping[str, str], files: Sequence[Any]) -> None:
    """In the new process: what `python` does with its words."""
    for n, file in enumerate(files):
        os.dup2(file.detach(), n)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvbench"]:
        del sys.modules[name]  # another folder may have its own
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0)
    kind, *rest = words
    is_file = kind not in ("-c", "-m")
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [str(Path(kind).resolve().parent) if is_file else "" if kind == "-c" else cwd, *paths]
    sys.argv = [*words] if is_file else [kind, *rest[1:]]
    try:
        if kind == "-c":
            main: dict[str, Any] = {"__name__": "__main__"}
            exec(rest[0], main)
        elif kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


class Started:
    """`python WORDS` as a process, with what tests use of `subprocess.Popen`; its errors are printed with the rest."""

    def __init__(
        self, words: Sequence[str], cwd: Path | str = ROOT, env: Mapping[str, str] | None = None,
        files: Sequence[IO[bytes]] = (), silent: bool = False,
    ) -> None:  # fmt: skip
        """It reads and writes `files`, three, or pipes where there are none."""
        (to_read, to_write), (said, to_say) = os.pipe(), os.pipe()
        self.stdin, self.stdout = (os.fdopen(*end, buffering=0) for end in ((to_write, "wb"), (said, "rb")))
        nothing = Path(os.devnull).open("wb")
        with os.fdopen(to_read, "rb") as asked, os.fdopen(to_say, "wb") as answered, nothing:
            fds = [file.fileno() for file in files or (asked, answered, nothing if silent else answered)]
            environment = dict(os.environ if env is None else env)
            self.process = CONTEXT.Process(target=begin, args=([*words], str(cwd), environment, [*map(DupFd, fds)]))
            self.process.start()

    def __del__(self) -> None:
        self.stdin.close()
        self.stdout.close()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def python(
    *words: str, cwd: Path | str = ROOT, env: Mapping[str, str] | None = None, given: bytes = b""
) -> "subprocess.CompletedProcess[bytes]":
    """`python WORDS` with what it printed, when it is over."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        code = Started(words, cwd, env, (stdin, stdout, stderr)).wait()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess([*words], code, stdout.read(), stderr.read())


def worker(module: str, paths: Sequence[Path] = ()) -> Started:
    """A worker as `limited.start` makes one."""
    every = [*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = Started(
        ["-m", module], env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, every))}, silent=True
    )
    for pipe in (process.stdin, process.stdout):
        os.set_blocking(pipe.fileno(), False)
    return process
