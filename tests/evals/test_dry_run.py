"""A dry run says samples, tokens and time, refuses what a run refuses, and loads no weights."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench import run
from kvbench.engine import machine
from kvbench.engine.shapes import ModelShape
from kvbench.evals.screen import roofline
from kvbench.evals.studies.hardware import Layers, read_hardware
from kvbench.tests.tiny_run import save_tiny

SWEEP = ["-m", "task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[0,100]", "ratio=0.6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_it_says_samples_tokens_and_time_and_loads_no_weights(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.evals.models.load_model", lambda settings: pytest.fail("weights were loaded"))
    words = [*SWEEP, "method=full,snapkv", "model=any", f"model.id={model}", f"out={tmp_path / 'out'}"]
    assert run.main([*words, "--dry-run", "hardware=h100"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"needle full,snapkv: 2 samples, ([\d,]+) tokens to read \((\d+) at most\)", said)
    assert found is not None and int(found[1].replace(",", "")) <= 2 * int(found[2]) <= 2 * 400
    assert "on H100, PCIe 5.0 x16" in said and "no weights were loaded" in said
    assert not (tmp_path / "out").exists()


def test_it_says_what_is_left_of_a_run_that_was_stopped(model: Path, tmp_path: Path, capsys: Any) -> None:
    words = [*SWEEP, "method=snapkv", "model=any", f"model.id={model}", f"out={tmp_path / 'out'}", "dtype=float32"]
    assert run.main(words) == 0
    (folder,) = (tmp_path / "out").iterdir()
    (folder / "result.json").unlink()
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    for kept, says in ((lines, "every sample is answered"), (lines[:1], "1 of 2 samples left, ")):
        (folder / "samples.jsonl").write_bytes(b"".join(kept))
        capsys.readouterr()
        assert run.main([*words, "--dry-run", "hardware=h100"]) == 0
        assert f"needle snapkv: {says}" in capsys.readouterr().out


def test_a_model_whose_weights_are_drawn_needs_no_hub(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.engine.checkpoints.load.hub_config", lambda *_: pytest.fail("the hub was asked"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ["model=llama-3.1-8b", "weights=random", "method=snapkv", "task=latency", "limit=1", "dtype=bfloat16"]
    assert run.main([*words, "--dry-run", "hardware=h100", f"out={tmp_path}"]) == 0
    assert "latency snapkv: 1 sample, " in capsys.readouterr().out


def code(words: list[str]) -> int:
    """The exit code of a command line."""
    return run.main(words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["hardware=h1000"], "h100"),
        (["hardware=h100", "hardware=a100"], "give one"),
        (["method.window=0"], "method.window"),
    ],
)
def test_what_a_run_refuses_is_refused(model: Path, capsys: Any, more: list[str], words: str) -> None:
    assert code([*SWEEP, "method=snapkv", "model=any", f"model.id={model}", "--dry-run", *more]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_prompt_takes_the_products_of_its_tokens_and_a_step_the_reading_of_weights_and_caches() -> None:
    shape = ModelShape("small", n_layers=2, h=4, h_kv=2, d_h=8, window=4096, attention_layers=(0, 1))
    layers = Layers(shape, layer_weights=1000, head_weights=500, n_weights=3000)
    on = replace(read_hardware("laptop"), matrix_tflops=1e-6, share_matrix=1, memory_gb_s=1e-3, share_memory=1)
    assert roofline.read(layers, on, 100) == pytest.approx(
        2 * (2 * 1000 * 100 / 1e6 + 2 * 4 * 8 * 100**2 / 1e6) + 2 * 500 / 1e6
    )
    assert roofline.step(layers, on, 100, 3) == pytest.approx(2 * 2500 * 3 / 1e6 + 3 * 2 * 64 * 100 / 1e6)
    assert roofline.step(layers, on, 200, 3) > roofline.step(layers, on, 100, 3)


def test_threads_are_those_that_others_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user says how many there are to be, nothing is looked at."""
    load, used = tmp_path / "loadavg", list[int]()
    monkeypatch.setattr(machine, "LOAD", load)
    monkeypatch.setattr(machine, "PAUSE_S", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    load.write_text("3.9 2.0 1.0 3/256 4711\n")
    assert machine.leave_busy_cores() == "" and not used, "OMP_NUM_THREADS is set for tests"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert machine.leave_busy_cores().startswith("2 other threads run on the 4 cores of this machine: 2 threads here")
    load.write_text("9.0 9.0 9.0 12/256 4711\n")
    assert "one thread here" in machine.leave_busy_cores()
    load.write_text("0.0 0.0 0.0 1/256 4711\n")
    assert machine.leave_busy_cores() == ""
    load.unlink()
    assert machine.leave_busy_cores() == "", "a system that does not say it"
    assert used == [2, 1]
