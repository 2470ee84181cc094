"""`python run.py --list tasks|methods|models`: what can stand on a command line, a line each.

A task's first sample is made as a run with its defaults makes it, or of its own set where its data are not here; the
time is what full attention of the embedded model takes for it, by a short pass and a few steps that are timed once.
What is said of a method is the first line of its card, and its family; of a model, what its architecture says.

Not here: which files a task lacks and how to get them (`python run.py --check`), all that a model's shape says
(`--check model=NAME`), a method's parameters (its file in conf/method), BibTeX (`methods/cite.py`).
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from engine.budget import token_bytes
from engine.checkpoints.load import load, load_tokenizer, read_shape, resolve_dtype
from engine.errors import ConfigError
from engine.shapes import ModelShape
from evals.overrides import CONF
from evals.screen.check import where
from evals.screen.estimate import Load, bends_of
from evals.screen.expect import timed
from evals.screen.fits import shipped
from evals.screen.progress import duration
from evals.settings import choice, load_class
from evals.typed import build_params
from results.names import EMBEDDED as OWN_SET
from results.names import known, own_methods, own_tasks
from results.sheet import ABSENT, Sheet, show
from tasks import sources
from tasks.turns.encode import prompt_of

MODEL, EMBEDDED = "smollm2-135m", "embedded"
TASK_HEADS = ["task", "asks", "length", "answers", "licence of its data", "data", "samples", "first", "takes"]
METHOD_HEADS = ["method", "published as", "what it does", "presets"]
MODEL_HEADS = ["model", "hub name", "weights", "layers", "window", "KV per token", "where"]
FAMILY = re.compile(r"^Figures +(.+): #", re.MULTILINE)
REFERENCES = "references"  # the family of what has no place in figures of one


@dataclass(frozen=True)
class First:
    """A task's first sample, and how many there are."""

    n: int
    ids: Sequence[int]
    n_new: int
    is_own: bool  # of the task's own set, as its data are not here

    @property
    def load(self) -> Load:
        return Load(len(self.ids), self.n_new)


def main(words: Sequence[str]) -> int:
    """Print the list that is named."""
    lists = {"tasks": tasks, "methods": methods, "models": models}
    if len(words) != 1 or words[0] not in lists:
        raise ConfigError(f"--list wants one of {', '.join(lists)}; give python run.py --list methods")
    for sheet in lists[words[0]]():
        show(sheet)
    return 0


def tasks() -> Iterator[Sheet]:
    tokenizer, shape = load_tokenizer(EMBEDDED), read_shape(MODEL, EMBEDDED)
    firsts = {name: first_of(name, tokenizer, shape) for name in own_tasks()}
    seconds, basis = costs({name: one for name, one in firsts.items() if one is not None}, shape)
    rows = [line(name, firsts[name], seconds.get(name)) for name in own_tasks()]
    notes = [
        f"first: tokens of the first sample, and up to how many answer it; takes: full attention of {MODEL}, {basis}",
        "own: of the task's own set, since its data are not here (task.source=embedded)",
    ]
    yield Sheet(TASK_HEADS, rows, notes=notes, n_keys=6)


def methods() -> Iterator[Sheet]:
    """By families, as the figures have them."""
    presets = [file.stem for file in (CONF / "method").glob("*.yaml")]
    families: dict[str, list[list[str]]] = {}
    for name, file in own_methods().items():
        card = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        published, _, does = card.partition("\n")[0].partition(": ")
        others = sorted(one.removeprefix(f"{name}_") for one in presets if known(one) == name != one)
        family = found[1] if (found := FAMILY.search(card)) else REFERENCES
        families.setdefault(family, []).append(
            [name, published, does.partition(". ")[0].rstrip("."), ", ".join(others) or ABSENT]
        )
    note = "a preset's name begins with its method's: method=snapkv_paper; its file in conf/method says what it sets"
    for family in sorted(families):
        below = [note] if family == max(families) else [""]
        yield Sheet(METHOD_HEADS, families[family], about=family, notes=below, n_keys=len(METHOD_HEADS))


def models() -> Iterator[Sheet]:
    rows = [
        [
            *(one.name, one.id, f"{one.n_weights / 1e9:.2f} G", f"{len(one.shape.kept_layers)}"),
            *(
                f"{one.shape.window:,}",
                f"{len(one.shape.kept_layers) * token_bytes(one.shape) / 1024:.0f} KB",
                where(one),
            ),
        ]
        for one in shipped()
    ]
    notes = [
        "layers: those that keep keys and values of the whole text; KV per token: of these, in bfloat16",
        "any other model goes by its folder, .gguf file or hub name; python run.py --check model=NAME says more of one",
    ]
    yield Sheet(MODEL_HEADS, rows, notes=notes, n_keys=2)


def first_of(name: str, tokenizer: Any, shape: ModelShape) -> First | None:
    """The first sample by the task's defaults, or of its own set; None where neither can be made here."""
    tree = yaml.safe_load((CONF / "task" / f"{name}.yaml").read_text())
    kind: Any = load_class(choice("task", name, tree))
    values = {key: value for key, value in tree.items() if key != "_target_"}
    for given in ({}, {"source": OWN_SET}, {"source": OWN_SET, "datasets": "drawn"}):
        if not given.keys() <= values.keys():
            continue
        try:
            task = kind(build_params(kind, values | given, "task"), None, 0)
            task.check(shape)
            samples = task.samples(tokenizer)
            prompt = prompt_of(tokenizer, samples[0], chat="auto", system_prompt="", scope="full_prompt")
            n_new = prompt.n_behind(samples[0]) - len(prompt.question_ids)
            return First(len(samples), prompt.context_ids, n_new, bool(given))
        except ConfigError:
            continue
    return None


def costs(firsts: dict[str, First], shape: ModelShape) -> tuple[dict[str, float], str]:
    """Seconds of each first sample, and what was timed."""
    dtype = resolve_dtype("auto", "cpu")
    model = load(MODEL, EMBEDDED, dtype=dtype, device="cpu")
    longest = max(firsts.values(), key=lambda one: len(one.ids))
    loads = [one.load for one in firsts.values()]
    estimate, basis = timed(model, longest.ids, loads, bends_of(shape), 1)
    return {name: estimate.seconds(one.load) for name, one in firsts.items()}, basis


def line(name: str, first: First | None, seconds: float | None) -> list[str]:
    """A task's row."""
    card = own_tasks()[name]
    row = [name, card.asks, card.lengths, card.answers, card.licence, here(name)]
    if first is None or seconds is None:
        return [*row, ABSENT, ABSENT, ABSENT]
    own = " (own)" if first.is_own else ""
    return [*row, f"{first.n:,}{own}", f"{len(first.ids):,} + {first.n_new:,}", duration(seconds)]


def here(name: str) -> str:
    """How many of a task's files are here."""
    from tasks.known import known_tasks

    data = known_tasks()[name].data
    if data is None:
        return "needs none"
    n = sum(sources.find(file, None) is not None for file in data.files)
    return f"{n} of {len(data.files)} {data.what}"
