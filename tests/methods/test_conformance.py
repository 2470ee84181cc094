"""What every method must hold, for every file in conf/method/: a new one falls under it by being there."""

import re
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from hydra import compose, initialize_config_dir

from engine.budget import BudgetRequest
from engine.decode import decode
from engine.errors import ConfigError
from engine.model import Model
from engine.observe import Observation
from engine.prefill import Trace, prefill
from evals.settings import build_params, load_class, settings
from methods.base import SelectiveAttention
from methods.full import Full
from tests.tiny import prompt, tiny
from tests.vectors import built
from tests.vectors import row_for as new_row

CONF = Path(__file__).parents[2] / "conf"
METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
N_NEW, S = 14, 240
RATIOS = ("0.05", "0.1", "0.2", "0.3", "0.5", "1")
FITTED = {"infllm": ["method.block_len=16"]}  # to so short a prompt
FITTED_COMM = {"sparq": "1/8"}  # to so few dimensions


@cache
def variant(name: str) -> tuple[type[SelectiveAttention], Any]:
    """A method with the parameters of its file."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = [f"method={name}", *FITTED.get(name.partition("_")[0], [])]
        cfg = compose("config", words, return_hydra_config=True)
    part = settings(cfg, {"method": name, "task": "needle"}).method
    kind: Any = load_class(part)
    return kind, build_params(kind, part.params, "method")


@cache
def model() -> Model:
    return tiny("llama")


def ask(ratio: str, comm: str = "1/16") -> BudgetRequest:
    return BudgetRequest(Fraction(ratio), None, Fraction(comm))


def ask_for(name: str, ratio: str) -> BudgetRequest:
    return ask(ratio, FITTED_COMM.get(name.partition("_")[0], "1/16"))


def plan(name: str, ratio: str, s: int) -> Any:
    kind, params = variant(name)
    return kind.plan_for(params, kind.budget_for(ask_for(name, ratio), s), model().shape)


def wanted(name: str, ratio: str, s: int) -> tuple[Observation, ...]:
    try:
        return variant(name)[0].observations(variant(name)[1], plan(name, ratio, s))
    except ConfigError:
        return ()


def read(*names: str, seed: int = 0, s: int = S) -> Trace:
    """A prefill with what these methods observe, at every ratio of this file."""
    observations = [what for name in names for ratio in RATIOS for what in wanted(name, ratio, s)]
    with model().hooked():
        trace = prefill(model(), prompt(s, seed), observations)
    seeds[trace] = seed
    return trace


seeds: WeakKeyDictionary[Trace, int] = WeakKeyDictionary()  # of the prompts, for passes anew


def row_for(name: str, trace: Trace, ratio: str) -> SelectiveAttention:
    """A variant on a prompt that was read; one with a prefill of its own reads it again.

    Where a method cannot meet the ratio on so small a model, it gets the one that its error recommends.
    """
    kind, params = variant(name)
    try:
        kind.check(params, ask_for(name, ratio), trace.shape)
        thinning = kind.thinning(plan(name, ratio, trace.s_prompt))
    except ConfigError as error:
        advice = re.search(r"ratio=(0\.\d+) or more", str(error))
        if advice is None or Fraction(advice[1]) <= Fraction(ratio):
            pytest.skip(f"{name} cannot meet ratio {ratio} on the test model: {error}")
        return row_for(name, trace, advice[1])
    observations = wanted(name, ratio, trace.s_prompt)
    if thinning is not None or not trace.has_observed(observations):
        with model().hooked():
            ids = prompt(trace.s_prompt, seeds[trace])
            trace = prefill(model(), ids, observations, thinning=thinning)
    return built(new_row(kind, params, ask_for(name, ratio), trace, N_NEW))


def say(trace: Trace, *rows: SelectiveAttention, on_step: Any = None) -> list[list[int]]:
    """What the rows answer: those on `trace` in one batch, those on traces of their own alone."""
    batches = [[row for row in rows if row.trace is trace]]
    batches += [[row] for row in rows if row.trace is not trace]
    answers: dict[SelectiveAttention, list[int]] = {}
    with model().hooked():
        for batch in filter(None, batches):
            decoded = decode(model(), batch[0].trace, batch, max_new_tokens=N_NEW, on_step=on_step)
            answers |= {row: said.ids for row, said in zip(batch, decoded.answers, strict=True)}
    return [answers[row] for row in rows]


@pytest.mark.parametrize("name", METHODS)
def test_the_whole_budget_gives_the_tokens_of_full_attention(name: str) -> None:
    trace = read(name)
    full = built(new_row(Full, Full.Params(), ask("1"), trace, N_NEW))
    answers = say(trace, full, row_for(name, trace, "1"))
    assert answers[1] == answers[0]


@pytest.mark.parametrize("ratio", [ratio for ratio in RATIOS if ratio != "1"])
@pytest.mark.parametrize("name", METHODS)
def test_books_budget_and_promises_hold_at_every_step(name: str, ratio: str) -> None:
    """What the ledger counts was attended to, protected tokens were; nothing was fetched twice or from nowhere."""
    trace = read(name)
    row = row_for(name, trace, ratio)

    def look(step: int, speaking: int) -> None:
        for layer in trace.shape.attention_layers:
            attended = row.store.attended(layer)
            entry = next(e for e in reversed(row.store.ledger.entries) if e.layer == layer)
            assert entry.step == step
            assert entry.attended == int(attended.sum())
            assert attended[:, list(row.protected(layer))].all()
            assert attended[:, -1].all(), "the current token is always attended to"
            n_resident = row.store[layer].n_seen - row.store[layer].n_window
            for idx in row.store[layer].fetches:
                for tokens in idx[0]:
                    real = tokens[tokens >= 0]
                    assert len(real) == len(real.unique()), "a token was fetched twice"
                    assert ((real >= 0) & (real < n_resident)).all(), "a resident token was fetched"

    say(trace, row, on_step=look)
    if "_" not in name:  # presets reproduce published settings, whose budgets are other ones
        assert row.store.ledger.within(row.budget, trace.shape, row.skipped_layers())


@pytest.mark.parametrize("name", METHODS)
def test_answers_are_the_same_alone_and_beside_others(name: str) -> None:
    """Also after another sample, and whatever the order of the rows: no state is shared."""
    trace = read(*METHODS)
    alone = {ratio: say(trace, row_for(name, trace, ratio))[0] for ratio in ("0.1", "0.3")}
    other = read(*METHODS, seed=1)
    say(other, row_for(name, other, "0.3"))
    rows = [
        row_for(name, trace, "0.3"),
        *(row_for(n, trace, "0.2") for n in METHODS),
        row_for(name, trace, "0.1"),
    ]
    for order in (rows, None):
        if order is None:
            order = [
                row_for(name, trace, "0.1"),
                *(row_for(n, trace, "0.2") for n in METHODS),
                row_for(name, trace, "0.3"),
            ]
            answers = say(trace, *order)[::-1]
        else:
            answers = say(trace, *order)
        assert (answers[0], answers[-1]) == (alone["0.3"], alone["0.1"])


@pytest.mark.parametrize("name", METHODS)
def test_a_fork_never_alters_its_source(name: str) -> None:
    trace = read(name)
    before = {layer: (trace.keys(layer).clone(), trace.values(layer).clone()) for layer in trace.shape.attention_layers}
    assert trace.logits is not None
    logits = trace.logits.clone()
    say(trace, row_for(name, trace, "0.2"))
    for layer, (keys, values) in before.items():
        assert torch.equal(trace.keys(layer), keys)
        assert torch.equal(trace.values(layer), values)
    assert torch.equal(trace.logits, logits)


@pytest.mark.parametrize("name", METHODS)
def test_labels_and_versions_are_filled_in(name: str) -> None:
    kind, params = variant(name)
    assert kind.label(params, ask("0.2")).startswith(kind.title)
    assert kind.label(params, ask("0.2")).endswith("(C)") == kind.drops
    assert kind.version >= 1
    assert kind.__module__.startswith("methods.")
