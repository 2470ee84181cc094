"""Classes from outside this repository: a method in a file of the user's own, methods and tasks of installed packages.

The defaults of the class's `Params` take the place of a file in `conf/`. `method=path/to/mine.py` is called after its
file. What the file holds identifies a run, so that an edited file never goes on with old answers: `Choice.target` is
`PATH:CLASS@DIGEST`, and a worker that finds another file under the path refuses it.

A user's file may look up in torch what it likes while it is imported, so torch is loaded before it.

Not here: which packages bring something, and what their targets are (`evals/plugins.py`); files that the user's file
imports: they are no part of a run's identity.
"""

import hashlib
import inspect
import linecache
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError, said
from kvbench.engine.lazy import load_torch
from kvbench.evals import plugins
from kvbench.evals.plugins import Plugin

KINDS = {  # what a group's classes are
    "method": "kvbench.methods.base.SelectiveAttention",
    "task": "kvbench.tasks.base.Task",
    "prefill": "kvbench.engine.sparse.base.SparsePrefill",
    "logger": "kvbench.evals.logger.Logger",
}
SAY = {"method": {"title": str, "drops": bool}, "task": {"name": str, "version": int, "Params": type}}  # of itself

FILE = re.compile(r"(?P<path>.*\.py)(:(?P<name>\w+))?", re.DOTALL)  # path/to/mine.py or path/to/mine.py:Class
TARGET = re.compile(r"(?P<path>.*\.py):(?P<name>\w+)@(?P<digest>[0-9a-f]{16})", re.DOTALL)
LIVE: dict[str, type] = {}  # classes of a notebook's cells, by what stands for their files
# What methods called or defined before they returned values, and what they return now (engine/placement.py).
FORMER = {
    r"store\.(keep|keep_until_full|keep_reached|keep_all|keep_ragged|replace|keep_searchable|keep_coded)\(": "arrange "
    "returns where the tokens go now: Kept(positions, n_window), Whole(), Ragged, Made, Searched or Coded",
    r"store\.(offload|offload_values|keep_recent)\(": "arrange returns Offloaded(n_sink, n_window) now",
    r"\]\.(evict|drop_but|retain|release|roll)\(": "behind(layer, weights) returns Evict(slots), Stay(slots) or "
    "Release(n) now",
    r"\.meter\.\w+\(|count_rebuilt\(": "select returns Selection(positions, Cost(moved_bytes=n)) now, and behind "
    "Change(cost=…)",
    r"def (log_weights|made_keys|stand_ins|step_rows)\(": "select returns Selection(positions, bias=…, keys=…, "
    "stand_ins=…) now",
    r"def (comparable_over|extends|unreadable|asks_question|adapts|turns_queries|uncodable|unchangeable|evicts|"
    r"own_allocator|own_post_processing)\(": "traits_of returns it among others now, from the parameters",
    r"def (skipped_layers|n_whole)\(": "whole_layers(params, shape) returns such layers now",
    r"fetches_more =": "extends = True says so now",
    r"def (select_rows|resident_rows)\(": "search and resident are asked now",
}
NAME = re.compile(r"[A-Za-z]\w*(-\w+)*", re.ASCII)  # of a method: it names folders


def is_file(text: str) -> bool:
    """Whether `method=text` names a file and not a method of ours."""
    return FILE.fullmatch(text) is not None


def is_target(target: str) -> bool:
    """Whether a `Choice.target` names a class from outside and not one in our packages."""
    return plugins.is_target(target) or TARGET.fullmatch(target) is not None


def origin(target: str) -> dict[str, str]:
    """What identifies a class from outside in addition to its name; {} for ours."""
    if plugins.is_target(target):
        return plugins.origin(target)
    return {"digest": match["digest"]} if (match := TARGET.fullmatch(target)) else {}


def file_of(target: str) -> str:
    """The file that a class from outside was read from; "" for ours."""
    if plugins.is_target(target):
        return plugins.file_of(target)
    return match["path"] if (match := TARGET.fullmatch(target)) else ""


