import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries
from kvbench.engine.softmax import Softmax
from kvbench.methods.dropping.ada_pyramid import AdaPyramid
from kvbench.methods.dropping.adakv import AdaKV, normalised_heads
from kvbench.methods.dropping.allocators import head_mix, head_mix_published, head_protect
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.tests.methods.dropping.test_pyramidkv import layered
from kvbench.tests.methods.dropping.test_snapkv import PARAMS as SNAPKV
from kvbench.tests.methods.dropping.test_snapkv import check_kept
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_for, step, trace_of

PARAMS = AdaKV.Params(8, 5, "max", "mean", Fraction(1, 5), "mix", False, 0, False)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "adakv").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """The authors' head budgets, kept tokens and outputs; kvpress' rule; tables of both, and of the exact shares."""
    meta, x = load(path)
    if "keep" in x:
        problem = check_protect_table(x)
    elif "head_cap_exact" in x:
        problem = check_mix_table(x)
    elif "layer_offsets" in x:
        problem = check_layers(x, meta)
    else:
        problem = check_layer(x, meta)
    return [(path.stem, problem)]


def check_mix_table(x: dict[str, np.ndarray]) -> str | None:
    problems = []
    for i, (heads, past, c, _) in enumerate(x["config"].tolist()):
        scores, alpha = torch.from_numpy(x["scores"][i, :heads, :past]), float(x["alpha_f64"][i])
        exact = Fraction(str(alpha))
        problems += [
            differs(f"case {i}: published", head_mix_published(scores, c, alpha), x["head_cap"][i, :heads]),
            differs(f"case {i}: exact", head_mix(scores, c, exact), x["head_cap_exact"][i, :heads]),
            differs(f"case {i}: counts", head_mix(scores, c, Fraction(0)), x["head_count"][i, :heads]),
        ]
    return first(*problems)


def check_protect_table(x: dict[str, np.ndarray]) -> str | None:
    problems = []
    for i, (heads, s, n_kept, n_safe) in enumerate(x["config"].tolist()):
        scores = torch.from_numpy(x["scores"][i, :heads, :s])
        counts = head_protect(scores, n_kept, n_safe)
        ours = np.zeros((heads, s), dtype=bool)
        for head, n in enumerate(counts):
            ours[head, scores[head].sort(descending=True, stable=True).indices[:n].numpy()] = True
        problems.append(differs(f"case {i}: kept", ours, x["keep"][i, :heads, :s]))
    return first(*problems)


def vector_params(meta: dict[str, Any]) -> AdaKV.Params:
    reduce = meta["gqa_func"] if meta["gqa_support"] else "query_head"
    pyramid = (meta["pyram_beta"],) if meta["pyram_mode"] else ()
    return (AdaPyramid if pyramid else AdaKV).Params(
        meta["window_size"], meta["kernel_size"], meta["pooling"].removesuffix("pool"), reduce,
        Fraction(str(meta["floor_alpha"])), "mix", bool(meta["normalize"]), meta["skip"], True, *pyramid,
    )  # fmt: skip


def padded_queries(q_win: np.ndarray, s: int) -> torch.Tensor:
    """The window's queries at the end of a prompt of `s`."""
    q = torch.from_numpy(q_win)
    return torch.cat([q.new_zeros(*q.shape[:2], s - q.shape[2], q.shape[3]), q], 2)


def check_layer(x: dict[str, np.ndarray], meta: dict[str, Any]) -> str | None:
    params, k, v = vector_params(meta), torch.from_numpy(x["k"]), torch.from_numpy(x["v"])
    trace = trace_of(k, v, meta["H"])
    trace.observe(0, LastQueries(params.window), padded_queries(x["q_win"], meta["S"]), k, trace.softmax[0])
    row = built(row_for(AdaKV, params, request(tokens=meta["base_capacity"]), trace, 8))
    kept = kept_heads(row, 0, meta["heads"])
    ends = x["cu_klen"].tolist()
    theirs = [set(x["kept_idx_flat"][a:b].tolist()) for a, b in itertools.pairwise(ends)]
    problem = differs("rows per head", [len(each) for each in kept], x["head_lens"])
    if problem or "must_keep" not in x:
        return problem or (None if kept == theirs else "kept tokens differ")
    past, window = meta["S"] - params.window, set(range(meta["S"] - params.window, meta["S"]))
    mine = np.zeros((meta["heads"], past), dtype=bool)
    for head, each in enumerate(kept):
        if not window <= each:
            return f"head {head} lacks its window"
        mine[head, sorted(each - window)] = True
    must, may = x["must_keep"][0], x["may_keep"][0]
    problem = first(
        differs("pooled scores", row.scores(0) / params.window, x["pooled_score"], 1e-5),
        *(check_heads(mine[a], must[a], may[a], n) for a, n in enumerate(x["head_cap"].tolist())),
    )
    if problem or "out" not in x or kept != theirs:  # elsewhere a tie was broken in another way
        return problem
    for t in range(meta["steps"]):
        q, k_new, v_new = (torch.from_numpy(x[name][t])[None, :, None] for name in ("q_new", "k_new", "v_new"))
        out = step(row, q, k_new, v_new, t + 1)
        if problem := differs(f"output of step {t + 1}", out[0, :, 0], x["out"][t], 1e-5):
            return problem
    counts = [n + meta["steps"] for n in map(len, kept)]
    return differs("rows per head after all steps", counts, x["head_lens_after"])


