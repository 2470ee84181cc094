import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build

try:
    build.find_compiler()
except RuntimeError:
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache folder of the test's own, and no libraries from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVBENCH_KERNELS", raising=False)
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def test_a_library_is_compiled_once_and_then_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library("clusters") is not None
    path = build.library_path("clusters", build.level())
    before = path.stat()
    build.library.cache_clear()
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert build.library("clusters") is not None
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert {file.name for file in path.parent.iterdir()} == {path.name, ".lock"}


def test_every_level_of_this_processor_compiles() -> None:
    levels = ["DEFAULT", "AVX2", "AVX512"]
    for name in (file.stem for file in sorted(build.SOURCES.glob("*.cpp"))):
        for at in levels[: levels.index(build.level()) + 1]:
            assert isinstance(build.load(name, at), ctypes.CDLL)


def test_changed_flags_make_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_path("clusters", "DEFAULT")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.library_path("clusters", "DEFAULT") != before


@pytest.mark.parametrize("compiler", ["/nonexistent/compiler", "false"])
def test_without_a_compiler_torch_does_the_work(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert build.library("clusters") is None
        assert build.library("clusters") is None
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()


def test_the_environment_says_which_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    assert build.library("clusters") is None
    build.library.cache_clear()
    monkeypatch.setenv("KVBENCH_KERNELS", "native")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="failed"):
        build.library("clusters")
    monkeypatch.setenv("KVBENCH_KERNELS", "fast")
    with pytest.raises(ValueError, match="use torch or native"):
        build.library("clusters")


def test_processes_that_compile_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kernels.build"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "KVBENCH_KERNELS": "native"}
    root = Path(build.__file__).parents[1]
    both = [subprocess.Popen(command, cwd=root, env=environment) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    for file in build.SOURCES.glob("*.cpp"):
        assert build.library_path(file.stem, build.level()).is_file()


def test_libraries_use_the_threads_that_torch_has_loaded() -> None:
    """In a process of its own: other packages bring a libgomp as well, and some test may have imported them."""
    if not Path("/proc/self/maps").is_file():
        pytest.skip("no /proc")
    code = """
from pathlib import Path
import torch
from kernels import build
assert build.library("select_attend") is not None
torch.ones(1 << 20).exp()
lines = Path("/proc/self/maps").read_text().splitlines()
print(*{line.split()[-1] for line in lines if "libgomp" in line})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(build.__file__).parents[1],
        env={**os.environ, "KVBENCH_KERNELS": "native"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(done.stdout.split()) <= 1, done.stdout
