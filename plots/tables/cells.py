"""The cells of the papers' tables: which runs share a table, which run stands in a cell, and what the cell says.

Runs that differ in model, data, prompts, comm, protocol, seed, limit, dtype or device never share a table: each set of
runs that agree in them has its own, and those that are not the paper's setting stand below the others.

Average   plain mean of the datasets' scores, these rounded to two decimals first, as the papers compute it; only where
          all of a table's datasets were run. Else: the mean of those that all methods of the block have, ours and the
          published ones alike, and the row says how many. Its interval takes each dataset for one sample.
Best,     as `standings` finds within a row and budget, without those that nothing bounds (Full, Oracle, MInference
tied      alone) and without runs over budget.
Layout    runs on another model than the paper's do not answer its table: they have one of the same form whose title
          says so, and nothing published stands in it. A budget that only Full was run at is left out.

Not here: what a paper's table holds (`plots/tables/papers.py`), its words (`plots/tables/paper_words.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from kvbench.plots.read import Conditions, Run, has_budget, key_bytes_per_token, measured, over_budget, scores
from kvbench.plots.run_sets import comparable
from kvbench.plots.scored import Scored, best, compared
from kvbench.plots.stats import Corrected, interval, macro_interval
from kvbench.plots.tables.papers import (
    AVERAGE,
    EFFICIENCY,
    PaperTable,
    Published,
    canonical,
    read_published,
    read_published_efficiency,
)
from kvbench.results import SampleRow
from kvbench.results.intervals import ANYWHERE

# Methods that are never bold: nothing bounds them.
FULL = {"Full", "FullKV"}
NOT_RANKED = FULL | {"Oracle", "MInference"}
OWN_PROMPTS = "prompts: own"
CellKey = tuple[str, str, str]  # dataset, method, budget


@dataclass(frozen=True)
class Cost:
    """Means over the samples of a cell of what they took; None: not measured."""

    tokens_attended: float | None = None
    tokens_budget: float | None = None
    effective_ratio: float | None = None
    kv_bytes_per_step: float | None = None
    find_bytes_per_step: float | None = None
    comm: float | None = None  # these, relative to the bytes of the prompt's keys
    device_bytes: float | None = None
    host_bytes: float | None = None


@dataclass(frozen=True)
class TableCell:
    """One place of a table: our figure and the paper's. Scores are 0 to 100 here."""

    dataset: str
    method: str
    budget: str
    score: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    n_oom: int = 0
    published: str | None = None
    over: bool = False  # a sample exceeded its budget
    embedded: bool = False
    mark: str = ""  # "bold" for the best, "tie" where several may be
    cost: Cost = Cost()
    run: str = ""  # name of its folder
    label: str = ""  # what the run calls its method; the column has the paper's name
    against: Corrected | None = None  # full attention's, on the prompts that both answered

    @property
    def difference(self) -> float | None:
        """Our figure as it is printed less the paper's, so that a reader can check it by eye."""
        if self.score is None or self.published is None:
            return None
        return round(self.score, 2) - float(self.published)


@dataclass(frozen=True)
class Table:
    """A paper's table filled with runs that may stand side by side."""

    paper_table: PaperTable
    where: Conditions
    datasets: list[str]  # rows, `AVERAGE` last
    methods: list[str]
    budgets: list[str]
    cells: Mapping[CellKey, TableCell]
    notes: list[str]
    prompts: str = ""  # see `prompt_settings`; "" where all are the defaults
    own_prompts: bool = False  # the prompts' wording is ours, not the benchmark's

    @property
    def is_layout_only(self) -> bool:
        """Whether its runs are of another model than the paper's."""
        return self.where.model not in self.paper_table.models

    @property
    def is_paper_setting(self) -> bool:
        """Whether the differences to the published figures mean something."""
        same_comm = not self.paper_table.comm or self.where.comm in ("", self.paper_table.comm)
        return (
            not self.is_layout_only
            and self.where.data_source != "embedded"
            and self.where.limit == 0
            and same_comm
            and not self.own_prompts
        )


