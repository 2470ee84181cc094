"""Whole decode steps as one CUDA graph, on a pretended GPU: what a graph says is what steps without one say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.batch import Batch
from kvbench.engine.books.ledger import Entry
from kvbench.engine.decode import Decoded, decode
from kvbench.engine.layouts import launch_plan
from kvbench.engine.model import Model
from kvbench.engine.passes.replay import Replay
from kvbench.kernels.clock import Clock
from kvbench.methods.base import SelectiveAttention
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import moved

N_NEW = 8


def built(model: Model, names: Sequence[str], n_new: int) -> tuple[Any, list[SelectiveAttention]]:
    """A trace, and a row of each method."""
    kinds = [name.split() for name in names]
    variants = [conformance.variant(conformance.ours(name, *settings), "0.3") for name, *settings in kinds]
    return conformance.trace_and_rows(variants, n_new, model)


def answered(
    names: Sequence[str], whole: bool = True, model: Model | None = None, n_new: int = N_NEW, **options: Any
) -> tuple[list[list[int]], list[list[Entry]], Decoded]:
    """Tokens and ledgers of rows in one batch, with graphs or without."""
    model = replace(model or moved(conformance.model(), "cuda:0"), allows_graphs=whole)
    with model.hooked():
        trace, rows = built(model, names, n_new)
        done = decode(model, trace, rows, max_new_tokens=n_new, **options)
    return [x.ids for x in done.answers], [x.store.ledger.entries for x in rows], done


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
    assert (done.by_whole_graphs, done.by_graphs, done.why_in_parts) == (N_NEW - 3, N_NEW - 3, None)
    assert (ids, books) == answered(names, whole=False)[:2]


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
    assert done.by_whole_graphs == 2 * 4  # told at steps 1, 7 and 13, captured at 2 and 8: too little follows 14
    assert (ids, books) == answered(names, whole=False, n_new=16)[:2]


def test_rows_that_end_go_on_unheard_until_half_are_gone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their books and layers are those of a row that ended."""
    names = ("full", "snapkv", "h2o method.generated=inside")
    said, _, _ = answered(names, whole=False)
    captured, capture = list[int](), Replay.capture

    def noting(one: Replay, *args: Any) -> None:
        captured.append(len(one.which))
        capture(one, *args)

    monkeypatch.setattr(Replay, "capture", noting)
    for i, at in ((0, 3), (2, 5)):  # a row and a step of it
        captured.clear()
        n_before = [ids.index(said[i][at]) if said[i][at] in ids else len(ids) for ids in said]
        ids, books, done = answered(names, stop_ids=[said[i][at]])
        assert (ids, books) == answered(names, whole=False, stop_ids=[said[i][at]])[:2]
        assert done.by_whole_graphs and captured[0] == len(names), (n_before, captured)
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
            batch.settle()
            return [x.ids for x in (*first, *second)], [x.store.ledger.entries for x in rows], model.graphs.n_whole

    ids, books, n_whole = said("cuda:0")
    assert (ids, books) == said("cpu")[:2] and n_whole > 0


def spoiled(hook: Callable[..., Any]) -> Model:
    """A model with a hook after the MLP of its second layer."""
    model = moved(conformance.model(), "cuda:0")
    model.hf.get_decoder().layers[1].mlp.register_forward_hook(hook)
    return model


def test_a_step_that_cannot_be_captured_is_made_without_and_says_why(machine: Machine) -> None:
    def wait(module: Any, args: Any, out: Tensor) -> None:
        if machine.tape is not None:
            assert out.sum().item() < 1e9

    ids, books, done = answered(("full",), model=spoiled(wait))
    assert done.by_whole_graphs == 0 and done.why_in_parts is not None
    assert done.why_in_parts.startswith("capturing a whole step failed: operation not permitted when stream is captur")
    assert (ids, books) == answered(("full",), whole=False)[:2]


def test_a_graph_that_says_something_else_is_not_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel is given the step's number by the host."""
    monkeypatch.setattr(Clock, "tick_devices", lambda clock, n=1: None)
    tick = Clock.tick_host
    monkeypatch.setattr(Clock, "tick", lambda clock: (tick(clock), [x.add_(1) for x in clock.counts.values()]))

    def drift(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * 1.01 if machine.tape is not None else out

    _, _, done = answered(("full",), model=spoiled(drift))
    assert done.by_whole_graphs == 0
    assert done.why_in_parts is not None and "off the step's own" in done.why_in_parts


def test_who_asks_for_books_amid_replayed_steps_finds_all_of_them(machine: Machine) -> None:
    model, found = moved(conformance.model(), "cuda:0"), list[int]()
    with model.hooked():
        trace, rows = built(model, ("snapkv", "full"), N_NEW)

        def ask(n_steps: int, n_rows: int) -> None:
            if n_steps in (4, 5):
                found.append(len(rows[0].store.ledger.entries) // len(trace.shape.attention_layers))

        done = decode(model, trace, rows, max_new_tokens=N_NEW, on_step=ask)
    assert found == [4, 5] and done.by_whole_graphs == N_NEW - 3
    books = [x.store.ledger.entries for x in rows]
    assert ([x.ids for x in done.answers], books) == answered(("snapkv", "full"), whole=False)[:2]
