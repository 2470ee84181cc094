"""A run's configuration as the settings that it was asked with: `Settings.resolved` read backwards.

It is what a stranger wrote, so each part is built by the checks that a command line goes through, and the settings must
say the same configuration again: nothing in it is overlooked.

Not here: whatever is of a package, which is not imported; a method's own file is where `methods` has it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.declared import build
from kvbench.engine.errors import ConfigError
from kvbench.engine.sampling.spec import Sampling
from kvbench.evals import outside
from kvbench.evals.overrides import CONF
from kvbench.evals.settings import USUAL, Choice, GivenPostProcessing, ModelSpec, Settings, read_key
from kvbench.methods.allocator import Allocator
from kvbench.methods.reuse import Sharing

VERSIONS = (  # of what answers depend on, which a configuration has besides the settings
    *("model_digest", "task_version", "method_version", "data_digest", "method_data_digest", "prefill_version"),
    *("prefill_data_digest", "compose_version", "reuse_data_digest"),
)


def conf_of(group: str, name: str) -> dict[str, Any]:
    """A file of conf/ with those that it builds on; `ConfigError` for a name that is none of them."""
    files = {file.stem: file for file in (CONF / group).glob("*.yaml")}
    if name not in files:
        raise ConfigError(f"{group}={name!r:.80} is none of conf/{group}")
    own = yaml.safe_load(files[name].read_text(encoding="utf-8")) or {}
    taken: dict[str, Any] = {}
    for base in own.pop("defaults", []):
        if base != "_self_":
            taken |= conf_of(group, base)
    return taken | own


def choice(group: str, part: Any, methods: Sequence[Path] = ()) -> Choice:
    """A group's file with the parameters that a configuration has."""
    if methods and isinstance(part, Mapping) and "digest" in part:
        return foreign(part, methods)
    if isinstance(part, Mapping) and "package" in part:
        raise ConfigError(f"its {group} is of the package {part['package']!r:.80}, which is not imported here")
    if (
        not isinstance(part, Mapping)
        or not isinstance(part.get("params"), Mapping)
        or part.keys() != {"name", "params"}
    ):
        raise ConfigError(f"its {group} is {part!r:.80}, which no run writes")
    values = conf_of(group, str(part["name"]))
    target = values.pop("_target_", "")
    usual = {key: value for key, value in USUAL.get(group, {}).items() if key in values}
    return Choice(group, str(part["name"]), target, values | usual | dict(part["params"]))


def foreign(part: Mapping[str, Any], methods: Sequence[Path]) -> Choice:
    """A method in a file of its own, which is imported."""
    file = next((path for path in methods if outside.digest_of(path.read_bytes()) == part["digest"]), None)
    if file is None:
        raise ConfigError(f"no file of methods/ has the digest {part['digest']!r:.40} of its method")
    kind = str(part.get("name")).removeprefix(file.stem).removeprefix("-")
    name, node = outside.node_in("method", f"{file}:{kind}" if kind else str(file), ())
    return Choice("method", name, node.pop("_target_"), node | dict(part["params"]))


def settings_of(config: Mapping[str, Any], methods: Sequence[Path] = ()) -> Settings:
    """The settings of a run; `ConfigError` where its configuration is one that no run writes."""
    run = USUAL["run"] | dict(config)
    sampling = {"temperature": 0, "top_p": 1, "top_k": None, "n_answers": 1}
    allocator = run["allocator"]
    counts = run["budget_counts"]
    found = Settings(
        method=choice("method", run.get("method"), methods),
        task=choice("task", run.get("task")),
        model=build(ModelSpec, USUAL["model"] | dict(run.get("model") or {}), "model"),
        prefill=None if run["prefill"] is None else choice("prefill", run["prefill"]),
        chunk=run["prefill_chunk"],
        evicts=run["prefill_evict"],
        budget=BudgetRequest(
            read_key("ratio", run.get("ratio")), read_key("budget", run.get("budget")),
            read_key("comm", run.get("comm")), bool(run.get("compensate")), memory=read_key("memory", run["memory"]),
            counts=None if counts == "target" else read_key("budget_counts", counts),
        ),
        sampling=build(Sampling, {name: run.get(name, usual) for name, usual in sampling.items()}, ""),
        compose=None if run["compose"] is None else choice("method", run["compose"]),
        compose_order=run["compose_order"],
        allocator=None if allocator is None else build(Allocator, dict(allocator), "allocator"),
        reuse=None if run["reuse"] is None else build(Sharing, vars(Sharing("")) | dict(run["reuse"]), "reuse"),
        post_processing=build(
            GivenPostProcessing, {name: run[name] for name in ("positions", "dropped", "merging")}, ""
        ),
        cache=build(BlockCacheSpec, dict(run.get("cache") or {}), "cache"),
        scope=run.get("compression_scope", ""),
        seed=read_key("seed", run.get("seed", 0)),
        limit=read_key("limit", run.get("limit")),
        offset=run["offset"],
        dtype=run.get("dtype", ""),
        device=run.get("device", ""),
        kernels="auto",
        device_map=run["device_map"],
        graphs=run["cuda_graphs"] == "auto",
        weights=run["weights"],
        data_dir=run.get("data_dir"),
        out=None,
        logger=Choice("logger", "none", "", {}),
        profile=False,
        accesses=False,
        is_sweep=False,
        max_variants=None,
        skips_refused=False,
        pool=None,
    )  # fmt: skip
    if (again := found.resolved()) != (said := {key: value for key, value in config.items() if key not in VERSIONS}):
        keys = sorted(key for key in again.keys() | said.keys() if again.get(key) != said.get(key))
        raise ConfigError(f"its {', '.join(keys)[:200]} is written as no run writes it")
    return found
