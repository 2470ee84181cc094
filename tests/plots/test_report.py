"""The page's data against the runs' own, and the report's size."""

import html
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots import style
from kvbench.plots.looks import LOOKS, look
from kvbench.plots.read import load
from kvbench.plots.run_sets import asked
from kvbench.plots.site import app
from kvbench.plots.site.overview import AVERAGE, full_once, overview
from kvbench.plots.site.report import main, page
from kvbench.plots.site.samples import pack_samples, unpacked
from kvbench.plots.stats import macro_interval, paired_over_datasets
from kvbench.results import METRICS, share_interval
from kvbench.results.intervals import FEW
from kvbench.tests.plots.made_runs import write
from kvbench.tests.plots.report_runs import write_run

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> @@script@@"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    hostile: dict[str, Any] = {"predictions": [HOSTILE] * 6, "reference": HOSTILE}
    write_run(root, "full", [1, 1, 1, 0, 1, 1], reference=HOSTILE)
    write_run(root, "full", [1, 1, 1, 0, 1, 1], ratio="1/10", reference=HOSTILE)
    write_run(root, "quest", [1, 0, 1, 0, 0, 1], **hostile)
    write_run(root, "quest", [0, 0, 1, 1, 0, 0], ratio="1/10", within=False, **hostile)
    write_run(root, "snapkv", [0, 0, 0, 0, 0, 1], model="other<b>model")
    return root


def told(root: Path) -> list[dict[str, Any]]:
    return overview(full_once(load(root))[0], root)["runs"]


def one(root: Path, variant: str, dataset: str = "own") -> dict[str, Any]:
    """The part of a run that stands in a column."""
    run = next(run for run in told(root) if run["variant"] == variant)
    return next(part for part in run["parts"] if part["dataset"] == dataset)


def test_scores_and_differences_are_those_of_the_samples(root: Path) -> None:
    part = one(root, "Quest · ratio 0.2")
    assert part["score"] == pytest.approx(3 / 6)
    exact = share_interval(3, 6)
    assert exact is not None and part["ci"] == pytest.approx((exact.low, exact.high))
    found = part["paired"]
    assert (found["mean"], found["n"]) == (pytest.approx(-2 / 6), 6)
    assert (found["more"], found["same"], found["less"]) == (0, 4, 2)
    assert found["family"] == 2 and found["holm"] >= found["p"]
    cells = {(length, depth): (score, n) for length, depth, score, n, _ in part["heat"]}
    assert cells[500, 0] == (0.5, 2)  # samples 0 and 4


def test_a_cell_is_coloured_by_the_corrected_test(tmp_path: Path) -> None:
    scores = [0.9, 0.8, 0.9, 0.7]
    write_run(tmp_path, "full", scores)
    write_run(tmp_path, "quest", [0.1, 0.2, 0.1, 0.3])
    write_run(tmp_path, "snapkv", [0.2, 0.2, 0.2, 0.2])
    found = one(tmp_path, "Quest · ratio 0.2")["paired"]
    assert (found["p"], found["holm"], found["sign"]) == (0.125, 0.25, 0)
    for n, sign in ((FEW - 1, 0), (FEW, -1)):
        write_run(tmp_path / str(n), "full", [1.0] * n)
        write_run(tmp_path / str(n), "quest", [0.0] * n)
        found = one(tmp_path / str(n), "Quest · ratio 0.2")["paired"]
        assert found["holm"] < 0.05 and found["sign"] == sign
    assert overview(load(tmp_path), tmp_path)["few"] == FEW, "the page says no interval below it"


def fronts(root: Path) -> dict[str, list[str]]:
    """By which of a run's costs it is on the front."""
    return {run["variant"]: run["parts"][0]["front"] for run in told(root) if run["parts"][0]["front"]}


def costing(tokens: float) -> dict[str, float]:
    return {"tokens_attended_mean": tokens, "bytes_resident_device": tokens * 1e3}


