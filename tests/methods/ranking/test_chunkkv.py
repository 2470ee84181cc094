from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.engine.declared import reader
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries
from kvbench.engine.softmax import Softmax
from kvbench.evals.every import own_class
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.methods.named import Scorer, scorer_fields, values_of
from kvbench.methods.ranking.chunkkv import ChunkKV, entropies, in_order, published_chunks, shares, worth
from kvbench.results.names import own_methods
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_of, trace_of

SNAPKV = SnapKV.Params(32, 7, "max", "mean")
PARAMS = ChunkKV.Params(Scorer(SnapKV, SNAPKV), 20, "best", 4, 1, False)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "chunkkv").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' three ways to choose by chunks: numbers of tokens and chunks, kept tokens exactly."""
    meta, x = load(path)
    k = torch.from_numpy(x["k"])
    trace = trace_of(k, k, meta.get("H", meta["Hk"]))
    params = replace(PARAMS, chunk=meta["chunk"], match_published=True)
    budget = request(ratio=str(1 - Fraction(str(meta["compression_ratio"]))))
    if "low" in meta:
        params, budget = replace(params, choose="gated", low=meta["low"]), request(tokens=meta["n_kept"])
    if "window" in meta:
        voter = SnapKV.Params(meta["window"], meta["kernel"], "avg", "mean")
        params = replace(params, scorer=Scorer(SnapKV, voter))
        q = torch.from_numpy(x["q_window"])
        trace.observe(0, LastQueries(meta["window"]), q, k, Softmax(k.shape[3] ** -0.5))
    else:
        params = replace(params, choose="within", scorer=scorer("knorm"))
    row = row_of(ChunkKV, params, trace, budget)
    scores, kept = row.shared_scores(0), row.store[0].positions().sort(-1).values
    if "window" not in meta:
        return [(path.stem, first(differs("scores", scores, x["score"], 1e-5), differs("kept", kept, x["kept_idx"])))]
    numbers, alike = scores[0, 0], all(torch.equal(head, kept[0, 0]) for head in kept[0])
    problem = first(
        differs("scores", numbers, x["score"][0].sum(0), 1e-5) if "score" in x else None,
        differs("chunks", worth(numbers, meta["chunk"], 0), x["chunk_score"], 1e-5),
        differs("entropy", entropies(numbers, meta["chunk"], 0), x["chunk_entropy"], 1e-5) if "low" in meta else None,
        differs("kept", kept[0, 0], x["kept_idx"]) if "low" not in meta else cut_differs(meta, x, numbers, kept[0, 0]),
        None if alike else "heads keep unlike sets",
    )
    return [(path.stem, problem)]


def scorer(name: str, **values: Any) -> Scorer:
    """A method of conf/method as a scorer."""
    return reader(Scorer)({"name": name} | values, "method.scorer")


def cut_differs(meta: dict[str, Any], x: dict[str, Any], numbers: torch.Tensor, kept: torch.Tensor) -> str | None:
    """Sets where tokens of the window, which are all equal, may stand for one another."""
    past = meta["S"] - meta["window"]
    theirs = torch.from_numpy(x["kept_idx"]).long()
    return first(
        differs("kept of the past", kept[kept < past], theirs[theirs < past]),
        differs("their number", len(kept), len(theirs)),
    )


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_chunkkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def row(n: int, s: int = 130, **changes: Any) -> Any:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, s, 16, generator=draw) for heads in (4, 2, 2))
    trace, params = trace_of(k, v, 4), replace(PARAMS, **changes)
    variant = ChunkKV.variant_for(params, request(tokens=n), trace.shape, s)
    for what in variant.observations:
        trace.observe(0, what, q, k, trace.softmax[0])
    return built(variant.row(trace, 64))


