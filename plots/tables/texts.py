"""A sheet of `plots/tables/generic.py` as Markdown, LaTeX (booktabs, caption, label) and CSV.

    **bold**   best of its column; of differences, one that the corrected test shows
    *italic*   as good as the best, as far as the samples tell (underlined in LaTeX)
    †          a sample's ledger was over its budget; such a run is not ranked
    (k oom)    so many samples ran out of memory, or failed; the score is of the others

LaTeX needs the packages booktabs and graphicx. CSV has a line per cell with everything that is known of it, unrounded.

Not here: what a cell says (`plots/tables/generic.py`).
"""

import io
import re
from collections.abc import Callable, Sequence

from engine.foreign import CsvWriter
from plots.tables.formats import ABSENT, pipes, plain, plain_markdown, tex
from plots.tables.generic import ANY, FULL, Cell, Sheet
from plots.tables.values import VALUES, value_named

WIDEST = 7  # columns of a LaTeX table before it is scaled to the width of the text


def title(sheet: Sheet) -> str:
    value = value_named(sheet.value)
    unit = " (percent)" if sheet.percent else f" ({value.unit})" if value.unit else ""
    less = "" if sheet.against is None else f" less {sheet.against}'s"
    return f"{value.title}{less}{unit} by {' and '.join(sheet.row_keys)}"


def where(sheet: Sheet) -> str:
    """What all runs of the sheet share."""
    words = {key: word for key, word in sheet.where.items() if word not in ("exact", "")}
    data = words.pop("data", "")
    plainly = ("task", "model", "device", "dtype", "scope", "budget", "prompts")
    parts = [word if key in plainly else f"{key} {word}" for key, word in words.items() if key != "ratio"]
    source = ["EMBEDDED DATA"] if data == "embedded" else [f"{data} data"] if data else []
    return " · ".join([*source, *parts])


def words(cell: Cell | None, sheet: Sheet, strong: Callable[[str, str], str]) -> str:
    """What a cell prints; `strong` marks the number."""
    if cell is None or cell.mean is None:
        return f"{ABSENT} ({cell.n_oom} oom)" if cell is not None and cell.n_oom else ABSENT
    scale, digits = (100.0, 1) if sheet.percent else (1.0, value_named(sheet.value).digits)
    if not sheet.percent and sheet.value == "score":
        digits = 3
    signed = "" if sheet.against is None else "+"

    def number(value: float) -> str:
        return f"{scale * value:{signed},.{digits}f}"

    text = strong(number(cell.mean), cell.mark)
    if cell.low is not None and cell.high is not None:
        text += f" ({number(cell.low)} to {number(cell.high)})"
    text += " †" if cell.over else ""
    text += f" n={cell.n}" if cell.n != sheet.n else ""
    return text + (f" ({cell.n_oom} oom)" if cell.n_oom else "")


def explanation(sheet: Sheet) -> list[str]:
    """The sentences below a table."""
    cells = sheet.cells.values()
    sentences = []
    if sheet.value == "score" or sheet.against is not None:
        n = sheet.n
        spread = "in brackets the 95 % interval" if any(cell.low is not None for cell in cells) else ""
        count = f"{n} sample{'s' if n != 1 else ''} a cell" if n is not None else "n is the number of samples"
        none = "no interval of one sample" if any(cell.n == 1 for cell in cells) else ""
        sentences.append("; ".join(part for part in (count, spread, none) if part) + ".")
    if sheet.value == "score" and sheet.against is None and any(cell.mark for cell in cells):
        sentences.append(
            "Bold: best of its column. Italic (underlined in LaTeX): not shown to be worse than the best, paired test "
            "with Holm's correction. Full and Oracle are not ranked: nothing bounds what they read."
        )
    if sheet.against is not None:
        sentences.append(
            f"Paired with {sheet.against} on the same prompts; bold where the test shows it, corrected for all cells "
            "that were asked these."
        )
    if any(cell.over for cell in cells):
        sentences.append("† A sample's ledger was over its budget; such runs are not ranked.")
    return [*sentences, *sheet.notes]


def header(sheet: Sheet) -> list[str]:
    return [*sheet.row_keys, *(" · ".join(column) for column in sheet.columns)]


# Markdown.


def markdown(sheet: Sheet) -> str:
    def strong(text: str, mark: str) -> str:
        return {"bold": f"**{text}**", "tie": f"*{text}*"}.get(mark, text)

    lines = [
        [*row, *(words(sheet.cells.get((row, column)), sheet, strong) for column in sheet.columns)]
        for row in sheet.rows
    ]
    across = f", columns {' · '.join(sheet.column_keys)}"
    head = [f"## {plain_markdown(title(sheet) + across)}", "", plain_markdown(where(sheet)), ""]
    below = [f"- {plain_markdown(line)}" for line in [*explanation(sheet), *sheet.left_out]]
    return "\n".join([*head, *pipes(header(sheet), lines), "", *below, ""])


# LaTeX.


def label(sheet: Sheet, number: int) -> str:
    """What `\\ref` calls the table."""
    less = [] if sheet.against is None else ["less", sheet.against]
    parts = [
        sheet.value,
        *less,
        *(sheet.where.get(key, "") for key in ("task", "model")),
        *sheet.row_keys,
        *sheet.column_keys,
    ]
    slug = re.sub("[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")
    return f"tab:{slug}" + (f"-{number}" if number > 1 else "")


