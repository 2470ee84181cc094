"""Scores of the runs of conf/experiment/evidence_*.yaml, by task, scope, budget and method, and how they compare.

    read     of a folder of runs; runs that were stopped count with their samples so far
    load     of a compact file, a line per sample and variant, which `keep` writes
    renewed  of such a file and of runs that came later: these replace what they ask again, and no more

Only samples that every variant of a scope and budget answered count, so all comparisons at a budget are of the same
samples. Budgets may have more or fewer; one whose samples come in an order counts when all were answered.

Not here: the page (`plots/findings.py`), statistics (`plots/stats.py`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from itertools import combinations
from math import floor, fsum, log2
from pathlib import Path
from typing import Any

from kvbench.plots import kept
from kvbench.plots.kept import answers, configured, some
from kvbench.plots.stats import Corrected, Paired, corrected, paired
from kvbench.results import SampleRow
from kvbench.results.intervals import LEVEL
from kvbench.results.names import FIRST, own_methods

COLUMNS = (
    "set", "model", "scope", "memory", "method", "sample", "score", "device_bytes", "tokens", "cut_off",
    "prompt_tokens", "comm", "label",
)  # fmt: skip
SHOWN, HIDDEN = "full_prompt", "context_only"
WORDS = {SHOWN: "question shown", HIDDEN: "question hidden"}
FULL = "full"
Place = tuple[str, str, str]  # scope, memory, method; the line of full attention has no memory
Pair = tuple[str, str]


@dataclass(frozen=True)
class Asked:
    """One task of the page: which samples of which runs, and the words for it."""

    key: str
    title: str
    experiment: str
    about: str
    n: int  # samples that the experiment asks
    task: str
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the task's parameters must be
    dataset: str = ""  # of several
    is_ordered: bool = False  # by what is varied, such as depth: the first samples are not like the others
    scope: str = ""  # of all its runs, whatever their key says: a context is compressed before it is asked anything
    has_tokens: bool = False  # its budget is a number of tokens, of prompt and answer together, and no share of bytes
    skill: str = ""  # what it asks of a model, of which several tasks may ask the same
    others_of: str = ""  # a set that was asked of `FIRST` alone: this one has the other methods, at one of its budgets

    def has(self, config: Mapping[str, Any]) -> bool:
        name, params, method = config["task"]["name"], config["task"]["params"], config["method"]["name"]
        if str(config.get("memory")).endswith("B"):
            return False  # of bytes, which are another share of each prompt
        is_split = self.others_of or self.key in SPLIT
        is_mine = not is_split or (method == FULL or method in FIRST) is not bool(self.others_of)
        return is_mine and name == self.task and self.where.items() <= params.items()

    def share(self, memory: str) -> str:
        """A budget's words."""
        return f"{memory} tokens" if self.has_tokens else f"{Fraction(memory)}"

    def column(self, scope: str, memory: str) -> str:
        """A column's; what a method that cuts while it answers sees of the question goes without saying."""
        return self.share(memory) if self.has_tokens else f"{WORDS[scope]}, {self.share(memory)}"

    def takes(self, row: SampleRow) -> bool:
        return row.score is not None and self.dataset in ("", row.fields.get("dataset"))


