"""The papers' tables from the runs at hand: ours with interval and n, the published figure and the difference.

    python -m plots.tables [RUNS] [--out FOLDER]     or: make paper-tables

What a table asks for is read from `plots/published/*.csv`: its datasets, methods and budgets, in their order. Runs that
answer it are found by their results alone, so it does not matter which command made them. Runs that differ in model,
data, prompts, comm, protocol, seed, limit, dtype or device never share a table: each such group has its own, below the
others.

Average   plain mean of the datasets' scores, these rounded to two decimals first, as the papers compute it; only where
          all of a table's datasets were run. Else: the mean of those that all methods of the block have, ours and the
          published ones alike, and the row says how many. Its interval resamples within each dataset.
Bold      best of a row at the printed digit, without those that nothing bounds (Full, Oracle, MInference alone), and
          without runs over budget.

Not here: how a table is written (`plots/formats.py`), the table of one command (`evals/table.py`).
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from evals.results import EXACT, SampleRow
from plots import costs
from plots.read import (
    ROOT,
    Conditions,
    Run,
    by_conditions,
    default_root,
    has_budget,
    key_bytes_per_token,
    load,
    measured,
    over_budget,
    scores,
)
from plots.stats import N_RESAMPLES, Interval, holm, interval, paired

PUBLISHED = Path(__file__).resolve().parent / "published"
AVERAGE = "Average"
PAPER_AVERAGES = {"Average", "Avg", "avg_of_8"}
NOT_RANKED = {"Full", "FullKV", "Oracle", "MInference"}
# Of a task's parameters: which rows are asked, not how.
CHOOSES_ROWS = {"source", "datasets", "rows", "on_bad_row"}
OWN_PROMPTS = "prompts: own"
# Names of datasets as benchmarks have them, by the names that papers print; letters and digits only.
DATASETS = {
    "naqa": "narrativeqa",
    "qas": "qasper",
    "mfqa": "multifieldqaen",
    "multifieldqa": "multifieldqaen",
    "hpqa": "hotpotqa",
    "wkqa": "2wikimqa",
    "mus": "musique",
    "govr": "govreport",
    "mnews": "multinews",
    "ssum": "samsum",
    "trivqa": "triviaqa",
    "rpb": "repobenchp",
    "count": "passagecount",
    "retrieval": "passageretrievalen",
    "ensum": "longbooksumeng",
    "enqa": "longbookqaeng",
    "enmc": "longbookchoiceeng",
    "endia": "longdialogueqaeng",
    "zhqa": "longbookqachn",
    "retrpasskey": "passkey",
    "retrnumber": "numberstring",
    "retrkv": "kvretrieval",
}
CLUSTERKV_DATASETS = (
    *("2WikiMQA", "TriviaQA", "HotpotQA", "MultiFieldQA"),
    *("MuSiQue", "NarrativeQA", "Qasper", "GovReport"),
)


# --- what a paper's table asks for -------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """Which runs a published method's column takes; None in `Layout.methods`: none of ours."""

    method: str
    compensated: bool | None = None  # None: either
    prefill: str = EXACT

    def matches(self, run: Run) -> bool:
        same = (run.method, run.prefill) == (self.method, self.prefill)
        return same and self.compensated in (None, run.is_compensated)


@dataclass(frozen=True)
class Layout:
    """One table of a paper."""

    name: str  # of the CSV, of the experiment and of what is written
    title: str
    task: str
    models: tuple[str, ...]  # of ours that are the paper's
    comm: str  # the paper's; "" where it has none
    methods: Mapping[str, Wanted | None]
    question_first: bool = False
    averages_only: bool = False  # the paper prints means over datasets and nothing else
    tokens: Mapping[str, str] | None = None  # a printed budget and the tokens that it stands for

    @property
    def prefills(self) -> set[str]:
        return {wanted.prefill for wanted in self.methods.values() if wanted is not None}

    @property
    def command(self) -> str:
        return f"python run.py -m experiment={self.name} data_dir=FOLDER"


