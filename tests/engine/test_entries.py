import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine.books.ledger import Entry, Ledger, footprint, share_of_full, triangle
from kvbench.engine.budget import Budget, Fraction
from kvbench.engine.shapes import ModelShape
from kvbench.methods.decoding.schedule import Schedule
from kvbench.tests.vectors import Check, differs, first

GOLDEN = Path(__file__).parents[1] / "golden" / "decode_time" / "prulong_footprint.json"
MARGIN = 64  # entries that PruLong keeps of a chunk beside its share


def run_vectors(path: Path) -> list[Check]:
    """PruLong's evaluation: heads that keep a share of every chunk, and heads with sinks and a window."""
    return [(f"{path.stem} {i}", check(case)) for i, case in enumerate(json.loads(path.read_text()))]


def check(case: dict[str, Any]) -> str | None:
    s, r, local = case["prompt"], case["response"], case["head_sparsity"]
    window, sparsity = case["window"] + case["sinks"], case["kv_sparsity"]
    chunks = [min(case["chunk"], s - start) for start in range(0, s, case["chunk"])]
    wide, narrow, kept, seen = [], [], 0, 0  # entries of each query, of either kind of head
    for chunk in chunks:
        wide += [kept + i + 1 for i in range(chunk)]
        narrow += [min(seen, window) + i + 1 for i in range(chunk)]
        kept += min(round((1 - sparsity) * chunk) + MARGIN, chunk)
        seen += chunk
    steps_wide = [kept + t for t in range(1, r + 1)]
    steps_narrow = [min(s + t - 1, window) + 1 for t in range(1, r + 1)]
    shares = [
        share_of_full(footprint(s, steps, sum(queries)), s, r)
        for queries, steps in ((wide, steps_wide), (narrow, steps_narrow))
    ]
    both = (1 - local) * shares[0] + local * shares[1]
    means = [(1 - local) * a + local * b for a, b in zip([*wide, *steps_wide], [*narrow, *steps_narrow], strict=True)]
    peak = max(means) / (s + r)
    return first(differs("footprint", both, case["footprint"], 1e-12), differs("peak", peak, case["peak"], 1e-12))


def test_footprints_agree_with_prulong() -> None:
    assert [problem for _, problem in run_vectors(GOLDEN) if problem] == []


def decoded(s: int, r: int, schedule: Schedule | None) -> list[int]:
    """Entries that each step attends to."""
    n, steps = s, []
    for p in range(s, s + r):
        n += 1
        steps.append(n)
        if schedule is not None and schedule.is_due(n, p + 1, s):
            n = schedule.target
    return steps


# The page's worked example: a prompt of 200 tokens, an interval of 128.
@pytest.mark.parametrize(
    ("target", "interval", "r", "mean", "peak", "entries", "own"),
    [
        (None, 128, 3000, 1700.5, 3200, 5_121_600, 1.0),
        (1024, 128, 3000, 957.7, 1152, 2_893_249, 0.565),
        (512, 128, 3000, 553.6, 640, 1_680_833, 0.328),
        (512, 128, 4200, 559.7, 640, 2_370_793, 0.245),
        (512, 1, 3000, 496.7, 513, 1_510_272, 0.295),
    ],
)
def test_the_worked_example(
    target: int | None, interval: int, r: int, mean: float, peak: int, entries: int, own: float
) -> None:
    steps = decoded(200, r, None if target is None else Schedule(target, interval))
    assert round(sum(steps) / r, 1) == mean and max(steps) == peak
    assert footprint(200, steps) == entries
    assert round(share_of_full(entries, 200, r), 3) == own


def test_the_ledger_says_what_an_answer_cost() -> None:
    shape = ModelShape("two layers", 2, 4, 2, 8, 100, (0, 1))
    ledger = Ledger()
    for step, n in enumerate([11, 12, 7], 1):
        for layer, attended in enumerate((n * 4, (n - 2) * 4)):
            ledger.written.append(Entry(step, layer, 10 + step, attended, *[0] * 11))
    budget = Budget(10, 12, 11, Fraction(0), Fraction(1), counts="target", most=14)
    costs = ledger.summary(budget, shape)
    assert costs["peak_entries"] == 11
    assert costs["footprint_entries"] == triangle(10) + 10 + 11 + 6
    assert costs["footprint_entries"] is not None
    assert costs["footprint"] == costs["footprint_entries"] / triangle(13)
    assert costs["reached_steps"] == 1 / 3