SETS = (
    Asked(
        "docs", "Questions on documents", "evidence_docs",
        "The prompt is a text of Python's manual and the first eight words of a sentence in it; the answer is how that "
        "sentence goes on. The score is the F1 of words.",
        100, "longbench", skill="copying",
    ),
    Asked(
        "needle", "A needle of seven digits", "evidence_needle",
        "A phone number is hidden at one of 60 depths. An answer is right or wrong.",
        60, "needle", {"style": "own", "needles": 1}, is_ordered=True, skill="finding",
    ),
    Asked(
        "needle-name", "A needle that is a name", "evidence_needle",
        "A director's name is hidden at one of 60 depths. An answer is right or wrong.",
        60, "needle", {"style": "own_name", "needles": 1}, is_ordered=True, skill="finding",
    ),
    Asked(
        "needle-two", "Two needles at once", "evidence_two",
        "Two phone numbers are hidden, one at one of 60 depths and one halfway from there to the end; both are asked "
        "for. The score is the share that is named.",
        60, "needle", {"style": "own", "needles": 2}, is_ordered=True, skill="finding",
    ),
    Asked(
        "variables", "Chains of variables", "evidence_ruler",
        "RULER's variable tracking, generated with 2,048 tokens. The score is the share of the chain that is named.",
        40, "ruler", dataset="vt", skill="following",
    ),
    Asked(
        "keys", "One needle of many", "evidence_ruler",
        "RULER's multi-key needle, generated with 2,048 tokens. An answer is right or wrong.",
        40, "ruler", dataset="niah_multikey_1", skill="finding",
    ),
    Asked(
        "words", "The most frequent words", "evidence_ruler task.datasets=[fwe]",
        "RULER's frequent words, generated with 2,048 tokens: which three of many made-up words come most often. The "
        "score is the share of them that is named.",
        40, "ruler", dataset="fwe", skill="counting",
    ),
    Asked(
        "shared", "Eight questions on one context", "evidence_shared",
        "A context is compressed once, before any question is known. A sample is a context, and its score the mean F1 "
        "of its questions.",
        30, "shared_context", scope=HIDDEN, skill="copying",
    ),
    Asked(
        "sums", "Sums behind eight solved ones", "evidence_gsm8k",
        "GSM8K's test questions behind eight worked exemplars, which are what is compressed. An answer is right or "
        "wrong.",
        100, "gsm8k", {"thinking": False, "exemplars": 8}, skill="summing",
    ),
    Asked(
        "generating", "Sums, the cache cut while generating", "evidence_generating",
        "GSM8K's test questions without exemplars, as a user asks them. Four answers of up to 320 tokens are drawn to "
        "each (temperature 0.6, nucleus 0.95), and a sample's score is the share of them that is right.",
        50, "gsm8k", {"thinking": True, "template": "chat", "max_new_tokens": 320}, has_tokens=True,
    ),
    Asked(
        "docs-others", "Questions on documents", "evidence_others_docs", "", 40, "longbench", others_of="docs",
    ),
    Asked(
        "needle-others", "A needle of seven digits", "evidence_others", "", 60, "needle",
        {"style": "own", "needles": 1}, is_ordered=True, others_of="needle",
    ),
    Asked(
        "needle-name-others", "A needle that is a name", "evidence_others", "", 60, "needle",
        {"style": "own_name", "needles": 1}, is_ordered=True, others_of="needle-name",
    ),
)  # fmt: skip
SPLIT = frozenset(asked.others_of for asked in SETS if asked.others_of)


@dataclass(frozen=True)
class Costs:
    """Costs of an answer; mean over a sample's turns and draws, and over samples."""

    device_bytes: float
    tokens: float = 0.0
    cut_off: float = 0.0  # share of answers that reached the longest length
    prompt_tokens: float = 0.0  # 0: not kept


@dataclass(frozen=True)
class Line:
    """A sample's score of one variant."""

    asked: str
    model: str
    place: Place
    sample: str
    score: float
    costs: Costs
    comm: str = ""
    label: str = ""  # what the run calls its method; "" of values that were kept without it


