"""From one composed configuration to `Settings`: typed, range-checked, frozen.

Below this file nobody sees a `DictConfig` and nobody looks a parameter up by a string. The classes
of methods and tasks are named here but imported only by `load_class`, which lets torch wait.

Not here: defaults (the YAML files hold them), ranges of a method's or task's own parameters (its
`Params` checks them), and what the command line may say (`evals/overrides.py`).
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from annotated_types import Ge, Gt, Le
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.engine.budget import BudgetRequest, Bytes, exact, parse_bytes, parse_memory
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.declared import (
    Count,
    Filled,
    Index,
    Is,
    Matches,
    PathText,
    Window,
    build,
    hints_of,
    reader,
    same_names,
)
from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.engine.lazy import wait_for_torch
from kvbench.engine.post_processing import Merging, PostProcessing
from kvbench.engine.sampling.spec import Sampling
from kvbench.evals import outside
from kvbench.evals.outside import KINDS
from kvbench.methods.allocator import UNIFORM, Allocator
from kvbench.methods.named import METHODS, scorer_fields, scorer_values, values_of
from kvbench.methods.reuse import Sharing

ARCHITECTURES = Path(__file__).resolve().parents[1] / "conf" / "architecture"
ORDERS = ("drop_first", "quantise_first")  # of a composition; the first is usual
DEVICE = Matches(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", "auto, cpu, cuda or cuda:N, or mps or xpu where torch has one")
# Values that change nothing. A run's identity leaves out the keys that have them, so that a key may be added and every
# run keeps its name.
USUAL: dict[str, dict[str, Any]] = {
    "model": {"check": "auto"},
    "task": {"questions": 1, "mode": None, "feed": "compressed", "budget_base": "context"},
    "method": {"cluster_on": "auto"},
    "run": {
        **{"weights": "trained", "device_map": None, "offset": 0, "cuda_graphs": "auto", "budget_counts": "target"},
        **{"compose": None, "compose_order": ORDERS[0], "memory": None, "prefill": None, "prefill_chunk": None},
        "reuse": None,
        "prefill_evict": False,
        **{"allocator": None, "positions": None, "dropped": None, "merging": {"threshold": 0.0, "share": "1"}},
    },
}
EVICTED_CHUNK = 512  # tokens of a prompt that is read with eviction, where nothing else is given
MADE_OF = {"task": ("params", "data_dir", "seed")}  # what a class is called with


class Memory:
    """`memory`: a share of the full cache's bytes, or bytes."""

    SHARE: ClassVar[Any] = Annotated[
        Fraction, Gt(0), Le(1),
        Is("a share of the full cache's bytes above 0 and at most 1, like 1/8, or bytes, like 4GB"),
    ]  # fmt: skip

    @classmethod
    def from_config(cls, value: Any, key: str) -> Fraction | Bytes:
        found = parse_bytes(value, key) if isinstance(value, bool) else parse_memory(value, key)
        return found if isinstance(found, Bytes) else reader(cls.SHARE)(value, key)


@dataclass(frozen=True)
class ModelSpec:
    """The model before it is loaded; the keys of conf/model/any.yaml."""

    name: Annotated[str, Filled("the name that tables are to show")]
    id: PathText
    revision: str | None
    trust_remote_code: bool
    chat: Literal["auto", "none", "inst"]
    system_prompt: str
    check: Literal["auto", "never"] = "auto"  # compare our attention with transformers' own when it is loaded


@dataclass(frozen=True)
class Choice:
    """A chosen method or task: its name, its class, and its parameters as the YAML has them."""

    group: str  # "method", "task", "prefill" or "logger"
    name: str  # the file in conf/<group>
    target: str  # "kvbench.methods.retrieving.oracle.Oracle"
    params: Mapping[str, Any]


