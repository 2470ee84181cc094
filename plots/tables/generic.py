"""Any sweep as a table: which keys stand in its rows and columns, which runs may share it, and what a cell says.

Whatever differs between runs and is neither in the rows nor in the columns makes a table of its own. A run without a
budget of its own (Full) has one row and stands in every column of its conditions.

Score       mean over the samples; of several datasets the mean of theirs. Intervals are those of `plots/stats.py`.
Best, tied  as `standings` finds within a column, without Full and Oracle, which nothing bounds, and without runs over
            their budget.
Difference  of any value to Full's or another row's on the same prompts; bold where the test, corrected for all of its
            table, shows one.

Not here: what a cell can say (`plots/tables/values.py`), its words (`plots/tables/words.py`), the papers' tables
(`plots/tables/cells.py`).
"""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fractions import Fraction
from itertools import product
from typing import Any

from kvbench.engine.budget import SIZE, parse_bytes
from kvbench.plots.read import Run, prefill_words, scores
from kvbench.plots.run_sets import dataset_words, prompt_settings
from kvbench.plots.scored import Scored, best, compared
from kvbench.plots.stats import Corrected
from kvbench.plots.tables.values import VALUES, measures_of, of_one, value_named
from kvbench.results import METRICS, OFF, SampleRow
from kvbench.results.intervals import ANYWHERE

ANY = "*"  # a key's value of a run that has none of its own and stands next to all
BUDGETS = ("ratio", "budget", "comm")  # keys of which Full has none
UNRANKED = {"full", "oracle"}  # nothing bounds what they read
FULL = "Full"  # whom cells are compared with, unless another is named
MOST_COLUMNS = 12  # that are chosen without being asked for


class WrongKey(ValueError):
    """A key or a value that no run has, with what there is."""


def shown_share(text: str) -> str:
    """A share as it is usually written: 0.2, 1/64; "off" as it is."""
    if text == OFF:
        return text
    share = Fraction(text)
    return f"{float(share):g}" if (share * 100).denominator == 1 else str(share)


def budget_words(run: Run) -> str:
    if run.is_full:
        return ANY
    if run.result.budget or run.result.memory_exact or run.result.adapts:
        return run.result.asked
    return f"ratio {shown_share(run.result.ratio_exact or '1')}"


KEYS: dict[str, Callable[[Run], str]] = {
    "task": lambda run: run.result.shown_task,
    "model": lambda run: run.model,
    "budget": budget_words,
    "ratio": lambda run: budget_words(run).removeprefix("ratio "),
    "comm": lambda run: ANY if run.is_full else shown_share(run.result.comm_exact),
    "method": lambda run: run.result.method_label,
    "prefill": lambda run: "exact" if run.is_exact else prefill_words(run),
    "scope": lambda run: run.result.protocol,
    "data": lambda run: run.result.data_source,
    "prompts": prompt_settings,
    "limit": lambda run: str(run.setting("limit") or "all"),
    "seed": lambda run: str(run.result.seed),
    "dtype": lambda run: run.result.dtype,
    "device": lambda run: run.result.device,
    "version": lambda run: f"{run.result.task_version}/{run.result.score_version or run.result.task_version}",
}
FOUND = ("dataset", "length")  # keys whose values are the samples', not the run's
PREFIXES = {"method": lambda run: run.result.params, "task": lambda run: run.setting("task", "params") or {}}


@dataclass(frozen=True)
class Part:
    """A run, or those of its samples that belong to one dataset or length."""

    run: Run
    rows: tuple[SampleRow, ...]
    of: Mapping[str, str]  # every key's value


@dataclass(frozen=True)
class Cell:
    row: tuple[str, ...]
    column: tuple[str, ...]
    part: Part
    mean: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    n_oom: int = 0
    over: bool = False
    mark: str = ""  # "bold" for the best, or a difference that was shown; "tie" for what may be as good
    against: Corrected | None = None  # what it is compared with, where that answered the same prompts


@dataclass(frozen=True)
class Pivot:
    """One table."""

    value: str
    row_keys: tuple[str, ...]
    column_keys: tuple[str, ...]
    rows: list[tuple[str, ...]]
    columns: list[tuple[str, ...]]
    cells: dict[tuple[tuple[str, ...], tuple[str, ...]], Cell]
    where: dict[str, str]  # what all of its runs share
    percent: bool = False
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # runs that had the place of another
    against: str | None = None  # whose value every cell's is less; None: cells say their own

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0

    @property
    def n(self) -> int | None:
        """Samples of a cell, where all have as many."""
        counts = {cell.n for cell in self.cells.values()}
        return counts.pop() if len(counts) == 1 else None


