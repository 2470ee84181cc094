from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import key_bytes
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Known, Trace
from kvbench.engine.search import select_rows
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.labels import label_scores
from kvbench.methods.calibration.base import Seen
from kvbench.methods.calibration.channels import Channels
from kvbench.methods.full import Full
from kvbench.methods.retrieving.double_sparsity import (
    DoubleSparsity,
    order_of,
    quantised,
    scored,
    union_of,
    union_within,
)
from kvbench.methods.retrieving.labels import weights_of
from kvbench.tests.vectors import Check, at, differs, first, load, request, row_of, step, trace_of

PARAMS = DoubleSparsity.Params("matched", 16, 16, "q", "paper", "query_head", "stay", None, 0, "missing", None)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "double_sparsity").glob("*.npz"))


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """The authors' evaluation class step by step, its masked prefill row by row, and their calibration script."""
    meta, x = load(path)
    if path.stem.startswith("calibration"):
        return [(path.stem, check_calibration(meta, x))]
    if path.stem.startswith("prefill"):
        return [(path.stem, check_prefill(meta, x))]
    return [(path.stem, check_steps(meta, x))]


def ordered_trace(k: np.ndarray, v: np.ndarray, h: int, s: int, order: np.ndarray, params: Any) -> Trace:
    """A trace whose channels have scores that fall in the given order."""
    trace = trace_of(torch.from_numpy(k[None]), torch.from_numpy(v[None]), h, s)
    heads, d_h = order.shape
    scores = torch.empty(heads, d_h).scatter_(
        1, torch.from_numpy(order).long(), torch.arange(d_h, 0.0, -1).expand(heads, -1)
    )
    trace.know(scored(params), Known({0: scores}))
    return trace


def published(meta: dict[str, Any]) -> Any:
    return replace(
        PARAMS, comm_mode="native", group_factor=meta["d"] // meta["label_channels"], generated="compete",
        label_bits=meta["label_bits"], heavy=meta["heavy"],
    )  # fmt: skip