def register(text: str, taken: Iterable[str]) -> str:
    """Let Hydra find the defaults of the method in a file: its name, which is none of those `taken`."""
    name, node = node_in(text, taken)
    store("method", name, node)
    return name


def node_in(text: str, taken: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """The name of the method in a file, and what a file in `conf/` would say of it."""
    match = FILE.fullmatch(text)
    assert match is not None, text
    if (kind := LIVE.get(text)) is not None:
        if (name := kind.__name__) in taken:
            raise ConfigError(f"the class {name} has the name of another method; rename it")
        target = f"{text}:{name}@{Path(text).parent.name}"
        return name, {"_target_": target} | defaults("method", kind, f"the class {name}", {text})
    source, path = read(text, match["path"])
    digest = digest_of(source)
    kinds = methods_of(module_of(source, path, digest))
    kind = choose(kinds, match["name"], path)
    name = path.stem if len(kinds) == 1 else f"{path.stem}-{kind.__name__}"
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"method={text} would be called {name!r}, which folders cannot be named by; rename the file so that it has "
            "letters, digits and _ only, and a letter in front"
        )
    if name in taken:
        raise ConfigError(f"method={text} has the name of another method, {name}; rename the file")
    target = f"{path}:{kind.__name__}@{digest}"
    return name, {"_target_": target} | defaults("method", kind, str(path), {str(path)})


def word_of(kind: type) -> str:
    """What names a class on a command line of this process: its file, or for a notebook's cell one that is not there.

    What identifies the run is then the cell's text. Another process cannot have such a class.
    """
    if kind.__module__.startswith("kvbench."):
        return kind.__module__.rpartition(".")[2]
    codes = [value.__code__ for value in vars(kind).values() if inspect.isfunction(value)]
    file = codes[0].co_filename if codes else ""
    if Path(file).is_file():
        return f"{file}:{kind.__name__}"
    cell = "".join(linecache.getlines(file))
    if not cell:
        raise ConfigError(f"the class {kind.__name__} has no source that can be read; put it into a file")
    refuse_incomplete("method", kind, "a notebook")
    word = f"notebook/{digest_of(cell.encode())}/{kind.__name__}.py"
    LIVE[word] = kind
    return word


