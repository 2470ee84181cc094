from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.budget import key_bytes
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Known, Trace
from kvbench.engine.search import select_rows
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.labels import label_scores
from kvbench.methods.calibration.pca import components, moments
from kvbench.methods.full import Full
from kvbench.methods.retrieving.labels import weights_of
from kvbench.methods.retrieving.loki import Loki, fitted, n_components
from kvbench.tests.vectors import Check, at, differs, first, load, request, row_of, step, trace_of

PARAMS = Loki.Params("auto", None, "post", "query_head", "stay", "missing", None)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "loki").glob("*.npz"))


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """The authors' PCA, and their attention step by step with the components that they fitted."""
    meta, x = load(path)
    return [(path.stem, first(check_fit(meta, x), check_steps(meta, x)))]


def check_fit(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    """Projectors, since signs are arbitrary."""
    found = components(moments(torch.from_numpy(x["calibration_keys"])[None])).numpy()
    d, r = meta["d"], meta["components_used"]
    ours, theirs = found[:, :r], x["pca_components"][:, :r]
    return first(
        differs("projector", ours.transpose(0, 2, 1) @ ours, theirs.transpose(0, 2, 1) @ theirs, 1e-5),
        differs("mean", found[:, d], x["pca_mean"], 1e-5),
        differs("explained_variance_ratio", found[:, d + 1], x["explained_variance_ratio"], 1e-5),
    )


def fitted_trace(x: dict[str, np.ndarray], h: int, s: int, params: Any) -> Trace:
    trace = trace_of(torch.from_numpy(x["k"])[None], torch.from_numpy(x["v"])[None], h, s)
    parts = [x["pca_components"], x["pca_mean"][:, None], x["explained_variance_ratio"][:, None]]
    trace.know(fitted(params), Known({0: torch.from_numpy(np.concatenate(parts, 1)).float()}))
    return trace


def check_steps(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    h, s, n_steps = meta["H"], meta["S"], meta["steps"]
    top_r = meta["top_r"] if meta["top_r"] >= 1 else Fraction(str(meta["top_r"]))
    params = replace(PARAMS, top_r=top_r, top_k=Fraction(str(meta["top_k"])), generated="compete")
    row = row_of(Loki, params, fitted_trace(x, h, s, params), request(tokens=s - 1, comm="1"))
    labels, problems = row.index[0], []
    if labels.keys.shape[2] != meta["components_used"]:
        return f"{labels.keys.shape[2]} components, expected {meta['components_used']}"
    for t in range(n_steps):
        q, k, v = at(x["q"][None], t), at(x["k"][None], s + t), at(x["v"][None], s + t)
        out = step(row, q, k, v, t + 1)
        scores = label_scores(weights_of(labels, row.asked_of(0, q)), labels.keys, s + t + 1)[0] * meta["d"] ** -0.5
        problems += [
            differs(f"scores of step {t}", scores, x["label_scores_f64"][:, t, : s + t + 1], 1e-5),
            differs(f"selected at step {t}", row.store.attended(0), x["selected"][:, t, : s + t + 1]),
            differs(f"out of step {t}", out[0, :, 0], x["out"][:, t], 1e-5),
        ]
    return first(*problems)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_reference_vectors(path: Path) -> None:
    for name, problem in run_vectors(path):
        assert problem is None, f"{name}: {problem}"


# --- What a correct implementation shows ------------------------------------------------------


def random_trace(
    h: int = 6, h_kv: int = 2, s: int = 60, d_h: int = 16, params: Any = PARAMS, seed: int = 0
) -> tuple[Trace, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A trace of random keys with components of other ones, and what is fed behind: (1, heads, 8, d_h) each."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, s + 8, d_h, generator=draw) for heads in (h, h_kv, h_kv))
    spread = torch.linspace(3, 0.1, d_h) * torch.randn(1, h_kv, 500, d_h, generator=draw)
    trace = trace_of(k, v, h, s)
    trace.know(fitted(params), Known({0: components(moments(spread))}, {"text": "drawn"}))
    return trace, q[:, :, s:], k[:, :, s:], v[:, :, s:]


def fed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What step `t` is made with."""
    return q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]


def made_steps(row: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: int = 3) -> list[torch.Tensor]:
    return [step(row, *fed(q, k, v, t), t + 1) for t in range(n)]


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("generated", ["stay", "compete"])
def test_with_all_components_it_fetches_the_largest_logits(granularity: str, generated: str) -> None:
    params = replace(PARAMS, granularity=granularity, generated=generated)
    trace, q, k, v = random_trace(params=params)
    row = row_of(Loki, params, trace, request(tokens=13, comm="1"))
    made_steps(row, q, k, v)
    keys = torch.cat([trace.keys(0), k[:, :, :3]], 2)
    logits = (q[0, :, 2].view(2, 3, 1, 16) * keys[0].unsqueeze(1)).sum(-1)  # (h_kv, g, 63)
    logits = logits.flatten(0, 1) if granularity == "query_head" else logits.sum(1)
    n, count = (63, 16) if generated == "compete" else (60, 13)
    expected = logits[:, :n].topk(count).indices.sort(-1).values
    assert torch.equal(row.store[0].fetches[0][0].sort(-1).values, expected)
    assert int(row.store.attended(0).sum()) == 6 * 16


def test_with_all_tokens_it_is_full_attention() -> None:
    trace, q, k, v = random_trace()
    full = made_steps(row_of(Full, Full.Params(), trace, request(ratio="1")), q, k, v)
    params = replace(PARAMS, generated="compete", top_k=Fraction(1))
    for ours, exact in zip(
        made_steps(row_of(Loki, params, trace, request(tokens=59, comm="1/16")), q, k, v), full, strict=True
    ):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


def test_the_basis_that_keys_are_given_in_does_not_matter() -> None:
    """Queries and keys turned alike, and components fitted to turned keys: the same tokens, turned outputs."""
    draw = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=draw)).Q
    outs, sets = [], []
    for basis in (torch.eye(16), turn):
        trace, q, k, v = random_trace()
        known = trace.observed(fitted(PARAMS), 0)
        moved = trace_of(torch.cat([trace.keys(0), k], 2) @ basis, torch.cat([trace.values(0), v], 2), 6, 60)
        moved.know(fitted(PARAMS), Known({0: torch.cat([known[:, :16] @ basis, known[:, 16:]], 1)}))
        row = row_of(Loki, PARAMS, moved, request(tokens=9, comm="1/4"))
        outs.append(torch.stack(made_steps(row, q @ basis, k @ basis, v)))
        sets.append(row.store.attended(0))
    assert torch.equal(*sets)
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)


def test_components_are_a_basis_and_explain_everything() -> None:
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 400, 8, generator=draw) * torch.arange(1.0, 9) + 5
    found = components(moments(keys[:, :, :150]) + moments(keys[:, :, 150:]))  # sums of two stretches
    torch.testing.assert_close(found, components(moments(keys)), atol=1e-4, rtol=1e-4)
    basis, mean, shares = found[:, :8], found[:, 8], found[:, 9]
    torch.testing.assert_close(basis @ basis.mT, torch.eye(8).expand(2, -1, -1), atol=1e-5, rtol=0)
    torch.testing.assert_close(mean, keys[0].mean(1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(shares.sum(-1), torch.ones(2))
    assert (shares.diff(dim=-1) <= 0).all()
    variances = (keys[0] @ basis.mT).var(1, unbiased=False)
    torch.testing.assert_close(variances / variances.sum(-1, keepdim=True), shares, atol=1e-4, rtol=1e-3)


def test_a_share_of_the_variance_takes_one_component_less_than_reaches_it() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    assert n_components(shares, Fraction(1, 2)) == 1
    assert n_components(shares, Fraction(6, 10)) == 2  # the second head needs three
    assert n_components(shares, Fraction(2, 10)) == 0
    params = replace(PARAMS, top_r=Fraction(1, 100))
    trace, *_ = random_trace(params=params)
    with pytest.raises(ConfigError, match=r"method.top_r=0.01 of the variance is less than the first component"):
        row_of(Loki, params, trace, request(tokens=9, comm="1"))


@pytest.mark.parametrize(("comm", "r"), [("1/16", 1), ("1/4", 4), ("0.3", 4), ("1", 16)])
@pytest.mark.parametrize("ratio", ["0.05", "0.2", "0.5"])
def test_the_books_say_what_is_read_and_no_budget_is_exceeded(ratio: str, comm: str, r: int) -> None:
    trace, q, k, v = random_trace()
    row = row_of(Loki, PARAMS, trace, request(ratio=ratio, comm=comm))
    assert row.plan == Loki.Plan(int(60 * Fraction(ratio)), r, None)
    made_steps(row, q, k, v)
    for t, entry in enumerate(row.store.ledger.entries):
        assert entry.moved_meta_bytes == entry.resident_meta_bytes == 60 * 2 * 2 * r
        assert entry.moved_meta_bytes <= Fraction(comm) * key_bytes(trace.shape, 60)
        assert entry.attended == 6 * (row.plan.k + t + 1)
    assert row.store.ledger.within(row.budget, trace.shape)
    report = row.report()
    assert report["n_components"] == r and report["calibration"] == {"text": "drawn"}
    assert report["constant_bytes"] == 2 * 16 * 16 * 4


def test_published_counts_follow_all_tokens() -> None:
    for top_k, counts in ((Fraction(1, 4), [15, 15, 15, 16]), (Fraction(7), [7] * 4), (Fraction(1, 100), [1] * 4)):
        params = replace(PARAMS, generated="compete", top_k=top_k)
        trace, q, k, v = random_trace(params=params)
        row = row_of(Loki, params, trace, request(tokens=9, comm="1/4"))
        found = []
        for t in range(4):
            step(row, *fed(q, k, v, t), t + 1)
            found.append(int(row.store.attended(0).sum()) // 6)
        assert found == counts


def test_rows_choose_together_what_they_choose_alone() -> None:
    changes = [{}, {"granularity": "kv_head"}, {"generated": "compete"}, {"top_r": 2}]
    trace, q, k, v = random_trace()

    def rows() -> list[Loki]:
        made = [row_of(Loki, replace(PARAMS, **change), trace, request(tokens=9, comm="1/4")) for change in changes]
        for row in made:
            row.store[0].append(*(x[:, :, :1] for x in (k, v)))
        return made

    asked = torch.cat([q[:, :, t : t + 1] for t in range(len(changes))])
    together = select_rows(Loki, rows(), 0, asked)
    for i, row in enumerate(rows()):
        alone = select_rows(Loki, [row], 0, asked[i : i + 1])[0]
        assert torch.equal(together[i].idx.sort(-1).values, alone.idx.sort(-1).values)  # type: ignore[union-attr]


# --- What a user may say ----------------------------------------------------------------------


def test_a_share_of_all_tokens_needs_generated_ones_to_compete() -> None:
    with pytest.raises(ConfigError, match=r"method\.top_k=0\.25 counts generated tokens too"):
        replace(PARAMS, top_k=Fraction(1, 4))


@pytest.mark.parametrize(
    ("top_r", "comm", "named"),
    [
        ("auto", "1/128", "none of the 64 components of a key; use comm=1/64 or more"),
        (65, "1", "method.top_r=65 is more than the 64 components of small"),
        (16, "1/8", "pays for 8 of the method.top_r=16 components of a key; use comm=0.25 or more"),
    ],
)
def test_what_comm_does_not_pay_for_is_refused(top_r: Any, comm: str, named: str) -> None:
    shape = ModelShape("small", 3, 4, 2, 64, 1000, (0, 1, 2))
    with pytest.raises(ConfigError, match=named):
        Loki.check(replace(PARAMS, top_r=top_r), request("0.1", comm=comm), shape)
