"""Runs recorded when large files were known by their ends go on, unless the checkpoint was written to since."""

import json
import shutil
from pathlib import Path

import pytest

from engine.checkpoints import digests
from engine.errors import ConfigError
from evals import models
from evals.runner import run_cells
from tests.tiny_run import cell, save_tiny

WORDS = (
    "method=full", "task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[50]",
    "task.max_new_tokens=4",
)  # fmt: skip


@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_run_of_before_goes_on_only_with_the_checkpoint_of_before(
    is_sweep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    monkeypatch.setattr(digests, "END", 16)
    model = save_tiny(tmp_path / "checkpoint")
    words = [*WORDS, "model=any", f"model.id={model}"]

    def run() -> Path:
        ((folder, result),) = run_cells([cell(words, tmp_path / "run", is_sweep)])
        assert result.status == "ok"
        return folder

    with monkeypatch.context() as patch:
        patch.setattr(models, "digests_of", lambda where, _: (digests.first_digest_of(where),))
        folder = run()
    first = digests.first_digest_of(str(model))
    assert first in (folder / "config.yaml").read_text()
    before = (folder / "samples.jsonl").stat().st_mtime_ns
    assert run() == folder
    assert (folder / "samples.jsonl").stat().st_mtime_ns == before

    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1000, 2)
        file.write(b"\x00")
    assert digests.first_digest_of(str(model)) == first  # the ends have not changed
    if is_sweep:
        assert run() != folder
    else:
        with pytest.raises(ConfigError, match="another model_digest"):
            run()


def test_a_run_begun_offline_goes_on_online_and_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers notes in tokenizer_config.json whether it was offline when it saved; raw contents were hashed."""
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

    with monkeypatch.context() as patch:
        patch.setattr(models, "digests_of", lambda where, _: (digests.first_digest_of(where),))
        begun_offline = run(True)
    before = (begun_offline / "samples.jsonl").stat().st_mtime_ns
    assert run(False) == run(True) == begun_offline
    assert (begun_offline / "samples.jsonl").stat().st_mtime_ns == before
    shutil.rmtree(begun_offline)
    assert run(True) == run(False) != begun_offline