def store(group: str, name: str, node: dict[str, Any]) -> None:
    """Let Hydra find this in place of a file of `conf/`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=name, node=node, group=group)


def node_of(plugin: Plugin) -> dict[str, Any]:
    """What a file in `conf/` would say of a plug-in; `ConfigError` where it is none that can be asked."""
    if not NAME.fullmatch(plugin.name):
        raise ConfigError(
            f"{plugin} has a name that no folder can have; use letters, digits and _, with a letter in front"
        )
    kind, target = plugin.load()
    module, _, name = KINDS[plugin.group].rpartition(".")
    if not (inspect.isclass(kind) and issubclass(kind, getattr(import_module(module), name))):
        raise ConfigError(f"{plugin} is no class that inherits from {name}; name one in its entry point")
    refuse_incomplete(plugin.group, kind, str(plugin))
    files = {str(file) for file in plugins.sources(kind.__module__).values()}
    return {"_target_": target} | defaults(plugin.group, kind, str(plugin), files)


def load(target: str) -> Any:
    """The class that a `Choice.target` names, from the same source as when the command was given."""
    if plugins.is_target(target):
        return plugins.load(target)
    match = TARGET.fullmatch(target)
    assert match is not None, target
    if match["path"] in LIVE:
        return LIVE[match["path"]]
    source, path = read(match["path"], match["path"])
    if digest_of(source) != match["digest"]:
        raise ConfigError(f"{path} is not what it was when the command was given; give the command again")
    return methods_of(module_of(source, path, match["digest"]))[match["name"]]


def read(text: str, file: str) -> tuple[bytes, Path]:
    try:
        path = Path(file).expanduser().resolve()
        return path.read_bytes(), path
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"method={text} cannot be read ({reason}); give the path of a Python file that holds a method"
        ) from None


def digest_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def module_of(source: bytes, path: Path, digest: str) -> ModuleType:
    """The file as a module; the same one whenever its source is the same."""
    for former, now in FORMER.items():
        if found := re.search(former, source.decode(errors="replace")):
            raise ConfigError(f"{path} has {found[0]!r}, which is gone: {now} (docs/adding-a-method.md)")
    name = f"outside.{path.stem}_{digest}"
    return sys.modules.get(name) or new_module(name, source, path)


def new_module(name: str, source: bytes, path: Path, package: str = "") -> ModuleType:
    """Run the source as a module of this name; of a file in a package, whose imports may say so.

    It is compiled here, because Python's own cache of compiled files overlooks an edit within the same second.
    """
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__package__ = package or None
    sys.modules[name] = module  # dataclasses look their module up
    try:
        load_torch()  # a user's file may look up in it what it likes
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{path} cannot be imported: {said(error, {str(path)})}; mend it and give the command again"
        ) from None
    return module


def methods_of(module: ModuleType) -> dict[str, Any]:
    """The methods that are defined in the module, unfinished ones left out where there are others."""
    from kvbench.methods.base import SelectiveAttention

    found = {
        kind.__name__: kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, SelectiveAttention) and kind.__module__ == module.__name__
    }
    return {name: kind for name, kind in found.items() if not inspect.isabstract(kind)} or found


def choose(kinds: dict[str, Any], name: str | None, path: Path) -> Any:
    """The class that is asked for, complete; without a name the only one."""
    if not kinds:
        raise ConfigError(
            f"{path} holds no method; write a class that inherits from SelectiveAttention (docs/adding-a-method.md)"
        )
    if name is None and len(kinds) > 1:
        raise ConfigError(f"{path} holds {len(kinds)} methods; say which: method={path.name}:{' or :'.join(kinds)}")
    if name is not None and name not in kinds:
        raise ConfigError(f"{path} holds no method {name}; it has {' and '.join(kinds)}")
    kind = kinds[name or next(iter(kinds))]
    refuse_incomplete("method", kind, str(path))
    return kind


def refuse_incomplete(group: str, kind: Any, where: str) -> None:
    lacking = sorted(kind.__abstractmethods__)
    says = {word: getattr(kind, word, None) for word in SAY[group]}
    if group == "method":
        says["drops"] = kind.traits.drops
    lacking += [word for word, hint in SAY[group].items() if not isinstance(says[word], hint)]
    if lacking:
        raise ConfigError(f"{kind.__name__} of {where} has no {' and no '.join(lacking)}; see docs/adding-a-method.md")


def defaults(group: str, kind: Any, where: str, files: Collection[str]) -> dict[str, Any]:
    """What a file in `conf/` would say: the defaults of the class's `Params`, which is in these files."""
    where = f"{kind.__name__}.Params of {where}"
    if not (inspect.isclass(kind.Params) and is_dataclass(kind.Params)):
        raise ConfigError(f"{where} is no dataclass; write @dataclass(frozen=True) above it")
    bare = [f.name for f in fields(kind.Params) if f.default is MISSING and f.default_factory is MISSING]
    if bare:
        raise ConfigError(f"{where} has no default for {', '.join(bare)}; give each a value, like {bare[0]}: int = 32")
    try:
        made = kind.Params()
        tree = {field.name: plain(getattr(made, field.name)) for field in fields(made)}
        build_params(kind, tree, group)
    except (Exception, SystemExit) as error:  # whatever a user's own checks raise
        reason = str(error) if isinstance(error, ConfigError) else said(error, files)
        raise ConfigError(f"{where} cannot be made of its defaults: {reason}") from None
    return tree


def plain(value: Any) -> Any:
    """A default as YAML would have it."""
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Fraction | Path) else value
