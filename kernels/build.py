"""The C++ of the ops: compiled to shared libraries without torch's headers, loaded with ctypes.

A library per file of `kernels/native/`, per level of the processor and per hash of sources and flags, in the user's
cache folder. Set-up compiles them (`python -m kernels.build`); what is missing later is compiled when it is first asked
for, in seconds. Which level is loaded is decided at run time, by torch's own reading of the processor.

Functions have C names, take raw pointers and sizes, and write only to memory that their caller allocated. Without a
compiler, and with KVBENCH_KERNELS=torch, there is no library and every op takes its torch path; with
KVBENCH_KERNELS=native a library that is missing is an error.

Not here: what the functions compute (`kernels/native/*.cpp`), how they are called (the op's own file).
"""

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-Wno-psabi")
LEVELS = {  # what torch calls a processor, and what it can do
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "DEFAULT": (),
}  # fmt: skip
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as simd.h counts them


@cache
def library(name: str) -> ctypes.CDLL | None:
    """The functions of `kernels/native/<name>.cpp`, compiled if need be; None: take the torch path."""
    wanted = os.environ.get("KVBENCH_KERNELS", "")
    if wanted not in ("", "torch", "native"):
        raise ValueError(f"KVBENCH_KERNELS={wanted} is unknown; use torch or native, or unset it")
    if wanted == "torch":
        return None
    try:
        return load(name, level())
    except (OSError, RuntimeError) as error:
        if wanted == "native":
            raise
        logger.warning("kernels/native/%s.cpp is not used, torch does its work: %s", name, error)
        return None


def level() -> str:
    """The instructions to compile for; torch's variable ATEN_CPU_CAPABILITY lowers it."""
    found = torch.backends.cpu.get_cpu_capability()
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return found if is_x86 and found in LEVELS else "DEFAULT"


def load(name: str, at: str) -> ctypes.CDLL:
    """One library at one level, from the cache folder or a compiler; OSError or RuntimeError where neither has it."""
    path = library_path(name, at)
    if not path.is_file():
        compile_library(name, at, path)
    return ctypes.CDLL(str(path))


def library_path(name: str, at: str) -> Path:
    """Where the library lies; its name changes with everything that it is made of."""
    made_of = sha256(" ".join((platform.machine(), *FLAGS, *LEVELS[at])).encode())
    for file in (SOURCES / f"{name}.cpp", *sorted(SOURCES.glob("*.h"))):
        made_of.update(file.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "kvbench" / "kernels" / f"{name}-{at.lower()}-{made_of.hexdigest()[:16]}.so"


def compile_library(name: str, at: str, path: Path) -> None:
    """Compile to a file beside `path` and rename it: processes that do so at once replace equal files by each other.

    OpenMP is compiled in but not linked: its functions are those of the runtime that torch has loaded, so that both
    use one team of threads. A second team would spin for the cores that the first one works on.
    """
    compiler = find_compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{name}-") as folder:
        made = Path(folder) / path.name
        for extra in (("-fopenmp",), ()):  # where torch has another runtime, one thread
            source = str(SOURCES / f"{name}.cpp")
            done = run([*compiler, *FLAGS, *LEVELS[at], *extra, "-c", source, "-o", f"{made}.o"])
            if done.returncode == 0:
                done = run([*compiler, "-shared", f"{made}.o", "-o", str(made)])
            if done.returncode:
                continue
            try:
                ctypes.CDLL(str(made))
            except OSError as error:
                done.stderr = str(error)
                continue
            made.replace(path)
            return
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    raise RuntimeError(f"{compiler[0]} failed: {next((x for x in lines if 'error' in x), lines[-1])}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


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
