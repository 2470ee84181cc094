"""What a benchmark says of the code that it measured."""

from pathlib import Path

import pytest

from kvbench.benchmarks import paired


def test_without_git_or_a_repository_no_commit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "__file__", str(tmp_path / "benchmarks" / "paired.py"))
    assert paired.commit() == "none"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert paired.commit() == "none"
