"""A pivot in words.

    †          a sample's ledger was over its budget; such a run is not ranked
    (k oom)    so many samples ran out of memory, or failed; the score is of the others

CSV has a line per cell with everything that is known of it, unrounded; scores of 0 to 1 are 0 to 100, as in tables.

Not here: what a cell says (`plots/tables/pivot.py`), how a table is printed (`results/sheet.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbench.plots.tables.pivot import FULL, Cell, Pivot
from kvbench.plots.tables.values import VALUES
from kvbench.plots.tables.words import ANY, KEYS
from kvbench.results import EXACT
from kvbench.results.sheet import ABSENT, Sheet, Word

BEST = (
    "Bold: best of its {}. Italic (underlined in LaTeX): not shown to be worse than the best, paired test with Holm's "
    "correction."
)
OVER = "† A sample's ledger was over its budget; such runs are not ranked."
UNNAMED = ("task", "model", "device", "dtype", "scope", "budget", "prompts")  # words that say it themselves


def sheet_of(pivot: Pivot) -> Sheet:
    rows = [[*row, *(word(pivot.cells.get((row, column)), pivot) for column in pivot.columns)] for row in pivot.rows]
    return Sheet(
        [*pivot.row_keys, *pivot.columns], rows, len(pivot.row_keys), title=title(pivot), about=where(pivot.where),
        notes=[*explanation(pivot), *pivot.left_out], label=label(pivot),
    )  # fmt: skip


def title(pivot: Pivot) -> str:
    value = pivot.value
    unit = " (0 to 100)" if pivot.percent else f" ({value.unit})" if value.unit else ""
    less = "" if pivot.against is None else f", difference to {pivot.against}"
    return f"{value.title}{less}{unit} by {' and '.join(pivot.row_keys)}, columns {' · '.join(pivot.column_keys)}"


def where(shared: Mapping[str, str]) -> str:
    """Words on what all runs of a table share."""
    data = shared.get("data", "")
    words = ["EMBEDDED DATA"] if data == "embedded" else [f"{data} data"] if data else []
    for key, word in shared.items():
        if word not in (EXACT, "", ANY) and key not in ("ratio", "data"):
            words.append(word if key in UNNAMED else f"{key} {word}")
    return " · ".join(words)


def word(cell: Cell | None, pivot: Pivot) -> Word:
    """The word that a cell prints."""
    oom = f" ({cell.n_oom} oom)" if cell is not None and cell.n_oom else ""
    if cell is None or cell.mean is None:
        return Word(ABSENT, more=oom)
    digits = 1 if pivot.percent else pivot.value.digits
    sign = "" if pivot.against is None else "+"

    def number(value: float) -> str:
        return f"{pivot.scale * value:{sign},.{digits}f}"

    more = "" if cell.few or cell.low is None or cell.high is None else f" ({number(cell.low)} to {number(cell.high)})"
    share = computed(cell, pivot)
    more += "" if share is None else f" [{share:.2f}]"
    more += (" †" if cell.over else "") + (f" n={cell.n}" if cell.n != pivot.n else "") + oom
    return Word((pivot.is_score and cell.place.hits) or number(cell.mean), cell.mark, more)


def computed(cell: Cell, pivot: Pivot) -> float | None:
    """What a sparse prefill computed, where the table says something else."""
    return None if pivot.value.column == "prefill_share" else cell.of["means"]["prefill_share"]


def explanation(pivot: Pivot) -> list[str]:
    """The sentences below a table."""
    cells, n = pivot.cells.values(), pivot.n
    sentences: list[str] = []
    if pivot.value.column == "score" or pivot.against is not None or pivot.value.limits is not None:
        count = f"{n} sample{'s' if n != 1 else ''} a cell" if n is not None else "n is the number of samples"
        spread = "in brackets the 95 % interval" if any(cell.low is not None and not cell.few for cell in cells) else ""
        sentences.append("; ".join(part for part in (count, spread) if part) + ".")
        sentences += too_few(pivot)
    if pivot.is_score and any(cell.mark for cell in cells):
        sentences.append(f"{BEST.format('column')} Full and Oracle are not ranked: nothing bounds what they read.")
    if pivot.against is not None:
        sentences.append(
            f"Paired with {pivot.against} on the same prompts. Bold: a difference by the paired test, corrected for "
            "all cells with these prompts (Holm)."
        )
    if any(computed(cell, pivot) is not None for cell in cells):
        sentences.append("In square brackets the share of the pairs of query and key that a sparse prefill computed.")
    return [*sentences, *([OVER] if any(cell.over for cell in cells) else []), *pivot.notes]


def too_few(pivot: Pivot) -> list[str]:
    """Of which columns the samples are too few, a sentence for each number of them."""
    found: dict[str, dict[str, None]] = {}
    for (_, column), cell in pivot.cells.items():
        if cell.few:
            found.setdefault(cell.few, {})[" · ".join(column)] = None
    return [f"{'; '.join(columns)}: {few}." for few, columns in found.items()]


def as_name(words: str, sign: str) -> str:
    return re.sub("[^a-z0-9]+", sign, words.lower()).strip(sign)


def label(pivot: Pivot) -> str:
    """The name by which `\\ref` calls the table, after `tab:`."""
    less = [] if pivot.against is None else ["less", pivot.against]
    value = next((name for name, value in VALUES.items() if value == pivot.value), pivot.value.title)
    shared = (pivot.where.get(key, "") for key in ("task", "model"))
    return as_name(" ".join((value, *less, *shared, *pivot.row_keys, *pivot.column_keys)), "-")


def records(pivots: Sequence[Pivot]) -> Iterator[dict[str, Any]]:
    """A line per cell of all pivots. Each column has a name of its own."""
    keys = list(dict.fromkeys(key for one in pivots for key in (*one.row_keys, *one.column_keys, *one.where)))
    whom = {pivot.against or FULL for pivot in pivots}
    reference = as_name(whom.pop(), "_") if len(whom) == 1 else "other"
    measures = {
        f"{name}_{value.unit.lower()}" if value.unit not in ("", "s") else name: value.column
        for name, value in VALUES.items()
        if name != "score"
    }
    for number, pivot in enumerate(pivots, 1):
        for row, column in sorted(pivot.cells, key=lambda at: (pivot.rows.index(at[0]), pivot.columns.index(at[1]))):
            cell = pivot.cells[row, column]
            axes = zip((*pivot.row_keys, *pivot.column_keys), (*row, *column), strict=True)
            said = {**pivot.where, **{key: cell.of[key] for key in KEYS}, **dict(axes)}
            pair = cell.against and cell.against.paired
            spread = pair and pair.difference
            scores = {
                "value": cell.mean, "low": cell.low, "high": cell.high,
                f"difference_to_{reference}": pair and pair.mean,
                "difference_low": spread and spread.low, "difference_high": spread and spread.high,
            }  # fmt: skip
            yield (
                {key: "all" if said.get(key) == ANY else said.get(key, "") for key in keys}
                | {"table": number, "n": cell.n, "n_oom": cell.n_oom, "mark": cell.mark, "over_budget": cell.over}
                | {name: None if value is None else pivot.scale * value for name, value in scores.items()}
                | {"p_holm": cell.against and cell.against.p, "p_holm_is_bound": cell.against and cell.against.is_bound}
                | {name: cell.of["means"][column] for name, column in measures.items()}
                | {"run": cell.of["folder"]}
            )
