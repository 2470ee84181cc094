"""Fields of a dataclass as declarations: a value is read by the type, the range and the choices that a field has.

    window: Annotated[int, Ge(1)]                      a whole number from 1
    agg: Literal["max", "sum"]                         one of these
    m: Count | Literal["auto"]                         a whole number from 1, or auto
    datasets: Annotated[tuple[str, ...], Some(NAMES)]  one or more of these, each once

`build` makes a dataclass of a mapping, `reader` reads one value, `check` looks at a dataclass that is made already. All
refuse with `ConfigError`: one sentence with the key, the value and what is allowed. `words` says what is allowed, for
lists of keys as well. Ranges are those of the package annotated-types. A type with a classmethod `from_config(value,
key)` reads itself, and says in its `words` what.

A rule between two fields, or of a field and a model, is no declaration: it stands in `__post_init__`, or in the method.

Not here: which keys there are (`evals/settings.py`, each `Params`), the words of a command line (`evals/overrides.py`).
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from inspect import get_annotations
from math import isfinite
from operator import ge, gt, le, lt
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from kvbench.engine.budget import Bytes, parse_bytes, parse_fraction, show
from kvbench.engine.errors import ConfigError, unknown_name

FEW = 4  # choices that are taken in at a glance
MANY = 30  # names that a sentence can list
LONGEST_NAME = 255  # bytes, which no file system exceeds
LARGEST_FLOAT = sys.float_info.max
LARGEST = 2**63 - 1  # what generators of random numbers and tables of results can hold

Reader = Callable[[Any, str], Any]  # a value and its key: the value as a type, or ConfigError


class Refused(ConfigError):
    """A value that a type does not read: `is_kind` where it is of the right kind, `is_range` where out of its range."""

    def __init__(self, sentence: str, is_kind: bool, is_range: bool = False) -> None:
        super().__init__(sentence)
        self.is_kind, self.is_range = is_kind, is_range


# --- what a field can say ------------------------------------------------------------------------


@dataclass(frozen=True)
class Is:
    """What a value is, in words of its own: "a number of tokens, at least 1". Follows "it is" or "use"."""

    words: str


@dataclass(frozen=True)
class Odd:
    """A number that has a middle."""

    def holds(self, value: int) -> bool:
        return value % 2 == 1

    def refusal(self, key: str, value: Any) -> str:
        return f"{key}={word(value)} has no middle; use an odd number of tokens, 1 for no pooling"


@dataclass(frozen=True)
class Whole:
    """A share where it is below 1, else a whole number."""

    def holds(self, value: Fraction) -> bool:
        return value < 1 or value.denominator == 1


@dataclass(frozen=True)
class Filled:
    """A text with more than blanks, or a list that has something."""

    words: str  # what to give

    def holds(self, value: str | tuple[Any, ...]) -> bool:
        return bool(value.strip() if isinstance(value, str) else value)

    def refusal(self, key: str, value: Any) -> str:
        return f"{key} is empty; give {self.words}"


@dataclass(frozen=True)
class Named:
    """A name out of many."""

    names: tuple[str, ...]

    def holds(self, value: str) -> bool:
        return value in self.names

    def refusal(self, key: str, value: Any) -> ConfigError:
        return unknown_name(key, str(value), self.names)


@dataclass(frozen=True)
class Some:
    """One or more of what is known, each once; or the name of a list of them."""

    known: tuple[Any, ...]
    lists: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in self.known or value in self.lists
        return bool(value) and {*value} <= {*self.known} and len({*value}) == len(value)

    def refusal(self, key: str, value: Any) -> str | ConfigError:
        given = (value,) if isinstance(value, str) else value
        if (strange := next((one for one in given if one not in self.known), None)) is not None:
            return unknown_name(key, word(strange), [word(one) for one in (*self.known, *self.lists)])
        known = self.known if len(self.known) <= MANY else (*self.known[:3], "others")
        return f"{key}={word(value)} {twice_or_none(value)}; give some of {listed(known)}, each once"


@dataclass(frozen=True)
class Once:
    """A list that has something, and nothing twice."""

    def holds(self, value: Sequence[Any]) -> bool:
        return bool(value) and len({*value}) == len(value)

    def refusal(self, key: str, value: Any) -> str:
        return f"{key}={word(value)} {twice_or_none(value)}; give one or more, each once"


@dataclass(frozen=True)
class Matches:
    """A text of a form, and the words for it."""

    form: str
    words: str

    def holds(self, value: str) -> bool:
        return re.fullmatch(self.form, value) is not None

    def refusal(self, key: str, value: Any) -> str:
        return f"{key}={word(value)} is not allowed; use {self.words}"


@dataclass(frozen=True)
class IsPath:
    """A text that is a path, and is kept as it is given."""

    def holds(self, value: str) -> bool:
        try:
            return bool(expanded("", value))
        except ConfigError:
            return False

    def refusal(self, key: str, value: str) -> str:
        try:
            return str(expanded(key, value))
        except ConfigError as error:
            return str(error)


Count = Annotated[int, Ge(1)]
Index = Annotated[int, Ge(0)]
Tokens = Annotated[int, Ge(0), Is("a number of tokens, 0 or more")]
Window = Annotated[int, Ge(1), Is("a number of tokens, at least 1")]
Kernel = Annotated[int, Ge(1), Odd()]
Share = Annotated[Fraction, Ge(0), Le(1)]
Part = Annotated[Fraction, Gt(0), Le(1)]  # a share that is something
PathText = Annotated[str, IsPath()]

BOUNDS: dict[type, tuple[Callable[[Any, Any], bool], str]] = {
    Ge: (ge, "ge"),
    Gt: (gt, "gt"),
    Le: (le, "le"),
    Lt: (lt, "lt"),
}


# --- reading -------------------------------------------------------------------------------------


def build_params(cls: type, params: Mapping[str, Any], group: str) -> Any:
    """`cls.Params` from the values in the YAML; `group` ("method" or "task") is for messages."""
    return build(cls.Params, params, group)  # type: ignore[attr-defined]


def build(cls: type, tree: Any, group: str) -> Any:
    """A dataclass from a mapping with exactly its fields, each value as the field declares it."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{group}={word(tree)} is a group of keys; set them like {group}.key=value")
    same_names(group, tree, [field.name for field in fields(cls)])
    at, readers = f"{group}." if group else "", readers_of(cls)
    typed = {name: readers[name](value, f"{at}{name}") for name, value in tree.items()}
    return cls(**typed)


