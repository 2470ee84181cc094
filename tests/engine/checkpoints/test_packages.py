"""What is installed beside what is asked for, and what stands in its own way."""

from pathlib import Path

import pytest

from kvbench.engine.checkpoints import packages

ROOT = Path(__file__).resolve().parents[3]


def test_what_the_tests_run_with_is_within_the_bounds() -> None:
    for name in packages.bounds():
        assert packages.out_of_bounds(name) is None


def test_an_installed_package_knows_its_bounds_by_its_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = packages.bounds()
    packages.bounds.cache_clear()
    monkeypatch.setattr(packages, "PROJECT", tmp_path / "pyproject.toml")
    try:
        assert packages.bounds() == told
    finally:
        packages.bounds.cache_clear()
