"""The papers' tables: pivots of fixed layout, with the figures beside them that the papers print.

`plots/published/tables.yaml` says what each table holds. Runs that answer one are found by their results alone, and
those that differ in model, data, prompts, comm, protocol, seed, limit, dtype or device never share a table: each set of
runs that agree in them has its own, and those that are not the paper's setting stand below the others.

Average   plain mean of the datasets' scores, these rounded to two decimals first, as the papers compute it; only where
          all of a table's datasets were run. Else: the mean of those that all methods of the block have, ours and the
          published ones alike, and the row says how many. Its interval takes each dataset for one sample.
Best,     within a row and budget, as in every pivot (`plots/tables/pivot.py`).
tied
Layout    runs on another model than the paper's do not answer its table: they have one of the same form whose title
          says so, and nothing published stands in it. A budget that only Full was run at is left out.

Not here: words (`plots/tables/paper_words.py`).
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from math import fsum
from pathlib import Path
from typing import Any

import yaml

from kvbench.plots.scored import joined
from kvbench.plots.stats import interval
from kvbench.plots.tables.pivot import At, Cell, Pivot, ends_of, judged, parts_of, placed, shared, split
from kvbench.plots.tables.values import VALUES, Frame, column_of
from kvbench.plots.tables.words import ANY, dicts
from kvbench.results import EXACT
from kvbench.results.intervals import ANYWHERE, few_samples

PUBLISHED = Path(__file__).resolve().parents[1] / "published"
AVERAGE, MEAN_OF = "Average", "Mean of "
PAPER_AVERAGES = {"Average", "Avg", "avg_of_8"}
OWN_PROMPTS = "prompts: own"
KEYS = ("budget", "dataset")  # of the columns of a paper's pivot; its rows are methods
Place = tuple[str, str, str]  # dataset, method, budget


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper, and which runs of ours stand next to its figures: an entry of tables.yaml."""

    name: str  # of the CSV, of the experiment and of what is written
    title: str
    task: str
    models: Sequence[str]
    methods: Mapping[str, Mapping[str, Any] | None]
    comm: str = ""
    question: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    datasets: Sequence[str] = ()
    times_of: Sequence[str] = ()
    ratio: float = 0.0

    def method_of(self, at: Mapping[str, Any]) -> str | None:
        """The printed name of the method that a run is of."""
        for name, our in self.methods.items():
            is_same = our and (at["kind"], at["prefill"].split()[0]) == (our["method"], our.get("prefill", EXACT))
            if our and is_same and our.get("compensated") in (None, at["label"].endswith("(C)")):
                return name
        return None

    def budget_of(self, at: Mapping[str, Any], budgets: Sequence[str]) -> str | None:
        """The printed budget that a run was given."""
        if at["budget"] == ANY or not budgets:
            return ANY
        for printed in budgets:
            asked = str(self.tokens.get(printed, printed))
            if asked.isdecimal() and asked != "1":
                found = at["tokens"] == asked
            else:
                found = at["share"] is not None and Fraction(at["share"]) == Fraction(asked)
            if found and not at["budget"].startswith("adaptive"):
                return printed
        return None


@cache
def definitions() -> dict[str, Any]:
    return yaml.safe_load((PUBLISHED / "tables.yaml").read_text(encoding="utf-8"))


def paper_tables() -> dict[str, PaperTable]:
    return {name: PaperTable(name, **entry) for name, entry in definitions()["tables"].items()}


def canonical(dataset: str) -> str:
    """A dataset's one name, from the benchmark's or a paper's: `multifieldqa_en`, `MFQA` and `MultiFieldQA` agree."""
    plain = re.sub("[^a-z0-9]", "", dataset.rpartition("/")[2].lower())
    return definitions()["datasets"].get(plain, plain)


@dataclass(frozen=True)
class Published:
    """The figures that a paper's table prints."""

    values: Mapping[Place, str]  # the budget as printed
    datasets: Sequence[str]
    methods: Sequence[str]
    budgets: Sequence[str]  # without full attention's

    def value(self, dataset: str, method: str, budget: str) -> str | None:
        """A figure as printed. Those of full attention stand once, at the budget "1" or "full", and hold for all."""
        every = (self.values.get((dataset, method, printed)) for printed in (budget, "1", "full"))
        return next((value for value in every if value is not None), None)


