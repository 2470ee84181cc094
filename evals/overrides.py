"""The command line, checked before Hydra reads it.

Hydra's own messages name neither near misses nor remedies and appear one at a time, after seconds
of composing. Here every flag, group, file and key of the command line is looked up first, for all
cells of a sweep.

Not here: values (`evals/settings.py` and each `Params`). Hydra's flags that swap the whole `conf/`
folder are not supported, since nothing could be looked up then.
"""

import unicodedata
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from itertools import islice, pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.engine.declared import expanded, unknown_key
from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.evals import every, outside, plugins  # noqa: F401  `every_method`, of experiments
from kvbench.evals.composing import composition

CONF = Path(__file__).resolve().parents[1] / "conf"
APART = ("hydra", "architecture", "hardware", "heads")  # Hydra's own, and tables that are looked up by name
LAUNCHER = "hydra/launcher"  # the one group of Hydra's own that can be chosen from
MOST_CELLS = 10_000  # of a sweep; each is composed before the first one runs
INFOS = ("all", "config", "defaults", "plugins")  # what Hydra says of itself
OURS = ("--list", "--check", "--dry-run", "--help")  # flags that run.py takes before these


def check_overrides(argv: list[str]) -> list[str]:
    """The command line for Hydra, flags first; misspelt flags, groups, files and keys are errors.

    `model=X` without a file of that name becomes `model=any model.id=X`, and a group that is not in
    the defaults list (`experiment`) gets the `+` that Hydra wants.
    """
    flags, words = split_flags(argv)
    if "--hydra-help" in flags:
        return flags  # nothing is composed
    is_sweep = "-m" in flags
    groups = config_groups()
    overrides = [o for word in words for o in normal_form(parse_override(word), groups)]
    for override in overrides:
        if override.package is not None:
            key = override.key_or_group
            raise ConfigError(f"{override.input_line} puts {key} where nothing looks for it; write {key}=NAME")
        if override.is_sweep_override() and not is_sweep:
            raise ConfigError(f"{override.input_line} is a sweep; add -m to run all of its values")
    check_length(overrides, groups)

    chosen = choices(overrides, groups)
    swept = sweep_of_experiment(chosen)
    if swept and not is_sweep:
        name = chosen["experiment"][0]
        raise ConfigError(f"experiment={name} is a sweep; add -m to run all of it")
    named = {override.key_or_group for override in overrides}
    overrides_and_swept = overrides + [o for o in swept if o.key_or_group not in named]
    check_length(overrides_and_swept, groups)
    if flags or not is_composed(overrides):
        check_keys(overrides_and_swept, choices(overrides_and_swept, groups), groups)
    check_package(flags, chosen, groups)
    # Hydra looks a key up before it takes the files that the experiment chooses.
    needed = {key.split(".")[0] for key in named}
    files = [o for o in swept if o.key_or_group in needed - named and o.key_or_group in groups]
    several = {o.key_or_group for o in overrides_and_swept if o.is_sweep_override()} & groups.keys()
    return [*flags, *(as_one_of(override, several) for override in [*overrides, *files])]


def as_one_of(override: Override, several: Collection[str]) -> str:
    """A word as Hydra wants it: where a sweep goes over `several` groups, their keys are sweeps of one value.

    Hydra looks all other keys up before it takes the files that a sweep goes over.
    """
    line, group = override.input_line or "", override.key_or_group.partition(".")[0]
    key, _, value = line.partition("=")
    if group not in several or group == override.key_or_group or override.is_sweep_override() or not value:
        return line
    return f"{key}=choice({value})"


class Flags(ArgumentParser):
    """Hydra's flags, which it accepts in front of all overrides alone."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        modes = self.add_mutually_exclusive_group()
        modes.add_argument("-m", "--multirun", nargs=0, action=Keep)
        modes.add_argument("-c", "--cfg", nargs="?", const="job", choices=("job", "hydra", "all"), action=Keep)
        modes.add_argument("-i", "--info", nargs="?", const="all", choices=INFOS, action=Keep)
        self.add_argument("-p", "--package", action=Keep)
        for flag in ("--resolve", "--hydra-help"):
            self.add_argument(flag, nargs=0, action=Keep)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; python run.py --help says how flags are given")


class Keep(Action):
    """Keep a flag and its value as they are for Hydra, in `flags`."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.flags += [self.option_strings[0], *([values] if values else [])]


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Flags with their values, and the other words."""
    known, words = Flags().parse_known_args(argv, Namespace(flags=[]))
    for word in words:
        if word.startswith("-"):
            raise unknown_flag(*word.partition("=")[::2])
    if "--resolve" in known.flags and "-c" not in known.flags:
        raise ConfigError("--resolve says how --cfg prints; write --cfg job --resolve")
    return known.flags, words


def unknown_flag(flag: str, value: str) -> ConfigError:
    """The error for a flag that is none, which may be a key with the signs of a flag."""
    key = flag.lstrip("-").replace("-", "_")
    if key in config_groups() or key in yaml.safe_load((CONF / "config.yaml").read_text()):
        return ConfigError(f"{flag} is no flag; write {key}={value or 'VALUE'}")
    return unknown_name("flag", flag, (*Flags()._option_string_actions, *OURS))


def parse_override(word: str) -> Override:
    """One `key=value`; a value that Hydra's grammar cannot read is taken as a plain string."""
    if odd := [letter for letter in word if unicodedata.category(letter) in ("Cc", "Cs")]:
        raise ConfigError(f"{word!r} holds the character {odd[0]!r}, which is no text; leave it out")
    parser = OverridesParser.create()
    key, equals, value = word.partition("=")
    if not equals and not word.startswith("~"):
        raise ConfigError(f"{word!r} is no flag and no key=value, like ratio=0.2")
    plain = [f"{key}='{value}'"] if not set(value) & {*"[]{}(),'\"$\\="} else []  # else it is meant as Hydra's syntax
    for line in (word, *plain):
        try:
            return parser.parse_override(line)
        except (HydraException, RecursionError, ValueError):
            continue
    raise ConfigError(
        f"{word!r} is no override that Hydra can read; write key=value, one comma between values and none after the "
        "last, and put texts with brackets, commas or quotes into quotes"
    )