def build(paper_table: PaperTable, runs: Sequence[Run]) -> list[Table]:
    """A table for each set of comparable runs that fills any of its cells."""
    tables = []
    published = read_published(paper_table)
    for prompts, where, members in comparable(answering(paper_table, runs)):
        notes: list[str] = []
        paper = stand_in(published, members, notes)
        if where.model not in paper_table.models:
            paper = replace(paper, values={})
        key_bytes = key_bytes_per_token(members)
        cells: dict[CellKey, TableCell] = {}
        places: dict[CellKey, Scored] = {}
        for budget in paper.budgets:
            for dataset in paper.datasets:
                for method in paper.methods:
                    key = (dataset, method, budget)
                    run, rows = choose(paper_table, members, key, notes)
                    places[key] = Scored.of(rows)
                    cells[key] = table_cell(key, run, places[key], paper.value(*key), key_bytes)
        if not any(each.n or each.n_oom for each in cells.values()):
            continue
        means = averages(cells, places, paper)
        cells, why = judged(cells | means, places)
        notes += [f"Where no cell of a row is marked: {'; '.join(why)}"] if why else []
        datasets = list(dict.fromkeys(key[0] for key in cells))
        tables.append(
            Table(
                paper_table,
                where,
                datasets,
                paper.methods,
                filled(paper.budgets, cells),
                cells,
                remarks(members, notes),
                prompts,
                OWN_PROMPTS in {note for run in members for note in run.result.notes},
            )
        )
    return in_order(tables)


def in_order(tables: Sequence[Table]) -> list[Table]:
    """The paper's own setting first; tables of full attention alone only where no other method was run."""
    more = [t for t in tables if any(c.n for c in t.cells.values() if c.method not in FULL)]
    return sorted(more or tables, key=lambda table: not table.is_paper_setting)


def stand_in(paper: Published, runs: Sequence[Run], notes: list[str]) -> Published:
    """The paper's figures, or the runs' own datasets where none is the paper's: embedded sets have other names."""
    names = [name for run in runs for name in run.datasets()]
    if {canonical(name) for name in names} & {canonical(name) for name in paper.datasets}:
        return paper
    notes.append("None of the datasets is the paper's, so nothing published stands beside them")
    return replace(paper, values={}, datasets=list(dict.fromkeys(names)))


def answering(paper_table: PaperTable, runs: Iterable[Run]) -> list[Run]:
    """The runs of the table's task that have a prefill of its columns and the question where the table has it."""
    return [
        run
        for run in runs
        if run.result.task == paper_table.task
        and run.prefill in paper_table.prefills
        and (run.task_param("question_position") == "before") == paper_table.question_first
    ]


def choose(
    paper_table: PaperTable, runs: Sequence[Run], key: CellKey, notes: list[str]
) -> tuple[Run | None, tuple[SampleRow, ...]]:
    """The run of a cell and its samples of the dataset.

    Of several runs it is one with plain settings rather than a preset, then the one with most samples, then the first
    by the folder's name; a note names the others, unless all have the same scores.
    """
    dataset, method, budget = key
    column = paper_table.methods.get(method)
    if column is None:
        return None, ()
    tokens = (paper_table.tokens or {}).get(budget, budget)
    candidates = [
        (run, rows)
        for run in runs
        if column.matches(run) and (run.is_full or has_budget(run, tokens))
        for name, rows in run.datasets().items()
        if canonical(name) == canonical(dataset)
    ]
    if not candidates:
        return None, ()
    candidates.sort(key=lambda one: (one[0].is_preset, -len(one[1]), one[0].folder.name))
    if len({tuple(scores(rows)) for _, rows in candidates}) > 1:
        names = ", ".join(run.folder.name for run, _ in candidates[1:])
        notes.append(
            f"{method} at {budget} on {dataset} has {len(candidates)} runs; shown is "
            f"{candidates[0][0].folder.name}, left out: {names}"
        )
    return candidates[0]


def table_cell(
    key: CellKey, run: Run | None, place: Scored, published: str | None, key_bytes: float | None
) -> TableCell:
    """A cell of a run's samples; of the published figure alone where there is no run."""
    empty = TableCell(*key, published=published)
    if run is None:
        return empty
    rows, spread = place.rows, place.interval
    return replace(
        empty,
        score=None if place.mean is None else 100 * place.mean,
        low=None if spread is None else 100 * spread.low,
        high=None if spread is None else 100 * spread.high,
        n=place.n,
        n_oom=place.n_oom,
        over=place.over,
        embedded=run.embedded,
        run=run.folder.name,
        label=run.result.method_label,
        cost=cost(rows, key_bytes) if place.n else Cost(),
    )


