"""The C++ of the ops: compiled to shared libraries without torch's headers, loaded with ctypes.

A library per file of `kernels/native/`, per level of the processor and per hash of sources and flags, in the user's
cache folder. Its name can be foretold and it is code, so one is loaded only if this user owns it and nobody else can
write to it, in a folder that nobody else can enter; any other is compiled anew. Set-up compiles them
(`python -m kvbench.kernels.build`); what is missing later is compiled when it is first asked for, in seconds. Which
level is loaded is decided at run time, by torch's own reading of the processor.

Functions have C names, take raw pointers and sizes, and write only to memory that their caller allocated. Without a
compiler, and with `kernels=torch` or KVBENCH_KERNELS=torch, there is no library and every op takes its torch path; with
KVBENCH_KERNELS=native a library that is missing is an error.

Not here: what the functions compute (`kernels/native/*.cpp`), how they are called (the op's own file).
"""

import ctypes
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from filelock import FileLock

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

logger = logging.getLogger(__name__)
T = TypeVar("T")

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-Wno-psabi")
LEVELS = {  # what torch calls a processor, and what it can do
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "DEFAULT": (),
}
MAKING = ".making-"  # before the name of a folder that a compiler works in
PATIENCE_S = 600  # with a compiler; ours take seconds
MODES = ("auto", "torch")  # of the key `kernels`
CHOSEN = {"kernels": "auto"}  # of this process
REMEMBERED: list[Callable[[], None]] = []  # what forgets which libraries there are


def choose(kernels: str) -> None:
    """From now on ops take their torch paths, or whatever is fast here."""
    if kernels != CHOSEN["kernels"]:
        CHOSEN["kernels"] = kernels
        for forget in REMEMBERED:
            forget()


def remembered(make: Callable[[], T]) -> "_lru_cache_wrapper[T]":
    """`functools.cache`, until something else is chosen."""
    held = cache(make)
    REMEMBERED.append(held.cache_clear)
    return held


def wanted() -> str:
    """Which kernels were asked for: torch, native, or whatever is fast here (auto)."""
    given = os.environ.get("KVBENCH_KERNELS", "")
    if given not in ("", "torch", "native"):
        raise ValueError(f"KVBENCH_KERNELS={given} is unknown; use torch or native, or unset it")
    return "torch" if CHOSEN["kernels"] == "torch" else given or "auto"


@remembered
def is_plain() -> bool:
    """Whether every op is to take its torch path."""
    return wanted() == "torch"


