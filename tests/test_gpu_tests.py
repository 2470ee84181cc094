"""`make test-gpu` names its files, and collects them where little is installed, as on a GPU machine without network."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
# What such a machine has, or is given: docs/gpus.md lists them.
THERE = ("torch", "transformers", "triton", "numpy", "hydra-core", "pytest", "hypothesis", "rich")
WITHOUT = '''
import sys

class Without:
    """What finds modules, which does not find some."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

ABSENT = set(sys.argv.pop(1).split(","))
sys.meta_path = [Without(finder) for finder in sys.meta_path]
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
'''


def files() -> list[str]:
    """What the Makefile names."""
    line = re.search(r"^GPU_TESTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line is not None
    return line[1].split()


def needed(names: tuple[str, ...]) -> set[str]:
    """Distributions of these names and all that they ask for."""
    found, rest = set[str](), [*names]
    while rest:
        name = canonicalize_name(rest.pop())
        if name in found:
            continue
        try:
            asked = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue
        found.add(name)
        rest += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def test_every_test_that_needs_a_gpu_is_named() -> None:
    marked = {file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()}
    named = [Path(name) for name in files()]
    assert all((ROOT / name).exists() for name in named)
    mine = Path(__file__).resolve().relative_to(ROOT)
    assert not [file for file in marked - {mine} if not any(file.is_relative_to(name) for name in named)]
    assert Path("tests/kernels") in named


def test_with_a_python_of_its_own_nothing_is_set_up() -> None:
    done = subprocess.run(
        ["make", "-n", "-B", "--no-print-directory", "test-gpu", "PYTHON=python3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("python3 -m pytest tests/test_on_gpu.py tests/kernels ")
    assert "pip" not in done.stdout and ".venv" not in done.stdout


def test_they_are_collected_where_nothing_else_is_installed() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    absent = {canonicalize_name(Requirement(line).name) for line in lines} - needed(THERE)
    modules = {
        module  # but for one that packs its own folder `tests`
        for module, names in packages_distributions().items()
        if {*map(canonicalize_name, names)} & absent and not (ROOT / module).exists()
    }
    assert {"gguf", "nbformat", "pyarrow", "pandas"} <= modules
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(modules), *files()],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    n = int(re.findall(r"(\d+)(?:/\d+)? tests collected", done.stdout)[-1])
    assert n > 1300
