import ctypes
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbench.kernels import build

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


@pytest.fixture
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that is loaded without an error and has none of our functions."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "code.c").write_text("int foreign_code(void) { return 1; }")
    command = [*build.find_compiler(), "-shared", "-fPIC", "-x", "c", "code.c", "-o", "code.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "code.so"


def is_planted(library: ctypes.CDLL | None) -> bool:
    return hasattr(library, "foreign_code")


@pytest.mark.parametrize("how", ["writable by all", "a link", "a hard link", "of another user"])
def test_a_library_that_others_could_have_put_there_is_compiled_anew(
    how: str, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.library_path("clusters", "DEFAULT")
    path.parent.mkdir(parents=True, mode=0o700)
    if how == "a link":
        path.symlink_to(planted)
    elif how == "a hard link":
        path.hardlink_to(planted)
    else:
        path.write_bytes(planted.read_bytes())
        path.chmod(0o777 if how == "writable by all" else 0o700)
    if how == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 65534, -1)
    assert not is_planted(build.load("clusters", "DEFAULT"))
    facts = path.lstat()
    assert stat.S_ISREG(facts.st_mode)
    assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (os.geteuid(), 0o700)
    assert planted.exists()  # a link's other end is not touched


@pytest.mark.parametrize("how", ["of another user", "a link"])
def test_a_folder_that_is_not_ours_is_not_used(
    how: str, planted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = build.library_path("clusters", build.level())
    path.parent.mkdir(parents=True)
    path.write_bytes(planted.read_bytes())
    path.chmod(0o700)
    if how == "a link":
        path.parent.rename(tmp_path / "elsewhere")
        path.parent.symlink_to(tmp_path / "elsewhere")
    elif os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    else:
        os.chown(path.parent, 65534, -1)
    assert build.library("clusters") is None  # torch does the work
    assert "torch does its work" in caplog.text
    assert path.read_bytes() == planted.read_bytes()


def test_a_folder_that_others_could_enter_is_closed() -> None:
    path = build.library_path("clusters", "DEFAULT")
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o777)
    build.load("clusters", "DEFAULT")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_library_put_there_after_the_check_is_not_loaded(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc")
    path = build.library_path("clusters", "DEFAULT")
    build.load("clusters", "DEFAULT")
    trusted = build.open_trusted

    def then_replaced(folder: int, name: str) -> int | None:
        file = trusted(folder, name)
        path.parent.rename(path.parent.with_name("moved"))
        path.parent.mkdir()
        path.write_bytes(planted.read_bytes())
        return file

    monkeypatch.setattr(build, "open_trusted", then_replaced)
    assert not is_planted(build.load("clusters", "DEFAULT"))


def test_what_a_killed_compiler_left_is_removed_and_nothing_else() -> None:
    folder = build.library_path("clusters", "DEFAULT").parent
    for name in (".making-dead", "mine"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("")
    build.load("clusters", "DEFAULT")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["mine"]
    assert (folder / "mine" / "file").exists()


def test_what_a_killed_build_left_is_removed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real `kill -9` of the process, whose compiler lives on for a while and writes where it was told to."""
    compiler = tmp_path / "slow"
    compiler.write_text(f"#!/bin/sh\necho half > made.o\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    compiler.chmod(0o755)
    command = [sys.executable, "-c", "from kvbench.kernels import build; build.load('clusters', 'DEFAULT')"]
    environment = {**os.environ, "CXX": str(compiler)}
    killed = subprocess.Popen(command, cwd=Path(build.__file__).resolve().parents[1], env=environment)
    folder = build.library_path("clusters", "DEFAULT").parent
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    assert [path.name for path in folder.glob(".making-*/made.o")] == ["made.o"]
    build.load("clusters", "DEFAULT")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert {path.name for path in folder.iterdir()} == {".lock", build.library_path("clusters", "DEFAULT").name}


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nexec sleep 100\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "PATIENCE_S", 0.2)
    assert build.library("clusters") is None


@pytest.mark.slow  # compiles everything three times; the others' tests have compiled it for this processor
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
    names = ["clusters", "kmeans"]
    code = f"from kvbench.kernels import build; assert all(build.library(name) is not None for name in {names})"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "KVBENCH_KERNELS": "native"}
    root = Path(build.__file__).resolve().parents[1]
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    for name in names:
        assert build.library_path(name, build.level()).is_file()


def test_libraries_use_the_threads_that_torch_has_loaded() -> None:
    """In a process of its own: other packages bring a libgomp as well, and some test may have imported them."""
    if not Path("/proc/self/maps").is_file():
        pytest.skip("no /proc")
    code = """
from pathlib import Path
import torch
from kvbench.kernels import build
assert build.library("clusters") is not None
torch.ones(1 << 20).exp()
lines = Path("/proc/self/maps").read_text().splitlines()
print(*{line.split()[-1] for line in lines if "libgomp" in line})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(build.__file__).resolve().parents[1],
        env={**os.environ, "KVBENCH_KERNELS": "native"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(done.stdout.split()) <= 1, done.stdout