@cache
def dtypes() -> dict[torch.dtype, int]:
    """Types that kernels read, as simd.h counts them."""
    return {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@cache
def library(name: str) -> ctypes.CDLL | None:
    """The functions of `kernels/native/<name>.cpp`, compiled if need be; None: take the torch path."""
    asked = wanted()
    if asked == "torch":
        return None
    try:
        return load(name, level())
    except (OSError, RuntimeError) as error:
        if asked == "native":
            raise
        logger.warning("kernels/native/%s.cpp is not used, torch does its work: %s", name, error)
        return None


REMEMBERED.append(library.cache_clear)


def level() -> str:
    """The instructions to compile for; torch's variable ATEN_CPU_CAPABILITY lowers it."""
    found = torch.backends.cpu.get_cpu_capability()
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return found if is_x86 and found in LEVELS else "DEFAULT"


def load(name: str, at: str) -> ctypes.CDLL:
    """One library at one level, from the cache folder or a compiler; OSError or RuntimeError where neither has it.

    What is loaded is the file that was checked, even if another is put in its place meanwhile, because it is held open.
    It stays so: the loader takes two paths that are spelt alike for the same library.
    """
    path = library_path(name, at)
    folder = own_folder(path.parent)
    try:
        file = open_trusted(folder, path.name)
        if file is None:
            file = build(name, at, folder, path)
        return ctypes.CDLL(str(opened(file, "", path)))
    finally:
        os.close(folder)


def build(name: str, at: str, folder: int, path: Path) -> int:
    """A descriptor of the library, compiled unless another process does so first, for whom this one waits."""
    with FileLock(opened(folder, ".lock", path.parent), mode=0o600):  # released when a process dies
        file = open_trusted(folder, path.name)
        if file is not None:
            return file
        # Only who holds the lock makes such folders, so these are of killed compilers.
        for rest in [name for name in os.listdir(folder) if name.startswith(MAKING)]:
            shutil.rmtree(rest, dir_fd=folder)
        compile_library(name, at, folder, path)
        file = open_trusted(folder, path.name)
        if file is None:
            raise OSError(f"{path} does not become ours alone on this disk; set XDG_CACHE_HOME")
        return file


def library_path(name: str, at: str) -> Path:
    """Where the library lies, in a folder per user; its name changes with everything that it is made of."""
    made_of = sha256(" ".join((platform.machine(), *FLAGS, *LEVELS[at])).encode())
    for file in (SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))):
        made_of.update(file.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "kvbench" / f"kernels-{os.geteuid()}"
    return folder / f"{name}-{at.lower()}-{made_of.hexdigest()[:16]}.so"


def own_folder(path: Path) -> int:
    """A descriptor of the folder, made if need be, that we own and nobody else can enter; OSError where it is not ours.

    Folders above it may belong to others: they can put another folder here, but none that we own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        raise OSError(f"{path} is a link or a file instead of a folder; remove it") from None
    facts = os.fstat(folder)
    if facts.st_uid != os.geteuid():
        os.close(folder)
        raise OSError(f"{path} belongs to another user, whose code is not run; set XDG_CACHE_HOME")
    if facts.st_mode & 0o077:
        os.fchmod(folder, 0o700)
    return folder


def open_trusted(folder: int, name: str) -> int | None:
    """A descriptor of a library that we wrote and nobody else can; None where there is none."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:  # none, or a link
        return None
    facts = os.fstat(file)
    is_ours = facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
    if is_ours and stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
        return file
    os.close(file)
    logger.warning("%s in the cache of kernels is not ours alone and is compiled anew", name)
    return None


def opened(descriptor: int, below: str, path: Path) -> Path:
    """A path that leads to what is open, whatever stands at `path` by now."""
    root = Path(f"/proc/self/fd/{descriptor}")
    return (root if root.exists() else path) / below


def compile_library(name: str, at: str, folder: int, path: Path) -> None:
    """Compile in a folder of its own inside `folder`, which is `path`'s and locked, and rename.

    OpenMP is compiled in but not linked: its functions are those of the runtime that torch has loaded, so that both
    use one team of threads. A second team would spin for the cores that the first one works on.
    """
    compiler = find_compiler()
    work = f"{MAKING}{path.stem}"
    os.mkdir(work, 0o700, dir_fd=folder)
    try:
        where = opened(folder, work, path.parent)
        for extra in (("-fopenmp",), ()):  # where torch has another runtime, one thread
            source = str(SOURCES / f"{name}.cpp")
            done = run([*compiler, *FLAGS, *LEVELS[at], *extra, "-c", source, "-o", "made.o"], where)
            if done.returncode == 0:
                done = run([*compiler, "-shared", "made.o", "-o", path.name], where)
            if done.returncode:
                continue
            try:
                ctypes.CDLL(str(where / path.name))
            except OSError as error:
                done.stderr = str(error)
                continue
            (where / path.name).chmod(0o700)  # whatever the umask
            (where / path.name).replace(where.parent / path.name)
            return
    finally:
        shutil.rmtree(work, dir_fd=folder, ignore_errors=True)
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    raise RuntimeError(f"{compiler[0]} failed: {next((x for x in lines if 'error' in x), lines[-1])}")


def run(command: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not end within {PATIENCE_S} seconds") from None


def find_compiler() -> list[str]:
    """The C++ compiler's command: CXX, or the first of the usual names."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise RuntimeError("no C++ compiler (c++, g++, clang++, or what CXX names)")
    return [found]


def main() -> None:
    """Compile every file for this machine."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    for file in sorted(SOURCES.glob("*.cpp")):
        if library(file.stem) is not None:
            logger.info("%s", library_path(file.stem, level()))


if __name__ == "__main__":
    main()
