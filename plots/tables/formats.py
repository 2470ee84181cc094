"""A table of `plots/tables/cells.py` as Markdown, LaTeX (booktabs) and CSV.

Markdown and LaTeX print score ± half the 95 % interval, and below each row the paper's figure with the difference to
ours. CSV has a line per cell with everything that is known of it, unrounded.

    **bold**   best of the row, as the corrected test shows, without Full and Oracle and what is over budget
    *italic*   as good as the best, as far as the samples tell (underlined in LaTeX)
    -          not run
    †          a sample's ledger was over its budget
    (k oom)    so many samples ran out of memory, or failed; the score is of the others

LaTeX needs the packages booktabs and graphicx, and nothing else: \\input the file where the table should stand.

Not here: what stands in a table (`plots/tables/cells.py`).
"""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from math import fsum
from pathlib import Path

from engine.foreign import CsvWriter
from engine.terminal import printable
from plots.tables.cells import Cost, Table, TableCell
from plots.tables.papers import PaperTable

ABSENT = "-"
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "·": r"$\cdot$", "±": r"$\pm$", "†": r"$^\dagger$", "…": r"\dots{}",
        "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    }
)  # fmt: skip


def write(folder: Path, paper_table: PaperTable, tables: Sequence[Table]) -> list[Path]:
    """Write all of a paper's table that the runs give into one file per format."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "md": f"# {plain_markdown(paper_title(paper_table, tables))}\n\n"
        + "\n".join(markdown(table) for table in tables),
        "tex": "\n".join(latex(table, number) for number, table in enumerate(tables, 1)),
        "csv": as_csv(tables),
    }
    paths = []
    for suffix, text in texts.items():
        path = folder / f"{paper_table.name}.{suffix}"
        path.write_text(text, encoding="utf-8", errors="replace")  # a folder's name may be no UTF-8
        paths.append(path)
    return paths


# --- what all formats say ----------------------------------------------------------------------


def paper_title(paper_table: PaperTable, tables: Sequence[Table]) -> str:
    """The paper's, where a run answers its table."""
    if all(table.is_layout_only for table in tables):
        return f"In the layout of {paper_table.title}; no run is on its model, {paper_table.models[0]}"
    return paper_table.title


def block_title(table: Table, budget: str) -> str:
    if not budget:
        return ""
    tokens = (table.paper_table.tokens or {}).get(budget)
    if tokens:
        return f"{budget}: {tokens} tokens per layer"
    return f"{budget} tokens" if budget.isdecimal() and budget != "1" else f"ratio {budget}"


def rows_of(table: Table, budget: str) -> list[str]:
    return [d for d in table.datasets if (d, table.methods[0], budget) in table.cells]


def sample_count(cells: Iterable[TableCell]) -> int | None:
    """The number of samples, where all cells that were run agree on it."""
    counts = {cell.n for cell in cells if cell.n or cell.n_oom}
    return counts.pop() if len(counts) == 1 else None


def score(cell: TableCell, common: int | None, strong: Callable[[str, str], str]) -> str:
    """Our score as printed, with its interval and marks; `strong` gets the number and its mark."""
    if cell.score is None:
        return f"{ABSENT} ({cell.n_oom} oom)" if cell.n_oom else ABSENT
    text = f"{cell.score:.2f}"
    if cell.mark:
        text = strong(text, cell.mark)
    if cell.low is not None and cell.high is not None:
        text += f" ± {(cell.high - cell.low) / 2:.2f}"
    if cell.over:
        text += " †"
    if cell.n != common:
        text += f" (n={cell.n})"
    if cell.n_oom:
        text += f" ({cell.n_oom} oom)"
    return text


def paper(cell: TableCell, show_difference: bool) -> str:
    """The published figure as printed, with the difference of ours to it."""
    if cell.published is None:
        return ABSENT
    if cell.difference is None or not show_difference:
        return cell.published
    return f"{cell.published} ({cell.difference:+.2f})"


def heading(table: Table) -> str:
    embedded = "EMBEDDED DATA, not the paper's · " if table.where.data_source == "embedded" else ""
    if table.is_layout_only:
        embedded = f"NOT THE PAPER'S MODEL · {embedded}"
    return f"{embedded}{table.where}{f' · {table.prompts}' if table.prompts else ''}"


