"""Classes from outside this repository: methods and tasks in files of the user's own, and those of installed packages.

The defaults of the class's `Params` take the place of a file in `conf/`. `method=path/to/mine.py` is called after its
file. What the file holds identifies a run, so that an edited file never goes on with old answers: `Choice.target` is
`PATH:CLASS@DIGEST`, and a worker that finds another file under the path refuses it. A task may be a YAML file instead
(`tasks/own/task.py`), whose target is `PATH@DIGEST`.

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
from functools import cache
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
# What a file of the user's own holds, and the page that shows one; the class is the one of KINDS.
CONF = Path(__file__).resolve().parents[1] / "conf"
PAGES = {"method": "docs/adding-a-method.md", "task": "docs/adding-a-task.md"}
SAY = {"method": {"title": str, "drops": bool}, "task": {"name": str, "version": int, "Params": type}}  # of itself

FILE = re.compile(r"(?P<path>.*\.py)(:(?P<name>\w+))?", re.DOTALL)  # path/to/mine.py or path/to/mine.py:Class
ROWS = re.compile(r".*\.ya?ml", re.DOTALL)  # of a task alone
TARGET = re.compile(r"(?P<path>.*\.(py|ya?ml))(:(?P<name>\w+))?@(?P<digest>[0-9a-f]{16})", re.DOTALL)
LIVE: dict[str, type] = {}  # classes of a notebook's cells, by what stands for their files
NAME = re.compile(r"[A-Za-z]\w*(-\w+)*", re.ASCII)  # of a method: it names folders


def is_file(group: str, text: str) -> bool:
    """Whether `method=text` or `task=text` names a file and not one of ours."""
    return group in PAGES and bool(FILE.fullmatch(text) or (group == "task" and ROWS.fullmatch(text)))


def is_target(target: str) -> bool:
    """Whether a `Choice.target` names a class from outside and not one in our packages."""
    return plugins.is_target(target) or TARGET.fullmatch(target) is not None


def origin(target: str) -> dict[str, str]:
    """What identifies a class from outside in addition to its name; {} for ours."""
    if plugins.is_target(target):
        return plugins.origin(target)
    if (match := TARGET.fullmatch(target)) is None:
        return {}
    file = Path(match["path"]).name
    return {"digest": match["digest"]} | ({"file": file} if ROWS.fullmatch(file) else {})


def file_of(target: str) -> str:
    """The file that a class from outside was read from; "" for ours."""
    if plugins.is_target(target):
        return plugins.file_of(target)
    return match["path"] if (match := TARGET.fullmatch(target)) else ""


def register(group: str, text: str, taken: Iterable[str]) -> str:
    """Let Hydra find the values of what is in a file: its name, which is none of those `taken`."""
    name, node = node_in(group, text, taken)
    store(group, name, node)
    return name


def node_in(group: str, text: str, taken: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """The name of what is in a file, and what a file in `conf/` would say of it."""
    if (kind := LIVE.get(text)) is not None:
        if (name := kind.__name__) in taken:
            raise ConfigError(f"the class {name} has the name of another method; rename it")
        target = f"{text}:{name}@{Path(text).parent.name}"
        return name, {"_target_": target} | defaults("method", kind, f"the class {name}", {text})
    name, node = node_of_rows(text) if group == "task" and ROWS.fullmatch(text) else node_of_file(group, text)
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{group}={text} would be called {name!r}, which folders cannot be named by; rename it so that it has "
            "letters, digits and _ only, and a letter in front"
        )
    if name in taken:
        raise ConfigError(f"{group}={text} has the name of another {group}, {name}; rename it")
    return name, node


def node_of_file(group: str, text: str) -> tuple[str, dict[str, Any]]:
    """The name of the class in a Python file, and what a file in `conf/` would say of it."""
    match = FILE.fullmatch(text)
    assert match is not None, text
    source, path = read(f"{group}={text}", match["path"], f"Python file that holds a {group}")
    digest = digest_of(source)
    kinds = kinds_of(group, module_of(source, path, digest))
    kind = choose(group, kinds, match["name"], path)
    name = path.stem if len(kinds) == 1 else f"{path.stem}-{kind.__name__}"
    return name, {"_target_": f"{path}:{kind.__name__}@{digest}"} | defaults(group, kind, str(path), {str(path)})


def node_of_rows(text: str) -> tuple[str, dict[str, Any]]:
    """The name of the task in a YAML file, and its values; OmegaConf is not to look up what stands in `${…}`."""
    from kvbench.tasks.own.task import read_task

    source, path = read(f"task={text}", text, "YAML file that holds a task")
    name, values = read_task(path)
    escaped = {k: v.replace("${", r"\${") if isinstance(v, str) else v for k, v in values.items()}
    return name, {"_target_": f"{path}@{digest_of(source)}"} | escaped


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
    base = base_of(plugin.group)
    if not (inspect.isclass(kind) and issubclass(kind, base)):
        raise ConfigError(f"{plugin} is no class that inherits from {base.__name__}; name one in its entry point")
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
    source, path = read(match["path"], match["path"], "file that the command was given with")
    if digest_of(source) != match["digest"]:
        raise ConfigError(f"{path} is not what it was when the command was given; give the command again")
    if match["name"] is None:
        return task_of(path, match["digest"])
    return vars(module_of(source, path, match["digest"]))[match["name"]]


@cache
def task_of(path: Path, digest: str) -> Any:
    """The class of a YAML file's task; the same one whenever the file holds the same."""
    from kvbench.tasks.own.task import class_of, read_task

    return class_of(path, read_task(path)[0])