@dataclass(frozen=True)
class Scores:
    """Scores of one task, with what was asked."""

    asked: Asked
    model: str
    of: Mapping[Place, Mapping[str, float]]  # by sample, in the task's order; full attention at each budget's samples
    costs: Mapping[Place, Costs]
    comms: frozenset[str] = frozenset()  # of methods that fetch
    prompts: Sequence[int] = ()  # tokens of each sample's prompt, the question in it; empty where they are not kept
    labels: Mapping[Place, str] = field(default_factory=dict[Place, str])

    def label(self, place: Place) -> str:
        """A variant's name for readers, with all that warns of what it is."""
        return self.labels.get(place) or title(place[2])

    def name(self, method: str, columns: Sequence[tuple[str, str]] = ()) -> str:
        """The name of a row that holds a method's variants of some columns, or of all."""
        asked = [(s, m) for s, m in columns or self.columns if (s, m, method) in self.of]
        return row_name([(self.label((*at, method)), at[0], self.asked.column(*at)) for at in asked]) or title(method)

    @property
    def scopes(self) -> list[str]:
        return [scope for scope in (SHOWN, HIDDEN) if any(place[0] == scope for place in self.of)]

    @property
    def memories(self) -> list[str]:
        """Budgets from the largest on."""
        return sorted({memory for _, memory, _ in self.of}, key=Fraction, reverse=True)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Scopes and budgets that were asked."""
        return [(s, m) for s in self.scopes for m in self.memories if (s, m, FULL) in self.of]

    @property
    def variants(self) -> list[Place]:
        return [place for place in self.of if place[2] != FULL]

    @cached_property
    def methods(self) -> list[str]:
        """All methods but full attention; the best at the smallest budgets first, and of equals by name."""
        found = dict.fromkeys(place[2] for place in self.variants)
        means = {name: [mean(s) for p, s in self.of.items() if p[2] == name] for name in found}
        return sorted(found, key=lambda name: (-fsum(means[name]) / len(means[name]), name))

    def full(self, scope: str, memory: str) -> Mapping[str, float]:
        return self.of[scope, memory, FULL]

    def n(self, scope: str, memory: str) -> int:
        return len(self.full(scope, memory))

    def answered(self, scope: str, memory: str) -> int:
        """Samples on which full attention scores, so that a method has something to lose."""
        return sum(score > 0 for score in self.full(scope, memory).values())

    def least_lost(self, scope: str) -> int:
        """Number of samples on which a method must do worse, and on none better, to be shown to be worse.

        Of so many differences that all point one way the sign-flip test finds 2 of 2^j signs as extreme.
        """
        family = max(1, sum(place[0] == scope for place in self.variants))
        return floor(1 + log2(family / LEVEL)) + 1

    def has_room(self, scope: str, memory: str) -> bool:
        """Whether a method that loses all that full attention answers is shown to be worse."""
        return self.answered(scope, memory) >= self.least_lost(scope)

    def is_tight(self, scope: str, memory: str) -> bool:
        """Whether a method must lose more than half of what full attention answers before that is shown."""
        return self.answered(scope, memory) < 2 * self.least_lost(scope)

    @property
    def is_comparable(self) -> bool:
        return all(self.has_room(*column) for column in self.columns)

    def held(self, place: Place) -> float:
        """Share of full attention's bytes."""
        return self.costs[place].device_bytes / self.costs[place[0], place[1], FULL].device_bytes

    @cached_property
    def against_full(self) -> dict[Place, Corrected]:
        """Corrected over all variants that were asked with the same scope."""
        return corrected({p: less(self.of[p], self.full(*p[:2])) for p in self.variants}, lambda place: place[0])

    @cached_property
    def hiding(self) -> dict[Place, Corrected]:
        """Each variant's score with the question hidden less with the question shown; corrected over all variants."""
        mine = [p for p in self.variants if p[0] == HIDDEN and (SHOWN, *p[1:]) in self.of]
        return corrected({p: less(self.of[p], self.of[SHOWN, p[1], p[2]]) for p in mine})

    def between(self, scope: str, memory: str) -> dict[Pair, Corrected]:
        """Every two methods at a budget, the first less the second; corrected over all pairs."""
        names = [name for name in self.methods if (scope, memory, name) in self.of]
        pairs = combinations(names, 2)
        return corrected({(a, b): less(self.of[scope, memory, a], self.of[scope, memory, b]) for a, b in pairs})

    def groups(self, scope: str, memory: str) -> tuple[list[str], list[str]]:
        """The best method with those that are not shown to be worse, and the others, each in the order of scores."""
        names = [name for name in self.methods if (scope, memory, name) in self.of]
        names.sort(key=lambda name: -mean(self.of[scope, memory, name]))
        found = self.between(scope, memory)
        apart = {name for pair, one in found.items() if one.sign and names[0] in pair for name in pair} - {names[0]}
        return [name for name in names if name not in apart], [name for name in names if name in apart]


def mean(scores: Mapping[str, float]) -> float:
    return fsum(scores.values()) / len(scores)


def less(one: Mapping[str, float], other: Mapping[str, float]) -> Paired:
    """Scores less another's on the samples that both have."""
    both = [sample for sample in one if sample in other]
    return pair(tuple(one[sample] for sample in both), tuple(other[sample] for sample in both))


