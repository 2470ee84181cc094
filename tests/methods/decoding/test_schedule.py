from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Stay
from kvbench.engine.softmax import Softmax
from kvbench.methods.decoding.cutting import CuttingMethod, best_first
from kvbench.methods.decoding.h2o_decode import H2ODecode
from kvbench.methods.decoding.random_decode import RandomDecode
from kvbench.methods.decoding.rkv import RKV, window_importance
from kvbench.methods.decoding.schedule import Schedule, target_of
from kvbench.methods.decoding.snapkv_decode import SnapKVDecode
from kvbench.methods.decoding.streamingllm_decode import StreamingLLMDecode
from kvbench.methods.decoding.tova_decode import TOVADecode
from kvbench.tests.methods.decoding.traces import held, replay, start, take
from kvbench.tests.vectors import Check, differs, first, load, trace_of

POSITION = ("position", True)
SMALL: dict[type[CuttingMethod], Any] = {
    RKV: RKV.Params(6, *POSITION, 4, 3, "score", Fraction("0.1")),
    SnapKVDecode: SnapKVDecode.Params(6, *POSITION, 4, 3, "score"),
    StreamingLLMDecode: StreamingLLMDecode.Params(6, *POSITION, 4),
    H2ODecode: H2ODecode.Params(6, *POSITION),
    TOVADecode: TOVADecode.Params(6, *POSITION),
    RandomDecode: RandomDecode.Params(6, *POSITION, 4, "none", "refuse", "fresh", "head", 0),
}
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "decode_time").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """R-KV's baselines, and kvpress' schedule."""
    meta, x = load(path)
    q, k, v = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v" if "v" in x else "k"))
    if meta["source"].startswith("kvpress"):
        return [(path.stem, check_kvpress(meta, x, q, k))]
    if meta["method"] == "streamingllm":
        params = StreamingLLMDecode.Params(meta["interval"], *POSITION, meta["first_tokens"])
        return [(path.stem, replay(start(StreamingLLMDecode, params, q, k, v, meta["S"], meta["budget"]), x))]
    assert meta["method"] == "snapkv", meta["method"]
    params = SnapKVDecode.Params(meta["interval"], *POSITION, meta["window_size"], meta["kernel_size"], "score")
    if meta["kernel_size"] == 1:
        return [(path.stem, replay(start(SnapKVDecode, params, q, k, v, meta["S"], meta["budget"]), x))]
    return [(path.stem, first(*(check_cut(meta, x, q, k, i) for i in range(len(x["compress_pos"])))))]


def check_cut(meta: dict[str, Any], x: dict[str, np.ndarray], q: Tensor, k: Tensor, i: int) -> str | None:
    """One cut of a trace with ties, from the positions that the cache held: the scores, and a set that they allow."""
    p, w = int(x["compress_pos"][i]), meta["window_size"]
    n = int((x["before_pos"][i][0] >= 0).sum())
    positions = torch.from_numpy(x["before_pos"][i][:, :n]).long()
    keys = torch.stack([k[0, head, at] for head, at in enumerate(positions)]).unsqueeze(0)
    queries = q[:, :, max(0, p + 1 - w) : p + 1]
    scores = window_importance(queries, keys, Softmax(k.shape[-1] ** -0.5), w, meta["kernel_size"])
    raw = window_importance(queries, keys, Softmax(k.shape[-1] ** -0.5), w, 1)
    best = best_first(scores, meta["budget"] - w)[0]
    kept = torch.zeros(len(positions), n, dtype=torch.bool).scatter_(1, best, True)
    must, may = (torch.from_numpy(x[name][i][:, : n - w]) for name in ("must_keep", "may_keep"))
    kept = kept[:, : n - w]
    return first(
        differs(f"importance before pooling at {p}", raw[0], x["importance_raw"][i][:, : n - w], 1e-6),
        differs(f"importance at {p}", scores[0], x["importance"][i][:, : n - w], 1e-6),
        None if bool((must & ~kept).sum() == 0) else f"cut at {p}: a slot is missing that must stay",
        None if bool((kept & ~(must | may)).sum() == 0) else f"cut at {p}: a slot stays that may not",
    )


