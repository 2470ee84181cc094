"""Whole decode steps as one CUDA graph, on a pretended GPU: what a graph says is what steps without one say."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.batch import Batch
from kvbench.engine.books.ledger import Entry
from kvbench.engine.decode import Decoded, decode
from kvbench.engine.layouts import launch_plan
from kvbench.engine.model import Model
from kvbench.engine.passes.replay import Replay, obstacle
from kvbench.kernels.clock import Clock
from kvbench.methods.base import SelectiveAttention
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.tiny import tiny
from kvbench.tests.tiny_run import run, save_tiny

N_NEW = 8


def built(model: Model, names: Sequence[str], n_new: int) -> tuple[Any, list[SelectiveAttention]]:
    """A trace, and a row of each method."""
    kinds = [name.split() for name in names]
    variants = [conformance.variant(conformance.ours(name, *settings), "0.3") for name, *settings in kinds]
    return conformance.trace_and_rows(variants, n_new, model)


def answered(
    names: Sequence[str], model: Model | None = None, n_new: int = N_NEW, **options: Any
) -> tuple[list[list[int]], list[list[Entry]], Decoded]:
    """Tokens and ledgers of rows in one batch."""
    model = replace(model or moved(conformance.model(), "cuda:0"), allows_graphs=True)
    with model.hooked():
        trace, rows = built(model, names, n_new)
        done = decode(model, trace, rows, max_new_tokens=n_new, **options)
    return [x.ids for x in done.answers], [x.store.ledger.entries for x in rows], done


def on_cpu(names: Sequence[str], **options: Any) -> tuple[list[list[int]], list[list[Entry]]]:
    """What a CPU answers, where nothing is captured, and what it counts."""
    return answered(names, model=conformance.model(), **options)[:2]


BATCHES = {
    "rows that keep": ("full", "snapkv", "streamingllm method.generated=inside"),
    "rows that evict, and pages that are brought": ("h2o method.generated=inside", "quest method.agg=group_max"),
    "a search whose mean of values adds up": ("sparq",),
    "labels": ("double_sparsity", "full"),
}
SLOW = ("a search whose mean of values adds up", "labels")


@pytest.mark.parametrize(
    "names", [pytest.param(names, id=id, marks=[pytest.mark.slow] * (id in SLOW)) for id, names in BATCHES.items()]
)
def test_a_step_is_told_once_captured_once_and_replayed_from_then_on(machine: Machine, names: Sequence[str]) -> None:
    ids, books, done = answered(names)
    # The first step is told, the second one captured; the last token is not read.
    assert (done.by_graphs, done.why_no_graphs) == (N_NEW - 3, None)
    assert (ids, books) == on_cpu(names)


def test_a_replayed_step_is_one_launch_beside_the_choice_of_its_token(machine: Machine) -> None:
    launches, graphs = list[int](), list[int]()
    with machine.counting() as counts:

        def note(n_steps: int, n_rows: int) -> None:
            launches.append(counts.launches)
            graphs.append(counts.by_kind["graph"])

        answered(("full", "quest"), on_step=note)
    assert [after - before for before, after in pairwise(graphs[2:])] == [1] * (N_NEW - 4)
    # The graph; then the largest logit, the mark of rows that choose nothing, and the copy of the tokens.
    apart = [after - before for before, after in pairwise(launches[2:])]
    assert {*apart} == {6}, apart


def test_steps_behind_an_event_are_told_and_captured_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plan, "MOST_AHEAD", 5)
    names = ("full", "snapkv")
    ids, books, done = answered(names, n_new=16)
    assert done.by_graphs == 2 * 4  # told at steps 1, 7 and 13, captured at 2 and 8: too little follows 14
    assert (ids, books) == on_cpu(names, n_new=16)


def test_rows_that_end_go_on_unheard_until_half_are_gone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their books and layers are those of a row that ended."""
    names = ("full", "snapkv", "h2o method.generated=inside")
    said, _ = on_cpu(names)
    captured, capture = list[int](), Replay.capture

    def noting(one: Replay, *args: Any) -> None:
        captured.append(len(one.which))
        capture(one, *args)

    monkeypatch.setattr(Replay, "capture", noting)
    for i, at in ((0, 3), (2, 5)):  # a row and a step of it
        captured.clear()
        n_before = [ids.index(said[i][at]) if said[i][at] in ids else len(ids) for ids in said]
        ids, books, done = answered(names, stop_ids=[said[i][at]])
        assert (ids, books) == on_cpu(names, stop_ids=[said[i][at]])
        assert done.by_graphs and captured[0] == len(names), (n_before, captured)
        assert [len({entry.step for entry in own}) for own in books] == [len(each) - 1 for each in ids]


