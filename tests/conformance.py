"""`kvbench conformance path/to/mine.py`: what every method must hold, for one of the user's own or of ours.

A task, by its file or its name, is put through what every task must hold (`tests/task_conformance.py`).

Each property is a function that raises an `AssertionError` with the case that breaks it. For ours
`tests/methods/test_conformance.py` runs them. Prompts have 240 tokens and the model is a random one of three layers, so
that the suite takes seconds.

exit code: 0 all properties hold, 1 one is broken, 2 wrong input

Not here: whether a method is any good. That is what runs are for.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from itertools import count, product
from math import floor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.audit import check_skips, listed, tokens_and_pseudo, uncounted_bytes
from kvbench.engine.books.ledger import Entry
from kvbench.engine.budget import COUNTS, ELEMENT_BYTES, BudgetRequest, find_bytes, token_bytes
from kvbench.engine.declared import build_params, readers_of
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.fetching import Fetching
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.model import Model
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Placement, Ragged
from kvbench.engine.post_processing import PostProcessing
from kvbench.engine.prefill import prefill
from kvbench.engine.step import attend_group
from kvbench.engine.turns.state import fork_of
from kvbench.evals import outside
from kvbench.evals.overrides import config_groups
from kvbench.evals.settings import Keys, from_words, load_class
from kvbench.methods.allocator import Allocator
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.full import Full
from kvbench.methods.rules import QuantisingRules
from kvbench.results.names import known
from kvbench.tests.judging import Refused, judged, report
from kvbench.tests.task_conformance import main as of_task
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import built

METHODS = config_groups()["method"]
N_NEW, S = 10, 240  # two cuts of those who cut every four steps
N_SAMPLES = 4  # of methods that hold a budget in the mean
RATIOS = ("0.05", "0.1", "0.2", "0.3", "0.5")
BESIDE = 4  # methods that a method answers beside, full attention apart
FITTED = {  # to so short a prompt, and to a model without a tokenizer
    "infllm": ["method.block_len=16"],
    "duo_attention": ["method.heads=drawn", "method.n_sink=8", "method.n_recent=16"],
    "kivi": ["method.group=8", "method.residual=16"],
    "hf_quantized_cache": ["method.group=8"],
    "kvarn": ["method.group=64"],
    "attention_matching": ["method.first_ids=[7,5,9]"],
    "shadowkv": ["method.local_chunks=1"],
    "turboquant_vllm": ["method.boundary_layers=1"],
    "rkv": ["method.interval=4", "method.window=3"],
    "snapkv_decode": ["method.interval=4", "method.window=3"],
    "streamingllm_decode": ["method.interval=4"],
    "h2o_decode": ["method.interval=4"],
    "tova_decode": ["method.interval=4"],
    "random_decode": ["method.interval=4", "method.window=3", "method.protect=none"],
    "vase": ["method.interval=4", "method.window=3"],
    "append_only": ["method.window=2"],
    "append_only_budget": ["method.expect=10"],
    "triattention": ["method.interval=4", "method.protect_prompt=false"],
    "simlayerkv_paper": ["method.n_recent=40", "method.threshold=0.3"],
    "simlayerkv_kvpress": ["method.n_recent=40", "method.threshold=0.3"],
    "kvzap": ["method.gate=drawn", "method.window=8"],
    "fastkvzip": ["method.gate=drawn"],
    "dms": ["method.threshold=-3", "method.window=40"],
    "dms_kvzap": ["method.scorer.gate=drawn", "method.threshold=0", "method.window=40"],
    "dms_kvzap_kvpress": ["method.scorer.gate=drawn", "method.threshold=0", "method.window=40"],
    "kvzip": ["method.chunk=90", "method.first_ids=[7,5,9]", "method.next_ids=[7,8]"],
}
FITTED_COMM = {"sparq": "1/8", "double_sparsity": "1/8", "loki": "1/8", "shadowkv": "1/8"}  # to so few dimensions


@dataclass(frozen=True, eq=False)
class Subject:
    """A method with its parameters, as the suite puts it through."""

    name: str
    kind: type[SelectiveAttention]
    params: Any
    comm: str = "1/16"
    allocator: Allocator | None = None  # another one than the method's own
    counts: str | None = None  # what the budget of prompt and answer counts
    post_processing: PostProcessing | None = (
        None  # of the kept keys and values, where it is another one than the method's own
    )
    keeps_budget: bool = True  # presets reproduce published settings, whose budgets are other ones


@dataclass
class Step:
    """What one layer of one step did."""

    step: int
    layer: int
    attended: Tensor  # (h, n) bool, as the store has it
    resident: Tensor  # (h_kv, n) positions
    fetched: list[Tensor]  # (1, h_kv or h, k) positions each
    n_read: int  # tokens that attention read, summed over query heads
    n_counted: int  # the same in the books
    n_pseudo: int  # pseudo-tokens that attention read, summed over query heads
    n_pseudo_counted: int
    find_bytes: int  # in the books, for what finds tokens or stands for them
    protected: list[int]


@dataclass
class Said:
    """What a row answered, and how it came to it."""

    row: SelectiveAttention
    ids: list[int]
    steps: list[Step]


# --- subjects ---


def subject(words: Sequence[str]) -> Subject:
    """The method of a command line such as `method=snapkv method.window=16`."""
    asked = from_words(words)
    part = asked.method
    kind: Any = load_class(part)
    family = (known(part.name) or part.name) if part.name in METHODS else ""
    params = build_params(kind, part.params, "method")
    return Subject(
        name=part.name,
        kind=kind,
        params=params,
        post_processing=asked.post_processing.over(kind.traits_of(params).post_processing),
        comm=FITTED_COMM.get(family, "1/16"),
        keeps_budget=(part.name not in METHODS or part.name == family) and not kind.traits_of(params).adapts,
    )


@cache
def ours(name: str, *settings: str) -> Subject:
    return subject([f"method={name}", *FITTED.get(name, FITTED.get(known(name) or name, [])), *settings])


HEADS = (8, 32)  # numbers of a head of the suite's model: the second where a method has blocks of several
HEAD: ContextVar[int] = ContextVar("HEAD", default=HEADS[0])


@cache
def model_of(d_h: int) -> Model:
    return tiny("llama", head_dim=d_h)


def model() -> Model:
    return model_of(HEAD.get())


@contextmanager
def wide_enough(one: Subject) -> Iterator[None]:
    """Inside, the suite's model has heads that the method can pack."""
    before = HEAD.get()
    try:
        for d_h in HEADS:
            HEAD.set(d_h)
            with suppress(ConfigError):
                if issubclass(one.kind, QuantisingRules):
                    one.kind.check_shape(one.params, model().shape)
                break
        yield
    finally:
        HEAD.set(before)


