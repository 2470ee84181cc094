"""What is installed, beside what pyproject.toml asks for; a package of Hugging Face's that has our folder's name.

Not here: which of it stops a run (`engine/checkpoints/load.py`) or the main job (`evals/screen/check.py`).
"""

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engine.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def bounds() -> dict[str, SpecifierSet]:
    """The versions that pyproject.toml allows, of what every run needs and of what a GPU needs."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    return {wanted.name: wanted.specifier for wanted in map(Requirement, lines)}


def out_of_bounds(name: str) -> str | None:
    """Half a sentence where a package is installed in a version that nobody tried; None otherwise."""
    found, wanted = installed(name), bounds()[name]
    if found is None or wanted.contains(found, prereleases=True):
        return None
    return f"{name} {found} is installed, and KVBench asks for {wanted}"


def shadowed() -> str | None:
    """A sentence where transformers is going to import Hugging Face's `kernels`, and finds our folder; else None.

    It only does with a version that it asks for.
    """
    found = installed("kernels")
    if found is None:
        return None
    from transformers.utils.import_utils import is_kernels_available

    if not is_kernels_available():
        return None
    return (
        f"Hugging Face's package kernels {found} is installed, and transformers {installed('transformers')} finds "
        "KVBench's folder of that name in its place; run pip uninstall kernels, or use an environment without it"
    )


def refuse_shadowed() -> None:
    """Raise `ConfigError` where transformers cannot be imported beside our folder of kernels."""
    if words := shadowed():
        raise ConfigError(words)
