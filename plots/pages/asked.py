"""What a page asks: sets of samples, and comparisons that were fixed beforehand, as its YAML file says them.

Not here: the answers (`read.py`), what is worked out of them (`columns.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvbench.engine.budget import show
from kvbench.results.intervals import SHARE, Bounds
from kvbench.results.names import FIRST

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
REGISTER = DOCS / "register.yaml"  # where it was fixed, and where pages and commits point to
FULL, FLOOR, ITSELF = "full", "random", "shown"
SHOWN, HIDDEN = "full_prompt", "context_only"
SCOPES = {SHOWN: "question shown", HIDDEN: "question hidden"}
LOSSES: Bounds = (0.0, float("inf"))


class At(NamedTuple):
    """A column of a table: what a method sees of the question, its budget in words, and which part of a set."""

    protocol: str
    asked: str
    column: str = ""


@dataclass(frozen=True, eq=False)
class Asked:
    """A set of samples: of which runs they are, and the words for it."""

    key: str
    title: str
    experiment: str
    task: str
    about: str = ""
    skill: str = ""  # what it asks of a model, of which several sets may ask the same
    n: int = 0  # samples that the experiment asks of each column
    # of which runs
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the task's parameters must be
    unlike: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what they must not be
    model: str = ""
    seed: int | None = None
    samples: Sequence[int] = ()  # the first row, and the one after the last
    questions: int | None = None  # on each context
    scope: str = ""  # of all its runs, whatever their key says
    others_of: str = ""  # a set that was asked of `FIRST` alone; this one has the other methods
    is_split: bool = False  # whether another set has the other methods of this one
    # of which answers
    dataset: str = ""  # of several
    columns: Mapping[str, str] = field(default_factory=dict[str, str])  # parts of it, and the words for each
    by: str = "dataset"  # the field that says which part
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])  # that field's values
    up_to: Mapping[str, float] = field(default_factory=dict[str, float])  # or their ends, of numbers
    context: str = ""  # the field that says on which context a question is, which then are one answer
    per: str = "id"  # a line of what is kept is an answer, or the mean of a "sample"
    value: str = "score"  # the column that is looked at
    chance: Mapping[str, float] = field(default_factory=dict[str, float])  # share that guessing scores, by part
    # how they compare
    enough: float = 0.0  # of full attention's answers, below which a method is left out
    is_ordered: bool = False  # by what is varied: a column counts when all of it was answered
    by_kind: bool = False  # a figure tells apart whether bits are fewer, or tokens, or both
    has_tokens: bool = False  # a budget is a number of tokens, of prompt and answer together

    @property
    def is_loss(self) -> bool:
        return self.value != "score"

    @property
    def bounds(self) -> Bounds:
        return LOSSES if self.is_loss else SHARE

    def has(self, config: Mapping[str, Any]) -> bool:
        """Whether a run asks samples of this set."""
        task, method = config["task"], config["method"]["name"]
        params, offset, limit = task["params"], config.get("offset") or 0, config.get("limit")
        is_whole = not (self.others_of or self.is_split)
        first, last = self.samples or (0, float("inf"))
        return (
            task["name"] == self.task
            and self.model in ("", config["model"]["name"])
            and self.seed in (None, config.get("seed"))
            and self.questions in (None, params.get("questions", 1))
            and self.where.items() <= params.items()
            and not any(params.get(key) == value for key, value in self.unlike.items())
            and not str(config.get("memory")).endswith("B")  # bytes are another share of each prompt
            and (not self.samples or (first <= offset and (limit is None or offset + limit <= last)))
            # What the register asks is under bytes or tokens alone.
            and (not self.samples or method == FULL or config.get("comm") in (None, "0"))
            and (is_whole or (method == FULL or method in FIRST) is not bool(self.others_of))
        )

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Which of its columns an answer is in, "" where it has one; None for an answer of something else."""
        if self.dataset not in ("", row.get("dataset")):
            return None
        if not self.columns:
            return ""
        found = row.get(self.by)
        if self.up_to and found is not None:
            found = next(name for name, most in self.up_to.items() if found <= most)
        found = next((name for name, of in self.groups.items() if found in of), found)
        return str(found) if found in self.columns else None

    def words(self, at: At) -> str:
        """A column's; what a method that cuts while it answers sees of the question goes without saying."""
        if self.columns:
            return self.columns[at.column]
        return share(at.asked) if "tokens" in at.asked else f"{SCOPES[at.protocol]}, {share(at.asked)}"

    def is_at_chance(self, at: At, low: float) -> bool:
        return bool(self.chance) and low <= self.chance[at.column]


@dataclass(frozen=True)
class Comparison:
    """A method at a budget against another, against full attention, or against itself with the question shown."""

    set: str
    scope: str
    one: str
    other: str
    memory: str = ""
    tokens: int = 0
    asks: str = "difference"  # or whether it loses less than a "margin"
    seen: int = 0  # samples, the first ones, whose scores were known when it was chosen

    @property
    def at(self) -> At:
        return At(self.scope, f"{self.tokens} tokens" if self.tokens else f"memory {show(Fraction(self.memory))}")

    @property
    def places(self) -> tuple[tuple[At, str], tuple[At, str]]:
        if self.other == ITSELF:
            return (self.at, self.one), (self.at._replace(protocol=SHOWN), self.one)
        return (self.at, self.one), (self.at, self.other)


@dataclass(frozen=True)
class Finding:
    """A comparison that a reader should remember, if it is shown."""

    of: Comparison
    words: str  # with {one}, {other}, {share} and the two scores {a}, {b}
    beside: Comparison | None = None
    beside_words: str = ""
    is_turned: bool = False  # the second must be shown, and the other way round


@dataclass(frozen=True, eq=False)
class Page:
    """The YAML file of a page."""

    name: str
    sets: Mapping[str, Asked]
    comparisons: Sequence[Comparison]
    findings: Sequence[Finding]
    more: Mapping[str, Any]


@cache
def page(name: str) -> Page:
    return page_of(name, REGISTER if name == "register" else HERE / f"{name}.yaml")


def page_of(name: str, path: Path) -> Page:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    sets, shared = found.pop("sets", {}), {key: found.pop(key) for key in ("per", "enough") if key in found}
    split = {one["others_of"] for one in sets.values() if "others_of" in one}
    made = {key: asked(key, shared | one | {"is_split": key in split}) for key, one in sets.items()}
    comparisons = [Comparison(**one) for one in found.pop("comparisons", ())]
    findings = [
        Finding(**one | {key: Comparison(**one[key]) for key in ("of", "beside") if key in one})
        for one in found.pop("findings", ())
    ]
    return Page(name, made, comparisons, findings, found)


def asked(key: str, said: Mapping[str, Any]) -> Asked:
    """A set; one that names its rows comes in their number and counts when all were answered."""
    found: dict[str, Any] = dict(said)
    if rows := found.get("samples"):
        found |= {"n": rows[1] - rows[0], "is_ordered": True, "enough": 1.0}
        found["questions"] = found.get("questions", 1)
        found["scope"] = HIDDEN if found["questions"] > 1 else ""  # compressed before it is asked anything
    found["chance"] = {part: float(Fraction(str(value))) for part, value in found.get("chance", {}).items()}
    return Asked(key=key, **found)


def share(asked: str) -> str:
    """A budget's words on a page."""
    return asked if "tokens" in asked else str(Fraction(asked.split()[-1]))


def size(asked: str) -> Fraction:
    """What orders budgets."""
    return Fraction(asked.removesuffix(" tokens").split()[-1])