def read(word: str, file: str, what: str) -> tuple[bytes, Path]:
    try:
        path = Path(file).expanduser().resolve()
        return path.read_bytes(), path
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{word} cannot be read ({reason}); give the path of a {what}") from None


def digest_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def module_of(source: bytes, path: Path, digest: str) -> ModuleType:
    """The file as a module; the same one whenever its source is the same."""
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


def kinds_of(group: str, module: ModuleType) -> dict[str, Any]:
    """The methods or tasks that are defined in the module, unfinished ones left out where there are others."""
    base = base_of(group)
    found = {
        kind.__name__: kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, base) and kind.__module__ == module.__name__
    }
    return {name: kind for name, kind in found.items() if not inspect.isabstract(kind)} or found


def is_task(text: str) -> bool:
    """Whether this names a task or a file of one, and no method."""
    if not is_file("task", text):
        names = [path.stem for path in (CONF / "task").glob("*.yaml")]
        return text in (*names, *plugins.names("task"))
    if (match := FILE.fullmatch(text)) is None:
        return True
    source, path = read(text, match["path"], "Python file that holds a method or a task")
    module = module_of(source, path, digest_of(source))
    return bool(kinds_of("task", module)) and not kinds_of("method", module)


def base_of(group: str) -> type:
    module, _, name = KINDS[group].rpartition(".")
    return getattr(import_module(module), name)


def choose(group: str, kinds: dict[str, Any], name: str | None, path: Path) -> Any:
    """The class that is asked for, complete; without a name the only one."""
    if not kinds:
        raise ConfigError(
            f"{path} holds no {group}; write a class that inherits from {base_of(group).__name__} ({PAGES[group]})"
        )
    if name is None and len(kinds) > 1:
        raise ConfigError(f"{path} holds {len(kinds)} {group}s; say which: {group}={path.name}:{' or :'.join(kinds)}")
    if name is not None and name not in kinds:
        raise ConfigError(f"{path} holds no {group} {name}; it has {' and '.join(kinds)}")
    kind = kinds[name or next(iter(kinds))]
    refuse_incomplete(group, kind, str(path))
    return kind


def refuse_incomplete(group: str, kind: Any, where: str) -> None:
    lacking = sorted(kind.__abstractmethods__)
    says = {word: getattr(kind, word, None) for word in SAY[group]}
    if group == "method":
        says["drops"] = kind.traits.drops
    lacking += [word for word, hint in SAY[group].items() if not isinstance(says[word], hint)]
    if lacking:
        raise ConfigError(f"{kind.__name__} of {where} has no {' and no '.join(lacking)}; see {PAGES[group]}")


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
