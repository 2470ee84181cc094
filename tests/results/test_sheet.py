"""One sheet as terminal, Markdown, LaTeX, HTML and CSV print it."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.results.sheet import (
    Sheet,
    Word,
    as_csv,
    html,
    latex,
    markdown,
    plain,
    show,
    tex,
    texts,
    without_shared,
    write,
)

SHEET = Sheet(
    ["method", ("ratio 0.1", "a_b"), ("ratio 0.1", "c|d")],
    [
        *("first", ["Full", "90.0", Word("95.0", more=" ± 1.0 †")]),
        *("second", ["Snap\nKV", Word("8.5", "bold"), Word("9", "tie")]),
    ],
    title="Scores & more", about="tiny <model>", notes=["Bold: best."], label="scores",
)  # fmt: skip


def test_markdown_has_a_table_for_each_block_and_escapes_what_would_end_a_cell() -> None:
    assert markdown(SHEET).splitlines() == [
        "## Scores &amp; more", "", "tiny &lt;model>", "",
        "### first", "", "| method | ratio 0.1 · a_b | ratio 0.1 · c\\|d |", "|---|---:|---:|",
        "| Full | 90.0 | 95.0 ± 1.0 † |", "",
        "### second", "", "| method | ratio 0.1 · a_b | ratio 0.1 · c\\|d |", "|---|---:|---:|",
        "| Snap KV | **8.5** | *9* |", "", "- Bold: best.",
    ]  # fmt: skip


def test_latex_joins_equal_heads_and_marks_numbers_alone() -> None:
    made = latex(SHEET, 2)
    assert r"\caption{Scores \& more. tiny \textless{}model\textgreater{}.}" in made and r"\label{tab:scores-2}" in made
    assert " & \\multicolumn{2}{c}{ratio 0.1} \\\\\n\\cmidrule(lr){2-3}\nmethod & a\\_b & c\\textbar{}d \\\\" in made
    assert r"Snap KV & \textbf{8.5} & \underline{9} \\" in made and r"95.0 $\pm$ 1.0 $^\dagger$ \\" in made
    assert made.count(r"\emph{") == 2 and made.count(r"\midrule") == 2
    wide = replace(SHEET, heads=["m", *"abcdefgh"], rows=[["x", *"12345678"]])
    assert r"\begin{table*}" in latex(wide) and r"\resizebox" in latex(wide) and r"\resizebox" not in made
    assert tex("a\n\nb é") == "a b "


def test_html_joins_equal_heads_and_marks_numbers_and_no_text_of_others_is_more_than_words() -> None:
    lines = html([replace(SHEET, below=replace(SHEET, title="", below=None))]).splitlines()
    assert "<title>Scores &amp; more</title>" in lines[0] and "<p>tiny &lt;model&gt;</p>" in lines
    assert "<tr><th colspan=1></th><th colspan=2>ratio 0.1</th></tr>" in lines
    assert "<tr><th colspan=1>method</th><th colspan=1>a_b</th><th colspan=1>c|d</th></tr>" in lines
    assert "<tr><td>Snap KV</td><td><b>8.5</b></td><td><i>9</i></td></tr>" in lines
    assert "<tr><td>Full</td><td>90.0</td><td>95.0 ± 1.0 †</td></tr>" in lines
    assert lines.count("<table>") == lines.count("</table>") == 2 and "<p><small>Bold: best.</small></p>" in lines
    hostile = "<script>alert('x')</script>\x1b[2J\n\"&"
    made = html([Sheet([hostile, (hostile, hostile)], [hostile, [hostile, Word(hostile, "bold", hostile)]],
                       title=hostile, about=hostile, notes=[hostile])])  # fmt: skip
    assert "<script" not in made and "\x1b" not in made and '"&' not in made
    assert len(re.findall("&lt;script&gt;", made)) == 11


def test_terminal_is_as_wide_as_it_has_to_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    show(replace(SHEET, rows=[["Full", "1,234,567.8", "9" * 30], ["\x1b[2J", "1", Word("2", "bold", " x")]]))
    about, head, full, hostile, note = capsys.readouterr().out.splitlines()
    assert about == "tiny <model>" and note == "Bold: best."
    assert head.split()[:1] == ["method"] and full.endswith("9" * 30) and "1,234,567.8" in full
    assert hostile.startswith("\\x1b[2J") and hostile.endswith("2 x")


def test_csv_has_every_name_once_and_no_formula() -> None:
    lines = list(csv.reader(as_csv([{"a": 1.5, "b": None}, {"b": True, "c": [1, 2]}, {"a": "=x"}]).splitlines()))
    assert lines == [["a", "b", "c"], ["1.5", "", ""], ["", "true", "1 2"], ["'=x", "", ""]]
    assert plain(False) == "false"


def test_all_formats_are_written(tmp_path: Path) -> None:
    paths = write(tmp_path / "new", "table", texts([SHEET, SHEET], [{"a": 1}]))
    assert [path.name for path in paths] == ["table.md", "table.tex", "table.html", "table.csv"]
    assert (tmp_path / "new" / "table.tex").read_text().count(r"\label{tab:scores") == 2


def test_what_all_rows_share_leaves_the_table() -> None:
    sheet = Sheet(
        ["m", "n", "comm", "over"], [["a", "5", "any", "!1"], ["b", "5", "1/64", "!1"], ["c", "5", "1/64", "!1"]]
    )
    left, shared = without_shared(sheet, {"n": "n = {}", "comm": "comm {}", "over": "{}"}, ["any"])
    assert (left.heads, shared) == (["m", "over"], ["n = 5", "comm 1/64"]), "a warning stays"
    assert left.rows == [["a", "!1"], ["b", "!1"], ["c", "!1"]]