def latex(sheet: Sheet, number: int = 1, caption: str | None = None) -> str:
    """A floating table; `number` keeps labels apart in one document."""

    def strong(text: str, mark: str) -> str:
        return {"bold": f"\x01{text}\x02", "tie": f"\x03{text}\x02"}.get(mark, text)

    def marked(text: str) -> str:
        pieces = re.split("(\x01|\x02|\x03)", text)
        signs = {"\x01": r"\textbf{", "\x02": "}", "\x03": r"\underline{"}
        return "".join(signs.get(piece) or tex_keeping_ends(piece) for piece in pieces)

    n_keys, n_columns = len(sheet.row_keys), len(sheet.columns)
    body = [
        " & ".join(
            [
                *(tex(word) for word in row),
                *(marked(words(sheet.cells.get((row, c)), sheet, strong)) for c in sheet.columns),
            ]
        )
        + r" \\"
        for row in sheet.rows
    ]
    said = caption or f"{title(sheet).capitalize()}. {where(sheet)}. {' '.join(explanation(sheet))}"
    scaled = n_keys + n_columns > WIDEST
    place = "table*" if scaled else "table"  # as wide as the page, where a page has two columns
    return "\n".join(
        [
            "% needs the packages booktabs and graphicx",
            rf"\begin{{{place}}}[t]",
            r"\centering\small",
            rf"\caption{{{tex(said)}}}",
            rf"\label{{{label(sheet, number)}}}",
            *([r"\resizebox{\textwidth}{!}{%"] if scaled else []),
            rf"\begin{{tabular}}{{{'l' * n_keys}{'r' * n_columns}}}",
            r"\toprule",
            *latex_head(sheet),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}" + ("}" if scaled else ""),
            rf"\end{{{place}}}",
            "",
        ]
    )


def latex_head(sheet: Sheet) -> list[str]:
    """A line per key of the columns; equal neighbours share one word."""
    lines = []
    for level in range(len(sheet.column_keys)):
        names = [column[level] for column in sheet.columns]
        cells: list[str] = []
        rules: list[str] = []
        start = 0
        first = len(sheet.row_keys)
        for i in range(1, len(names) + 1):
            if i == len(names) or sheet.columns[i][: level + 1] != sheet.columns[start][: level + 1]:
                width = i - start
                cells.append(
                    tex(names[start]) if width == 1 else rf"\multicolumn{{{width}}}{{c}}{{{tex(names[start])}}}"
                )
                if width > 1:
                    rules.append(rf"\cmidrule(lr){{{first + start + 1}-{first + i}}}")
                start = i
        is_last = level == len(sheet.column_keys) - 1
        left = [tex(key) if is_last else "" for key in sheet.row_keys]
        lines.append(" & ".join([*left, *cells]) + r" \\")
        lines += [" ".join(rules)] if rules else []
    return lines


def tex_keeping_ends(text: str) -> str:
    """As `tex`, with a blank at either end kept."""
    if not text.strip():
        return text
    return " " * text.startswith(" ") + tex(text) + " " * text.endswith(" ")


# CSV.


def as_csv(sheets: Sequence[Sheet]) -> str:
    """A line per cell of all sheets, unrounded. Each column has a name of its own."""
    keys = list(dict.fromkeys(key for sheet in sheets for key in (*sheet.row_keys, *sheet.column_keys, *sheet.where)))
    measures = [name for name, value in VALUES.items() if name != "score"]
    out = io.StringIO()
    writer = CsvWriter(out, lineterminator="\n")
    whom = {sheet.against or FULL for sheet in sheets}
    compared = (
        f"difference_to_{re.sub('[^a-z0-9]+', '_', whom.pop().lower()).strip('_') if len(whom) == 1 else 'other'}"
    )
    full = (compared, "difference_low", "difference_high", "p_holm")
    names = ("table", "value", "low", "high", "n", "n_oom", "mark", "over_budget")
    units = [f"{name}_{VALUES[name].unit.lower()}" if VALUES[name].unit not in ("", "s") else name for name in measures]
    writer.writerow([*keys, *names, *full, *units, "run"])
    for number, sheet in enumerate(sheets, 1):
        for (row, column), cell in sheet.cells.items():
            axes = dict(zip((*sheet.row_keys, *sheet.column_keys), (*row, *column), strict=True))
            said = {**cell.part.of, **axes}
            against: list[float | None] = [None] * len(full)
            if cell.against is not None:
                spread = cell.against.paired.difference
                bounds = (None, None) if spread is None else (spread.low, spread.high)
                against = [cell.against.paired.mean, *bounds, cell.against.p]
            found = [VALUES[name].of(cell.part.rows) for name in measures]
            writer.writerow(
                [
                    *("all" if said.get(key) == ANY else said.get(key, "") for key in keys),
                    number, plain(cell.mean), plain(cell.low), plain(cell.high), cell.n, cell.n_oom, cell.mark,
                    plain(cell.over), *map(plain, against), *map(plain, found), cell.part.run.folder.name,
                ]
            )  # fmt: skip
    return out.getvalue()
