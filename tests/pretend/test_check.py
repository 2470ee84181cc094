"""What a result says of the Triton that made it."""

from importlib.metadata import version
from pathlib import Path

import pytest

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.checkpoints import packages
from kvbench.tests.tiny_run import run, save_tiny


@pytest.mark.parametrize(("device", "says"), [("cuda", 1), ("cpu", 0)])
def test_a_result_says_that_its_triton_was_not_tried(
    device: str, says: int, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packages, "version", lambda name: "3.9.0" if name == "triton" else version(name))
    words = ["model=any", f"model.id={save_tiny(tmp_path / 'tiny')}", "model.name=tiny", "method=full", "task=fidelity"]
    result, _ = run([*words, "task.prompt_tokens=16", "task.windows=1", "task.steps=4"], tmp_path / "out", device)
    assert sum("triton 3.9.0 is installed, and KVBench asks for" in note for note in result.notes) == says
