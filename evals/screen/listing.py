"""`python run.py --list tasks|methods|models|experiments`: what can stand on a command line, as wide as the terminal.

What is said of a task is its card, and which of its data are here; of a method, the first line of its card, and its
family; of a model, what its architecture says. No sample is made and torch is not imported, but for the models.

Not here: how many samples a task has and how long they take (`--dry-run`), which files it lacks and how to get them
(`--check`), all that a model's shape says (`--check model=NAME`), a method's parameters (its file in conf/method),
BibTeX (`methods/cite.py`).
"""

import ast
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvbench.engine.budget import token_bytes
from kvbench.engine.errors import ConfigError, one_line, unknown_name
from kvbench.evals.overrides import CONF
from kvbench.evals.screen.check import where
from kvbench.evals.screen.fits import shipped
from kvbench.evals.settings import Choice, choice, load_class, refuse_missing
from kvbench.evals.typed import build_params
from kvbench.results.names import card_of, known, own_methods
from kvbench.results.sheet import ABSENT, Sheet, show
from kvbench.tasks import sources
from kvbench.tasks.base import Data

TASK_HEADS = ["task", "what it asks", "data here"]
METHOD_HEADS = ["method", "published as: what it does", "presets"]
MODEL_HEADS = ["model", "hub name", "weights", "layers", "window", "KV per\ntoken"]
FAMILY = re.compile(r"^Figures +(.+): #", re.MULTILINE)
REFERENCES = "references"  # the family of what has no place in figures of one


def main(words: Sequence[str]) -> int:
    """Print the list that is named."""
    lists = {"tasks": tasks, "methods": methods, "models": models, "experiments": experiments}
    if len(words) != 1:
        raise ConfigError(f"--list wants one of {', '.join(lists)}; give python run.py --list methods")
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
    """By families, as the figures have them."""
    presets = [file.stem for file in (CONF / "method").glob("*.yaml")]
    families: dict[str, list[list[str]]] = {}
    for name, file in own_methods().items():
        card = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        published, colon, does = card.partition("\n")[0].partition(": ")
        others = sorted(one.removeprefix(f"{name}_") for one in presets if known(one) == name != one)
        family = found[1] if (found := FAMILY.search(card)) else REFERENCES
        families.setdefault(family, []).append(
            [name, published + colon + does.partition(". ")[0].rstrip("."), ", ".join(others) or ABSENT]
        )
    note = "a preset goes by both names, method=snapkv_paper; its file in conf/method says what it sets"
    for family in sorted(families):
        below = [note] if family == max(families) else [""]
        n = len(METHOD_HEADS)
        yield Sheet(METHOD_HEADS, families[family], about=family, notes=below, n_keys=n, n_wrapped=n)


def experiments() -> Iterator[Sheet]:
    """By their files' first comments that say what is asked."""
    rows = list[list[str]]()
    for file in sorted((CONF / "experiment").glob("*.yaml")):
        lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
        said = (line.removeprefix("#").strip() for line in lines)
        asks = " ".join(line for line in said if not line.startswith(("@package", "python run.py")))
        rows.append([file.stem, asks.partition(". ")[0].rstrip(".") or ABSENT])
    notes = ["python run.py -m experiment=NAME runs one, with scale=smoke in minutes on the embedded model and data"]
    yield Sheet(["experiment", "what is asked"], rows, notes=notes, n_keys=2, n_wrapped=2)


def models() -> Iterator[Sheet]:
    known = shipped()
    rows = []
    for one in known:
        n = len(one.shape.kept_layers)
        size = f"{n * token_bytes(one.shape) / 1024:.0f} KB"
        rows.append([one.name, one.id, f"{one.n_weights / 1e9:.2f} G", f"{n}", f"{one.shape.window:,}", size])
    notes = [
        "layers: those that keep keys and values of the whole text; KV per token: of these, in bfloat16",
        f"weights are here of: {', '.join(one.name for one in known if where(one).startswith('here')) or 'none'}",
        "any other model goes by its folder, .gguf file or hub name",
        "what a model has, and which methods run on it: python run.py --check model=NAME",
    ]
    yield Sheet(MODEL_HEADS, rows, notes=notes, n_keys=2, n_wrapped=2)


def here(data: Data | None) -> str:
    """How many of a task's files are here."""
    if data is None:
        return "needs none"
    n = sum(sources.find(file, None) is not None for file in data.files)
    return f"{n} of {len(data.files)} {data.what}"