PQCACHE_METHODS: dict[str, Wanted | None] = {
    "Full": Wanted("full"),
    "Oracle": Wanted("oracle"),
    "H2O(C)": Wanted("h2o", compensated=True),
    "SnapKV(C)": Wanted("snapkv", compensated=True),
    "PyramidKV(C)": Wanted("pyramidkv", compensated=True),
    "InfLLM": Wanted("infllm"),
    "SPARQ": Wanted("sparq"),
    "PQCache": Wanted("pqcache"),
}
LLAMA = ("llama-3.1-8b-instruct", "llama-3.1-8b")
LAYOUTS = (
    Layout("pqcache_table2", "PQCache, Table 2: LongBench", "longbench", LLAMA, "1/128", PQCACHE_METHODS),
    Layout(
        "pqcache_table3", "PQCache, Table 3: LongBench QA, the question before the context",
        "longbench", LLAMA, "1/128", PQCACHE_METHODS, question_first=True,
    ),
    Layout(
        "pqcache_table4", "PQCache, Table 4: InfiniteBench",
        "infinitebench", LLAMA, "1/64", PQCACHE_METHODS,
    ),
    Layout(
        "pqcache_table5", "PQCache, Table 5: InfiniteBench with sparse prefill",
        "infinitebench", LLAMA, "1/64",
        {
            **PQCACHE_METHODS,
            "MInference": Wanted("full", prefill="minference"),
            "MInference+PQCache": Wanted("pqcache", prefill="minference"),
        },
    ),
    Layout(
        "pqcache_table6", "PQCache, Table 6: LongBench on a 70B model", "longbench",
        ("llama-3.1-70b-instruct", "llama-3.1-70b"), "1/128",
        # Half the CPU only changes how many rounds of clustering fit beside the prefill; no run of ours is limited so.
        {"Full": Wanted("full"), "PQCache-half-CPU": None, "PQCache-same-CPU": Wanted("pqcache")},
    ),
    Layout(
        "clusterkv_table1", "ClusterKV, Table I: LongBench, mean of eight datasets",
        "longbench", ("glm4-9b-chat",), "",
        {
            "Quest": Wanted("quest"),
            "InfiniGen": Wanted("infinigen"),
            "ClusterKV": Wanted("clusterkv"),
            "FullKV": Wanted("full"),
        },
        averages_only=True,
    ),
    Layout(
        "xkv_table3", "XKV, Table III: LongBench", "longbench", ("llama-3-8b-instruct",), "",
        {
            "StreamingLLM": Wanted("streamingllm", compensated=False),
            "H2O": Wanted("h2o", compensated=False),
            "SnapKV": Wanted("snapkv", compensated=False),
            "PyramidKV": Wanted("pyramidkv", compensated=False),
            "XKV": Wanted("xkv", compensated=False),
        },
        tokens={"1.6%": "128", "1.2%": "96"},
    ),
)  # fmt: skip
EFFICIENCY = Layout(
    "xkv_table4", "XKV, Table IV: efficiency on NarrativeQA", "longbench",
    ("llama-3-8b-instruct",), "",
    {"FullKV": Wanted("full"), "XKV": Wanted("xkv", compensated=False)},
)  # fmt: skip


def canonical(dataset: str) -> str:
    """A dataset's one name, from the benchmark's or a paper's: `multifieldqa_en`, `MFQA` and `MultiFieldQA` agree."""
    plain = re.sub("[^a-z0-9]", "", dataset.rpartition("/")[2].lower())
    return DATASETS.get(plain, plain)


@dataclass(frozen=True)
class Published:
    """The rows of a paper's table, by (dataset, method, budget as printed)."""

    values: Mapping[tuple[str, str, str], str]
    datasets: list[str]
    methods: list[str]
    budgets: list[str]  # without full attention's

    def value(self, dataset: str, method: str, budget: str) -> str | None:
        """As printed; full attention's stands at a budget of its own."""
        for b in (budget, "1", "full"):
            if (found := self.values.get((dataset, method, b))) is not None:
                return found
        return None