@dataclass(frozen=True)
class RayPool:
    """The pool in which Ray runs shards; the keys of conf/hydra/launcher/ray.yaml."""

    package: ClassVar[str] = "ray"
    address: str | None
    shards: Count | Literal["auto"]
    cpus: Count
    gpus: Annotated[Fraction, Ge(0)] | Literal["auto"]
    retries: Index

    def sized(self, n_gpus: int, device: str, device_map: str | None) -> "RayPool":
        """What `auto` stands for where there are `n_gpus`: one for each shard, or all where a model needs several."""
        gpus, shards = self.gpus, self.shards
        if gpus == "auto":
            one = Fraction(1 if device_map is None else max(1, n_gpus))
            gpus = one if device.startswith("cuda") else Fraction(0)
        if shards == "auto":
            shards = max(1, int(n_gpus / gpus)) if gpus else 2
        return replace(self, gpus=gpus, shards=shards)


@dataclass(frozen=True)
class SlurmPool:
    """The pool in which Slurm runs shards; the keys of conf/hydra/launcher/submitit_slurm.yaml."""

    package: ClassVar[str] = "submitit"
    cluster: Literal["slurm", "local"]
    folder: PathText | None
    shards: Count
    partition: str | None
    account: str | None
    timeout_min: Count
    cpus: Count
    gpus: Index
    mem_gb: Count | None
    retries: Index


Pool = RayPool | SlurmPool
POOLS = {"ray": RayPool, "submitit_slurm": SlurmPool}  # by the file in conf/hydra/launcher


@dataclass(frozen=True)
class GivenPostProcessing:
    """What the keys of a run say of kept keys and values; None: as the method itself has them."""

    positions: Literal["kept", "contiguous"] | None
    dropped: Literal["gone", "merged"] | None
    merging: Merging

    def __post_init__(self) -> None:
        if self.merging != Merging() and self.dropped != "merged":
            raise ConfigError("merging.threshold and merging.share are of dropped=merged; give that, or leave them out")

    def over(self, own: PostProcessing) -> PostProcessing:
        """The method's own, but for what is given."""
        return PostProcessing(self.positions or own.positions, self.dropped or own.dropped, self.merging)

    def identity(self) -> dict[str, Any]:
        merging = {"threshold": self.merging.threshold, "share": exact(self.merging.share)}
        return {"positions": self.positions, "dropped": self.dropped, "merging": merging}


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Keys of conf/config.yaml that a run's settings have as they are."""

    compose_order: Literal["drop_first", "quantise_first"]  # whether the method chooses among exact tokens
    cache: BlockCacheSpec  # of retrieving methods
    seed: Index
    limit: Count | None
    offset: Index
    data_dir: PathText | None
    accesses: bool  # write what was fetched
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: Annotated[str, DEVICE]
    kernels: Literal["auto", "torch"]  # ours, or torch alone; identifies no run, and env.json has it
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None  # accelerate's, among all GPUs
    weights: Literal["trained", "random"]  # random where only time is asked for


