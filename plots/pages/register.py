"""docs/register.md: comparisons that were fixed before their samples were asked, and what the samples say.

    python -m kvbench.plots.pages.register             the page again, from docs/register/scores.csv.gz
    python -m kvbench.plots.pages.register RUNS        the same, with the answers of these runs added to what is kept

docs/register.yaml is the register: sets of samples, and which two methods are compared on them. A comparison is made
once, when every sample of its set has an answer of both; until then the page says how many have one. Samples are
clusters: the questions on one context, the turns of one dialogue and the draws of one prompt count as one, with their
mean, and there is no test of a frame that does not say which they are.

Not here: tests and intervals (`plots/stats.py`, `results/intervals.py`), the older page's scores (`plots/evidence.py`).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import yaml
from numpy.typing import NDArray

from kvbench.plots.evidence import FULL, HIDDEN, SHOWN, WORDS, title
from kvbench.plots.kept import KEPT, configured, keep, label_of, load, run, samples_of, some
from kvbench.plots.stats import Paired, holm, p_words, paired
from kvbench.results import SampleRow, interval
from kvbench.results.intervals import LEVEL, chance_below
from kvbench.results.names import known
from kvbench.results.sheet import ABSENT, Sheet, markdown

Frame = Any  # of pandas, whose own types leave open what a cell is
Array = NDArray[np.float64]
NAME, FLOOR, ITSELF = "register", "random", "shown"
FEW = 20  # clusters, below which a table says hits and no interval
KEYS = ("set", "model", "scope", "budget", "method", "label", "sample", "cluster", "score")
MEASURES = {  # of a sample's ledger, bytes of all layers; means over its steps
    "device_bytes": "bytes_resident_device",
    "host_bytes": "bytes_resident_host",
    "find_bytes": "bytes_index_read_per_step",
    "moved_bytes": "moved_bytes_per_step",
    "peak_bytes": "bytes_prefill_peak",
    "index_share": "index_share",
}
COLUMNS = (*KEYS, "prompt_tokens", "answer_tokens", *MEASURES)
HEAD = """\
# What was fixed before it was asked

The comparisons of [register.yaml](register.yaml), fixed on {fixed} before any of their samples was asked; {made} of
{n} are made so far. Every method may hold the same share of the bytes of full attention's cache on the device, has its
published index where that fits, and nothing else is limited ([the rule](fair-budgets.md)). "Within 5 points" asks
whether a method loses less than 5 points; all others ask for a difference in either direction. p is corrected over all
{n} (Holm), of which those that are not made yet count as if their p were the largest. Differences are in points of 100,
paired, one per cluster (a context, a dialogue, a prompt), with Gaffke's 95 % interval, whose coverage is conjectured
and [measured](intervals.md). A comparison is made once, when all of its samples are answered. A mark follows the test.

{table}

