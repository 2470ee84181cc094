"""docs/results.md: recomputed from the kept scores by other means, and how much it says."""

import csv
import gzip
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.plots.pages.asked import HERE
from kvbench.plots.pages.methods import title
from kvbench.tests.plots.test_register import DOCS, flips, gaffke, kept

TEXT = (DOCS / "results.md").read_text(encoding="utf-8")
MORE = yaml.safe_load((HERE / "results.yaml").read_text(encoding="utf-8"))
ASKED = {"1/4": "memory 0.25", "1/8": "memory 1/8", "1/16": "memory 1/16"}
SHARES = {"0.25": "memory 0.25", "0.125": "memory 1/8", "0.0625": "memory 1/16"}
SCOPES = {"question shown": "full_prompt", "question hidden": "context_only"}
HIDDEN = ("budgets", "context_only", "memory 0.25")
FILES = sorted((DOCS / "results").glob("*.csv"))


@cache
def scores() -> Any:
    return kept("results") | kept("register")


def mean(values: Any) -> float:
    values = [*values]
    return sum(values) / len(values)


def share(key: str, scope: str, asked: str, method: str) -> float:
    """Of full attention's lead over random tokens, what a method keeps, on the samples that all methods answered."""
    here = {m: of for (k, s, a, m), of in scores().items() if (k, s) == (key, scope) and (a == asked or m == "full")}
    most = max(map(len, here.values()))
    here = {m: of for m, of in here.items() if len(of) == most}
    full, floor, mine = (mean(here[name].values()) for name in ("full", "random", method))
    return 100 * (mine - floor) / (full - floor)


def table() -> dict[str, list[str]]:
    """The rows of the first table, by what they begin with."""
    lines = TEXT.split("| method |")[1].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {row[0]: row[1:] for row in rows}


def called(row: str) -> str:
    """The method of a row, by its title."""
    names = {title(method): method for (_, _, _, method) in scores()}
    return names[max((name for name in names if row.startswith(name)), key=len)]


def test_the_table_is_recomputed_from_the_scores_file() -> None:
    columns = [one for one in MORE["table"] if f" {one['words']} |" in TEXT.split("| method |")[1].splitlines()[0]]
    assert len(table()) >= 11 and columns
    for row, cells in table().items():
        for one, cell in zip(columns, cells, strict=False):
            if cell != "-":
                found = share(one["set"], one["scope"], ASKED[one["memory"]], called(row))
                assert cell.endswith(" %") and float(cell[:-2]) == pytest.approx(found, abs=0.51), (row, one)


def test_the_five_sentences_have_twenty_words_at_most_and_their_numbers_are_recomputed() -> None:
    said = re.findall(r"^\d\. (.*)", TEXT, re.MULTILINE)
    assert 4 <= len(said) <= 5 and all(len(re.sub(r"\*\*|\]\([^)]*\)|\[", "", one).split()) <= 20 for one in said)
    n, of = map(int, re.findall(r"(\d+) of (\d+) methods", said[0])[0])
    here = {m: by for (key, scope, asked, m), by in scores().items() if (key, scope, asked) == HIDDEN and len(by) >= 40}
    floor = here.pop("random")
    ps = {name: flips([x - floor[sample] for sample, x in by.items()]) for name, by in here.items()}
    told, least = set[str](), 0.0
    for i, (name, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        least = max(least, (len(ps) - i) * p)
        told |= {name} if least < 0.05 else set()
    methods = {*here} - {"oracle"}  # which nobody would run
    assert of == len(methods) and abs(n - len(methods - told)) <= 1, "one may hang on a seed"
    (one,) = [sentence for sentence in said if sentence.startswith("Hidden, SnapKV")]
    assert float(re.findall(r"(-?\d+) %", one)[0]) == pytest.approx(share(*HIDDEN, "snapkv"), abs=0.51)
    (at, who, points, other) = re.findall(r"needles at ([\d/]+), (\w+) .* name (\d+) points more than (\w+)", said[3])[
        0
    ]
    one, two = (scores()["several", "full_prompt", ASKED[at], called(name)] for name in (who, other))
    assert 100 * mean(one[sample] - two[sample] for sample in two) == pytest.approx(float(points), abs=0.51)
    # A loss of less than five points: the upper end of it, under drawn weights.
    (n, who) = re.findall(r"On (\d+) other questions, hidden, (\w+) ", said[1])[0]
    mine, full = (scores()["docs", *HIDDEN[1:2], *at] for at in (("memory 0.25", called(who)), ("", "full")))
    less = gaffke([mine[sample] - full[sample] for sample in full], -1.0)
    assert int(n) == len(full) and less[len(less) // 40] > -0.05


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_table_of_numbers_is_recomputed_from_the_scores_file(path: Path) -> None:
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert rows
    labels: dict[tuple[str, str, str], set[str]] = {}
    for i, row in enumerate(rows):
        at = path.stem, SCOPES[row["scope"]], SHARES.get(row["share of bytes"], row["share of bytes"])
        fits = {
            m for (key, scope, asked, m), by in scores().items()
            if (key, scope) == at[:2] and (asked == at[2] or (m == "full" and row["method"] == "Full"))
            and (m == "full") is (row["method"] == "Full")
            and abs(100 * mean(by.values()) - float(row["score"])) < 0.051 and len(by) == int(row["n"])
        }  # fmt: skip
        assert fits, row
        labels.setdefault(at, set()).update(fits)
        if i % 9 == 0 and row["low"]:  # the intervals of some
            values = [*scores()[*at[:2], "" if row["method"] == "Full" else at[2], min(fits)].values()]
            low, high = gaffke(values, 0.0), gaffke([-x for x in values], -1.0)
            assert float(row["low"]) <= 100 * low[len(low) // 40] + 1.1
            assert float(row["high"]) >= -100 * high[len(high) // 40] - 1.1
    asked = {place[:3] for place in scores() if place[0] == path.stem and place[2]}
    assert {*labels} <= asked


def test_the_page_is_short() -> None:
    first, _, second = TEXT.partition("## Which method?")
    for part in (first, second):  # the bars of a table are no words
        assert len([word for word in part.split() if re.search(r"\w", word)]) <= 700


def test_a_served_model_takes_what_its_shape_says() -> None:
    served = MORE["served"]
    per_token = 2 * 32 * 8 * 128 * 2  # K and V, layers, heads, channels, bytes, as Meta has them
    gib = per_token * served["tokens"] / 2**30
    share = f"you have {served['gib']}: 1/{gib / served['gib']:.0f}."
    assert f"requests of {served['tokens'] // 4:,}: {gib:.0f} GiB; {share}" in TEXT


def test_times_are_those_that_were_kept() -> None:
    timed = {}
    with gzip.open(DOCS / "results" / "scores.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            if row["set"] == "costs" and row["asked"] == "memory 0.25":
                timed[row["method"]] = [float(row[key]) for key in ("score", "timing.ttft_ratio", "timing.tt2t_ratio")]
    for row, cells in table().items():
        assert [float(cell) for cell in cells[-6:-3]] == pytest.approx(timed[called(row)], abs=0.0051)
    (longer,) = re.findall(r"takes ([\d.]+) times as long as full attention to its first token", TEXT)
    assert float(longer) == pytest.approx(timed["kvzip"][1], abs=0.0051)
    (n,) = re.findall(r"pays from (\d+) questions on", TEXT)
    assert int(n) - 1 < timed["kvzip"][1] / timed["snapkv"][1] <= int(n)
