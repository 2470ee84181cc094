"""A table of `plots/tables/cells.py` in words: score ± half the 95 % interval, and below it the paper's figure.

    -          not run
    †          a sample's ledger was over its budget
    (k oom)    so many samples ran out of memory, or failed; the score is of the others

CSV has a line per cell with everything that is known of it, unrounded.

Not here: what stands in a table (`plots/tables/cells.py`), how it is printed (`results/sheet.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from fractions import Fraction
from math import fsum
from typing import Any

from kvbench.plots.stats import scaled
from kvbench.plots.tables.cells import Cost, Table, TableCell
from kvbench.plots.tables.papers import PaperTable
from kvbench.results.sheet import ABSENT, Cell, Sheet, Word

COSTS = (
    "method", "budget", "tokens attended / budget", "share of full attention", "read to find / comm",
    "KV moved per step", "device memory", "host memory",
)  # fmt: skip


def paper_title(paper_table: PaperTable, tables: Sequence[Table]) -> str:
    """The paper's, where a run answers its table."""
    if all(table.is_layout_only for table in tables):
        return f"In the layout of {paper_table.title}; no run is on its model, {paper_table.models[0]}"
    return paper_table.title


def sheet_of(table: Table) -> Sheet:
    """The scores, and below them the costs."""
    lines: list[Sequence[Cell] | str] = []
    for budget in table.budgets:
        lines += [title] if (title := block_title(table, budget)) else []
        lines += score_lines(table, budget)
    of_costs = Sheet(COSTS, cost_lines(table), n_keys=2)
    label = table.paper_table.name.replace("_", "-")
    return Sheet(
        ["dataset", "n", *table.methods], lines, title=paper_title(table.paper_table, [table]), about=heading(table),
        notes=explanation(table), label=label, below=of_costs,
    )  # fmt: skip


def block_title(table: Table, budget: str) -> str:
    if not budget:
        return ""
    tokens = (table.paper_table.tokens or {}).get(budget)
    if tokens:
        return f"{budget}: {tokens} tokens per layer"
    return f"{budget} tokens" if budget.isdecimal() and budget != "1" else f"ratio {budget}"


def cells_of(table: Table, budget: str) -> Iterator[tuple[str, list[TableCell]]]:
    """Each dataset's cells at a budget, in the order of the methods."""
    for dataset in table.datasets:
        if (dataset, table.methods[0], budget) in table.cells:
            yield dataset, [table.cells[dataset, method, budget] for method in table.methods]


def score_lines(table: Table, budget: str) -> Iterator[Sequence[Cell]]:
    """A line of ours for each dataset, and below it what the paper printed."""
    for dataset, cells in cells_of(table, budget):
        counts = {cell.n for cell in cells if cell.n or cell.n_oom}
        n = counts.pop() if len(counts) == 1 else None
        yield [dataset, ABSENT if n is None else str(n), *(score(cell, n) for cell in cells)]
        if any(cell.published for cell in cells):
            printed = (published(cell, table.is_paper_setting) for cell in cells)
            yield [Word("· paper", "small"), "", *(Word(word, "small") for word in printed)]


def score(cell: TableCell, common: int | None) -> Word:
    """Our score as printed, with its interval and marks."""
    oom = f" ({cell.n_oom} oom)" if cell.n_oom else ""
    if cell.score is None:
        return Word(ABSENT, more=oom)
    spread = "" if cell.low is None or cell.high is None else f" ± {(cell.high - cell.low) / 2:.2f}"
    n = "" if cell.n == common else f" (n={cell.n})"
    return Word(f"{cell.score:.2f}", cell.mark, f"{spread}{' †' if cell.over else ''}{n}{oom}")


def published(cell: TableCell, show_difference: bool) -> str:
    """The published figure as printed, with the difference of ours to it."""
    if cell.published is None or cell.difference is None or not show_difference:
        return cell.published or ABSENT
    return f"{cell.published} ({cell.difference:+.2f})"


def heading(table: Table) -> str:
    embedded = "EMBEDDED DATA, not the paper's · " if table.where.data_source == "embedded" else ""
    if table.is_layout_only:
        embedded = f"NOT THE PAPER'S MODEL · {embedded}"
    return f"{embedded}{table.where}{f' · {table.prompts}' if table.prompts else ''}"


