"""A true submission of a tiny model's runs, which tests forge and hand in."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.evals.runner import run_cells
from kvbench.evals.settings import from_words
from kvbench.evals.submission import frozen
from kvbench.evals.submit import submit
from kvbench.tests.tiny_run import example_file, save_tiny

VARIANTS = (("full", "0.3"), ("snapkv", "0.3"), ("quest", "0.5"), ("streamingllm", "0.5"))


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="session")
def true(tmp_path_factory: pytest.TempPathFactory, registry: Path) -> Path:
    """A submission of honest runs, and the benchmark that they answer."""
    root = tmp_path_factory.mktemp("true")
    words = [
        "task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[10,50,90]", "comm=1/8",
        "model=any", f"model.id={save_tiny(root / 'model')}", "model.name=tiny",
    ]  # fmt: skip
    mine = example_file(root / "mine")
    variants = [[f"method={method}", f"ratio={ratio}"] for method, ratio in (*VARIANTS, (str(mine), "0.4"))]
    words += ["dtype=float32", "device=cpu"]
    asked = [from_words([*words, *variant, f"out={root / 'runs'}"]) for variant in variants]
    run_cells([replace(one, is_sweep=True) for one in asked])
    frozen.write(words, registry)
    submit([root / "runs"], root / "handed-in", submitter="us", licence="CC0-1.0", methods=[mine])
    return root / "handed-in"
