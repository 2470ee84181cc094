"""Steps on a pretended GPU that are like the ones before: nothing is sent, and nothing else is said."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import kvbench.engine.batch
from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.books.ledger import Entry
from kvbench.engine.books.pending import PendingSteps
from kvbench.engine.caches import rolling
from kvbench.engine.caches.eviction import UpdatePlan
from kvbench.engine.decode import decode
from kvbench.engine.layouts.launch_plan import LaunchPlan
from kvbench.engine.row import Row
from kvbench.engine.search import KernelSearch, Search
from kvbench.kernels import select_attend
from kvbench.kernels.clock import Since
from kvbench.kernels.select_attend import Piece, Table
from kvbench.methods.retrieving.infllm import InfLLM
from kvbench.methods.retrieving.sparq import SparQ
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.specialisations import noting

N_NEW = 6
SENT = ("pinned allocation", "copy from pinned memory")


def steps(
    machine: Machine,
    *names: str,
    asks: Callable[[int, Sequence[Row]], object] | None = None,
    n_new: int = N_NEW,
    device: str = "cuda:0",
    ratio: str = "0.3",
) -> tuple[list[list[int]], list[list[Entry]], list[int]]:
    """Tokens and ledgers of rows in one batch, and how much each step sends; `asks` is called after each step."""
    model, kinds = replace(moved(conformance.model(), device), allows_graphs=False), [name.split() for name in names]
    variants = [conformance.variant(conformance.ours(name, *settings), ratio) for name, *settings in kinds]
    sent = list[int]()
    with model.hooked():
        trace, rows = conformance.trace_and_rows(variants, n_new, model)
        with machine.counting() as counts:

            def note(n_steps: int, _: int) -> None:
                sent.append(sum(counts.by_kind[kind] for kind in SENT))
                if asks is not None:
                    asks(n_steps, rows)

            done = decode(model, trace, rows, max_new_tokens=n_new, on_step=note)
    apart = [after - before for before, after in pairwise(sent)]
    return [x.ids for x in done.answers], [x.store.ledger.entries for x in rows], apart


def on_cpu(machine: Machine, *names: str, **asked: Any) -> tuple[list[list[int]], list[list[Entry]]]:
    """What a CPU answers, which knows neither plans nor graphs, and what it counts."""
    return steps(machine, *names, device="cpu", **asked)[:2]


def ages_of(kind: type[Search], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps behind the one that was told each search of a kind is, from now on."""
    ages, find = list[int](), kind.find

    def noting(search: Search, q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        ages.append(int(since.clock.cpu()) - since.start)
        find(search, q, k_new, v_new, since)

    monkeypatch.setattr(kind, "find", noting)
    return ages


BATCHES = {
    "full": ("full",),
    "rows that drop": ("snapkv", "adakv"),
    "windows that slide": ("streamingllm method.generated=inside",),
    "heads that roll": ("duo_attention", "snapkv"),
    "tokens with a weight, and hidden ones": (
        "attention_matching",
        "h2o method.generated=on_top method.reduce=query_head",
    ),
}


@pytest.mark.parametrize("names", BATCHES.values(), ids=BATCHES)
def test_a_step_like_the_one_before_sends_nothing_and_says_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]
) -> None:
    ids, books, sent = steps(machine, *names)
    assert sent[-2:] == [0, 0], sent
    monkeypatch.setattr(LaunchPlan, "holds", lambda *_: False)
    expected_ids, expected, told = steps(machine, *names)
    assert ids == expected_ids and books == expected
    assert min(told) > 0


ALIKE = [
    "full",
    "snapkv",
    "streamingllm method.generated=inside",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("duo_attention", "h2o method.generated=inside", "tova")),
    *("oracle", "quest", "shadowkv", "rocketkv method.tier=host", "pqcache", "pqcache method.local_share=0"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("sparq", "loki", "infllm", "infinigen", "rocketkv")),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("clusterkv", "clusterkv method.cache_steps=0")),
    pytest.param("double_sparsity", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("oracle method.generated=inside", "rkv")),
    "turboquant",
    "fp8",
]


