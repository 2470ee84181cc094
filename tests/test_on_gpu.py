"""What a GPU has to agree to, `make test-gpu`: about five minutes. `tests/pretend` runs the same without one."""

from pathlib import Path

import pytest
import torch

from kvbench.benchmarks.gpu import __main__ as script
from kvbench.benchmarks.gpu import models
from kvbench.benchmarks.launches import config_of
from kvbench.engine.checkpoints.load import load_random
from kvbench.engine.decode import decode
from kvbench.engine.prefill import prefill
from kvbench.methods.full import Full
from kvbench.tests.vectors import built, row_for

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "RESULTS", tmp_path / "gpu.csv")


@pytest.mark.parametrize("name", models.ALL)
def test_a_method_says_what_it_says_on_a_cpu(name: str) -> None:
    (result,) = models.agreement(torch.device("cuda"), [name])
    assert result.ok, (result.error, result.note)


def test_every_kernel_agrees_at_real_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--only", "copies", "kernels"]) == 0, capsys.readouterr().out


def test_a_step_is_captured_and_replayed() -> None:
    model = load_random("small", config_of(3), dtype="bfloat16", device="cuda")
    with model.hooked():
        trace = prefill(model, [i % 250 for i in range(320)])
        row = built(row_for(Full, Full.Params(), script.models.EVERYTHING, trace, 20))
        done = decode(model, trace, [row], max_new_tokens=20)
    assert done.why_no_graphs is None and (done.by_graphs or 0) >= 10


def test_a_short_sweep_runs_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--small", "--only", "methods", "sweep", "--methods", "full", "snapkv", "quest", "pqcache"]
    assert script.main([*words, "--lengths", "2048", "4096"]) == 0
    shown = capsys.readouterr().out
    assert "sweep against Full alone" in shown and "oom" not in shown
