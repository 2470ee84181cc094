import shutil
from pathlib import Path

import pytest

from kvbench.tests.results.made_rows import run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of four samples; not to be changed."""
    path = tmp_path_factory.mktemp("finished") / "run"
    run(path)
    return path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The same run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "copied")
