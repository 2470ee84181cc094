"""The results site: its files, and its pages in a real browser."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.evals.submit import submit
from kvbench.plots import pages
from kvbench.plots.site import build
from kvbench.plots.site.build import main
from kvbench.plots.site.changes import changes
from kvbench.plots.site.evidence import kept_runs
from kvbench.plots.site.samples import unpacked
from kvbench.results.files import sealed
from kvbench.tests.plots.browser import Page
from kvbench.tests.plots.many_runs import write_many
from kvbench.tests.plots.report_runs import write_run
from kvbench.tests.plots.test_report import HOSTILE

BIDI = "\u202egnp.exe\u2066 \x1b[2J"
BAD = f"{HOSTILE}{BIDI}"
PAGES = ("picture", "budgets", "scores", "needle", "samples", "method", "which", "changes")
SIZES = ({"width": 390, "height": 844}, {"width": 1400, "height": 900})
N = 40  # of two datasets: enough of each to be ranked
RIGHT, COST = [1.0] * N, "bytes_resident_device"


def runs_of(root: Path) -> None:
    """Two benchmarks; texts that a page might obey stand wherever a run has one."""
    hostile: dict[str, Any] = {"predictions": [BAD] * N, "reference": BAD, "params": {BAD: BAD}}
    two = {"task": "longbench", "datasets": ("a", BAD), "fields": {"prompt_end": {"question": BAD}, "note": BAD}}
    write_run(root, "full", RIGHT, costs={COST: 9e6}, **two)
    write_run(root, "snapkv", [0.0] * N, costs={COST: 2e6}, **two, **hostile)
    write_run(root, "snapkv", [0.9] * N, ratio="1/2", costs={COST: 4e6}, **two)
    write_run(root, "quest", RIGHT, ratio="1/2", costs={COST: 3e6}, **two)
    write_run(root, "full", RIGHT, model=BAD, task="needle")
    write_run(root, "mine" + BAD, [0.0] * N, model=BAD, task="needle", **hostile)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    runs_of(root)
    return root


@pytest.fixture(scope="module")
def site(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "site"
    assert main([str(runs), "--out", str(out)]) == 0
    return out


def content(file: Path) -> Any:
    found = re.fullmatch(r'kvbench\("[\w/-]+","([A-Za-z0-9+/=]*)"\)\n', file.read_text())
    assert found, f"{file} holds more than one call"
    return unpacked(found[1])


def benchmarks(site: Path) -> list[dict[str, Any]]:
    return content(site / "data" / "data-index.js")["benchmarks"]


def test_every_file_of_data_is_one_call_with_packed_text(site: Path) -> None:
    for file in site.rglob("data-*.js"):
        content(file)
    assert {one["task"] for one in benchmarks(site)} == {"embedded texts", "needle depths=[0, 50]"}


def test_no_text_of_a_run_is_in_the_page_and_none_can_turn_a_line(site: Path) -> None:
    for name in ("index.html", "site.js", "more.js"):
        assert "window.hacked" not in (site / name).read_text()
    said = (site / "runs.json").read_text() + json.dumps([content(file) for file in site.rglob("data-o*.js")])
    assert "\u202e" not in said and "\x1b" not in said and "gnp.exe" in said


def corrected(runs: Path, tmp_path: Path, submitter: str) -> tuple[list[Path], str, str]:
    """Two submissions, the second of which corrects a run of the first; the ids of the old run and of the new one."""

    def id(folder: Path) -> str:
        return hashlib.sha256((folder / "result.json").read_bytes()).hexdigest()[:16]

    two: dict[str, Any] = {"task": "longbench", "datasets": ("a", "b")}
    old, _ = write_run(tmp_path / "old", "snapkv", [0.4] * 10, costs={COST: 2e6}, method_version=1, **two)
    new, _ = write_run(tmp_path / "new", "snapkv", [0.5] * 10, costs={COST: 2e6}, method_version=2, **two)
    submit([runs, tmp_path / "old"], tmp_path / "first", submitter=BAD, licence="CC0-1.0")
    handed = {new.name: id(old)}
    submit([tmp_path / "new"], tmp_path / "second", submitter=submitter, licence="CC0-1.0", supersedes=handed)
    return [tmp_path / "first", tmp_path / "second"], id(old), id(new)


def test_a_superseded_run_stays_readable_and_is_ranked_no_more(runs: Path, tmp_path: Path) -> None:
    (first, second), old, new = corrected(runs, tmp_path, BAD)
    assert main([str(first), "--out", str(tmp_path / "one")]) == 0
    asked = [str(first), str(second), "--out", str(tmp_path / "two"), "--since", str(tmp_path / "one")]
    assert main(asked) == 0
    listed = json.loads((tmp_path / "two" / "runs.json").read_text())
    assert listed[old]["superseded_by"] == new and listed[old]["rank"] is None
    kinds = [kind for kind, _ in content(tmp_path / "two" / "data" / "data-index.js")["changes"]]
    assert kinds.count("superseded") == 1 and kinds.count("added") == 1 and "gone" not in kinds
    assert main(["--diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert main(["--diff", str(tmp_path / "two"), str(tmp_path / "one")]) == 1, "a run is gone"


def test_nobody_takes_anothers_run_away(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submissions, old, _ = corrected(runs, tmp_path, "a rival")
    assert main([*map(str, submissions), "--out", str(tmp_path / "site")]) == 0
    assert json.loads((tmp_path / "site" / "runs.json").read_text())[old]["superseded_by"] == ""
    assert "not superseded" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{", '{"runs": {"a": 3}}', '{"runs": {"a": {"verdict": []}}}', "\x00"])
def test_verdicts_and_manifests_that_are_none_are_refused(runs: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "verdicts.json").write_text(text)
    assert main([str(runs), "--out", str(tmp_path / "site"), "--verdicts", str(tmp_path / "verdicts.json")]) == 2


def test_verdicts_are_those_of_the_runs_own_digests(runs: Path, tmp_path: Path) -> None:
    results = sorted(runs.rglob("result.json"))
    id = hashlib.sha256(results[0].read_bytes()).hexdigest()[:16]
    rescored = {"verdict": "rescored", "why": [], "findings": []}
    told = {"runs": {id: rescored, "0" * 16: rescored | {"verdict": "reproduced"}}}
    (tmp_path / "verdicts.json").write_text(sealed(json.dumps(told)))
    asked = [str(runs), "--out", str(tmp_path / "site"), "--verdicts", str(tmp_path / "verdicts.json")]
    assert main(asked) == 0
    listed = json.loads((tmp_path / "site" / "runs.json").read_text())
    assert [one["verdict"] for one in listed.values()].count("rescored") == 1
    assert {one["verdict"] for one in listed.values()} == {"rescored", "reported"}
    (tmp_path / "verdicts.json").write_text((tmp_path / "verdicts.json").read_text().replace("rescored", "reproduced"))
    assert main(asked) == 2, "its seal is broken"


def test_a_folder_that_is_no_site_is_left_alone(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    assert main([str(runs), "--out", str(tmp_path)]) == 2
    assert (tmp_path / "thesis.tex").read_text() == "years"
    assert main([str(tmp_path / "nothing"), "--out", str(tmp_path / "new")]) == 2


def test_a_site_made_twice_is_the_same(runs: Path, site: Path, tmp_path: Path) -> None:
    assert main([str(runs), "--out", str(tmp_path / "again")]) == 0
    files = {path.relative_to(site): path.read_bytes() for path in site.rglob("*") if path.is_file()}
    again = tmp_path / "again"
    assert files == {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()}


def test_changes_name_what_is_gone_and_what_is_otherwise() -> None:
    run = {"variant": "SnapKV", "benchmark": "needle", "verdict": "rescored", "score": 0.5, "rank": [1, 3]}
    found = dict(changes({"a": run, "b": run}, {"b": run | {"verdict": "reproduced"}, "c": run}))
    assert found == {
        "gone": "a SnapKV on needle",
        "added": "c SnapKV on needle: rescored",
        "verdict": "b SnapKV on needle: rescored is now reproduced",
    }


@pytest.fixture(scope="module")
def of_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of a clone without runs: kept scores and committed submissions."""
    out, no_runs = tmp_path_factory.mktemp("made") / "site", tmp_path_factory.mktemp("none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "default_root", lambda: no_runs)
        assert main(["--out", str(out)]) == 0
    return out


def first_view(site: Path) -> list[Path]:
    """The files that are read before anything is chosen."""
    names = (
        "index.html",
        "site.js",
        "data/data-index.js",
        f"data/{content(site / 'data/data-index.js')['start']}/data-overview.js",
    )
    return [site / name for name in names]


def test_a_bare_clone_has_a_site_of_all_kept_scores_that_opens_on_the_largest_benchmark(of_repository: Path) -> None:
    index = content(of_repository / "data" / "data-index.js")
    (start,) = [one for one in index["benchmarks"] if one["id"] == index["start"]]
    assert (start["model"], start["task"], start["question"]) == (
        "qwen2.5-coder-0.5b",
        "Questions on documents, by budget",
        "hidden",
    )
    assert start["methods"] > 30 and start["answers"] > 2000
    assert sum(one["answers"] for one in index["benchmarks"]) > 14_000
    overview = content(of_repository / "data" / start["id"] / "data-overview.js")
    assert set(overview["runs"]["verdict"]) == {"reported"} and all(overview["runs"]["kept"])
    costs, audit = overview["parts"]["cost"], overview["runs"]["audit"]
    assert all(costs["device"]), "what is held on the device is kept of all"
    assert not any(audit["within_budget"])
    commands = {one["command"] for one in content(of_repository / "data" / start["id"] / "data-origins.js")}
    assert commands == {f"python run.py -m experiment={name}" for name in ["evidence_docs"]}
    assert sum(file.stat().st_size for file in first_view(of_repository)) <= 100_000


def test_kept_scores_are_those_of_their_pages() -> None:
    runs, rows = kept_runs(), pages.kept("results")
    assert len({run.result.config_hash for run in runs}) == len(runs) > 270
    mine: Any = rows[(rows["set"] == "budgets") & (rows["protocol"] == "full_prompt") & (rows["asked"] == "memory 1/8")]
    found = {
        run.method: run.result.score
        for run in runs
        if (run.result.task, run.result.protocol, run.page)
        == ("Questions on documents, by budget", "full_prompt", "docs/results.md")
        and run.result.memory_exact == "1/8"
    }
    assert found == pytest.approx(mine.groupby("method")["score"].mean().to_dict()) and len(found) > 10
    assert {run.page for run in runs} == {f"docs/{name}.md" for name in ("results", "register", "formats", "calls")}
    (shared,) = [
        run for run in runs if run.page == "docs/register.md" and run.result.task.startswith("Eight") and run.is_full
    ]
    assert len(shared.rows) == 30, "the questions on one context are one sample"


def test_a_folder_cannot_pass_for_kept_scores(tmp_path: Path) -> None:
    """What a page says of a folder's text is never said of it."""
    write_run(
        tmp_path, "full", RIGHT, kept={"page": "docs/results.md", "command": "rm -rf /"}, page="x", command="rm -rf /"
    )
    assert main([str(tmp_path), "--out", str(tmp_path / "site")]) == 0
    (origins,) = [content(file) for file in (tmp_path / "site").rglob("data-origins.js")]
    assert [one["command"].split()[:2] for one in origins] == [["python", "run.py"]]
    assert [one["verdict"] for one in json.loads((tmp_path / "site" / "runs.json").read_text()).values()] == [
        "reported"
    ]


def test_the_site_of_the_repository_has_its_scores_and_verdicts(of_repository: Path) -> None:
    listed = json.loads((of_repository / "runs.json").read_text()).values()
    assert len(listed) > 270
    found = Counter(one["verdict"] for one in listed)
    assert found["reproduced"] >= 5 and sum(n for verdict, n in found.items() if verdict != "reported") >= 10
    assert sum(path.stat().st_size for path in of_repository.rglob("*") if path.is_file()) < 2e6


# --- in a browser ---


@pytest.fixture(scope="module")
def opened(driver: Any, site: Path) -> Page:
    return Page(driver, (site / "index.html").as_uri(), site)


@pytest.fixture
def page(opened: Page) -> Iterator[Page]:
    """A test that leaves a word in the browser's log has failed."""
    opened.driver.get_log("browser")
    yield opened
    assert opened.driver.get_log("browser") == []
    opened.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["phone", "desk"])
