import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from kvbench.plots import style
from kvbench.plots.figures.chart import Chart, Scale
from kvbench.plots.figures.chart import draw as draw_chart
from kvbench.plots.figures.command import PHONE_TEXT, WIDTHS, draw, main
from kvbench.plots.figures.declared import BY_NAME, FIGURES
from kvbench.plots.figures.rows import AXES, Data, as_lines, points
from kvbench.plots.read import load
from kvbench.plots.run_sets import FRONT_SAID
from kvbench.plots.style import Canvas, Picture
from kvbench.results.intervals import FEW
from kvbench.tests.plots.made_runs import answers, every_kind, timing, write

PARETO = BY_NAME["pareto"]
CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    every_kind(root)
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> Data:
    return Data(load(root))


def drawn(name: str, root: Path, canvas: Canvas | None = None) -> list[Picture]:
    """The pictures that runs in a folder make of a figure."""
    return BY_NAME[name].draw(Data(load(root)), canvas or Canvas())


@pytest.mark.parametrize("drawing", FIGURES, ids=lambda drawing: drawing.name)
def test_every_figure_is_drawn_and_is_the_same_file_when_drawn_again(drawing, runs: Data, tmp_path: Path) -> None:
    first = draw(drawing, runs, tmp_path / "a", Canvas(), ["svg"])
    again = draw(drawing, Data(runs.runs[::-1]), tmp_path / "b", Canvas(), ["svg"])
    assert first and first == again
    for name in (name for entry in first.values() for name in entry["files"]):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("drawing", FIGURES, ids=lambda drawing: drawing.name)
@pytest.mark.parametrize(
    "width", [pytest.param(WIDTHS[name], id=name, marks=pytest.mark.slow if name == "text" else ()) for name in WIDTHS]
)
def test_text_can_be_read_at_the_width_of_the_page(drawing, width: float, runs: Data) -> None:
    """Captions of 5.5 points stood in the figures; formulas stood in ticks as they are written."""
    canvas = Canvas(width, titled=False, text=PHONE_TEXT if width == style.PHONE else 1)
    with matplotlib.rc_context(canvas.rc):
        for picture in drawing.draw(runs, canvas):
            picture.figure.draw_without_rendering()
            assert picture.figure.get_figwidth() == width and picture.figure.get_suptitle() == ""
            texts = [
                text for text in picture.figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip()
            ]
            assert texts and all(7 <= float(text.get_fontsize()) / canvas.text <= 9 for text in texts)
            assert not [text for text in texts if "$" in text.get_text()]
            for ax in picture.figure.axes:
                assert ax.get_position().width * width > 0.05, "panels have room"
            drawn = picture.figure.get_tightbbox()
            assert drawn.x0 > -0.1 and drawn.x1 < width + 0.1, "nothing is cut off"


