"""Plain values to typed ones: what YAML and the command line give, as the fields of a dataclass want it.

Not here: which keys there are (`evals/settings.py`, each `Params`), the words of a command line (`evals/overrides.py`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from kvbench.engine.budget import Bytes, parse_bytes, parse_fraction
from kvbench.engine.checks import one_of, word
from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.methods.rules import Rules, Scorer

METHODS = Path(__file__).resolve().parents[1] / "conf" / "method"

LONGEST_NAME = 255  # bytes, which no file system exceeds
LARGEST = 2**63 - 1  # what generators of random numbers and tables of results can hold
PATHS = ("data_dir", "model.id", "task.path", "hydra.launcher.folder")  # kept as they are given


def build_params(cls: type, params: Mapping[str, Any], group: str) -> Any:
    """`cls.Params` from the values in the YAML; `group` ("method" or "task") is for messages."""
    return build(cls.Params, params, group)  # type: ignore[attr-defined]


def build(cls: type, tree: Any, group: str) -> Any:
    """A dataclass from a mapping with exactly its fields, each value as the field's type."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{group}={word(tree)} is a group of keys; set them like {group}.key=value")
    hints = get_type_hints(cls)
    same_names(group, tree, [field.name for field in fields(cls)])
    at = f"{group}." if group else ""
    typed = {name: convert(value, hints[name], f"{at}{name}") for name, value in tree.items()}
    return cls(**typed)


def same_names(group: str, given: Iterable[str], wanted: Iterable[str]) -> None:
    """Refuse keys that are too many or too few."""
    given, wanted = list(given), list(wanted)
    for name in given:
        if name not in wanted:
            raise unknown_key(group, name, wanted)
    for name in wanted:
        if name not in given:
            key = f"{group}.{name}" if group else name
            raise ConfigError(f"{key} is missing; give {key}=… or restore its default in conf/")


def convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type `hint`, where that loses nothing; else a sentence that names the key.

    No number is without bounds, and no path is blank, too long or in nobody's home.
    """
    if hint is Any:
        return value
    if hint is Scorer:
        return scorer(value, key)
    if hint is Bytes:
        return parse_bytes(value, key)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, key)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return convert_to_one(value, args, key)
    if origin is Literal:
        return one_of(key, value, args)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key}={word(value)} is not a list; write {key}=[{word(value)}]")
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise ConfigError(f"{key}={word(value)} has {len(value)} elements; give {len(args)}")
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        return tuple(convert(v, h, key) for v, h in zip(value, hints, strict=True))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and is_number and (isinstance(value, int) or value.is_integer()):
        if abs(value) > LARGEST:
            raise ConfigError(f"{key}={word(value)} is out of range; it is at most {LARGEST}")
        return int(value)
    if hint is float and is_number:
        if not isfinite(value):
            raise ConfigError(f"{key}={word(value)} is not a finite number; give one")
        return float(value)
    if hint is Fraction and (is_number or isinstance(value, str)):
        return parse_fraction(value, key)
    if hint in (str, Path) and (is_number or isinstance(value, str)):
        text = value if isinstance(value, str) else str(value)
        if hint is Path or key in PATHS:
            expanded(key, text)
        return hint(text)
    kinds = {bool: "true or false", int: "a whole number", float: "a number", Fraction: "a number"}
    if hint not in kinds and hint not in (str, Path):
        raise ConfigError(
            f"{key} is declared as {hint}, which no value can be given for; use bool, int, float, str, Fraction, Path, "
            "Literal, or a tuple of these"
        )
    raise ConfigError(f"{key}={word(value)} is not {kinds.get(hint, 'a text')}")


def scorer(value: Any, key: str) -> Scorer:
    """A method that scores tokens, by its name in conf/method; its values are those of the file, and given ones."""
    values = scorer_values(value, key)
    module, _, name = values.pop("_target_").rpartition(".")
    rules: type[Rules] = getattr(import_module(module), name)
    named = values.pop("name")
    if not rules.traits.is_scorer:
        raise ConfigError(
            f"{key}={named} scores no tokens that another method could choose among; use one that does, such as "
            f"{key}=snapkv"
        )
    if scorer_fields(rules):
        raise ConfigError(
            f"{key}={named} chooses among the numbers of a scorer of its own; name that one, such as {key}=snapkv"
        )
    try:
        return Scorer(rules, build_params(rules, values, key))
    except ConfigError as error:
        raise ConfigError(f"{key}={named}: {error}") from None


def scorer_values(value: Any, key: str) -> dict[str, Any]:
    """The values of a scorer's file in conf/method, with its `name`, and over them those that were given with it."""
    given = dict(value) if isinstance(value, Mapping) else {"name": value}
    name, known = given.get("name"), [file.stem for file in METHODS.glob("*.yaml")]
    if not isinstance(name, str):
        raise ConfigError(f"{key}={word(value)} names no method; write {key}=snapkv or {key}={{name:snapkv,window:16}}")
    if name not in known:
        raise unknown_name(key, name, known)
    return values_of(name) | given


def scorer_fields(rules: type[Rules]) -> Collection[str]:
    """Parameters of a method that are scorers."""
    return [name for name, hint in get_type_hints(rules.Params).items() if hint is Scorer]


def values_of(name: str) -> dict[str, Any]:
    """A file of conf/method with what it takes from others, which stand before its own values."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(METHODS / f"{name}.yaml"))  # numbers as Hydra reads them: 1e-4
    bases = [base for base in tree.pop("defaults", []) if base != "_self_"]
    taken: dict[str, Any] = {}
    for base in bases:
        taken |= values_of(base)
    return taken | tree


def convert_to_one(value: Any, hints: Iterable[Any], key: str) -> Any:
    """The first type of a union that fits; the first one's sentence where none does."""
    hints = [hint for hint in hints if hint is not NoneType or value is None]
    if value is None and NoneType in hints:
        return None
    if isinstance(value, str) and not value.strip() and {str, Path} & set(hints):
        raise ConfigError(f"{key} is empty; give a value, or leave {key} out")
    errors: list[ConfigError] = []
    for hint in hints:
        try:
            return convert(value, hint, key)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def expanded(key: str, text: str) -> Path:
    """A path that can be looked for, with its `~` replaced by the home folder."""
    if not text.strip():
        raise ConfigError(f"{key} is empty; give a path, or leave {key} out")
    if any(len(part.encode()) > LONGEST_NAME for part in text.split("/")):
        raise ConfigError(f"{key}={text} is too long; names have at most {LONGEST_NAME} bytes")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{key}={text} begins with the home folder of nobody; write the whole path") from None


def unknown_key(group: str, name: str, allowed: Iterable[str], choice: str = "") -> ConfigError:
    """The error for a misspelt key of a group, or of the top level where `group` is empty."""
    allowed = set(allowed) - {"_target_"}
    if group and not allowed:
        chosen = f"{group}={choice}" if choice else f"the chosen {group}"
        return ConfigError(f"no {group} key {name!r}; {chosen} has no keys to set")
    return unknown_name(f"{group} key" if group else "key", name, allowed)
