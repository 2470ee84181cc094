"""docs/cited.md: a table for each of the tasks that are cited now, from scores that stand next to the page.

    python -m kvbench.plots.cited             the page again, from docs/cited/scores.csv.gz
    python -m kvbench.plots.cited RUNS        the values of the runs of conf/experiment/cited_*.yaml, and the page

Where full attention is not shown to be better than guessing, a column says so, and compares nothing.

Not here: statistics (`plots/stats.py`), what tasks are (docs/tasks.md).
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import fsum
from pathlib import Path
from typing import Any

from kvbench.plots import conditions, kept
from kvbench.plots.evidence import FULL, fetches, listed, mean, title
from kvbench.plots.kept import KEPT, answers, configured, run, some
from kvbench.plots.stats import Corrected, corrected, paired
from kvbench.results import SampleRow, few_samples, interval
from kvbench.results.sheet import ABSENT, Sheet, markdown

NAME = "cited"
COLUMNS = ("set", "column", "model", "method", "sample", "value", "comm", "label")
AGES = {"recent": 500, "older": math.inf}  # tokens
ASKED_OF_LISTS = {
    **dict.fromkeys(("user", "date"), "named"),
    **dict.fromkeys(("most", "least", "count", "compare", "n_labels_at_least"), "counted"),
}
LOSSES = (0.0, math.inf)  # what a loss may be
SHARES = (0.0, 1.0)
ENOUGH = 0.75  # of full attention's samples: a method that has fewer is left out, and takes none from the others


@dataclass(frozen=True)
class Asked:
    """One table: which values of which runs, and the words for it."""

    experiment: str  # after cited_
    title: str
    about: str
    task: str
    columns: Mapping[str, str]  # what a sample's place is called, in their order
    n: int  # samples that the experiment asks of each column
    measure: str = ""  # a loss in nats that is measured too, shown instead of the score
    chance: Mapping[str, float] | None = None  # share that guessing scores, by column
    by: str = "dataset"  # field that says which column, or "age"
    groups: Mapping[str, str] = field(default_factory=dict[str, str])  # columns of that field's values
    of_context: bool = False  # a sample is a context, and its value the mean of its questions

    def column(self, row: SampleRow) -> str:
        found = row.fields.get(self.by)
        if self.by == "age" and found is not None:
            found = next(name for name, most in AGES.items() if found <= most)
        found = self.groups.get(str(found), found)
        return str(found) if found in self.columns else ""

    def value(self, row: SampleRow) -> float | None:
        return row.fields.get("measures", {}).get(self.measure) if self.measure else row.score


SETS = (
    Asked(
        "babilong", "BABILong: facts hidden in prose",
        "Drawn worlds in 1,000 tokens of prose, without a worked example: where somebody is (`qa1`, six places), and "
        "who gave what to whom (`qa5`, seven names and things). An answer is right or wrong.",
        "babilong", {"qa1": "where", "qa5": "who gave what"}, 30, chance={"qa1": 1 / 6, "qa5": 1 / 7},
    ),
    Asked(
        "mrcr", "MRCR: alike pieces in a dialogue, token by token",
        "Dialogues of up to 1,000 tokens. The wanted piece is fed behind its ten characters: the only one of its kind, "
        "or the first or second of two. Values are the loss of its tokens.",
        "mrcr_forced", {"1needle": "one of its kind", "2needle": "one of two"}, 12, measure="piece_nll",
    ),
    Asked(
        "graphwalks", "GraphWalks: walks in drawn graphs, token by token",
        "Graphs of up to 1,000 tokens. The right nodes are fed, in the order of their names: parents of a node, or "
        "nodes one step behind it. Values are the loss of their tokens.",
        "graphwalks_forced", {"parents": "parents", "bfs": "one step"}, 10, measure="nodes_nll",
    ),
    Asked(
        "oolong", "Oolong: questions on all lines",
        "Drawn lists of up to 750 tokens with four questions each, of seven kinds in turn: which user or date comes "
        "most often, where picking any of the list scores some 12; and counts, comparisons, the most and the least "
        "frequent label, where who knows the questions alone, and gives to each kind the answer that is right most "
        "often, scores some 46. A sample is a list, and its score the mean of its questions.",
        "oolong", {"named": "which user or date", "counted": "counts and labels"}, 20,
        chance={"named": 0.12, "counted": 0.46}, by="kind", groups=ASKED_OF_LISTS, of_context=True,
    ),
    Asked(
        "helmet", "HELMET: labels by many examples, values of keys",
        "Prompts of up to 1,000 tokens: some 50 examples of four invented classes, of which a guess finds one in four, "
        "or a JSON object whose value of one key is asked. An answer is right or wrong.",
        "helmet", {"icl": "label", "json_kv": "value"}, 24, chance={"icl": 1 / 4, "json_kv": 0.0},
    ),
    Asked(
        "agents", "Work on drawn records, token by token",
        "Work of up to 1,500 tokens with two questions each, each in a prompt of its own. What is right is fed. "
        "Values are the loss of the value's tokens: of what was seen last (fresh), of what was seen before (stale), of "
        "counts and other things that all of the work says.",
        "agent_forced", {"fresh": "fresh", "stale": "stale", "count": "count"}, 10, measure="value_nll", by="group",
    ),
    Asked(
        "airline", "Recorded calls of tau-bench, token by token",
        "Airline traces (MIT), each decision's whole past in a prompt of up to 8,000 tokens. The recorded call is fed. "
        "Values are the loss of its arguments' tokens, by how many tokens ago the oldest of them last stood.",
        "agent_forced", {"recent": "up to 500 ago", "older": "longer ago"}, 20, measure="value_nll", by="age",
    ),
)  # fmt: skip

HEAD = """\
# Tables of the tasks that are cited now