def cost(rows: Sequence[SampleRow], key_bytes: float | None) -> Cost:
    find = measured(rows, "bytes_index_read_per_step")
    done = [row for row in rows if row.status == "ok"]
    prompt = fsum(row.prompt_tokens for row in done) / len(done) if done else None
    return Cost(
        tokens_attended=measured(rows, "tokens_attended_mean"),
        tokens_budget=measured(rows, "tokens_budget"),
        effective_ratio=measured(rows, "effective_ratio"),
        kv_bytes_per_step=measured(rows, "bytes_moved_kv_per_step"),
        find_bytes_per_step=find,
        comm=None if find is None or not key_bytes or not prompt else find / key_bytes / prompt,
        device_bytes=measured(rows, "bytes_resident_device"),
        host_bytes=measured(rows, "bytes_resident_host"),
    )


def averages(
    cells: Mapping[CellKey, TableCell], places: dict[CellKey, Scored], paper: Published
) -> dict[CellKey, TableCell]:
    """The papers' average of each column, and where datasets are missing the mean of those that all columns have.

    `places` get the samples that each is the mean of.
    """
    means: dict[CellKey, TableCell] = {}
    for budget in paper.budgets:
        has = {m: {d for d in paper.datasets if cells[d, m, budget].score is not None} for m in paper.methods}
        columns = [datasets for datasets in has.values() if datasets]
        common = [d for d in paper.datasets if columns and all(d in datasets for datasets in columns)]
        rows = {AVERAGE: paper.datasets}
        if 1 < len(common) < len(paper.datasets):
            rows[f"Mean of {len(common)}: {', '.join(common)}"] = common
        for row, datasets in rows.items():
            for method in paper.methods:
                key = (row, method, budget)
                printed = [float(value) for d in datasets if (value := paper.value(d, method, budget)) is not None]
                published = paper.value(*key)
                if row != AVERAGE and len(printed) == len(datasets):
                    published = f"{fsum(printed) / len(printed):.2f}"
                means[key] = TableCell(*key, published=published)
                if has[method] >= set(datasets):
                    parts = [places[d, method, budget] for d in datasets]
                    places[key] = Scored.of([line for part in parts for line in part.rows])
                    means[key] = average(means[key], [cells[d, method, budget] for d in datasets], parts)
    return means


def average(empty: TableCell, members: Sequence[TableCell], parts: Sequence[Scored]) -> TableCell:
    rows = [row for place in parts for row in place.rows]
    spread = macro_interval([[v for of in place.values.values() for v in of.values()] for place in parts])
    comms = [each.cost.comm for each in members if each.cost.comm is not None]
    return replace(
        empty,
        score=fsum(round(each.score, 2) for each in members if each.score is not None) / len(members),
        low=None if spread is None else 100 * spread.low,
        high=None if spread is None else 100 * spread.high,
        n=sum(each.n for each in members),
        n_oom=sum(each.n_oom for each in members),
        over=any(each.over for each in members),
        embedded=any(each.embedded for each in members),
        cost=replace(cost(rows, None), comm=fsum(comms) / len(comms) if comms else None),
    )


def filled(budgets: Sequence[str], cells: Mapping[CellKey, TableCell]) -> list[str]:
    """The budgets at which a method with a budget was run; all that Full has where nothing else was run."""
    run = {(key[2], each.method in FULL) for key, each in cells.items() if each.run}
    return [b for b in budgets if (b, False) in run] or [b for b in budgets if (b, True) in run][:1]


def judged(
    cells: Mapping[CellKey, TableCell], places: Mapping[CellKey, Scored]
) -> tuple[dict[CellKey, TableCell], list[str]]:
    """The cells with differences to full attention and the best of each row and budget; why some rows have none."""
    known = {key: place for key, place in places.items() if cells[key].score is not None}

    def full(key: CellKey) -> Scored | None:
        dataset, _, budget = key
        return next((found for name in sorted(FULL) if (found := known.get((dataset, name, budget)))), None)

    ranked = {key: place for key, place in known.items() if key[1] not in NOT_RANKED and not cells[key].over}
    families = Counter(dataset for dataset, method, _ in known if method not in FULL)
    against = compared(known, full, lambda key: key[0])
    marks, why = best(ranked, lambda key: (key[0], key[2]), lambda key: families[key[0]])
    made = {key: replace(each, against=against.get(key), mark=marks.get(key, "")) for key, each in cells.items()}
    return made, why


