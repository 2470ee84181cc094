"""Any sweep as tables: which keys stand in rows and columns, which runs may share a table, and what a cell says.

Whatever differs between runs and is neither in the rows nor in the columns makes a table of its own. A run without a
budget of its own (Full) has one row and stands in every column of its conditions.

Score       mean over the samples; of several datasets the mean of theirs. Intervals are those of `plots/stats.py`.
Best, tied  as `standings` finds within a column, without Full and Oracle, which nothing bounds, and without runs over
            their budget.
Difference  of any value to Full's or another row's on the same prompts; bold where the test, corrected for all of its
            table, shows one.
Few         samples have neither, and their scores stand as hits (`results/intervals.py`).

Not here: words of keys (`plots/tables/words.py`) and cells (`plots/tables/shown.py`), the papers' layouts
(`plots/tables/papers.py`).
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import fsum
from typing import Any

from numpy import isnan, nan

from kvbench.engine.errors import ConfigError
from kvbench.plots.run_sets import MOST_NAMES
from kvbench.plots.scored import Scored, best, compared, groups_of, places
from kvbench.plots.stats import Corrected
from kvbench.plots.tables.values import VALUES, Frame, Value, column_of, sayable, value_named, with_values
from kvbench.plots.tables.words import ANY, KEYS, UNKNOWN, dicts, differing, in_order, in_words, runs_of
from kvbench.results import EXACT, METRICS
from kvbench.results.intervals import ANYWHERE, Interval

UNRANKED = {"full", "oracle"}  # nothing bounds what they read
FULL = "Full"  # whom cells are compared with, unless another is named
MOST_COLUMNS = 12  # that are chosen without being asked for
OF_SAMPLES = ("dataset", "length")  # columns of the frame that are offered as keys
SETTINGS = ("method", "prefill", "task")  # before a dot: a parameter, which no run need have
PLACE = ("run", "score", "metric", "prompt", "sample", "dataset", "within_budget")  # columns that a place is made of
Names = tuple[str, ...]
At = tuple[Names, Names]  # row and column


class WrongKey(ConfigError):
    """A key or a value that no run has, with what there is."""


@dataclass(frozen=True)
class Cell:
    of: Mapping[str, Any]  # every key's word, and what else `parts_of` says
    place: Scored  # what is compared
    mean: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    n_oom: int = 0
    over: bool = False
    few: str = ""  # why its samples have neither interval nor test
    mark: str = ""  # "bold" for the best, or a difference that was shown; "tie" for what may be as good
    against: Corrected | None = None  # what it is compared with, where that answered the same prompts


@dataclass(frozen=True)
class Pivot:
    """One table."""

    value: Value
    row_keys: Names
    column_keys: Names
    rows: list[Names]
    columns: list[Names]
    cells: Mapping[At, Cell]
    where: dict[str, str]  # what all of its runs share
    percent: bool = False
    notes: Sequence[str] = field(default_factory=list[str])
    left_out: Sequence[str] = field(default_factory=list[str])  # runs that had the place of another
    against: str | None = None  # whose value every cell's is less; None: cells say their own

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0

    @property
    def is_score(self) -> bool:
        """Whether cells say scores, and no differences of such."""
        return self.value.column == "score" and self.against is None

    @property
    def n(self) -> int | None:
        """Samples of a cell, where all have as many."""
        counts = {cell.n for cell in self.cells.values()}
        return counts.pop() if len(counts) == 1 else None


def pivots(
    samples: Frame,
    rows: Sequence[str] = ("method",),
    columns: Sequence[str] | None = None,
    value: str = "score",
    keep: Mapping[str, str] | None = None,
    against: str | None = None,
) -> list[Pivot]:
    """The tables of a frame's samples, the fullest first; `columns` of None are what varies between the runs.

    `against` names a method as its row does: every cell says its value less that method's, of the same column.
    """
    keep = keep or {}
    if samples.empty:
        return []
    if value == "difference":
        value, against = "score", against or FULL
    shown = check_words(samples, value, [*rows, *(columns or ()), *keep])
    asked = dict.fromkeys([*rows, *(columns or ()), *keep])
    parts = parts_of(samples, [key for key in asked if key not in KEYS], shown)
    for key, wanted in keep.items():
        called = (parts[key] == wanted) | (key == "task") & (parts["own_task"] == wanted)  # a task by its own name too
        if not called.any():
            there = ", ".join(sorted({*parts[key]} - {ANY})) or "none"
            raise WrongKey(f"no run has {key}={wanted}; there is {there}")
        parts = parts[called | (parts[key] == ANY)]
    axes = {*rows, *(columns or ())}
    parts = told_apart(parts, axes)
    labels = sorted({*parts["method"]})
    if against not in (None, FULL, *labels):
        raise WrongKey(f"no run is of {against!r}; there is {', '.join(labels)}{near(str(against), labels)}")
    first = columns or chosen(parts, rows)
    made = [
        pivot_of(group, tuple(rows), tuple(columns or chosen(group, rows)), shown, against)
        for group in split(parts, {*rows, *first})
    ]
    return sorted(made, key=lambda pivot: (-len(pivot.cells), str(pivot.where)))


def check_words(samples: Frame, value: str, keys: Sequence[str]) -> Value:
    values, every = sayable(samples), [*KEYS, *OF_SAMPLES]
    if value not in values:
        words = [*VALUES, *(name for name in values if f"measures.{name}" in values)]
        hint = f"{', '.join(words)}, or any column that holds numbers{near(value, values)}"
        raise WrongKey(f"a cell cannot say {value!r}; it can say {hint}")
    for key in keys:
        prefix, dot, name = key.partition(".")
        if key not in every and key not in samples and not (dot and name and prefix in SETTINGS):
            hint = near(key, [*every, *map(str, samples)])
            raise WrongKey(
                f"runs have no {key!r}; they have {', '.join(every)}, task.NAME, method.NAME, or any column of "
                f"kvbench.results{hint}"
            )
    if len(set(keys)) < len(keys):
        raise WrongKey("a key stands twice; each is in the rows, in the columns or in a filter")
    return value_named(values[value])


def near(word: str, words: Iterable[str]) -> str:
    found = get_close_matches(word, list(words), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


# --- parts: a run, or those of its samples that agree in a key ------------------------------------------


def parts_of(samples: Frame, cuts: Sequence[str], value: Value = VALUES["score"]) -> Frame:
    """A row for each run, and for each word that its samples have in a column of `cuts`.

    Beside the words: `scores` and `looked`, the places of its samples by score and by the value; `means` of all values;
    `family`, which variants share that were asked the same samples; how many `lines` it has.
    """
    from pandas import DataFrame

    samples = with_values(samples)
    runs = {at["run"]: at for at in dicts(runs_of(samples))}
    for key in cuts:
        samples[f"by {key}"] = in_words(samples[key]) if key in samples else UNKNOWN
    by = ["run", *(f"by {key}" for key in cuts)]
    weights = {kind.weight for kind in METRICS.values()}
    samples["looked"] = column_of(samples, value.column) / (samples[value.per] if value.per else 1) / value.scale
    narrow = samples[[name for name in dict.fromkeys([*by, *PLACE, *weights, "looked"]) if name in samples]]
    scores = places(narrow, by)
    looked = scores if value == VALUES["score"] else places(narrow, by, "looked", value.limits or ANYWHERE)
    every = dict.fromkeys([*VALUES.values(), value])
    numbers = {name: column_of(samples, name).to_numpy(float, na_value=nan) for one in every for name in one.columns}
    datasets = samples["dataset"].astype(str).to_numpy(object)
    parts = []
    for key, rows in groups_of(samples, by):
        run = runs[key[0]]
        at = run | {name: setting_of(run, name) or word for name, word in zip(cuts, key[1:], strict=True)}
        names = tuple(dict.fromkeys(datasets[rows]))
        family = at["own_task"], at["model"], at["scope"], at["seed"], frozenset(names)
        means = {one.column: mean_of(*(numbers[name][rows] for name in one.columns), scale=one.scale) for one in every}
        more = {"scores": scores[key], "looked": looked[key], "means": means, "family": family}
        parts.append(at | more | {"datasets": names, "lines": len(rows)})
    order = {run: i for i, run in enumerate(runs)}
    return DataFrame(sorted(parts, key=lambda at: order[at["run"]]))


def setting_of(run: Mapping[str, Any], key: str) -> str | None:
    """A parameter in words, which knows a null where a column only has a gap; None of other keys."""
    kind, _, name = key.partition(".")
    return {"method": run["params"], "prefill": run["prefill_params"], "task": run["asks"]}.get(kind, {}).get(name)


def mean_of(values: Any, per: Any = None, scale: float = 1.0) -> float | None:
    """The mean of an array's numbers; with another array their sum over this one's."""
    found = values[~isnan(values)].tolist()
    over = len(found) if per is None else fsum(per[~isnan(per)])
    return fsum(found) / over / scale if over else None


def told_apart(parts: Frame, axes: Collection[str]) -> Frame:
    """Parts whose method says by which parameters it differs from others of its name, unless these are keys.

    Where the prefill is a key, it says this of itself, and stands no more in the method.
    """
    parts = with_differing(parts, "method", "params", lambda key: f"method.{key}" not in axes)
    if "prefill" not in axes:
        return parts
    is_exact = parts["prefill"] == EXACT
    bare = [method.partition(" + ")[2] or kind for method, kind in zip(parts["method"], parts["kind"], strict=True)]
    bare = [FULL if kind == "full" else method for method, kind in zip(bare, parts["kind"], strict=True)]
    parts = parts.assign(method=parts["method"].where(is_exact, bare), prefill=parts["prefill"].str.split().str[0])
    return with_differing(parts, "prefill", "prefill_params")


def with_differing(parts: Frame, key: str, params: str, apart: Any = lambda key: True) -> Frame:
    """Parts whose word in a column has those parameters behind it that tell them from others with this word."""
    parts = parts.copy()
    for word, group in parts.groupby(key)[params]:
        tails = differing([*group], apart)
        parts.loc[group.index, key] = [f"{word} {tail}".strip() for tail in tails]
    return parts


def words_in(parts: Frame, key: str) -> list[str]:
    return sorted({*parts[key]} - {ANY}, key=in_order)


def chosen(parts: Frame, rows: Sequence[str]) -> Names:
    """Keys that vary, as long as the columns are not too many; else it makes tables of its own."""
    found: list[str] = []
    total = 1
    for key in ("budget", "comm", "model", "prefill", "scope"):
        n = len(words_in(parts, key))
        if key not in rows and n > 1 and total * n <= MOST_COLUMNS:
            found, total = [*found, key], total * n
    return tuple(found) or ("budget",)


def split(parts: Frame, axes: Collection[str]) -> list[Frame]:
    """Parts that may share a table: they agree in all that is no axis. `ANY` agrees with every word."""
    each_says_the_other = {"ratio", "budget"} if {"ratio", "budget"} & {*axes} else {"ratio"}
    free = [key for key in KEYS if key not in {*axes, "method", *each_says_the_other}]
    groups = {key: group.index for key, group in parts.groupby(free, sort=False)}
    joined = {
        key: [
            other
            for other in groups
            if other != key and all(a == b or b == ANY for a, b in zip(key, other, strict=True))
        ]
        for key in groups
    }
    elsewhere = {other for others in joined.values() for other in others}
    return [
        parts.loc[[*index, *(at for other in joined[key] for at in groups[other])]]
        for key, index in groups.items()
        if key not in elsewhere
    ]


# --- cells --------------------------------------------------------------------------------------------


def pivot_of(parts: Frame, rows: Names, columns: Names, value: Value, against: str | None) -> Pivot:
    is_score = value == VALUES["score"]
    cells, left_out = placed(parts, rows, columns)
    notes: list[str] = []
    percent = is_score and all(METRICS[cell.of["scores"].metric].is_share for cell in cells.values())
    if is_score or against is not None:
        cells, why = judged(cells, rows, against or FULL, is_score)
        notes = [f"Where no cell of a column is marked: {why}."] if why else []
    if against is not None:
        cells = {key: as_difference(cell) for key, cell in cells.items()}
    elif not is_score:
        cells = {key: as_value(cell, value) for key, cell in cells.items()}
    where = shared(parts, {*rows, *columns})
    return Pivot(
        value, rows, columns, in_rows(cells, rows), in_columns(cells), cells, where, percent, notes, left_out, against
    )  # fmt: skip


def placed(
    parts: Frame, rows: Names, columns: Names, bounded_by: Names | None = None
) -> tuple[dict[At, Cell], list[str]]:
    """The cells, and a sentence for each whose runs have other scores than the one that is shown.

    Of several runs with one place it is one with plain settings rather than a preset, then the one with most samples,
    then the first by the folder's name. Full attention stands where a method with a budget does: where this agrees in
    `bounded_by`, if not in all columns.
    """
    bounded_by = columns if bounded_by is None else bounded_by
    wide = parts.sort_values(["is_preset", "lines", "folder"], ascending=[True, False, True], kind="stable")
    wide = wide.assign(**{key: wide[key].replace(ANY, "all") for key in rows})
    for key in columns:
        every = words_in(parts, key) or ["all"]
        wide = wide.assign(**{key: [every if word == ANY else word for word in wide[key]]}).explode(key)
    bounded = wide[wide["kind"] != "full"]
    if len(bounded) and "method" not in columns:  # else full attention has a column of its own
        wide = wide.merge(bounded[[*bounded_by]].drop_duplicates(), on=[*bounded_by])
    candidates: dict[At, list[dict[str, Any]]] = {}
    for of in dicts(wide):
        at = tuple(of[key] for key in rows), tuple(of[key] for key in columns)
        candidates.setdefault(at, []).append(of)
    left_out: dict[str, None] = {}
    for (row, _), found in candidates.items():
        if len({tuple(one.value for one in of["scores"].answers) for of in found}) > 1:
            first, *others = (of["folder"] for of in found)
            left_out[f"{' '.join(row)}: shown is {first}, left out: {', '.join(others)}."] = None
    cells = {at: cell_of(found[0]) for at, found in candidates.items()}
    return cells, [*left_out]


def cell_of(of: Mapping[str, Any]) -> Cell:
    scores = of["scores"]
    return Cell(
        of, of["looked"], scores.mean, *ends_of(scores.interval), scores.n, scores.n_oom, scores.over, scores.few
    )


def ends_of(spread: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if spread is None else (spread.low, spread.high)


def judged(
    cells: Mapping[At, Cell], rows: Names, against: str = FULL, is_score: bool = True
) -> tuple[dict[At, Cell], str]:
    """Every cell against `against` of its column, on the prompts that both answered; of scores the best too.

    And why columns have no best one, in words.
    """
    known = {key: cell.place for key, cell in cells.items()}
    found_in: dict[Names, list[At]] = {}
    for key, cell in cells.items():
        if is_called(cell.of, against):
            found_in.setdefault(key[1], []).append(key)

    def others(row: Names) -> list[str]:
        return [word for name, word in zip(rows, row, strict=True) if name != "method"]

    def reference(key: At) -> Scored | None:
        """The one of the column; of several the one that is else in the same row."""
        found = found_in.get(key[1], [])
        beside = [at for at in found if others(at[0]) == others(key[0])]
        if not beside and len(found) > 1 and against != FULL:
            return None
        return next((known[at] for at in [*beside, *found]), None)

    def family(key: At) -> Hashable:
        return cells[key].of["family"]

    found = compared(known, reference, family)
    marks: dict[At, str] = {}
    why: list[str] = []
    if is_score:
        families = Counter(family(key) for key, cell in cells.items() if cell.of["kind"] != "full")
        ranked = {k: p for k, p in known.items() if cells[k].of["kind"] not in UNRANKED and not cells[k].over}
        marks, why = best(ranked, lambda key: key[1], lambda key: families[family(key)])
    made = {key: replace(cell, against=found.get(key), mark=marks.get(key, "")) for key, cell in cells.items()}
    return made, "; ".join(why)


def is_called(of: Mapping[str, Any], name: str) -> bool:
    if name == FULL:
        return of["kind"] == "full" and of["prefill"] in (EXACT, ANY)
    return of["method"] == name


def as_value(cell: Cell, value: Value) -> Cell:
    """A cell of what is no score: its mean, and an interval where bounds are known, over the prompts that have one."""
    if value.limits is None:
        return replace(cell, mean=cell.of["means"][value.column], low=None, high=None)
    low, high = ends_of(cell.place.interval)
    return replace(cell, mean=cell.place.mean, low=low, high=high, n=cell.place.n, few=cell.place.few)


def as_difference(cell: Cell) -> Cell:
    if cell.against is None:
        return replace(cell, mean=None, low=None, high=None)
    pair, mark = cell.against.paired, "bold" if cell.against.sign else ""
    low, high = ends_of(pair.difference)
    return replace(cell, mean=pair.mean, low=low, high=high, n=pair.n, mark=mark, few=cell.against.few)


def in_rows(cells: Mapping[At, Cell], keys: Names) -> list[Names]:
    """Full first, Oracle second, then by name; other keys by size."""
    kinds: dict[Names, set[str]] = {}
    for (row, _), cell in cells.items():
        kinds.setdefault(row, set()).add(cell.of["kind"])
    rank = {row: 0 if "full" in of else 1 if "oracle" in of else 2 for row, of in kinds.items()}
    return sorted(kinds, key=lambda row: (rank[row], *map(in_order, row)))


def in_columns(cells: Mapping[At, Cell]) -> list[Names]:
    return sorted({column for _, column in cells}, key=lambda words: [in_order(word) for word in words])


def shared(parts: Frame, axes: Collection[str]) -> dict[str, str]:
    """What all parts agree in, and their datasets where these are not called as the task."""
    found = {key: words[0] for key in KEYS if key not in axes and len(words := words_in(parts, key)) == 1}
    named = zip(parts["datasets"], parts["own_task"], strict=True) if "dataset" not in axes else ()
    if names := dict.fromkeys(name for names, task in named for name in names if name != task):
        words = f"{len(names)} datasets" if len(names) > MOST_NAMES else ", ".join(names)
        found = {"task": found.pop("task", ""), "datasets": words} | found
    hidden = {"version", *(("ratio", "budget") if {"ratio", "budget"} & {*axes} else ())}
    return {key: word for key, word in found.items() if key not in hidden}
