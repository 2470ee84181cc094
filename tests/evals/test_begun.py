"""A run goes on with the same checkpoint, whatever the environment wrote into it."""

import json
from pathlib import Path

import pytest

from kvbench.evals.runner import run_cells
from kvbench.tests.tiny_run import cell, save_tiny

WORDS = (
    "method=full", "task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[50]",
    "task.max_new_tokens=4",
)  # fmt: skip


def test_a_run_begun_offline_goes_on_online_and_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers notes in tokenizer_config.json whether it was offline when it saved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    model = save_tiny(tmp_path / "checkpoint")
    file = model / "tokenizer_config.json"
    plain = json.loads(file.read_text())
    words = [*WORDS, "model=any", f"model.id={model}"]

    def run(offline: bool) -> Path:
        file.write_text(json.dumps(plain | {"local_files_only": offline}))
        ((folder, result),) = run_cells([cell(words, tmp_path / "runs", is_sweep=True)])
        assert result.status == "ok"
        return folder

    begun_offline = run(True)
    before = (begun_offline / "samples.jsonl").stat().st_mtime_ns
    assert run(False) == begun_offline
    assert (begun_offline / "samples.jsonl").stat().st_mtime_ns == before