@dataclass(frozen=True, kw_only=True)
class Settings(Plain):
    """One run, as the user asked for it."""

    method: Choice
    task: Choice
    model: ModelSpec
    prefill: Choice | None  # None: exact attention
    chunk: int | None  # tokens that a prefill's MLPs read at a time; None: all
    evicts: bool  # whether a method drops tokens of the prompt after each of those chunks
    budget: BudgetRequest
    sampling: Sampling
    compose: Choice | None  # what makes codes of the tokens that the method keeps, or has on the host
    allocator: Allocator | None  # of a scorer's budget; None: as the method itself divides it
    reuse: Sharing | None  # of a fetching method: which layers choose for others; None: each for itself
    post_processing: GivenPostProcessing
    scope: str
    graphs: bool  # whether decode steps on a GPU may be captured
    out: Path | None
    logger: Choice  # where a copy of a finished run goes
    profile: bool  # write where the time went; the key is `trace`
    is_sweep: bool  # then `out` is the parent of the run's folder
    max_variants: int | None  # decoded at once; None: as many as memory holds
    skips_refused: bool  # a cell that cannot be met is left out of the sweep
    pool: Pool | None  # of workers on this or other machines; None: in this process

    def resolved(self) -> dict[str, Any]:
        """What identifies the run, as plain data: hashed for its folder, written to config.yaml."""
        budget = self.budget
        always = {
            "method": identity(self.method),
            "task": identity(self.task),
            "model": unusual("model", asdict(self.model)),
            "ratio": None if budget.ratio is None or budget.memory_alone else exact(budget.ratio),
            "budget": budget.tokens,
            "comm": None if budget.comm is None else exact(budget.comm),
            "compensate": budget.compensate,
            "cache": asdict(self.cache),
            "compression_scope": self.scope,
            "seed": self.seed,
            "limit": self.limit,
            "dtype": self.dtype,
            "device": self.device,
            "data_dir": self.data_dir,
        }
        hardware = {
            "weights": self.weights,
            "offset": self.offset,
            "device_map": self.device_map,
            "cuda_graphs": "auto" if self.graphs else "never",
            "budget_counts": budget.counts or "target",
        }
        more = {
            "compose": self.compose and identity(self.compose),
            "compose_order": self.compose_order,
            "memory": None if budget.memory is None else exact(budget.memory),
            "prefill": self.prefill and identity(self.prefill),
            "prefill_chunk": self.chunk,
            "prefill_evict": self.evicts,
            "allocator": self.allocator and identity_of_allocator(self.allocator),
            "reuse": self.reuse and self.reuse.identity(),
            **self.post_processing.identity(),
        }
        return always | unusual("run", hardware) | self.sampling.identity() | unusual("run", more)