def remarks(runs: Sequence[Run], notes: Sequence[str]) -> list[str]:
    """Notes of a table's runs on themselves, each sentence once."""
    by_run = [f"{run.result.method_label}: {note}" for run in runs for note in run.result.notes]
    shared = [note for run in runs[:1] for note in run.result.notes]
    common = [note for note in shared if all(note in run.result.notes for run in runs)]
    own = [line for line in by_run if line.partition(": ")[2] not in common]
    return list(dict.fromkeys([*common, *own, *notes]))


# --- XKV, Table IV: not scores but seconds and bytes --------------------------------------------


def build_efficiency(runs: Sequence[Run]) -> list[Table]:
    """Time and KV memory on NarrativeQA, without the seconds of samples that shared a batch, which a note says."""
    paper_table, published = EFFICIENCY, read_published_efficiency()
    tables = []
    for prompts, where, members in comparable(answering(paper_table, runs)):
        cells: dict[CellKey, TableCell] = {}
        notes: list[str] = []
        for method in paper_table.methods:
            ours = efficiency_cells(paper_table, members, method, notes)
            for metric, printed in published[method].items():
                each = ours.get(metric, TableCell(metric, method, ""))
                cells[metric, method, ""] = replace(each, published=printed)
        if any(each.n for each in cells.values()):
            metrics = list(published["FullKV"])
            tables.append(Table(paper_table, where, metrics, list(paper_table.methods), [""], cells, notes, prompts))
    return in_order(tables)


def off_ratio(run: Run) -> float:
    """How far a run is from the paper's ratio; full attention has none."""
    return 0.0 if run.is_full else abs((run.result.ratio or 0) - 0.385)


def n_shared(rows: Iterable[SampleRow]) -> int:
    """How many samples were decoded together with other methods."""
    return sum(row.batch_rows != 1 for row in rows)


def efficiency_cells(
    paper_table: PaperTable, runs: Sequence[Run], method: str, notes: list[str]
) -> dict[str, TableCell]:
    """The cells of one column by metric; {} without a run of it."""
    column = paper_table.methods[method]
    assert column is not None, method
    datasets = {canonical(name) for run in runs for name in run.datasets()}
    dataset = "narrativeqa" if "narrativeqa" in datasets else "docsqa"  # the embedded set's
    candidates = [
        (run, rows)
        for run in runs
        if column.matches(run)
        for name, rows in run.datasets().items()
        if canonical(name) == dataset
    ]
    if not candidates:
        return {}
    # The ratio is not printed; 1.54 of 4.00 GB is 38.5 %, so the run that is nearest to it stands for it.
    candidates.sort(key=lambda one: (off_ratio(one[0]), n_shared(one[1]), one[0].folder.name))
    run, rows = candidates[0]
    done = [row for row in rows if row.status == "ok"]
    kept = [row.ledger["bytes_resident_device"] for row in done]
    cells: dict[str, TableCell] = {}

    def add(metric: str, values: Sequence[float], total: bool = False) -> None:
        if not values:
            return
        spread = interval(values, ANYWHERE)
        cells[metric] = TableCell(
            metric,
            method,
            "",
            score=fsum(values) if total else fsum(values) / len(values),
            low=None if total or spread is None else spread.low,
            high=None if total or spread is None else spread.high,
            n=len(values),
            n_oom=len(rows) - len(done),
            over=over_budget(rows),
            embedded=run.embedded,
            run=run.folder.name,
            label=run.result.method_label,
            cost=cost(rows, key_bytes_per_token(runs)),
        )

    alone = [row for row in done if row.batch_rows == 1]
    seconds = [row.prefill_s + row.decode_s for row in alone if row.prefill_s is not None and row.decode_s is not None]
    if len(alone) < len(done):
        notes.append(
            f"{method}: {len(done) - len(alone)} of {len(done)} samples were decoded beside other "
            "methods, so their seconds are not this method's; run it alone for the time"
        )
    add("total_runtime_s", seconds, total=True)
    add("single_task_runtime_s", seconds)
    add("kv_cache_single_task_gb", [float(v) / 2**30 for v in kept if v is not None])
    if run.result.ratio_exact and not run.is_full:
        notes.append(f"{method}: ratio {run.result.ratio_exact}; the paper's is not printed")
    return cells