def test_a_file_does_not_say_when_it_was_made(runs: Data, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        draw(BY_NAME["xkv_retention"], runs, tmp_path / folder, Canvas(), [*style.FORMATS])
    found, again = ({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("a", "b"))
    assert found == again and {path.suffix[1:] for path in (tmp_path / "a").iterdir()} >= {*style.FORMATS}


def test_without_runs_the_commands_are_named_and_exist(tmp_path: Path, capsys) -> None:
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    for drawing in FIGURES:
        for name in drawing.experiments:
            assert f"experiment={name}" in said
            assert (CONF / "experiment" / f"{name}.yaml").is_file()
    assert not list((tmp_path / "out").glob("*.*"))


def test_a_figure_of_earlier_groups_is_removed(runs: Data, tmp_path: Path) -> None:
    drawing = BY_NAME["score_vs_ratio"]
    stale, other = tmp_path / "score_vs_ratio_99.pdf", tmp_path / "score_vs_ratio_notes.pdf"
    stale.touch()
    other.touch()
    draw(drawing, runs, tmp_path, Canvas(), ["pdf"])
    assert other.exists() and not stale.exists()


def test_lines_hold_the_runs_own_scores_and_models_are_apart(tmp_path: Path) -> None:
    scores = {}
    for ratio in ("1/10", "1/5"):
        rows = answers(["a"], 0.3)
        _, result = write(tmp_path, "h2o", "longbench", rows, ratio=ratio)
        assert result.score is not None
        scores[result.ratio] = 100 * result.score
    write(tmp_path, "h2o", "longbench", answers(["a"], 0.9), ratio="2/5", model="other")
    found = Data(load(tmp_path)).parts("scored")
    assert [part.run_set.where.model for part in found] == ["tiny", "other"]
    rows = as_lines(found[0], points(found[0], AXES["device"], "dataset"), lambda run: "")
    assert {found[0].runs[row["run"]].result.ratio: row["y"] for row in rows} == scores
    assert len({row["line"] for row in rows}) == 1 and all(row["low"] <= row["y"] <= row["high"] for row in rows)


# --- what is said, and what is not --------------------------------------------------------------


def hits(*scores: float, **ledger: Any) -> list[dict[str, Any]]:
    return [{"score": score, "fields": {"length": 500, "depth": 50.0}, "ledger": ledger} for score in scores]


def needles(root: Path, method: str, *ratios: str, device: float, params: dict[str, Any] | None = None, **ledger: Any):
    for i, ratio in enumerate(ratios):
        kept = {"bytes_resident_device": device * (i + 1), "tokens_attended_mean": device * (i + 1) / 1e4}
        rows = hits(1, 0, 1, i, **(kept | ledger))
        write(root, method, "needle", rows, ratio=ratio, params=params)


def shown(picture: Picture) -> list[str]:
    """The legend's entries."""
    (legend,) = picture.figure.legends
    return [text.get_text() for text in legend.get_texts()]


def line_of(picture: Picture, label: str) -> Any:
    return next(line for line in picture.axes.lines if line.get_label() == label)


def test_costs_are_measured_and_choosable(tmp_path: Path) -> None:
    needles(tmp_path, "quest", "1/10", "1/5", device=2e6, bytes_moved_kv_per_step=3e6, bytes_searched_per_step=1e6)
    needles(tmp_path, "snapkv", "1/10", "1/5", device=1e6)
    for axis, xs in {"device": [2.0, 4.0], "attended": [200.0, 400.0], "moved": [4.0002, 4.0002]}.items():
        (picture,) = drawn("pareto", tmp_path, Canvas(axis=axis))
        line = line_of(picture, "Quest")
        assert line.get_xdata() == pytest.approx(xs) and list(line.get_ydata()) == [50.0, 75.0], "both budgets"
    (picture,) = drawn("score_vs_ratio", tmp_path)
    (ax,) = picture.figure.axes
    assert next(line for line in ax.lines if line.get_label() == "Quest").get_xdata() == pytest.approx([200, 400])


def rising(root: Path, method: str, levels: dict[str, float], n: int = FEW, device: float = 1e6) -> None:
    """Runs whose cost rises with the ratio, and whose score is a level for all samples but a few."""
    for i, (ratio, level) in enumerate(levels.items(), 1):
        kept = {"bytes_resident_device": device * i, "bytes_searched_per_step": 0.0}
        write(root, method, "needle", hits(*[level + 0.01 * (k % 3) for k in range(n)], **kept), ratio=ratio)


def test_the_oracle_is_a_reference_and_in_no_front(tmp_path: Path) -> None:
    """It had the front for itself: what its search reads is not on the axis of device bytes."""
    for ratio in ("1/10", "1/5"):
        kept = {"bytes_resident_device": 1e5, "bytes_searched_per_step": 1e6}
        write(tmp_path, "oracle", "needle", hits(*[0.9] * 12, **kept), ratio=ratio)
    rising(tmp_path, "snapkv", {"1/10": 0.2, "1/5": 0.6})
    rising(tmp_path, "quest", {"1/10": 0.5}, device=3e6)
    (picture,) = drawn("pareto", tmp_path)
    assert {"Oracle: reference", "front"} <= set(shown(picture)) and FRONT_SAID in picture.said
    assert any("no bound" in note and "reading of all keys" in note for note in picture.notes)
    assert list(line_of(picture, "front").get_xdata()) == [1.0, 2.0]
    (picture,) = drawn("pareto", tmp_path, Canvas(axis="moved"))
    assert not any("reading of all keys" in note for note in picture.notes), "there it is on the axis"


def test_so_few_samples_have_no_front(tmp_path: Path) -> None:
    rising(tmp_path, "snapkv", {"1/10": 0.1, "1/5": 0.9}, n=1)
    rising(tmp_path, "quest", {"1/10": 0.5}, n=1, device=3e6)
    (picture,) = drawn("pareto", tmp_path)
    assert "front" not in shown(picture) and FRONT_SAID not in picture.said
    segments = [each for c in picture.axes.collections for each in c.get_segments()]
    assert not [each for each in segments if len(each) and not np.isnan(each).any()], "one sample has no bar"
    assert "one sample is too few to compare" in picture.notes


def test_what_is_outside_its_budget_is_open_and_a_note_says_why(tmp_path: Path) -> None:
    needles(tmp_path, "clusterkv", "1/10", "1/5", device=2e6, params={"full_layers": 2})
    needles(tmp_path, "h2o", "1/10", "1/5", device=1e6, within_budget=False)
    needles(tmp_path, "snapkv", "1/10", "1/5", device=1.5e6)
    (picture,) = drawn("pareto", tmp_path)
    assert "Open: first 2 layers left whole, outside the budget (ClusterKV)" in picture.notes
    assert "Open: over its budget (H2O (C))" in picture.notes
    assert all(note in picture.caption for note in picture.notes)
    hollow = [line for line in picture.axes.lines if line.get_markerfacecolor() == "none"]
    assert sorted(tuple(line.get_xdata()) for line in hollow) == [(1.0, 2.0), (2.0, 4.0)]


def test_scores_have_intervals_and_few_samples_are_called_few(tmp_path: Path) -> None:
    needles(tmp_path, "snapkv", "1/10", "1/5", device=1e6)
    needles(tmp_path, "quest", "1/10", "1/5", device=3e6)
    (picture,) = drawn("pareto", tmp_path)
    assert "4 samples are too few to compare" in picture.notes
    (first, *_) = [c for c in picture.axes.collections if len(c.get_segments()) == 2]
    (low, high) = sorted(y for _, y in first.get_segments()[0])
    assert (low, high) == pytest.approx((6.8, 93.2), abs=0.1), "Clopper and Pearson's, of two hits of four"


def test_maps_stand_from_small_to_large_budgets_and_say_their_mean_and_true_lengths(tmp_path: Path) -> None:
    """They stood in the order 0.2, 0.5, 0.1, called 337 tokens 500, and mixed 100 with 0 to 1."""
    for ratio in ("0.2", "0.5", "0.1"):
        for method in ("snapkv", "quest"):
            rows = [row | {"prompt_tokens": 337} for row in hits(1, 0)]
            write(tmp_path, method, "needle", rows, ratio=ratio, comm="1/8")
    made = drawn("needle_heatmaps", tmp_path)
    assert [picture.title for picture in made] == [
        f"A needle by length and depth, ratio {ratio}, comm 1/8" for ratio in ("0.1", "0.2", "0.5")
    ]
    *maps, bar = made[0].figure.axes
    assert [ax.get_title() for ax in maps] == ["Quest: 50", "SnapKV (C): 50"]
    assert [label.get_text() for label in maps[0].get_xticklabels()] == ["337"]
    assert bar.get_ylabel() == "score, 0 to 100" and bar.get_ylim() == (0, 100)


def test_recall_is_drawn_over_what_was_attended_to(tmp_path: Path) -> None:
    for method, attended in (("oracle", 129.0), ("quest", 190.0)):
        for budget in (128, 256):
            rows = [{"score": 0.5, "fields": {"metric": "recall"}, "ledger": {"tokens_attended_mean": attended}}] * 2
            rows = [row | {"ledger": {"tokens_attended_mean": attended + budget - 128}} for row in rows]
            write(tmp_path, method, "fidelity", rows, budget=budget, metric="recall")
    (picture,) = drawn("recall_vs_budget", tmp_path)
    assert list(line_of(picture, "Quest").get_xdata()) == [190.0, 318.0]


def test_bars_of_answers_have_their_methods_colours(tmp_path: Path) -> None:
    for method in ("snapkv", "quest", "full"):
        fields = {"metric": "tpot_ratio", "length": 4000, "batch": 1, "timing": timing(4000, 1.0)}
        write(tmp_path, method, "latency", [{"score": 1.0, "fields": fields}], metric="tpot_ratio",
              task_params={"n_new": 8})  # fmt: skip
    (picture,) = drawn("answer_time", tmp_path)
    handles, labels = picture.axes.get_legend_handles_labels()
    colours = {label: to_hex(handle[0].get_facecolor()).upper() for handle, label in zip(handles, labels, strict=True)}
    for method, label in (("full", "Full"), ("snapkv", "SnapKV (C) ratio 0.2"), ("quest", "Quest ratio 0.2")):
        assert colours[label] == style.look(method)["color"]


# --- a figure for a paper -----------------------------------------------------------------------


def test_a_paper_gets_its_width_formats_captions_and_a_manifest(root: Path, tmp_path: Path, capsys) -> None:
    words = [
        "--methods",
        "sparq,infllm,full",
        "--width",
        "3.25",
        "--no-title",
        "--format",
        "svg,pdf",
        "--only",
        "pareto",
    ]
    assert main([str(root), "--out", str(tmp_path), *words]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"pareto.svg", "pareto.pdf", "pareto.txt", "manifest.json"}
    svg = (tmp_path / "pareto.svg").read_text()
    assert f'width="{3.25 * 72:g}pt"' in svg
    caption = (tmp_path / "pareto.txt").read_text()
    assert caption.startswith("Score against bytes on the device. EMBEDDED DATA") and "samples a point" in caption
    said = json.loads((tmp_path / "manifest.json").read_text())["figures"]["pareto"]
    assert said["files"] == ["pareto.svg", "pareto.pdf", "pareto.txt"] and said["inches"][0] == 3.25
    assert {run["folder"].split("-")[1] for run in said["runs"]} == {"full", "sparq", "infllm"}
    first = said["runs"][0]
    held = b"".join(
        name.encode() + b"\0" + (root / first["folder"] / name).read_bytes()
        for name in ("result.json", "samples.jsonl")
    )
    assert first["sha256"] == hashlib.sha256(held).hexdigest()
    assert main([str(root), "--out", str(tmp_path), "--only", "mxb_bars", "--format", "svg"]) == 0
    assert set(json.loads((tmp_path / "manifest.json").read_text())["figures"]) == {"pareto", "mxb_bars"}


def test_a_page_gets_figures_for_a_phone_and_a_dark_ground(root: Path, tmp_path: Path) -> None:
    words = ["--width", "phone", "--theme", "dark", "--format", "svg", "--only", "pareto", "mxb_bars"]
    assert main([str(root), "--out", str(tmp_path), *words]) == 0
    for name in ("pareto", "mxb_bars"):
        svg = (tmp_path / f"{name}.svg").read_text().lower()
        assert f'width="{390 * 0.75:g}pt"' in svg, "three quarters of a point a pixel"
        assert "fill: #14171a" in svg and "#e6e9ec" in svg
        assert "#ffffff" not in svg and "#000000" not in svg, "nothing is left of the light page"


def test_a_caption_says_what_is_not_drawn(tmp_path: Path) -> None:
    needles(tmp_path, "quest", "1/10", "1/5", device=2e6)
    needles(tmp_path, "snapkv", "1/10", device=1e6)
    (picture,) = drawn("score_vs_ratio", tmp_path)
    assert "Not drawn: 1 of the runs (SnapKV (C)), too few points for a line" in picture.said
    assert shown(picture) == ["Quest"]


def test_a_table_is_drawn_as_it_says() -> None:
    """Panels, lines of methods and of others, intervals, what is open, levels and bars, from rows alone."""
    chart = Chart("A title", Scale("budget", "cost"), Scale("score"))
    rows = [{"panel": panel, "x": x, "y": 10.0 * x, "low": 9.0 * x, "high": 12.0 * x, "line": "Quest", "look": "quest"}
            for panel in ("a", "b") for x in (1, 8)]  # fmt: skip
    rows += [{"panel": "b", "x": 1, "y": 5, "line": "mine", "nth": 1, "why": "over its budget", "mark": "points"}]
    rows += [{"panel": "a", "y": 50, "line": "Full", "look": "full", "mark": "level"}]
    picture = draw_chart(chart, rows, Canvas(), "all that runs share").finish()
    first, second = picture.axes
    assert (first.get_title(), second.get_title(), first.get_xscale()) == ("a", "b", "log")
    assert shown(picture) == ["Quest", "Full", "mine"] and picture.notes == ["Open: over its budget (mine)"]
    assert [*first.lines[0].get_ydata()] == [10, 80] and first.lines[0].get_color() == style.look("quest")["color"]
    assert picture.caption == "A title. all that runs share. Open: over its budget (mine)."
    bars = [{"x": name, "y": y, "line": part, "mark": "bar", "nth": i} for name in ("one", "two")
            for i, (part, y) in enumerate((("low", 1.0), ("high", 2.0)))]  # fmt: skip
    picture = draw_chart(Chart("Bars", Scale("", "names"), Scale("s")), bars, Canvas())
    assert sorted((bar.get_y(), bar.get_height()) for bar in picture.axes.patches) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [label.get_text() for label in picture.axes.get_xticklabels()] == ["one", "two"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "snapvk"], "did you mean 'snapkv'?"),
        (["--width", "wide"], "'wide' is no width; give inches, 2 to 12, or column, text, phone"),
        (["--width", "0.1"], "'0.1' is no width"),
        (["--format", "jpg"], "'jpg' is no format; use some of pdf,png,svg"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_sentence(
    words: list[str], said: str, root: Path, tmp_path: Path, capsys
) -> None:
    try:
        code = main([str(root), "--out", str(tmp_path / "out"), *words])
    except SystemExit as error:
        code = error.code
    assert code == 2 and said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_runs_whose_parameters_do_not_say_the_rounds_are_drawn(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for method, params in (("full", {}), ("pqcache", {}), ("snapkv", {})):
        write(runs, method, "longbench", answers(["docs_qa"], 0.5), params=params)
    timed = {"metric": "tpot_ratio", "length": 9, "batch": 1, "timing": timing(9, 1.0)}
    for method in ("full", "pqcache"):
        write(runs, method, "latency", [{"score": 1.0, "fields": timed}], metric="tpot_ratio")
    out = tmp_path / "out"
    assert main([str(runs), "--out", str(out), "--only", "pareto", "iterations", "decode_parts"]) == 0
