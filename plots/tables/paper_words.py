"""A paper's table in words: score ± half the 95 % interval, of few samples hits, and below it the paper's figure.

    -          not run
    †          a sample's ledger was over its budget
    (k oom)    so many samples ran out of memory, or failed; the score is of the others

CSV has a line per cell as `kvbench table` writes it, with the published figure.

Not here: what stands in a table (`plots/tables/papers.py`), how it is printed (`results/sheet.py`).
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from kvbench.plots.tables import shown
from kvbench.plots.tables.papers import MEAN_OF, PaperTable, Table, mean_over
from kvbench.plots.tables.pivot import Cell
from kvbench.plots.tables.values import VALUES
from kvbench.plots.tables.words import ANY
from kvbench.results.intervals import FEW
from kvbench.results.sheet import ABSENT, Sheet, Word
from kvbench.results.sheet import Cell as Text

COSTS = (
    "method", "budget", "tokens attended / budget", "share of full attention", "read to find / comm",
    "KV moved per step", "device memory", "host memory",
)  # fmt: skip


def paper_title(paper: PaperTable, tables: Sequence[Table]) -> str:
    """The paper's, where a run answers its table."""
    if all(table.is_layout_only for table in tables):
        return f"In the layout of {paper.title}; no run is on its model, {paper.models[0]}"
    return paper.title


def sheet_of(table: Table) -> Sheet:
    """The scores, and below them the costs."""
    lines: list[Sequence[Text] | str] = []
    for budget in table.budgets:
        lines += [title] if (title := block_title(table, budget)) else []
        lines += score_lines(table, budget)
    methods = table.published.methods
    first = "time or bytes" if table.paper.times_of else "dataset"
    return Sheet(
        [first, "n", *methods], lines, title=paper_title(table.paper, [table]),
        about=heading(table), notes=explanation(table), label=table.paper.name.replace("_", "-"),
        below=Sheet(COSTS, cost_lines(table), n_keys=2),
    )  # fmt: skip


def block_title(table: Table, budget: str) -> str:
    if budget == ANY:
        return ""
    if tokens := table.paper.tokens.get(budget):
        return f"{budget}: {tokens} tokens per layer"
    return f"{budget} tokens" if budget.isdecimal() and budget != "1" else f"ratio {budget}"


def score_lines(table: Table, budget: str) -> Iterator[Sequence[Text]]:
    """A line of ours for each dataset, and below it what the paper printed."""
    for dataset in table.rows:
        cells = {method: table.cell(dataset, method, budget) for method in table.published.methods}
        if dataset.startswith(MEAN_OF) and not any(cells.values()):
            continue
        counts = {cell.n for cell in cells.values() if cell is not None}
        n = counts.pop() if len(counts) == 1 else None
        printed = {method: table.printed(dataset, method, budget) for method in cells}
        yield [dataset, ABSENT if n is None else str(n), *(score(table, cell, n) for cell in cells.values())]
        if any(printed.values()):
            words = (published(table, cell, printed[method]) for method, cell in cells.items())
            yield [Word("· paper", "small"), "", *(Word(word, "small") for word in words)]


def score(table: Table, cell: Cell | None, common: int | None) -> Word:
    """Our score as printed, with its interval and marks."""
    oom = f" ({cell.n_oom} oom)" if cell is not None and cell.n_oom else ""
    if cell is None or cell.mean is None:
        return Word(ABSENT, more=oom)
    scale = table.pivot.scale
    spread = "" if cell.few or cell.low is None or cell.high is None else f" ± {scale * (cell.high - cell.low) / 2:.2f}"
    n = "" if cell.n == common else f" (n={cell.n})"
    hits = "" if table.paper.times_of else cell.place.hits
    return Word(hits or str(table.figure(cell)), cell.mark, f"{spread}{' †' if cell.over else ''}{n}{oom}")


def published(table: Table, cell: Cell | None, printed: str | None) -> str:
    """The published figure as printed, with the difference of ours to it."""
    difference = table.difference(cell, printed)
    return f"{printed} ({difference:+.2f})" if difference is not None and table.is_paper_setting else printed or ABSENT


