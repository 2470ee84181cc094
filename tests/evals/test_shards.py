"""Samples asked by several workers leave what one process leaves, whoever dies on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.engine.errors import ConfigError
from kvbench.evals import prepare, runner, shards, write
from kvbench.evals.settings import RayPool, Settings
from kvbench.evals.shards import Ended, Shard, Tail, ask_shard
from kvbench.results import RunResult, read_runs, read_samples
from kvbench.tests.tiny_run import cell, save_tiny

ROOT = Path(__file__).resolve().parents[2]
POOL = RayPool(None, 3, 1, Fraction(0), 1)
TASK = [
    *("task=needle", "task.source=embedded", "task.lengths=[400,500]", "task.max_new_tokens=6"),
    "task.depths=[0,50,100]",
]
VARIANTS = ("full", "snapkv", "oracle")
TIMES = {"prefill_s", "decode_s", "tpot_s", "batch_rows"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def cells(model: Path, tmp_path: Path) -> Callable[[str], list[Settings]]:
    def make(out: str) -> list[Settings]:
        words = [*TASK, "model=any", f"model.id={model}", "ratio=0.3"]
        return [cell([*words, f"method={name}"], tmp_path / out, True) for name in VARIANTS]

    return make


def told(folder: Path) -> dict[str, Any]:
    """All that runs below a folder say, times apart."""
    found = {}
    for path, result in read_runs(folder):
        rows = [row.to_dict() for row in read_samples(path)]
        lines = [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
        ledger = pd.read_parquet(path / "ledger.parquet").to_dict("list")
        found[path.name] = (lines, ledger, result.score, result.score_ci95)
        assert not (path / "shards").exists()
    return found


def use(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """In place of Ray and Slurm."""
    monkeypatch.setattr(shards, "runner", lambda pool: run)
    monkeypatch.setattr(runner, "check_pool", lambda cells: None)


def run_on_pool(cells: list[Settings]) -> list[tuple[Path, RunResult]]:
    return runner.run_cells([replace(one, pool=POOL) for one in cells])


def backwards(waiting: Sequence[Shard], look: Callable[[], None]) -> Iterator[Ended]:
    """The last shard comes first."""
    for shard in reversed(waiting):
        refusal = ask_shard(shard)
        look()
        yield shard, refusal


def test_shards_leave_what_one_process_leaves(
    cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.run_cells(cells("alone"))
    asked: list[Shard] = []

    def noting(waiting: Sequence[Shard], look: Callable[[], None]) -> Iterator[Ended]:
        asked.extend(waiting)
        yield from backwards(waiting, look)

    use(monkeypatch, noting)
    capsys.readouterr()
    run_on_pool(cells("shards"))
    assert told(tmp_path / "shards") == told(tmp_path / "alone")
    assert [len(shard.samples) for shard in asked] == [2, 2, 2]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("1 group in")]
    assert len(said) == 6  # each sample is seen once
    monkeypatch.setattr(prepare, "tokenizer_of", lambda *_, **__: pytest.fail("loaded again"))
    run_on_pool(cells("shards"))
    assert len(asked) == 3


def test_a_lost_worker_and_a_killed_command_leave_what_they_answered(
    cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies behind its first sample, the command with it; another command takes that sample over."""
    runner.run_cells(cells("alone"))
    keep, answered = write.Writer.write, []

    class Killed(BaseException):
        pass

    def dying(self: Any, one: Any, given: Any) -> None:
        if len(answered) == len(VARIANTS) + 1:
            raise Killed
        keep(self, one, given)
        answered.append((given.cell.path, one.sample.id))

    with monkeypatch.context() as patch:
        patch.setattr(write.Writer, "write", dying)
        use(patch, backwards)
        with pytest.raises(Killed):
            run_on_pool(cells("shards"))
    assert len(list((tmp_path / "shards").rglob("shards/*/samples.jsonl"))) == len(VARIANTS)
    again: list[str] = []

    def noting(self: Any, one: Any, given: Any) -> None:
        again.append(f"{given.cell.settings.method.name} {one.sample.id}")
        keep(self, one, given)

    monkeypatch.setattr(write.Writer, "write", noting)
    runner.run_cells(cells("shards"))  # in one process this time
    assert told(tmp_path / "shards") == told(tmp_path / "alone")
    assert len(again) == len(set(again)) == len(VARIANTS) * 6 - len(answered)


