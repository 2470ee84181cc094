"""A table in words, and how terminal, Markdown, LaTeX, HTML and CSV print it.

    **bold**   best of its column, or a difference that the corrected test shows
    *italic*   a tie with the best: not shown to be worse (underlined in LaTeX)

Rich sets the terminal's tables, the others are set here: pandas escapes neither a cell's `|` nor the signs that
pdflatex lacks, and takes 0.4 s to import, which a page has paid already and the end of a run has not. LaTeX needs the
packages booktabs and graphicx, and nothing else: \\input the file where the table should stand.

Not here: what a table says (`evals/screen/table.py`, `plots/tables/`), the report's tables, which a reader filters and
sorts (`plots/site/js/`).
"""

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, cast

from rich.measure import Measurement
from rich.table import Table

from kvbench.engine import terminal
from kvbench.engine.foreign import CsvWriter
from kvbench.engine.terminal import printable

ABSENT = "-"
GAP = 2  # columns of a terminal between those of a table
FOLDED = 30  # letters of a word that may stand on several lines of a narrow terminal
WIDEST = 7  # columns of a LaTeX table before it is scaled to the width of the text
SIGNS = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "·": r"$\cdot$", "±": r"$\pm$", "†": r"$^\dagger$", "‡": r"$^\ddagger$", "…": r"\dots{}", "Δ": r"$\Delta$",
        "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    }
)  # fmt: skip
STARS = {"bold": "**", "tie": "*", "code": "`"}
ELEMENTS = {"bold": "b", "tie": "i", "small": "small", "code": "code"}
STYLE = "body{font:14px sans-serif}table{border-collapse:collapse}td,th{padding:.2em .6em}td+td{text-align:right}"
COMMANDS = {"bold": r"\textbf{%s}", "tie": r"\underline{%s}", "small": r"{\scriptsize %s}"}


@dataclass(frozen=True)
class Word:
    """A cell whose number is marked: "bold", "tie", "small" or "code"; `more` stands after it."""

    number: str
    mark: str = ""
    more: str = ""

    def __str__(self) -> str:
        return self.number + self.more


Cell = str | Word
Head = str | tuple[str, ...]  # a newline breaks the line on a terminal; several levels share equal neighbours' words


@dataclass(frozen=True)
class Sheet:
    """One table."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[Cell] | str]  # a text is the title of the rows below it
    n_keys: int = 1  # columns of words, at the left; the others are numbers
    n_wrapped: int = 1  # of them, those whose words may stand on several lines of a narrow terminal
    title: str = ""
    about: str = ""  # what all rows share
    notes: Sequence[str] = ()  # sentences below it
    label: str = ""  # what `\ref` calls it
    below: "Sheet | None" = None  # a second table of the same thing

    def blocks(self) -> Iterable[tuple[str, list[Sequence[Cell]]]]:
        """The rows below each title; "" without one."""
        title = ""
        for is_title, group in groupby(self.rows, lambda row: isinstance(row, str)):
            if is_title:
                *_, title = map(str, group)
            else:
                yield title, [row for row in group if not isinstance(row, str)]

    @property
    def levels(self) -> int:
        return max(len(head) if isinstance(head, tuple) else 1 for head in self.heads)


# --- terminal ----------------------------------------------------------------------------------


def on_terminal(sheet: Sheet, title: str | None = None) -> Table:
    """Columns as wide as their longest word, heads standing on their last line."""
    lines = [joined(head).split("\n") for head in sheet.heads]
    rows = [[str(cell) for cell in row] for _, block in sheet.blocks() for row in block]
    view = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), title=title, title_justify="left")
    for i, head in enumerate(lines):
        above = "\n" * (max(map(len, lines)) - len(head))
        widest = max(map(len, [*head, *(row[i] for row in rows)]))
        justify = "left" if i < sheet.n_keys else "right"
        wraps, words = i < sheet.n_wrapped, " ".join([*head, *(row[i] for row in rows)]).split()
        least = min(FOLDED, max(map(len, words), default=0)) if wraps else widest
        text = above + "\n".join(head)
        view.add_column(text, justify=justify, no_wrap=not wraps, min_width=least, overflow="fold")
    for row in rows:
        view.add_row(*map(printable, row))
    return view


def show(sheet: Sheet, fits: bool = False) -> None:
    """Print to standard output, what all rows share above and the notes below; numbers are never cut.

    One that `fits` is no wider than the terminal where the columns that may wrap allow it.
    """
    console, view = terminal.console(highlight=False), on_terminal(sheet)
    if fits:
        needed = sum((column.min_width or 0) + GAP for column in view.columns) - GAP
    else:
        needed = Measurement.get(console, console.options.update(max_width=10_000), view).maximum
    console.width = max(console.width, needed)
    if sheet.about:
        console.print(sheet.about, soft_wrap=True, markup=False)
    console.print(view, markup=False)
    for line in sheet.notes:
        console.print(line, soft_wrap=True, markup=False)


# --- Markdown ----------------------------------------------------------------------------------


def markdown(sheet: Sheet) -> str:
    """A section with the sheet's title; the table alone where it has none."""
    parts = [f"## {plain_markdown(sheet.title)}"] if sheet.title else []
    parts += [plain_markdown(sheet.about)] if sheet.about else []
    for title, rows in sheet.blocks():
        parts += [f"### {plain_markdown(title)}"] if title else []
        parts.append("\n".join(pipes(sheet.heads, rows, sheet.n_keys)))
    parts += ["\n".join(f"- {plain_markdown(note)}" for note in sheet.notes)] if sheet.notes else []
    parts += [markdown(sheet.below).rstrip("\n")] if sheet.below else []
    return "\n\n".join(parts) + "\n" * bool(sheet.title)


