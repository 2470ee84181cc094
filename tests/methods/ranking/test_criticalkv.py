from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine.declared import reader
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries
from kvbench.engine.passes.trace import Known, Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.methods.allocator import Allocator
from kvbench.methods.dropping.allocators import head_protect
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.methods.named import Scorer
from kvbench.methods.ranking.criticalkv import CriticalKV, OutputProjection, output_norms
from kvbench.methods.rules import NoParams
from kvbench.methods.scoring import ScoringMethod
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_of, trace_of

PARAMS = CriticalKV.Params(Scorer(SnapKV, SnapKV.Params(8, 5, "avg", "mean")), Fraction(1, 2), 1e-4, Fraction(1), False)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "criticalkv").glob("*.npz"))


class Given(ScoringMethod):
    """A scorer whose numbers are the keys' first channel."""

    title = "Given"
    comparable = "heads"

    @staticmethod
    def score(keys: Tensor) -> Tensor:
        return keys[..., 0].float()


def given(scores: Tensor, norms: Tensor, h: int, **changes: Any) -> tuple[Trace, CriticalKV.Params]:
    """A trace where these are the numbers and the norms of tokens, (1, h_kv, s)."""
    keys = torch.zeros(*scores.shape, 16)
    keys[..., 0] = scores
    trace = trace_of(keys, keys, h)
    trace.once(("output norms", 0), lambda: norms)
    return trace, replace(PARAMS, scorer=Scorer(Given, NoParams()), **changes)


def run_vectors(path: Path) -> list[Check]:
    """kvpress' norms, second scores, head budgets and kept tokens."""
    meta, x = load(path)
    budget = request(ratio=str(1 - Fraction(str(meta["compression_ratio"]))))
    params = replace(
        PARAMS, eps=meta["epsilon"], first_share=Fraction(str(meta["first_stage_ratio"])), match_published=True
    )
    if "head_budget" in x:
        base, norms = torch.from_numpy(x["base_score"]), torch.from_numpy(x["wo_v_norm"])
        trace, params = given(base, norms, meta["H"], match_published=True, alpha=Fraction(str(meta["alpha"])))
        params = replace(params, eps=meta["epsilon"], first_share=Fraction(str(meta["first_stage_ratio"])))
        row = row_of(CriticalKV, params, trace, budget)
        kept = row.store.attended(0)[:: trace.shape.g, : meta["S"]]
        return [
            (path.stem, first(differs("budgets", kept.sum(-1), x["head_budget"]), differs("kept", kept, x["keep"][0])))
        ]
    q, k, v, w_o = (torch.from_numpy(x[name]) for name in ("q_window", "k", "v", "w_o"))
    trace = trace_of(k, v, meta["H"])
    trace.observe(0, LastQueries(meta["window"]), q, k, Softmax(k.shape[3] ** -0.5))
    trace.know(OutputProjection(), Known({0: w_o}))
    voter = SnapKV.Params(meta["window"], meta["kernel"], "avg", "mean")
    row = row_of(CriticalKV, replace(params, scorer=Scorer(SnapKV, voter)), trace, budget)
    kept = row.store[0].positions().sort(-1).values
    problem = first(
        differs("base", row.shared_scores(0), x["base_score"], 1e-5),
        differs("norms", row.norms(0) / torch.from_numpy(x["wo_v_norm"]), torch.ones(x["wo_v_norm"].shape), 1e-5),
        differs(
            "second", row.product(0) / torch.from_numpy(x["stage2_score"]), torch.ones(x["stage2_score"].shape), 1e-4
        ),
        differs("kept", kept, x["kept_idx"]),
    )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_criticalkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def drawn(**changes: Any) -> tuple[Trace, CriticalKV.Params]:
    draw = torch.Generator().manual_seed(5)
    scores, norms = (torch.rand(1, 2, 90, generator=draw) for _ in range(2))
    return given(scores, norms, 4, **changes)