def pivots(
    runs: Sequence[Run],
    rows: Sequence[str] = ("method",),
    columns: Sequence[str] | None = None,
    value: str = "score",
    keep: Mapping[str, str] | None = None,
    against: str | None = None,
) -> list[Pivot]:
    """The tables of these runs, the fullest first; `columns` of None are what varies between the runs.

    `against` names a method as its row does: every cell says its value less that method's, of the same column.
    """
    keep = keep or {}
    if value == "difference":
        value, against = "score", against or FULL
    check_words(value, [*rows, *(columns or ()), *keep], measures_of(runs))
    asked = {*rows, *(columns or ()), *keep}
    parts = [part for run in runs for part in parts_of(run, asked)]
    for key, wanted in keep.items():
        there = sorted({part.of[key] for part in parts} - {ANY})
        parts = [part for part in parts if {wanted, ANY} & called(part, key)]
        if not any(wanted in called(part, key) for part in parts):
            raise WrongKey(f"no run has {key}={wanted}; there is {', '.join(there) or 'none'}")
    if not parts:
        return []
    parts = with_parameters(parts, {*rows, *(columns or ())})
    if "prefill" in {*rows, *(columns or ())}:
        parts = beside_prefills(parts)
    axes = chosen(parts, rows) if columns is None else tuple(columns)
    labels = sorted({part.of["method"] for part in parts})
    if against not in (None, FULL, *labels):
        raise WrongKey(f"no run is of {against!r}; there is {', '.join(labels)}{near(str(against), labels)}")
    made = [
        pivot_of(group, tuple(rows), chosen(group, rows) if columns is None else axes, value, against)
        for group in split(parts, {*rows, *axes})
    ]
    return sorted(made, key=lambda pivot: (-len(pivot.cells), str(pivot.where)))


def called(part: Part, key: str) -> set[str]:
    """What a filter may call a part's value: a task by its own name too, where tables show another."""
    return {part.of[key]} | ({part.run.result.task} if key == "task" else set())


def check_words(value: str, keys: Sequence[str], measures: Mapping[str, None]) -> None:
    words = {**VALUES, **measures}
    if value not in words:
        raise WrongKey(f"a cell cannot say {value!r}; it can say {', '.join(words)}{near(value, words)}")
    for key in keys:
        prefix, dot, name = key.partition(".")
        if key in KEYS or key in FOUND or (dot and name and prefix in PREFIXES):
            continue
        raise WrongKey(
            f"runs have no {key!r}; they have {', '.join([*KEYS, *FOUND])}, task.NAME, method.NAME{near(key, KEYS)}"
        )
    if len(set(keys)) < len(keys):
        raise WrongKey("a key stands twice; each is in the rows, in the columns or in a filter")


