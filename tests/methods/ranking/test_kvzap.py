from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.engine.errors import ConfigError
from kvbench.evals.cells import ask
from kvbench.evals.settings import from_words
from kvbench.methods.gates.networks import kvzap
from kvbench.tests.conformance import answers, model, ours
from kvbench.tests.methods.ranking.test_dms import kept_vectors
from kvbench.tests.vectors import Check, differs, first, load, request

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "kvzap").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """Numbers of the gate, and what stays by its threshold."""
    meta, x = load(path)
    names = ("weight", "bias") if meta["hidden"] is None else ("0.weight", "0.bias", "2.weight", "2.bias")
    own = {name: torch.from_numpy(x[f"w_{name.replace('.', '_')}"]) for name in names}
    score = differs("score", kvzap(torch.from_numpy(x["x"][0]), own)[None], x["score"], 1e-5)
    return [(path.stem, first(score, kept_vectors(path)))]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_kvzap_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


@pytest.mark.parametrize("settings", [["method.alpha=1"], ["method.window=0"], []])
def test_it_answers_alone_as_beside_others(settings: list[str]) -> None:
    one, other = ours("kvzap", "method.gate=drawn", "method.window=8", *settings), ours("snapkv")
    made = [each.kind.variant_for(each.params, request("0.3"), model().shape, 240) for each in (one, other)]
    alone, together = answers(made[:1])[0], answers(made)[0]
    assert alone.ids == together.ids
    assert alone.row.report()["gate"] == "drawn"
    counts = [alone.row.store[layer].kept_counts() for layer in model().shape.attention_layers]
    assert np.mean(counts) == 72


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method.gate=nowhere.safetensors"], "cannot be read"),
        (["method.gate=''"], "method.gate is empty"),
        (["method.gate=drawn", "method.alpha=2"], "alpha=2 is out of range"),
        (["method.gate=drawn", "method.window=-1"], "method.window=-1 is out of range"),
    ],
)
def test_what_it_refuses(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask([from_words(["method=kvzap", "task=needle", *words])])
