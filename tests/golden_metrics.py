"""Our scorers against the official scores in `golden/metrics`: one function per file.

Not here: the files themselves (`$KVBENCH_GOLDEN`, or the folder shared/golden beside the
repository), which are no part of the project.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.tasks.needle import task as needle
from kvbench.tasks.ruler import task as ruler

TOLERANCE = 1e-9


def metrics_folder() -> Path:
    """Where the check vectors are, whether or not they exist."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "golden"
    return Path(os.environ.get("KVBENCH_GOLDEN") or beside) / "metrics"


def metrics_3(name: str) -> Path:
    """A file of the newer cases; a test that asks for one is skipped where there are none."""
    path = metrics_folder().with_name("metrics_3") / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path


def run_needle(path: Path) -> list[tuple[str, str | None]]:
    """Each score in needle_ruler.json's `needle_scores`: its name, and what differs or None."""
    data = json.loads(path.read_text(encoding="utf-8"))
    checks: dict[str, tuple[Callable[[str, str], float], str]] = {
        "keyword_recall": (needle.keyword_recall, data["expected_answer"]),
        "substring": (needle.exact, data["expected_answer"]),
        "rouge1_f": (needle.rouge1_f, data["needle"]),
        "rouge1_recall": (needle.rouge1_recall, data["needle"]),
    }
    results: list[tuple[str, str | None]] = []
    for i, case in enumerate(data["needle_scores"]):
        for name, (scorer, reference) in checks.items():
            ours, official = scorer(case["response"], reference), case[name]
            is_same = abs(ours - official) <= TOLERANCE
            difference = None if is_same else f"{ours} instead of {official}"
            results.append((f"needle_scores[{i}].{name}", difference))
    return results


def run_ruler(path: Path) -> list[tuple[str, str | None]]:
    """Each row in needle_ruler.json's `ruler`: the cleaned text, both scores, and both means over all rows."""
    data = json.loads(path.read_text(encoding="utf-8"))
    results: list[tuple[str, str | None]] = []
    matches = {"all": ruler.match_all, "part": ruler.match_part}
    scores: dict[str, list[float]] = {name: [] for name in matches}
    for i, case in enumerate(data["ruler"]):
        text = ruler.cleaned(case["prediction"])
        is_same = text == case["postprocessed"]
        difference = None if is_same else f"{text!r} instead of {case['postprocessed']!r}"
        results.append((f"ruler[{i}].postprocessed", difference))
        for name, match in matches.items():
            scores[name].append(match(text, case["references"]))
            ours, official = ruler.percent(scores[name][-1:]), case[name]
            difference = None if ours == official else f"{ours} instead of {official}"
            results.append((f"ruler[{i}].{name}", difference))
    for name, official in data["ruler_aggregate"].items():
        ours = ruler.percent(scores[name])
        difference = None if ours == official else f"{ours} instead of {official}"
        results.append((f"ruler_aggregate.{name}", difference))
    return results


def run_needle_ruler(path: Path) -> list[tuple[str, str | None]]:
    """All of needle_ruler.json."""
    return run_needle(path) + run_ruler(path)
