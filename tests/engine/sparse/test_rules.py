"""Rules of sparse prefills against reference vectors, and what holds for all of them."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.engine.causal import causal
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import BandSums, ColumnSums, LastQueries
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.a_shape import AShape, TriShape
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.engine.sparse.block_sparse import BlockSparse
from kvbench.engine.sparse.blocks import meets, own
from kvbench.engine.sparse.flexprefill import FlexPrefill
from kvbench.engine.sparse.top_cdf import TopCdf
from kvbench.engine.sparse.vertical_slash import VerticalSlash, votes
from kvbench.engine.sparse.xattention import XAttention
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import Check, differs, first, load

GOLDEN = sorted((Path(__file__).parents[2] / "golden").glob("prefill_*/*.npz"))
COMMON: dict[str, Any] = {"density": None, "dense_last": 0, "layers": None, "observe": "kept"}


def share(value: Any) -> Fraction | None:
    return None if value is None else Fraction(str(value))


def rule_of(folder: str, meta: dict[str, Any]) -> SparsePrefill:
    """The rule with a vector's parameters."""
    if folder == "prefill_a_shape":
        shape = {"n_init": meta["n_init"], "n_local": meta["n_local"]}
        return TriShape(n_last=meta["n_last"], **shape, **COMMON) if meta["n_last"] else AShape(**shape, **COMMON)
    if folder == "prefill_block_sparse":
        return BlockSparse(block=meta["block"], top_chunks=meta["top_chunks"], **COMMON)
    if folder == "prefill_flexprefill":
        shares = {key: Fraction(str(meta[key])) for key in ("gamma", "tau")}
        counts = {key: meta[key] for key in ("block", "min_budget", "max_budget", "cover_unit")}
        return FlexPrefill(**shares, **counts, **COMMON)
    if folder == "prefill_top_cdf":
        shares = {key: share(meta[key]) for key in ("sim_threshold", "cdf", "topk")}
        return TopCdf(**shares, **{k: meta[k] for k in ("block_q", "block_k", "smooth_k", "attention_sink")}, **COMMON)  # type: ignore[arg-type]
    assert folder == "prefill_xattention" and meta["norm"] == 1
    counts = {key: meta[key] for key in ("block", "stride", "chunk_size")}
    given = meta["threshold"]
    threshold = tuple(Fraction(str(x)) for x in given) if isinstance(given, list) else Fraction(str(given))
    return XAttention(threshold=threshold, select="code", **counts, **COMMON)


def run_vectors(path: Path) -> list[Check]:
    """Masks exactly at and below the diagonal, output to 1e-4, density to 1e-9."""
    meta, arrays = load(path)
    q, k, v = (torch.from_numpy(arrays[name]) for name in "qkv")
    s, softmax, rule = k.shape[2], Softmax(k.shape[3] ** -0.5), rule_of(path.parent.name, meta)
    kept = rule.choose(q, k, softmax, 0)
    if rule.is_exact(0, s):
        out, density = causal(q, k, v, softmax)[0], np.ones(q.shape[1])
    else:
        out, _, mean, kept = rule.attend(q, k, v, softmax)
        density = kept.seen().sum((1, 2)).double().numpy() / (s * (s + 1) / 2)
        problem = differs("share", mean.item(), arrays["density"].mean(), atol=1e-9)
        if problem:
            return [(path.stem, problem)]
    problem = first(
        masks(rule, kept, q, k, softmax, arrays),
        differs("out", out.numpy(), arrays["out"], atol=1e-4),
        differs("density", density, arrays["density"], atol=1e-9),
    )
    return [(path.stem, problem)]


