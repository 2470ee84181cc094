from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine.causal import causal
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.kept import kept_mask, targets
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Kept
from kvbench.engine.post_processing import AS_THEY_ARE, Merging, PostProcessing
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.evals.settings import from_words
from kvbench.methods.allocator import Allocator
from kvbench.methods.combinations import KEPT, MODEL, SHAPE, Case, refuse
from kvbench.methods.dropping.knorm import Knorm
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.methods.quantising.kivi import KIVI
from kvbench.methods.rules import Quantizer
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import Check, built, differs, first, load, request, trace_of

GOLDEN = Path(__file__).parents[1] / "golden"
KNORM = Knorm.Params(0, None, 0, "fair")
SNAPKV = SnapKV.Params(8, 3, "max", "mean")
CONTIGUOUS, MERGED = PostProcessing("contiguous"), PostProcessing(dropped="merged")


def turn_of(theta: float, d: int) -> Callable[[Tensor, int | Tensor], Tensor]:
    """The rotary embedding of Llama."""
    speeds = theta ** (-torch.arange(0, d, 2).float() / d)

    def turn(x: Tensor, by: int | Tensor) -> Tensor:
        angles = (torch.as_tensor(by).view(-1, 1) if isinstance(by, int) else by.unsqueeze(-1)) * speeds
        cos, sin = (torch.cat([each, each], -1).unsqueeze(-3) for each in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turn


def run_rotation_vectors(path: Path) -> list[Check]:
    """Knorm's sets, keys turned up to the prompt's end, and a query behind it."""
    meta, x = load(path)
    k, v, theirs = (torch.from_numpy(x[name]) for name in ("k", "v", "k_rerotated"))
    s, n, trace, turn = meta["S"], meta["n_kept"], trace_of(k, v, meta["Hk"]), turn_of(meta["rope_theta"], meta["d"])
    trace.turn = {0: turn}
    row = built(variant_of(Knorm, KNORM, trace, n, CONTIGUOUS).row(trace, 4))
    kept = row.store[0].resident()[0]
    below = turn(kept.k, torch.full((1, n), n - s))  # to 0 … n-1, where kvpress has them
    q = turn(torch.from_numpy(x["q_pre"]), s)
    out, _ = causal(q, kept.k, kept.v, Softmax(meta["d"] ** -0.5))
    problem = first(
        differs("kept", row.store[0].positions(), x["kept_idx"]),
        differs("keys", below, theirs, 1e-4),
        differs("out", out, x["out"], 1e-4),
    )
    return [(path.stem, problem)]


def run_merging_vectors(path: Path) -> list[Check]:
    """Knorm's sets, where each dropped token goes with which weight, and the values that come of it."""
    meta, x = load(path)
    k, v = (torch.from_numpy(x[name]) for name in "kv")
    merging = Merging(meta["similarity_threshold"], Fraction(str(meta["merge_fraction"])))
    trace, kept = trace_of(k, v, meta["Hk"]), torch.from_numpy(x["kept_idx"]).long()
    row = built(variant_of(Knorm, KNORM, trace, meta["n_kept"], replace(MERGED, merging=merging)).row(trace, 4))
    target, weight = torch.full((1, meta["Hk"], meta["S"]), -1), torch.zeros(1, meta["Hk"], meta["S"])
    for head in range(meta["Hk"]):
        dropped = torch.tensor([i for i in range(meta["S"]) if i not in set(kept[0, head].tolist())])
        found = targets(k[0, head], v[0, head], kept[0, head], dropped, merging)
        target[0, head, dropped], weight[0, head, dropped] = found
    problem = first(
        differs("kept", row.store[0].positions(), kept),
        differs("targets", target, x["target"]),
        differs("weights", weight, x["weight"], 1e-4),
        differs("values", row.store[0].resident()[0].v, x["v_merged"], 1e-4),
    )
    return [(path.stem, problem)]


def variant_of(
    kind: Any, params: Any, trace: Trace, n: int, post_processing: PostProcessing, allocator: str = "uniform"
) -> Any:
    shape, s = trace.shape, trace.s_prompt
    return kind.variant_for(
        params, request(tokens=n), shape, s, allocator=Allocator(allocator), post_processing=post_processing
    )


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("key_rerotation/*.npz")), ids=lambda path: path.stem)
def test_turned_keys_agree_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_rotation_vectors(path)] == [None]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("merging/*.npz")), ids=lambda path: path.stem)
def test_merged_values_agree_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_merging_vectors(path)] == [None]


def row_of(
    post_processing: PostProcessing, n: int = 60, allocator: str = "uniform", s: int = 200, kind: str = "llama"
) -> Any:
    model = tiny(kind)
    ids = prompt(s)
    shape = model.shape
    variant = SnapKV.variant_for(
        SNAPKV, request(tokens=n), shape, s, allocator=Allocator(allocator), post_processing=post_processing
    )  # fmt: skip
    with model.hooked():
        trace = prefill(model, ids, variant.observations)
    return built(variant.row(trace, 8))


