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

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
REGISTER = DOCS / "register.yaml"  # where it was fixed, and where pages and commits point to
FULL, FLOOR, ITSELF = "full", "random", "shown"
FLOORS = (FLOOR, "random_decode_unprotected")  # of prompts, and of answers while they grow
REFERENCES = (*FLOORS, "oracle")  # that are compared with, and that nobody would run
SHOWN, HIDDEN = "full_prompt", "context_only"
SCOPES = {SHOWN: "question shown", HIDDEN: "question hidden"}


class At(NamedTuple):
    """A column of a table: what a method sees of the question, and its budget in words."""

    protocol: str
    asked: str


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
    stopped: str = ""  # why there are not so many
    fixed: str = ""  # when its comparisons were, where later than the others
    # of which runs
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the task's parameters must be
    model: str = ""
    seed: int | None = None
    samples: Sequence[int] = ()  # the first row, and the one after the last
    questions: int | None = None  # on each context
    scope: str = ""  # of all its runs, whatever their key says
    dataset: str = ""  # of several
    # how they compare
    enough: float = 0.0  # of full attention's answers, below which a method is left out
    is_ordered: bool = False  # a column counts when all of it was answered
    is_cost: bool = False  # times, and no answers
    by_kind: bool = False  # a picture tells apart whether bits are fewer, or tokens, or both
    has_tokens: bool = False  # a budget is a number of tokens, of prompt and answer together

    def has(self, config: Mapping[str, Any]) -> bool:
        """Whether a run asks samples of this set."""
        task, method = config["task"], config["method"]["name"]
        params, offset, limit = task["params"], config.get("offset") or 0, config.get("limit")
        first, last = self.samples or (0, float("inf"))
        return (
            task["name"] == self.task
            and self.model in ("", config["model"]["name"])
            and self.seed in (None, config.get("seed"))
            and self.questions in (None, params.get("questions", 1))
            and self.where.items() <= params.items()
            and not str(config.get("memory")).endswith("B")  # bytes are another share of each prompt
            and (not self.samples or (first <= offset and (limit is None or offset + limit <= last)))
            # What a page asks is under bytes or tokens alone.
            and (method == FULL or config.get("comm") in (None, "0"))
        )

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Whether an answer of such a run is of this set."""
        return self.dataset in ("", row.get("dataset"))

    def words(self, at: At) -> str:
        """A column's; what a method that cuts while it answers sees of the question goes without saying."""
        return share(at.asked) if "tokens" in at.asked else f"{SCOPES[at.protocol]}, {share(at.asked)}"


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

    @property
    def at(self) -> At:
        return At(self.scope, f"{self.tokens} tokens" if self.tokens else f"memory {show(Fraction(self.memory))}")

    @property
    def places(self) -> tuple[tuple[At, str], tuple[At, str]]:
        if self.other == ITSELF:
            return (self.at, self.one), (self.at._replace(protocol=SHOWN), self.one)
        return (self.at, self.one), (self.at, self.other)


@dataclass(frozen=True, eq=False)
class Page:
    """The YAML file of a page."""

    name: str
    sets: Mapping[str, Asked]
    comparisons: Sequence[Comparison]
    more: Mapping[str, Any]


@cache
def page(name: str) -> Page:
    return page_of(name, REGISTER if name == "register" else HERE / f"{name}.yaml")


def page_of(name: str, path: Path) -> Page:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    enough = found.pop("enough", 0.0)
    sets = {key: asked(key, {"enough": enough} | one) for key, one in found.pop("sets").items()}
    return Page(name, sets, [Comparison(**one) for one in found.pop("comparisons", ())], found)


def asked(key: str, said: Mapping[str, Any]) -> Asked:
    """A set; one that names its rows comes in their number and counts when all were answered."""
    found: dict[str, Any] = dict(said)
    if rows := found.get("samples"):
        found |= {"n": rows[1] - rows[0], "is_ordered": True, "enough": 1.0}
        found["questions"] = found.get("questions", 1)
        found["scope"] = HIDDEN if found["questions"] > 1 else ""  # compressed before it is asked anything
    return Asked(key=key, **found)


def share(asked: str) -> str:
    """A budget's words on a page."""
    return asked if "tokens" in asked else str(Fraction(asked.split()[-1]))


def size(asked: str) -> Fraction:
    """What orders budgets."""
    return Fraction(asked.removesuffix(" tokens").split()[-1])