def masks(rule: Any, kept: Any, q: Tensor, k: Tensor, softmax: Softmax, arrays: dict[str, np.ndarray]) -> str | None:
    """What differs of the masks that a vector has."""
    s, problems = k.shape[2], []
    if isinstance(rule, AShape):
        seen = kept.seen()
        problems.append(differs("n_seen", seen.sum(-1).numpy(), np.broadcast_to(arrays["n_seen"], seen.shape[:2])))
        firsts = seen.int().argmax(-1).numpy()
        return first(*problems, differs("first", firsts, np.broadcast_to(arrays["first"][0], firsts.shape)))
    block, block_k = rule.sides
    causal_blocks = meets(s, block, block_k, q.device)
    theirs = torch.from_numpy(arrays["block_mask"]) & causal_blocks
    if not (isinstance(rule, XAttention) and rule.keeps_all(s)):
        with_own = theirs | own(s, block, block_k, q.device) if isinstance(rule, TopCdf) else theirs
        problems.append(differs("block_mask", kept.blocks & causal_blocks, with_own))
    if isinstance(rule, TopCdf):
        levels = rule.levels(q, k, softmax)
        problems.append(differs("authors' mask", (levels <= rule.level(0, s, levels)) & causal_blocks, theirs))
    if isinstance(rule, FlexPrefill):
        vertical = votes(q[:, :, -block:], k, softmax)[0] / block
        n = causal_blocks.shape[0]
        of_columns = pad(vertical, (0, n * block - s)).unflatten(-1, (n, block)).sum(-1)
        problems.append(differs("query_aware", rule.query_aware(q, k, softmax, of_columns), arrays["query_aware"]))
    if isinstance(rule, XAttention):
        problems.append(differs("block_sums", rule.block_sums(q, k, softmax).numpy(), arrays["block_sums"], atol=1e-4))
        by_paper = XAttention(**{**vars(rule), "select": "paper"}).choose(q, k, softmax, 0).blocks
        assert by_paper is not None
        if not rule.keeps_all(s):
            problems.append(
                differs("paper's mask", by_paper, torch.from_numpy(arrays["block_mask_paper"]) & causal_blocks)
            )
    return first(*problems)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_keeps_what_the_authors_code_keeps(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path) if problem] == []


# All rules.

SMALL: dict[str, dict[str, Any]] = {
    "a_shape": {"n_init": 3, "n_local": 9},
    "tri_shape": {"n_init": 3, "n_local": 9, "n_last": 5},
    "block_sparse": {"block": 8, "top_chunks": 4},
    "flexprefill": {"block": 8, "gamma": Fraction(1, 2), "tau": Fraction(1, 2), "min_budget": 8, "max_budget": None,
                    "cover_unit": None},
    "top_cdf": {"block_q": 16, "block_k": 8, "sim_threshold": Fraction(-1), "cdf": Fraction(1, 2), "topk": None,
                "smooth_k": True, "attention_sink": False},
    "xattention": {"block": 8, "stride": 4, "threshold": Fraction(1, 2), "select": "code", "chunk_size": None},
    "minference": {"n_vertical": Fraction(5), "n_slash": Fraction(5), "n_last": 8, "n_first": 2, "n_near": 3,
                   "block": 8},
}  # fmt: skip
KINDS: dict[str, Any] = {
    "a_shape": AShape, "tri_shape": TriShape, "block_sparse": BlockSparse, "flexprefill": FlexPrefill,
    "top_cdf": TopCdf, "xattention": XAttention, "minference": VerticalSlash,
}  # fmt: skip


def small(name: str, **changes: Any) -> SparsePrefill:
    return KINDS[name](**{**COMMON, **SMALL[name], **changes})