def explanation(table: Table) -> list[str]:
    """The sentences below a table."""
    sentences = ["Scores are means times 100, ± half of their 95 % interval (none of one sample); - was not run."]
    if any(cell.mark for cell in table.cells.values()):
        sentences.append(
            "Bold: best of its row. Italic (underlined in LaTeX): not shown to be worse than the best, paired test "
            "with Holm's correction."
        )
    if any(cell.over for cell in table.cells.values()):
        sentences.append("† A sample's ledger was over its budget; such runs are not ranked.")
    if any(cell.published for cell in table.cells.values()):
        sentences.append(
            "Below each row: the published figure (ours less it)."
            if table.is_paper_setting
            else "Below each row: the published figure, of another model, data, wording, limit or comm: "
            "differences mean little."
        )
    return [*sentences, *table.notes]


COSTS = (
    "method", "budget", "tokens attended / budget", "share of full attention", "comm measured / allowed",
    "KV moved per step", "device memory", "host memory",
)  # fmt: skip


def costs(table: Table) -> list[tuple[str, ...]]:
    """A line per method and budget: what was measured against what was allowed."""
    lines = []
    for budget in table.budgets:
        for method in table.methods:
            cells = [
                table.cells[d, method, budget] for d in rows_of(table, budget) if table.cells[d, method, budget].run
            ]
            if cells:
                lines.append((method, block_title(table, budget) or ABSENT, *cost_words(cells, table)))
    return lines


def cost_words(cells: Sequence[TableCell], table: Table) -> tuple[str, ...]:
    def mean(of: Callable[[Cost], float | None]) -> float | None:
        known = [(value, c.n) for c in cells if c.n and (value := of(c.cost)) is not None]
        return fsum(v * n for v, n in known) / sum(n for _, n in known) if known else None

    attended, allowed = mean(lambda c: c.tokens_attended), mean(lambda c: c.tokens_budget)
    comm, share = mean(lambda c: c.comm), mean(lambda c: c.effective_ratio)
    limit = table.where.comm or ABSENT
    return (
        f"{number(attended)} / {number(allowed)}",
        ABSENT if share is None else f"{share:.3f}",
        f"{ABSENT if comm is None else f'{comm:.4f}'} / {limit}",
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


# --- Markdown ----------------------------------------------------------------------------------


def starred(text: str, mark: str) -> str:
    return f"**{text}**" if mark == "bold" else f"*{text}*"


def markdown(table: Table) -> str:
    lines = [f"## {plain_markdown(heading(table))}", ""]
    for budget in table.budgets:
        if title := block_title(table, budget):
            lines += [f"### {plain_markdown(title)}", ""]
        lines += pipes(["dataset", "n", *table.methods], markdown_rows(table, budget))
        lines.append("")
    lines += [f"- {plain_markdown(sentence)}" for sentence in explanation(table)]
    lines += ["", *pipes(COSTS, costs(table)), ""]
    return "\n".join(lines)


def markdown_rows(table: Table, budget: str) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for dataset in rows_of(table, budget):
        cells = [table.cells[dataset, method, budget] for method in table.methods]
        n = sample_count(cells)
        ours = [score(cell, n, starred) for cell in cells]
        lines.append((dataset, ABSENT if n is None else str(n), *ours))
        if any(cell.published for cell in cells):
            theirs = [paper(cell, table.is_paper_setting) for cell in cells]
            lines.append(("· paper", "", *theirs))
    return lines


def plain_markdown(text: str) -> str:
    """A text that can stand anywhere on a page: it ends no cell, opens no element and no link, and hides nothing."""
    words = printable(" ".join(text.split())).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    return words.replace("|", "\\|").replace("[", "\\[").replace("`", "\\`")


def pipes(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(words: Sequence[str]) -> str:
        return "| " + " | ".join(map(plain_markdown, words)) + " |"

    align = "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"
    return [line(head), align, *(line(row) for row in rows)]


# --- LaTeX -------------------------------------------------------------------------------------


def tex(text: str) -> str:
    """Any text as LaTeX prints it; signs that pdflatex's fonts lack are left out."""
    words = " ".join(text.split()).translate(LATEX)  # an empty line would end the paragraph
    return words.encode("ascii", "ignore").decode()


def latex(table: Table, number: int = 1) -> str:
    """A floating table; `number` keeps the labels of a paper's tables apart."""
    columns = len(table.methods) + 2
    body: list[str] = []
    for budget in table.budgets:
        if body:
            body.append(r"\midrule")
        if title := block_title(table, budget):
            body.append(rf"\multicolumn{{{columns}}}{{l}}{{\emph{{{tex(title)}}}}} \\")
        body += latex_rows(table, budget)
    under = " ".join(tex(sentence.rstrip(".") + ".") for sentence in explanation(table))
    return "\n".join(
        [
            f"% {table.paper_table.name}: needs booktabs and graphicx",
            r"\begin{table*}",
            r"\centering",
            rf"\caption{{{tex(paper_title(table.paper_table, [table]))}. {tex(heading(table))}.}}",
            rf"\label{{tab:{table.paper_table.name.replace('_', '-')}{f'-{number}' if number > 1 else ''}}}",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{lr{'r' * len(table.methods)}}}",
            r"\toprule",
            " & ".join(["Dataset", "$n$", *(tex(method) for method in table.methods)]) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            "",
            r"\smallskip",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{ll{'r' * (len(COSTS) - 2)}}}",
            r"\toprule",
            " & ".join(tex(word) for word in COSTS) + r" \\",
            r"\midrule",
            *(" & ".join(tex(word) for word in line) + r" \\" for line in costs(table)),
            r"\bottomrule",
            r"\end{tabular}}",
            "",
            r"\smallskip",
            rf"\parbox{{\textwidth}}{{\footnotesize {under}}}",
            r"\end{table*}",
            "",
        ]
    )