@pytest.mark.parametrize("at", PAGES)
def test_every_page_fits_and_obeys_no_text(page: Page, site: Path, at: str, size: dict[str, int], theme: str) -> None:
    narrow = size["width"] < 500
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"deviceScaleFactor": 1, "mobile": narrow})
    for one in benchmarks(site):
        page.open(f"#at={at}&bench={one['id']}")
        page.run("localStorage.kvbenchTheme = arguments[0]", theme)
        page.open(f"#at={at}&bench={one['id']}")
        assert page.get("document.documentElement.dataset.theme") == theme
        assert page.get("document.querySelector('main > section.here').id") == at
        assert page.get("document.documentElement.scrollWidth") <= size["width"]
        assert page.get("document.querySelector('main > section.here').textContent.length") > 60
        assert page.get("window.hacked === undefined && document.querySelector('img') === null")
        assert "\u202e" not in page.get("document.body.innerText")


@pytest.mark.slow
def test_the_table_ranks_what_can_be_ranked(page: Page, site: Path) -> None:
    (id,) = [one["id"] for one in benchmarks(site) if one["task"] == "embedded texts"]
    page.open(f"#bench={id}&budget=ratio+0.5")
    rows = [re.sub(r"\s+", " ", text) for text in page.texts("#board tbody tr")]
    assert len(rows) == 3 and "Full" in rows[0] and "reference" in rows[0]
    assert "reported" in rows[1]
    page.open(f"#bench={id}&track=speed")
    heads = " ".join(page.texts("#board thead th"))
    assert "s/token" in heads and "score" not in heads, "never one number over both"
    page.open(f"#bench={id}&track=budgets")
    assert page.count("#board tbody tr") == 4 and "within budget" in " ".join(page.texts("#board thead th"))


