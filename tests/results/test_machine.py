import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvbench.results import environment, git_sha, machine, peak_rss_bytes


def test_the_environment_is_plain_json() -> None:
    env = environment()
    assert json.loads(json.dumps(env)) == env
    assert env["versions"]["numpy"] == np.__version__
    assert env["ram_bytes"] > 2**28 and peak_rss_bytes() > 2**20


def test_git_is_asked_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.cache_clear()
    environment()
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: pytest.fail("asked again"))
    assert environment()["git_sha"] == environment()["git_sha"]


def commit(root: Path) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)


def test_the_commit_is_marked_when_code_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "repo" / "results" / "machine.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(machine, "__file__", str(module))
    assert git_sha() is None  # no checkout
    commit(tmp_path / "repo")
    sha = git_sha()
    assert sha is not None and len(sha) == 40
    (tmp_path / "repo" / "out").mkdir()
    (tmp_path / "repo" / "out" / "config.yaml").write_text("a run")
    assert git_sha() == sha
    module.write_text("changed = True")
    assert git_sha() == sha + "-dirty"


def test_a_copy_within_another_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "lib" / "results" / "machine.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    commit(tmp_path)
    monkeypatch.setattr(machine, "__file__", str(module))
    assert git_sha() is None