def explanation(table: Table) -> list[str]:
    """The sentences below a table."""
    cells = table.cells.values()
    sentences = ["Scores are means times 100, ± half of their 95 % interval (none of one sample); - was not run."]
    if any(cell.mark for cell in cells):
        sentences.append(
            "Bold: best of its row. Italic (underlined in LaTeX): not shown to be worse than the best, paired test "
            "with Holm's correction."
        )
    if any(cell.over for cell in cells):
        sentences.append("† A sample's ledger was over its budget; such runs are not ranked.")
    if any(cell.published for cell in cells):
        sentences.append(
            "Below each row: the published figure (ours less it)."
            if table.is_paper_setting
            else "Below each row: the published figure, of another model, data, wording, limit or comm: "
            "differences mean little."
        )
    if names := reading_more(table):
        sentences.append(
            f"{', '.join(names)} read more to find tokens than comm prices: what is read of an index on the device "
            "counts here."
        )
    return [*sentences, *called(table), *table.notes]


def called(table: Table) -> list[str]:
    """Words on what our runs are, where their label says more, or other, than the paper's name above their column."""
    found: dict[str, dict[str, None]] = {}
    for (_, method, _), cell in table.cells.items():
        if cell.label and cell.label.replace(" ", "") != method.replace(" ", ""):
            found.setdefault(method, {})[cell.label] = None
    said = "; ".join(f"{method}: {' or '.join(labels)}" for method, labels in found.items())
    return [f"What our runs are, where the paper's name says less or other: {said}."] if said else []


def reading_more(table: Table) -> list[str]:
    """Methods, in the table's order, that kept their budget and read more bytes to find tokens than `comm` is."""
    most = Fraction(table.where.comm or 1)
    found = {cell.method for cell in table.cells.values() if (cell.cost.comm or 0) > most and not cell.over}
    return [method for method in table.methods if method in found]


def cost_lines(table: Table) -> list[Sequence[Cell]]:
    """A line per method and budget: what was measured against what was allowed."""
    lines: list[Sequence[Cell]] = []
    for budget in table.budgets:
        for i, method in enumerate(table.methods):
            cells = [row[i] for _, row in cells_of(table, budget) if row[i].run]
            if cells:
                lines.append([method, block_title(table, budget) or ABSENT, *cost_words(cells, table)])
    return lines


def cost_words(cells: Sequence[TableCell], table: Table) -> tuple[str, ...]:
    def mean(of: Callable[[Cost], float | None]) -> float | None:
        known = [(value, c.n) for c in cells if c.n and (value := of(c.cost)) is not None]
        return fsum(v * n for v, n in known) / sum(n for _, n in known) if known else None

    attended, allowed = mean(lambda c: c.tokens_attended), mean(lambda c: c.tokens_budget)
    comm, share = mean(lambda c: c.comm), mean(lambda c: c.effective_ratio)
    return (
        f"{number(attended)} / {number(allowed)}",
        ABSENT if share is None else f"{share:.3f}",
        f"{ABSENT if comm is None else f'{comm:.4f}'} / {table.where.comm or ABSENT}",
        in_bytes(mean(lambda c: c.kv_bytes_per_step)),
        in_bytes(mean(lambda c: c.device_bytes)),
        in_bytes(mean(lambda c: c.host_bytes)),
    )


def number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def in_bytes(value: float | None) -> str:
    if value is None:
        return ABSENT
    for unit in ("B", "KB", "MB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def records(tables: Iterable[Table]) -> Iterator[dict[str, Any]]:
    """A line per cell of all tables, unrounded."""
    where = ("model", "data_source", "comm", "protocol", "seed", "limit", "dtype", "device")
    names = ("dataset", "method", "label", "budget", "score", "low", "high", "n", "n_oom", "published")
    for table in tables:
        for cell in table.cells.values():
            full = cell.against and scaled(cell.against.paired.difference, 100)
            yield (
                {name: getattr(table.where, name) for name in where}
                | {"asked": table.prompts}
                | {name: getattr(cell, name) for name in (*names, "difference", "mark", "over", "embedded")}
                | {"vs_full": cell.against and 100 * cell.against.paired.mean}
                | {"vs_full_low": full and full.low, "vs_full_high": full and full.high}
                | {"vs_full_p_holm": cell.against and cell.against.p}
                | {"vs_full_p_holm_is_bound": cell.against and cell.against.is_bound}
                | {"comm_measured" if key == "comm" else key: value for key, value in asdict(cell.cost).items()}
                | {"run": cell.run}
            )
