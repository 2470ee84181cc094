"""Plug-ins: methods and tasks of installed packages, by entry points of the groups `kvbench.methods`, `kvbench.tasks`.

An entry point's name is that of the method or task, its value `package.module:Class`. All are read by name; a package
is imported when its class is asked for or listed, after torch, in which it may look up what it likes.

`Choice.target` is `PACKAGE==VERSION/MODULE:CLASS@DIGEST`. The digest is of name and version, and of all Python files of
the package that the module is in: an edited one never goes on with old answers, and a worker that has another one
refuses it. A process imports a package once, so it has one digest there.

Not here: what a class must have (`evals/outside.py`), other packages that a plug-in imports: they are no part of a
run's identity.
"""

import hashlib
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError, said
from kvbench.engine.lazy import load_torch

GROUPS = {"method": "kvbench.methods", "task": "kvbench.tasks"}
VALUE = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<name>\w+)")
TARGET = re.compile(r"(?P<package>[^/=]+)==(?P<version>[^/]+)/(?P<value>[\w.]+:\w+)@(?P<digest>[0-9a-f]{16})")


@dataclass(frozen=True)
class Plugin:
    """A method or task of a package, by its entry point."""

    group: str  # of GROUPS
    name: str
    value: str  # "package.module:Class"
    package: str  # "kvbench-mine==0.1"

    def __str__(self) -> str:
        return f"{self.group}={self.name} of the package {self.package}"

    def load(self) -> tuple[Any, str]:
        """The class, and the target that leads to it."""
        if not VALUE.fullmatch(self.value):
            raise ConfigError(f"{self} has the entry point {self.value!r}; write package.module:Class there")
        digest = digest_of(self.value, self.package)  # of what is imported now
        return imported(self.value, str(self)), f"{self.package}/{self.value}@{digest}"


@cache
def plugins() -> tuple[Plugin, ...]:
    """All installed plug-ins, for which every package's entry points are read: 150 packages take 6 ms, once."""
    every = entry_points()
    return tuple(
        Plugin(group, one.name, one.value, f"{one.dist.name}=={one.dist.version}")
        for group, theirs in GROUPS.items()
        for one in sorted(every.select(group=theirs), key=lambda one: one.name)
        if one.dist is not None
    )


def names(group: str) -> list[str]:
    return [one.name for one in plugins() if one.group == group]


def find(group: str, name: str, ours: Collection[str]) -> Plugin | None:
    """The plug-in of this name; `ConfigError` where there are two, or one and a file of ours in `conf/`."""
    found = [one for one in plugins() if (one.group, one.name) == (group, name)]
    if found and name in ours:
        raise ConfigError(
            f"{group}={name} is one of KVBench, and the package {found[0].package} has another of this name; uninstall "
            "that package, or rename its entry point"
        )
    if len(found) > 1:
        raise ConfigError(
            f"{group}={name} is of several packages, {' and '.join(one.package for one in found)}; keep one of them"
        )
    return found[0] if found else None


def is_target(target: str) -> bool:
    """Whether a `Choice.target` names a class of an installed package."""
    return TARGET.fullmatch(target) is not None


def origin(target: str) -> dict[str, str]:
    """The package and digest of a target."""
    match = TARGET.fullmatch(target)
    assert match is not None, target
    return {"package": f"{match['package']}=={match['version']}", "digest": match["digest"]}


@cache
def load(target: str) -> Any:
    """The class that a target names, from the same sources as when the command was given."""
    match = TARGET.fullmatch(target)
    assert match is not None, target
    name, value = match["package"], match["value"]
    try:
        package = f"{name}=={version(name)}"
    except PackageNotFoundError:
        raise ConfigError(f"{value} is of the package {name}, which is not installed here; install it") from None
    if digest_of(value, package) != match["digest"]:
        raise ConfigError(
            f"the package {package} is not what {name}=={match['version']} was when the command was given; install the "
            "same, or give the command again"
        )
    return imported(value, f"{value} of the package {package}")


def file_of(target: str) -> str:
    """The file that a target's module was read from; empty where it was not imported."""
    module = target.partition("/")[2].partition(":")[0]
    return getattr(sys.modules.get(module), "__file__", None) or ""


def imported(value: str, who: str) -> Any:
    """The class of an entry point's value; whatever the package raises is a sentence."""
    module, _, name = value.partition(":")
    try:
        load_torch()
        found = import_module(module)
    except (Exception, SystemExit) as error:
        files = {str(file) for file in sources(module).values()}
        raise ConfigError(f"{who} cannot be imported: {said(error, files)}; mend or uninstall it") from None
    if not hasattr(found, name):
        raise ConfigError(f"{who} is not there: the module {module} has no {name}")
    return getattr(found, name)


@cache
def digest_of(value: str, package: str) -> str:
    digest = hashlib.sha256(package.encode())
    for name, file in sources(value.partition(":")[0]).items():
        source = file.read_bytes()
        digest.update(f"\0{name}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()[:16]


def sources(module: str) -> dict[str, Path]:
    """The Python files of the package that a module is in, by their place there; else the module's own.

    Nothing is imported but namespaces above the package, which hold no code. {} where there is no such package.
    """
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        try:
            spec = find_spec(".".join(parts[:n]))
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return {}
        if spec.origin is not None:  # no namespace
            folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
            found = {file.relative_to(folder).as_posix(): file for folder in folders for file in folder.rglob("*.py")}
            return dict(sorted(found.items())) or {Path(spec.origin).name: Path(spec.origin)}
    return {}
