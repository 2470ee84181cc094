"""The report's data against the runs' own, its size, and the page in a real browser."""

import base64
import gzip
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals.results import METRICS, wilson
from plots.read import load
from plots.report import charts as report_charts
from plots.report.page import as_json, main, overview, page, samples
from plots.stats import paired
from tests.plots.report_runs import write_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DRIVER = shutil.which("chromedriver")
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


def described(root: Path) -> dict[str, dict[str, Any]]:
    runs = overview(load(root), root)["runs"]
    return {f"{run['method']} {run['provenance']['config_hash']}": run for run in runs}


def test_scores_and_differences_are_those_of_the_samples(root: Path) -> None:
    quest = next(run for run in described(root).values() if run["variant"].startswith("Quest · ratio 1/5"))
    (part,) = quest["parts"]
    assert part["score"] == pytest.approx(3 / 6)
    assert part["ci"] == pytest.approx((wilson(3, 6).low, wilson(3, 6).high))
    found = part["paired"]
    assert (found["mean"], found["n"]) == (pytest.approx(-2 / 6), 6)
    assert (found["more"], found["same"], found["less"]) == (0, 4, 2)
    spread = paired([1, 0, 1, 0, 0, 1], [1, 1, 1, 0, 1, 1]).difference
    assert spread and found["ci"] == [spread.low, spread.high] and spread.low < found["mean"] < 0 < spread.high
    assert found["family"] == 2 and found["holm"] >= found["p"]
    cells = {(length, depth): (score, n) for length, depth, score, n in part["heat"]}
    assert cells[1000, 0] == (0.5, 2)  # samples 0 and 4


def test_runs_of_another_model_have_no_full_attention_to_be_compared_with(root: Path) -> None:
    other = next(run for run in described(root).values() if run["method"] == "snapkv")
    assert other["parts"][0]["paired"] is None
    assert other["audit"]["comm_bytes"] is None


def test_a_run_over_its_budget_says_so(root: Path) -> None:
    over = [run for run in described(root).values() if run["parts"][0]["over"]]
    assert [(run["method"], run["budget"]) for run in over] == [("quest", "ratio 1/10")]
    assert over[0]["audit"]["within_budget"] is False


def test_no_text_of_a_run_can_end_an_element(root: Path) -> None:
    text = page(load(root), root)
    assert text.count("</script>") == 5
    assert "<b>model" not in text and "window.hacked" not in text
    packed = re.search(r'id="data-samples">([^<]*)<', text)
    assert packed
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert [HOSTILE] in [question["references"] for question in data["asked"]]
    assert "</" not in as_json(HOSTILE)
    assert not re.search(r'(?:src|href)="(?!#)', text.split('id="data-overview"')[0])


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
        samples(runs)
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
    assert (forty - twenty) / 20 == pytest.approx((twenty - ten) / 10, rel=0.004)


def test_the_chart_script_is_put_together_once_and_again_where_its_copy_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundled = []
    monkeypatch.setattr(report_charts, "bundled_script", lambda: bundled.append(1) or "let π = 3;\r\n")

    def n_bundled() -> int:
        assert report_charts.vega_script() == "let π = 3;\r\n"
        return len(bundled)

    assert (n_bundled(), n_bundled()) == (1, 1)
    (file,) = (tmp_path / "kvbench").glob("vega-*.js")
    file.write_bytes(file.read_bytes().replace(b"3", b"4"))
    assert (n_bundled(), n_bundled()) == (2, 2)
    file.chmod(0o666)
    assert (n_bundled(), n_bundled()) == (3, 3)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert n_bundled() == 4


@pytest.mark.slow
def test_fifty_runs_fit_into_six_megabytes(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(5000)]
    for i in range(50):
        texts = [" ".join(draw.choices(words, k=30)) for _ in range(60)]
        method, scores = "quest" if i else "full", [float(draw.random() < 0.5) for _ in texts]
        write_run(tmp_path, method, scores, ratio=f"1/{i + 2}", predictions=texts, ledger=False)
    out = tmp_path / "report.html"
    assert main([str(tmp_path), "--out", str(out)]) == 0
    assert out.stat().st_size < 6e6


# --- in a browser ---