def check(made: Any, group: str) -> Any:
    """A dataclass that is made already, where its values are as its fields declare them."""
    readers = readers_of(type(made))
    for field in fields(made):
        if not is_dataclass(value := getattr(made, field.name)) and not isinstance(value, Path | Bytes):
            readers[field.name](value, f"{group}.{field.name}" if group else field.name)
    return made


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The types of a class's fields, with what they say of ranges."""
    is_plain = not any(isinstance(hint, str) for kind in cls.__mro__[:-1] for hint in get_annotations(kind).values())
    if is_plain:  # which is ten times as fast
        return {name: hint for kind in reversed(cls.__mro__[:-1]) for name, hint in get_annotations(kind).items()}
    return get_type_hints(cls, include_extras=True)


@cache
def readers_of(cls: type, exact: bool = False) -> dict[str, Reader]:
    """A reader of each field. Kept by class, not by type: `Literal["a", "b"]` is equal to `Literal["b", "a"]`."""
    return {name: reader(hint, exact) for name, hint in hints_of(cls).items()}


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


def unknown_key(group: str, name: str, allowed: Iterable[str], choice: str = "") -> ConfigError:
    """The error for a misspelt key of a group, or of the top level where `group` is empty."""
    allowed = set(allowed) - {"_target_"}
    if group and not allowed:
        chosen = f"{group}={choice}" if choice else f"the chosen {group}"
        return ConfigError(f"no {group} key {name!r}; {chosen} has no keys to set")
    return unknown_name(f"{group} key" if group else "key", name, allowed)


