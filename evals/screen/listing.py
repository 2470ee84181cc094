"""`python run.py --list KIND`: what can stand on a command line, no wider than the terminal.

What is said of a task is its card, and which of its data are here; of a method, the first line of its card, and its
family, or where one is named, each of its keys; of a model, what its architecture says. No sample is made and torch is
not imported, but for what installed packages bring; a package that brings nothing that can be asked has a line on
standard error.

Not here: how many samples a task has and how long they take (`--dry-run`), which files it lacks and how to get them
(`--check`), all that a model's shape says (`--check model=NAME`), BibTeX (`methods/cite.py`).
"""

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import yaml

from kvbench.engine.declared import build_params, hints_of, word
from kvbench.engine.declared import words as words_of
from kvbench.engine.errors import ConfigError, one_line, unknown_name
from kvbench.engine.terminal import say
from kvbench.evals import outside, plugins
from kvbench.evals.overrides import CONF, names_of
from kvbench.evals.plugins import Plugin
from kvbench.evals.screen.check import where
from kvbench.evals.screen.fits import shipped
from kvbench.evals.settings import Choice, choice, load_class, refuse_missing
from kvbench.methods import combinations
from kvbench.methods.named import values_of
from kvbench.results.names import card_of, known, own_methods
from kvbench.results.sheet import ABSENT, Sheet, show
from kvbench.tasks import sources
from kvbench.tasks.base import Data

TASK_HEADS = ["task", "what it asks", "data here"]
METHOD_HEADS = ["method", "published as: what it does", "presets"]
PACKAGED_HEADS = [*METHOD_HEADS[:2], "package"]
KEY_HEADS = ["key", "default", "allowed", "what it does"]
REFUSED_HEADS = ["with", "what is refused, and why"]
MODEL_HEADS = ["model", "hub name", "layers", "heads\nQ / KV", "window"]
FAMILY = re.compile(r"^Figures +(.+): #", re.MULTILINE)
T = TypeVar("T")
REFERENCES = "references"  # the family of what has no place in figures of one


def main(words: Sequence[str]) -> int:
    """Print the list that is named."""
    lists = {"tasks": tasks, "methods": methods, "models": models, "experiments": experiments, "combinations": refused}
    if len(words) == 2 and words[0] == "methods":
        show(keys(words[1]), fits=True)
        return 0
    if len(words) != 1:
        raise ConfigError(f"a list is one of {', '.join(lists)}; give python run.py --list methods")
    if words[0] not in lists:
        raise ConfigError(unknown_name("list", words[0], lists))
    for sheet in lists[words[0]]():
        show(sheet, fits=True)
    return 0


def tasks() -> Iterator[Sheet]:
    """Every task that has a class of its own; of one that cannot be asked as its files are, a line says why."""
    rows, others = list[list[str]](), list[str]()
    for file in sorted((CONF / "task").glob("*.yaml")):
        try:
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
            if not isinstance(tree, Mapping) or "_target_" in tree:  # else it is a preset
                rows += rows_of(choice("task", file.stem, tree))
        except (Exception, SystemExit) as error:  # whatever a user's file raises, the others are listed
            why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {one_line(error)}"
            others.append(f"task={file.stem} cannot be asked: {why}")
    rows += [row for plugin, own in packaged("task", rows_of) for row in [*own, ["", f"package {plugin.package}", ""]]]
    notes = [
        "how many samples a task has, and how long they take here: python run.py task=NAME --dry-run",
        "where to get data that are not here: python run.py --check",
    ]
    yield Sheet(TASK_HEADS, rows, notes=[*notes, *others], n_keys=3, n_wrapped=2)


def rows_of(chosen: Choice) -> list[list[str]]:
    """A task's rows, by its card; `ConfigError` where its file's values are not those that its class takes."""
    kind: Any = load_class(chosen)
    refuse_missing(chosen.params, "task.")
    build_params(kind, chosen.params, "task")
    card = card_of(Path(inspect.getfile(kind)))
    more = {"prompts": card.lengths, "answers": card.answers, "licence": card.licence}
    details = " · ".join(f"{what} {words}" for what, words in more.items() if words)
    return [[chosen.name, card.asks or ABSENT, here(kind.data)], *([["", details, ""]] if details else [])]


def methods() -> Iterator[Sheet]:
    """List methods by families, as the figures have them."""
    presets = [file.stem for file in (CONF / "method").glob("*.yaml")]
    families: dict[str, list[list[str]]] = {}
    for name, file in own_methods().items():
        card = docstring(file)
        others = sorted(one.removeprefix(f"{name}_") for one in presets if known(one) == name != one)
        family = found[1] if (found := FAMILY.search(card)) else REFERENCES
        families.setdefault(family, []).append([name, first_line(card), ", ".join(others) or ABSENT])
    note = "a preset goes by both names, method=snapkv_paper; its file in conf/method says what it sets"
    for family in sorted(families):
        below = [note] if family == max(families) else [""]
        n = len(METHOD_HEADS)
        yield Sheet(METHOD_HEADS, families[family], about=family, notes=below, n_keys=n, n_wrapped=n)
    if rows := [[plugin.name, words, plugin.package] for plugin, words in packaged("method", line_of)]:
        yield Sheet(PACKAGED_HEADS, rows, about="from installed packages", notes=[""], n_keys=n, n_wrapped=n)