@cache
def pair(one: tuple[float, ...], other: tuple[float, ...]) -> Paired:
    """What `paired` finds, once for the same scores: a page compares the same two methods in several tables."""
    return paired(one, other)


def row_name(labels: Sequence[tuple[str, str, str]]) -> str:
    """The name of a row whose cells are of variants with these labels, each with its scope and its column's words.

    The first label, and where another differs: "KVzip, whole prompt (question hidden: KVzip)".
    """
    columns: dict[str, list[tuple[str, str]]] = {}
    for label, scope, words in labels:
        columns.setdefault(label, []).append((scope, words))
    first, *others = columns or [""]
    return f"{first} ({'; '.join(f'{where(columns, label)}: {label}' for label in others)})" if others else first


def where(columns: Mapping[str, Sequence[tuple[str, str]]], label: str) -> str:
    """The scope whose columns all have the label, or those columns."""
    elsewhere = {scope for other in columns if other != label for scope, _ in columns[other]}
    return " and ".join(dict.fromkeys(words if scope in elsewhere else WORDS[scope] for scope, words in columns[label]))


def listed(names: Iterable[str]) -> str:
    """Names one after the other, told apart where one has a comma of its own."""
    names = [*names]
    return ("; " if any("," in name for name in names) else ", ").join(names)


def title(method: str) -> str:
    """A method's title in its file. A variant's name says more (`Scores.label`)."""
    file = own_methods().get(method)
    found = None if file is None else re.search(r'^    title = "(.+)"$', file.read_text(encoding="utf-8"), re.MULTILINE)
    return method if found is None else found[1]


def fetches(method: str) -> bool:
    """Whether it keeps all keys and values in host memory, and takes what a step needs from there."""
    file = own_methods().get(method)
    return file is not None and file.parent.name == "retrieving"


# --- from runs -----------------------------------------------------------------------------------


def read(root: Path) -> list[Line]:
    """The scores of all runs below a folder that are of a task of the page."""
    found = [
        line
        for folder, config in configured(root)
        for asked in SETS
        if asked.has(config)
        for line in lines_of(asked, config, *answers(folder))
    ]
    return some(found, root)


def lines_of(asked: Asked, config: Mapping[str, Any], rows: Sequence[SampleRow], label: str) -> Iterator[Line]:
    """Lines of a run, one for each sample, of whose turns the mean counts."""
    method = config["method"]["name"]
    memory = "" if method == FULL else str(config.get("budget" if asked.has_tokens else "memory") or "")
    place = asked.scope or config.get("compression_scope") or SHOWN, memory, method
    by_sample: dict[str, list[SampleRow]] = {}
    for row in rows:
        if asked.takes(row):
            by_sample.setdefault(row.sample_id, []).append(row)
    for sample, turns in by_sample.items():
        score = fsum(float(row.score or 0.0) for row in turns) / len(turns)
        costs, comm = averaged([*map(costs_of, turns)]), str(config.get("comm") or "")
        yield Line(asked.key, config["model"]["name"], place, sample, score, costs, comm, label)


def costs_of(row: SampleRow) -> Costs:
    return Costs(
        float(row.ledger.get("bytes_resident_device") or 0.0),
        row.generated_tokens,
        bool(row.fields.get("cut_off")),
        row.prompt_tokens,
    )


def averaged(each: Sequence[Costs]) -> Costs:
    return Costs(*(fsum(column) / len(each) for column in zip(*map(astuple, each), strict=True)))


def gathered(lines: Sequence[Line]) -> list[Scores]:
    """Scores by task, with samples that all variants of a scope and budget answered; a model with fewer is left out."""
    found = []
    for asked in SETS:
        own = [line for line in lines if line.asked == asked.key]
        if asked.others_of:
            own = beside(own, [line for line in lines if line.asked == asked.others_of])
        models = Counter(line.model for line in own)
        if models:
            found.append(of_model(asked, max(models, key=lambda name: models[name]), own))
    return [scores for scores in found if scores is not None]


def beside(others: Sequence[Line], first: Sequence[Line]) -> list[Line]:
    """Other methods with full attention and `FIRST`, where all were asked: to be compared on the same samples."""
    columns = {line.place[:2] for line in others} & {line.place[:2] for line in first}
    full = {(scope, "") for scope, _ in columns}
    return [
        *(line for line in first if line.place[:2] in columns | full),
        *(line for line in others if line.place[:2] in columns),
    ]


