"""A method in a file of the user's own, outside this repository: `method=path/to/mine.py`.

The file's class is found, and the defaults of its `Params` take the place of a file in `conf/method/`. Such a method is
called after its file. What the file holds identifies a run, so that an edited file never goes on with old answers:
`Choice.target` is `PATH:CLASS@DIGEST`, and a worker that finds another file under the path refuses it.

A user's file may look up in torch what it likes while it is imported, so torch is loaded before it.

Not here: files that the user's file imports. They are no part of a run's identity.
"""

import hashlib
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.lazy import load_torch
from kvbench.evals.typed import build_params

FILE = re.compile(r"(?P<path>.*\.py)(:(?P<name>\w+))?", re.DOTALL)  # path/to/mine.py or path/to/mine.py:Class
TARGET = re.compile(r"(?P<path>.*\.py):(?P<name>\w+)@(?P<digest>[0-9a-f]{16})", re.DOTALL)
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
}
NAME = re.compile(r"[A-Za-z]\w*(-\w+)*", re.ASCII)  # of a method: it names folders


def is_file(text: str) -> bool:
    """Whether `method=text` names a file and not a method of ours."""
    return FILE.fullmatch(text) is not None


def is_target(target: str) -> bool:
    """Whether a `Choice.target` names a class in a file and not one in our packages."""
    return TARGET.fullmatch(target) is not None


def register(text: str, taken: Iterable[str]) -> str:
    """Let Hydra find the defaults of the method in a file: its name, which is none of those `taken`."""
    from hydra.core.config_store import ConfigStore

    match = FILE.fullmatch(text)
    assert match is not None, text
    source, path = read(text, match["path"])
    digest = digest_of(source)
    module = module_of(source, path, digest)
    kinds = methods_of(module)
    kind = choose(kinds, match["name"], path)
    name = path.stem if len(kinds) == 1 else f"{path.stem}-{kind.__name__}"
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"method={text} would be called {name!r}, which folders cannot be named by; rename the file so that it has "
            "letters, digits and _ only, and a letter in front"
        )
    if name in taken:
        raise ConfigError(f"method={text} has the name of another method, {name}; rename the file")
    node = {"_target_": f"{path}:{kind.__name__}@{digest}"} | defaults(kind, path)
    ConfigStore.instance().store(name=name, node=node, group="method")
    return name


def load(target: str) -> Any:
    """The class that a `Choice.target` names, from the same source as when the command was given."""
    match = TARGET.fullmatch(target)
    assert match is not None, target
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


def new_module(name: str, source: bytes, path: Path) -> ModuleType:
    """Run the source as a module of this name.

    It is compiled here, because Python's own cache of compiled files overlooks an edit within the same second.
    """
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        load_torch()  # a user's file may look up in it what it likes
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{path} cannot be imported: {said(error, path)}; mend it and give the command again"
        ) from None
    return module


def said(error: BaseException, path: Path) -> str:
    """An error of a user's file in one line: where it arose, of which kind it is, what it says."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines, error = [error.lineno], type(error)(error.msg)
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


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
    wanted = {"title": str, "drops": bool}
    lacking = sorted(kind.__abstractmethods__)
    lacking += [word for word, hint in wanted.items() if not isinstance(getattr(kind, word, None), hint)]
    if lacking:
        raise ConfigError(f"{kind.__name__} of {path} has no {' and no '.join(lacking)}; see docs/adding-a-method.md")
    return kind


def defaults(kind: Any, path: Path) -> dict[str, Any]:
    """What a file in `conf/method/` would say: the defaults of the class's `Params`."""
    where = f"{kind.__name__}.Params of {path}"
    if not (inspect.isclass(kind.Params) and is_dataclass(kind.Params)):
        raise ConfigError(f"{where} is no dataclass; write @dataclass(frozen=True) above it")
    bare = [f.name for f in fields(kind.Params) if f.default is MISSING and f.default_factory is MISSING]
    if bare:
        raise ConfigError(f"{where} has no default for {', '.join(bare)}; give each a value, like {bare[0]}: int = 32")
    try:
        made = kind.Params()
        tree = {field.name: plain(getattr(made, field.name)) for field in fields(made)}
        build_params(kind, tree, "method")
    except (Exception, SystemExit) as error:  # whatever a user's own checks raise
        reason = str(error) if isinstance(error, ConfigError) else said(error, path)
        raise ConfigError(f"{where} cannot be made of its defaults: {reason}") from None
    return tree


def plain(value: Any) -> Any:
    """A default as YAML would have it."""
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Fraction | Path) else value