def config_groups() -> dict[str, list[str]]:
    """The folders of `conf/` that a command line chooses from, with the names of their files."""
    folders = [path for path in sorted(CONF.iterdir()) if path.is_dir() and path.name not in APART]
    groups = {folder.name: names_of(folder.name) for folder in folders}
    return groups | {LAUNCHER: ["basic", *names_of(LAUNCHER)]}  # the former is Hydra's own


def names_of(group: str) -> list[str]:
    """The files of a group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def check_length(overrides: Iterable[Override], groups: Mapping[str, list[str]]) -> None:
    """Refuse a sweep whose cells would take hours to compose."""
    n_values = {o.key_or_group: count(o, groups) for o in overrides if o.is_sweep_override()}
    if prod(n_values.values()) > MOST_CELLS:
        raise ConfigError(
            f"the sweep over {', '.join(n_values)} has more than {MOST_CELLS} cells; give fewer values, or "
            "several commands"
        )


def count(override: Override, groups: Mapping[str, list[str]]) -> int:
    """How many values a sweep has, at most one more than a sweep may have cells."""
    n = len(values_of(override, groups.get(override.key_or_group, [])))
    if not n:
        raise ConfigError(f"{override.input_line} stands for no value; write range(FIRST,END), or names that are there")
    return n


def normal_form(override: Override, groups: Mapping[str, list[str]]) -> list[Override]:
    """The override as Hydra wants it: `model=any` for free models, `+` for optional groups."""
    key = override.key_or_group
    if key not in groups or override.type != OverrideType.CHANGE or override.package is not None:
        return [override]
    if key in plugins.GROUPS:
        return [with_outside(override, groups[key])]
    if key == "model":
        ids = values_of(override, groups[key])
        free = [model for text in ids if text not in groups[key] and (model := free_model(text))]
        if free and len(free) < len(ids):
            raise ConfigError(
                f"{override.input_line} mixes files of conf/model with other models; sweep each kind on its own"
            )
        if free:
            quoted = ",".join("'" + text.replace("'", r"\'") + "'" for text in free)
            return [parse_override("model=any"), parse_override(f"model.id={quoted}")]
    if key not in default_groups():
        return [parse_override(f"+{override.input_line}")]
    return [override]


def with_outside(override: Override, names: list[str]) -> Override:
    """The override with the user's own files by the names that they get; these and packages' join `names`."""
    group = override.key_or_group
    given, own = dict.fromkeys(values_of(override, names)), names_of(group)
    found = {text: plugin for text in given if (plugin := plugins.find(group, text, own))}
    for text, plugin in found.items():
        outside.store(group, text, outside.node_of(plugin))
    if not given.keys() <= {*names}:
        names += plugins.names(group)  # one that is misspelt may be near
    files = {text: "" for text in given if outside.is_file(group, text)}
    for text in files:
        files[text] = outside.register(group, text, {*own, *found, *files.values()})
        names.append(files[text])
    if found or files:
        composition.cache_clear()  # another class may have had this name
    return parse_override(f"{group}=" + ",".join(files.get(text, text) for text in given)) if files else override


def free_model(text: str) -> str | None:
    """`text` where it names a model that needs no file in `conf/model`, else None."""
    is_path = text.endswith(".gguf") or text.startswith(("/", ".", "~")) or text.count("/") > 1
    path = expanded("model", text)
    if is_path and not path.exists():
        raise ConfigError(f"model={text} does not exist; give a folder, a .gguf file or a hub name like org/name")
    return str(path) if is_path else text if "/" in text or path.is_dir() else None


def default_groups() -> frozenset[str]:
    """The groups in the defaults list of `conf/config.yaml`."""
    return groups_of(CONF / "config.yaml")


@cache
def groups_of(file: Path) -> frozenset[str]:
    """The same of one file, which is read once."""
    defaults = yaml.safe_load(file.read_text())["defaults"]
    keys = {key for entry in defaults if isinstance(entry, dict) for key in entry}
    return frozenset(key.removeprefix("override ") for key in keys)


def values_of(override: Override, options: list[str]) -> list[str]:
    """The file names that a group override stands for, one or a sweep of them."""
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(options)
    if override.is_sweep_override():
        if not override.is_discrete_sweep():
            raise ConfigError(f"{override.input_line} has no end; list the values with commas")
        if isinstance(value, RangeSweep) and not value.step:
            raise ConfigError(f"{override.input_line} has no end; write range(FIRST,END,STEP)")
        return [text.strip("'\"") for text in islice(override.sweep_string_iterator(), MOST_CELLS + 1)]
    if isinstance(value, list | dict):
        key = override.key_or_group
        raise ConfigError(f"{override.input_line} is no name; write {key}=NAME, or -m {key}=NAME,NAME for several")
    return ["null" if value is None else str(value)]


def choices(overrides: Iterable[Override], groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The files that the command line chooses in each group; a name without a file is an error."""
    chosen: dict[str, list[str]] = {}
    for override in overrides:
        group = override.key_or_group
        if group not in groups or override.is_delete() or override.package is not None:  # which Hydra refuses
            continue
        chosen[group] = values_of(override, groups[group])
        for name in chosen[group]:
            if name.endswith(".py"):
                raise ConfigError(
                    f"{group}={name} is a file, and only methods and tasks are taken from one; give a name"
                )
            if name not in groups[group]:
                raise unknown_name(group, name, groups[group])
    return chosen


