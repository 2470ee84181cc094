"""From one composed configuration to `Settings`: typed, range-checked, frozen.

Below this file nobody sees a `DictConfig` and nobody looks a parameter up by a string. The classes
of methods and tasks are named here but imported only by `load_class`, since they import torch.

Not here: defaults (the YAML files hold them), ranges of a method's or task's own parameters (its
`Params` checks them), and what the command line may say (`evals/overrides.py`).
"""

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.budget import BudgetRequest, parse_fraction, show
from engine.caches.blocks import BlockCacheSpec
from engine.checks import whole_number
from engine.errors import ConfigError
from evals import outside
from evals.overrides import expanded, unknown_key
from evals.tasks.prompt import CHATS, SCOPES

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
LARGEST = 2**63 - 1  # what generators of random numbers and tables of results can hold
PATHS = ("data_dir", "model.id", "task.path", "hydra.launcher.folder")  # kept as they are given
KINDS = {  # what a group's classes are, and the package that they are taken from
    "method": "methods.base.SelectiveAttention",
    "task": "evals.tasks.base.Task",
    "prefill": "engine.sparse.VerticalSlash",
    "logger": "evals.logger.Logger",
}
KEYS = (  # everything at the top of conf/config.yaml, groups included
    *("method", "task", "model", "prefill", "ratio", "budget", "comm", "compensate", "cache"),
    *("compression_scope", "seed", "limit", "dtype", "device", "weights", "data_dir"),
    *("out", "trace", "sweep", "accesses", "logger"),
)


@dataclass(frozen=True)
class ModelSpec:
    """Which model, before it is loaded; the keys of conf/model/any.yaml."""

    name: str
    id: str
    revision: str | None
    trust_remote_code: bool
    chat: str
    system_prompt: str

    def __post_init__(self) -> None:
        one_of("model.chat", self.chat, CHATS)
        if not self.name.strip():
            raise ConfigError("model.name is empty; give the name that tables are to show")


@dataclass(frozen=True)
class Choice:
    """A chosen method or task: its name, its class, and its parameters as the YAML has them."""

    group: str  # "method", "task", "prefill" or "logger"
    name: str  # the file in conf/<group>
    target: str  # "methods.retrieving.oracle.Oracle"
    params: Mapping[str, Any]


@dataclass(frozen=True)
class RayPool:
    """Where Ray runs shards; the keys of conf/hydra/launcher/ray.yaml."""

    address: str | None
    shards: int
    cpus: int
    gpus: Fraction
    retries: int

    def __post_init__(self) -> None:
        at_least(1, "hydra.launcher.shards", self.shards)
        at_least(1, "hydra.launcher.cpus", self.cpus)
        at_least(0, "hydra.launcher.gpus", self.gpus)
        at_least(0, "hydra.launcher.retries", self.retries)


@dataclass(frozen=True)
class SlurmPool:
    """Where Slurm runs shards; the keys of conf/hydra/launcher/submitit_slurm.yaml."""

    cluster: str
    folder: str | None
    shards: int
    partition: str | None
    account: str | None
    timeout_min: int
    cpus: int
    gpus: int
    mem_gb: int | None
    retries: int

    def __post_init__(self) -> None:
        one_of("hydra.launcher.cluster", self.cluster, ("slurm", "local"))
        at_least(1, "hydra.launcher.shards", self.shards)
        at_least(1, "hydra.launcher.timeout_min", self.timeout_min)
        at_least(1, "hydra.launcher.cpus", self.cpus)
        at_least(0, "hydra.launcher.gpus", self.gpus)
        at_least(1, "hydra.launcher.mem_gb", self.mem_gb)
        at_least(0, "hydra.launcher.retries", self.retries)


Pool = RayPool | SlurmPool
POOLS = {"ray": RayPool, "submitit_slurm": SlurmPool}  # by the file in conf/hydra/launcher


