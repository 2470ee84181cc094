from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from methods.retrieving.shadowkv import ShadowKV, chunk_means
from tests.vectors import Check, differs, first, load, request, row_of, step, trace_of

PARAMS = ShadowKV.Params(
    chunk=8, rank_share=Fraction(160, 1024), outlier_chunks=48, local_chunks=4, native=False, budget_rule="harness"
)
NATIVE = replace(PARAMS, native=True)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "shadowkv").glob("*.npz"))
Turn = Callable[[Tensor, int | Tensor], Tensor]


def turner(cos: Tensor, sin: Tensor) -> Turn:
    """Rotation by tables (positions, d_h) of whole turns, backwards where a number is negative."""

    def turn(x: Tensor, by: int | Tensor) -> Tensor:
        where = torch.tensor([[by]]) if isinstance(by, int) else by
        near, far = cos[where.abs()].unsqueeze(1), (sin[where.abs()] * where.sign().unsqueeze(-1)).unsqueeze(1)
        left, right = x.chunk(2, -1)
        return x * near + torch.cat([-right, left], -1) * far

    return turn


def rotary(n: int, d_h: int) -> Turn:
    angles = torch.arange(n).unsqueeze(1) * 10000.0 ** (-torch.arange(0, d_h, 2) / d_h)
    angles = torch.cat([angles, angles], -1)
    return turner(angles.cos(), angles.sin())


def run_vectors(path: Path) -> list[Check]:
    """The authors' accuracy class: chunks, low-rank keys, and the output of several steps."""
    meta, x = load(path)
    given = {name: torch.from_numpy(array) for name, array in x.items()}
    trace = trace_of(given["k_rope"].unsqueeze(0), given["v"].unsqueeze(0), meta["Hq"])
    trace.turn = turner(given["cos"], given["sin"])
    chunk, n_chunks = meta["chunk"], meta["n_chunks"]
    plan = ShadowKV.Plan(chunk, meta["rank"], n_chunks, meta["outlier_chunks"], meta["budget"] // chunk)
    row = row_of(ShadowKV, NATIVE, trace, request(ratio="1/2"), plan)
    landmarks, every = row.landmarks[0], torch.arange(n_chunks - plan.n_outliers).expand(meta["Hk"], -1)
    everything = torch.arange(meta["S"]).expand(meta["Hk"], -1)
    problem = first(
        differs("local tokens", [plan.n_local(meta["S"])], [meta["n_local"]]),
        differs("least cosines", chunk_means(given["k_rope"][:, : n_chunks * chunk], chunk)[1], x["min_cos"], 1e-5),
        differs("outliers", landmarks.outliers, x["outlier_chunks"]),
        differs("chunks with landmarks", landmarks.numbers(every), x["landmark_chunks"]),
        differs("landmarks", landmarks.means, x["landmarks"], 1e-6),
        differs("low-rank keys", row.factors[0].keys(everything), x["k_lowrank"], 2e-5),
    )
    for t in range(meta["n_steps"]):
        q, k, v = (given[name][t].view(1, -1, 1, meta["d"]) for name in ("q_step", "k_step", "v_step"))
        out = step(row, q, k, v, t + 1)
        chunks = row.store[0].fetched()[0][0, :, ::chunk].sort(-1).values // chunk
        problem = problem or first(
            differs(f"chunks of step {t}", chunks, x["selected_chunks"][t]),
            differs(f"output of step {t}", out[0, :, 0], x["out"][t], 2e-5),
        )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_shadowkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]
