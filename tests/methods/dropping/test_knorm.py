from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.engine.checkpoints.load import load as load_model
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Kept
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.allocator import Allocator
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.calibration.prose import embedded_prose
from kvbench.methods.combinations import ALLOCATION, COMMAND, Case, refuse
from kvbench.methods.dropping.knorm import Knorm
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.methods.full import Full
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_of, step, trace_of

PARAMS = Knorm.Params(0, None, 0, "fair")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "knorm").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """The authors' code on keys of several layers."""
    meta, x = load(path)
    k = torch.from_numpy(x["k"])  # (layers, h_kv, s, d_h)
    n_full = len(meta["skip_layers"])
    assert meta["skip_layers"] == list(range(n_full)), "the harness leaves first layers whole"
    params = replace(PARAMS, full_layers=n_full, budget_rule="official")
    row = row_of(Knorm, params, layers_of(k), request(ratio=str(meta["keep_ratio"])))
    problem = None
    for layer, n in enumerate(x["n_kept"]):
        ours = row.store[layer].positions().sort(-1).values[0]
        problem = problem or first(
            differs("norms", -row.scores(layer)[0], x["norm"][layer], 1e-5),
            differs(f"kept in layer {layer}", ours, torch.from_numpy(x["kept_idx"][layer, :, :n]).sort(-1).values),
        )
    return [(path.stem, problem)]


def layers_of(k: Tensor) -> Trace:
    n_layers, h_kv, s, d_h = k.shape
    shape = ModelShape("vectors", n_layers, h_kv, h_kv, d_h, 1 << 20, tuple(range(n_layers)))
    trace = Trace(shape, s, k.device)
    for layer, keys in enumerate(k):
        trace.add(layer, keys.unsqueeze(0), keys.unsqueeze(0), Softmax(1.0))
    return trace