def test_the_front_is_what_is_shown_to_be_better_than_all_that_costs_no_more(tmp_path: Path) -> None:
    write_run(tmp_path, "full", [1.0] * FEW, costs=costing(1000))
    write_run(tmp_path, "oracle", [1.0] * FEW, costs=costing(1) | {"bytes_searched_per_step": 5e6})
    write_run(tmp_path, "snapkv", [0.2] * FEW, ratio="1/10", costs=costing(10))
    write_run(tmp_path, "quest", [0.7] * FEW, ratio="1/10", costs=costing(20))
    write_run(tmp_path, "h2o", [0.7] * (FEW - 1) + [0.71], costs=costing(30))
    write_run(tmp_path, "sparq", [0.9] * FEW, costs=costing(40), within=False)
    found = fronts(tmp_path)
    assert found.keys() == {"Snapkv · ratio 0.1", "Quest · ratio 0.1"}
    assert {"tokens", "device"} <= set(found["Quest · ratio 0.1"])
    assert "tpot" not in found["Quest · ratio 0.1"], "where all cost the same, none is cheaper than what it beats"


def test_quality_is_counted_from_random_tokens_under_the_same_budget(tmp_path: Path) -> None:
    write_run(tmp_path, "full", 8 * [1.0, 1.0, 0.8, 0.0], costs=costing(100))
    write_run(tmp_path, "random", 8 * [0.2, 0.0, 0.2, 0.0], costs=costing(20))
    write_run(tmp_path, "snapkv", 8 * [0.7, 0.5, 0.5, 0.0], costs=costing(20))
    write_run(tmp_path, "quest", 8 * [0.7, 0.5, 0.5, 0.0], ratio="1/2", costs=costing(50))
    assert one(tmp_path, "Snapkv · ratio 0.2")["base"] == pytest.approx([0.7, 0.7 - 0.1])
    assert one(tmp_path, "Quest · ratio 0.5")["base"] == [pytest.approx(0.7), None], "random was not asked there"
    assert one(tmp_path, "Full")["base"] is None
    found = {run["variant"]: run["parts"][0]["cost"]["memory"] for run in told(tmp_path)}
    assert found["Quest · ratio 0.5"] == pytest.approx(0.5) and found["Full"] == 1


def test_a_lead_over_random_tokens_that_is_not_shown_is_none_to_count_from(tmp_path: Path) -> None:
    write_run(tmp_path, "full", [1.0, 1.0, 0.0, 1.0])
    write_run(tmp_path, "random", [1.0, 0.0, 0.0, 1.0])
    write_run(tmp_path, "snapkv", [1.0, 0.0, 0.0, 0.0])
    assert one(tmp_path, "Snapkv · ratio 0.2")["base"] == [pytest.approx(0.75), 0]


def test_draws_are_no_samples_of_their_own(tmp_path: Path) -> None:
    """Three prompts with four draws each show no more than three samples do."""
    for method, right in (("full", 4), ("snapkv", 0)):
        drawn = [{"score": float(j < right), "prompt": i, "fields": {"draw": j}} for i in range(3) for j in range(4)]
        write(tmp_path, method, "gsm8k", drawn)
    found = one(tmp_path, "SnapKV (C) · ratio 0.2", "gsm8k")["paired"]
    assert (found["n"], found["less"], found["sign"]) == (3, 3, 0)


def test_the_best_of_a_budget_is_bold_and_what_is_not_shown_to_be_worse_ties(tmp_path: Path) -> None:
    good, poor = [1.0] * FEW, [0.0] * FEW
    write_run(tmp_path, "full", good)
    write_run(tmp_path, "oracle", good, costs={"bytes_searched_per_step": 5e6})
    write_run(tmp_path, "quest", [0.9] * FEW)
    write_run(tmp_path, "snapkv", poor)
    write_run(tmp_path, "h2o", [0.9] * (FEW - 1) + [0.8], ratio="1/10")
    write_run(tmp_path, "xkv", [0.9] * (FEW - 2) + [0.8, 0.7], ratio="1/10")
    write_run(tmp_path, "sparq", good, ratio="1/10", within=False)
    standing = {run["variant"]: run["parts"][0]["standing"] for run in told(tmp_path)}
    assert standing == {
        "Full": "", "Oracle · ratio 0.2": "", "Quest · ratio 0.2": "bold", "Snapkv · ratio 0.2": "",
        "H2o · ratio 0.1": "tie", "Xkv · ratio 0.1": "tie", "Sparq · ratio 0.1": "",
    }  # fmt: skip
    assert [run["method"] for run in told(tmp_path) if run["unpriced"]] == ["oracle"]


