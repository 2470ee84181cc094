"""docs/register.md: recomputed from the kept scores by other means, and what counts as one sample."""

import csv
import gzip
import random
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.plots.pages.asked import HIDDEN, SHOWN, Comparison, Page, asked, page
from kvbench.plots.pages.fixed import Registered, registered
from kvbench.plots.pages.read import KEPT, typed
from kvbench.results import interval
from kvbench.results.intervals import LEVEL
from kvbench.tests.plots.made_pages import frame_of
from kvbench.tests.plots.test_experiments import cells, composed

DOCS = Path(__file__).resolve().parents[2] / "docs"
Place = tuple[str, str, str, str]  # set, scope, budget, method
SAID = {"title": "Docs", "skill": "copying", "about": "About.", "experiment": "register_docs", "task": "longbench"}


def register(n: int, *comparisons: dict[str, Any]) -> Page:
    one = asked("docs", SAID | {"model": "m", "seed": 0, "samples": [0, n], "dataset": "docs_qa"})
    where: dict[str, Any] = {"set": "docs", "scope": SHOWN, "memory": "1/4"}
    made = [Comparison(**{**where, **c}) for c in comparisons]
    return Page("register", {"docs": one}, made, {"margin": 0.05, "seed": 0})


def answers(method: str, scores: list[float], per_sample: int = 1) -> list[dict[str, Any]]:
    place = {"set": "docs", "method": method, "asked": "" if method == "full" else "memory 0.25"}
    return [
        place | {"id": f"{i}-{j}", "sample": f"{i}", "score": score}
        for i, score in enumerate(scores)
        for j in range(per_sample)
    ]


def outcomes(of: Page, rows: list[dict[str, Any]]) -> list[Registered]:
    return registered(of, typed(frame_of(rows)))


def is_shown(one: Registered) -> bool:
    return one.found is not None and one.found.p < LEVEL


DIFFERENCE = {"one": "pqcache", "other": "kvzip", "asks": "difference"}
WITHIN = {"one": "pqcache", "other": "full", "asks": "margin"}


# --- the rules -----------------------------------------------------------------------------------


def test_nothing_is_tested_before_every_sample_is_answered() -> None:
    rows = answers("pqcache", [1.0] * 29) + answers("kvzip", [0.0] * 30)
    (found,) = outcomes(register(30, DIFFERENCE), rows)
    assert (found.n, found.found) == (29, None)
    (found,) = outcomes(register(29, DIFFERENCE), rows)
    assert is_shown(found) and found.n == 29


def test_the_questions_on_one_context_are_one_sample() -> None:
    """Eight answers on each of four contexts are four samples, of which no difference can be shown."""
    rows = answers("pqcache", [1.0] * 4, per_sample=8) + answers("kvzip", [0.0] * 4, per_sample=8)
    (found,) = outcomes(register(4, DIFFERENCE), rows)
    assert found.n == 4 and found.found is not None
    assert found.found.paired.p == pytest.approx(2 / 2**4) and not is_shown(found)


def test_p_counts_the_comparisons_that_are_not_made_yet() -> None:
    rows = answers("pqcache", [1.0] * 12) + answers("kvzip", [0.0] * 12)
    waiting = [DIFFERENCE | {"other": "snapkv"}] * 9
    alone, *_ = outcomes(register(12, DIFFERENCE), rows)
    among, *_ = outcomes(register(12, DIFFERENCE, *waiting), rows)
    assert alone.found is not None and among.found is not None
    assert among.found.paired.p == alone.found.paired.p == pytest.approx(2 / 2**12)
    assert among.found.p == pytest.approx(10 * alone.found.p)


@pytest.mark.parametrize("seed", range(6))
def test_within_a_margin_is_shown_where_the_interval_ends_above_it(seed: int) -> None:
    rng = random.Random(seed)
    full = [rng.random() for _ in range(120)]
    less = [min(1.0, max(0.0, x - rng.uniform(0.0, 0.16) * (seed / 3))) for x in full]
    (found,) = outcomes(register(120, WITHIN), answers("full", full) + answers("pqcache", less))
    spread = interval([a - b for a, b in zip(less, full, strict=True)], (-1.0, 1.0))
    assert spread is not None and is_shown(found) is (spread.low > -0.05)


@pytest.mark.slow
def test_a_loss_as_large_as_the_margin_is_seldom_called_within_it() -> None:
    """Of data whose true mean loss is the margin, 2.5 % at most may be called within."""
    rng, n_called = random.Random(3), 0
    for _ in range(200):
        losses = [1.0 if rng.random() < 0.05 else 0.0 for _ in range(150)]
        rows = answers("full", [1.0] * 150) + answers("pqcache", [1 - x for x in losses])
        n_called += is_shown(outcomes(register(150, WITHIN), rows)[0])
    assert n_called <= 10


def test_a_hidden_question_is_compared_with_the_same_method_where_it_is_shown() -> None:
    one = Comparison("docs", HIDDEN, "kvzip", "shown", memory="1/4", asks="margin")
    assert one.places == (((HIDDEN, "memory 0.25"), "kvzip"), ((SHOWN, "memory 0.25"), "kvzip"))
    assert replace(one, memory="", tokens=96).at.asked == "96 tokens"


# --- reading -------------------------------------------------------------------------------------