def reader(hint: Any, exact: bool = False) -> Reader:
    """What reads values of a type, where that loses nothing; `exact`: of JSON, where nothing is converted."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return read_plain if exact else lambda value, key: value
    if origin is Annotated:
        return declared_reader(hint, exact)
    if origin in (Union, UnionType):
        return union_reader(hint, exact)
    if origin is Literal:
        return lambda value, key: one_of(key, value, args)
    if origin in (tuple, list):
        return list_reader(hint, exact)
    if origin is dict:
        return dict_reader(hint, exact)
    if hasattr(hint, "from_config"):
        return hint.from_config
    if isinstance(hint, type) and is_dataclass(hint) and hint is not Bytes:
        return lambda value, key: build(hint, value, key)
    if (convert := SCALARS.get(hint)) is not None:
        if exact and hint in (bool, str):  # most values of a run's files
            return lambda value, key: value if type(value) is hint else read_scalar(hint, convert, value, key, exact)
        if exact and hint is float:
            return lambda value, key: (
                value if type(value) is float and isfinite(value) else read_scalar(hint, convert, value, key, exact)
            )
        return lambda value, key: read_scalar(hint, convert, value, key, exact)
    return lambda value, key: refuse_type(hint, key)


def read_scalar(hint: Any, convert: Callable[[Any, str, bool], Any], value: Any, key: str, exact: bool) -> Any:
    found = convert(value, key, exact)
    if found is None:
        raise Refused(f"{key}={word(value)} is not {KINDS[hint]}", is_kind=False)
    return found


def as_bool(value: Any, key: str, exact: bool) -> bool | None:
    return value if isinstance(value, bool) else None


def as_int(value: Any, key: str, exact: bool) -> int | None:
    if isinstance(value, float) and value.is_integer() and not exact:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if abs(value) > LARGEST:
        raise Refused(f"{key}={word(value)} is out of range; it is at most {LARGEST}", is_kind=True)
    return value


def as_float(value: Any, key: str, exact: bool) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not abs(value) <= LARGEST_FLOAT:  # which NaN is not, and a whole number may not be
        raise Refused(f"{key}={word(value)} is not a finite number; give one", is_kind=True)
    return value if exact else float(value)


def as_fraction(value: Any, key: str, exact: bool) -> Fraction | None:
    is_read = isinstance(value, int | float | str | Fraction) and not isinstance(value, bool)
    return parse_fraction(value, key) if is_read else None


def as_text(value: Any, key: str, exact: bool) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and not exact:
        return str(value)
    return value if isinstance(value, str) else None


def as_path(value: Any, key: str, exact: bool) -> Path | None:
    text = as_text(value, key, exact)
    if text is None:
        return None
    expanded(key, text)
    return Path(text)


SCALARS: dict[Any, Callable[[Any, str, bool], Any]] = {
    bool: as_bool,
    int: as_int,
    float: as_float,
    Fraction: as_fraction,
    str: as_text,
    Path: as_path,
    Bytes: lambda value, key, exact: parse_bytes(value, key),
    dict: lambda value, key, exact: value if isinstance(value, dict) else None,
    NoneType: lambda value, key, exact: None,  # unions ask for null themselves
}
KINDS = {
    dict: "an object",
    bool: "true or false", int: "a whole number", float: "a number", Fraction: "a number", str: "a text",
    Path: "a text", Bytes: "bytes, like 4GB", NoneType: "null",
}  # fmt: skip


def refuse_type(hint: Any, key: str) -> None:
    raise ConfigError(
        f"{key} is declared as {hint}, which no value can be given for; use bool, int, float, str, Fraction, Path, "
        "Literal, or a tuple of these"
    )


def read_plain(value: Any, key: str) -> Any:
    if not is_plain(value):
        raise Refused(f"{key}={value!r:.80} is no JSON value", is_kind=False)
    return value


def is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    if value is None or isinstance(value, str | int):
        return True
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, list):
        return all(map(is_plain, cast(list[Any], value)))
    items = cast(dict[Any, Any], value) if isinstance(value, dict) else {None: None}
    return all(isinstance(key, str) for key in items) and all(map(is_plain, items.values()))


def declared_reader(hint: Any, exact: bool) -> Reader:
    """Of a type with what a field says of it; null, and words in place of a number, are of no range."""
    base, *said = get_args(hint)
    read = reader(base, exact)
    tests: list[tuple[Callable[[Any], bool], Any]] = []
    for one in said:
        if type(one) in BOUNDS:
            compare, name = BOUNDS[type(one)]
            bound = getattr(one, name)
            tests.append((lambda value, compare=compare, bound=bound: compare(value, bound), one))
        elif hasattr(one, "holds"):
            tests.append((one.holds, one))

    def checked(value: Any, key: str) -> Any:
        found = read(value, key)
        if found is None:
            return None
        for holds, one in tests:
            if type(one) in BOUNDS and isinstance(found, str | tuple):
                continue
            if not holds(found):
                if hasattr(one, "refusal"):
                    raise Refused(str(one.refusal(key, found)), is_kind=True)
                raise Refused(out_of_range(key, value, hint), is_kind=True, is_range=True)
        return found

    return checked if tests else read


def union_reader(hint: Any, exact: bool) -> Reader:
    """The first type of a union that fits; where none does, the sentence of one that is of the value's kind."""
    every = get_args(hint)
    readers = [(reader(one, exact), base_of(one) in (str, Path)) for one in every if one is not NoneType]
    takes_none, is_text = NoneType in every, any(is_text for _, is_text in readers)

    def one(value: Any, key: str) -> Any:
        if value is None and takes_none:
            return None
        if is_text and not exact and isinstance(value, str) and not value.strip():
            raise ConfigError(f"{key} is empty; give a value, or leave {key} out")
        errors: list[ConfigError] = []
        for read, of_text in readers:
            if of_text and any(isinstance(error, Refused) and error.is_range for error in errors):
                continue  # a number out of its range is not meant as a text
            try:
                return read(value, key)
            except ConfigError as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        near = next((error for error in errors if isinstance(error, Refused) and error.is_kind), None)
        if near is not None and near.is_range and not isinstance(value, list | tuple):
            raise Refused(out_of_range(key, value, hint), is_kind=True)
        if near is None and isinstance(value, str) and {*map(base_of, every)} & {int, float, Fraction}:
            raise ConfigError(f"{key}={word(value)} is not a number; use {words(hint)}")
        raise near or ConfigError(f"{key}={word(value)} is not allowed; use {words(hint)}")

    return one