def drawn(s: int, h: int = 4, h_kv: int = 2, d_h: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(s)
    q, k, v = (2 * torch.randn(1, n, s, d_h, generator=draw) for n in (h, h_kv, h_kv))
    return q, k, v


def test_every_file_of_prefills_has_a_small_rule_here() -> None:
    files = Path(__file__).parents[3] / "conf" / "prefill"
    named = {file.stem.removesuffix("_short") for file in files.glob("*.yaml")}
    assert named - {"exact", "vertical_slash"} == {*SMALL}


@pytest.mark.parametrize("name", SMALL)
def test_every_query_of_a_prompt_of_any_length_sees_its_own_token(name: str) -> None:
    for s in range(1, 3 * 16 + 2):
        rule, (q, k, v) = small(name), drawn(s)
        if rule.is_exact(0, s):
            continue
        out, lse, share, kept = rule.attend(q, k, v, Softmax(0.25))
        seen = kept.seen()
        assert seen.diagonal(dim1=1, dim2=2).all() and not seen.triu(1).any()
        assert out.isfinite().all() and lse.isfinite().all()
        assert share.item() == pytest.approx(seen.sum().item() / (4 * s * (s + 1) / 2), abs=1e-12)


@pytest.mark.parametrize("name", [name for name in SMALL if "shape" not in name])
def test_heads_of_one_group_choose_by_themselves(name: str) -> None:
    q, k, v = drawn(120)
    seen = small(name).attend(q, k, v, Softmax(0.25)).kept.seen()
    assert not torch.equal(seen[0], seen[1])
    alone = small(name).attend(q[:, 1:2], k[:, :1], v[:, :1], Softmax(0.25)).kept.seen()
    assert torch.equal(alone[0], seen[1])


@pytest.mark.parametrize("name", SMALL)
def test_the_last_queries_may_see_their_whole_past(name: str) -> None:
    q, k, v = drawn(120)
    out, _, share, kept = small(name, dense_last=20).attend(q, k, v, Softmax(0.25))
    plain = small(name).attend(q, k, v, Softmax(0.25))
    torch.testing.assert_close(out[:, :, 100:], causal(q, k, v, Softmax(0.25))[0][:, :, 100:], atol=1e-5, rtol=1e-5)
    assert torch.equal(kept.seen()[:, :100], plain.kept.seen()[:, :100]) and share > plain.share


@pytest.mark.parametrize("dense_last", [0, 12])
@pytest.mark.parametrize("name", SMALL)
def test_a_density_is_met_from_below_and_more_of_it_keeps_more(name: str, dense_last: int) -> None:
    q, k, v = drawn(600)
    before, error = 0.0, float("inf")
    exact = causal(q, k, v, Softmax(0.25))[0]
    for density in (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)):
        out, _, share, _ = small(name, density=density, dense_last=dense_last).attend(q, k, v, Softmax(0.25))
        assert density - Fraction(1, 25) <= share.item() <= density
        assert share > before
        before, so_far = share, error
        error = (out - exact).norm() / exact.norm()
        assert error < so_far


@pytest.mark.parametrize("name", SMALL)
def test_what_is_always_kept_stays_below_any_density(name: str) -> None:
    q, k, v = drawn(120)
    share = small(name, density=Fraction(1, 1000)).attend(q, k, v, Softmax(0.25)).share
    assert 0.001 < share < 0.6