def published(layout: Layout) -> Published:
    with (PUBLISHED / f"{layout.name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values: dict[tuple[str, str, str], str] = {}
    for row in rows:
        dataset = AVERAGE if row["dataset"] in PAPER_AVERAGES else row["dataset"]
        key = (dataset, row["method"], row.get("ratio") or row["budget_or_ratio"])
        values[key] = row.get("score") or row["value"]
    datasets = [d for d in dict.fromkeys(key[0] for key in values) if d != AVERAGE]
    return Published(
        values=values,
        datasets=datasets or list(CLUSTERKV_DATASETS),
        methods=list(dict.fromkeys(key[1] for key in values)),
        budgets=[b for b in dict.fromkeys(key[2] for key in values) if b not in ("1", "full")],
    )


# --- cells -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What the samples of a cell took, means over them; None was not measured."""

    tokens_attended: float | None = None
    tokens_budget: float | None = None
    effective_ratio: float | None = None
    kv_bytes_per_step: float | None = None
    find_bytes_per_step: float | None = None
    comm: float | None = None  # the last relative to the bytes of the prompt's keys
    device_bytes: float | None = None
    host_bytes: float | None = None


@dataclass(frozen=True)
class Cell:
    """One figure of a table, ours and the paper's; scores are 0 to 100 here."""

    dataset: str
    method: str
    budget: str
    score: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    n_oom: int = 0
    published: str | None = None
    over: bool = False
    embedded: bool = False
    best: bool = False
    cost: Cost = Cost()
    run: str = ""  # its folder
    vs_full: Interval | None = None  # paired, on the samples that both have
    vs_full_p: float | None = None  # adjusted for all comparisons of the table (Holm)

    @property
    def difference(self) -> float | None:
        """Of what is printed, so that it can be checked by eye."""
        if self.score is None or self.published is None:
            return None
        return round(self.score, 2) - float(self.published)


@dataclass(frozen=True)
class Table:
    """One table of one group of runs."""

    layout: Layout
    where: Conditions
    datasets: list[str]  # rows, `AVERAGE` last
    methods: list[str]
    budgets: list[str]
    cells: Mapping[tuple[str, str, str], Cell]  # (dataset, method, budget)
    notes: list[str]
    asked: str = ""  # how prompts were made, where that is not the task's default
    own_prompts: bool = False  # not upstream's wording

    @property
    def is_paper_setting(self) -> bool:
        """Whether the differences to the published figures mean something."""
        same_comm = not self.layout.comm or self.where.comm in ("", self.layout.comm)
        return (
            self.where.model in self.layout.models
            and self.where.data_source != "embedded"
            and self.where.limit == 0
            and same_comm
            and not self.own_prompts
        )


def build(layout: Layout, runs: Sequence[Run]) -> list[Table]:
    """A table for each group of runs that answers any of its cells."""
    tables = []
    as_printed = published(layout)
    for asked, where, group in alike(answering(layout, runs)):
        notes: list[str] = []
        paper = stand_in(as_printed, group, notes)
        key_bytes = key_bytes_per_token(group)
        cells: dict[tuple[str, str, str], Cell] = {}
        samples: dict[tuple[str, str, str], tuple[SampleRow, ...]] = {}
        for budget in paper.budgets:
            for dataset in paper.datasets:
                for method in paper.methods:
                    key = (dataset, method, budget)
                    said = paper.value(dataset, method, budget)
                    run, rows = choose(layout, group, key, notes)
                    samples[key] = rows
                    cells[key] = cell(key, run, rows, said, key_bytes)
        if not any(each.n or each.n_oom for each in cells.values()):
            continue
        cells |= differences(cells, samples)
        cells |= averages(cells, samples, paper)
        cells = bold(cells)
        datasets = list(dict.fromkeys(key[0] for key in cells))
        tables.append(
            Table(
                layout,
                where,
                datasets,
                paper.methods,
                paper.budgets,
                cells,
                remarks(group, notes),
                asked,
                OWN_PROMPTS in {note for run in group for note in run.result.notes},
            )
        )
    return in_order(tables)


def in_order(tables: Sequence[Table]) -> list[Table]:
    """The paper's own setting first, and full attention by itself only where nothing else was run."""
    full = {"Full", "FullKV"}
    more = [t for t in tables if any(c.n for c in t.cells.values() if c.method not in full)]
    return sorted(more or tables, key=lambda table: not table.is_paper_setting)


def alike(runs: Iterable[Run]) -> list[tuple[str, Conditions, list[Run]]]:
    """Groups that may share a table: made under the same conditions, from prompts made in the same way."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(asked_of(run), []).append(run)
    return [(asked, where, group) for asked in sorted(found) for where, group in by_conditions(found[asked]).items()]


def asked_of(run: Run) -> str:
    """What of a run's task and chat is not the default, except what only chooses rows."""
    usual = usual_params(run.result.task)
    params = run.setting("task", "params") or {}
    words = [
        f"{key}={value}"
        for key, value in params.items()
        if key not in CHOOSES_ROWS and key in usual and str(value) != str(usual[key])
    ]
    chat, system = run.setting("model", "chat"), run.setting("model", "system_prompt")
    words += [f"chat={chat}"] if chat not in (None, "auto") else []
    words += [f"system prompt {system!r}"] if system else []
    return " ".join(words)


@cache
def usual_params(task: str) -> dict[str, Any]:
    """The defaults of a task's file."""
    path = ROOT / "conf" / "task" / f"{task}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def stand_in(paper: Published, runs: Sequence[Run], notes: list[str]) -> Published:
    """The runs' own datasets where none of them is the paper's: embedded sets have other names."""
    names = [name for run in runs for name in run.datasets()]
    if {canonical(name) for name in names} & {canonical(name) for name in paper.datasets}:
        return paper
    notes.append("None of the datasets is the paper's, so nothing published stands beside them")
    return replace(paper, values={}, datasets=list(dict.fromkeys(names)))


def answering(layout: Layout, runs: Iterable[Run]) -> list[Run]:
    """The runs of a table's task, with a prefill of its columns and the question where the table has it."""
    return [
        run
        for run in runs
        if run.result.task == layout.task
        and run.prefill in layout.prefills
        and (run.task_param("question_position") == "before") == layout.question_first
    ]


def choose(
    layout: Layout, runs: Sequence[Run], key: tuple[str, str, str], notes: list[str]
) -> tuple[Run | None, tuple[SampleRow, ...]]:
    """The run of a cell and its samples of the dataset.

    Of several, plain settings go before presets, then more samples, then the name of the folder; the notes say so
    unless all have the same score.
    """
    dataset, method, budget = key
    wanted = layout.methods.get(method)
    if wanted is None:
        return None, ()
    tokens = (layout.tokens or {}).get(budget, budget)
    found = [
        (run, rows)
        for run in runs
        if wanted.matches(run) and (run.is_full or has_budget(run, tokens))
        for name, rows in run.datasets().items()
        if canonical(name) == canonical(dataset)
    ]
    if not found:
        return None, ()
    found.sort(key=lambda one: (one[0].is_preset, -len(one[1]), one[0].folder.name))
    if len({tuple(scores(rows)) for _, rows in found}) > 1:
        names = ", ".join(run.folder.name for run, _ in found[1:])
        notes.append(
            f"{method} at {budget} on {dataset} has {len(found)} runs; shown is "
            f"{found[0][0].folder.name}, left out: {names}"
        )
    return found[0]


def cell(
    key: tuple[str, str, str],
    run: Run | None,
    rows: Sequence[SampleRow],
    said: str | None,
    key_bytes: float | None,
) -> Cell:
    empty = Cell(*key, published=said)
    if run is None:
        return empty
    got = scores(rows)
    ours = replace(
        empty,
        n=len(got),
        n_oom=len(rows) - len(got),
        over=over_budget(rows),
        embedded=run.embedded,
        run=run.folder.name,
        cost=cost(rows, key_bytes),
    )
    if not got:
        return ours
    spread = interval(got)
    mean = fsum(got) / len(got)  # as in result.json, to the last bit
    return replace(ours, score=100 * mean, low=100 * spread.low, high=100 * spread.high)


def cost(rows: Sequence[SampleRow], key_bytes: float | None) -> Cost:
    find = measured(rows, "bytes_moved_meta_per_step")
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


def differences(
    cells: Mapping[tuple[str, str, str], Cell],
    samples: Mapping[tuple[str, str, str], Sequence[SampleRow]],
) -> dict[tuple[str, str, str], Cell]:
    """Each cell against full attention, on the samples that both answered."""
    changed: dict[tuple[str, str, str], Cell] = {}
    p_values: list[float] = []
    for key, ours in cells.items():
        dataset, method, budget = key
        full = next((m for m in ("Full", "FullKV") if (dataset, m, budget) in cells), None)
        if full in (None, method):
            continue
        theirs = {r.prompt_sha256: r.score for r in samples[dataset, full, budget]}
        pairs = [
            (100 * row.score, 100 * other)
            for row in samples[key]
            if row.score is not None and (other := theirs.get(row.prompt_sha256)) is not None
        ]
        if pairs:
            result = paired([mine for mine, _ in pairs], [full for _, full in pairs])
            changed[key] = replace(ours, vs_full=result.difference)
            p_values.append(result.p)
    adjusted = holm(p_values).tolist() if p_values else []
    return {key: replace(each, vs_full_p=p) for (key, each), p in zip(changed.items(), adjusted, strict=True)}


def averages(
    cells: Mapping[tuple[str, str, str], Cell],
    samples: Mapping[tuple[str, str, str], Sequence[SampleRow]],
    paper: Published,
) -> dict[tuple[str, str, str], Cell]:
    """The papers' average of each column, and where datasets are missing the mean of the common ones."""
    made: dict[tuple[str, str, str], Cell] = {}
    for budget in paper.budgets:
        has = {m: {d for d in paper.datasets if cells[d, m, budget].score is not None} for m in paper.methods}
        some = [found for found in has.values() if found]
        common = [d for d in paper.datasets if some and all(d in found for found in some)]
        for method in paper.methods:
            said = paper.value(AVERAGE, method, budget)
            key = (AVERAGE, method, budget)
            if len(has[method]) == len(paper.datasets):
                made[key] = average(key, paper.datasets, cells, samples, said)
            else:
                made[key] = Cell(*key, published=said)
        if 1 < len(common) < len(paper.datasets):
            row = f"Mean of {len(common)}: {', '.join(common)}"
            for method in paper.methods:
                theirs = [paper.value(d, method, budget) for d in common]
                known = [float(v) for v in theirs if v is not None]
                mean = f"{fsum(known) / len(known):.2f}" if len(known) == len(common) else None
                key = (row, method, budget)
                made[key] = average(key, common, cells, samples, mean) if has[method] else Cell(*key, published=mean)
    return made


def average(
    key: tuple[str, str, str],
    datasets: Sequence[str],
    cells: Mapping[tuple[str, str, str], Cell],
    samples: Mapping[tuple[str, str, str], Sequence[SampleRow]],
    said: str | None,
) -> Cell:
    _, method, budget = key
    parts = [cells[d, method, budget] for d in datasets]
    rows = [row for d in datasets for row in samples[d, method, budget]]
    spread = macro_interval([scores(samples[d, method, budget]) for d in datasets])
    mean = fsum(round(part.score, 2) for part in parts if part.score is not None) / len(parts)
    comms = [part.cost.comm for part in parts if part.cost.comm is not None]
    return Cell(
        *key,
        score=mean,
        low=100 * spread.low,
        high=100 * spread.high,
        n=sum(part.n for part in parts),
        n_oom=sum(part.n_oom for part in parts),
        published=said,
        over=any(part.over for part in parts),
        embedded=any(part.embedded for part in parts),
        cost=replace(cost(rows, None), comm=fsum(comms) / len(comms) if comms else None),
    )


def macro_interval(parts: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Mean over datasets of their means, with a bootstrap that resamples the samples of each dataset by itself."""
    rng = np.random.default_rng(seed)
    means = np.zeros(N_RESAMPLES)
    for part in parts:
        values = np.sort(np.asarray(part, dtype=np.float64))
        means += values[rng.integers(0, len(values), size=(N_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means / len(parts), [0.025, 0.975])
    mean = fsum(fsum(part) / len(part) for part in parts) / len(parts)
    return Interval(mean, float(low), float(high))


def bold(cells: Mapping[tuple[str, str, str], Cell]) -> dict[tuple[str, str, str], Cell]:
    """Marks the best of each dataset and budget, where there are two or more to choose from."""
    best: dict[tuple[str, str], list[float]] = {}
    ranked = {
        key: round(each.score, 2)
        for key, each in cells.items()
        if each.score is not None and each.method not in NOT_RANKED and not each.over
    }
    for (dataset, _, budget), score in ranked.items():
        best.setdefault((dataset, budget), []).append(score)
    return {
        key: replace(
            each,
            best=key in ranked and len(best[key[0], key[2]]) > 1 and ranked[key] == max(best[key[0], key[2]]),
        )
        for key, each in cells.items()
    }


def remarks(runs: Sequence[Run], notes: Sequence[str]) -> list[str]:
    """What the runs of a table say of themselves, each sentence once."""
    said = [f"{run.result.method_label}: {note}" for run in runs for note in run.result.notes]
    shared = [note for run in runs[:1] for note in run.result.notes]
    common = [note for note in shared if all(note in run.result.notes for run in runs)]
    own = [line for line in said if line.partition(": ")[2] not in common]
    return list(dict.fromkeys([*common, *own, *notes]))


# --- XKV, Table IV: not scores but seconds and bytes --------------------------------------------


def build_efficiency(runs: Sequence[Run]) -> list[Table]:
    """Time and KV memory on NarrativeQA; seconds of runs that shared their batch are left out, and a note says so."""
    layout, paper = EFFICIENCY, published_efficiency()
    tables = []
    for asked, where, group in alike(answering(layout, runs)):
        cells: dict[tuple[str, str, str], Cell] = {}
        notes: list[str] = []
        for method in layout.methods:
            found = efficiency(layout, group, method, notes)
            for metric in paper[method]:
                base = found.get(metric, Cell(metric, method, ""))
                cells[metric, method, ""] = replace(base, published=paper[method][metric])
        if any(each.n for each in cells.values()):
            rows = list(paper["FullKV"])
            tables.append(Table(layout, where, rows, list(layout.methods), [""], cells, notes, asked))
    return in_order(tables)


def published_efficiency() -> dict[str, dict[str, str]]:
    with (PUBLISHED / f"{EFFICIENCY.name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        method: {row["metric"]: row["value"] for row in rows if row["method"] == method}
        for method in EFFICIENCY.methods
    }


def off_ratio(run: Run) -> float:
    """How far a run is from the paper's ratio; full attention has none."""
    return 0.0 if run.is_full else abs((run.result.ratio or 0) - 0.385)


def n_shared(rows: Iterable[SampleRow]) -> int:
    """Samples that were decoded beside other methods."""
    return sum(row.batch_rows != 1 for row in rows)


def efficiency(layout: Layout, group: Sequence[Run], method: str, notes: list[str]) -> dict[str, Cell]:
    wanted = layout.methods[method]
    assert wanted is not None, method
    there = {canonical(name) for run in group for name in run.datasets()}
    asked = "narrativeqa" if "narrativeqa" in there else "docsqa"  # the embedded set's
    found = [
        (run, rows)
        for run in group
        if wanted.matches(run)
        for name, rows in run.datasets().items()
        if canonical(name) == asked
    ]
    if not found:
        return {}
    # The ratio is not printed; 1.54 of 4.00 GB is 38.5 %, so the run that is nearest to it stands for it.
    found.sort(key=lambda one: (off_ratio(one[0]), n_shared(one[1]), one[0].folder.name))
    run, rows = found[0]
    done = [row for row in rows if row.status == "ok"]
    kept = [row.ledger["bytes_resident_device"] for row in done]
    made: dict[str, Cell] = {}

    def add(metric: str, values: Sequence[float], total: bool = False) -> None:
        if not values:
            return
        spread = interval(values)
        made[metric] = Cell(
            metric,
            method,
            "",
            score=fsum(values) if total else spread.mean,
            low=None if total else spread.low,
            high=None if total else spread.high,
            n=len(values),
            n_oom=len(rows) - len(done),
            over=over_budget(rows),
            embedded=run.embedded,
            run=run.folder.name,
            cost=cost(rows, key_bytes_per_token(group)),
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
    return made


# --- the command -------------------------------------------------------------------------------


def build_all(runs: Sequence[Run]) -> dict[str, list[Table]]:
    """Every table of the papers by name; an empty list where no run answers it."""
    tables = {layout.name: build(layout, runs) for layout in LAYOUTS}
    return tables | {EFFICIENCY.name: build_efficiency(runs)}


def missing(layout: Layout, n_runs: int) -> str:
    """What to run for a table that has nothing to show."""
    why = "no runs yet" if n_runs == 0 else "no run that answers it"
    return f"{layout.title}: {why}; make some with\n    {layout.command}\n    {smoke(layout)}"


def smoke(layout: Layout) -> str:
    return f"python run.py -m experiment={layout.name} scale=smoke    (minutes, embedded model and data)"


def main(arguments: list[str]) -> int:
    from plots.formats import write

    parser = argparse.ArgumentParser(prog="python -m plots.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--out", type=Path, default=Path("outputs/tables"), help="where to write")
    options = parser.parse_args(arguments)
    runs = load(options.runs)
    tables = build_all(runs)
    try:
        timed = costs.write(options.out, runs)
    except OSError as error:
        return cannot_write(options.out, error)
    if timed:
        print(f"What variants cost: {', '.join(str(path) for path in timed)}")
    if not any(tables.values()):
        for layout in (*LAYOUTS, EFFICIENCY):
            print(missing(layout, len(runs)), file=sys.stderr)
        return 2
    for layout in (*LAYOUTS, EFFICIENCY):
        if tables[layout.name]:
            try:
                paths = write(options.out, layout, tables[layout.name])
            except OSError as error:
                return cannot_write(options.out, error)
            print(f"{layout.title}: {', '.join(str(path) for path in paths)}")
        else:
            print(missing(layout, len(runs)))
    return 0


def cannot_write(out: Path, error: OSError) -> int:
    print(f"plots.tables: {out}: {error.strerror}; choose another --out", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
