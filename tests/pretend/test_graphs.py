"""Decode steps by CUDA graphs, on a pretended GPU: what was captured has no numbers before it is replayed."""

import gc
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.batch import Batch
from kvbench.engine.books.ledger import Entry
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.causal import Chunk
from kvbench.engine.decode import Decoded, decode
from kvbench.engine.model import Model
from kvbench.engine.passes import graphs
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.full import Full
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.tiny_run import run, save_tiny

N_NEW = 6
S = 24


@pytest.fixture(autouse=True)
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step comes without graphs, the second one is captured."""
    monkeypatch.setattr(graphs, "WARM", 1)


def rows_of(model: Model, n: int = 2) -> tuple[Any, list[SelectiveAttention]]:
    """A trace, and so many rows of two methods in turn."""
    rolling = StreamingLLM.Params(4, "inside", "original")
    kinds: list[tuple[Any, Any, str]] = [(Full, Full.Params(), "1"), (StreamingLLM, rolling, "1/2")]
    variants = [
        kind.variant_for(params, BudgetRequest(Fraction(ratio), None, Fraction(0)), model.shape, S)
        for kind, params, ratio in kinds
    ]
    rows: list[SelectiveAttention] = []

    def build(trace: Any, layer: int) -> None:
        if not rows:
            rows.extend(variants[i % 2].row(trace, N_NEW + 2) for i in range(n))
        for row in rows:
            row.build(layer)

    trace = prefill(model, prompt(S), [], build)
    for row in rows:
        row.complete()
    trace.settle()
    return trace, rows


def answers(model: Model, n: int = 2, **changes: Any) -> tuple[Decoded, list[list[int]], list[list[Entry]]]:
    with model.hooked():
        trace, rows = rows_of(model, n)
        done = decode(model, trace, rows, max_new_tokens=N_NEW, **changes)
    return done, [answer.ids for answer in done.answers], [row.store.ledger.entries for row in rows]


def test_steps_are_replayed_with_the_tokens_and_books_of_a_cpu(machine: Machine) -> None:
    done, ids, books = answers(moved(tiny(), "cuda:0"))
    assert (done.by_graphs, done.why_no_graphs) == (N_NEW - 3, None)
    _, expected, ledgers = answers(tiny())
    assert ids == expected and books == ledgers


class Keeper:
    """A session that keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None) -> Tensor:
        self.kept += [q, k, v]
        return q * (1 + layer)


def steps(model: Model, n: int = 4) -> list[Tensor]:
    """The logits of steps whose attention is that of a `Keeper`: the second is captured, and the others replay it."""
    with model.hooked():
        ids = torch.tensor([[3], [40]], device=model.device)
        return [model.step(ids + i, i, model.new_cache(), Keeper()).cpu() for i in range(n)]


@pytest.mark.parametrize("kind", ["qwen3", "glm"])
def test_other_architectures_are_replayed_too(machine: Machine, kind: str) -> None:
    model = moved(tiny(kind), "cuda:0")
    torch.testing.assert_close(steps(model), steps(tiny(kind)))
    assert model.graphs.n_replayed == 2


def test_a_part_is_one_launch(machine: Machine) -> None:
    model, launches = moved(tiny(), "cuda:0"), []
    with model.hooked(), machine.counting() as counts:
        ids = torch.tensor([[3], [40]], device="cuda")
        for i in range(4):
            before = counts.launches
            model.step(ids, i, model.new_cache(), Keeper())
            launches.append(counts.launches - before)
    # A part, the copy of what a session gets, the session's product and the copy of that, for each of three layers; the
    # last part, tokens, positions and logits.
    assert launches[3] == launches[2] == 3 * 4 + 4 < launches[0] / 4


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_a_session_keeps_is_not_written_to_by_the_next_step(machine: Machine, kind: str) -> None:
    model = moved(tiny(kind), "cuda:0")
    ours, right, logits = Keeper(), Keeper(), []
    with model.hooked():
        for i in range(5):
            ids = torch.tensor([[3 + i], [40 + i]], device="cuda")
            by_graphs = model.step(ids, i if i % 2 else torch.full_like(ids, i), model.new_cache(), ours)
            logits.append((by_graphs, model.forward(ids, i, model.new_cache(), right)))
    assert model.graphs.n_replayed == 3
    for found, expected in [*logits, *zip(ours.kept, right.kept, strict=True)]:
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0, atol=0)