@pytest.mark.slow
def test_a_row_leads_to_its_run_and_its_answers(page: Page, site: Path) -> None:
    (id,) = [one["id"] for one in benchmarks(site) if one["task"] == "embedded texts"]
    page.open(f"#bench={id}&budget=ratio+0.2")
    before = page.drawn()
    page.run("document.querySelectorAll('#board tbody tr')[1].querySelector('th a').click()")
    page.redrawn(before)
    page.until("document.querySelectorAll('#sample .side').length === 2")
    assert "gnp.exe" in page.texts("#sample .side")[1]
    assert "config hash" in page.texts("#origins")[0]
    loaded = page.get("performance.getEntriesByType('resource').map((e) => e.name.split('/').pop())")
    assert len([name for name in loaded if name.startswith("data-samples")]) <= 2, "answers of two runs, and no more"


@pytest.mark.slow
def test_the_keyboard_alone_reaches_every_page_and_every_mark(driver: Any, of_repository: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    page = Page(driver, (of_repository / "index.html").as_uri(), of_repository)
    page.open()

    def press(key: str) -> None:
        page.driver.switch_to.active_element.send_keys(key)

    for i, title in list(enumerate(page.texts("#pages a")))[::-1]:
        page.run("document.querySelectorAll('#pages a')[arguments[0]].focus()", i)
        before = page.drawn()
        press(Keys.ENTER)
        page.redrawn(before)
        assert page.get("document.querySelector('#pages [aria-current]').textContent") == title
    reached = list[str]()
    page.open()
    for _ in range(30):
        press(Keys.TAB)
        reached.append(page.get("document.activeElement.id || document.activeElement.getAttribute('class') || ''"))
    assert {"model", "task", "question", "budget", "y", "x", "mark"} <= set(reached)
    assert reached.count("mark") == 1, "one stop, and arrows from there"
    page.run("document.querySelector('.mark[tabindex=\"0\"]').focus()")
    seen = set[str]()
    for _ in range(page.count("#chart .mark")):
        press(Keys.ARROW_RIGHT)
        seen.add(page.get("document.activeElement.getAttribute('aria-label')"))
    for _ in range(page.count("#chart .mark")):
        press(Keys.ARROW_LEFT)
        seen.add(page.get("document.activeElement.getAttribute('aria-label')"))
    assert len(seen) == page.count("#chart .mark") > 50
    assert not page.get("document.querySelector('.tip').hidden")
    press(Keys.ENTER)
    page.until("!document.getElementById('card').hidden && document.querySelector('#card .command') !== null")
    card = page.texts("#card")[0]
    assert "only scores are kept" in card and "python run.py -m experiment=evidence_" in card and "95 %" in card
    press(Keys.ESCAPE)
    assert page.get("document.activeElement.getAttribute('class')") == "mark"


@pytest.mark.slow
def test_the_site_opens_on_a_picture_that_the_controls_and_the_address_change(driver: Any, of_repository: Path) -> None:
    from selenium.webdriver.support.ui import Select

    driver.switch_to.new_window("tab")  # whose history is not full
    page = Page(driver, (of_repository / "index.html").as_uri(), of_repository)
    page.open()
    assert page.get("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 1000
    loaded = {name.split("?")[0] for name in page.get("performance.getEntriesByType('resource').map((e) => e.name)")}
    assert loaded <= {file.as_uri() for file in first_view(of_repository)}
    assert page.count("#chart .bar") > 40 and page.count("#chart .level") == 1
    n_rows, n_marks = page.count("#board tbody tr:not(.more)"), page.count("#chart .mark")
    assert n_rows == min(n_marks, 60), "the same numbers as a table, of which a screenful is drawn"
    assert "0 is random tokens" in page.texts("#notes")[0]

    def heights() -> list[str]:
        return page.run(
            "return [...document.querySelectorAll('#chart .mark')].map((m) => m.getAttribute('aria-label'))"
        )

    def choose(id: str, text: str) -> list[str]:
        before = page.drawn()
        Select(page.driver.find_element("id", id)).select_by_visible_text(text)
        page.redrawn(before)
        return heights()

    seen = [heights(), choose("budget", "memory 0.25"), choose("question", "shown")]
    seen += [choose("task", "Questions on documents"), choose("model", "smollm2-135m")]
    assert len({tuple(labels) for labels in seen}) == 5
    address = page.get("location.hash")
    for before in seen[-2:-4:-1]:
        drawn = page.drawn()
        page.driver.back()
        page.redrawn(drawn)
        assert heights() == before
    page.open(address)
    assert heights() == seen[-1], "the address is enough"
    driver.close()
    driver.switch_to.window(driver.window_handles[0])


@pytest.mark.slow
def test_five_thousand_runs_open_in_two_seconds_and_little(driver: Any, tmp_path: Path) -> None:
    write_many(tmp_path / "runs", 5000)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "site")]) == 0
    assert sum(file.stat().st_size for file in first_view(tmp_path / "site")[:3]) <= 100_000
    assert sum(file.stat().st_size for file in first_view(tmp_path / "site")) <= 300_000
    found, times = Page(driver, (tmp_path / "site" / "index.html").as_uri(), tmp_path), list[float]()
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    for _ in range(3):
        found.open()
        metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        times.append(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))
    assert min(times) < 2, times
