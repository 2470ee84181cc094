"""A model divided among two pretended GPUs, by accelerate: the answers and the books of one device."""

import copy
from pathlib import Path

import pytest
import torch

from kvbench.benchmarks.launches import BUDGETS
from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.checkpoints.load import made
from kvbench.engine.checkpoints.placement import on_gpus, spread
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import PRESETS, answer, on_cpu
from kvbench.tests.pretend.test_tasks import TASKS
from kvbench.tests.tiny_run import run, save_tiny

QUICK = ("full", "xkv", "pyramidinfer", "kvzip", "triattention")  # three of them work across layers


def divided(model: Model, how: str = "balanced") -> Model:
    hf = copy.deepcopy(model.hf)
    spread(hf, how, model.dtype)
    return made(hf, model.tokenizer, model.shape, model.dtype, model.digest)


def test_layers_lie_on_both(machine: Machine) -> None:
    model = divided(conformance.model())
    assert {*model.layer_devices} == {torch.device("cuda", 0), torch.device("cuda", 1)}
    assert model.device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*BUDGETS, *PRESETS)]
)
def test_it_answers_as_on_one(machine: Machine, name: str) -> None:
    model = divided(conformance.model())
    assert answer(model, name) == on_cpu(name)


def test_a_model_that_fits_no_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_map=auto finds no room .* model.layers.3 and 1 other"):
        on_gpus({"model.layers.0": 0, "model.layers.3": "cpu", "lm_head": "disk"}, "auto")


@pytest.mark.parametrize("weights", ["trained", "random"])
def test_a_run_divides_its_model(machine: Machine, tmp_path: Path, weights: str) -> None:
    """Through the same door as run.py; weights are loaded where they belong."""
    folder = save_tiny(tmp_path / "tiny")
    words = ["model=any", f"model.id={folder}", "method=oracle", "ratio=0.5", f"weights={weights}"]
    words += ["task=latency", *TASKS["latency"]] if weights == "random" else ["task=needle", *TASKS["needle"]]
    (_, (there,)) = run([*words, "device_map=balanced"], tmp_path / "there", "cuda")
    (_, (here,)) = run(words, tmp_path / "here", "cpu")
    assert there.status == "ok", there.error
    assert there.ledger == here.ledger
    if weights == "trained":
        assert there.prediction == here.prediction