@pytest.mark.parametrize("name", SMALL)
def test_a_layer_or_a_density_can_be_left_whole(name: str) -> None:
    assert small(name, density=Fraction(1)).is_exact(0, 500)
    some = small(name, layers=(1, 3))
    assert [some.is_exact(layer, 500) for layer in range(4)] == [True, False, False, True]
    assert 0 <= small(name).estimate(500) < 0.5


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("a_shape", {"layers": (3, 3)}, "prefill.layers=[3,3] has no layer"),
        ("flexprefill", {"max_budget": 4}, "prefill.max_budget=4 is below prefill.min_budget=8"),
        ("top_cdf", {"topk": Fraction(1, 2)}, "prefill.cdf and prefill.topk are two ways"),
        ("xattention", {"stride": 3}, "prefill.stride=3 does not divide prefill.block=8"),
        ("xattention", {"threshold": Path("nowhere.json")}, "prefill.threshold=nowhere.json cannot be read"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_a_sentence(
    name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        small(name, **changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_thresholds_may_differ_by_layer_and_head(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text("[[0.2, 0.2, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5]]")
    rule, (q, k, _) = small("xattention", threshold=file), drawn(120)
    found = [rule.choose(q, k, Softmax(0.25), layer).seen() for layer in (0, 1)]
    for layer, head, threshold in ((0, 0, "0.2"), (0, 3, "0.9"), (1, 2, "0.5")):
        alike = small("xattention", threshold=Fraction(threshold)).choose(q, k, Softmax(0.25), 0).seen()
        assert torch.equal(found[layer][head], alike[head])
    digest = rule.data_digest()
    shape = ModelShape("m", 2, 4, 2, 16, 4096, (0, 1))
    rule.check(shape)
    with pytest.raises(ConfigError, match="needs 3 lists of 4 shares"):
        rule.check(replace(shape, n_layers=3))
    file.write_text("[[0.2, 0.2, 0.9, 2], [0.5, 0.5, 0.5, 0.5]]")
    with pytest.raises(ConfigError, match="does not hold a list of shares"):
        small("xattention", threshold=file)
    file.write_text("[[0.2, 0.2, 0.9, 0.8], [0.5, 0.5, 0.5, 0.5]]")
    assert small("xattention", threshold=file).data_digest() != digest


def test_thresholds_of_heads_are_those_of_a_file_with_equal_layers(tmp_path: Path) -> None:
    given, (q, k, v) = (Fraction(1, 5), Fraction(9, 10), Fraction(0), Fraction(1)), drawn(117)
    rule = small("xattention", threshold=given)
    seen = [kept.seen() for kept in (rule.choose(q, k, Softmax(0.25), layer) for layer in (0, 7))]
    assert torch.equal(*seen) and not rule.keeps_all(117)
    for head, one in enumerate(given):
        alike = small("xattention", threshold=one).choose(q, k, Softmax(0.25), 0).seen()
        assert torch.equal(seen[0][head], torch.ones(117, 117).tril().bool() if one == 1 else alike[head])
    file = tmp_path / "heads.json"
    file.write_text("[[0.2, 0.9, 0, 1.0]]")
    assert torch.equal(small("xattention", threshold=file).choose(q, k, Softmax(0.25), 0).seen(), seen[0])
    assert 0 < rule.attend(q, k, v, Softmax(0.25)).share < 1
    assert small("xattention", threshold=(Fraction(1),) * 4).keeps_all(117)


@pytest.mark.parametrize("h", [0, 1, 2, 3, 5])
def test_as_many_thresholds_are_needed_as_there_are_query_heads(h: int) -> None:
    rule = small("xattention", threshold=(Fraction(1, 2),) * h)
    shape = ModelShape("m", 2, 4, 2, 16, 4096, (0, 1))
    with pytest.raises(ConfigError) as caught:
        rule.check(shape)
    assert str(caught.value) == (
        f"prefill.threshold=[{','.join(['0.5'] * h)}] does not fit model 'm'; it needs 4 shares, one for each query "
        "head, or one number for all"
    )
    if h:
        rule.check(replace(shape, h=h, h_kv=1))


@pytest.mark.parametrize("min_budget", [8, 20, 64])
def test_no_head_of_a_prompt_that_is_kept_whole_is_query_aware(min_budget: int) -> None:
    rule = small("flexprefill", tau=Fraction(1), min_budget=min_budget)
    assert isinstance(rule, FlexPrefill)
    for s in range(1, 80):
        q, k, _ = drawn(s)
        n = -(-s // 8)  # blocks
        aware = rule.query_aware(q, k, Softmax(0.25), torch.full((4, n), 1 / n))
        is_whole = n <= max(2, -(-min_budget // 8))
        assert (bool(aware.any()), rule.keeps_all(s)) == (not is_whole, is_whole)
        if is_whole:
            assert torch.equal(rule.choose(q, k, Softmax(0.25), 0).seen(), torch.ones(4, s, s).tril().bool())


def test_blocks_that_neither_side_looks_at_leave_a_head_comparable() -> None:
    q, k, _ = drawn(120)
    rule, far = small("flexprefill", tau=Fraction(1)), torch.zeros(4, 15)
    assert isinstance(rule, FlexPrefill)
    far[:, 0] = 1.0
    k[:, :, 8:] -= 1e4 * q[0, ::2, -8:].mean(1, keepdim=True)  # the last queries see none of it
    assert rule.query_aware(q, k, Softmax(0.25), far)[::2].all()


def test_a_rule_without_a_file_has_no_digest() -> None:
    assert small("xattention").data_digest() is None


# In the pass over a prompt.


@pytest.mark.parametrize("name", SMALL)
def test_sums_over_all_queries_are_of_the_pairs_that_were_kept(name: str) -> None:
    model = tiny()
    asked = [ColumnSums(), BandSums(7), LastQueries(4)]
    with model.hooked():
        trace = prefill(model, prompt(90), asked, sparsity=small(name))
        exact = prefill(model, prompt(90), asked, sparsity=small(name, observe="exact"))
        whole = prefill(model, prompt(90), asked)
    assert trace.shares and torch.equal(torch.stack(trace.shares), torch.stack(exact.shares))
    assert torch.equal(whole.keys(0), trace.keys(0)) and not torch.allclose(whole.keys(1), trace.keys(1), atol=1e-3)
    for layer in trace.shape.attention_layers:
        assert torch.equal(trace.keys(layer), exact.keys(layer))
        sums = trace.observed(ColumnSums(), layer)
        torch.testing.assert_close(sums.sum(-1), torch.full((1, 6), 90.0))
        assert not torch.allclose(sums, exact.observed(ColumnSums(), layer), atol=1e-3)
        assert (trace.observed(BandSums(7), layer) <= sums + 1e-5).all()
        assert torch.equal(trace.observed(LastQueries(4), layer), exact.observed(LastQueries(4), layer))


@pytest.mark.parametrize("observe", ["kept", "exact"])
@pytest.mark.parametrize("name", SMALL)
def test_windows_above_the_prompt_and_prompts_below_a_block_are_observed(name: str, observe: str) -> None:
    model = tiny()
    asked = [ColumnSums(), BandSums(64), LastQueries(64)]
    for s in (1, 2, 7, 8, 9, 17, 33):
        with model.hooked():
            trace = prefill(model, prompt(s), asked, sparsity=small(name, observe=observe, dense_last=3))
            exact = prefill(model, prompt(s), asked)
        assert 0 < (trace.share() or 0) <= 1 and trace.logits is not None and trace.logits.isfinite().all()
        for layer in trace.shape.attention_layers:
            sums, band = (trace.observed(what, layer) for what in asked[:2])
            torch.testing.assert_close(sums.sum(-1), torch.full((1, 6), float(s)))
            torch.testing.assert_close(band, sums)
            assert trace.observed(asked[2], layer).isfinite().all()
            if trace.share() == 1:
                torch.testing.assert_close(trace.keys(layer), exact.keys(layer), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_reading_in_chunks_keeps_the_same(name: str) -> None:
    model = tiny()
    with model.hooked():
        whole, chunked = (prefill(model, prompt(90), sparsity=small(name), chunk=n) for n in (None, 16))
    assert torch.equal(torch.stack(whole.shares), torch.stack(chunked.shares))
    torch.testing.assert_close(whole.logits, chunked.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_what_keeps_all_is_the_exact_pass_bit_for_bit(name: str) -> None:
    model = tiny()
    with model.hooked():
        exact, whole = (prefill(model, prompt(90), sparsity=x) for x in (None, small(name, density=Fraction(1))))
    assert exact.logits is not None and whole.logits is not None and exact.share() is None
    assert torch.equal(exact.logits, whole.logits) and whole.share() == 1.0