def test_an_average_counts_datasets_alike_and_needs_all_of_them(tmp_path: Path) -> None:
    three = {"task": "longbench", "datasets": ("a", "b", "b")}
    full, quest = [1.0, 0.5, 0.5, 0.0, 1.0, 1.0], [0.0, 0.5, 0.0, 0.0, 1.0, 0.5]
    write_run(tmp_path, "full", full, **three)
    write_run(tmp_path, "quest", quest, **three)
    write_run(tmp_path, "snapkv", quest, task="longbench", datasets=("a",))
    part = one(tmp_path, "Quest · ratio 0.2", AVERAGE)
    of = [[quest[0], quest[3]], [quest[i] for i in (1, 2, 4, 5)]]
    interval = macro_interval(of, bounds=(0, 1))
    assert interval and part["of"] == ["a", "b"]
    assert part["score"] == pytest.approx(interval.mean) == pytest.approx((0.0 + 0.5) / 2)
    assert part["ci"] == [interval.low, interval.high]
    against = paired_over_datasets(of, [[full[0], full[3]], [full[i] for i in (1, 2, 4, 5)]])
    assert part["paired"]["mean"] == against.mean and part["paired"]["p"] == against.p
    snapkv = next(run for run in told(tmp_path) if run["method"] == "snapkv")
    assert [part["dataset"] for part in snapkv["parts"]] == ["a"]


def test_full_attention_stands_there_once_and_names_the_others(root: Path) -> None:
    runs = load(root)
    once, same = full_once(runs)
    fulls = [run for run in runs if run.method == "full"]
    assert len(fulls) == 2 and [run.method for run in once].count("full") == 1
    ((kept, others),) = same.items()
    assert {kept, *others} == {run.folder for run in fulls}
    assert [run["variant"] for run in told(root) if run["full"]] == ["Full"]


def test_maps_have_the_lengths_that_prompts_really_have(root: Path) -> None:
    heat = one(root, "Quest · ratio 0.2")["heat"]
    tokens = {(length, depth): tokens for length, depth, _, _, tokens in heat}
    assert tokens[500, 0] == 337 + (0 + 4) / 2 and tokens[1000, 50] == 337 + 3


def test_runs_of_another_model_have_no_full_attention_to_be_compared_with(root: Path) -> None:
    other = next(run for run in told(root) if run["method"] == "snapkv")
    assert other["parts"][0]["paired"] is None
    assert other["audit"]["comm_bytes"] is None


def test_a_run_over_its_budget_says_so(root: Path) -> None:
    over = [run for run in told(root) if run["parts"][0]["over"]]
    assert [(run["method"], run["budget"]) for run in over] == [("quest", "ratio 0.1")]
    assert over[0]["audit"]["within_budget"] is False


def test_costs_are_those_of_the_ledgers(root: Path) -> None:
    part = one(root, "Quest · ratio 0.2")
    assert part["cost"]["tokens"] == part["cost"]["device"] == pytest.approx(1050)
    assert part["cost"]["moved"] == pytest.approx(2 * 1050), "no search was read for free"


def test_layers_that_a_method_leaves_whole_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, "quest", [1.0], params={"full_layers": 2})
    (run,) = told(tmp_path)
    assert run["whole_layers"] == 2
    assert run["parts"][0]["outside"] == "first 2 layers left whole, outside the budget"


@pytest.mark.parametrize(
    ("given", "shown"), [("0.125", "1/8"), ("1/64", "1/64"), ("0.1", "0.1"), ("1", "1"), ("0", "0")]
)
def test_a_share_is_shown_as_people_give_it(given: str, shown: str, tmp_path: Path) -> None:
    write_run(tmp_path, "quest", [1.0, 0.0])
    (run,) = load(tmp_path)
    run = replace(run, result=replace(run.result, comm_exact=given, ratio_exact=given))
    (told,) = overview([run], tmp_path)["runs"]
    assert (told["comm"], told["budget"]) == (run.comm, asked(run)) == (shown, f"ratio {shown}")