def keys(name: str) -> Sheet:
    """What can be set of a method: its default, what else it may be, and what the file in conf/method says of it."""
    if name not in (names := [file.stem for file in (CONF / "method").glob("*.yaml")]):
        raise unknown_name("method", name, names)
    values, said = values_of(name), comments(name)
    kind: Any = load_class(choice("method", name, dict(values)))
    hints = hints_of(kind.Params)
    rows = [
        [one.name, word(values[one.name]), allowed(hints[one.name]), said.get(one.name, "")]
        for one in fields(kind.Params)
    ]
    return Sheet(KEY_HEADS, rows, about=first_line(docstring(Path(inspect.getfile(kind)))), n_keys=4, n_wrapped=4)


def allowed(hint: Any) -> str:
    said = words_of(hint)
    return f"{said}, or null" if NoneType in get_args(hint) and "null" not in said else said


def comments(name: str) -> dict[str, str]:
    """What a file of conf/method says of its keys; a preset, of those that it does not set as well."""
    text = (CONF / "method" / f"{name}.yaml").read_text(encoding="utf-8")
    below = [comments(base) for base in yaml.safe_load(text).get("defaults", []) if base != "_self_"]
    own = re.findall(r"^(\w+): .*?(?: # (.*))?$", text, re.MULTILINE)
    return {key: said for one in [*below, dict(own)] for key, said in one.items() if said}


def docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def first_line(card: str) -> str:
    """What a method's card says first, up to the end of the sentence."""
    published, colon, does = card.partition("\n")[0].partition(": ")
    return published + colon + does.partition(". ")[0].rstrip(".")


def line_of(chosen: Choice) -> str:
    """What a package's method is, by its card or else its title."""
    kind: Any = load_class(chosen)
    return first_line(docstring(Path(inspect.getfile(kind)))) or kind.title


def packaged(group: str, say_of: Callable[[Choice], T]) -> Iterator[tuple[Plugin, T]]:
    """Words on each plug-in; why one cannot be asked stands on standard error, and the others are listed."""
    refused = list[str]()
    for plugin in plugins.plugins():
        if plugin.group != group:
            continue
        try:
            plugins.find(group, plugin.name, names_of(group))
            yield plugin, say_of(choice(group, plugin.name, outside.node_of(plugin)))
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, ConfigError) else f"{plugin}: {type(error).__name__}: "
            refused.append(f"{kind}{one_line(error)}")
    for why in dict.fromkeys(refused):  # namesakes have one sentence
        say(why, file=sys.stderr)


def experiments() -> Iterator[Sheet]:
    """List experiments by their files' first comments, which say what is asked."""
    rows = list[list[str]]()
    for file in sorted((CONF / "experiment").glob("*.yaml")):
        lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
        said = (line.removeprefix("#").strip() for line in lines)
        asks = " ".join(line for line in said if not line.startswith(("@package", "python run.py")))
        rows.append([file.stem, asks.partition(". ")[0].rstrip(".") or ABSENT])
    notes = ["python run.py -m experiment=NAME runs one, with scale=smoke in minutes on the embedded model and data"]
    yield Sheet(["experiment", "what is asked"], rows, notes=notes, n_keys=2, n_wrapped=2)


def models() -> Iterator[Sheet]:
    """List the models of conf/model by what their architectures' files say."""
    known = shipped()
    rows = []
    for one in known:
        values = one.architecture
        h, h_kv = values["num_attention_heads"], values.get("num_key_value_heads") or values["num_attention_heads"]
        window = f"{values['max_position_embeddings']:,}"
        rows.append([one.name, one.id, f"{values['num_hidden_layers']}", f"{h} / {h_kv}", window])
    notes = [
        f"weights are here of: {', '.join(one.name for one in known if where(one).startswith('here')) or 'none'}",
        "any other model goes by its folder, .gguf file or hub name",
        "a model's weights and bytes per token, and which methods run on it: python run.py --check model=NAME",
    ]
    yield Sheet(MODEL_HEADS, rows, notes=notes, n_keys=2, n_wrapped=2)


def refused() -> Iterator[Sheet]:
    """List what cannot be asked together, by what is given beside a method."""
    rows = [[key, sentence(row)] for key, rows in combinations.GROUPS.items() for row in rows]
    yield Sheet(REFUSED_HEADS, rows, n_keys=2, n_wrapped=2)


def sentence(row: combinations.Row) -> str:
    """A row in general, with its reasons behind it."""
    reasons = [one for _, says in row.reasons if (one := combinations.in_general(says)) != "…"]
    return combinations.in_general(row.says) + (f" (…: {'; '.join(reasons)})" if reasons else "")


def here(data: Data | None) -> str:
    """How many of a task's files are here."""
    if data is None:
        return "needs none"
    return f"{len(data.here(sources.find))} of {len(data.files)} {data.what}"