def kept_of(trace: Trace, params: CriticalKV.Params, n: int = 30, **more: Any) -> list[set[int]]:
    variant = CriticalKV.variant_for(params, request(tokens=n), trace.shape, trace.s_prompt, **more)
    row = built(variant.row(trace, 8))
    return [set(head.nonzero()[:, 0].tolist()) for head in row.store.attended(0)[::2, : trace.s_prompt]]


def test_a_first_stage_of_all_is_the_scorer_and_one_of_none_the_product() -> None:
    trace, params = drawn()
    x = trace.keys(0)[..., 0]
    z = (x + params.eps) * trace.once(("output norms", 0), lambda: x)
    for share, best in ((1, x), (0, z)):
        wanted = [set(head.topk(30).indices.tolist()) for head in best[0]]
        assert kept_of(trace, replace(params, first_share=Fraction(share))) == wanted


def test_larger_weights_change_nothing_and_none_leave_the_lower_positions() -> None:
    trace, params = drawn()
    x, norms = trace.keys(0)[..., 0], trace.once(("output norms", 0), lambda: torch.empty(0))
    assert kept_of(*given(x, norms * 7, 4)) == kept_of(trace, params)
    half = [set(head.topk(15).indices.tolist()) for head in x[0]]
    none = kept_of(*given(x, norms * 0, 4))
    for of_scorer, kept in zip(half, none, strict=True):
        others = sorted(kept - of_scorer)
        assert of_scorer <= kept and others == [j for j in range(90) if j not in of_scorer][:15]


def test_heads_share_by_the_scores_alone() -> None:
    trace, params = drawn()
    wanted = head_protect(trace.keys(0)[0, ..., 0], 30, 6)
    for kept in (
        kept_of(trace, replace(params, alpha=Fraction(1, 5))),
        kept_of(trace, params, allocator=Allocator("head_protect", Fraction(1, 5))),
    ):
        assert [len(head) for head in kept] == wanted and sum(wanted) == 60 and wanted[0] != wanted[1]
    x = trace.keys(0)[0, ..., 0]
    safe = [set(head.topk(6).indices.tolist()) for head in x]
    assert all(
        best <= head for best, head in zip(safe, kept_of(trace, replace(params, alpha=Fraction(1, 5))), strict=True)
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm", "opt"])
def test_values_are_weighed_by_the_models_own_projection(name: str) -> None:
    model = tiny(name)
    params = replace(PARAMS, scorer=reader(Scorer)("knorm", "method.scorer"))
    variant = CriticalKV.variant_for(params, request(ratio="0.4"), model.shape, 60)
    with model.hooked():
        trace = prefill(model, prompt(60), variant.observations)
    row = built(variant.row(trace, 4))
    layer = model.shape.attention_layers[-1]
    module = model.attentions[layer]
    weight = (module.o_proj if hasattr(module, "o_proj") else module.out_proj).weight.float()
    _, values = trace.of_heads(layer, trace.keys(layer), trace.values(layer))
    values = values.repeat_interleave(model.shape.h // values.shape[1], 1).float()
    d = values.shape[3]
    every = [values[0, i] @ weight[:, i * d : (i + 1) * d].mT for i in range(model.shape.h)]
    norms = torch.stack([each.abs().sum(-1) for each in every])
    n_groups = 1 if model.shape.is_latent else model.shape.h_kv
    assert torch.allclose(row.norms(layer)[0], norms.unflatten(0, (n_groups, -1)).mean(1), rtol=1e-4)


def test_norms_are_means_of_a_group_in_blocks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    values, weights = torch.randn(1, 2, 11, 4, generator=draw), torch.randn(4, 4, 8, generator=draw)
    whole = output_norms(values, weights)
    monkeypatch.setattr("kvbench.methods.ranking.criticalkv.BLOCK_BYTES", 100)
    assert torch.allclose(output_norms(values, weights), whole)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scorer": reader(Scorer)("expected_attention", "method.scorer")}, "weighs tokens by their values itself"),
        ({"scorer": Scorer(SnapKV, SnapKV.Params(8, 5, "avg", "query_head"))}, "CriticalKV chooses for KV heads"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(PARAMS, **changes)
