"""`kvbench.means`, and the cells of docs/own-figures.md, each run as it stands there."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pandas
import pytest

import kvbench
from kvbench.engine.errors import ConfigError
from kvbench.plots.scored import Scored
from kvbench.results import read_samples
from kvbench.tests.plots import made_runs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "own-figures.md").read_text(encoding="utf-8")
CELLS = dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.+?)```", PAGE, re.MULTILINE | re.DOTALL))
HELD = {"resident_share": 0.5, "bytes_index_read_per_step": 10.0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that have what the cells look at: budgets, depths and lengths, times, turns."""
    root = tmp_path_factory.mktemp("own") / "runs"
    for method in ("full", "snapkv"):
        for i, ratio in enumerate(("1",) if method == "full" else ("1/5", "1/2")):
            made_runs.write(
                root, method, "longbench", made_runs.answers(("docs_qa",), 0.5 + 0.2 * i, ledger=HELD), ratio=ratio
            )
        needles = [{"fields": {"depth": d, "length": n}, "score": d} for d in (0.0, 0.5, 1.0) for n in (300, 600)]
        made_runs.write(root, method, "needle", needles)
        timed = [{"fields": {"length": n, "batch": 1, "timing": {"tpot_ratio": 1.0 + n / 1e3}}} for n in (500, 1000)]
        made_runs.write(root, method, "latency", timed)
        turns = [
            {"fields": {"sample": f"talk/{i}", "turn": turn, "turns": 2, "mode": "independent"}, "score": 1 / turn}
            for i in range(3)
            for turn in (1, 2)
        ]
        made_runs.write(root, method, "shared_context", turns)
    return root


def drawn(axes: Any) -> int:
    """Lines, bars, points and pixels of a figure's axes."""
    return (
        len(axes.lines) + len(axes.patches) + sum(len(one.get_offsets()) for one in axes.collections) + len(axes.images)
    )


@pytest.mark.parametrize("title", CELLS)
def test_a_cell_of_three_lines_draws_what_its_title_says(
    title: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.chdir(root.parent)
    assert len(CELLS[title].strip().splitlines()) == 3
    plt.close("all")
    exec(CELLS[title], {"kvbench": kvbench, "matplotlib": matplotlib})
    assert drawn(plt.gcf().axes[0]) > 0
    plt.close("all")


def test_every_kind_of_figure_has_a_cell() -> None:
    assert len(CELLS) == 8


def test_means_are_those_of_tables(root: Path) -> None:
    samples: Any = kvbench.results(root)
    found = kvbench.means(samples[samples.task == "longbench"], ["run"])
    for row in found.to_dict("records"):
        place = Scored.of(read_samples(Path(row["run"])))
        assert place.interval is not None
        assert (row["mean"], row["n"]) == (place.mean, place.n)
        assert (row["low"], row["high"]) == (place.interval.low, place.interval.high)


def test_a_group_is_compared_with_the_reference_of_its_task(root: Path) -> None:
    samples = kvbench.results(root)
    rows = kvbench.means(samples, ["task", "method", "ratio"], against={"method": "full"}).to_dict("records")
    found = {(row["task"], row["method"], row["ratio"]): row["difference"] for row in rows}
    assert found["needle", "snapkv", 0.2] == 0
    missing = {key for key, difference in found.items() if difference != difference}
    assert {("longbench", "full", 1), ("needle", "full", 0.2)} <= missing
    assert not missing & {("longbench", "snapkv", 0.2), ("longbench", "snapkv", 0.5)}


def test_turns_count_as_one_sample(root: Path) -> None:
    samples: Any = kvbench.results(root)
    found = kvbench.means(samples[samples.turn.notna()], "method")
    assert [*found.n] == [3, 3] and [*found["mean"]] == [0.75, 0.75]


def test_several_values_stand_side_by_side(root: Path) -> None:
    samples: Any = kvbench.results(root)
    found = kvbench.means(samples[samples.task == "longbench"], ["method", "ratio"], ["score", "resident_share"])
    assert {"score.mean", "score.low", "resident_share.mean"} <= {*found.columns}
    assert {*found["resident_share.mean"]} == {0.5}


@pytest.mark.parametrize(
    ("by", "value", "sentence"),
    [
        ("methud", "score", "no column 'methud'"),
        ("method", "skore", "no column 'skore'"),
        ("task", "method", "no mean"),
    ],
)
def test_a_wrong_column_is_refused(by: str, value: str, sentence: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        kvbench.means(kvbench.results(root), by, value)


def test_the_frame_needs_no_torch() -> None:
    code = "import sys, kvbench; kvbench.means; kvbench.results.columns; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_missing_groups_are_empty_texts(root: Path) -> None:
    samples: Any = kvbench.results(root)
    found = kvbench.means(samples, "turn")
    assert "" in [*found.turn] and not any(pandas.isna(one) for one in found["mean"])