def test_two_runs_of_one_configuration_have_keys_of_their_own(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_run(tmp_path / folder, "quest", [1.0])
    keys = [run["key"] for run in told(tmp_path)]
    assert len({*keys}) == 2 and keys[1] == f"{keys[0]}~2"


def test_a_method_looks_as_in_every_figure_whatever_else_is_shown() -> None:
    for method in (*LOOKS, "somebodys_own"):
        looks, found = look(method), app.look(method)
        assert found["light"] == style.look(method)["color"] == looks.colour, method
        assert found["dark"] == ("#FFFFFF" if method == "full" else looks.colour), method
        assert (found["shape"], bool(found["dash"])) == (looks.path, looks.dash != "-"), method


def test_a_legend_names_a_method_by_all_that_its_runs_are_called(tmp_path: Path) -> None:
    """The last run's name stood for all, without its (C)."""
    for i, (method, label) in enumerate([("snapkv", "SnapKV (C)"), ("snapkv", "SnapKV"), ("quest", "Quest (matched)")]):
        write(tmp_path / str(i), method, "needle", [{"score": 1.0}], label=label)
    looks = overview(load(tmp_path), tmp_path)["looks"]
    assert {method: each["name"] for method, each in looks.items()} == {
        "snapkv": "SnapKV or SnapKV (C)", "quest": "Quest (matched)",
    }  # fmt: skip


def test_no_text_of_a_run_can_end_an_element(root: Path) -> None:
    text = page(load(root), root)
    # the page's own, index, methods, evidence, and of two benchmarks overview, origins, prompts, one piece of samples
    assert text.count("</script>") == 4 + 2 * 4
    assert "<b>model" not in text and "window.hacked" not in text
    asked = [unpacked(data) for data in re.findall(r'data-asked">([^<]*)<', text)]
    assert [HOSTILE] in [one["references"] for each in asked for one in each]
    assert not re.search(r'(?:src|href)="(?!#)', text.split('type="text/plain"')[0])
    policy = html.unescape(text.split('Content-Security-Policy" content="')[1].split('"')[0])
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "script-src 'sha256-" in policy


def test_the_page_has_every_script_that_there_is_and_no_name_twice() -> None:
    files = [*(app.ASSETS / "js").glob("*.js")]
    assert sorted(file.stem for file in files) == sorted((*app.FIRST, *app.MORE))
    names = re.findall(
        r"^(?:async )?(?:function|const|let) +([\w$]+)", "".join(map(Path.read_text, files)), re.MULTILINE
    )
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("name", (*app.FIRST, *app.MORE))
def test_a_script_is_short_and_says_what_it_is_for(name: str) -> None:
    text = (app.ASSETS / "js" / f"{name}.js").read_text()
    assert text.startswith("// ") and text.count("\n") <= 300


def test_nothing_to_report_and_nowhere_to_write_are_errors_of_the_user(tmp_path: Path, root: Path, capsys: Any) -> None:
    assert main([str(tmp_path)]) == 2
    assert "run.py" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(root), "--out", str(tmp_path / "file" / "report.html")]) == 2
    assert "--out" in capsys.readouterr().err


def n_calls(root: Path) -> int:
    """How many calls, of Python's functions and C's, the data of a page take, from the files on."""
    n = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        runs = load(root)
        overview(runs, root)
        pack_samples(runs)
    finally:
        sys.setprofile(None)
    return n


def test_a_run_costs_as_much_beside_forty_others_as_beside_ten(tmp_path: Path) -> None:
    draw = random.Random(0)
    counts = []
    for n_runs in (10, 20, 40):
        root = tmp_path / str(n_runs)
        for i in range(n_runs):
            write_run(root, "quest" if i else "full", [draw.random() for _ in range(4)], f"1/{i + 2}", ledger=False)
        if not counts:
            n_calls(root)  # fills what is kept between pages
        counts.append(n_calls(root))
    ten, twenty, forty = counts
    assert (forty - twenty) / 20 < 1.02 * (twenty - ten) / 10  # less, where an interval was worked out before


def test_every_metric_has_a_direction_on_the_page(root: Path) -> None:
    found = overview(load(root), root)["metrics"]
    assert found == {name: {"better": m.better, "scale": m.scale} for name, m in METRICS.items()}