@dataclass(frozen=True)
class Settings:
    """One run, as the user asked for it."""

    method: Choice
    task: Choice
    model: ModelSpec
    prefill: Choice | None  # None: exact attention
    budget: BudgetRequest
    cache: BlockCacheSpec  # of retrieving methods
    scope: str
    seed: int
    limit: int | None
    dtype: str
    device: str
    weights: str  # "trained", or "random" where only time is asked for
    data_dir: str | None
    out: Path | None
    logger: Choice  # where a copy of a finished run goes
    profile: bool  # write where the time went; the key is `trace`
    accesses: bool  # write what was fetched
    is_sweep: bool  # then `out` is the parent of the run's folder
    max_variants: int | None  # decoded at once; None: as many as memory holds
    pool: Pool | None  # of workers on this or other machines; None: in this process

    def resolved(self) -> dict[str, Any]:
        """What identifies the run, as plain data: hashed for its folder, written to config.yaml."""
        ratio, prefill = self.budget.ratio, self.prefill
        return {
            "method": identity(self.method),
            "task": identity(self.task),
            "model": asdict(self.model),
            "ratio": None if ratio is None else show(ratio),
            "budget": self.budget.tokens,
            "comm": show(self.budget.comm),
            "compensate": self.budget.compensate,
            "cache": asdict(self.cache),
            "compression_scope": self.scope,
            "seed": self.seed,
            "limit": self.limit,
            "dtype": self.dtype,
            "device": self.device,
            "data_dir": self.data_dir,
        } | {
            # Only where they are not what all runs had before there was a choice.
            **({} if self.weights == "trained" else {"weights": self.weights}),
            **({} if prefill is None else {"prefill": identity(prefill)}),
        }


def identity(choice: Choice) -> dict[str, Any]:
    """What of a choice identifies a run; of a file outside the repository its content does too."""
    known = {"name": choice.name, "params": dict(choice.params)}
    return known | ({"digest": choice.target.rpartition("@")[2]} if outside.is_target(choice.target) else {})


def settings(cfg: DictConfig, names: Mapping[str, str], is_sweep: bool = False, launcher: Any = None) -> Settings:
    """`names` says which file of each group was chosen (Hydra's `runtime.choices`).

    `launcher` is the configuration of the chosen one, where `cfg` does not hold it.
    """
    if launcher is None:
        launcher = OmegaConf.select(cfg, "hydra.launcher")
    tree = plain(cfg)
    same_names("", tree, KEYS)
    out = convert(tree["out"], Path | None, "out")
    return Settings(
        method=choice("method", names["method"], tree["method"]),
        task=choice("task", names["task"], tree["task"]),
        model=build(ModelSpec, tree["model"], "model"),
        prefill=prefill(names, tree["prefill"]),
        budget=BudgetRequest(
            ratio=convert(tree["ratio"], Fraction | None, "ratio"),
            tokens=convert(tree["budget"], int | None, "budget"),
            comm=convert(tree["comm"], Fraction, "comm"),
            compensate=convert(tree["compensate"], bool, "compensate"),
        ),
        cache=build(BlockCacheSpec, tree["cache"], "cache"),
        scope=one_of("compression_scope", tree["compression_scope"], SCOPES),
        seed=at_least(0, "seed", convert(tree["seed"], int, "seed")),
        limit=at_least(1, "limit", convert(tree["limit"], int | None, "limit")),
        dtype=one_of("dtype", tree["dtype"], DTYPES),
        device=device(tree["device"]),
        weights=one_of("weights", tree["weights"], ("trained", "random")),
        data_dir=convert(tree["data_dir"], str | None, "data_dir"),
        out=out.expanduser() if out else None,
        logger=choice("logger", names.get("logger", "none"), tree["logger"]),
        profile=convert(tree["trace"], bool, "trace"),
        accesses=convert(tree["accesses"], bool, "accesses"),
        is_sweep=is_sweep,
        max_variants=max_variants(tree["sweep"]),
        pool=pool(names.get("hydra/launcher"), launcher),
    )


@dataclass(frozen=True)
class SweepSpec:
    """How the cells of a sweep are run; changes no result."""

    max_variants: int | str

    def __post_init__(self) -> None:
        if self.max_variants != "auto" and (isinstance(self.max_variants, str) or self.max_variants < 1):
            raise ConfigError(
                f"sweep.max_variants={self.max_variants} is not allowed; use auto or a whole number from 1"
            )


def max_variants(tree: Any) -> int | None:
    """How many variants may be decoded at once; None for `auto`."""
    spec = build(SweepSpec, tree, "sweep")
    return None if spec.max_variants == "auto" else spec.max_variants


def pool(name: str | None, launcher: Any) -> Pool | None:
    """Where the chosen launcher asks samples; None for those that stay in this process."""
    if name not in POOLS:
        return None
    given = {key: value for key, value in launcher.items() if key != "_target_"}
    return build(POOLS[name], given, "hydra.launcher")