def check_kvpress(meta: dict[str, Any], x: dict[str, np.ndarray], q: Tensor, k: Tensor) -> str | None:
    """Its schedule, with the scores that it computed."""

    class Scored(StreamingLLMDecode):
        """The best by a vector's scores."""

        n_cuts = 0

        def after_step(self) -> Iterator[tuple[int, Stay]]:
            self.plan = replace(self.plan, target=kvpress_target(meta, self.n_seen()))
            return super().after_step()

        def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
            scores = torch.from_numpy(x["score"][self.n_cuts][:, : keys.shape[2]]).unsqueeze(0)
            before = torch.from_numpy(x["before_pos"][self.n_cuts][:, : keys.shape[2]]).long()
            self.n_cuts += 1
            by_position = before.argsort(-1)  # its slots lie in another order than ours
            scores = scores[0].gather(-1, by_position).unsqueeze(0)
            early = positions.argsort(-1)
            return early.gather(-1, best_first(scores, self.plan.target))

    params = StreamingLLMDecode.Params(meta["interval"], "steps", False, 0)
    plan = WithRoom(kvpress_target(meta, meta["S"]), meta["interval"], "steps", at_prefill=False)
    return replay(start(Scored, params, q, k, k, meta["S"], plan.target, plan), x, in_order=False)


def kvpress_target(meta: dict[str, Any], n_seen: int) -> int:
    """What a cut of kvpress leaves: a number of tokens, or a share of those seen so far, which we do not offer."""
    return meta["target"] if "target" in meta else max(1, int(n_seen * (1 - meta["removed"])))