@pytest.fixture(scope="module")
def browser(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not BROWSER or not DRIVER:
        pytest.skip("needs chromium and chromedriver (Debian: apt install chromium chromium-driver)")
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    out = tmp_path_factory.mktemp("page") / "report.html"
    assert main([str(root), "--out", str(out)]) == 0
    options = selenium.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_script_timeout(30)
        driver.get(out.as_uri())
        wait(driver, "return Number(document.documentElement.dataset.charts || 0) > 0")
        yield driver
    finally:
        driver.quit()


def wait(driver: Any, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 30).until(lambda d: d.execute_script(script))


def count(driver: Any, selector: str) -> int:
    return driver.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def active(driver: Any, script: str) -> Any:
    return driver.execute_script(f"const e = document.activeElement; return {script}")


@pytest.mark.slow
def test_the_page_loads_fast_without_errors_and_runs_no_text(browser: Any) -> None:
    paint = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
    assert browser.execute_script(paint) < 2000
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.hacked === undefined")
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    shown = "return document.querySelector('#sample .side:last-child pre').textContent"
    assert browser.execute_script(shown) == HOSTILE
    assert count(browser, "#pareto-chart svg") == count(browser, "#needle-chart svg") == 1


@pytest.mark.slow
def test_a_filter_reaches_tables_and_charts_by_keyboard(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    points = "#pareto-chart .mark-symbol.role-mark path"
    before = (
        count(browser, points),
        count(browser, "#audit tbody tr"),
        count(browser, "#origins details"),
    )
    assert before[1:] == (5, 5) and before[0] >= 4
    drawn = int(browser.execute_script("return document.documentElement.dataset.charts"))
    browser.execute_script("document.querySelectorAll('#filters summary')[1].focus()")
    keys = browser.switch_to.active_element
    keys.send_keys(Keys.ENTER)
    while active(browser, "e.value") != "quest":
        browser.switch_to.active_element.send_keys(Keys.TAB)
        assert active(browser, "e.closest('#filters') !== null"), "no box says quest"
    browser.switch_to.active_element.send_keys(Keys.SPACE)
    wait(browser, f"return Number(document.documentElement.dataset.charts) > {drawn}")
    assert count(browser, "#audit tbody tr") == 3
    assert count(browser, points) < before[0]
    assert "3 of 5" in browser.execute_script("return document.getElementById('count').textContent")
    browser.switch_to.active_element.send_keys(Keys.SPACE)
    wait(browser, f"return Number(document.documentElement.dataset.charts) > {drawn + 1}")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert active(browser, "e.tagName") == "SUMMARY"
    assert count(browser, "#filters details[open]") == 0


@pytest.mark.slow
def test_a_click_on_a_point_opens_its_answers_and_arrows_walk_through_them(browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    marks = browser.find_elements("css selector", "#pareto-chart .mark-symbol.role-mark path")
    mark = next(m for m in marks if "Quest · ratio 1/10" in (m.get_attribute("aria-label") or ""))
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    ActionChains(browser).move_to_element(mark).click().perform()
    chosen = "return document.getElementById('run-b').selectedOptions[0].textContent"
    wait(browser, f"{chosen}.includes('ratio 1/10')")
    wait(
        browser,
        "return document.querySelector('#sample h4 ~ h4, #sample .side:last-child h4').textContent.includes('1/10')",
    )
    browser.execute_script("document.querySelector('#sample-list button').focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert (
        active(browser, "e.dataset.at")
        == "1"
        == active(browser, "e.parentNode.querySelector('[aria-current=true]').dataset.at")
    )


@pytest.mark.slow
def test_the_theme_changes_and_a_narrow_page_does_not_overflow(browser: Any) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    seen = set()
    for _ in range(3):
        browser.execute_script("document.getElementById('theme').click()")
        seen.add(browser.execute_script(colour))
    assert len(seen) == 2
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wait(browser, "return innerWidth === 390 && document.documentElement.scrollWidth <= 390")
    assert browser.get_log("browser") == []


def test_every_metric_has_a_direction_on_the_page(root: Path) -> None:
    assert overview(load(root), root)["metrics"] == {name: m.better for name, m in METRICS.items()}