@pytest.mark.parametrize("name", ALIKE)
def test_a_graph_of_a_step_would_do_the_next_ones(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every launch has the grid, the numbers and the sizes that it had at the step before."""
    from triton.runtime.interpreter import InterpretedFunction

    launched, by_step, replayable = list[Any](), list[list[Any]](), set[bool]()
    run, enter = InterpretedFunction.run, LaunchPlan.enter

    def noting(kernel: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        names = inspect.signature(kernel.fn).parameters
        given = {
            each: (x.shape, x.dtype) if isinstance(x, Tensor) else x
            for each, x in zip(names, args, strict=True) if each != "here"  # where a tensor of the step lies
        }  # fmt: skip
        launched.append((kernel.fn.__name__, grid, given))
        return run(kernel, *args, grid=grid, **kwargs)

    def entering(plan: LaunchPlan) -> None:
        replayable.add(plan.is_replayable)
        enter(plan)

    def note(n_steps: int, _: Sequence[Row]) -> None:
        by_step.append([*launched])
        launched.clear()

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    monkeypatch.setattr(LaunchPlan, "enter", entering)
    steps(machine, name, asks=note, ratio="1" if name in ("turboquant", "fp8") else "0.3")
    assert replayable == {True}
    *_, before, last, after = by_step
    assert before and before == last == after


@pytest.mark.parametrize(
    "names", [("rkv method.interval=5 method.window=3", "full"), ("tova_decode method.interval=4",)], ids=["3", "1"]
)
def test_queries_that_are_asked_once_more_lie_in_their_ring(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]
) -> None:
    """Between two cuts kernels write them, and at a cut they are those of the latest steps."""
    entered, enter = list[bool](), LaunchPlan.enter

    def entering(plan: LaunchPlan) -> None:
        entered.append(plan.rings is not None)
        enter(plan)

    monkeypatch.setattr(LaunchPlan, "enter", entering)
    ids, books, _ = steps(machine, *names, n_new=12)
    assert len(entered) > 6 and all(entered)
    assert (ids, books) == on_cpu(machine, *names, n_new=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["rocketkv", "loki method.generated=compete", "quest method.page_generated=true", "loki"]
)
def test_the_third_step_and_those_behind_it_compile_nothing(machine: Machine, name: str) -> None:
    """The first one is told where everything lies, and the second one that it goes on from there."""
    early = dict[str, int]()

    def note(n_steps: int, _: Sequence[Row]) -> None:
        if n_steps == 2:
            early.update({kernel: len(keys) for kernel, keys in noted.items()})

    with noting() as noted:
        steps(machine, name, asks=note, n_new=40)
    assert early and {kernel: len(keys) for kernel, keys in noted.items()} == early, noted.changing()


def test_heads_roll_beyond_the_rows_that_were_worked_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three steps' rows lie behind each other here, and those behind them are others."""
    monkeypatch.setattr(rolling, "AHEAD", 3)
    told, tell = list[int](), LaunchPlan.make

    def telling(plan: LaunchPlan, *more: object) -> None:
        tell(plan, *more)  # type: ignore[arg-type]
        told.append(plan.n_steps)

    monkeypatch.setattr(LaunchPlan, "make", telling)
    ids, books, _ = steps(machine, "duo_attention")
    assert max(told) == 2, told
    assert (ids, books) == on_cpu(machine, "duo_attention")


def test_books_are_written_while_the_device_makes_the_next_token(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the host waits for it, so that nothing is left to write after the answer."""
    written, write = list[int](), PendingSteps.write

    def writing(pending: PendingSteps) -> None:
        written.append(len(pending.steps))
        write(pending)
        assert not pending.steps and pending.n_flushed == 0

    monkeypatch.setattr(PendingSteps, "write", writing)
    ids, books, _ = steps(machine, "full", "snapkv")
    assert max(written) > 0
    assert (ids, books) == on_cpu(machine, "full", "snapkv")


@pytest.mark.parametrize("names", [("full", "snapkv"), ("pqcache",)], ids=["rows that keep", "a row that searches"])
def test_who_asks_for_books_finds_all_of_them(machine: Machine, names: Sequence[str]) -> None:
    found, waiting = list[tuple[int, int]](), list[bool]()

    def ask(n_steps: int, rows: Sequence[Row]) -> None:
        row = rows[0]
        waiting.append(row.store.pending is not None)
        if n_steps % 2:
            n_layers = len(row.trace.shape.attention_layers)
            n_seen = {row.store[layer].n_seen for layer in row.trace.shape.attention_layers}
            assert n_seen == {row.trace.s_prompt + n_steps} and row.store.pending is None
            found.append((len(row.store.ledger.entries), n_steps * n_layers))

    ids, books, _ = steps(machine, *names, asks=ask)
    assert any(waiting) and found and all(n == expected for n, expected in found)
    assert (ids, books) == on_cpu(machine, *names)


@pytest.mark.parametrize("names", [("snapkv",), ("full", "snapkv")], ids=["one row", "two rows"])
def test_a_part_that_needs_one_split_more_has_its_item_from_the_outset(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]
) -> None:
    """A split ends amid the answer, not only after 256 tokens: rows are told once, and no launch has other sizes."""
    fit, ends = select_attend.table_of, list[int]()

    def short(rows: Sequence[Sequence[Piece]], q: Tensor, h_kv: int, d_v: int, ahead: int = 0) -> Table:
        growing = [n for own in rows for n, *_, more, _ in own if more]
        if growing and not ends:
            ends.append(max(growing) + 2)
            monkeypatch.setattr(select_attend, "SPLIT", ends[0])
        return fit(rows, q, h_kv, d_v, ahead)

    told, n_items, lengths = list[tuple[int, int]](), list[int](), set[int]()
    tell, attend = LaunchPlan.make, LaunchPlan.attend_planned

    def telling(plan: LaunchPlan, *more: object) -> None:
        tell(plan, *more)  # type: ignore[arg-type]
        told.append((plan.index, plan.n_steps))

    def attending(plan: LaunchPlan, *more: object) -> Tensor:
        n_items.append(plan.table.n_items[0])
        pieces = zip(*(plan.table.numbers.tolist()[i * plan.table.n_pieces :] for i in (0, 7)), strict=False)
        longest = max(n + plan.age for n, grows in [*pieces][: plan.table.n_pieces] if grows)
        lengths.add(-(-longest // ends[0]))
        assert plan.age <= plan.n_steps
        return attend(plan, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(select_attend, "table_of", short)
    monkeypatch.setattr(LaunchPlan, "make", telling)
    monkeypatch.setattr(LaunchPlan, "attend_planned", attending)
    ids, books, _ = steps(machine, *names)
    first = [n_steps for index, n_steps in told if index == told[0][0]]
    assert first == [N_NEW - 1], first
    assert len(set(n_items)) == 1 and lengths == {1, 2}, (n_items, lengths)
    assert (ids, books) == on_cpu(machine, *names)


@pytest.mark.parametrize(
    "names", [("infinigen",), ("infinigen", "infinigen method.alpha=4", "snapkv")], ids=["one", "one that counts anew"]
)
def test_rows_that_look_ahead_bring_more_queries_than_rows(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]
) -> None:
    n_queries = list[int]()
    keep = LaunchPlan.keep

    def noting(plan: LaunchPlan, k_new: Tensor, v_new: Tensor) -> None:
        keep(plan, k_new, v_new)
        n_queries.append(len(k_new) - len(plan.rows))

    monkeypatch.setattr(LaunchPlan, "keep", noting)
    ids, books, sent = steps(machine, *names)
    assert max(n_queries) > 0 or len(names) > 1  # the one that counts anew comes last, and with it these queries
    assert sent[-2:] == [0, 0] or len(names) > 1, sent
    assert (ids, books) == on_cpu(machine, *names)


CODING = "pqcache method.local_share=0.05"  # tokens leave the window within a few steps, and need codes


@pytest.mark.parametrize(
    "names",
    [
        (CODING,),
        (f"{CODING} method.fit=middle method.overlap=false",),
        pytest.param(("pqcache", CODING, f"{CODING} method.budget_rule=official", "snapkv"), marks=pytest.mark.slow),
    ],
    ids=["the GPU codes", "the host codes some", "several rows"],
)
def test_rows_search_by_codes_as_they_were_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]
) -> None:
    """Windows that slide and others, which code the newest token or do not."""
    ages = ages_of(KernelSearch, monkeypatch)
    ids, books, _ = steps(machine, *names)
    assert max(ages) >= 2, ages
    assert (ids, books) == on_cpu(machine, *names)


SEARCHES = [
    ("quest", "quest method.comm_mode=native method.page_len=48", "quest method.agg=group_max", "snapkv"),
    pytest.param(("clusterkv", "clusterkv method.cache_steps=0", "full"), marks=pytest.mark.slow),
    pytest.param(("sparq", "sparq method.generated=inside", "sparq method.reallocate=false"), marks=pytest.mark.slow),
    ("infllm", "infllm method.per_head=true"),
    ("loki", "loki method.granularity=kv_head"),
    pytest.param(("double_sparsity", "double_sparsity method.granularity=kv_head", "full"), marks=pytest.mark.slow),
    ("oracle method.generated=on_top", "oracle method.agg=query_head"),
    pytest.param(
        ("rocketkv method.tier=host", "rocketkv method.budget_rule=official", "rocketkv"), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(
    "names",
    SEARCHES,
    ids=["pages of two lengths", "clusters", "columns", "blocks", "labels", "channels", "tokens", "chunks"],
)
def test_rows_search_and_bring_as_they_were_told(machine: Machine, names: Sequence[str]) -> None:
    """What several heads ask for is copied, and counted while the books are not written."""
    ids, books, sent = steps(machine, *names)
    assert sent[-2:] == [0, 0], sent
    assert sum(entry.moved_kv_bytes for entry in books[0]) > 0
    assert (ids, books) == on_cpu(machine, *names)


LEARNERS = [
    ("h2o method.generated=inside", "tova", "quest"),
    pytest.param(("h2o_decode", "h2o method.generated=inside method.reduce=max", "full"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("names", LEARNERS, ids=["rows that evict", "a row that grows"])
def test_rows_learn_and_evict_as_they_were_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, names: Sequence[str]
) -> None:
    """Sums and positions are written over, and a search beside them goes on."""
    ages, take = list[int](), UpdatePlan.take

    def noting(update_plan: UpdatePlan, since: Since) -> None:
        ages.append(int(since.clock.cpu()) - since.start)
        take(update_plan, since)

    held = dict[int, list[Tensor]]()

    def hold(n_steps: int, rows: Sequence[Row]) -> None:
        if n_steps in (N_NEW - 3, N_NEW - 1):
            layers = [row.store[layer] for row in rows for layer in row.trace.shape.attention_layers]
            held[n_steps] = [x.clone() for at in layers for x in (at.positions(), at.keys())]

    monkeypatch.setattr(UpdatePlan, "take", noting)
    ids, books, sent = steps(machine, *names)
    assert max(ages) >= 3 and sent[-2:] == [0, 0], (ages, sent)
    assert (ids, books) == steps(machine, *names, asks=hold)[:2]
    found, held = held, {}
    assert (ids, books) == steps(machine, *names, asks=hold, device="cpu")[:2]
    assert [*found] == [*held]
    for mine, right in zip([*found.values()], [*held.values()], strict=True):
        for one, other in zip(mine, right, strict=True):
            torch.testing.assert_close(one.cpu(), other)


@pytest.mark.slow
def test_weights_go_to_local_tokens_until_they_become_a_block(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InfLLM's, whose search and weights are told once, and anew behind each block."""
    ages, names, n_new = ages_of(KernelSearch, monkeypatch), ("infllm method.block_len=17", "snapkv"), 14
    held = dict[int, list[Tensor]]()

    def hold(n_steps: int, rows: Sequence[Row]) -> None:
        row = cast("InfLLM", rows[0])
        for layer, scores in row.scores.items():
            means = row.index[layer][: row.n_blocks[layer]]
            held.setdefault(n_steps, []).extend([scores.clone(), means.clone(), row.store[layer].positions()])

    ids, books, sent = steps(machine, *names, n_new=n_new)
    assert (ids, books) == steps(machine, *names, n_new=n_new, device="cpu")[:2]
    told_anew = [i for i, n in enumerate(sent) if n]
    assert max(ages) >= 6 and 0 < len([i for i in told_anew if i > 1]) <= 3, (ages, sent)
    assert (ids, books) == steps(machine, *names, asks=hold, n_new=n_new)[:2]
    found, held = held, {}
    monkeypatch.setattr(LaunchPlan, "holds", lambda *_: False)
    assert (ids, books) == steps(machine, *names, asks=hold, n_new=n_new)[:2]
    for n_steps, mine in found.items():
        assert all(torch.equal(one, other) for one, other in zip(mine, held[n_steps], strict=True)), n_steps


def test_a_row_that_is_told_anew_has_launches_of_its_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    ages, names = ages_of(KernelSearch, monkeypatch), ("quest method.page_generated=true", "quest")
    ids, books, _ = steps(machine, *names)
    assert max(ages) >= 3, ages
    assert (ids, books) == on_cpu(machine, *names)


def test_the_mean_of_values_stands_in_where_other_layers_read_the_same_tokens(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There no launch of all rows corrects what was attended to: each row does."""
    monkeypatch.setattr(LaunchPlan, "holds", lambda *_: False)
    attend, outs = kvbench.engine.batch.attend_groups, list[Tensor]()

    def noting(*args: Any) -> Tensor:
        outs.append(attend(*args))
        return outs[-1]

    monkeypatch.setattr(kvbench.engine.batch, "attend_groups", noting)
    ids, books, _ = steps(machine, "sparq", "sparq")
    expected, outs = outs, []
    monkeypatch.setattr(SparQ, "after_rows_on_gpu", SparQ.after_rows)
    assert (ids, books) == steps(machine, "sparq", "sparq")[:2]
    for out, right in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, right)


@pytest.mark.slow
def test_the_host_is_timed_with_launches_stubbed() -> None:
    """In a process of its own: a library is loaded that is a GPU from then on."""
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.benchmarks.host", "full", "--rows", "1", "--steps", "5"],
        capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    header, row = done.stdout.splitlines()
    assert header == "method,rows,us_layer,us_books,goal" and float(row.split(",")[2]) > 1