def test_a_retried_shard_asks_only_what_is_missing(cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.run_cells(cells("alone"))
    keep, kept = write.Writer.write, []

    def failing_once(self: Any, one: Any, given: Any) -> None:
        if len(kept) == len(VARIANTS):
            kept.append("")
            raise RuntimeError("the worker is gone")
        keep(self, one, given)
        kept.append(one.sample.id)

    def retrying(waiting: Sequence[Shard], look: Callable[[], None]) -> Iterator[Ended]:
        for shard in waiting:
            try:
                yield shard, ask_shard(shard)
            except RuntimeError:
                yield shard, ask_shard(shard)

    monkeypatch.setattr(write.Writer, "write", failing_once)
    use(monkeypatch, retrying)
    run_on_pool(cells("shards"))
    assert told(tmp_path / "shards") == told(tmp_path / "alone")
    assert len([id for id in kept if id]) == len(VARIANTS) * 6


def test_what_a_worker_refuses_ends_the_command_in_one_sentence(
    cells: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(waiting: Sequence[Shard], look: Callable[[], None]) -> Iterator[Ended]:
        yield waiting[0], ask_shard(replace(waiting[0], cwd=tmp_path / "nowhere"))

    use(monkeypatch, elsewhere)
    with pytest.raises(ConfigError, match="must share the file system"):
        run_on_pool(cells("shards"))

    def other_data(waiting: Sequence[Shard], look: Callable[[], None]) -> Iterator[Ended]:
        yield waiting[0], ask_shard(replace(waiting[0], samples=((0, "another"),)))

    use(monkeypatch, other_data)
    with pytest.raises(ConfigError, match="must read the same data"):
        run_on_pool(cells("shards"))


def test_tasks_that_take_times_are_not_spread(model: Path, tmp_path: Path) -> None:
    words = ["task=latency", "model=any", f"model.id={model}", "method=full"]
    words += ["task.lengths=[300]", "task.n_new=4"]
    one = cell(words, tmp_path / "times")
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with pytest.raises(ConfigError, match="use hydra/launcher=fused"):
        run_on_pool([one])


def test_a_missing_package_is_named(cells: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="hydra/launcher=ray needs the package ray"):
        run_on_pool(cells("none"))


def test_only_whole_lines_are_read_of_a_file_that_grows(cells: Any, tmp_path: Path) -> None:
    ((folder, _), *_) = runner.run_cells(cells("alone")[:1])
    content, path = (folder / "samples.jsonl").read_bytes(), tmp_path / "growing"
    tail, seen, middle = Tail(path), [], len(content) // 2
    assert tail.rows() == []
    for end in (10, middle, middle + 1, len(content)):
        path.write_bytes(content[:end])
        seen += tail.rows()
    assert seen == read_samples(folder)


# --- with what runs workers for real ---

MANY = "task.depths=[0,10,20,30,40,50,60,70,80,90,95,100]"


def command(model: Path, out: Path, *words: str) -> list[str]:
    return [
        sys.executable, str(ROOT / "run.py"), "-m", f"model={model}", "dtype=float32", "device=cpu", f"out={out}",
        *TASK[:-1], MANY, f"method={','.join(VARIANTS)}", "ratio=0.1,0.3", *words,
    ]  # fmt: skip


def kill_a_worker(process: subprocess.Popen[bytes], out: Path) -> int:
    """`kill -9` to the first worker that has answered a sample: its process id."""
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        for file in out.glob("*/shards/*/samples.jsonl"):
            if file.read_bytes().count(b"\n"):
                pid = json.loads((file.parent / ".lock.holder").read_text())["pid"]
                assert pid not in (process.pid, os.getpid())
                os.kill(pid, signal.SIGKILL)
                return pid
        time.sleep(0.002)
    raise AssertionError("no worker answered anything")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("ray", ["hydra/launcher=ray"]),
        ("submitit", ["hydra/launcher=submitit_slurm", "hydra.launcher.cluster=local"]),
    ],
)
def test_a_killed_worker_changes_nothing(package: str, words: list[str], model: Path, tmp_path: Path) -> None:
    """Two workers on this machine, one of them killed in its work."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    subprocess.run(command(model, tmp_path / "alone"), check=True, capture_output=True)
    if package == "submitit":
        words = [*words, f"hydra.launcher.folder={tmp_path / 'logs'}", "hydra.launcher.cpus=1"]
    out = tmp_path / "shards"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command(model, out, *words, "hydra.launcher.shards=2"), stdout=log, stderr=log)
        killed = kill_a_worker(process, out)
        assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    assert told(out) == told(tmp_path / "alone")
    assert len(told(out)) == 2 * (len(VARIANTS) - 1) + 1, "full attention runs once, whatever the ratio"
    assert not Path(f"/proc/{killed}").exists()