Every answer's score and costs are in [scores.csv.gz]({name}/{kept}), of which `python -m kvbench.plots.pages.register`
makes this
page.
"""


@dataclass(frozen=True)
class Asked:
    """A set of samples, as the register describes it."""

    title: str
    skill: str
    about: str
    experiment: str
    model: str
    task: str
    seed: int
    samples: tuple[int, int]  # the first, and the one after the last
    dataset: str = ""
    questions: int = 1
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the task's parameters must be

    @property
    def n(self) -> int:
        return self.samples[1] - self.samples[0]

    def has(self, config: Mapping[str, Any]) -> bool:
        """Whether a run asks samples of this set, under bytes or tokens alone."""
        task, (first, last) = config["task"], self.samples
        params, offset, limit = task["params"], config.get("offset", 0), config.get("limit")
        return (
            (config["model"]["name"], task["name"], config.get("seed")) == (self.model, self.task, self.seed)
            and self.dataset in ("", *(params.get("datasets") or ()))
            and params.get("questions", 1) == self.questions
            and self.where.items() <= params.items()
            and first <= offset
            and (limit is None or offset + limit <= last)
            and (config["method"]["name"] == FULL or config.get("comm") in (None, "0"))
        )


@dataclass(frozen=True)
class Comparison:
    """Two methods at one budget; `other` may be full attention, or the same method with the question shown."""

    set: str
    scope: str
    one: str
    other: str
    asks: str  # "difference" or "margin"
    memory: str = ""
    tokens: int = 0

    @property
    def budget(self) -> str:
        return f"{self.tokens} tokens" if self.tokens else self.memory

    @property
    def places(self) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
        """Scope, budget and method of both."""
        one = self.scope, self.budget, self.one
        if self.other == ITSELF:
            return one, (SHOWN, self.budget, self.one)
        return one, (self.scope, "" if self.other == FULL else self.budget, self.other)

    def words(self, margin: float) -> str:
        other = "its own score with the question shown" if self.other == ITSELF else called(self.other)
        where = self.budget if self.tokens else f"{WORDS[self.scope]}, {self.budget}"
        if self.asks == "margin":
            return f"{called(self.one)} within {100 * margin:g} points of {other}, {where}"
        return f"{called(self.one)} against {other}, {where}"


def called(method: str) -> str:
    """A method's title in its file; of a preset, the method's."""
    return title(known(method) or method)


@dataclass(frozen=True)
class Register:
    fixed: str
    margin: float
    seed: int
    sets: Mapping[str, Asked]
    comparisons: Sequence[Comparison]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one comparison; `paired` is None until all samples are answered."""

    n: int
    paired: Paired | None = None
    p: float = 1.0
    adjusted: float = 1.0

    @property
    def is_shown(self) -> bool:
        return self.paired is not None and self.adjusted < LEVEL


def register(path: Path) -> Register:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    sets = {key: Asked(**(values | {"samples": tuple(values["samples"])})) for key, values in found["sets"].items()}
    made = [Comparison(**one) for one in found["comparisons"]]
    return Register(str(found["fixed"]), found["margin"], found["seed"], sets, made)


# --- answers -------------------------------------------------------------------------------------


def read(root: Path, asked: Register) -> list[tuple[str, ...]]:
    """A row for each answer of a run of a set, as `COLUMNS` has it."""
    found = [
        line
        for folder, config in configured(root)
        for key, one in asked.sets.items()
        if one.has(config)
        for line in lines_of(key, one, config, folder)
    ]
    return some(found, root)


def lines_of(key: str, asked: Asked, config: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, ...]]:
    rows, method = samples_of(folder), config["method"]["name"]
    label, scope = label_of(folder, rows), config.get("compression_scope") or SHOWN
    scope = HIDDEN if asked.questions > 1 else scope  # a context is compressed before it is asked anything
    tokens, memory = config.get("budget"), config.get("memory")
    budget = "" if method == FULL else f"{tokens} tokens" if tokens else str(Fraction(memory or 1))
    for row in rows:
        if row.status == "ok" and row.score is not None and asked.dataset in ("", row.fields.get("dataset", "")):
            # Questions that have a prompt of their own each are samples of one trace or dialogue all the same.
            names = key, asked.model, scope, budget, method, label, row.id, row.sample_id.partition("/")[0]
            numbers = float(row.score), row.prompt_tokens, row.generated_tokens
            yield (*names, *(f"{x:.6g}" for x in numbers), *measures(row))


def measures(row: SampleRow) -> Iterator[str]:
    for name in MEASURES.values():
        value = row.ledger.get(name)
        yield "" if value is None else f"{float(value):.5g}"