CONFIG = {
    "method": {"name": "quest", "params": {}},
    "task": {"name": "longbench", "params": {"datasets": ["docs_qa"]}},
    "model": {"name": "qwen2.5-coder-0.5b"},
    "seed": 0, "memory": "0.25", "comm": None, "offset": 100, "limit": 20, "compression_scope": "context_only",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, True),
        ({"offset": 90}, False),  # samples that were known
        ({"offset": 290}, False),  # samples behind the last
        ({"comm": "1/64"}, False),  # a second budget
        ({"seed": 1}, False),
        ({"model": {"name": "smollm2-135m"}}, False),
        ({"task": {"name": "longbench", "params": {"datasets": ["docs_qa"], "questions": 8}}}, False),
    ],
)
def test_a_set_takes_the_answers_that_the_register_names(changed: dict[str, Any], is_taken: bool) -> None:
    assert page("register").sets["docs"].has(CONFIG | changed) is is_taken


# --- the page, by other means --------------------------------------------------------------------


def kept(name: str) -> dict[Place, dict[str, float]]:
    """Mean score by cluster, of a committed file."""
    found: dict[Place, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(DOCS / name / KEPT, "rt", newline="") as file:
        for row in csv.DictReader(file):
            found[row["set"], row["protocol"], row["asked"], row["method"]][row["sample"]].append(float(row["score"]))
    return {at: {c: sum(x) / len(x) for c, x in by.items()} for at, by in found.items()}


def flips(differences: list[float], n: int = 20_000) -> float:
    """A sign-flip p-value by plain drawing."""
    rng, seen = random.Random(11), abs(sum(differences))
    some = [x for x in differences if x]
    hits = sum(abs(sum(x if rng.random() < 0.5 else -x for x in some)) >= seen - 1e-9 for _ in range(n))
    return (hits + 1) / (n + 1)


def gaffke(values: list[float], bound: float, n: int = 20_000) -> list[float]:
    """Means under drawn flat weights, one more sample at the bound."""
    rng, found = random.Random(7), []
    for _ in range(n):
        weights = [rng.expovariate(1) for _ in range(len(values) + 1)]
        found.append(sum(w * x for w, x in zip(weights, [*values, bound], strict=True)) / sum(weights))
    return sorted(found)


def rows_of_page() -> list[list[str]]:
    lines = (DOCS / "register.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[: len(comparisons())]]


def comparisons() -> list[dict[str, Any]]:
    return yaml.safe_load((DOCS / "register.yaml").read_text())["comparisons"]


@pytest.mark.parametrize("place", range(len(comparisons())))
def test_a_comparison_is_recomputed_from_the_scores_file(place: int) -> None:
    """Difference, interval and p of a line of the page; of one that is not made, that samples are missing."""
    one, said, scores = comparisons()[place], rows_of_page()[place], kept("register")
    first, last = yaml.safe_load((DOCS / "register.yaml").read_text())["sets"][one["set"]]["samples"]
    shares = {"1/4": "memory 0.25", "1/8": "memory 1/8", "1/16": "memory 1/16"}
    budget = f"{one['tokens']} tokens" if "tokens" in one else shares[one["memory"]]
    ours = scores.get((one["set"], one["scope"], budget, one["one"]), {})
    if one["other"] == "shown":
        theirs = scores.get((one["set"], "full_prompt", budget, one["one"]), {})
    else:
        theirs = scores.get((one["set"], one["scope"], "" if one["other"] == "full" else budget, one["other"]), {})
    both = sorted(ours.keys() & theirs.keys())
    assert said[2] == f"{len(both)} of {last - first}"
    if len(both) < last - first:
        assert said[3:] == ["-", "-", "-", "not yet"]
        return
    differences = [ours[c] - theirs[c] for c in both]
    numbers = [float(x) for x in re.findall(r"[+-]?\d+(?:\.\d+)?", said[3])]
    assert numbers[0] == pytest.approx(100 * sum(differences) / len(both), abs=0.051)
    low, high = gaffke(differences, -1.0), gaffke([-x for x in differences], -1.0)
    ends = 100 * low[len(low) // 40], -100 * high[len(high) // 40]
    assert (
        numbers[1] <= ends[0] + 1.1 and numbers[2] >= ends[1] - 1.1
    )  # the page's is widened where the test is not sure
    if one["asks"] == "difference":
        p = flips(differences)
    else:
        p = min(1.0, 2 * sum(x <= -0.05 for x in low) / len(low))
    found = said[4].replace("&lt; ", "")
    assert float(found) == pytest.approx(p, rel=0.35, abs=0.004)
    assert float(said[5].replace("&lt; ", "")) >= float(found) and said[6] in ("yes", "no")


@pytest.mark.parametrize("key", page("register").sets)
def test_the_experiment_of_a_set_asks_its_samples(key: str) -> None:
    """Every run of a set's experiment is taken, and every method that it is compared by is asked."""
    of = page("register").sets[key]
    configs = [composed(cell).resolved() for cell in cells(f"experiment={of.experiment}")]
    taken = [config for config in configs if of.has(config)]
    assert len(taken) == len(configs)
    methods = {config["method"]["name"] for config in taken}
    wanted = {name for one in page("register").comparisons if one.set == key for name in (one.one, one.other)}
    assert wanted - {"shown"} <= methods