@pytest.mark.parametrize("choose", ["best", "gated"])
@pytest.mark.parametrize("n", [33, 40, 60, 97, 129])
def test_the_budget_is_used_to_the_last_token_and_one_chunk_at_most_is_cut(n: int, choose: str) -> None:
    kept = row(n, choose=choose).store[0].positions()[0]
    assert kept.shape == (2, n) and torch.equal(kept[0].sort().values, kept[1].sort().values)
    past = kept[0][kept[0] < 98]
    assert {*range(98, 130)} <= set(kept[0].tolist())
    sizes = torch.bincount(past // 20, minlength=5).tolist()
    if choose == "best":
        assert sum(0 < size < full for size, full in zip(sizes, [20, 20, 20, 20, 18], strict=True)) <= 1


def test_constant_numbers_keep_the_first_chunks_and_chunks_of_one_are_the_scorer() -> None:
    assert in_order(torch.ones(50), 20, 0)[:40].sort().values.tolist() == [*range(40)]
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert in_order(x, 1, 0)[:9].tolist() == x.topk(9).indices.tolist()


def test_a_gate_leaves_its_chunks_rest_for_last() -> None:
    x = torch.tensor([9.0, 0, 0, 0, 1, 1, 1, 1])
    limit = torch.tensor([1, 4])
    assert in_order(x, 4, 0, limit).tolist() == [0, 4, 5, 6, 7, 1, 2, 3]
    assert entropies(x, 4, 0).tolist() == pytest.approx([0, 1], abs=1e-6)


def test_each_chunk_has_its_share_and_the_first_ones_the_rest() -> None:
    assert [n for _, n in shares(50, 20, 0, 27)] == [11, 11, 5]
    assert [(where.start, where.stop) for where, _ in shares(50, 20, 4, 27)] == [(0, 16), (16, 36), (36, 50)]
    assert row(27, s=70, choose="within", scorer=scorer("knorm")).store[0].positions().shape == (1, 2, 27)


def test_published_counts_are_in_floating_point() -> None:
    assert published_chunks(151, 10, Fraction(3, 10)) == 4
    assert published_chunks(200, 10, Fraction(1, 10)) == 1  # 20 * (1 - 0.9) is below 2


WITH_A_MODEL = ("kvzip", "kvzap", "fastkvzip")  # their scores are not of keys, values and queries alone
SCORERS = [name for name in own_methods() if own_class(name).traits.is_scorer and not scorer_fields(own_class(name))]


@pytest.mark.parametrize("name", [name for name in SCORERS if name not in WITH_A_MODEL])
def test_any_scorer_numbers_the_tokens(name: str) -> None:
    more = {"rotary": "none"} if name in ("capkv", "expected_attention") else {}
    assert row(60, scorer=scorer(name, **more)).store[0].positions().shape == (1, 2, 60)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kivi", "method.scorer=kivi scores no tokens"),
        ("chunkkv", "method.scorer=chunkkv chooses among the numbers of a scorer of its own"),
        ("criticalkv", "method.scorer=criticalkv chooses among the numbers of a scorer of its own"),
        ("snapk", "did you mean 'snapkv'"),
    ],
)
def test_names_that_are_no_scorers_are_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        scorer(name)


def test_numbers_of_a_file_are_read_as_a_run_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.yaml").write_text("eps: 1e-4\nother: 2\n")
    (tmp_path / "two.yaml").write_text("defaults:\n  - one\n  - _self_\n\nother: 1/3\n")
    monkeypatch.setattr("kvbench.methods.named.METHODS", tmp_path)
    assert values_of("two") == {"eps": 0.0001, "other": "1/3"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"choose": "within"}, "use method.scorer=knorm or keydiff with it"),
        ({"scorer": Scorer(SnapKV, replace(SNAPKV, reduce="query_head"))}, "ChunkKV chooses for KV heads"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(PARAMS, **changes)


def test_published_chunks_that_hold_more_than_the_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 chunks of 20 tokens are up to 60, more than the budget of 57"):
        row(57, match_published=True, scorer=scorer("knorm"))