def near(word: str, words: Iterable[str]) -> str:
    found = get_close_matches(word, list(words), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def parts_of(run: Run, asked: set[str]) -> list[Part]:
    """The run as the keys asked for cut it up."""
    of = {key: read(run) for key, read in KEYS.items()}
    for key in asked:
        prefix, dot, name = key.partition(".")
        if dot:
            of[key] = as_word(PREFIXES[prefix](run).get(name, "-"))
    groups: dict[tuple[str, ...], list[SampleRow]] = {}
    cuts = [key for key in FOUND if key in asked]
    for dataset, rows in run.datasets().items():
        for row in rows:
            words = {"dataset": dataset, "length": as_word(row.fields.get("length", "-"))}
            groups.setdefault(tuple(words[key] for key in cuts), []).append(row)
    return [Part(run, tuple(rows), of | dict(zip(cuts, words, strict=True))) for words, rows in groups.items()]


def as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def with_parameters(parts: Sequence[Part], axes: set[str]) -> list[Part]:
    """Parts whose method says by which parameters it differs from others of its name, unless these are keys."""
    by_label: dict[str, list[Part]] = {}
    for part in parts:
        by_label.setdefault(part.of["method"], []).append(part)
    named: list[Part] = []
    for part in parts:
        params = [other.run.params for other in by_label[part.of["method"]]]
        mine = part.run.params
        differing = [key for key in mine if any(other.get(key) != mine[key] for other in params)]
        tail = [
            f"{key}={mine[key]}" for key in differing if f"method.{key}" not in axes and not key.startswith("prefill")
        ]
        named.append(replace(part, of={**part.of, "method": " ".join([part.of["method"], *tail])}))
    return named


def beside_prefills(parts: Sequence[Part]) -> list[Part]:
    """Parts whose prefill is a key: its name, what tells it from others of the name, and the method without it."""
    params: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        params.setdefault(part.run.result.prefill, []).append(part.run.result.prefill_params)
    named: list[Part] = []
    for part in parts:
        result, method = part.run.result, part.of["method"]
        mine, others = result.prefill_params, params[result.prefill]
        tail = [f"{key}={as_word(mine[key])}" for key in mine if any(other.get(key) != mine[key] for other in others)]
        if not part.run.is_exact:
            method = "Full" if part.run.method == "full" else method.partition(" + ")[2] or part.run.method
        named.append(replace(part, of={**part.of, "prefill": " ".join([result.prefill, *tail]), "method": method}))
    return named


def values_of(parts: Sequence[Part], key: str) -> list[str]:
    return sorted({part.of[key] for part in parts} - {ANY}, key=in_order)


def in_order(word: str) -> tuple[int, float, str]:
    """Numbers by size, wherever they stand in a word; then words."""
    bare = word.removeprefix("ratio ").removeprefix("memory ")
    if SIZE.fullmatch(bare):
        return 0, float(parse_bytes(bare, "memory").n), word
    for piece in bare.split():
        try:
            return 0, float(Fraction(piece)), word
        except ValueError:
            break
    return 1, 0.0, word


def chosen(parts: Sequence[Part], rows: Sequence[str]) -> tuple[str, ...]:
    """Keys that vary, as long as the columns are not too many; else it makes tables of its own."""
    found: list[str] = []
    total = 1
    for key in ("budget", "comm", "model", "prefill", "scope"):
        n = len(values_of(parts, key))
        if key not in rows and n > 1 and total * n <= MOST_COLUMNS:
            found, total = [*found, key], total * n
    return tuple(found) or ("budget",)


def split(parts: Sequence[Part], axes: set[str]) -> list[list[Part]]:
    """Parts that may share a table: they agree in all that is no axis. One without a budget joins all budgets."""
    free = [key for key in KEYS if key not in axes and key != "method"]
    if {"ratio", "budget"} & axes:
        free = [key for key in free if key not in ("ratio", "budget")]  # each says the other
    elif "ratio" in free:
        free.remove("ratio")
    groups: dict[tuple[str, ...], list[Part]] = {}
    for part in parts:
        groups.setdefault(tuple(part.of[key] for key in free), []).append(part)
    joined = {
        key: members
        + [
            part
            for other, others in groups.items()
            if other != key and all(a == b or b == ANY for a, b in zip(key, other, strict=True))
            for part in others
        ]
        for key, members in groups.items()
    }
    beside = {id(part) for key, members in joined.items() for part in members[len(groups[key]) :]}
    return [members for key, members in joined.items() if not all(id(part) in beside for part in groups[key])]


def pivot_of(
    parts: Sequence[Part], rows: tuple[str, ...], columns: tuple[str, ...], value: str, against: str | None
) -> Pivot:
    notes, left_out = list[str](), list[str]()
    candidates: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Part]] = {}
    for part in parts:
        across = [values_of(parts, key) or ["all"] if part.of[key] == ANY else [part.of[key]] for key in columns]
        row = tuple("all" if part.of[key] == ANY else part.of[key] for key in rows)
        for column in product(*across):
            candidates.setdefault((row, column), []).append(part)
    existing = {column for (_, column), found in candidates.items() if any(not p.run.is_full for p in found)}
    if "method" in columns:
        existing = set()  # full attention has a column of its own
    cells: dict[tuple[tuple[str, ...], tuple[str, ...]], Cell] = {}
    for key, found in candidates.items():
        if not existing or key[1] in existing:
            cells[key] = cell_of(key, one_of(found, key[0], left_out), value)
    percent = value == "score" and all(METRICS[Scored.of(cell.part.rows).metric].is_share for cell in cells.values())
    if value == "score" or against is not None:
        cells = judged(cells, value, rows, against or FULL, notes)
    if against is not None:
        cells = {key: as_difference(cell) for key, cell in cells.items()}
    shared = {key: values.pop() for key in KEYS if len(values := {part.of[key] for part in parts} - {ANY}) == 1}
    if "dataset" not in (*rows, *columns) and (names := dataset_words(part.run for part in parts)):
        shared = {"task": shared.pop("task", ""), "datasets": names} | shared
    if {"ratio", "budget"} & {*rows, *columns}:
        shared = {key: word for key, word in shared.items() if key not in ("ratio", "budget")}
    return Pivot(
        value,
        rows,
        columns,
        sorted({row for row, _ in cells}, key=lambda row: by_method(row, rows, cells)),
        sorted({column for _, column in cells}, key=lambda words: [in_order(word) for word in words]),
        cells,
        {key: word for key, word in shared.items() if key not in (*rows, *columns, "version")},
        percent,
        notes,
        list(dict.fromkeys(left_out)),
        against,
    )


