"""The workflow of a results repository: its steps are run as they stand, on a repository that is made up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.evals.submit import submit

REPO = Path(__file__).resolve().parents[3]
RECIPE = REPO / "docs" / "results-repository.yml"


def steps() -> list[dict[str, Any]]:
    return yaml.safe_load(RECIPE.read_text())["jobs"]["site"]["steps"]


def git(at: Path, *words: str) -> str:
    own = ["-c", "user.name=us", "-c", "user.email=us@example.org"]
    return subprocess.run(["git", "-C", str(at), *own, *words], check=True, capture_output=True, text=True).stdout


def hand_in(at: Path, true: Path, name: str) -> None:
    runs = [path for path in (true / "runs").iterdir() if "-full-" in path.name or "-snapkv-" in path.name]
    submit(runs, at / "submissions" / name, submitter=name, licence="CC0-1.0")
    git(at, "add", ".")
    git(at, "commit", "-qm", f"Add {name}")


@pytest.fixture
def repository(tmp_path: Path, true: Path) -> Path:
    git(tmp_path, "init", "-q")
    hand_in(tmp_path, true, "first")
    hand_in(tmp_path, true, "second")
    return tmp_path


def run(at: Path, name: str) -> subprocess.CompletedProcess[str]:
    """A step as the machine there runs it."""
    (step,) = [one for one in steps() if one.get("name") == name]
    own = {"KVBENCH": str(REPO), "PYTHON": sys.executable, "BASE": "HEAD~1", "AGAIN": "1"}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(command, cwd=at, env=os.environ | own, capture_output=True, text=True)


def test_what_a_pull_request_adds_is_verified_and_shown(repository: Path) -> None:
    for name in ("nothing that was there is changed", "verify", "build the site"):
        done = run(repository, name)
        assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (repository / "verdicts").iterdir()} == {"first.json", "second.json"}
    (attached,) = [one for one in steps() if "upload-artifact" in one.get("uses", "")]
    assert (repository / attached["with"]["path"] / "index.html").is_file()


def test_what_does_not_hold_ends_the_step(repository: Path) -> None:
    file = next((repository / "submissions" / "second").rglob("samples.jsonl"))
    file.write_text(file.read_text().replace("0", "1"))
    done = run(repository, "verify")
    assert done.returncode == 1 and "crc32" in done.stdout
    assert (repository / "verdicts" / "first.json").is_file(), "the others are verified all the same"


def test_what_was_there_is_not_changed(repository: Path) -> None:
    shutil.rmtree(repository / "submissions" / "first")
    git(repository, "commit", "-qam", "Take it away")
    done = run(repository, "nothing that was there is changed")
    assert done.returncode == 1 and "supersede" in done.stdout


def test_a_folder_with_a_strange_name_is_refused(repository: Path) -> None:
    (repository / "submissions" / "$(touch hacked) ;").mkdir()
    assert run(repository, "verify").returncode == 1 and not (repository / "hacked").exists()


def test_the_workflow_can_write_nothing_and_sets_up_what_there_is() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    assert recipe["permissions"] == {"contents": "read"}
    for step in steps():
        assert "actions/checkout" not in step.get("uses", "") or step["with"]["persist-credentials"] is False
    (setup,) = [one["run"] for one in steps() if one.get("name") == "set up"]
    assert setup == 'make -C "$KVBENCH" setup' and "\nsetup:" in (REPO / "Makefile").read_text()
