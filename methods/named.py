"""A method by its name in conf/method: the values of its file, and a scorer that another method's parameter names.

Not here: which methods a command line may name (`evals/overrides.py`), what is done with a scorer (`methods/over.py`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf

from kvbench.engine.declared import build_params, hints_of, word
from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.methods.rules import Rules

METHODS = Path(__file__).resolve().parents[1] / "conf" / "method"


@dataclass(frozen=True)
class Scorer:
    """A method that tells another one what tokens are worth, with its own parameters (`methods/over.py`).

    A field of `Params` that is one is given as a name of conf/method, or as its name and values that differ there.
    """

    words: ClassVar[str] = "a method that scores tokens"

    rules: type[Rules]
    params: Any

    @classmethod
    def from_config(cls, value: Any, key: str) -> "Scorer":
        return scorer(value, key)


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
    return [name for name, hint in hints_of(rules.Params).items() if hint is Scorer]


def values_of(name: str) -> dict[str, Any]:
    """A file of conf/method with what it takes from others, which stand before its own values."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(METHODS / f"{name}.yaml"))  # numbers as Hydra reads them: 1e-4
    bases = [base for base in tree.pop("defaults", []) if base != "_self_"]
    taken: dict[str, Any] = {}
    for base in bases:
        taken |= values_of(base)
    return taken | tree
