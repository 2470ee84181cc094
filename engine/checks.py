"""Checks of settings that many methods have: each raises `ConfigError` with one sentence.

Not here: checks that only one method has, which stand in its `Params`.
"""

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any

from kvbench.engine.budget import show
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape


def one_of(key: str, value: Any, allowed: Collection[Any]) -> Any:
    """The value, where it is one of those that are allowed."""
    if value not in allowed:
        *names, last = [word(name) for name in allowed]
        listed = f"{', '.join(names)} or {last}" if names else last
        raise ConfigError(f"{key}={word(value)} is not allowed; use {listed}")
    return value


def word(value: Any) -> str:
    """A value as the command line writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(word(v) for v in value)}]"
    return str(value)


def gigabytes(n_bytes: float) -> str:
    """Bytes in GB, rounded for a sentence."""
    return f"{n_bytes / 1e9:,.0f} GB" if n_bytes >= 1e10 else f"{n_bytes / 1e9:.3g} GB"


def each_one_of(group: str, params: object, **allowed: Collection[object]) -> None:
    """`one_of` for several fields of a dataclass."""
    for name, values in allowed.items():
        one_of(f"{group}.{name}", getattr(params, name), values)


def whole_number(key: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise ConfigError(f"{key}={value} is out of range; it is a whole number from {lowest}")


def whole_numbers(group: str, params: object, **lowest: int) -> None:
    """`whole_number` for several fields of a dataclass, where they hold numbers: not None, not `auto`."""
    for name, least in lowest.items():
        value = getattr(params, name)
        if isinstance(value, int):
            whole_number(f"{group}.{name}", value, least)


def votes(window: int, kernel: int) -> None:
    """Last queries that vote, and the neighbours that each vote is pooled over."""
    if window < 1:
        raise ConfigError(f"method.window={window} is out of range; it is a number of tokens, at least 1")
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"method.kernel={kernel} has no middle; use an odd number of tokens, 1 for no pooling")


def tokens(key: str, value: int) -> None:
    """A number of tokens."""
    if value < 0:
        raise ConfigError(f"{key}={value} is out of range; it is a number of tokens, 0 or more")


def share(key: str, value: Fraction) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={show(value)} is out of range; it is a share from 0 to 1")


def sizes(group: str, params: Any, most: int, of: str) -> None:
    """Every whole number of a dataclass, and of its lists, is a size or a count: none is above `most`.

    A larger one would have no meaning, and where it is a kernel, a page or a list's length no end either. Seeds and
    tokens' ids are none.
    """
    for field in fields(params):
        value = getattr(params, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            sizes(f"{group}.{field.name}".removesuffix(".params"), value, most, of)
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if isinstance(number, int) and number > most and not field.name.endswith(("seed", "_ids")):
                raise ConfigError(f"{group}.{field.name}={number} is out of range; it is at most {most}, {of}")


def refuse_cap(shape: ModelShape, what: str, instead: str) -> None:
    """Refuse `what` adds up logits of a model that bends them: their sum is no product with a sum."""
    if shape.is_capped:
        raise ConfigError(f"{what}, and the model {shape.name!r} caps its logits, whose sum is another; use {instead}")
