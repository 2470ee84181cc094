"""Whole runs on a pretended GPU: every kind of task, through the same door as run.py."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.benchmarks.launches import BUDGETS, OF_ANSWERS, OF_CODES, request_of
from kvbench.benchmarks.pretend.cuda import MEMORY, Machine
from kvbench.evals.studies.hardware import method_of
from kvbench.tasks import together
from kvbench.tests.tiny_run import run, save_tiny, sweep

TASKS = {
    "needle": ("task.source=embedded", "task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=4"),
    "longbench": ("task.source=embedded", "limit=1", "task.max_prompt_tokens=300", "task.max_new_tokens=4"),
    "fidelity": ("task.prompt_tokens=200", "task.windows=1", "task.steps=4"),
    "pg19": ("task.source=embedded", "task.lengths=[200]", "task.targets=4"),
    "latency": ("task.lengths=[200]", "task.n_new=4", "task.repeats=1", "task.warmup=0"),
}
FITTED = {  # to a small model with a short window
    "infllm": ["method.block_len=16"],
    "duo_attention": ["method.heads=drawn"],
    "attention_matching": ["method.chunk=512"],
    "kvzip": ["method.chunk=512"],
    "retroinfer": ["method.segment=512"],
    "kivi": ["method.group=8"],
    "kvzap": ["method.gate=drawn"],
    "fastkvzip": ["method.gate=drawn"],
    "hf_quantized_cache": ["method.group=8"],
}
METHODS = [name for name in BUDGETS if name != "pyramidinfer"]  # it has a prefill of its own


def budget_of(name: str) -> list[str]:
    """What the method is asked for, in the currency that it takes."""
    request = request_of(method_of(name, FITTED.get(name, []))[0])
    if request is OF_ANSWERS:
        return ["budget=640"]
    return ["ratio=1"] if request is OF_CODES else ["ratio=0.5", "comm=1/8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return ["model=any", f"model.id={folder}", "model.name=tiny"]


QUICK = ("needle",)
QUICK_METHODS = ("full", "streamingllm")
SLOW_METHODS = [name for name in METHODS if name not in QUICK_METHODS]


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task in QUICK else pytest.mark.slow) for task in TASKS]
)
def test_a_task_runs_to_its_end(machine: Machine, model: list[str], tmp_path: Path, task: str) -> None:
    words = [*model, "method=oracle", "ratio=0.5", f"task={task}", *TASKS[task]]
    (_, (ours,)), (_, (cpu,)) = (run(words, tmp_path / device, device) for device in ("cuda", "cpu"))
    assert ours.status == cpu.status == "ok", ours.error
    assert ours.ledger == cpu.ledger
    if task != "latency":
        assert (ours.prediction, ours.score) == (cpu.prediction, pytest.approx(cpu.score, rel=1e-5))


@pytest.mark.parametrize(
    "name", [*QUICK_METHODS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_METHODS)]
)
def test_requests_share_a_device_that_has_no_more_than_asked_for(
    machine: Machine, model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[tuple[int, dict[int, float]]] = []
    ordinary = together.run_copies

    def noted(model: Any, reading: Any, feed: Any, n: int) -> Any:
        seen.append((n, machine.shares.copy()))
        return ordinary(model, reading, feed, n)

    monkeypatch.setattr(together, "run_copies", noted)
    words = [*model, "task=latency", *TASKS["latency"], f"method={name}", *FITTED.get(name, []), *budget_of(name)]
    _, (row,) = run([*words, "task.memory_gb=0.0017", "task.most_rows=3"], tmp_path, "cuda")
    assert row.status == "ok", row.error
    found = row.fields["timing"]
    assert found["prefill_bytes"] == 1 << 20  # as the pretended allocator says
    room = 1_700_000 - found["weight_bytes"] - found["prefill_bytes"]
    assert found["largest_batch"] == 1 + room // found["request_bytes"]
    assert found["batch_run"] == min(3, found["largest_batch"]) and found["peak_bytes_at_largest"] == 1 << 20
    assert seen[-1] == (found["batch_run"], {0: pytest.approx(0.0017e9 / MEMORY)})
    assert machine.shares == {0: 1.0}, "the limit is put back"


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_sweep_of_all_methods_runs_to_its_end(machine: Machine, model: list[str], tmp_path: Path, task: str) -> None:
    words = [*model, f"task={task}", *TASKS[task]]
    variants = [[f"method={name}", *FITTED.get(name, []), *budget_of(name)] for name in METHODS]
    for _, (row,) in sweep(words, variants, tmp_path, device="cuda"):
        assert row.status == "ok", row.error