@pytest.mark.parametrize("allocator", ["uniform", "head_mix", "by_need"])
def test_kept_keys_stand_in_a_row_before_the_prompts_end(allocator: str) -> None:
    row, plain = row_of(CONTIGUOUS, allocator=allocator), row_of(AS_THEY_ARE, allocator=allocator)
    for layer in row.store.layers:
        one, other = row.store[layer], plain.store[layer]
        assert torch.equal(one.positions(), other.positions())
        turn = row.trace.turn[layer]
        for head, (new, old) in enumerate(zip(*(heads_of(each) for each in (one, other)), strict=True)):
            at = other.positions()[0, head]
            at = at[at >= 0]
            order = at.argsort()
            n = len(at)
            by = torch.arange(200 - n, 200) - at[order]
            assert (by >= 0).all() and by[-1] == 0
            there = turn(old[0][:, order].unsqueeze(0), by.unsqueeze(0))[0]
            torch.testing.assert_close(new[0][:, order], there)
            assert torch.equal(new[1], old[1])


def heads_of(layer: Any) -> list[tuple[Tensor, Tensor]]:
    """K and V of each head's own tokens: (1, n, d_h)."""
    part = layer.resident()[0].gathered()
    mask = part.mask if part.mask is not None else torch.ones(part.k.shape[:3], dtype=torch.bool)
    mask = mask if mask.shape[1] == part.k.shape[1] else mask[:, :: mask.shape[1] // part.k.shape[1]]
    return [(part.k[:, a][:, mask[0, a]], part.v[:, a][:, mask[0, a]]) for a in range(part.k.shape[1])]


@pytest.mark.parametrize(
    "post_processing", [CONTIGUOUS, MERGED, PostProcessing("contiguous", "merged")], ids=PostProcessing.label
)
def test_a_whole_prompt_stays_as_it_is_bit_for_bit(post_processing: PostProcessing) -> None:
    row, plain = row_of(post_processing, n=200), row_of(AS_THEY_ARE, n=200)
    for layer in row.store.layers:
        assert torch.equal(row.store[layer].tokens()[0], plain.store[layer].tokens()[0])
        assert torch.equal(row.store[layer].tokens()[1], plain.store[layer].tokens()[1])


@pytest.mark.parametrize(
    "post_processing", [CONTIGUOUS, MERGED, PostProcessing("contiguous", "merged")], ids=PostProcessing.label
)
@pytest.mark.parametrize("allocator", ["uniform", "head_mix"])
def test_beside_others_a_row_says_what_it_says_alone_and_the_prompt_is_not_written_to(
    post_processing: PostProcessing, allocator: str
) -> None:
    model, ids = tiny("llama"), prompt(200)
    kinds = [AS_THEY_ARE, post_processing, PostProcessing("contiguous"), MERGED]
    variants = [
        SnapKV.variant_for(
            SNAPKV, request(tokens=40), model.shape, 200, allocator=Allocator(allocator), post_processing=each
        )
        for each in kinds
    ]
    with model.hooked():
        trace = prefill(model, ids, variants[0].observations)
        before = [(trace.keys(layer).clone(), trace.values(layer).clone()) for layer in model.shape.attention_layers]
        together = decode(model, trace, [built(each.row(trace, 8)) for each in variants], max_new_tokens=8).answers
        alone = decode(model, trace, [built(variants[1].row(trace, 8))], max_new_tokens=8).answers
    assert together[1].ids == alone[0].ids
    for layer, (k, v) in zip(model.shape.attention_layers, before, strict=True):
        assert torch.equal(trace.keys(layer), k) and torch.equal(trace.values(layer), v)


def drawn(s: int = 90) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(1, 2, s, 16, generator=draw), torch.randn(1, 2, s, 16, generator=draw)


def merged(v: Tensor, merging: Merging = MERGED.merging) -> tuple[Tensor, Tensor]:
    """Values of what Knorm keeps, as they were and merged."""
    k, _ = drawn(v.shape[2])
    trace = trace_of(k, v, 4)
    rows = [
        built(variant_of(Knorm, KNORM, trace, 30, each).row(trace, 4))
        for each in (AS_THEY_ARE, replace(MERGED, merging=merging))
    ]
    a, b = (row.store[0].resident()[0].v for row in rows)
    return a, b


def test_nothing_is_merged_where_no_key_is_the_same_and_where_all_values_are() -> None:
    before, after = merged(drawn()[1], Merging(1.0))
    assert torch.equal(before, after)
    before, after = merged(torch.ones(1, 2, 90, 16))
    torch.testing.assert_close(before, after)


def test_a_merged_value_lies_between_its_sources() -> None:
    _, v = drawn()
    before, after = merged(v)
    assert not torch.equal(before, after)
    assert (after <= v.amax(2, keepdim=True) + 1e-5).all() and (after >= v.amin(2, keepdim=True) - 1e-5).all()


def test_a_share_takes_the_most_similar_ones_and_those_that_pass_alone() -> None:
    k, v = drawn()
    kept, dropped = torch.arange(30), torch.arange(30, 90)
    _, every = targets(k[0, 0], v[0, 0], kept, dropped, Merging())
    _, half = targets(k[0, 0], v[0, 0], kept, dropped, Merging(share=Fraction(1, 2)))
    _, strict = targets(k[0, 0], v[0, 0], kept, dropped, Merging(0.5, Fraction(1, 2)))
    assert (half > 0).sum() == 30 and (every > 0).sum() == 60
    assert ((strict > 0) <= (half > 0)).all() and 0 < (strict > 0).sum() < 30


def test_a_window_is_kept_too() -> None:
    mask = kept_mask(Kept(torch.tensor([[[1, 4], [0, 2]]]), n_window=2), 2, 8, torch.device("cpu"))
    assert mask is not None
    assert [row.nonzero().squeeze(1).tolist() for row in mask] == [[1, 4, 6, 7], [0, 2, 6, 7]]


LLAMA = ModelShape("llama", 2, 4, 2, 16, 1024, (0, 1))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Checkpoint(LLAMA, ("a",), 0), "has no rotary positions"),
        (Checkpoint(LLAMA, ("a",), 16, (1,)), r"has layers without positions \(1\)"),
    ],
)
def test_keys_without_rotary_positions_cannot_be_turned(model: Checkpoint, says: str) -> None:
    merged, contiguous = (
        Case(None, None, post_processing=one, checkpoint=model, shape=model.shape) for one in (MERGED, CONTIGUOUS)
    )
    refuse(KEPT, merged, MODEL)
    with pytest.raises(ConfigError, match=says):
        refuse(KEPT, contiguous, MODEL)


