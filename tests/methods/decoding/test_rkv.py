from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.engine.observe import LastQueries
from kvbench.engine.softmax import Softmax
from kvbench.methods.decoding.rkv import RKV, key_redundancy, window_importance
from kvbench.methods.decoding.snapkv_decode import SnapKVDecode
from kvbench.tests.methods.decoding.traces import held, on, replay, start, take
from kvbench.tests.vectors import Check, differs, first, load, request, trace_of

RKV_PARAMS = RKV.Params(8, "position", True, 4, 7, "score", Fraction("0.1"))
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "rkv").glob("*.npz"))


def first_column(similar: Tensor) -> Tensor:
    """What the authors' `retain_direction: first` spares: column 0 in every row, whatever is alike."""
    return torch.zeros(len(similar), 1, dtype=torch.int64)


class SparesFirst(RKV):
    """That defect, which the method does not offer; its vectors hold everything else against ours."""

    def redundancy(self, keys: Tensor) -> Tensor:
        return key_redundancy(keys, first_column)


def run_vectors(path: Path) -> list[Check]:
    """The authors' scores and selections, and a trace over several cuts."""
    meta, x = load(path)
    window, kernel = (int(meta.get(name) or meta[f"{name}_size"]) for name in ("window", "kernel"))
    mix = Fraction(str(meta["mix_lambda"]))
    params = RKV.Params(meta.get("interval", 1), "position", True, window, kernel, "score", mix)
    q, k, v = (torch.from_numpy(x[name]) for name in ("q_window" if "q_window" in x else "q", "k", "v"))
    if "cache_len" in x:
        row = start(RKV, params, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), meta["S"], meta["budget"])
        return [(path.stem, replay(row, x))]
    n, n_last, softmax = k.shape[2], meta["window"], Softmax(k.shape[-1] ** -0.5)
    trace = trace_of(k, v, q.shape[1])
    trace._observed[LastQueries(n_last), 0] = q  # fewer than the window in one case
    spares_first = meta["retain_direction"] == "first"
    row = on(trace, SparesFirst if spares_first else RKV, params, meta["budget"])
    if not meta["compressed"]:
        return [(path.stem, differs("kept", row.store[0].resident()[0].k, x["k_out"]))]
    raw = window_importance(q, k, softmax, n_last, 1)
    redundant = row.redundancy(k)[..., : n - n_last]
    pooled = window_importance(q, k, softmax, n_last, kernel)
    problem = first(
        differs("importance before pooling", raw, x["importance_raw"], 1e-6),
        differs("importance", pooled, x["importance"], 1e-6),
        differs("redundancy", redundant[0], x["redundancy"], 1e-6),
        differs("score", float(mix) * pooled - (1 - float(mix)) * redundant, x["score"], 1e-6),
        differs("kept", held(row), x["kept_idx"][0]),
        differs("keys", row.store[0].resident()[0].k, x["k_out"]),
        differs("values", row.store[0].resident()[0].v, x["v_out"]),
    )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_rkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def drawn(n: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 16, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


@pytest.mark.parametrize("s", [5, 20, 33])
def test_the_last_tokens_stay_and_no_step_attends_to_more_than_target_and_interval(s: int) -> None:
    q, k, v = drawn(90)
    row = start(RKV, RKV_PARAMS, q, k, v, s, 20)
    for p in range(s, 90):
        take(row, p, q, k, v)
        assert row.store[0].attended().sum(-1).max() <= 28
        for head in held(row):
            assert len({*head.tolist()}) == len(head) and {*range(p - 3, p + 1)} <= {*head.tolist()}
    steps = [entry.attended // 4 for entry in row.store.ledger.entries]
    assert max(steps) == 28 and row.store[0].k.shape[2] == 28
    assert all(e.resident_meta_bytes == 4 * 4 * 16 * 2 for e in row.store.ledger.entries)


def test_of_exact_repeats_two_stay_and_all_that_are_unlike_each_other() -> None:
    """The page's example: 48 keys, a window of 8, a target of 30, and 20 of the 40 candidates one vector."""
    q, k, v = drawn(48, seed=3)
    k[:, :, 5:25] = k[:, :, 5:6]
    row = start(RKV, RKV.Params(8, "position", True, 8, 7, "score", Fraction(0)), q, k, v, 48, 30)
    for head in held(row):
        kept = {*head.tolist()}
        assert {*range(5), *range(25, 48)} <= kept and len(kept & {*range(5, 25)}) == 2


def test_without_redundancy_it_is_snapkv_while_decoding() -> None:
    q, k, v = drawn(100, seed=5)
    mine = start(RKV, RKV.Params(8, "position", True, 4, 7, "score", Fraction(1)), q, k, v, 30, 24)
    other = start(SnapKVDecode, SnapKVDecode.Params(8, "position", True, 4, 7, "score"), q, k, v, 30, 24)
    for p in range(30, 100):
        assert torch.equal(take(mine, p, q, k, v), take(other, p, q, k, v))
        assert (held(mine) == held(other)).all()


def test_the_order_of_slots_decides_who_stays() -> None:
    q, k, v = drawn(100, seed=6)
    by_score, by_position = (
        start(RKV, RKV.Params(8, "position", True, 4, 7, order, Fraction("0.1")), q, k, v, 30, 24)
        for order in ("score", "position")
    )
    for p in range(30, 100):
        take(by_score, p, q, k, v)
        take(by_position, p, q, k, v)
    assert (held(by_position)[:, 1:] > held(by_position)[:, :-1]).all()
    assert {*held(by_score)[0].tolist()} != {*held(by_position)[0].tolist()}
    assert "by position" in RKV.label(RKV.Params(8, "position", True, 4, 7, "position", Fraction(1)), request(tokens=9))