def test_rows_of_a_conversation_are_replayed_and_go_on_where_they_ended(machine: Machine) -> None:
    """One that ended early is asked again, and must not have gone on in a graph."""

    def said(device: str) -> tuple[list[list[int]], list[list[Entry]], int]:
        model = moved(conformance.model(), device) if device != "cpu" else conformance.model()
        with model.hooked():
            trace, rows = built(model, ("full", "snapkv"), 40)
            batch = Batch(model, trace, rows)
            first = batch.answer(batch.read([[5, 6], [8]]), [N_NEW, 4])
            second = batch.answer(batch.read([[7], [9, 3, 2]]), [4, N_NEW])
            batch.flush()
            return [x.ids for x in (*first, *second)], [x.store.ledger.entries for x in rows], batch.n_replayed

    ids, books, n_replayed = said("cuda:0")
    assert (ids, books) == said("cpu")[:2] and n_replayed > 0


def spoiled(hook: Callable[..., Any]) -> Model:
    """A model with a hook after the MLP of its second layer."""
    model = moved(conformance.model(), "cuda:0")
    model.hf.get_decoder().layers[1].mlp.register_forward_hook(hook)
    return model


@pytest.mark.parametrize("only_captured", [False, True])
def test_a_step_that_waits_is_made_without_a_graph_and_says_why(machine: Machine, only_captured: bool) -> None:
    """That shows before anything is captured; a capture that is broken off all the same leaves nothing behind."""

    def wait(module: Any, args: Any, out: Tensor) -> None:
        if not only_captured or machine.tape is not None:
            assert out.sum().item() < 1e9

    ids, books, done = answered(("full",), model=spoiled(wait))
    assert done.by_graphs == 0 and done.why_no_graphs is not None
    failed = "capturing a step failed: operation not permitted when stream is captur"
    assert done.why_no_graphs.startswith(failed if only_captured else "the model waits for the GPU within a step")
    assert len(machine.released) == only_captured and not machine.recording
    torch.cuda.empty_cache()
    assert (ids, books) == on_cpu(("full",))


def test_a_graph_that_says_something_else_is_not_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel is given the step's number by the host."""
    monkeypatch.setattr(Clock, "tick_devices", lambda clock, n=1: None)
    tick = Clock.tick_host
    monkeypatch.setattr(Clock, "tick", lambda clock: (tick(clock), [x.add_(1) for x in clock.counts.values()]))

    def drift(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * 1.01 if machine.tape is not None else out

    _, _, done = answered(("full",), model=spoiled(drift))
    assert done.by_graphs == 0
    assert done.why_no_graphs is not None and "off the step's own" in done.why_no_graphs


def test_who_asks_for_books_amid_replayed_steps_finds_all_of_them(machine: Machine) -> None:
    model, found = moved(conformance.model(), "cuda:0"), list[int]()
    with model.hooked():
        trace, rows = built(model, ("snapkv", "full"), N_NEW)

        def ask(n_steps: int, n_rows: int) -> None:
            if n_steps in (4, 5):
                found.append(len(rows[0].store.ledger.entries) // len(trace.shape.attention_layers))

        done = decode(model, trace, rows, max_new_tokens=N_NEW, on_step=ask)
    assert found == [4, 5] and done.by_graphs == N_NEW - 3
    books = [x.store.ledger.entries for x in rows]
    assert ([x.ids for x in done.answers], books) == on_cpu(("snapkv", "full"))


@pytest.mark.parametrize("kind", ["qwen3", "glm"])
def test_other_architectures_are_replayed_too(machine: Machine, kind: str) -> None:
    ids, books, done = answered(("full", "snapkv"), model=moved(tiny(kind), "cuda:0"))
    assert done.by_graphs == N_NEW - 3
    assert (ids, books) == answered(("full", "snapkv"), model=tiny(kind))[:2]


@pytest.mark.parametrize(
    ("kind", "allowed", "why"),
    [("gemma3", True, "layers have caches of their own"), ("llama", False, "cuda_graphs=never")],
)
def test_who_has_no_graphs_says_why(machine: Machine, kind: str, allowed: bool, why: str) -> None:
    model = moved(tiny(kind), "cuda:0")
    model.allows_graphs = allowed
    assert obstacle(model) == why and obstacle(tiny(kind)) == "the model is on a CPU"


def test_a_model_with_graphs_is_given_back_at_once(machine: Machine) -> None:
    """Nothing but its owner holds it: the next model may need the room."""
    model = moved(conformance.model(), "cuda:0")
    _, _, done = answered(("full",), model=model)
    assert done.by_graphs
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, done
        assert gone() is None
    finally:
        gc.enable()


def test_a_result_says_why_no_step_was_replayed(machine: Machine, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    words = ["model=any", f"model.id={folder}", "model.name=tiny", "method=full", "task=fidelity",
             "task.prompt_tokens=16", "task.windows=1", "task.steps=4"]  # fmt: skip
    result, (row,) = run([*words, "cuda_graphs=never"], tmp_path / "never", "cuda")
    assert row.fields["by_graphs"] == 0
    assert "decode steps ran without CUDA graphs: cuda_graphs=never" in result.notes
