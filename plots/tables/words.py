"""A pivot of `plots/tables/generic.py` in words.

    †          a sample's ledger was over its budget; such a run is not ranked
    (k oom)    so many samples ran out of memory, or failed; the score is of the others

CSV has a line per cell with everything that is known of it, unrounded; scores of 0 to 1 are 0 to 100, as in tables.

Not here: what a cell says (`plots/tables/generic.py`), how a table is printed (`results/sheet.py`).
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.plots.tables.generic import ANY, FULL, Cell, Pivot
from kvbench.plots.tables.values import VALUES, prefill_share, value_named
from kvbench.results.sheet import ABSENT, Sheet, Word


def sheet_of(pivot: Pivot) -> Sheet:
    rows = [[*row, *(word(pivot.cells.get((row, column)), pivot) for column in pivot.columns)] for row in pivot.rows]
    return Sheet(
        [*pivot.row_keys, *pivot.columns], rows, len(pivot.row_keys), title=title(pivot), about=where(pivot),
        notes=[*explanation(pivot), *pivot.left_out], label=label(pivot),
    )  # fmt: skip


def title(pivot: Pivot) -> str:
    value = value_named(pivot.value)
    unit = " (0 to 100)" if pivot.percent else f" ({value.unit})" if value.unit else ""
    less = "" if pivot.against is None else f", difference to {pivot.against}"
    return f"{value.title}{less}{unit} by {' and '.join(pivot.row_keys)}, columns {' · '.join(pivot.column_keys)}"


def where(pivot: Pivot) -> str:
    """Words on what all runs of the pivot share."""
    shared = {key: word for key, word in pivot.where.items() if word not in ("exact", "")}
    data = shared.pop("data", "")
    plainly = ("task", "model", "device", "dtype", "scope", "budget", "prompts")
    parts = [word if key in plainly else f"{key} {word}" for key, word in shared.items() if key != "ratio"]
    source = ["EMBEDDED DATA"] if data == "embedded" else [f"{data} data"] if data else []
    return " · ".join([*source, *parts])


def word(cell: Cell | None, pivot: Pivot) -> Word:
    """The word that a cell prints."""
    if cell is None or cell.mean is None:
        return Word(ABSENT, more=f" ({cell.n_oom} oom)" if cell is not None and cell.n_oom else "")
    digits = 1 if pivot.percent else 3 if pivot.value == "score" else value_named(pivot.value).digits
    sign = "" if pivot.against is None else "+"

    def number(value: float) -> str:
        return f"{pivot.scale * value:{sign},.{digits}f}"

    more = "" if cell.low is None or cell.high is None else f" ({number(cell.low)} to {number(cell.high)})"
    share = prefill_share(cell.part.rows)
    more += f" [{share:.2f}]" if share is not None and pivot.value != "prefill_share" else ""
    more += " †" if cell.over else ""
    more += f" n={cell.n}" if cell.n != pivot.n else ""
    return Word(number(cell.mean), cell.mark, more + (f" ({cell.n_oom} oom)" if cell.n_oom else ""))


def explanation(pivot: Pivot) -> list[str]:
    """The sentences below a table."""
    cells = pivot.cells.values()
    sentences = []
    if pivot.value == "score" or pivot.against is not None:
        n = pivot.n
        spread = "in brackets the 95 % interval" if any(cell.low is not None for cell in cells) else ""
        count = f"{n} sample{'s' if n != 1 else ''} a cell" if n is not None else "n is the number of samples"
        none = "no interval of one sample" if any(cell.n == 1 for cell in cells) else ""
        sentences.append("; ".join(part for part in (count, spread, none) if part) + ".")
    if pivot.value == "score" and pivot.against is None and any(cell.mark for cell in cells):
        sentences.append(
            "Bold: best of its column. Italic (underlined in LaTeX): not shown to be worse than the best, paired test "
            "with Holm's correction. Full and Oracle are not ranked: nothing bounds what they read."
        )
    if pivot.against is not None:
        sentences.append(
            f"Paired with {pivot.against} on the same prompts. Bold: a difference by the paired test, corrected for "
            "all cells with these prompts (Holm)."
        )
    if any(prefill_share(cell.part.rows) is not None for cell in cells) and pivot.value != "prefill_share":
        sentences.append("In square brackets the share of the pairs of query and key that a sparse prefill computed.")
    if any(cell.over for cell in cells):
        sentences.append("† A sample's ledger was over its budget; such runs are not ranked.")
    return [*sentences, *pivot.notes]


def label(pivot: Pivot) -> str:
    """The name by which `\\ref` calls the table, after `tab:`."""
    less = [] if pivot.against is None else ["less", pivot.against]
    shared = (pivot.where.get(key, "") for key in ("task", "model"))
    words = (pivot.value, *less, *shared, *pivot.row_keys, *pivot.column_keys)
    return re.sub("[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def records(pivots: Sequence[Pivot]) -> Iterator[dict[str, Any]]:
    """A line per cell of all pivots. Each column has a name of its own."""
    keys = list(dict.fromkeys(key for one in pivots for key in (*one.row_keys, *one.column_keys, *one.where)))
    measures = {
        f"{name}_{value.unit.lower()}" if value.unit not in ("", "s") else name: value
        for name, value in VALUES.items()
        if name != "score"
    }
    whom = {pivot.against or FULL for pivot in pivots}
    reference = re.sub("[^a-z0-9]+", "_", whom.pop().lower()).strip("_") if len(whom) == 1 else "other"
    for number, pivot in enumerate(pivots, 1):
        for (row, column), cell in pivot.cells.items():
            said = {**cell.part.of, **dict(zip((*pivot.row_keys, *pivot.column_keys), (*row, *column), strict=True))}
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
                | {name: value.of(cell.part.rows) for name, value in measures.items()}
                | {"run": cell.part.run.folder.name}
            )
