"""What is installed beside what is asked for, and what stands in its own way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from kvbench.engine.checkpoints import packages

ROOT = Path(__file__).resolve().parents[3]


def test_what_the_tests_run_with_is_within_the_bounds() -> None:
    for name in packages.bounds():
        assert packages.out_of_bounds(name) is None


@pytest.mark.parametrize(
    ("words", "code"), [(["--check"], 1), (["--list", "models"], 2), (["method=full", "task=needle", "limit=1"], 2)]
)
def test_the_package_that_has_our_folders_name_is_named(words: list[str], code: int, tmp_path: Path) -> None:
    """transformers imports it where a version that it asks for is installed, and finds our folder."""
    facts = tmp_path / "site" / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    done = subprocess.run(
        [sys.executable, "run.py", *words], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert f"Hugging Face's package kernels {KERNELS_MIN_VERSION} is installed" in said, said
    assert "pip uninstall kernels" in said and "Traceback" not in said


def test_a_version_that_transformers_leaves_alone_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: "0.0.1")
    assert packages.shadowed() is None