{conditions}\
Full attention, Oracle, and methods that keep or fetch a quarter of the prompt's tokens (`ratio=1/4`), on drawn samples
of the tasks of [tasks.md](tasks.md), and on recorded traces. Each table is of one experiment:

    python run.py -m experiment=cited_helmet
    python -m kvbench.plots.cited runs

Nothing here is comparable with published scores: samples are drawn, short, and asked of small models. Scores are 0 to
100, with 95 % intervals ([one rule for every n](intervals.md)). A loss is in nats a token: full attention's stands
there itself, of the others what they lose more, as a mean of paired differences with its interval. `*` marks what full
attention is shown to do better, `+` what is shown to be better than it, by the sign-flip test after Holm's correction
over the column. Where full attention does not score more than guessing, nothing can be compared, and the column says
so. Runs were stopped by the clock, not by their scores, where n is below what the experiment asks; a method with less
than three quarters of full attention's samples is left out. Every value is in [scores.csv.gz](cited/scores.csv.gz),
from which `python -m kvbench.plots.cited` makes this page.
"""


AT_A_SIXTEENTH = (
    "**A quarter of the tokens is one budget of several**: KVzip, which loses little here, collapses at 1/16 of the "
    "bytes on documents ([results.md](results.md#questions-on-documents))."
)


@dataclass(frozen=True)
class Line:
    """A sample's value of one method."""

    asked: str
    column: str
    model: str
    method: str
    sample: str
    value: float
    comm: str = ""
    label: str = ""  # what the run calls its method


# --- from runs -----------------------------------------------------------------------------------


def read(root: Path) -> list[Line]:
    found = [
        line
        for folder, config in configured(root)
        for asked in SETS
        if has(asked, config)
        for line in lines_of(asked, config, *answers(folder))
    ]
    return some(found, root)


def has(asked: Asked, config: Mapping[str, Any]) -> bool:
    is_recorded = config["task"]["params"].get("source") != "embedded"
    return config["task"]["name"] == asked.task and is_recorded == (asked.experiment == "airline")


def lines_of(asked: Asked, config: Mapping[str, Any], rows: Sequence[SampleRow], label: str) -> Iterator[Line]:
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        column, value = asked.column(row), asked.value(row)
        if column and value is not None:
            sample = row.fields["sample"] if asked.of_context else row.id
            values.setdefault((column, sample), []).append(value)
    for (column, sample), each in values.items():
        names = config["model"]["name"], config["method"]["name"]
        comm = str(config.get("comm") or "")
        yield Line(asked.experiment, column, *names, sample, fsum(each) / len(each), comm, label)


def keep(path: Path, lines: Sequence[Line]) -> None:
    kept.keep(path, COLUMNS, ((*astuple(line)[:-3], f"{line.value:.4g}", line.comm, line.label) for line in lines))


def load(path: Path) -> list[Line]:
    return [
        Line(row["set"], row["column"], row["model"], row["method"], row["sample"], float(row["value"]),
             row.get("comm") or "", row.get("label") or "")
        for row in kept.load(path)
    ]  # fmt: skip


# --- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """The values of all methods on the samples that all of them have."""

    asked: Asked
    name: str
    of: Mapping[str, Mapping[str, float]]  # by method and sample
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def full(self) -> Mapping[str, float]:
        return self.of[FULL]

    @property
    def bounds(self) -> tuple[float, float]:
        return LOSSES if self.asked.measure else SHARES

    @property
    def is_at_chance(self) -> bool:
        """Whether full attention may as well be guessing."""
        if self.asked.measure:
            return False
        found, chance = interval([*self.full.values()]), (self.asked.chance or {}).get(self.name, 0.0)
        return found is None or found.low <= chance

    @property
    def few(self) -> str:
        """Why so few contexts cannot show a loss, whatever it is; "" where they can."""
        return few_samples(len(self.full), len(self.of) - 1)

    def against_full(self) -> dict[str, Corrected]:
        samples = [*self.full]
        pairs = {
            name: paired([each[s] for s in samples], [self.full[s] for s in samples], bounds=self.bounds)
            for name, each in self.of.items() if name != FULL
        }  # fmt: skip
        return corrected(pairs)


