import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.results import read_runs
from kvbench.tests.results.made_rows import ROOT, ok_row, open_folder


def test_finished_runs_are_found_and_stopped_ones_are_not(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "sweep" / "b")
    shutil.copytree(finished, tmp_path / "a")
    with open_folder(tmp_path / "stopped") as folder:
        folder.append(ok_row(0))
    found = read_runs(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path, _ in found] == ["a", "sweep/b"]
    assert all(result.n_samples == 4 for _, result in found)
    assert read_runs(tmp_path / "nowhere") == []


def test_a_result_without_its_samples_is_refused(copied: Path) -> None:
    (copied / "samples.jsonl").unlink()
    with pytest.raises(ValueError, match=r"samples\.jsonl cannot be read"):
        read_runs(copied)


def test_the_reader_needs_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, kvbench.results\nprint([name for name in ('torch', 'pandas', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
