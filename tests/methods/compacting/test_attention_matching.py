from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attend import attend
from engine.budget import Frame
from engine.observe import SpacedQueries
from methods.compacting.attention_matching import AttentionMatching
from tests.vectors import Check, differs, first, load, request, row_of, trace_of

PARAMS = AttentionMatching.Params(
    select="highest", score="rms", biases="fitted", values="fitted", ridge=0, drop_below=-7, queries="prompt",
    n_queries=None, chunk=4096, bias_steps=None, frame="keep", first_ids=None,
)  # fmt: skip
PLAIN = replace(PARAMS, biases="none", values="kept")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "attention_matching").glob("*.npz"))


def params_of(given: dict[str, Any]) -> AttentionMatching.Params:
    """Ours, from the arguments of the authors' constructors."""
    select = "highest" if "score_method" in given else ("omp_fast" if given.get("k_choice", 1) > 1 else "omp")
    ridge = next((float(value) for key, value in given.items() if "ridge" in key and not isinstance(value, str)), 0.0)
    return replace(
        PARAMS,
        select=select,
        score=given.get("score_method", "rms"),
        biases="none" if given.get("beta_method") == "zero" else "fitted",
        values="kept" if given["c2_method"] == "direct" else "fitted",
        ridge=ridge,
        drop_below=given.get("drop_key_beta_cutoff", -7),
    )


def as_given(given: dict[str, Any], starts: Tensor) -> type[AttentionMatching]:
    """The method with the authors' bounds and steps, and with the vectors that their power iterations began with."""

    class Params(AttentionMatching.Params):
        @property
        def bounds(self) -> tuple[float, float]:
            return given.get("nnls_lower_bound") or 1e-12, given.get("nnls_upper_bound") or exp(7)

        @property
        def n_steps(self) -> int:
            return given.get("nnls_iters", 0)

    class Given(AttentionMatching):
        remaining = iter(starts)

        def setup(self) -> None:
            super().setup()
            fields = {name: getattr(self.params, name) for name in AttentionMatching.Params.__dataclass_fields__}
            self.params = Params(**fields)

        def power_start(self, t: int, device: torch.device) -> Tensor:
            return next(self.remaining)

    return Given


def compacted(
    kind: type[AttentionMatching], params: AttentionMatching.Params, k: Tensor, v: Tensor, q: Tensor, t: int
) -> AttentionMatching:
    """A row whose prompt k, v (1, h_kv, s, d_h) was compacted by reference queries (1, h, n, d_h)."""
    trace = trace_of(k, v, q.shape[1])
    plan = AttentionMatching.Plan(Frame(), ((0, k.shape[2], t),), q.shape[2])
    trace._observed[SpacedQueries(q.shape[2]), 0] = q
    return row_of(kind, params, trace, request(tokens=1), plan)


def run_vectors(path: Path) -> list[Check]:
    """The authors' algorithms for one head, all KV heads of a layer: keys in order, biases, values, output."""
    meta, x = load(path)
    given = {name: torch.from_numpy(array) for name, array in x.items()}
    kind, params = as_given(meta["params"], given["power_start"]), params_of(meta["params"])
    k, v, q = (given[name].unsqueeze(0) for name in ("k", "v", "q_train"))
    row = compacted(kind, params, k, v, q, meta["t"])
    made = row.store[0].resident()
    bias = torch.zeros_like(given["beta"]) if made[0].bias is None else made[0].bias[0]
    values, theirs = made[0].v[0, :, : meta["t"]], x["c2"]
    out = torch.cat([attend(q, made, meta["d"] ** -0.5) for q in given["q_test"].unsqueeze(0).split(1, 2)], 2)
    problem = first(
        differs("keys", row.store[0].positions()[0], x["indices"]),
        differs("biases", bias, x["beta"], 1e-4),
        differs("values", values, theirs, 1e-3 * float(abs(theirs).max())),
        differs("output", out[0], x["out_compact"], 1e-4),
    )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_attention_matching_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]