def columns_of(asked: Asked, lines: Sequence[Line]) -> list[Column]:
    found = list[Column]()
    for name in asked.columns:
        of: dict[str, dict[str, float]] = {}
        labels: dict[str, str] = {}
        for line in lines:
            if (line.asked, line.column) == (asked.experiment, name):
                of.setdefault(line.method, {})[line.sample] = line.value
                labels[line.method] = line.label
        if FULL in of:
            of = {method: each for method, each in of.items() if len(each) >= ENOUGH * len(of[FULL])}
            both = [sample for sample in of[FULL] if all(sample in each for each in of.values())]
            if both:
                found.append(Column(asked, name, {method: by_context(of[method], both) for method in of}, labels))
    return found


def by_context(values: Mapping[str, float], samples: Sequence[str]) -> dict[str, float]:
    """The mean of the questions on each dialogue, trace or list: these are the samples, and no question is one."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.partition("/")[0], []).append(values[sample])
    return {context: fsum(each) / len(each) for context, each in found.items()}


def name_in(columns: Sequence[Column], method: str) -> str:
    """The name for readers of a method's variants in these columns, with all that warns of what they are."""
    labels = dict.fromkeys(label for column in columns if (label := column.labels.get(method)))
    return " or ".join(labels) or title(method)


def cell(column: Column, method: str, against: Mapping[str, Corrected]) -> str:
    if method not in column.of:
        return ABSENT
    if column.asked.measure:
        if method == FULL:
            return f"{mean(column.full):.2f}"
        found = against[method]
        spread = found.paired.difference
        ends = "" if spread is None else f" ({spread.low:+.2f} to {spread.high:+.2f})"
        sign = {1: " *", -1: " +", 0: ""}[found.sign]
        return f"{found.paired.mean:+.2f}{ends}{sign}"
    spread = interval([*column.of[method].values()])
    ends = "" if spread is None else f" ({100 * spread.low:.0f} to {100 * spread.high:.0f})"
    sign = {-1: " *", 1: " +", 0: ""}[against[method].sign] if method in against else ""
    return f"{100 * mean(column.of[method]):.0f}{ends}{'' if column.is_at_chance else sign}"


def section(asked: Asked, lines: Sequence[Line]) -> str:
    columns = columns_of(asked, lines)
    head = f"## {asked.title}\n\n{asked.about}"
    command = f"    python run.py -m experiment=cited_{asked.experiment}"
    if not columns:
        return f"{head}\n\n{command}\n\nNothing was asked yet.\n"
    model = next(line.model for line in lines if line.asked == asked.experiment)
    methods = sorted({method for column in columns for method in column.of}, key=lambda name: (name != FULL, name))
    methods = [FULL, *sorted(methods[1:], key=lambda name: order(name, columns))]
    against = [column.against_full() for column in columns]
    heads = ["method", *(f"{asked.columns[column.name]}, n = {len(column.full)}" for column in columns)]
    pairs = [*zip(columns, against, strict=True)]
    rows = [[name_in(columns, name), *(cell(column, name, found) for column, found in pairs)] for name in methods]
    unit = "loss in nats" if asked.measure else "score"
    parts = [head, f"{command}\n\n{model}; {unit}.", markdown(Sheet(heads, rows))]
    low = [asked.columns[column.name] for column in columns if column.is_at_chance]
    if low:
        parts.append(f"Full attention is not shown to be above chance in: {', '.join(low)}. Nothing is compared there.")
    if counts := verdicts(columns, against):
        parts.append(counts)
    return "\n\n".join(parts) + "\n"


def order(method: str, columns: Sequence[Column]) -> float:
    """The best first."""
    means = [mean(column.of[method]) for column in columns if method in column.of]
    return fsum(means) / len(means) * (1 if columns[0].asked.measure else -1)


def verdicts(columns: Sequence[Column], against: Sequence[Mapping[str, Corrected]]) -> str:
    """Words on who is shown to lose, by column."""
    found = list[str]()
    for column, each in zip(columns, against, strict=True):
        if column.is_at_chance:
            continue
        name = column.asked.columns[column.name]
        if column.few:
            found.append(f"- {name}: too few to compare ({column.few}).")
            continue
        worse = -1 if not column.asked.measure else 1
        losing = [name_in([column], name) for name, one in each.items() if one.sign == worse]
        found.append(f"- {name}: {listed(losing) if losing else 'no method'} shown to lose.")
    return "\n".join(found)


def page(lines: Sequence[Line]) -> str:
    fetching = [line for line in lines if fetches(line.method)]
    comm = conditions.second_budget({line.comm for line in fetching}, {line.model for line in fetching})
    head = HEAD.format(conditions=conditions.head([comm, AT_A_SIXTEENTH if lines else ""]))
    return "\n".join([head, *(section(asked, lines) for asked in SETS)])


def write(out: Path, runs: Path | None) -> list[Path]:
    folder = out / NAME
    folder.mkdir(parents=True, exist_ok=True)
    if runs is not None:
        keep(folder / KEPT, read(runs))
    (out / f"{NAME}.md").write_text(page(load(folder / KEPT)), encoding="utf-8")
    return [out / f"{NAME}.md", folder / KEPT]


def main(arguments: Sequence[str]) -> int:
    return run("kvbench.plots.cited", "Write docs/cited.md.", write, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