def read_published(paper: PaperTable) -> Published:
    with (PUBLISHED / f"{paper.name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values: dict[Place, str] = {}
    for row in rows:
        dataset = AVERAGE if row["dataset"] in PAPER_AVERAGES else row["metric"] if paper.times_of else row["dataset"]
        method = row["method"].replace("(C)", " (C)")  # printed without the space that our labels have
        if method in paper.methods:
            budget = "full" if paper.times_of else row.get("ratio") or row["budget_or_ratio"]
            values[dataset, method, budget] = row.get("score") or row["value"]
    datasets, methods, budgets = (list(dict.fromkeys(names)) for names in zip(*values, strict=True))
    return Published(
        values,
        [name for name in datasets if name != AVERAGE] or paper.datasets,
        methods,
        [budget for budget in budgets if budget not in ("1", "full")],
    )


@dataclass(frozen=True)
class Table:
    """A paper's table filled with runs that may stand side by side."""

    paper: PaperTable
    pivot: Pivot  # methods down, budgets and datasets across
    published: Published
    rows: Sequence[str]  # datasets, means last
    runs: Frame  # a row for each of their datasets
    key_bytes: float | None = None  # of a token in all layers

    def cell(self, dataset: str, method: str, budget: str) -> Cell | None:
        return self.pivot.cells.get(((method,), (budget, dataset)))

    def printed(self, dataset: str, method: str, budget: str) -> str | None:
        """The figure that the paper prints; of a mean over some datasets the mean of theirs."""
        if not dataset.startswith(MEAN_OF):
            return self.published.value(dataset, method, budget)
        names = dataset.partition(": ")[2].split(", ")
        values = [value for name in names if (value := self.published.value(name, method, budget)) is not None]
        return f"{fsum(map(float, values)) / len(values):.2f}" if len(values) == len(names) else None

    def figure(self, cell: Cell | None) -> str | None:
        """Our figure as it is printed; the mean of rounded ones as it is, since it may end in 5."""
        if cell is None or cell.mean is None:
            return None
        return f"{cell.of.get('of_rounded', self.pivot.scale * cell.mean):.2f}"

    def difference(self, cell: Cell | None, printed: str | None) -> float | None:
        """Our figure as it is printed less the paper's, so that a reader can check it by eye."""
        ours = self.figure(cell)
        return None if ours is None or printed is None else float(ours) - float(printed)

    @property
    def budgets(self) -> list[str]:
        """Those at which something was run, in the paper's order."""
        run = {column[0] for _, column in self.pivot.cells}
        return [budget for budget in self.published.budgets or [ANY] if budget in run]

    @property
    def is_layout_only(self) -> bool:
        """Whether its runs are of another model than the paper's."""
        return self.pivot.where["model"] not in self.paper.models

    @property
    def is_paper_setting(self) -> bool:
        """Whether the differences to the published figures mean something."""
        where = self.pivot.where
        return (
            not self.is_layout_only
            and where["data"] != "embedded"
            and where["limit"] == "all"
            and where.get("comm", "") in ("", self.paper.comm or where.get("comm", ""))
            and not any(OWN_PROMPTS in notes for notes in self.runs["notes"])
        )


def build_all(samples: Frame) -> dict[str, list[Table]]:
    """Every table of the papers by name; an empty list where no run answers it."""
    papers, has = paper_tables().values(), {*samples["task"]} if len(samples) else set[str]()
    of_task = {task: samples[samples["task"] == task] for task in {paper.task for paper in papers} & has}
    parts = {task: parts_of(of, ["dataset"]) for task, of in of_task.items()}
    return {
        paper.name: build(paper, of_task[paper.task], parts[paper.task]) if paper.task in parts else []
        for paper in papers
    }


def build(paper: PaperTable, samples: Frame, parts: Frame) -> list[Table]:
    """A table for each set of comparable runs that fills any of its cells, the paper's own setting first.

    Those of full attention alone are tables only where no other method was run.
    """
    published = read_published(paper)
    every, of_full = dicts(parts), parts[parts["kind"] == "full"]
    asks = [(at["asks"].get("question_position") == "before") == (paper.question == "before") for at in every]
    parts = parts.assign(
        method=[paper.method_of(at) for at in every],
        budget=[paper.budget_of(at, published.budgets) for at in every],
        prefill=parts["prefill"].replace(EXACT, ANY),
    )[asks].dropna(subset=["budget"])
    parts = parts[parts["method"].isin(published.methods)]
    of_one = times if paper.times_of else scores
    tables = [of_one(paper, group, published, samples) for group in split(parts, {"method", *KEYS})]
    keys = {model: key_bytes_per_token(samples, of) for model, of in of_full.groupby("model")["run"]}
    tables = [replace(one, key_bytes=keys.get(one.pivot.where["model"])) for one in tables if one.pivot.cells]
    more = [one for one in tables if any(cell.n and cell.of["kind"] != "full" for cell in one.pivot.cells.values())]
    return sorted(more or tables, key=lambda table: (not table.is_paper_setting, str(table.pivot.where)))


def table_of(
    paper: PaperTable, group: Frame, published: Published, rows: Sequence[str], cells: Mapping[At, Cell],
    notes: Sequence[str], percent: bool = True,
) -> Table:  # fmt: skip
    budgets, where = published.budgets or [ANY], shared(group, {"method", *KEYS})
    columns = [(budget, row) for budget in budgets for row in rows]
    methods = [(method,) for method in published.methods]
    pivot = Pivot(VALUES["score"], ("method",), KEYS, methods, columns, cells, where, percent, notes)
    return Table(paper, pivot, published, rows, group)


def scores(paper: PaperTable, group: Frame, published: Published, samples: Frame) -> Table:
    notes: list[str] = []
    names = {canonical(name): name for name in published.datasets}
    known = group["dataset"].map(canonical)
    if known.isin([*names]).any():
        group = group.assign(dataset=known.map(names)).dropna(subset=["dataset"])
    else:  # embedded sets have other names
        notes.append("None of the datasets is the paper's, so nothing published stands beside them")
        published = replace(published, values={}, datasets=list(dict.fromkeys(group["dataset"])))
    if group["model"].iloc[0] not in paper.models:
        published = replace(published, values={})
    if (group["budget"] == ANY).all():
        group = group.assign(budget=published.budgets[0])
    cells, left_out = placed(group, ("method",), KEYS, bounded_by=("budget",))
    cells = {key: cell for key, cell in cells.items() if cell.n or cell.n_oom}
    means = averages(cells, published)
    cells, why = judged(cells | means, ("method",))
    notes = [*own_notes(group), *notes, *left_out, *([f"Where no cell of a row is marked: {why}."] if why else [])]
    rows = [*published.datasets, *dict.fromkeys([AVERAGE, *(column[1] for _, column in means)])]
    return table_of(paper, group, published, rows, cells, notes)


def averages(cells: Mapping[At, Cell], published: Published) -> dict[At, Cell]:
    """The papers' average of each column, and where datasets are missing the mean of those that all columns have."""
    means: dict[At, Cell] = {}
    has: dict[tuple[str, str], set[str]] = {}
    for ((method,), (budget, dataset)), cell in cells.items():
        if cell.mean is not None:
            has.setdefault((budget, method), set()).add(dataset)
    for budget in dict.fromkeys(budget for budget, _ in has):
        columns = [datasets for (there, _), datasets in has.items() if there == budget]
        common = [name for name in published.datasets if all(name in datasets for datasets in columns)]
        rows = {AVERAGE: published.datasets}
        if 1 < len(common) < len(published.datasets):
            rows[f"{MEAN_OF}{len(common)}: {', '.join(common)}"] = common
        for row, datasets in rows.items():
            for method in published.methods:
                if has.get((budget, method), set()) >= {*datasets}:
                    of = [cells[(method,), (budget, dataset)] for dataset in datasets]
                    means[(method,), (budget, row)] = average(of, row)
    return means


def average(members: Sequence[Cell], row: str) -> Cell:
    place = joined([cell.of["scores"] for cell in members])
    rounded = [round(100 * cell.mean, 2) for cell in members if cell.mean is not None]
    mean = fsum(rounded) / len(rounded)
    means = {name: mean_over((cell.of["means"][name], cell.n) for cell in members) for name in members[0].of["means"]}
    own = {"family": (row, *members[0].of["family"]), "folder": "", "means": means, "of_rounded": mean}
    return Cell(
        {**members[0].of, **own},
        place,
        mean / 100,
        *ends_of(place.interval),
        sum(cell.n for cell in members),
        sum(cell.n_oom for cell in members),
        any(cell.over for cell in members),
        place.few,
    )


def mean_over(figures: Iterable[tuple[float | None, int]]) -> float | None:
    """Of cells' figures with their n the mean over all samples."""
    known = [(value, n) for value, n in figures if n and value is not None]
    return fsum(value * n for value, n in known) / sum(n for _, n in known) if known else None


def own_notes(group: Frame) -> list[str]:
    """Notes of a table's runs on themselves, each sentence once."""
    runs = group.drop_duplicates("run")
    common = set.intersection(*map(set, runs["notes"]))
    own = [
        f"{label}: {note}"
        for label, notes in zip(runs["label"], runs["notes"], strict=True)
        for note in notes
        if note not in common
    ]
    return list(dict.fromkeys([*(note for note in runs["notes"].iloc[0] if note in common), *own]))


def key_bytes_per_token(samples: Frame, of_full: Frame) -> float | None:
    """Bytes of one token's keys in all layers, from what full attention kept.

    It keeps the prompt and every token that was fed: all generated ones but the last.
    """
    kept = column_of(samples, "bytes_resident_device")
    for at in dicts(samples[samples["run"].isin(of_full) & (kept > 0).fillna(False)].head(1)):
        keys = at["bytes_resident_device"] * float(Fraction(at.get("key_share") or "1/2"))
        return keys / (at["prompt_tokens"] + at["generated_tokens"] - 1)
    return None


# --- XKV, Table IV: not scores but seconds and bytes --------------------------------------------


def times(paper: PaperTable, group: Frame, published: Published, samples: Frame) -> Table:
    """Time and KV memory of a dataset, without the seconds of samples that shared a batch, which a note says."""
    cells: dict[At, Cell] = {}
    notes: list[str] = []
    known = group["dataset"].map(canonical)
    group = group[known == next((name for name in paper.times_of if (known == name).any()), "")]
    for method in published.methods:
        candidates = []
        for at in dicts(group[group["method"] == method]):
            rows = samples[(samples["run"] == at["run"]) & (samples["dataset"].astype(str) == at["dataset"])]
            off = 0.0 if at["kind"] == "full" else abs(float(Fraction(at["share"] or 0)) - paper.ratio)
            candidates.append((off, int((rows["batch_rows"] != 1).sum()), at["folder"], at, rows))
        if not candidates:
            continue
        *_, at, rows = min(candidates, key=lambda one: one[:3])
        done = rows[rows["status"] == "ok"]
        alone = done[done["batch_rows"] == 1]
        if len(alone) < len(done):
            notes.append(
                f"{method}: {len(done) - len(alone)} of {len(done)} samples were decoded beside other methods, so "
                "their seconds are not this method's; run it alone for the time"
            )
        if at["share"] and at["kind"] != "full":
            notes.append(f"{method}: ratio {at['share']}; the paper's is not printed")
        seconds = [*(alone["prefill_s"] + alone["decode_s"]).dropna()]
        kept = [*(done["bytes_resident_device"] / 2**30).dropna()]
        rows_of = {"single_task_runtime_s": seconds, "kv_cache_single_task_gb": kept}
        for row, values in rows_of.items():
            if values:
                mean, (low, high), n_oom = (
                    fsum(values) / len(values),
                    ends_of(interval(values, ANYWHERE)),
                    len(rows) - len(done),
                )
                cells[(method,), (ANY, row)] = Cell(
                    at, at["scores"], mean, low, high, len(values), n_oom, at["scores"].over, few_samples(len(values))
                )
        if seconds:
            one = cells[(method,), (ANY, "single_task_runtime_s")]
            cells[(method,), (ANY, "total_runtime_s")] = replace(one, mean=fsum(seconds), low=None, high=None)
    return table_of(paper, group, published, published.datasets, cells, notes, percent=False)