def latex_rows(table: Table, budget: str) -> list[str]:
    lines = []
    for dataset in rows_of(table, budget):
        cells = [table.cells[dataset, method, budget] for method in table.methods]
        n = sample_count(cells)
        # A mark goes around the printed number only, after all signs have been escaped.
        ours = [marked_tex(score(cell, n, starred)) for cell in cells]
        lines.append(" & ".join([tex(dataset), ABSENT if n is None else str(n), *ours]) + r" \\")
        if any(cell.published for cell in cells):
            theirs = [tex(paper(cell, table.is_paper_setting)) for cell in cells]
            small = [rf"{{\scriptsize {word}}}" for word in ("paper", *theirs)]
            lines.append(" & ".join([r"\quad " + small[0], "", *small[1:]]) + r" \\")
    return lines


def marked_tex(text: str) -> str:
    sign, command = ("**", r"\textbf") if "**" in text else ("*", r"\underline")
    before, _, rest = text.partition(sign)
    inside, _, after = rest.partition(sign)
    return tex(before) + (rf"{command}{{{tex(inside)}}}" if inside else "") + tex(after)


# --- CSV ---------------------------------------------------------------------------------------


def as_csv(tables: Iterable[Table]) -> str:
    """A line per cell of all tables, unrounded."""
    out = io.StringIO()
    writer = CsvWriter(out, lineterminator="\n")
    where = ("model", "data_source", "comm", "protocol", "seed", "limit", "dtype", "device")
    names = ("dataset", "method", "budget", "score", "low", "high", "n", "n_oom", "published")
    shown = ("difference", "mark", "over", "embedded")
    paired = ("vs_full", "vs_full_low", "vs_full_high", "vs_full_p_holm")
    costs = tuple(field.name for field in fields(Cost))
    measured = ["comm_measured" if name == "comm" else name for name in costs]
    writer.writerow([*where, "asked", *names, *shown, *paired, *measured, "run"])
    for table in tables:
        for cell in table.cells.values():
            full = cell.vs_full
            writer.writerow(
                [
                    *(getattr(table.where, name) for name in where),
                    table.prompts,
                    *(plain(getattr(cell, name)) for name in (*names, *shown)),
                    *(plain(v) for v in ((full.mean, full.low, full.high) if full else [None] * 3)),
                    plain(cell.vs_full_p),
                    *(plain(getattr(cell.cost, name)) for name in costs),
                    cell.run,
                ]
            )
    return out.getvalue()


def plain(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