def check_heads(mine: np.ndarray, must: np.ndarray, may: np.ndarray, n: int) -> str | None:
    return check_kept(mine[None], must[None], may[None], n)


def kept_heads(row: AdaKV, layer: int, heads: int) -> list[set[int]]:
    """What each head that chooses keeps of the prompt."""
    seen = row.store.attended(layer)
    return [set(line.nonzero().flatten().tolist()) for line in seen[:: len(seen) // heads, : row.trace.s_prompt]]


def check_layers(x: dict[str, np.ndarray], meta: dict[str, Any]) -> str | None:
    params, n_layers = vector_params(meta), meta["L"]
    k = torch.from_numpy(x["k"])
    trace = layered(padded_queries(x["q_win"][:1], meta["S"]), k[:1], k[:1], n_layers, params.window)
    for layer in range(n_layers):
        trace.add(layer, k[layer : layer + 1], k[layer : layer + 1], Softmax(meta["d"] ** -0.5))
        q = padded_queries(x["q_win"][layer : layer + 1], meta["S"])
        trace.observe(layer, LastQueries(params.window), q, k[layer : layer + 1], trace.softmax[layer])
    row = built(row_for(AdaPyramid, params, request(tokens=meta["base_capacity"]), trace, 4))
    lens = [[len(each) for each in kept_heads(row, layer, meta["Hk"])] for layer in range(n_layers)]
    scores = torch.cat([row.scores(layer) for layer in range(n_layers)]) / params.window  # theirs are means
    return first(
        differs("past tokens per layer", row.counts(), x["base_past"]),
        differs("pooled scores", scores, x["pooled_score"], 1e-5),
        differs("rows per head", lens, x["head_lens"]),
    )


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_adakv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def row_of_random(params: Any, cap: int, h_kv: int = 3, seed: int = 0, kind: type = AdaKV) -> Any:
    draws = torch.Generator().manual_seed(seed)
    scales = torch.tensor([4.0, 1.0, 0.3])[:h_kv].view(1, h_kv, 1, 1)  # heads from peaked to flat
    k = torch.randn(1, h_kv, 90, 16, generator=draws) * scales
    q = torch.randn(1, 2 * h_kv, 90, 16, generator=draws)
    trace = trace_of(k, torch.randn(1, h_kv, 90, 16, generator=draws), 2 * h_kv)
    trace.observe(0, LastQueries(params.window), q, k, trace.softmax[0])
    return built(row_for(kind, params, request(tokens=cap), trace, 4))


def test_heads_of_a_layer_share_its_budget() -> None:
    counts = row_of_random(PARAMS, 30).store[0].kept_counts()
    assert sum(counts) == 3 * 30 and max(counts) > 1.3 * min(counts)


@pytest.mark.parametrize(
    ("change", "h_kv"), [({"alpha": Fraction(1)}, 3), ({"floor": "protect", "alpha": Fraction(1)}, 3), ({}, 1)]
)
def test_alpha_1_or_a_single_head_is_snapkv(change: dict[str, Any], h_kv: int) -> None:
    params = AdaKV.Params(**{**PARAMS.__dict__, **change})
    ours, snapkv = row_of_random(params, 30, h_kv), row_of_random(SNAPKV, 30, h_kv, kind=SnapKV)
    assert torch.equal(ours.store.attended(0), snapkv.store.attended(0))


def test_skipped_layers_are_uniform() -> None:
    params = AdaKV.Params(**{**PARAMS.__dict__, "skip": 1})
    assert row_of_random(params, 30).store[0].kept_counts() == [30, 30, 30]


def test_query_heads_that_choose_have_budgets_of_their_own() -> None:
    row = row_of_random(AdaKV.Params(**{**PARAMS.__dict__, "reduce": "query_head"}), 30)
    seen = row.store.attended(0).sum(-1)
    assert seen.sum() == 6 * 30 and len(set(seen.tolist())) > 1


def test_normalised_heads_count_by_how_peaked_they_are() -> None:
    plain = row_of_random(PARAMS, 30).store[0].kept_counts()
    normal = row_of_random(AdaKV.Params(**{**PARAMS.__dict__, "normalize": True}), 30).store[0].kept_counts()
    assert sum(normal) == 90 and normal != plain


def test_a_head_without_any_score_is_no_number_of_none() -> None:
    scores = torch.stack([torch.zeros(6), torch.arange(6.0)])
    assert normalised_heads(scores, 2).isfinite().all()


def test_kvpress_rule_is_by_itself() -> None:
    with pytest.raises(ConfigError, match=r"protect"):
        replace(PARAMS, floor="protect", normalize=True)