def of_model(asked: Asked, model: str, lines: Sequence[Line]) -> Scores | None:
    rows: dict[Place, dict[str, Line]] = {}
    for line in lines:
        if line.model == model:
            rows.setdefault(line.place, {})[line.sample] = line
    of: dict[Place, dict[str, float]] = {}
    costs: dict[Place, Costs] = {}
    labels: dict[Place, str] = {}
    for scope, memory in dict.fromkeys(p[:2] for p in rows if p[2] != FULL):
        if (full := rows.get((scope, "", FULL))) is None:
            continue
        column = {FULL: full} | {p[2]: by for p, by in rows.items() if p[:2] == (scope, memory)}
        both = common([*column.values()])
        if asked.is_ordered and len(both) < asked.n:
            continue
        for method, by in column.items() if both else ():
            place = scope, memory, method
            of[place] = {sample: by[sample].score for sample in both}
            costs[place] = averaged([by[sample].costs for sample in both])
            labels[place] = " or ".join(dict.fromkeys(line.label for line in by.values() if line.label))
    comms = {line.comm for place in of if fetches(place[2]) for line in rows[place].values()}
    full = rows.get((SHOWN, "", FULL), {})
    prompts = sorted(round(n) for line in full.values() if (n := line.costs.prompt_tokens))
    return Scores(asked, model, of, costs, frozenset(comms), prompts, labels) if of else None


def common(rows: Sequence[Mapping[str, Line]]) -> list[str]:
    """Samples that are in all of them, in the order of the first."""
    return [sample for sample in rows[0] if all(sample in one for one in rows)]


# --- the compact file ----------------------------------------------------------------------------


def renewed(kept: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """Kept lines with those of later runs, which decide place by place.

    A place is a task's method at a scope and a budget, with one model. If the runs ask one of its kept samples again,
    nothing older of it stays, so that no mean mixes two versions of a method. If they have other samples alone, as
    those of a run that went on elsewhere, these are added. A place that they do not ask stays as it is.

    So runs with fewer samples than were kept make n smaller, for all methods of that scope and budget: only samples
    that all have count, and a budget whose samples come in an order is left out. Ask as many samples as were kept, or
    write the page elsewhere (`--out`).

    Known samples stay in the order they had, and new ones follow: of full attention's lines the first are those that
    were known first (`Contrast.seen`).
    """
    places, later = by_place(kept), by_place(lines)
    for place, now in later.items():
        before = places.get(place, {})
        of = now if before.keys() & now.keys() else before | now
        places[place] = {sample: of[sample] for sample in (*before, *now) if sample in of}
    order = {asked.key: i for i, asked in enumerate(SETS)}
    return [line for key in sorted(places, key=lambda key: (order[key[0]], *key)) for line in places[key].values()]


def by_place(lines: Sequence[Line]) -> dict[tuple[str, str, Place], dict[str, Line]]:
    """Lines by sample, for each task, model and place; of two lines of a sample the later one counts."""
    found: dict[tuple[str, str, Place], dict[str, Line]] = {}
    for line in lines:
        found.setdefault((line.asked, line.model, line.place), {})[line.sample] = line
    return found


def keep(path: Path, lines: Sequence[Line]) -> None:
    rows = (
        (one.asked, one.model, *one.place, one.sample, f"{one.score:.4g}", f"{one.costs.device_bytes:.0f}",
         f"{one.costs.tokens:.4g}", f"{one.costs.cut_off:.4g}", f"{one.costs.prompt_tokens:.0f}", one.comm, one.label)
        for one in lines
    )  # fmt: skip
    kept.keep(path, COLUMNS, rows)


def load(path: Path) -> list[Line]:
    return [
        Line(row["set"], row["model"], (row["scope"], row["memory"], row["method"]), row["sample"],
             float(row["score"]), Costs(*(float(row.get(name) or 0) for name in COLUMNS[-6:-2])),
             row.get("comm") or "", row.get("label") or "")
        for row in kept.load(path)
    ]  # fmt: skip
