"""What is installed, compared with what pyproject.toml asks for.

Not here: which of it stops a run (`engine/checkpoints/load.py`) or the main job (`evals/screen/check.py`).
"""

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def bounds() -> dict[str, SpecifierSet]:
    """The versions that KVBench asks for, of what every run needs and of what a GPU needs."""
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        lines = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    else:  # of a wheel
        asked = [Requirement(line) for line in requires("kvbench") or ()]
        lines = [str(one) for one in asked if one.marker is None or one.marker.evaluate({"extra": "gpu"})]
    return {wanted.name: wanted.specifier for wanted in map(Requirement, lines)}


def out_of_bounds(name: str) -> str | None:
    """Half a sentence where a package is installed in a version that nobody tried; None otherwise."""
    found, wanted = installed(name), bounds()[name]
    if found is None or wanted.contains(found, prereleases=True):
        return None
    return f"{name} {found} is installed, and KVBench asks for {wanted}"