def test_latents_are_left_as_they_are() -> None:
    latent = replace(LLAMA, h_kv=1, value_width=8, is_latent=True)
    for post_processing in (CONTIGUOUS, MERGED):
        with pytest.raises(ConfigError, match="keeps one latent per token"):
            refuse(KEPT, Case(None, None, post_processing=post_processing, shape=latent), SHAPE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method=quest", "positions=contiguous"], "Quest drops no tokens"),
        (["method=full", "positions=turned"], "positions=turned is not allowed"),
        (["method=snapkv", "dropped=folded"], "dropped=folded is not allowed"),
        (["method=h2o", "dropped=merged"], "H2O evicts while it decodes"),
        (["method=streamingllm", "positions=contiguous"], "StreamingLLM rolls or turns its tokens"),
        (["method=duo_attention", "positions=contiguous", "method.heads=drawn"], "heads roll while it decodes"),
        (["method=attention_matching", "dropped=merged"], "makes keys and values of its own"),
        (["method=pyramidinfer", "dropped=merged"], "has a prefill of its own"),
        (["method=h2o_decode", "budget=200", "dropped=merged"], "goes on dropping while it decodes"),
        (["method=snapkv", "method.reduce=query_head", "dropped=merged"], "each query head keeps tokens of its own"),
        (["method=snapkv", "merging.share=0.5"], "are of dropped=merged"),
        (["method=snapkv", "dropped=merged", "merging.share=0"], "merging.share=0 is out of range"),
        (["method=snapkv", "dropped=merged", "merging.threshold=2"], "merging.threshold=2 is out of range"),
    ],
)
def test_what_is_refused(words: list[str], says: str) -> None:
    from kvbench.evals.cells import ask

    with pytest.raises(ConfigError, match=says):
        ask([from_words([*words, "task=needle"])])


def test_what_a_method_has_is_part_of_its_name() -> None:
    assert PostProcessing("contiguous", "merged", Merging(0.5, Fraction(3, 4))).label() == (
        "contiguous, merged values from 0.5, best 0.75"
    )
    assert AS_THEY_ARE.label() == ""


def test_what_becomes_codes_are_the_merged_values_and_the_turned_keys() -> None:
    model, quantizer = tiny("llama"), Quantizer(KIVI, KIVI.Params(8, 8, 8, 16))
    plain, changed = (
        SnapKV.variant_for(
            SNAPKV, request(tokens=60), model.shape, 200, quantizer=quantizer, post_processing=post_processing
        )
        for post_processing in (AS_THEY_ARE, PostProcessing("contiguous", "merged"))
    )
    with model.hooked():
        trace = prefill(model, prompt(200), plain.observations)
    exact = built(replace(changed, composition=None).row(trace, 8))
    rows = [built(each.row(trace, 8)) for each in (plain, changed)]
    for layer in model.shape.attention_layers:
        order = exact.store[layer].positions().argsort(-1)[0]
        k, v = (torch.stack([x[0, a, order[a]] for a in range(2)]) for x in exact.store[layer].tokens())
        for x, before, after in zip((k, v), *(row.store[layer].quantized.rebuilt() for row in rows), strict=True):
            assert (after[0] - x).abs().max() < 0.05 < (before[0] - x).abs().max()