def base_of(hint: Any) -> Any:
    """The type that a declaration is of."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def list_reader(hint: Any, exact: bool) -> Reader:
    args = get_args(hint)
    has_any_length = get_origin(hint) is list or args[-1] is Ellipsis
    readers = [reader(one, exact) for one in args if one is not Ellipsis]

    def each(value: Any, key: str) -> Any:
        if not isinstance(value, list if exact else list | tuple):
            raise Refused(f"{key}={word(value)} is not a list; write {key}=[{word(value)}]", is_kind=False)
        if not has_any_length and len(value) != len(args):
            raise Refused(f"{key}={word(value)} has {len(value)} elements; give {len(args)}", is_kind=True)
        every = readers * len(value) if has_any_length else readers
        found = [read(one, key) for read, one in zip(every, value, strict=True)]
        return found if exact else tuple(found)

    return each


def dict_reader(hint: Any, exact: bool) -> Reader:
    """Of an object of JSON, which stays as it is."""
    read = reader(get_args(hint)[1], exact)

    def each(value: Any, key: str) -> Any:
        if not isinstance(value, dict):
            raise Refused(f"{key}={word(value)} is not an object", is_kind=False)
        for name, one in cast(dict[Any, Any], value).items():
            if not isinstance(name, str):
                raise Refused(f"{key} has the key {name}, which is not a text", is_kind=False)
            read(one, key)
        return value

    return each


# --- sentences -----------------------------------------------------------------------------------


def one_of(key: str, value: Any, allowed: Collection[Any]) -> Any:
    """The value, where it is one of those that are allowed."""
    if any(type(value) is type(one) and value == one for one in allowed):
        return value
    if len(allowed) > MANY:
        raise Refused(str(unknown_name(key, word(value), map(word, allowed))), is_kind=False)
    near = get_close_matches(word(value), map(word, allowed), n=1) if len(allowed) > FEW else []
    hint = f"did you mean {near[0]}? use" if near else "use"
    raise Refused(f"{key}={word(value)} is not allowed; {hint} {listed(allowed)}", is_kind=False)


def out_of_range(key: str, value: Any, hint: Any) -> str:
    return f"{key}={word(value)} is out of range; it is {words(hint)}"


def listed(values: Iterable[Any]) -> str:
    """Values for a sentence: a, b or c."""
    *names, last = [word(value) for value in values]
    return f"{', '.join(names)} or {last}" if names else last


def twice_or_none(value: Collection[Any]) -> str:
    return "has something twice" if value else "is empty"


def words(hint: Any) -> str:
    """What a type reads, for a sentence or a list of keys: "a whole number from 1, or auto"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return declared_words(*args)
    if origin in (Union, UnionType):
        every = [words(one) for one in args if one is not NoneType]
        return ", or ".join(dict.fromkeys(every))
    if origin is Literal:
        return listed(args)
    if origin in (tuple, list):
        each = words(args[0])
        return f"a list, each {each}" if len({*args} - {Ellipsis}) == 1 else "a list"
    return KINDS.get(hint, getattr(hint, "words", getattr(hint, "__name__", str(hint))))


def declared_words(base: Any, *said: Any) -> str:
    if own := next((one.words for one in said if isinstance(one, Is | Matches)), None):
        return own
    if of_names := next((one for one in said if isinstance(one, Named | Some)), None):
        known = of_names.names if isinstance(of_names, Named) else (*of_names.lists, *of_names.known)
        return listed(known) if len(known) <= MANY else f"one of {len(known)} names"
    bounds = {type(one): getattr(one, BOUNDS[type(one)][1]) for one in said if type(one) in BOUNDS}
    low = f" from {word(bounds[Ge])}" if Ge in bounds else f" above {word(bounds[Gt])}" if Gt in bounds else ""
    high = f" to {word(bounds[Le])}" if Le in bounds else f" to below {word(bounds[Lt])}" if Lt in bounds else ""
    if Gt in bounds and Le in bounds:
        high = f" and at most {word(bounds[Le])}"
    if high and not low:
        high = f" of at most {word(bounds[Le])}" if Le in bounds else f" below {word(bounds[Lt])}"
    is_share = base is Fraction and bounds.get(Le, bounds.get(Lt)) == 1 and bool(low)
    odd = ", odd" if any(isinstance(one, Odd) for one in said) else ""
    return f"{'a share' if is_share else words(base)}{low}{high}{odd}"


def word(value: Any) -> str:
    """A value as the command line writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(word(v) for v in value)}]"
    return show(value) if isinstance(value, Fraction) else str(value)


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