class WithRoom(Schedule):
    """A schedule whose target may grow so fast that a cut finds nothing to drop."""

    def room(self, s_prompt: int) -> int:
        return 1 << 10

    def room_behind(self, s_prompt: int) -> int:
        return 1 << 10


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_schedules_agree_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def drawn(n: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 16, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


@pytest.mark.parametrize("counts", ["target", "mean", "peak"])
def test_all_methods_hold_the_same_number_of_tokens_at_every_step(counts: str) -> None:
    q, k, v = drawn(90)
    rows = [start(kind, params, q, k, v, 15, 30, counts=counts) for kind, params in SMALL.items()]
    lengths = []
    for p in range(15, 90):
        for row in rows:
            take(row, p, q, k, v)
        lengths.append({row.store.ledger.entries[-1].attended for row in rows})
    assert all(len(each) == 1 for each in lengths)
    steps = [each.pop() / 4 for each in lengths]
    if counts == "peak":
        assert max(steps) == 30
    if counts == "mean":
        full = steps[21:]  # once the cache has filled
        assert abs(np.mean(full[: len(full) // 6 * 6]) - 30) <= 0.5
    if counts == "target":
        assert max(steps) == 36 and held(rows[0]).shape[1] == 30 + (89 % 6)
    for row in rows:
        in_mean = row.budget.counts == "mean"
        assert row.store.ledger.within(row.budget, row.trace.shape, in_mean=in_mean)


@pytest.mark.parametrize("kind", SMALL)
def test_a_budget_that_holds_prompt_and_answer_cuts_nothing(kind: type[CuttingMethod]) -> None:
    q, k, v = drawn(60)
    row = start(kind, SMALL[kind], q, k, v, 20, 60)
    for p in range(20, 60):
        take(row, p, q, k, v)
        assert row.store[0].attended().all()
    assert (np.sort(held(row)) == np.arange(60)).all()


@pytest.mark.parametrize("n_sink", [0, 4])
def test_with_an_interval_of_one_streamingllm_holds_sinks_and_the_latest_tokens(n_sink: int) -> None:
    q, k, v = drawn(70)
    row = start(StreamingLLMDecode, StreamingLLMDecode.Params(1, *POSITION, n_sink), q, k, v, 12, 16)
    for p in range(12, 70):
        take(row, p, q, k, v)
        latest = [*range(max(n_sink, p + 1 - (16 - n_sink)), p + 1)]
        assert held(row).tolist() == [[*range(n_sink), *latest]] * 2


def test_with_an_interval_of_one_tova_drops_what_each_query_looks_at_least() -> None:
    q, k, v = drawn(60, seed=2)
    row = start(TOVADecode, TOVADecode.Params(1, *POSITION), q, k, v, 30, 12)
    mine = held(row)[0].tolist()
    for p in range(30, 60):
        take(row, p, q, k, v)
        mine.append(p)
        keys = k[0, :, mine].double().repeat_interleave(2, 0)
        weights = ((q[0, :, p : p + 1].double() @ keys.mT)[:, 0] * 16**-0.5).softmax(-1).mean(0)
        mine.remove(mine[int(weights.argmin())])
        assert held(row).tolist() == [mine, mine]


def test_h2o_adds_up_what_every_query_gave() -> None:
    """Against sums over all queries so far, from positions."""
    q, k, v = drawn(60, seed=4)
    row = start(H2ODecode, H2ODecode.Params(5, *POSITION), q, k, v, 12, 20)
    past = [{*range(12)} for _ in range(2)]
    sums = np.zeros((2, 60))
    for p in range(60):
        if p >= 12:
            take(row, p, q, k, v)
        for head in range(2):
            there = sorted({*range(p + 1)} if p < 12 else past[head] | {p})
            logits = q[0, 2 * head : 2 * head + 2, p].double() @ k[0, head, there].double().mT * 16**-0.5
            sums[head, there] += logits.softmax(-1).sum(0).numpy()
            if p >= 12:
                past[head].add(p)
                if p % 5 == 0 and len(past[head]) >= 20:
                    early = sorted(past[head])[:-10]
                    best = sorted(early, key=lambda at: -sums[head, at])[:10]
                    past[head] = {*best, *sorted(past[head])[-10:]}
        if p >= 12:
            assert [{*each} for each in held(row).tolist()] == past


def test_when_a_cache_is_cut() -> None:
    by_position, steps = Schedule(20, 8), Schedule(20, 8, "steps", at_prefill=False)
    assert [n for n in range(10, 60) if by_position.is_due(n, n, 10)] == [25, 33, 41, 49, 57]
    assert [n for n in range(11, 60) if steps.is_due(n, n, 10)] == [26, 34, 42, 50, 58]
    assert by_position.cuts_prompt(20) and not by_position.cuts_prompt(19) and not steps.cuts_prompt(50)
    assert (by_position.most(50), steps.most(50), steps.most(10)) == (28, 58, 28)
    slack, gated = Schedule(20, 8, "slack", at_prefill=False), Schedule(20, 8, "gated", at_prefill=False)
    assert next(n for n in range(40) if slack.is_due(n, n, 10)) == 28
    assert [n for n in range(40) if gated.is_due(n, n, 10)] == [24, 32]
    assert not replace(slack, count_prompt=False).is_due(37, 37, 10)
    assert replace(slack, count_prompt=False).is_due(38, 38, 10) and replace(slack, count_prompt=False).most(10) == 38
    assert [target_of(256, counts, 128) for counts in (None, "target", "mean", "peak")] == [256, 256, 192, 128]


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        (
            RKV,
            BudgetRequest(Fraction("0.2"), None, Fraction(0)),
            "ratio=0.2 is a share of a prompt, and R-KV",
        ),
        (RKV, BudgetRequest(None, 64, Fraction(1, 64)), "comm=1/64 means nothing for R-KV"),
        (RKV, BudgetRequest(None, 4, Fraction(0)), "budget=4 is too small: .*; use budget=5 or more"),
        (
            RKV,
            BudgetRequest(None, 10, Fraction(0), counts="peak"),
            "budget=10 with budget_counts=peak .*=11 or",
        ),
        (SnapKVDecode, BudgetRequest(None, 3, Fraction(0)), "method.window=4 tokens stay, .* use budget=5"),
        (StreamingLLMDecode, BudgetRequest(None, 4, Fraction(0)), "method.n_sink=4 first tokens stay.* use budget=5"),
        (H2ODecode, BudgetRequest(None, 1, Fraction(0)), "use budget=2 or more"),
    ],
)
def test_what_no_budget_can_be(kind: type[CuttingMethod], asked: BudgetRequest, message: str) -> None:
    shape = trace_of(*drawn(4)[1:], 4).shape
    with pytest.raises(ConfigError, match=message):
        kind.check(SMALL[kind], asked, shape)


def test_a_peak_is_refused_where_a_prompt_is_not_cut() -> None:
    q, k, v = drawn(60)
    with pytest.raises(ConfigError, match="budget=40 with budget_counts=peak is less than the 56 tokens"):
        start(StreamingLLMDecode, StreamingLLMDecode.Params(6, "steps", False, 4), q, k, v, 50, 40, counts="peak")