def check_steps(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    h, s, n_steps, params = meta["H"], meta["S"], meta["steps"], published(meta)
    trace = ordered_trace(x["k"], x["v"], h, s, x["channel_order"], params)
    row = row_of(DoubleSparsity, params, trace, request(tokens=s - 1, comm="1"))
    problems = []
    for t in range(n_steps):
        q, k, v = at(x["q"][None], t), at(x["k"][None], s + t), at(x["v"][None], s + t)
        out = step(row, q, k, v, t + 1)
        labels = row.index[0]
        scores = label_scores(weights_of(labels, row.asked_of(0, q)), labels.keys, s + t + 1)[0]
        scores = scores * meta["label_channels"] ** -0.5
        problems += [
            differs(f"scores of step {t}", scores, x["label_scores_f64"][:, t, : s + t + 1], 5e-5),
            differs(f"selected at step {t}", row.store.attended(0), x["selected"][:, t, : s + t + 1]),
            differs(f"out of step {t}", out[0, :, 0], x["out"][:, t], 1e-5),
        ]
    return first(*problems)


def check_prefill(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    """Every row of the masked prefill is a step over the tokens before it."""
    params = published(meta)
    problems = []
    for i in range(1, meta["S"]):
        trace = ordered_trace(x["k"], x["v"], meta["H"], i, x["channel_order"], params)
        row = row_of(DoubleSparsity, params, trace, request(tokens=max(1, i - 1), comm="1"))
        out = step(row, at(x["q"][None], i), at(x["k"][None], i), at(x["v"][None], i))
        problems.append(differs(f"out of row {i}", out[0, :, 0], x["out"][:, i], 1e-5))
    return first(*problems)


def check_calibration(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    kind, sums = Channels(), None
    for i in range(len(meta["lengths"])):
        q, k, cos, sin = (torch.from_numpy(x[f"{name}_{i}"])[None] for name in ("q_pre", "k_pre", "cos", "sin"))
        new = kind.sums(Seen(rotated(q, cos, sin), rotated(k, cos, sin), q, k))
        sums = new if sums is None else kind.joined(sums, new)
    assert sums is not None
    found = kind.arrays(sums)
    ours = {"q": found["q"], "k": found["k"], "qk": found["qk_as_released"]}
    return first(
        *(differs(f"score_{name}", scores, x[f"score_{name}"], 1e-4) for name, scores in ours.items()),
        *(differs(f"order_{name}", order_of(scores), x[f"order_{name}"]) for name, scores in ours.items()),
    )


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_reference_vectors(path: Path) -> None:
    for name, problem in run_vectors(path):
        assert problem is None, f"{name}: {problem}"


def test_vectors_of_every_kind_are_there() -> None:
    assert {path.stem.split("_")[0] for path in GOLDEN} == {"calibration", "gqa", "heavy", "mha", "prefill"}


# --- What a correct implementation shows ------------------------------------------------------


def random_trace(
    h: int = 6, h_kv: int = 2, s: int = 60, d_h: int = 16, params: Any = PARAMS, seed: int = 0
) -> tuple[Trace, Tensor, Tensor, Tensor]:
    """A trace of random keys with scores of their own, and what is fed behind the prompt: (1, heads, 8, d_h) each."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, s + 8, d_h, generator=draw) for heads in (h, h_kv, h_kv))
    trace = trace_of(k, v, h, s)
    scores = torch.rand(h_kv if params.channel == "k" else h, d_h, generator=draw)
    trace.know(scored(params), Known({0: scores}, {"text": "drawn"}))
    return trace, q[:, :, s:], k[:, :, s:], v[:, :, s:]


def fed(q: Tensor, k: Tensor, v: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """What step `t` is made with."""
    return q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]


def made_steps(row: Any, q: Tensor, k: Tensor, v: Tensor, n: int = 3) -> list[Tensor]:
    return [step(row, *fed(q, k, v, t), t + 1) for t in range(n)]


@pytest.mark.parametrize("generated", ["stay", "compete"])
def test_with_all_channels_it_fetches_the_largest_logits_of_each_query_head(generated: str) -> None:
    params = replace(PARAMS, generated=generated)
    trace, q, k, v = random_trace(params=params)
    row = row_of(DoubleSparsity, params, trace, request(tokens=13, comm="1"))
    assert row.plan == DoubleSparsity.Plan(13, 16, True, 16)
    made_steps(row, q, k, v)
    keys = torch.cat([trace.keys(0), k[:, :, :3]], 2)
    logits = (q[0, :, 2].view(2, 3, 1, 16) * keys[0].unsqueeze(1)).sum(-1).flatten(0, 1)  # (h, 63)
    n, count = (63, 16) if generated == "compete" else (60, 13)
    expected = logits[:, :n].topk(count).indices.sort(-1).values
    assert torch.equal(row.store[0].fetches[0][0].sort(-1).values, expected)
    assert int(row.store.attended(0).sum()) == 6 * 16  # thirteen of the prompt and three generated ones either way


def test_with_all_tokens_it_is_full_attention() -> None:
    trace, q, k, v = random_trace()
    full = row_of(Full, Full.Params(), trace, request(ratio="1"))
    for params in (PARAMS, replace(PARAMS, generated="compete", heavy=99, comm_mode="native", group_factor=4)):
        row = row_of(DoubleSparsity, params, trace, request(tokens=59, comm="1"))
        if params.heavy is None:
            row = row_of(DoubleSparsity, params, trace, request(tokens=59, comm="1"), replace(row.plan, k=60))
        for ours, exact in zip(made_steps(row, q, k, v), made_steps(full, q, k, v), strict=True):
            torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
        full = row_of(Full, Full.Params(), trace, request(ratio="1"))


def test_channels_matter_as_a_set() -> None:
    """Other scores of the same first channels fetch the same tokens."""
    found = []
    for scale in (1.0, -1.0):
        trace, q, k, v = random_trace()
        params = replace(PARAMS, comm_mode="native", group_factor=4)
        rank = order_of(trace.observed(scored(params), 0)).sort(-1).indices.float()
        trace.know(scored(params), Known({0: torch.where(rank < 4, 10 + scale * rank, -rank)}))
        row = row_of(DoubleSparsity, params, trace, request(tokens=9, comm="1"))
        made_steps(row, q, k, v, 1)
        found.append(row.store[0].fetches[0].sort(-1).values)
    assert torch.equal(*found)


def test_quantised_labels_by_their_definition() -> None:
    labels = torch.tensor([[[0.0, 1.0, 0.5, 0.26], [3.0, 3.0, 3.0, 3.0], [-1.0, 0.0, 1.0, 2.0]]])
    assert quantised(labels, 16) is labels
    two = quantised(labels, 2)  # four values from the lowest to the highest; of two as near the even one
    torch.testing.assert_close(two[0, 0], torch.tensor([0.0, 1.0, 2 / 3, 1 / 3]))
    assert two[0, 1].tolist() == [3.0] * 4 and two[0, 2].tolist() == [-1.0, 0.0, 1.0, 2.0]
    torch.testing.assert_close(quantised(labels, 15), labels, atol=1e-4, rtol=0)


def test_a_group_reads_no_more_channels_than_are_paid_for() -> None:
    order = torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [3, 2, 1, 0]])  # two groups of two
    assert union_within(order, 2, 2).sum(-1).tolist() == [1, 1, 2, 2]  # {0} or {0, 1, 2}; {3, 2}
    assert union_within(order, 2, 3).sum(-1).tolist() == [3, 3, 3, 3]
    assert union_within(order, 2, 4).sum(-1).tolist() == [4, 4, 4, 4]
    channels = union_of(union_within(order, 2, 2), 2)
    assert channels.tolist() == [[0, -1], [2, 3]]


@pytest.mark.parametrize(
    ("change", "comm", "n_bytes"),
    [
        ({"granularity": "kv_head"}, "1/4", 2 * 2 * 4),  # heads, bytes, channels of 16
        ({"granularity": "kv_head", "label_bits": 4}, "1/4", 2 * (8 * 4 // 8 + 4)),
        ({"granularity": "query_head", "label_bits": 8}, "1", 6 * (6 + 4)),  # of 256 / 3 bits 32 are the scale's
        ({"comm_mode": "native", "group_factor": 4, "granularity": "kv_head"}, "1/2", 2 * 2 * 4),
    ],
)
def test_the_books_say_what_is_read(change: dict[str, Any], comm: str, n_bytes: int) -> None:
    params = replace(PARAMS, **change)
    trace, q, k, v = random_trace(params=params)
    row = row_of(DoubleSparsity, params, trace, request(tokens=11, comm=comm))
    made_steps(row, q, k, v)
    for t, entry in enumerate(row.store.ledger.entries):
        assert entry.moved_meta_bytes == entry.resident_meta_bytes == 60 * n_bytes
        assert entry.attended == 6 * (11 + t + 1)
    assert row.store.ledger.within(row.budget, trace.shape)


@pytest.mark.parametrize("comm", ["1/16", "3/16", "1/4", "1/2", "1"])
@pytest.mark.parametrize("ratio", ["0.05", "0.2", "0.5"])
def test_no_budget_is_exceeded(ratio: str, comm: str) -> None:
    params = replace(PARAMS, granularity="auto")
    trace, q, k, v = random_trace(params=params)
    row = row_of(DoubleSparsity, params, trace, request(ratio=ratio, comm=comm))
    assert row.plan.per_head == (Fraction(comm) >= Fraction(3, 16))
    made_steps(row, q, k, v)
    assert row.store.ledger.within(row.budget, trace.shape)
    assert all(e.moved_meta_bytes <= Fraction(comm) * key_bytes(trace.shape, 60) for e in row.store.ledger.entries)
    report = row.report()
    assert report["calibration"] == {"text": "drawn"}
    assert 1 <= report["n_labels"] <= 16 * Fraction(comm)


def test_published_numbers_of_labels_may_cost_a_group_more_and_are_counted() -> None:
    params = replace(PARAMS, comm_mode="native", group_factor=4)
    trace, q, k, v = random_trace(params=params)
    row = row_of(DoubleSparsity, params, trace, request(tokens=11, comm="1/4"))
    made_steps(row, q, k, v, 1)
    asks = order_of(trace.observed(scored(params), 0))[:, :4].reshape(2, 12)
    n_channels = sum(len(set(group)) for group in asks.tolist())
    assert n_channels > 2 * 4
    assert row.store.ledger.entries[0].moved_meta_bytes == 60 * 2 * n_channels
    assert not row.store.ledger.within(row.budget, trace.shape)


@pytest.mark.parametrize(
    "change",
    [{}, {"granularity": "kv_head"}, {"label_bits": 3}, {"granularity": "kv_head", "label_bits": 5},
     {"generated": "compete"}],
)  # fmt: skip
def test_rows_choose_together_what_they_choose_alone(change: dict[str, Any]) -> None:
    params = replace(PARAMS, **change)
    trace, q, k, v = random_trace(params=params)

    def rows() -> list[DoubleSparsity]:
        made = [row_of(DoubleSparsity, params, trace, request(tokens=n, comm="1")) for n in (5, 9, 20)]
        for row in made:
            row.store[0].append(*(x[:, :, :1] for x in (k, v)))
        return made

    asked = torch.cat([q[:, :, t : t + 1] for t in range(3)])
    together = select_rows(DoubleSparsity, rows(), 0, asked)
    for i, row in enumerate(rows()):
        alone = select_rows(DoubleSparsity, [row], 0, asked[i : i + 1])[0]
        assert torch.equal(together[i].idx.sort(-1).values, alone.idx.sort(-1).values)  # type: ignore[union-attr]


def test_variants_share_labels_and_competing_ones_have_their_own() -> None:
    trace, q, k, v = random_trace()
    base, same, wider = (row_of(DoubleSparsity, PARAMS, trace, request(tokens=8, comm=c)) for c in ("1/2", "1/2", "1"))
    assert base.index[0] is same.index[0] and base.index[0] is not wider.index[0]
    before = base.index[0].keys.clone()
    own = row_of(DoubleSparsity, replace(PARAMS, generated="compete"), trace, request(tokens=8, comm="1/2"))
    made_steps(own, q, k, v)
    assert torch.equal(base.index[0].keys, before)


# --- What a user may say ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"heavy": 8}, "method.heavy=8 .*generated=compete"),
        ({"calibration": "as_released"}, "calibration=as_released .*channel=qk"),
    ],
)
def test_wrong_parameters_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(PARAMS, **change)


LLAMA = ModelShape("llama", 32, 32, 8, 128, 1 << 17, tuple(range(32)))


@pytest.mark.parametrize(
    ("change", "comm", "named"),
    [
        ({"granularity": "query_head"}, "1/64", r"each of the 4 query heads .*comm=0.0312|comm=1/32 .*kv_head"),
        ({"granularity": "kv_head"}, "1/256", "no label for a KV head of 128 dimensions; use comm=1/128 or more"),
        ({"granularity": "kv_head", "label_bits": 4}, "1/64", "4 bits with its scale .*use comm=9/512 or more"),
        ({"comm_mode": "native"}, "1/64", "8 labels of method.group_factor=16; use comm=1/16 or more"),
        ({"comm_mode": "native", "group_factor": 12}, "1", "group_factor=12 does not divide the 128"),
        ({"channel": "k"}, "1", "8 KV heads of llama, not for its 32 query heads"),
    ],
)
def test_what_comm_or_the_model_has_no_room_for_is_refused(change: dict[str, Any], comm: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DoubleSparsity.check(replace(PARAMS, **change), request("0.1", comm=comm), LLAMA)


@pytest.mark.parametrize(
    ("change", "comm", "plan"),
    [
        ({}, "1/16", (100, 8, True, 8)),
        ({}, "1/64", (100, 2, False, None)),
        ({"channel": "k"}, "1/16", (100, 8, False, None)),
        ({"label_bits": 4}, "1/16", (100, 24, False, None)),  # 128 bits are too few for four scales
        ({"label_bits": 4}, "1/8", (100, 8, True, None)),  # 64 bits a head, of which 32 are the scale's
        ({"comm_mode": "native"}, "1/16", (100, 8, True, None)),
        ({}, "1", (100, 128, True, 128)),
    ],
)
def test_labels_that_comm_pays_for(change: dict[str, Any], comm: str, plan: tuple[Any, ...]) -> None:
    params = replace(PARAMS, **({"granularity": "auto"} | change))
    budget = DoubleSparsity.budget_for(PARAMS, request("0.1", comm=comm), 1000)
    assert DoubleSparsity.plan_for(params, budget, LLAMA) == DoubleSparsity.Plan(*plan)