def sweep_of_experiment(chosen: Mapping[str, list[str]]) -> list[Override]:
    """What the chosen experiment sweeps by itself (`hydra.sweeper.params`)."""
    if "experiment" not in chosen:
        return []
    params = composed(chosen).hydra.sweeper.params or {}
    return [parse_override(f"{key}={value}") for key, value in params.items()]


def composed(chosen: Mapping[str, list[str]]) -> DictConfig:
    """The configuration with the first choice of each group and no other override."""
    optional = set(chosen) - default_groups()
    words = (("+" if group in optional else "") + f"{group}={chosen[group][0]}" for group in chosen)
    return composition(CONF, tuple(words))


def is_composed(overrides: Iterable[Override]) -> bool:
    """Whether Hydra makes a configuration of them, of keys that are there and ours; it would add others."""
    if any(one.type != OverrideType.CHANGE or one.key_or_group.split(".")[0] == "hydra" for one in overrides):
        return False
    try:
        return bool(composition(CONF, tuple(one.input_line or "" for one in overrides)))
    except (HydraException, OmegaConfBaseException):
        return False


def at_scale(full: Any, smoke: Any, *, _root_: Any) -> Any:
    """`${at_scale:full,smoke}`, of an experiment: the second value where `scale=smoke` is chosen."""
    chosen = OmegaConf.select(_root_, "hydra.runtime.choices.scale")
    return smoke if chosen == "smoke" else full


OmegaConf.register_new_resolver("at_scale", at_scale, replace=True)


def check_keys(overrides: Iterable[Override], chosen: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> None:
    """Every key exists, for every file that a sweep chooses in the key's own group."""
    trees: dict[tuple[str, str], Any] = {}
    for override in overrides:
        key = override.key_or_group
        if key in groups:
            continue
        group = key.split(".")[0]
        if key.startswith("hydra.launcher."):
            group = LAUNCHER
        elif group == "hydra" and key != "hydra.verbose":
            raise ConfigError(f"{key} has no effect here; of Hydra's own there are hydra/launcher and hydra.verbose")
        for name in chosen.get(group, [""]):
            if (group, name) not in trees:
                config = composed({**chosen, group: [name]} if name else chosen)
                trees[group, name] = OmegaConf.to_container(config)
            check_key(key, trees[group, name], groups)


def check_package(flags: list[str], chosen: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> None:
    """Check that what --cfg is to print is there."""
    for flag, key in pairwise(flags):
        if flag in ("-p", "--package"):
            check_key(key, OmegaConf.to_container(composed(chosen)), groups)  # type: ignore[arg-type]


def check_key(key: str, tree: Mapping[str, Any], groups: Iterable[str]) -> None:
    """Walk down the dotted key; the first part that is not there is the error."""
    node: Any = tree
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, Mapping):
            return  # an element of a list
        if part not in node:
            owners = [f"{group}.{part}" for group, own in tree.items() if isinstance(own, Mapping) and part in own]
            if depth == 0 and part == "hardware":
                raise ConfigError(f"{part}=… is for --dry-run, which says how long a command takes there; add it")
            if depth == 0 and owners:
                raise ConfigError(f"no key {part!r}; did you mean {' or '.join(owners)}?")
            if depth == 0:
                raise unknown_key("", part, {*node, *groups} - {"hydra"})
            parent = ".".join(parts[:depth])
            choice = tree["hydra"]["runtime"]["choices"].get(parent.replace(".", "/"), "")
            raise unknown_key(parent, part, node, choice)
        node = node[part]