def test_rows_that_leave_have_parts_of_their_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more are kept than so many."""
    monkeypatch.setattr(graphs, "MOST", 2)
    model, session = moved(tiny(), "cuda:0"), Keeper()
    with model.hooked():
        for n in (3, 3, 3, 2, 2, 2, 1, 1, 3, 2):
            ids = torch.full((n, 1), 5, device="cuda")
            found = model.step(ids, 7, model.new_cache(), session)
            torch.testing.assert_close(found.cpu(), model.forward(ids, 7, model.new_cache(), Keeper()).cpu())
    assert model.graphs.n_replayed == 3  # the third step of three, of two, and two once more
    assert [*model.graphs.parts] == [1, 2]


def spoiled(model: Model, hook: Callable[..., Any]) -> Model:
    """The model with a hook behind the MLP of its second layer."""
    model.hf.get_decoder().layers[1].mlp.register_forward_hook(hook)
    return model


@pytest.mark.parametrize("only_captured", [False, True])
def test_a_model_that_waits_in_a_step_is_left_without_graphs(machine: Machine, only_captured: bool) -> None:
    """That shows before anything is captured; a capture that is broken off all the same leaves nothing behind."""

    def wait(module: Any, args: Any, out: Tensor) -> None:
        if not only_captured or machine.tape is not None:
            assert out.sum().item() < 1e9

    model = spoiled(moved(tiny(), "cuda:0"), wait)
    torch.testing.assert_close(steps(model), steps(tiny()))
    assert model.graphs.n_replayed == 0
    assert model.graphs.why_not is not None
    why = "operation not permitted" if only_captured else "the model waits for the GPU within a step"
    assert model.graphs.why_not.startswith(f"capturing a step failed: {why}")
    assert len(machine.released) == only_captured and not machine.recording
    torch.cuda.empty_cache()


def test_parts_that_compute_something_else_are_not_used(machine: Machine) -> None:
    calls = []

    def other(module: Any, args: Any, out: Tensor) -> Tensor:
        calls.append(1)
        return out * (1 + 0.001 * len(calls))

    model = spoiled(moved(tiny(), "cuda:0"), other)
    steps(model)
    assert model.graphs.n_replayed == 0
    assert model.graphs.why_not is not None and "off the model's own numbers" in model.graphs.why_not


@pytest.mark.parametrize(
    ("kind", "allowed", "why"),
    [
        ("gemma3", True, "layers have caches of their own"),
        ("llama", False, "cuda_graphs=never"),
    ],
)
def test_who_has_no_graphs_says_why(machine: Machine, kind: str, allowed: bool, why: str) -> None:
    model = moved(tiny(kind), "cuda:0")
    model.allow_graphs(allowed)
    assert model.graphs.why_not == why and tiny(kind).graphs.why_not == "the model is on a CPU"


def test_a_model_with_graphs_is_given_back_at_once(machine: Machine) -> None:
    """Nothing but its owner holds it: the next model may need the room."""
    model = moved(tiny(), "cuda:0")
    steps(model)
    assert model.graphs.n_replayed > 0
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_answers_to_questions_are_replayed_too(machine: Machine) -> None:
    def said(model: Model) -> list[list[int]]:
        with model.hooked():
            trace, rows = rows_of(model)
            batch = Batch(model, trace, rows)
            logits = batch.read([[5, 6], [8]])
            return [answer.ids for answer in batch.answer(logits, [N_NEW, N_NEW])]

    model = moved(tiny(), "cuda:0")
    assert said(model) == said(tiny())
    assert model.graphs.n_replayed > 0


def test_a_result_says_why_no_step_was_replayed(machine: Machine, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    words = ["model=any", f"model.id={folder}", "model.name=tiny", "method=full", "task=fidelity",
             "task.prompt_tokens=16", "task.windows=1", "task.steps=4"]  # fmt: skip
    result, (row,) = run([*words, "cuda_graphs=never"], tmp_path / "never", "cuda")
    assert row.fields["by_graphs"] == 0
    assert "decode steps ran without CUDA graphs: cuda_graphs=never" in result.notes
