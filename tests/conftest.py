"""What all tests share: reproducible property tests, one thread, and a reason where a GPU is missing."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest import runner
from hypothesis import settings

from kvbench.tests.interpreter import quicken

# Test models are so small that a second thread only waits, and spins while it does: beside another busy process the
# suite takes 20 times as long. Tests of the real model ask for their threads themselves.
os.environ["OMP_NUM_THREADS"] = "1"

# Without a GPU, Triton's kernels run in its interpreter. It reads this when they are imported, whoever does so first.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Derandomised: a red run is red again. No deadline: shared CI machines stall for seconds.
settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(scope="module", autouse=True)
def garbage() -> Iterator[None]:
    """What is there before a file's tests is left out of collections: runs ask for many, and thousands of collected
    tests and their libraries would be looked through each time."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with what takes seconds: compiled kernels, notes of sound tokenizers."""
    home, own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), tmp_path / "cache"
    for name in (f"kernels-{os.geteuid()}", f"tokenizers-{os.geteuid()}"):
        if (home / "kvbench" / name).is_dir():
            shutil.copytree(home / "kvbench" / name, own / "kvbench" / name, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    return own


def in_room(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    return runner.pytest_runtest_protocol(item, nextitem)


# CPython maps the frames of deep calls in pieces of 16 kB, and where a loop calls and returns across the end of one it
# maps and unmaps that piece each time: up to a third of a test's time. Frames above a large one share its piece, 1 MB.
in_room.__code__ = in_room.__code__.replace(co_stacksize=70_000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    return in_room(item, nextitem)


def pytest_runtest_call() -> None:
    quicken()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting:
        import torch  # seconds, which a run of other tests need not wait for

        if not torch.cuda.is_available():
            if config.getoption("markexpr") == "gpu" and shutil.which("nvidia-smi"):
                raise pytest.UsageError(
                    f"nvidia-smi is there, but torch {torch.__version__} can use no GPU: it is built without CUDA, or "
                    "for a newer driver"
                )
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason="no GPU that torch can use"))
