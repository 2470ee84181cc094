from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import EVERYTHING
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.cells import ask
from kvbench.evals.settings import from_words
from kvbench.methods.full import Full
from kvbench.methods.gates.networks import GateScores, kvzap
from kvbench.methods.ranking.dms import DMS
from kvbench.tests.conformance import answers, model, ours
from kvbench.tests.vectors import built, differs, load, step, trace_of

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "kvzap").glob("*.npz"))
GATED = ours("dms_kvzap")
NORMS = ours("dms")


def kept_vectors(path: Path) -> str | None:
    """What heads attend to behind the prompt and behind each token of kvpress' KVzap."""
    meta, x = load(path)
    h_kv, s, n_steps = meta["Hk"], meta["S"], meta["steps"]
    names = ("weight", "bias") if meta["hidden"] is None else ("0.weight", "0.bias", "2.weight", "2.bias")
    own = {name: torch.from_numpy(x[f"w_{name.replace('.', '_')}"]) for name in names}
    trace = trace_of(torch.zeros(1, h_kv, s, 4), torch.zeros(1, h_kv, s, 4), h_kv)
    gate = GateScores("kvzap", "drawn")
    inputs = torch.from_numpy(x["x"])
    trace._observed[gate, 0] = kvzap(inputs[0, :s], own).unsqueeze(0)
    trace._shared["gate", gate, 0] = own
    params = replace(GATED.params, threshold=meta["threshold"], window=meta["window"])
    row = built(DMS.variant_for(params, EVERYTHING, trace.shape, s).row(trace, 16))
    for t in range(n_steps + 1):
        row.x_now = inputs[:, min(s + t, s + n_steps - 1)].unsqueeze(1)
        step(row, *(torch.zeros(1, h_kv, 1, 4) for _ in "qkv"), t=t + 1)
        seen = row.store.attended(0)
        attended = np.zeros((h_kv, s + n_steps), bool)
        attended[:, : s + t] = seen[:, : s + t].numpy()  # behind the step before
        if problem := differs(f"kept behind step {t}", attended, x["keep"][t]):
            return problem
    return None


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_delayed_eviction_agrees_with_reference_vectors(path: Path) -> None:
    assert kept_vectors(path) is None


def said(params: Any, *others: Any, n: int = 0) -> Any:
    variants = [DMS.variant_for(each, EVERYTHING, model().shape, 240) for each in (params, *others)]
    return answers(variants)[n]


def test_below_all_scores_it_is_full_attention_and_above_all_the_window_is_left() -> None:
    full = answers([Full.variant_for(Full.Params(), EVERYTHING, model().shape, 240)])[0]
    low, high = (said(replace(GATED.params, threshold=x)) for x in (-1e9, 1e9))
    assert low.ids == full.ids
    for one in high.steps:
        n = one.attended.shape[1]
        assert one.attended[:, n - 41 :].all() and not one.attended[:, : n - 41].any(), one.step


@pytest.mark.parametrize("one", [GATED, NORMS], ids=lambda one: one.name)
def test_no_head_takes_a_token_back_and_the_books_count_what_is_there(one: Any) -> None:
    found = said(one.params)
    shape = model().shape
    for layer in shape.attention_layers:
        steps = [each for each in found.steps if each.layer == layer]
        for earlier, later in pairwise(steps):
            n = earlier.attended.shape[1]
            assert (later.attended[:, :n] <= earlier.attended).all()
        entries = [entry for entry in found.row.store.ledger.entries if entry.layer == layer]
        for entry, each in zip(entries, steps, strict=True):
            assert entry.attended == int(each.attended.sum())
            token_bytes = found.row.store[layer].meter.token_bytes
            held = int(each.attended[:: shape.g].sum()) * token_bytes
            assert entry.resident_kv_bytes == held
        assert len({int(each) for each in steps[-1].attended.sum(1)}) > 1  # heads grew apart


@pytest.mark.parametrize("one", [GATED, NORMS], ids=lambda one: one.name)
def test_it_answers_alone_as_beside_others(one: Any) -> None:
    other = replace(one.params, threshold=one.params.threshold + 0.3)
    assert said(one.params).ids == said(one.params, other, other).ids
    assert said(other).ids == said(one.params, other, n=1).ids


def test_of_the_prompt_alone_generated_tokens_stay() -> None:
    found = said(replace(GATED.params, decode=False))
    last = found.steps[-1]
    assert last.attended[:, 240:].all() and not last.attended.all()


def test_a_number_that_is_none_is_below_nothing() -> None:
    row = built(DMS.variant_for(GATED.params, EVERYTHING, SHAPE, 60).row(observed(torch.full((1, 2, 60), np.nan)), 4))
    assert row.store[0].kept_counts() == [60, 60]


SHAPE = ModelShape("vectors", 1, 4, 2, 4, 1 << 20, (0,))


def observed(scores: Tensor) -> Any:
    n = scores.shape[2]
    trace = trace_of(torch.zeros(1, 2, n, 4), torch.zeros(1, 2, n, 4), 4)
    trace._observed[GateScores("kvzap", "drawn"), 0] = scores
    return trace


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method=dms", "method.scorer=snapkv"], "SnapKV has no score for a token that is generated"),
        (["method=dms", "method.window=-1"], "method.window=-1 is out of range"),
        (["method=dms", "method.threshold=.inf"], "method.threshold=.inf is not a number"),
        (["method=dms_kvzap", "method.scorer.gate=none.safetensors"], "cannot be read"),
    ],
)
def test_what_it_refuses(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask([from_words(["task=needle", *words])])


def test_any_scorer_may_judge_the_prompt() -> None:
    asked = ask([from_words(["method=dms", "method.scorer=snapkv", "method.decode=false", "task=needle"])])
    assert asked[0].params.scorer.rules.title == "SnapKV"