def merged(kept: Sequence[Sequence[str]], new: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """All answers, each once; a new one takes the place of the same one that was kept."""
    names = [i for i, name in enumerate(COLUMNS) if name in ("set", "model", "scope", "budget", "method", "sample")]
    found = {tuple(row[i] for i in names): tuple(row) for row in (*kept, *new)}
    return [found[key] for key in sorted(found)]


def frame_of(path: Path) -> Frame:
    """The kept answers. A budget or label that is empty is "", and no missing value."""
    frame: Frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    numbers = [*COLUMNS[COLUMNS.index("score") :]]
    return frame.assign(**{name: pandas.to_numeric(frame[name]) for name in numbers})


# --- comparisons ---------------------------------------------------------------------------------


def by_cluster(frame: Frame, *keys: str) -> Frame:
    """The mean score of each cluster; ValueError for a frame that does not say which answers belong together."""
    if "cluster" not in frame or (frame["cluster"] == "").any():
        raise ValueError("the frame has answers without a cluster, and no test is made of those")
    return frame.groupby([*keys, "cluster"], sort=True)["score"].mean()


def scores_at(scores: Frame, key: str, place: tuple[str, str, str]) -> Frame:
    """A method's clusters at a place of a set; empty where it was not asked."""
    at = key, *place
    return scores.loc[at] if at in scores.index.droplevel("cluster") else pandas.Series(dtype=float)


def outcomes(asked: Register, frame: Frame) -> list[Outcome]:
    """Outcomes of all comparisons, in the register's order, corrected over all of them."""
    scores = by_cluster(frame, "set", "scope", "budget", "method")
    found: list[Outcome] = []
    for one in asked.comparisons:
        ours, theirs = (scores_at(scores, one.set, place) for place in one.places)
        both = ours.index.intersection(theirs.index)
        if len(both) < asked.sets[one.set].n:
            found.append(Outcome(len(both)))
            continue
        a, b = ours[both].to_numpy(), theirs[both].to_numpy()
        pair = paired(a, b, asked.seed)
        found.append(Outcome(len(both), pair, pair.p if one.asks == "difference" else p_within(a - b, asked.margin)))
    made = [one.p for one in found if one.paired is not None]
    adjusted = iter(holm(made, len(found)) if made else ())
    return [one if one.paired is None else Outcome(one.n, one.paired, one.p, float(next(adjusted))) for one in found]


def p_within(differences: Array, margin: float) -> float:
    """The p-value of a mean loss of `margin` or more, twice: 0.05 is where the 95 % interval's lower end is."""
    values = np.array([-1.0, *sorted(differences)])
    return min(1.0, 2 * chance_below(values, np.ones(len(values)), -margin))


# --- the page ------------------------------------------------------------------------------------


def points(paired: Paired) -> str:
    spread = paired.difference
    ends = "" if spread is None else f" ({100 * spread.low:+.0f} to {100 * spread.high:+.0f})"
    return f"{100 * paired.mean:+.1f}{ends}"


def comparisons(asked: Register, found: Sequence[Outcome]) -> str:
    rows = []
    for one, outcome in zip(asked.comparisons, found, strict=True):
        of = asked.sets[one.set]
        words = [of.title, one.words(asked.margin), f"{outcome.n} of {of.n}"]
        if outcome.paired is None:
            rows.append([*words, ABSENT, ABSENT, ABSENT, "not yet"])
        else:
            p = p_words(outcome.p), p_words(outcome.adjusted)
            rows.append([*words, points(outcome.paired), *p, "yes" if outcome.is_shown else "no"])
    return markdown(
        Sheet(["set", "comparison", "clusters", "difference", "p", "p after Holm", "shown"], rows, n_keys=2)
    )


def section(key: str, of: Asked, frame: Frame) -> str:
    """A set's scores and costs, of the places where every method has answered all samples."""
    here = frame[frame["set"] == key]
    scores = by_cluster(here, "set", "scope", "budget", "method")
    places = [(s, b, m) for (_, s, b, m), n in scores.groupby(level=[0, 1, 2, 3]).size().items() if n == of.n]
    columns = sorted({(s, b) for s, b, m in places if m != FULL}, key=lambda at: (at[0] != SHOWN, -size(at[1])))
    parts = [
        f"## {of.title}",
        f"{of.about} Skill: {of.skill}. `{of.model}`, {of.n} clusters.",
        f"    python run.py -m experiment={of.experiment}",
    ]
    if not columns:
        n = max(scores.groupby(level=[0, 1, 2, 3]).size(), default=0)
        return "\n\n".join([*parts, f"{n} of {of.n} are answered so far; scores follow when all are."])
    heads = ["method", *(b if "tokens" in b else f"{WORDS[s]}, {b}" for s, b in columns), "find KB /step", "index"]
    methods = sorted({m for *_, m in places}, key=lambda m: order(m, columns, key, scores))
    rows = []
    for method in methods:
        cells = [cell(key, (s, "" if method == FULL else b, method), (s, b), scores) for s, b in columns]
        mine = here[here["method"] == method]
        rows.append([name_of(mine, method), *cells, kilobytes(mine), index_words(mine)])
    note = (
        "Score, in brackets its 95 % interval, and behind it what is kept of full attention's lead over random "
        "tokens. KB that a step reads to find tokens, all layers, from whatever tier; index: the least share of the "
        "published one that fitted, over the columns."
    )
    return "\n\n".join([*parts, markdown(Sheet(heads, rows)), note])


def size(budget: str) -> float:
    return float(budget.split()[0]) if "tokens" in budget else float(Fraction(budget))


def order(method: str, columns: Sequence[tuple[str, str]], key: str, scores: Frame) -> tuple[bool, float, str]:
    """Full attention first, the others by their mean over the columns, those that lack one last, by what they have."""
    found = [scores_at(scores, key, (s, b, method)) for s, b in columns]
    return method != FULL, -sum(float(one.mean()) for one in found if len(one)) / len(columns), method


def name_of(mine: Frame, method: str) -> str:
    """The method's name for readers; that an index is smaller has a column of its own."""
    return str(mine["label"].iloc[0]).split(" or ")[0].replace(" (smaller index)", "") or called(method)


def cell(key: str, place: tuple[str, str, str], column: tuple[str, str], scores: Frame) -> str:
    mine = scores_at(scores, key, place)
    if not len(mine):
        return ABSENT
    n, mean = len(mine), float(mine.mean())
    spread = interval([*mine])
    if n < FEW or spread is None:
        words = f"{mine.sum():.3g} of {n}"
    else:
        words = f"{100 * mean:.0f} ({100 * spread.low:.0f} to {100 * spread.high:.0f})"
    full, floor = (scores_at(scores, key, (column[0], *at)) for at in (("", FULL), (column[1], FLOOR)))
    lead = float(full.mean() - floor.mean()) if len(full) and len(floor) else 0.0
    if lead <= 0 or place[2] in (FULL, FLOOR):
        return words
    return f"{words}; {100 * (mean - float(floor.mean())) / lead:.0f} %"


def kilobytes(mine: Frame) -> str:
    """The mean of each column's mean, least and most."""
    each = mine.groupby(["scope", "budget"])["find_bytes"].mean().dropna() / 1e3
    if each.empty or each.max() == 0:
        return "0"
    least, most = f"{each.min():,.0f}", f"{each.max():,.0f}"
    return least if least == most else f"{least} to {most}"


def index_words(mine: Frame) -> str:
    shares = mine["index_share"].dropna()
    return ABSENT if shares.empty or not mine["find_bytes"].max() > 0 else f"{shares.min():.2f}"


def page(asked: Register, frame: Frame) -> str:
    found = outcomes(asked, frame)
    made, n = sum(one.paired is not None for one in found), len(found)
    head = HEAD.format(fixed=asked.fixed, made=made, n=n, table=comparisons(asked, found), name=NAME, kept=KEPT)
    sets = [section(key, of, frame) for key, of in asked.sets.items() if (frame["set"] == key).any()]
    return "\n\n".join([head.rstrip("\n"), *sets]) + "\n"


def write(out: Path, runs: Path | None) -> list[Path]:
    asked, path = register(out / f"{NAME}.yaml"), out / NAME / KEPT
    path.parent.mkdir(parents=True, exist_ok=True)
    if runs is not None:
        kept = [tuple(row[name] for name in COLUMNS) for row in load(path)] if path.exists() else []
        keep(path, COLUMNS, merged(kept, read(runs, asked)))
    (out / f"{NAME}.md").write_text(page(asked, frame_of(path)), encoding="utf-8")
    return [out / f"{NAME}.md", path]


def main(arguments: Sequence[str]) -> int:
    return run("kvbench.plots.pages.register", "Write docs/register.md.", write, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