def tokens(n: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 16, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


def take(row: Knorm, t: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = row.trace.s_prompt + t
    return step(row, q[:, :, n : n + 1], k[:, :, n : n + 1], v[:, :, n : n + 1], t + 1)


def kept(row: Knorm) -> list[set[int]]:
    return [set(head) for head in row.store[0].positions()[0].tolist()]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_knorm_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


@pytest.mark.parametrize("n_tokens", [1, 13, 49])
def test_no_key_that_stays_is_longer_than_one_that_goes(n_tokens: int) -> None:
    _, k, v = tokens(50)
    row = row_of(Knorm, PARAMS, trace_of(k, v, 4), request(tokens=n_tokens))
    for head, held in enumerate(kept(row)):
        norms = k[0, head].norm(dim=-1)
        assert len(held) == n_tokens
        assert norms[list(held)].max() <= norms[list(set(range(50)) - held)].min()


def test_another_order_of_tokens_keeps_the_same_tokens() -> None:
    _, k, v = tokens(50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    one, other = (
        row_of(Knorm, PARAMS, trace_of(keys, v, 4), request(tokens=20)) for keys in (k, k[:, :, order].contiguous())
    )
    assert kept(one) == [set(order[list(held)].tolist()) for held in kept(other)]


def test_of_equal_norms_the_lower_position_stays() -> None:
    _, k, v = tokens(50)
    k[:] = k[:, :, :1]
    assert kept(row_of(Knorm, PARAMS, trace_of(k, v, 4), request(tokens=5))) == [{0, 1, 2, 3, 4}] * 2


def test_first_layers_stay_whole_outside_the_budget() -> None:
    k = torch.randn(4, 2, 60, 16, generator=torch.Generator().manual_seed(0))
    row = row_of(Knorm, replace(PARAMS, full_layers=2), layers_of(k), request(ratio="1/4"))
    assert [row.store[layer].positions().shape[-1] for layer in range(4)] == [60, 60, 15, 15]
    report = row.report()
    assert report["overall_ratio"] == (2 + 2 / 4) / 4
    norms = k[2:].norm(dim=-1)
    assert report["norm_spread"] == pytest.approx(float((norms.std(-1, correction=0) / norms.mean(-1)).mean()))


def test_keys_of_one_length_have_no_spread() -> None:
    """As of models that normalise their keys."""
    _, k, v = tokens(50)
    k = k / k.norm(dim=-1, keepdim=True)
    row = row_of(Knorm, PARAMS, trace_of(k, v, 4), request(tokens=5))
    assert row.report()["norm_spread"] < 1e-6


def test_after_so_many_tokens_all_are_pruned_to_the_budget_again() -> None:
    q, k, v = tokens(80)
    row = row_of(Knorm, replace(PARAMS, every=7), trace_of(k, v, 4, 50), request(tokens=12))
    held = kept(row)
    for t in range(30):
        take(row, t, q, k, v)
        assert row.store.attended(0).sum(-1).tolist() == [12 + t % 7 + 1] * 4
        held = [{*head, 50 + t} for head in held]
        if t % 7 == 6:
            held = [set(sorted(x, key=lambda i: float(k[0, head, i].norm()))[:12]) for head, x in enumerate(held)]
        assert kept(row) == held


def test_pruning_again_leaves_whole_layers_and_whole_prompts_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, 60, 16, generator=draw)
    row = row_of(Knorm, replace(PARAMS, full_layers=1, every=2), layers_of(k), request(tokens=10))
    short = row_of(Knorm, replace(PARAMS, every=2, prune_after=61), layers_of(k), request(tokens=10))
    for t in range(4):
        for layer in (0, 1):
            for each in (row, short):
                q, k_new, v_new = torch.randn(3, 1, 2, 1, 16, generator=draw)
                step(each, q, k_new, v_new, t + 1, layer)
    assert [row.store[layer].positions().shape[-1] for layer in (0, 1)] == [64, 10]
    assert [short.store[layer].positions().shape[-1] for layer in (0, 1)] == [64, 64]


def test_the_authors_round_up_and_leave_short_prompts_whole() -> None:
    _, k, v = tokens(57)
    official = replace(PARAMS, budget_rule="official", prune_after=57)

    def n_kept(params: Knorm.Params) -> int:
        return row_of(Knorm, params, trace_of(k, v, 4), request(ratio="1/10")).store[0].n_kept

    assert (n_kept(PARAMS), n_kept(official), n_kept(replace(official, prune_after=58))) == (5, 6, 57)


@pytest.mark.parametrize("every", [None, 3])
def test_the_whole_budget_is_full_attention_while_decoding_too(every: int | None) -> None:
    q, k, v = tokens(60)
    row = row_of(Knorm, replace(PARAMS, every=every), trace_of(k, v, 4, 50), request(ratio="1"))
    full = row_of(Full, Full.Params(), trace_of(k, v, 4, 50), request(ratio="1"))
    for t in range(10):
        assert torch.equal(take(row, t, q, k, v), take(full, t, q, k, v))


def test_norms_are_never_compared_over_heads() -> None:
    with pytest.raises(ConfigError, match="those of Knorm do not compare; use uniform or pyramid"):
        refuse(ALLOCATION, Case(Knorm, PARAMS, allocator=Allocator("head_mix")), COMMAND)
    with pytest.raises(ConfigError, match=r"Knorm prunes again while it decodes; use method\.every=null with it"):
        refuse(ALLOCATION, Case(Knorm, replace(PARAMS, every=4), allocator=Allocator("pyramid")), COMMAND)


@pytest.mark.parametrize("allocator", [Allocator("pyramid"), Allocator("global", force=True)])
def test_layers_that_stay_whole_take_no_part_in_a_division(allocator: Allocator) -> None:
    trace, params = layers_of(torch.randn(6, 2, 60, 16, generator=torch.Generator().manual_seed(0))), PARAMS
    variant = Knorm.variant_for(
        replace(params, full_layers=2), request(tokens=20), trace.shape, 60, allocator=allocator
    )
    row = built(variant.row(trace, 4))
    counts = [row.store[layer].kept_counts() for layer in range(6)]
    assert counts[:2] == [[60, 60]] * 2
    assert 4 * 40 - 8 <= sum(sum(layer) for layer in counts[2:]) <= 4 * 40
    assert counts[2] != counts[5]


class RandomTokens(SelectiveAttention):
    """Keeps tokens by lot."""

    title, drops = "Random tokens", True

    def arrange(self, layer: int) -> Kept:
        draw = torch.Generator().manual_seed(layer)
        drawn = torch.rand(1, self.trace.shape.h_kv, self.trace.s_prompt, generator=draw)
        return Kept(drawn.topk(self.budget.tokens).indices)


class Predictions:
    """A `Watch` that keeps what every row predicts."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        pass

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        self.logits.append(logits[torch.tensor([*order]).argsort()].log_softmax(-1))


@pytest.mark.slow
def test_a_tenth_of_a_prompt_by_norms_says_less_than_by_votes_and_more_than_by_lot() -> None:
    """Divergence of the next token's distribution from full attention's, on the embedded model."""
    model = load_model("smollm2-135m", "embedded", dtype="float32", device="cpu")
    ids = model.tokenizer.encode(embedded_prose())[:536]

    def variant(kind: type[SelectiveAttention], params: object, ratio: str = "1/10") -> Variant:
        return kind.variant_for(params, request(ratio=ratio), model.shape, 512)

    variants = [
        variant(Full, Full.Params(), "1"),
        variant(SnapKV, SnapKV.Params(32, 7, "max", "mean")),
        variant(Knorm, replace(PARAMS, full_layers=2)),
        variant(RandomTokens, RandomTokens.Params()),
    ]
    watch = Predictions()
    with model.hooked():
        trace = prefill(model, ids[:512], [what for each in variants for what in each.observations])
        rows = [built(each.row(trace, 24)) for each in variants]
        decode(model, trace, rows, max_new_tokens=0, feed=ids[512:], watch=watch)
    said = torch.stack(watch.logits)  # (steps, rows, vocabulary)
    divergence = (said[:, :1].exp() * (said[:, :1] - said)).sum(-1).mean(0)
    assert divergence[1] < 0.7 * divergence[2] < 0.7 * divergence[3], divergence
