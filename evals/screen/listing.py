"""`python run.py --list tasks`: what each task asks, its lengths, samples and data, and what a sample costs here.

A task's first sample is made as a run with its defaults makes it, or of its own set where its data are not here; the
time is what full attention of the embedded model takes for it, by a short pass and a few steps that are timed once.

Not here: which files a task lacks and how to get them (`python run.py --check`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from engine.checkpoints.load import load, load_tokenizer, read_shape, resolve_dtype
from engine.errors import ConfigError
from engine.shapes import ModelShape
from evals.overrides import CONF
from evals.screen.estimate import Load, bends_of
from evals.screen.expect import timed
from evals.screen.progress import duration
from evals.settings import choice, load_class
from evals.typed import build_params
from results.names import EMBEDDED as OWN_SET
from results.names import own_tasks
from results.sheet import ABSENT, Sheet, show
from tasks import sources
from tasks.turns.encode import prompt_of

MODEL, EMBEDDED = "smollm2-135m", "embedded"
HEADS = ["task", "asks", "length", "answers", "licence of its data", "data", "samples", "first", "takes"]
WHAT = ("tasks",)


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
    if len(words) != 1 or words[0] not in WHAT:
        raise ConfigError(f"--list wants one of {', '.join(WHAT)}; give python run.py --list tasks")
    tokenizer, shape = load_tokenizer(EMBEDDED), read_shape(MODEL, EMBEDDED)
    firsts = {name: first_of(name, tokenizer, shape) for name in own_tasks()}
    seconds, basis = costs({name: one for name, one in firsts.items() if one is not None}, shape)
    rows = [line(name, firsts[name], seconds.get(name)) for name in own_tasks()]
    notes = [
        f"first: tokens of the first sample, and up to how many answer it; takes: full attention of {MODEL}, {basis}",
        "own: of the task's own set, since its data are not here (task.source=embedded)",
    ]
    show(Sheet(HEADS, rows, notes=notes, n_keys=6))
    return 0


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