def pipes(heads: Sequence[Head], rows: Iterable[Sequence[Cell]], n_keys: int = 1) -> list[str]:
    def line(words: Iterable[str]) -> str:
        return "| " + " | ".join(words) + " |"

    align = "|" + "|".join(["---"] * n_keys + ["---:"] * (len(heads) - n_keys)) + "|"
    names = (plain_markdown(joined(head)) for head in heads)
    return [line(names), align, *(line(map(starred, row)) for row in rows)]


def starred(cell: Cell) -> str:
    if isinstance(cell, str):
        return plain_markdown(cell)
    star = STARS.get(cell.mark, "")
    return star + plain_markdown(cell.number) + star + plain_markdown(cell.more, keep=True)


def plain_markdown(text: str, keep: bool = False) -> str:
    """A text that can stand anywhere on a page: it ends no cell, opens no element and no link, and hides nothing."""
    blank = " " if keep and text.startswith(" ") else ""
    words = printable(" ".join(text.split())).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    return blank + words.replace("|", "\\|").replace("[", "\\[").replace("`", "\\`")


def joined(head: Head) -> str:
    return head if isinstance(head, str) else " · ".join(head)


# --- LaTeX -------------------------------------------------------------------------------------


def latex(sheet: Sheet, number: int = 1, caption: str | None = None) -> str:
    """A floating table; `number` keeps the labels of one document apart."""
    tables = list(chain.from_iterable((tabular(each), "", r"\smallskip") for each in (sheet, sheet.below) if each))
    scaled = any(len(each.heads) > WIDEST for each in (sheet, sheet.below) if each)
    place = "table*" if scaled else "table"  # as wide as the page, where a page has two columns
    said = caption or ". ".join(filter(None, (sheet.title, sheet.about))) + "."
    under = " ".join(tex(note.rstrip(".") + ".") for note in sheet.notes)
    return "\n".join(
        [
            "% needs the packages booktabs and graphicx",
            rf"\begin{{{place}}}[t]",
            r"\centering\small",
            rf"\caption{{{tex(said)}}}",
            rf"\label{{tab:{sheet.label}{f'-{number}' if number > 1 else ''}}}",
            *(tables if under else tables[:-2]),
            *([rf"\parbox{{\linewidth}}{{\footnotesize {under}}}"] if under else []),
            rf"\end{{{place}}}",
            "",
        ]
    )


def tabular(sheet: Sheet) -> str:
    n = len(sheet.heads)
    body: list[str] = []
    for title, rows in sheet.blocks():
        body += [r"\midrule"] if body else []
        body += [rf"\multicolumn{{{n}}}{{l}}{{\emph{{{tex(title)}}}}} \\"] if title else []
        body += [" & ".join(map(marked_tex, row)) + r" \\" for row in rows]
    scaled = n > WIDEST
    return "\n".join(
        [
            *([r"\resizebox{\textwidth}{!}{%"] if scaled else []),
            rf"\begin{{tabular}}{{{'l' * sheet.n_keys}{'r' * (n - sheet.n_keys)}}}",
            r"\toprule",
            *latex_head(sheet),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}" + ("}" if scaled else ""),
        ]
    )


def latex_head(sheet: Sheet) -> list[str]:
    """A line per level; equal neighbours share one word, and keys stand on the last line."""
    lines: list[str] = []
    for cells in head_lines(sheet):
        words = [tex(word) if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{tex(word)}}}" for word, width in cells]
        ends = [*accumulate(width for _, width in cells)]
        rules = [rf"\cmidrule(lr){{{end - n + 1}-{end}}}" for (_, n), end in zip(cells, ends, strict=True) if n > 1]
        lines += [" & ".join(words) + r" \\", *([" ".join(rules)] if rules else [])]
    return lines


