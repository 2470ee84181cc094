"""Our scorers against the official scores in `golden/metrics`: one function per file.

Not here: the files themselves (`$KVBENCH_GOLDEN`, or the folder shared/golden beside the
repository), which are no part of the project.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from evals import needle

TOLERANCE = 1e-9


def metrics_folder() -> Path:
    """Where the check vectors are, whether or not they exist."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "golden"
    return Path(os.environ.get("KVBENCH_GOLDEN") or beside) / "metrics"


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