def unusual(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group, less those that change nothing."""
    usual = USUAL.get(group, {})
    return {key: value for key, value in values.items() if key not in usual or value != usual[key]}


def identity(choice: Choice) -> dict[str, Any]:
    """What of a choice identifies a run; of a class from outside the repository its source does too."""
    return {"name": choice.name, "params": unusual(choice.group, choice.params)} | outside.origin(choice.target)


def identity_of_allocator(allocator: Allocator) -> dict[str, Any]:
    """What of an allocator identifies a run."""
    return asdict(allocator) | {"alpha": exact(allocator.alpha)}


@dataclass(frozen=True)
class SweepSpec:
    """How the cells of a sweep are run, and whether one that cannot be met stops the others; changes no result."""

    max_variants: Count | Literal["auto"]
    refused: Literal["stop", "skip"]

    @property
    def most(self) -> int | None:
        """How many variants may be decoded at once; None for `auto`."""
        return self.max_variants if isinstance(self.max_variants, int) else None


@dataclass(frozen=True, kw_only=True)
class Keys(Plain):
    """Everything at the top of conf/config.yaml, groups included, with its type."""

    method: Any
    task: Any
    model: ModelSpec
    prefill: Any
    allocator: Any
    reuse: Any
    logger: Any
    ratio: Annotated[Fraction, Gt(0), Le(1), Is("a share of the prompt above 0 and at most 1")] | None
    budget: Window | None
    budget_counts: Literal["target", "mean", "peak"] | None
    memory: Memory | None
    comm: Annotated[Fraction, Ge(0), Le(1), Is("a share of the key bytes from 0 to 1, like 1/64")] | None
    compensate: bool
    compose: str | None
    positions: Any
    dropped: Any
    merging: Any
    compression_scope: Literal["full_prompt", "context_only"]
    temperature: Any
    top_p: Any
    top_k: Any
    n_answers: Any
    trace: bool
    sweep: SweepSpec
    out: Path | None
    cuda_graphs: Literal["auto", "never"]

    def __post_init__(self) -> None:
        if self.device_map is not None and self.device not in ("auto", "cuda"):
            raise ConfigError(
                f"device={self.device} is one device, and device_map={self.device_map} divides the model among all "
                "GPUs; give one of the two, and choose among GPUs with CUDA_VISIBLE_DEVICES"
            )


def read_key(name: str, value: Any) -> Any:
    """The value of a key at the top of conf/config.yaml, read as there."""
    return reader(hints_of(Keys)[name])(value, name)


def settings(cfg: DictConfig, names: Mapping[str, str], is_sweep: bool = False, launcher: Any = None) -> Settings:
    """`names` says which file of each group was chosen (Hydra's `runtime.choices`).

    `launcher` is the configuration of the chosen one, where `cfg` does not hold it.
    """
    if launcher is None:
        launcher = OmegaConf.select(cfg, "hydra.launcher")
    keys: Keys = build(Keys, plain(cfg), "")
    plain_keys: dict[str, Any] = {field.name: getattr(keys, field.name) for field in fields(Plain)}
    return Settings(
        **plain_keys,
        method=with_scorers(choice("method", names["method"], keys.method)),
        task=choice("task", names["task"], keys.task),
        model=keys.model,
        prefill=prefill(names, keys.prefill),
        chunk=chunk(keys.prefill),
        evicts=evicts(keys.prefill),
        budget=BudgetRequest(
            keys.ratio,
            keys.budget,
            keys.comm,
            keys.compensate,
            counts=keys.budget_counts,
            memory=keys.memory,  # type: ignore[arg-type]
        ),
        sampling=part_of(Sampling, keys),
        compose=composed_with(keys.compose),
        allocator=allocator(keys.allocator),
        reuse=sharing(keys.reuse),
        post_processing=part_of(GivenPostProcessing, keys),
        scope=keys.compression_scope,
        graphs=keys.cuda_graphs == "auto",
        out=keys.out.expanduser() if keys.out else None,
        logger=choice("logger", names.get("logger", "none"), keys.logger),
        profile=keys.trace,
        is_sweep=is_sweep,
        max_variants=keys.sweep.most,
        skips_refused=is_sweep and keys.sweep.refused == "skip",
        pool=pool(names.get("hydra/launcher"), launcher),
    )


def part_of(kind: type, keys: Keys) -> Any:
    """Some of the keys at the top, as a dataclass of their own declares them."""
    return build(kind, {field.name: getattr(keys, field.name) for field in fields(kind)}, "")


def pool(name: str | None, launcher: Any) -> Pool | None:
    """The pool in which the chosen launcher asks samples; None for those that stay in this process."""
    if name not in POOLS:
        return None
    given = {key: value for key, value in launcher.items() if key != "_target_"}
    return build(POOLS[name], given, "hydra.launcher")


def from_words(words: Sequence[str]) -> Settings:
    """The settings of one run's command line, such as `method=snapkv method.window=16 ratio=0.1`."""
    from kvbench.evals.composing import composition
    from kvbench.evals.overrides import CONF, check_overrides

    cfg = composition(CONF, tuple(check_overrides([*words])))
    return settings(cfg, cfg.hydra.runtime.choices)


def load_class(choice: Choice) -> type:
    """The class that a file of conf/ names in `_target_`, or one from outside. torch is loaded when it is used."""
    wait_for_torch()
    if outside.is_target(choice.target):
        found = outside.load(choice.target)
        refuse_signature(choice, found)
        return found
    module, _, name = choice.target.rpartition(".")
    room = KINDS[choice.group].split(".")[:2]
    names = module.split(".")
    if names[:2] != room or not all(map(str.isidentifier, names)):
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
        refuse_signature(choice, found)
        return found
    room = ".".join(module.split(".")[:2])
    raise ConfigError(
        f"{choice.group}._target_={choice.target} is no {name} of {room}; choose a file of conf/{choice.group}"
    )


def refuse_signature(choice: Choice, found: type) -> None:
    """Raise `ConfigError` for a class that cannot be made of what all of its group are made of."""
    if (names := MADE_OF.get(choice.group)) is None:
        return
    try:
        inspect.signature(found).bind(*names)
    except TypeError as error:
        raise ConfigError(
            f"{choice.target} cannot be made ({error}); its __init__ takes ({', '.join(('self', *names))}), as "
            "tasks/base.py says"
        ) from None


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


def with_scorers(chosen: Choice) -> Choice:
    """The method with all values of the scorers that it asks: they identify a run, too."""
    if outside.is_target(chosen.target):
        return chosen
    fields = scorer_fields(load_class(chosen))
    given = {key: value for key, value in chosen.params.items() if key in fields}
    return replace(chosen, params={**chosen.params, **{k: scorer_values(v, f"method.{k}") for k, v in given.items()}})


def allocator(tree: Any) -> Allocator | None:
    """The chosen division of the budget; None for the method's own. A file has the keys that its division reads."""
    if not isinstance(tree, Mapping) or "name" not in tree:
        raise ConfigError("no allocator is chosen; choose a file of conf/allocator with allocator=NAME")
    if tree["name"] == "own":
        same_names("allocator", tree, ["name"])
        return None
    usual = {key: value for key, value in identity_of_allocator(UNIFORM).items() if key != "name"}
    return build(Allocator, usual | dict(tree), "allocator")


def sharing(tree: Any) -> Sharing | None:
    """Which layers choose for others; None where each does for itself. A file has the keys that it reads."""
    if not isinstance(tree, Mapping) or "name" not in tree:
        raise ConfigError("no reuse is chosen; choose a file of conf/reuse with reuse=NAME")
    if tree["name"] == "none":
        same_names("reuse", tree, ["name"])
        return None
    return build(Sharing, vars(Sharing("")) | dict(tree), "reuse")


def composed_with(name: str | None) -> Choice | None:
    """The method that `compose` names, by its file in conf/method; its values are those of the file."""
    if name is None:
        return None
    if name not in (known := [file.stem for file in METHODS.glob("*.yaml")]):
        raise unknown_name("method to compose with", name, known)
    return choice("method", name, values_of(name))


def prefill(names: Mapping[str, str], tree: Any) -> Choice | None:
    """The chosen prefill; None for the exact one, which has no class and no parameters."""
    if isinstance(tree, Mapping):
        tree = {key: value for key, value in tree.items() if key not in ("chunk", "evict")}
        if tree.get("_target_", "") is None:
            same_names("prefill", tree, ["_target_"])
            return None
    return choice("prefill", names.get("prefill", ""), tree)


def chunk(tree: Any) -> int | None:
    """How many tokens a prefill's MLPs read at a time, whichever prefill is chosen."""
    given = tree.get("chunk") if isinstance(tree, Mapping) else None
    n = reader(Count | None)(given, "prefill.chunk")
    return EVICTED_CHUNK if n is None and evicts(tree) else n


def evicts(tree: Any) -> bool:
    """Whether a method drops tokens of the prompt after each chunk."""
    given = tree.get("evict", False) if isinstance(tree, Mapping) else False
    return reader(bool)(given, "prefill.evict")


# --- what the YAML files call -----------------------------------------------------------------


def unless(given: Any, default: Any) -> Any:
    """`${unless:${budget},0.2}`: a default that steps back where the other key is given."""
    return default if given is None else None


def default_comm(*, _root_: DictConfig) -> str | None:
    """`${default_comm:}`: 1/64; off with `memory`; 0 where prompt and answer are compressed together."""
    if compresses_answers(f"{OmegaConf.select(_root_, 'method._target_')}"):
        return "0"
    return "1/64" if OmegaConf.select(_root_, "memory") is None else None


def compresses_answers(target: str) -> bool:
    """Whether the class is of methods that cut while they answer, whichever file it is in."""
    try:
        return load_class(Choice("method", "", target, {})).traits.of_answers
    except ConfigError:
        return False  # no class: `of_kind` refuses it by name


def architecture(spec: ModelSpec) -> dict[str, Any] | None:
    """A model's file in conf/architecture."""
    names = (spec.name, spec.name.removesuffix("-instruct"))
    file = next((path for name in names if (path := ARCHITECTURES / f"{name}.yaml").is_file()), None)
    return None if file is None else yaml.safe_load(file.read_text())


def model_name(model_id: str) -> str:
    """`${model_name:${.id}}`: the last part of a hub name or path."""
    return Path(model_id).name.removesuffix(".gguf").lower()


OmegaConf.register_new_resolver("unless", unless, replace=True)
OmegaConf.register_new_resolver("default_comm", default_comm, replace=True)
OmegaConf.register_new_resolver("model_name", model_name, replace=True)