def by_method(row: tuple[str, ...], keys: tuple[str, ...], cells: Mapping[Any, Cell]) -> tuple[Any, ...]:
    """Full first, Oracle second, then by name; other keys by size."""
    methods = {cell.part.run.method for (mine, _), cell in cells.items() if mine == row}
    rank = 0 if "full" in methods else 1 if "oracle" in methods else 2
    return (rank, *(in_order(word) for word in row))


def one_of(found: Sequence[Part], row: tuple[str, ...], left_out: list[str]) -> Part:
    """Choose from several runs with one place the one with most samples, then the first by folder name, and say so."""
    ordered = sorted(found, key=lambda part: (-len(part.rows), part.run.folder.name))
    if len({tuple(scores(part.rows)) for part in ordered}) > 1:
        others = ", ".join(part.run.folder.name for part in ordered[1:])
        left_out.append(f"{' '.join(row)}: shown is {ordered[0].run.folder.name}, left out: {others}.")
    return ordered[0]


def cell_of(key: tuple[tuple[str, ...], tuple[str, ...]], part: Part, value: str) -> Cell:
    place = Scored.of(part.rows)
    cell = Cell(*key, part, None, n=place.n, n_oom=place.n_oom, over=place.over)
    if value != "score":
        return replace(cell, mean=value_named(value).of(part.rows))
    spread = place.interval
    return replace(cell, mean=place.mean, low=spread and spread.low, high=spread and spread.high)


def judged(
    cells: Mapping[Any, Cell], value: str, rows: tuple[str, ...], against: str, notes: list[str]
) -> dict[Any, Cell]:
    """Every cell against `against` of its column, on the prompts that both answered; of scores the best too."""
    of = {} if value == "score" else {"of": of_one(value), "limits": ANYWHERE}
    places = {key: Scored.of(cell.part.rows, **of) for key, cell in cells.items()}
    ids = {id(cell): key for key, cell in cells.items()}

    def reference(key: Any) -> Scored | None:
        other = compared_with(cells, key, rows, against)
        return None if other is None else places[ids[id(other)]]

    found = compared(places, reference, lambda key: column_of(cells[key]))
    marks: dict[Any, str] = {}
    if value == "score":
        families = Counter(column_of(cell) for cell in cells.values() if not cell.part.run.is_full)
        ranked = {k: p for k, p in places.items() if cells[k].part.run.method not in UNRANKED and not cells[k].over}
        marks, why = best(ranked, lambda key: key[1], lambda key: families[column_of(cells[key])])
        notes += [f"Where no cell of a column is marked: {'; '.join(why)}."] if why else []
    return {key: replace(cell, against=found.get(key), mark=marks.get(key, "")) for key, cell in cells.items()}


def column_of(cell: Cell) -> Hashable:
    """A key shared by variants that were asked the same samples, whatever columns the table has."""
    result, names = cell.part.run.result, {str(row.fields.get("dataset", "")) for row in cell.part.rows}
    return result.task, result.model, result.protocol, result.seed, frozenset(names)


def compared_with(cells: Mapping[Any, Cell], key: Any, rows: tuple[str, ...], against: str) -> Cell | None:
    """The cell of the same column that is `against`'s; of several the one that is else in the same row."""
    row, column = key

    def others(words: tuple[str, ...]) -> list[str]:
        return [word for name, word in zip(rows, words, strict=True) if name != "method"]

    found = {
        mine: cell
        for (mine, there), cell in cells.items()
        if there == column
        and (cell.part.run.is_full and cell.part.run.is_exact if against == FULL else cell.part.of["method"] == against)
    }
    beside = [cell for mine, cell in found.items() if others(mine) == others(row)]
    return next(iter([*beside, *found.values()] if beside or len(found) == 1 or against == FULL else []), None)


def as_difference(cell: Cell) -> Cell:
    if cell.against is None:
        return replace(cell, mean=None, low=None, high=None)
    pair = cell.against.paired
    spread = pair.difference
    return replace(
        cell,
        mean=pair.mean,
        low=None if spread is None else spread.low,
        high=None if spread is None else spread.high,
        n=pair.n,
        mark="bold" if cell.against.sign else "",
    )
