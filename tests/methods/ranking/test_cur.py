from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.methods.ranking.cur import CUR, leverages, local_shares
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, trace_of

PARAMS = CUR.Params("kv_product", 16, "whole", 4, None, 0)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "cur").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' scores behind the sinks, and what they keep."""
    meta, x = load(path)
    window = meta["window"] if meta["local"] else None
    params = replace(PARAMS, leverage=meta["leverage"], window=window, n_sink=meta["n_sink"])
    k, v = (torch.from_numpy(x[name]) for name in "kv")
    row = row_of(CUR, params, trace_of(k, v, meta["Hk"]), request(tokens=meta["n_kept"]))
    theirs = x["score"][..., meta["n_sink"] :]
    problem = first(
        differs("scores", row.scores(0).numpy() / theirs, theirs / theirs, 1e-5),
        differs("kept", row.store[0].positions().sort(-1).values, x["kept_idx"]),
    )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_cur_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def drawn(s: int = 70, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, s, 16, generator=draw), torch.randn(1, 2, s, 16, generator=draw)


@pytest.mark.parametrize("leverage", ["kv_product", "kv_avg", "key", "value"])
@pytest.mark.parametrize("window", [None, 16])
def test_turned_keys_are_worth_the_same_and_a_heads_scores_add_up_to_1(leverage: str, window: int | None) -> None:
    k, v = drawn()
    params = replace(PARAMS, leverage=leverage, window=window)
    turn = torch.linalg.qr(torch.randn(70, 16, 16, generator=torch.Generator().manual_seed(1))).Q
    found = leverages(k, v, params)
    torch.testing.assert_close(leverages((k.unsqueeze(-2) @ turn).squeeze(-2), v, params), found)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 2))


def test_a_factor_on_all_keys_of_a_window_changes_nothing() -> None:
    k, v = drawn()
    longer = k.clone()
    longer[:, :, 16:32] *= 7
    torch.testing.assert_close(leverages(longer, v, PARAMS), leverages(k, v, PARAMS))
    assert not torch.allclose(leverages(longer, v, replace(PARAMS, window=None)), leverages(k, v, PARAMS))


def test_a_last_window_of_one_token_is_always_kept_unless_it_is_scaled() -> None:
    k, v = drawn(65)
    rows = [
        row_of(CUR, replace(PARAMS, rest=rest), trace_of(k, v, 4), request(tokens=8)) for rest in ("whole", "scaled")
    ]
    assert all(64 in head for head in rows[0].store[0].positions()[0].tolist())
    assert not any(64 in head for head in rows[1].store[0].positions()[0].tolist())
    x = torch.tensor([1.0, 3.0, 4.0, 6.0, 2.0])
    assert local_shares(x, 2, False).tolist() == pytest.approx([0.25, 0.75, 0.4, 0.6, 1])
    assert local_shares(x, 2, True).tolist() == pytest.approx([0.25, 0.75, 0.4, 0.6, 0.5])


def test_windows_of_zero_keys_are_worth_nothing() -> None:
    k, v = drawn()
    k[:, :, 16:32] = 0
    found = leverages(k, v, PARAMS)
    assert (found[..., 16:32] == 0).all() and found.isfinite().all()
    assert (leverages(k * 0, v, PARAMS) == 0).all()


def test_sinks_stay_inside_the_budget_however_short_they_are() -> None:
    k, v = drawn()
    v[:, :, :4] = 0
    for n, n_sink in ((20, 4), (5, 4), (4, 1), (1, 0)):
        for head in row_of(CUR, PARAMS, trace_of(k, v, 4), request(tokens=n)).store[0].positions()[0].tolist():
            assert len(set(head)) == n and {*range(n_sink)} <= set(head)
            assert n_sink == 4 or not {*range(n_sink, 4)} & set(head)


def test_a_wide_sketch_ranks_much_as_lengths_do_and_is_the_seeds() -> None:
    k, v = drawn()
    wide, again = (leverages(k, v, replace(PARAMS, sketch=4000)) for _ in range(2))
    torch.testing.assert_close(wide, leverages(k, v, PARAMS), rtol=0.3, atol=0)
    assert torch.equal(wide, again) and not torch.equal(wide, leverages(k, v, replace(PARAMS, sketch=4000, seed=1)))