def load_class(choice: Choice) -> type:
    """The class that a file of conf/ names in `_target_`, or a file of the user's. Imports its module, and so torch."""
    if outside.is_target(choice.target):
        return outside.load(choice.target)
    module, _, name = choice.target.rpartition(".")
    package = KINDS[choice.group].partition(".")[0]
    names = module.split(".")
    if names[0] != package or not all(map(str.isidentifier, names)):
        return of_kind(choice, None)  # whatever else could be imported is not even that
    try:
        return of_kind(choice, getattr(importlib.import_module(module), name, None))
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or ""):
            raise  # the module is there; something that it needs is not
        return of_kind(choice, None)


def of_kind(choice: Choice, found: Any) -> type:
    """`found`, where it is a class of the kind that the choice's group is made of; else `ConfigError`."""
    module, _, name = KINDS[choice.group].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    if inspect.isclass(found) and issubclass(found, kind) and not inspect.isabstract(found):
        return found
    package = module.partition(".")[0]
    raise ConfigError(
        f"{choice.group}._target_={choice.target} is no {name} of {package}/; choose a file of conf/{choice.group}"
    )


def build_params(cls: type, params: Mapping[str, Any], group: str) -> Any:
    """`cls.Params` from the values in the YAML; `group` ("method" or "task") is for messages."""
    return build(cls.Params, params, group)  # type: ignore[attr-defined]


# --- plain values to typed ones ---------------------------------------------------------------


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as dicts, lists and numbers, every interpolation resolved."""
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    refuse_missing(OmegaConf.to_container(cfg))
    try:
        return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key} cannot be read: {reason}") from None


def refuse_missing(tree: Any, prefix: str = "") -> None:
    """Find `???` before anything is interpolated: other keys may be derived from it."""
    for key, value in tree.items():
        if isinstance(value, dict):
            refuse_missing(value, f"{prefix}{key}.")
        elif value == "???":
            raise ConfigError(f"{prefix}{key} is not given; add {prefix}{key}=… to the command")


def choice(group: str, name: str, tree: Any) -> Choice:
    """Split a group's tree into its class and its parameters."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("_target_"), str):
        raise ConfigError(f"no {group} is chosen; choose a file of conf/{group} with {group}=NAME")
    return Choice(group, name, tree["_target_"], {k: v for k, v in tree.items() if k != "_target_"})


def prefill(names: Mapping[str, str], tree: Any) -> Choice | None:
    """The chosen prefill; None for the exact one, which has no class and no parameters."""
    if isinstance(tree, Mapping) and tree.get("_target_", "") is None:
        same_names("prefill", tree, ["_target_"])
        return None
    return choice("prefill", names.get("prefill", ""), tree)


def build(cls: type, tree: Any, group: str) -> Any:
    """A dataclass from a mapping with exactly its fields, each value as the field's type."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{group}={word(tree)} is a group of keys; set them like {group}.key=value")
    hints = get_type_hints(cls)
    same_names(group, tree, [field.name for field in fields(cls)])
    typed = {name: convert(value, hints[name], f"{group}.{name}") for name, value in tree.items()}
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


def one_of(key: str, value: Any, allowed: Iterable[Any]) -> Any:
    if value not in allowed:
        *names, last = [word(name) for name in allowed]
        listed = f"{', '.join(names)} or {last}" if names else last
        raise ConfigError(f"{key}={word(value)} is not allowed; use {listed}")
    return value


def at_least(lowest: int, key: str, value: int | Fraction | None) -> Any:
    if isinstance(value, int):
        whole_number(key, value, lowest)
    return value


def device(value: Any) -> str:
    if not isinstance(value, str) or not DEVICE.fullmatch(value):
        raise ConfigError(f"device={word(value)} is not allowed; use auto, cpu, cuda or cuda:N")
    return value


def word(value: Any) -> str:
    """A value as the command line writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(word(v) for v in value)}]"
    return str(value)


# --- what the YAML files call -----------------------------------------------------------------


def unless(given: Any, default: Any) -> Any:
    """`${unless:${budget},0.2}`: a default that steps back where the other key is given."""
    return default if given is None else None


def model_name(model_id: str) -> str:
    """`${model_name:${.id}}`: the last part of a hub name or path."""
    return Path(model_id).name.removesuffix(".gguf").lower()


OmegaConf.register_new_resolver("unless", unless, replace=True)
OmegaConf.register_new_resolver("model_name", model_name, replace=True)
