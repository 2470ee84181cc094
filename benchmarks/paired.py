"""Paired timing: baseline and candidate alternate in one process, and their ratio is what counts.

Milliseconds depend on the machine and on who else uses it; ratios of neighbours in time much less. Each result goes as
a line into results.csv, with what it was measured on.

Not here: what is measured (`bench_*.py`).
"""

import csv
import os
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results.csv"
COMMIT = "KVBENCH_COMMIT"  # environment variable of a checkout without git


@dataclass(frozen=True)
class Paired:
    """Seconds of baseline and candidate, pair by pair."""

    baseline: list[float]
    candidate: list[float]

    def ratios(self) -> list[float]:
        return [c / b for b, c in zip(self.baseline, self.candidate, strict=True)]


def measure(baseline: Callable[[], float], candidate: Callable[[], float], n: int, warm_up: int = 1) -> Paired:
    """Run both `n` times in turns, each returning its own seconds; who is first changes from pair to pair."""
    for _ in range(warm_up):
        baseline()
        candidate()
    pairs = []
    for i in range(n):
        if i % 2:
            c, b = candidate(), baseline()
        else:
            b, c = baseline(), candidate()
        pairs.append((b, c))
    return Paired([b for b, _ in pairs], [c for _, c in pairs])


def quantile(values: list[float], q: float) -> float:
    """A quantile of a few numbers, between neighbours."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(q * 100) - 1]


def record(op: str, shape: str, dtype: str, pairs: Paired) -> None:
    """Print a result, and append it to results.csv."""
    ratios = pairs.ratios()
    row = {
        "op": op,
        "shape": shape,
        "dtype": dtype,
        "device": device_name(),
        "ratio": f"{statistics.median(ratios):.3f}",
        "ratio_q20": f"{quantile(ratios, 0.2):.3f}",
        "ratio_q80": f"{quantile(ratios, 0.8):.3f}",
        "baseline_ms": f"{statistics.median(pairs.baseline) * 1e3:.2f}",
        "candidate_ms": f"{statistics.median(pairs.candidate) * 1e3:.2f}",
        "pairs": len(ratios),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)
    print(
        f"{op} {shape} {dtype}: ratio {row['ratio']} ({row['ratio_q20']} to {row['ratio_q80']}), "
        f"{row['candidate_ms']} against {row['baseline_ms']} ms"
    )


def device_name() -> str:
    """The GPU, or the CPU and the threads that torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def commit() -> str:
    """The commit that was measured, with a mark where the code differs from it; "none" without git or a repository.

    A kit for machines without network says which commit it was packed with.
    """
    root = Path(__file__).parents[1]
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return "none"
    return done.stdout.strip() or "none"