numbers = count()  # of copies


def copy_of(one: Subject) -> Subject:
    """The same method from a module that was run anew: it shares nothing that a class or a module may keep."""
    path, name = Path(inspect.getfile(one.kind)), f"copy_{next(numbers)}"
    package = sys.modules[one.kind.__module__].__package__ or ""
    module = outside.new_module(name, path.read_bytes(), path, package)
    del sys.modules[name]
    return replace(one, kind=getattr(module, one.kind.__name__))


def other_params(one: Subject, ratio: str) -> Subject | None:
    """The same class with one parameter changed, where a change is accepted."""
    for field in fields(one.params):
        value = getattr(one.params, field.name)
        if isinstance(value, bool):
            changed: tuple[Any, ...] = (not value,)
        elif isinstance(value, int):
            changed = (value + 1, value - 1, 2 * value, value // 2)
        else:
            continue
        for new in changed:
            try:
                other = replace(one, params=replace(one.params, **{field.name: new}))
                variant(other, ratio)
                return other
            except (ConfigError, Refused, ValueError, AssertionError):
                continue
    return None


# --- runs ---


def variant(one: Subject, ratio: str) -> Variant:
    """The method at this ratio, or at the one that its error recommends."""
    request = BudgetRequest(Fraction(ratio), None, Fraction(one.comm))
    if one.kind.traits.of_answers:  # its budget is of prompt and answer together
        request = BudgetRequest(None, max(1, floor((S + N_NEW) * Fraction(ratio))), Fraction(0), counts=one.counts)
    try:
        one.kind.check(one.params, request, model().shape)
        return one.kind.variant_for(
            one.params, request, model().shape, S, allocator=one.allocator, post_processing=one.post_processing
        )
    except ConfigError as error:
        advice = re.search(r"ratio=(0\.\d+) or more", str(error))
        least = advice and Fraction(advice[1])
        if one.kind.traits.of_answers and (tokens := re.search(r"budget=(\d+) or more$", str(error))):
            least = Fraction(int(tokens[1]), S + N_NEW)  # of a method that keeps any prompt whole
        if least is None or least <= Fraction(ratio):
            raise Refused(str(error)) from None
        return variant(one, str(least))


def accepted(one: Subject, ratios: Sequence[str]) -> list[str]:
    """The ratios that the method does not refuse; `Refused` where there is none."""
    found: list[str] = []
    refusal = Refused()
    for ratio in ratios:
        try:
            variant(one, ratio)
            found.append(ratio)
        except Refused as error:
            refusal = error
    if not found:
        raise refusal
    return found


def read(variants: Iterable[Variant], seed: int = 0, by: Model | None = None) -> Trace:
    """A prefill with what these variants observe; of a variant with a prefill of its own, that one."""
    variants, by = list(variants), by or model()
    pruning = variants[0].pruning if len(variants) == 1 else None
    with by.hooked():
        trace = prefill(by, prompt(S, seed), [what for one in variants for what in one.observations], pruning=pruning)
    run_second_passes(by, trace, [what for one in variants for what in one.second_passes])
    return trace


def trace_and_rows(variants: Sequence[Variant], n_new: int, by: Model) -> tuple[Trace, list[SelectiveAttention]]:
    """The trace of a prompt, and a row of each variant that may answer it; within `by.hooked()`."""
    trace = read(variants, by=by)
    rows = [variant.row(trace, n_new) for variant in variants]
    for layer in trace.shape.attention_layers:
        for row in rows:
            row.build(layer)
    for row in rows:
        row.complete()
    trace.settle()
    return trace, rows


def answers(variants: Sequence[Variant], seed: int = 0, trace: Trace | None = None) -> list[Said]:
    """What the variants say in one batch; one with a prefill of its own says it alone."""
    together = [one for one in variants if one.pruning is None]
    batches = [together] if together else []
    batches += [[one] for one in variants if one.pruning is not None]
    said: dict[int, Said] = {}
    for batch in batches:
        for one, answer in zip(batch, decoded(batch, trace or read(batch, seed)), strict=True):
            said[id(one)] = answer
    return [said[id(one)] for one in variants]


def decoded(variants: Sequence[Variant], trace: Trace) -> list[Said]:
    with torch.inference_mode():  # as in a run, where nothing stops who writes to the trace
        rows = [careful(one.row(trace, N_NEW)) for one in variants]
    said = [Said(row, [], []) for row in rows]

    def look(step: int, speaking: int) -> None:
        for one in said:
            one.steps += [look_at(one.row, step, layer) for layer in trace.shape.attention_layers]

    with model().hooked(), counting():
        done = decode(model(), trace, rows, max_new_tokens=N_NEW, on_step=look)
    for one, answer in zip(said, done.answers, strict=True):
        one.ids = answer.ids
    return said


def careful(row: SelectiveAttention) -> SelectiveAttention:
    """The row, built; positions are checked before the store reads there, and what attention reads is counted."""
    store, place, shape = row.store, row.store.place, row.trace.shape

    def checked(call: str, layer: int, idx: Tensor, lowest: int, end: int) -> None:
        where = f"layer {layer}: {call} got"
        assert idx.dtype == torch.int64, f"{where} {idx.dtype}, and positions are int64"
        assert idx.ndim == 3 and idx.shape[0] == 1 and idx.shape[1] in (shape.h, shape.h_kv), (
            f"{where} positions of shape {tuple(idx.shape)}, and it is (1, h_kv or h, k) with h_kv {shape.h_kv} and "
            f"h {shape.h}"
        )
        wrong = idx[(idx < lowest) | (idx >= end)].tolist()
        assert not wrong, f"{where} {listed(wrong)}, and positions are {lowest} to {end - 1}"

    def checked_place(layer: int, placement: Placement) -> None:
        chosen = getattr(placement, "chosen", None)
        if isinstance(placement, Ragged):
            n_heads = len(placement.chosen)
            assert n_heads == shape.h_kv, f"layer {layer}: Ragged got {n_heads} heads, not {shape.h_kv}"
            for positions in placement.chosen:
                checked("Ragged", layer, positions.expand(1, shape.h_kv, -1), 0, row.trace.s_prompt)
        elif isinstance(chosen, Tensor):
            lowest = 0 if chosen.shape[1] == shape.h_kv else -1  # query heads may choose different numbers of tokens
            checked(type(placement).__name__, layer, chosen, lowest, row.trace.s_prompt)
        place(layer, placement)

    def with_checks(layer: Layer) -> None:
        if not isinstance(layer, Fetching):
            return
        fetch = layer.fetch

        def checked_fetch(idx: Tensor, padded: bool = False) -> Part:
            checked("fetch", layer.index, idx, -1 if padded else 0, layer.n_seen)
            return fetch(idx, padded)

        layer.fetch = checked_fetch

    store.place = checked_place
    built(row)
    for layer in store.layers.values():
        with_checks(layer)
    row.n_read = {}  # type: ignore[attr-defined]
    return row


@contextmanager
def counting() -> Iterator[None]:
    """With a count of what rows hand to attention."""

    def count_parts(rows: Sequence[Any], layer: int, parts: Sequence[Sequence[Part]]) -> None:
        for row, own in zip(rows, parts, strict=True):
            row.n_read[layer] = tokens_and_pseudo(own, row.trace.shape.h)

    with patch("kvbench.engine.step.count_parts", count_parts):
        yield


def look_at(row: Any, step: int, layer: int) -> Step:
    entry = next(e for e in reversed(row.store.ledger.entries) if e.layer == layer)
    assert entry.step == step, f"layer {layer} has no entry in the books for step {step}"
    held, (n_read, n_pseudo) = row.store[layer], row.n_read[layer]
    promised = [*(range(held.n_seen) if row.variant.is_full else row.protected(layer))]
    return Step(
        step, layer, held.attended(), held.positions()[0].clone(), [idx.clone() for idx in held.fetched()],
        n_read, entry.attended, n_pseudo, entry.pseudo_tokens, entry.moved_meta_bytes, promised,
    )  # fmt: skip


@cache
def watched(one: Subject, ratio: str) -> Said:
    """What the method says alone."""
    return answers([variant(one, ratio)])[0]


def difference(a: Said, b: Said, name_b: str) -> str | None:
    """Where two answers of the same variant part."""
    for one, other in zip(a.steps, b.steps, strict=True):
        unlike = (one.attended != other.attended).nonzero()
        if len(unlike):
            head, position = unlike[0].tolist()
            whether = "attends" if one.attended[head, position] else "does not attend"
            return (
                f"step {one.step}, layer {one.layer}: query head {head} {whether} to position {position}, and "
                f"{name_b} it is the other way round"
            )
    if a.ids != b.ids:
        at = next(i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y)
        return f"token {at + 1} of the answer is {a.ids[at]}, and {name_b} {b.ids[at]}"
    return None


# --- properties ---


def whole_budget(one: Subject) -> None:
    if one.kind.traits_of(one.params).adapts:
        return  # no budget, and so none that is whole
    full = answers([Full.variant_for(Full.Params(), BudgetRequest(Fraction(1), None, Fraction(0)), model().shape, S)])
    if one.kind.traits.changes:  # it attends to all at ratio 1, and is exact where it may keep all bytes
        request = BudgetRequest(None, None, Fraction(one.comm), memory=Fraction(1))
        mine = answers([one.kind.variant_for(one.params, request, model().shape, S)])
    else:
        mine = answers([variant(one, "1")])
    assert mine[0].ids == full[0].ids, (
        f"at the whole budget the answer is {mine[0].ids}, and that of full attention {full[0].ids}"
    )


def chosen_once(one: Subject, ratio: str) -> None:
    shape = model().shape
    for seen in watched(one, ratio).steps:
        where = f"step {seen.step}, layer {seen.layer}"
        for head, tokens in enumerate(seen.resident):
            twice = repeated(tokens[tokens >= 0])
            assert not twice, f"{where}: KV head {head} keeps {listed(twice)} twice"
        for head in range(shape.h):
            asked = [idx[0, head // (shape.h // idx.shape[1])] for idx in seen.fetched]
            tokens = torch.cat([*asked, torch.empty(0, dtype=torch.int64)])
            tokens = tokens[tokens >= 0]
            twice = repeated(tokens)
            assert not twice, f"{where}: query head {head} selects {listed(twice)} twice"
            there = tokens[torch.isin(tokens, seen.resident[head // shape.g])].tolist()
            assert not there, f"{where}: query head {head} fetches {listed(there)} beside what is resident"
        if one.kind.traits.attends_current:
            assert bool(seen.attended[:, -1].all()), f"{where}: the current token is not attended to"
        n = int(seen.attended.sum())
        assert n == seen.n_counted, f"{where}: {n} tokens are attended to, and the books count {seen.n_counted}"
        assert seen.n_read == n, (
            f"{where}: attention reads {seen.n_read} tokens, and the store knows of {n}; return only what it holds"
        )
        assert seen.n_pseudo == seen.n_pseudo_counted, (
            f"{where}: attention reads {seen.n_pseudo} pseudo-tokens, and the books count {seen.n_pseudo_counted}; "
            "count them as pseudo_tokens"
        )
        needed = seen.n_pseudo * token_bytes(shape) // shape.h
        assert seen.find_bytes >= needed, (
            f"{where}: K and V of {seen.n_pseudo} pseudo-tokens are {needed} bytes, and moved_meta_bytes has "
            f"{seen.find_bytes}: what stands for tokens is within comm"
        )


def some_layer_compressed(one: Subject) -> None:
    first, *_ = accepted(one, ("0.2", "0.5", "0.9"))
    asked = variant(one, first)
    check_skips(asked.row(read([asked]), N_NEW))


def holds_what_it_counts(one: Subject) -> None:
    first, *_ = accepted(one, ("0.2", "0.5", "0.9"))
    row = watched(one, first).row
    if n_bytes := uncounted_bytes(row):
        shape = row.trace.shape
        full = token_bytes(shape) * S * len(shape.attention_layers)
        raise AssertionError(
            f"at ratio {first}, tensors of the method's own hold {n_bytes} bytes, far more than it counts, and "
            f"K and V of the whole prompt have {full}; count them as resident_meta_bytes"
        )


def reads_what_it_counts(one: Subject) -> None:
    """Of tokens that a step does not attend to, values change nothing, and keys only where they are counted as read."""
    first, *_ = accepted(one, ("0.2", "0.5", "0.9"))
    asked = variant(one, first)
    trace = read([asked])
    with torch.inference_mode():
        row = built(asked.row(trace, N_NEW))
        if not row.traits.rolls_back or asked.is_full:
            return
        for layer in trace.shape.attention_layers:
            if layer not in row.skipped and layer not in trace.positions:
                layer_reads_what_it_counts(row, layer)


def layer_reads_what_it_counts(row: SelectiveAttention, layer: int) -> None:
    trace, shape = row.trace, row.trace.shape
    draw = torch.Generator().manual_seed(layer)
    q, k, v = (torch.randn(1, heads, 1, shape.d_h, generator=draw) for heads in (shape.h, shape.h_kv, shape.h_kv))

    x = torch.randn(1, 1, shape.d_model, generator=draw)

    def outcome() -> tuple[Tensor, Tensor, Entry]:
        fork = fork_of(row)
        fork.q_ahead, fork.x_now = q, x
        out = attend_group(type(fork), [fork], layer, q, k, v, trace.softmax[layer])[0]
        return out, fork.store[layer].attended(), fork.store.ledger.entries[-1]

    def differs_with(x: Tensor, where: Tensor) -> bool:
        """Whether the step is another one where x has large numbers of either sign there."""
        before = x.clone()
        signs = torch.arange(x.shape[2]) % 2 * 2.0 - 1
        x.copy_(torch.where(where, 8 * x.abs().max() * signs.view(1, 1, -1, 1), x))
        out, attended, _ = outcome()
        x.copy_(before)
        return not (torch.equal(out, usual) and torch.equal(attended, attended_to))

    usual, attended_to, entry = outcome()
    unseen = ~attended_to[:, : trace.s_prompt].unflatten(0, (shape.h_kv, -1)).any(1)  # (h_kv, s)
    where = unseen.view(1, shape.h_kv, -1, 1)
    assert not differs_with(trace.values(layer), where), (
        f"layer {layer}: the output changes with values of tokens that the step does not attend to; attend to what "
        "resident() and select() name, and correct the output with what is counted"
    )
    if not differs_with(trace.keys(layer), where):
        return
    n_bytes = 0
    for head, channel in product(range(shape.h_kv), range(shape.d_h)):
        one = torch.zeros(1, shape.h_kv, 1, shape.d_h, dtype=torch.bool)
        one[:, head, :, channel] = True
        n_bytes += int(unseen[head].sum()) * ELEMENT_BYTES * differs_with(trace.keys(layer), where & one)
    counted = entry.moved_meta_bytes + entry.read_meta_bytes + entry.searched_bytes
    assert counted >= max(n_bytes, 1), (
        f"layer {layer}: the step depends on {n_bytes} bytes of keys of tokens that it does not attend to, and counts "
        f"{counted} as read to find them; count moved_meta_bytes"
    )


def repeated(tokens: Tensor) -> list[int]:
    values, counts = tokens.unique(return_counts=True)
    return values[counts > 1].tolist()


def within_budget(one: Subject, ratio: str) -> None:
    if not one.keeps_budget:
        return
    if one.kind.traits.of_answers and one.counts is None:
        for counts in COUNTS:
            try:
                within_budget(replace(one, counts=counts), ratio)
            except Refused:  # a method that leaves the prompt whole holds no mean and no peak below it
                if counts == "target":
                    raise
        return
    row = watched(one, ratio).row
    shape, exempt, budget = row.trace.shape, set(row.skipped), row.budget
    priced = [entry for entry in row.store.ledger.entries if entry.layer not in exempt]
    n_layers = len({entry.layer for entry in priced})
    if one.kind.traits.keeps_budget_in == "mean":
        return within_mean(one, ratio)
    if one.counts == "mean":
        held = sum(e.attended for e in priced) / shape.h / len(priced)
        allowed = half_more(budget.most or budget.s_prompt + N_NEW)
        assert held <= allowed, f"steps attend to {held:.1f} tokens on average"
        assert row.store.ledger.within(budget, shape, exempt, in_mean=True)
        return
    for step in sorted({entry.step for entry in priced}):
        entries = [entry for entry in priced if entry.step == step]
        tokens, allowed = sum(e.attended for e in entries) / shape.h / n_layers, budget.allowance(step)
        assert tokens <= allowed, (
            f"step {step}: a query head attends to {tokens:.1f} tokens, mean over layers, and the budget allows "
            f"{allowed}, which are {budget.tokens} of the prompt and {allowed - budget.tokens} generated"
        )
        moved, room = sum(e.moved_meta_bytes for e in entries) / n_layers, find_bytes(shape, budget)
        assert moved <= room, (
            f"step {step}: {moved:.0f} bytes per layer are moved to find tokens, and comm={one.comm} allows {room}"
        )
    assert row.store.ledger.within(budget, shape, exempt), (
        f"whole_layers() names {sorted(exempt)}, and the other layers, or all where there is none, exceed the budget"
    )


def half_more(n: int) -> float:
    """A budget that is held on average, and half a token: an interval is even or odd."""
    return n + 0.5


def within_mean(one: Subject, ratio: str) -> None:
    """Of a method whose selections are random: the mean of several samples, within three of its standard errors."""
    rows = [answers([variant(one, ratio)], seed=seed)[0].row for seed in range(N_SAMPLES)]
    shape, budget = rows[0].trace.shape, rows[0].budget
    used: dict[str, list[float]] = {"tokens": [], "bytes": []}  # beyond what is allowed, a mean for each sample
    for row in rows:
        entries = [e for e in row.store.ledger.entries if e.layer not in set(row.skipped)]
        used["tokens"].append(sum(e.attended / shape.h - budget.allowance(e.step) for e in entries) / len(entries))
        used["bytes"].append(sum(e.moved_meta_bytes for e in entries) / len(entries) - find_bytes(shape, budget))
    for what, beyond in used.items():
        mean = sum(beyond) / N_SAMPLES
        error = (sum((x - mean) ** 2 for x in beyond) / (N_SAMPLES - 1) / N_SAMPLES) ** 0.5
        assert mean <= 3 * error, (
            f"a step and layer exceed the budget by {mean:.1f} {what} in the mean of {N_SAMPLES} samples, and their "
            f"standard error is {error:.1f}"
        )


def protected_attended(one: Subject, ratio: str) -> None:
    for seen in watched(one, ratio).steps:
        missing = (~seen.attended[:, seen.protected]).nonzero()
        for head, at in missing[:1].tolist():
            raise AssertionError(
                f"step {seen.step}, layer {seen.layer}: position {seen.protected[at]} is protected, and query head "
                f"{head} does not attend to it"
            )


def same_again(one: Subject, ratio: str) -> None:
    problem = difference(watched(one, ratio), answers([variant(one, ratio)])[0], "the next time")
    assert problem is None, f"{problem}; draw random numbers from a torch.Generator with a seed"


def same_beside_others(one: Subject) -> None:
    """Also after another sample, and whatever the order: nothing is shared but what the trace says it shares."""
    first, *more = accepted(one, ("0.3", "0.1", "0.5", "0.9"))
    other = other_params(one, first)
    mine = [(one, first), *([(other, first)] if other else []), *((one, ratio) for ratio in more[:1])]
    alone = [answers([variant(copy_of(who), ratio)])[0] for who, ratio in mine]
    beside = neighbours(one.name)
    answers([variant(one, first)], seed=1)
    for order in (1, -1):
        variants = [variant(who, ratio) for who, ratio in mine]
        asked = [variants[0], *beside, *variants[1:]][::order]
        said = dict(zip(map(id, asked), answers(asked), strict=True))
        for (who, ratio), before, now in zip(mine, alone, variants, strict=True):
            problem = difference(before, said[id(now)], "beside other variants")
            at = f"at ratio {ratio}" + (f" with {who.params}" if who is other else "")
            assert problem is None, (
                f"{at}, alone, {problem}, so it reads what another variant or sample left; keep what belongs to a "
                "sample in self, and give trace.once a key that holds all that the result depends on"
            )


def neighbours(name: str) -> list[Variant]:
    """Full attention and the methods behind this one in the list, a few: with all of them the suite takes an hour."""
    methods = [each for each in METHODS if known(each) == each and each not in (name, "full")]
    at, found = sum(each < name for each in methods), [variant(ours("full"), "0.2")]
    for each in methods[at:] + methods[:at]:
        with suppress(Refused):  # of one that the suite's model is too small for
            one = ours(each)
            found.append(variant(one, accepted(one, ("0.2", "1"))[0]))
        if len(found) > BESIDE:
            break
    return found


def source_unaltered(one: Subject) -> None:
    ratio, *_ = accepted(one, ("0.2", "0.5", "0.9"))
    asked = variant(one, ratio)
    trace = read([asked])
    before = {what: x.clone() for what, x in parts_of(trace, asked)}
    answers([asked], trace=trace)
    for what, x in parts_of(trace, asked):
        assert torch.equal(before[what], x), (
            f"at ratio {ratio}, {what} of the trace are altered, which all variants share"
        )


def parts_of(trace: Trace, asked: Variant) -> Iterable[tuple[str, Tensor]]:
    assert trace.logits is not None
    yield "the logits", trace.logits
    for layer in trace.shape.attention_layers:
        yield f"the keys of layer {layer}", trace.keys(layer)
        yield f"the values of layer {layer}", trace.values(layer)
        for what in asked.observations:
            yield f"the observations {what} of layer {layer}", trace.observed(what, layer)


def labelled(one: Subject) -> None:
    comm = "0" if one.kind.traits.of_answers else one.comm
    label = one.kind.label(one.params, BudgetRequest(Fraction("0.2"), None, Fraction(comm)))
    assert one.kind.title.strip() and label.startswith(one.kind.title), (
        f"the label {label!r} does not begin with the title {one.kind.title!r}"
    )
    compensated = one.kind.traits.drops and not one.kind.traits.of_answers and not one.kind.traits_of(one.params).adapts
    assert label.endswith("(C)") == compensated, f"the label {label!r} has (C) where drops is {one.kind.traits.drops}"
    assert isinstance(one.kind.version, int) and one.kind.version >= 1, f"the version is {one.kind.version!r}"


Property = Callable[[Subject], None]
PropertyOfRatio = Callable[[Subject, str], None]
ONCE: dict[str, Property] = {
    "the whole budget gives the answer of full attention": whole_budget,
    "the answer is the same alone and beside others": same_beside_others,
    "the trace stays as it was": source_unaltered,
    "label and version are there": labelled,
    "some layer is compressed": some_layer_compressed,
    "a step depends on nothing that is not counted as read": reads_what_it_counts,
    "what it holds beside K and V is counted": holds_what_it_counts,
}
AT_EACH_RATIO: dict[str, PropertyOfRatio] = {
    "each token is chosen once and counted once": chosen_once,
    "no step exceeds the budget": within_budget,
    "protected tokens are attended to": protected_attended,
    "the answer is the same the next time": same_again,
}


# --- the command ---


def at_all(check: PropertyOfRatio, one: Subject, ratios: Sequence[str], file: str) -> tuple[str, str]:
    """A property at several ratios: the first that breaks it, else those that the method refuses."""
    refused = []
    for ratio in ratios:
        verdict, why = judged(lambda ratio=ratio: check(one, ratio), file)
        if verdict == "BROKEN":
            return verdict, f"at ratio {ratio}, {why}"
        refused += [(ratio, why)] if verdict == "refused" else []
    if not refused:
        return "held", ""
    verdict = "refused" if len(refused) == len(ratios) else "held"
    return verdict, f"refuses ratio {', '.join(ratio for ratio, _ in refused)}: {refused[-1][1]}"


def run(one: Subject, ratios: Sequence[str]) -> bool:
    """Print how each property stands: whether none is broken."""
    file = inspect.getfile(one.kind)
    print(f"{one.kind.title}: {one.kind.__name__} of {file}, {one.params}")
    checks = {name: lambda check=check: judged(lambda: check(one), file) for name, check in ONCE.items()}
    checks |= {name: lambda check=check: at_all(check, one, ratios, file) for name, check in AT_EACH_RATIO.items()}
    return report(checks)


def main(arguments: list[str]) -> int:
    try:
        if any(outside.is_task(word) for word in arguments if not word.startswith("-") and "=" not in word):
            return of_task(arguments)
        return of_method(arguments)
    except ConfigError as error:
        print("kvbench conformance:", " ".join(str(error).split()), file=sys.stderr)
        return 2


def of_method(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench conformance", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("method", help="path/to/mine.py, path/to/mine.py:Class, or a name; of a task, too")
    parser.add_argument("params", nargs="*", metavar="method.KEY=VALUE", help="parameters other than the defaults")
    parser.add_argument("--ratio", nargs="+", default=RATIOS, metavar="R", help="budgets to try, as shares of a prompt")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the model is so small that a second thread only waits
    for ratio in given.ratio:
        readers_of(Keys)["ratio"](ratio, "--ratio")
    found = subject([f"method={given.method}", *given.params])
    with wide_enough(found):
        return int(not run(found, given.ratio))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