def heading(table: Table) -> str:
    signs = ["NOT THE PAPER'S MODEL"] if table.is_layout_only else []
    said = shown.where(table.pivot.where).replace("EMBEDDED DATA", "EMBEDDED DATA, not the paper's")
    return " · ".join([*signs, said])


def explanation(table: Table) -> list[str]:
    """The sentences below a table."""
    cells = table.pivot.cells.values()
    kind = "Figures are means" if table.paper.times_of else "Scores are means times 100, of few samples hits"
    sentences = [f"{kind}; ± half of their 95 % interval (none below {FEW} samples); - was not run."]
    sentences += [shown.BEST.format("row")] if any(cell.mark for cell in cells) else []
    sentences += [shown.OVER] if any(cell.over for cell in cells) else []
    if table.published.values:
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
    return [*sentences, *called(table), *table.pivot.notes]


def called(table: Table) -> list[str]:
    """Words on what our runs are, where their label says more, or other, than the paper's name above their column."""
    labels: dict[str, dict[str, None]] = {method: {} for method in table.published.methods}
    for ((method,), _), cell in table.pivot.cells.items():
        if cell.of["label"].replace(" ", "") != method.replace(" ", ""):
            labels[method][cell.of["label"]] = None
    said = "; ".join(f"{method}: {' or '.join(found)}" for method, found in labels.items() if found)
    return [f"What our runs are, where the paper's name says less or other: {said}."] if said else []


def comm(table: Table, cell: Cell) -> float | None:
    """Bytes read to find tokens, relative to those of the prompt's keys."""
    find, prompt = cell.of["means"].get("bytes_index_read_per_step"), cell.of["means"].get("prompt_read")
    return find * 1e3 / table.key_bytes / prompt if find is not None and prompt and table.key_bytes else None


def reading_more(table: Table) -> list[str]:
    """Methods, in the table's order, that kept their budget and read more bytes to find tokens than `comm` is."""
    most = Fraction(table.pivot.where.get("comm", 1))
    cells = table.pivot.cells.items()
    found = {method for ((method,), _), cell in cells if (comm(table, cell) or 0) > most and not cell.over}
    return [method for method in table.published.methods if method in found]


def cost_lines(table: Table) -> list[Sequence[Text]]:
    """A line per method and budget: what was measured against what was allowed."""
    lines: list[Sequence[Text]] = []
    for budget in table.budgets:
        for method in table.published.methods:
            found = [cell for name in table.rows if (cell := table.cell(name, method, budget)) and cell.of["folder"]]
            if found:
                lines.append([method, block_title(table, budget) or ABSENT, *cost_words(found, table)])
    return lines


def cost_words(cells: Sequence[Cell], table: Table) -> tuple[str, ...]:
    def of(name: str) -> float | None:
        value = VALUES[name]
        found = mean_over((cell.of["means"][value.column], cell.n) for cell in cells)
        return None if found is None else found * value.scale

    share, read = of("share"), mean_over((comm(table, cell), cell.n) for cell in cells)
    return (
        f"{number(of('tokens'))} / {number(of('allowed'))}",
        ABSENT if share is None else f"{share:.3f}",
        f"{ABSENT if read is None else f'{read:.4f}'} / {table.pivot.where.get('comm', ABSENT)}",
        *(in_bytes(of(name)) for name in ("moved", "device", "host")),
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


def records(tables: Sequence[Table]) -> Iterator[dict[str, Any]]:
    """A line per cell, unrounded, and per published figure that no run stands beside."""
    for table, lines in zip(tables, map(shown.records, ([one.pivot] for one in tables)), strict=True):
        of_runs = {(line["dataset"], line["method"], line["budget"]): line for line in lines}
        for budget in table.budgets:
            for dataset in table.rows:
                for method in table.published.methods:
                    place = dataset, method, "all" if budget == ANY else budget
                    cell, printed = table.cell(dataset, method, budget), table.printed(dataset, method, budget)
                    if cell is None and printed is None:
                        continue
                    without = dict(zip(("dataset", "method", "budget"), place, strict=True)) | {"n": 0, "run": ""}
                    yield of_runs.get(place, without) | {
                        "table": tables.index(table) + 1,
                        "label": cell and cell.of["label"],
                        "published": printed,
                        "difference_to_published": table.difference(cell, printed),
                        "comm_measured": cell and comm(table, cell),
                    }
