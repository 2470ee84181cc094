from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import resolve
from kvbench.engine.shapes import ModelShape
from kvbench.methods.ranking.compactor import Compactor, TwoWay, leverages, z_scores
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, trace_of

PARAMS = Compactor.Params(48, 256, 0.35, "both", 8, 4, "masked", 0)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "compactor").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' two scores and their blend, from its own sketch, and what is kept."""
    meta, x = load(path)
    q, k, v, before, phi = (torch.from_numpy(x[name]) for name in ("q", "k", "v", "k_pre", "phi"))

    class Given(Compactor):
        def sketch(self, layer: int) -> Tensor:
            return phi[0]

    trace, ends = trace_of(k, v, meta["H"]), (meta["n_first"], meta["n_last"])
    trace.turn = {0: lambda keys, by: before}
    trace.observe(0, TwoWay(meta["chunk"], *ends, True), q, k, trace.softmax[0])
    params = Compactor.Params(meta["sketch"], meta["chunk"], meta["blending"], "both", *ends, "published", 0)
    asked = resolve(request(ratio=str(1 - Fraction(str(meta["compression_ratio"])))), meta["S"], Compactor.traits.drops)
    plan = Compactor.plan_for(params, asked, trace.shape)  # its beta is of the ratio, before kvpress rounds to tokens
    row = row_of(Given, params, trace, request(tokens=meta["n_kept"]), plan)
    past = slice(ends[0], meta["S"] - ends[1])
    found = leverages(before[:, :, past], phi[0] / meta["sketch"] ** 0.5)
    problem = first(
        differs("leverage", found, x["leverage"], 1e-3),
        differs("leverage's z", row.leverage(0), x["leverage_z"], 2e-3),
        differs("attention's z", row.attention(0), x["attention_z"], 2e-3),
        differs("scores", row.scores(0), x["score"][..., past], 2e-3),
        differs("kept", row.store[0].positions().sort(-1).values, x["kept_idx"]),
    )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_compactor_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def test_leverages_of_a_head_add_up_to_its_rank() -> None:
    keys = torch.randn(1, 2, 400, 16, generator=torch.Generator().manual_seed(0)) * 100
    found = leverages(keys, torch.eye(16).expand(2, -1, -1))
    torch.testing.assert_close(found.sum(-1), torch.full((1, 2), 16.0), rtol=1e-3, atol=0)


def test_a_factor_changes_no_z_score() -> None:
    x = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(z_scores(2 * x), z_scores(x))


def test_without_a_number_leverage_weighs_the_share_that_was_asked_to_go() -> None:
    for asked, beta in ((request("0.4"), 0.6), (request(tokens=52), 1 - 52 / 131)):  # 0.4 of 131 are 52 tokens
        budget = resolve(asked, 131, Compactor.traits.drops)
        assert budget.tokens == 52
        plan = Compactor.plan_for(replace(PARAMS, beta=None), budget, ModelShape("m", 1, 6, 2, 32, 4096, (0,)))
        assert plan.beta == pytest.approx(beta, abs=1e-12)