def head_lines(sheet: Sheet) -> Iterable[list[tuple[str, int]]]:
    """The words of each level of the head, and over how many columns each stands."""
    keys = sheet.heads[: sheet.n_keys]
    columns = [head if isinstance(head, tuple) else (head,) for head in sheet.heads[sheet.n_keys :]]
    for level in range(sheet.levels):
        groups = groupby(column[: level + 1] for column in columns)
        words = [(joined(key) if level == sheet.levels - 1 else "", 1) for key in keys]
        yield words + [(words[-1], len(list(group))) for words, group in groups]


def marked_tex(cell: Cell) -> str:
    """A mark goes around the number only."""
    if isinstance(cell, str):
        return tex(cell)
    blank = " " if cell.more.startswith(" ") else ""
    return COMMANDS.get(cell.mark, "%s").replace("%s", tex(cell.number)) + blank + tex(cell.more)


def tex(text: str) -> str:
    """Any text as LaTeX prints it; signs that pdflatex's fonts lack are left out."""
    words = " ".join(text.split()).translate(SIGNS)  # an empty line would end the paragraph
    return words.encode("ascii", "ignore").decode()


# --- HTML --------------------------------------------------------------------------------------


def html(sheets: Sequence[Sheet]) -> str:
    """A page of its own: it loads nothing, and no text of others is more than words."""
    title = in_html(sheets[0].title) if sheets else ""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"]
    return "\n".join([*parts, *(line for sheet in sheets for line in html_lines(sheet)), "</html>", ""])


def html_lines(sheet: Sheet) -> Iterable[str]:
    yield from (f"<{tag}>{in_html(text)}</{tag}>" for tag, text in (("h2", sheet.title), ("p", sheet.about)) if text)
    yield "<table>"
    for cells in head_lines(sheet):
        yield f"<tr>{''.join(f'<th colspan={width}>{in_html(word)}</th>' for word, width in cells)}</tr>"
    for title, rows in sheet.blocks():
        if title:
            yield f"<tr><th colspan={len(sheet.heads)}>{in_html(title)}</th></tr>"
        for row in rows:
            yield f"<tr>{''.join(f'<td>{marked_html(cell)}</td>' for cell in row)}</tr>"
    yield "</table>"
    yield from (f"<p><small>{in_html(note)}</small></p>" for note in sheet.notes)
    yield from html_lines(sheet.below) if sheet.below else ()


def marked_html(cell: Cell) -> str:
    if isinstance(cell, str) or cell.mark not in ELEMENTS:
        return in_html(str(cell))
    tag = ELEMENTS[cell.mark]
    return f"<{tag}>{in_html(cell.number)}</{tag}>{in_html(cell.more)}"


def in_html(text: str) -> str:
    return escape(printable(" ".join(text.split())) if not text.startswith(" ") else f" {printable(text.strip())}")


# --- CSV, and files ----------------------------------------------------------------------------


def as_csv(records: Iterable[Mapping[str, Any]]) -> str:
    """A line for each record, unrounded, under all names that any of them has."""
    lines, out = list(records), io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line))
    writer = CsvWriter(out, lineterminator="\n")
    writer.writerow(names)
    for line in lines:
        writer.writerow([plain(line.get(name)) for name in names])
    return out.getvalue()


def plain(value: object) -> str:
    """Quartiles as two numbers in one cell."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(map(str, cast(list[object], value)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def write(folder: Path, name: str, texts: Mapping[str, str]) -> list[Path]:
    """A file for each format, by its suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8", errors="replace")  # a folder's name may be no UTF-8
    return paths


def texts(sheets: Sequence[Sheet], records: Iterable[Mapping[str, Any]], caption: str | None = None) -> dict[str, str]:
    """All formats of some sheets, by suffix; `caption` is for LaTeX, in place of their own."""
    return {
        "md": "\n".join(map(markdown, sheets)),
        "tex": "\n".join(latex(sheet, number, caption) for number, sheet in enumerate(sheets, 1)),
        "html": html(sheets),
        "csv": as_csv(records),
    }


def without_shared(sheet: Sheet, sayings: Mapping[str, str], nothing: Collection[str] = ()) -> tuple[Sheet, list[str]]:
    """The sheet without those columns of `sayings` whose cells all agree, and what these say, in words.

    A saying has {} where the cell stands. Cells of `nothing` agree with all others.
    """
    keep, shared = list[int](), list[str]()
    for i, head in enumerate(map(joined, sheet.heads)):
        said = {str(row[i]) for row in sheet.rows}
        values = said - {*nothing} or said
        if head not in sayings or len(values) > 1 or any(value.startswith("!") for value in values):
            keep.append(i)
        elif (value := values.pop()) not in (ABSENT, *nothing):
            shared.append(sayings[head].format(value))
    rows = [[row[i] for i in keep] for row in sheet.rows]
    return replace(sheet, heads=[sheet.heads[i] for i in keep], rows=rows), shared
