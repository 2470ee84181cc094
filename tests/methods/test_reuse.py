"""Layers that attend to what others chose (`reuse=`): the step, the books, what is refused, Kascade's and OmniKV's
vectors."""

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.batch import Batch
from kvbench.engine.budget import EVERYTHING, BudgetRequest, find_bytes, key_bytes, resolve
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Offloaded
from kvbench.engine.prefill import prefill
from kvbench.engine.search import Units, best_tokens
from kvbench.engine.selection import Behind, Reuse
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.turns.state import fork_of
from kvbench.evals.cells import COMMAND, MODEL, Lookups, ask_one, cell_of, check
from kvbench.evals.settings import from_words
from kvbench.methods.base import Variant
from kvbench.methods.calibration import files
from kvbench.methods.calibration.anchors import best_anchors, best_heads, layer_similarity
from kvbench.methods.calibration.known import calibrate
from kvbench.methods.calibration.reuse import best_of, resemblance
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import Oracle, token_scores, union
from kvbench.methods.reuse import Sharing, comm_mean
from kvbench.methods.rules import Quantizer
from kvbench.tests.conformance import S, Subject, ours
from kvbench.tests.tiny import COMMON, prompt, tiny
from kvbench.tests.vectors import Check, built, differs, first, load, request, step

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "reuse").glob("*"))
METHODS = ("oracle", "quest", "infllm", "sparq", "clusterkv", "pqcache", "double_sparsity", "loki", "shadowkv")
N_NEW = 12
EVERY_2 = Sharing("every", every=2)


# --- vectors ---


class Competing(Oracle):
    """The oracle as Kascade has it: no token is sure of its place, not even the current one."""

    def setup(self) -> None:
        super().setup()
        self.picked = dict[int, Tensor | None]()

    def arrange(self, layer: int) -> Offloaded:
        super().arrange(layer)
        return Offloaded(0, 0, capacity=0)

    def units(self, layer: int) -> Units:
        return Units(self.plan.k, self.store[layer].n_seen)

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor | None:
        self.picked[layer] = super().choose(layer, ranking, scores)
        return self.picked[layer]


def run_vectors(path: Path) -> list[Check]:
    """Kascade's and OmniKV's selections, outputs, anchors and mappings, and what is read to find tokens."""
    if path.suffix == ".json":
        return run_cases(path)
    meta, x = load(path)
    case = meta["case"] if meta["case"] in RUNNERS else next(name for name in RUNNERS if path.stem.startswith(name))
    return [(path.stem, RUNNERS[case](meta, x))]


def run_cases(path: Path) -> list[Check]:
    given = json.loads(path.read_text())
    if "cases" in given:
        return [(f"{path.stem} {i}", same_bytes(case)) for i, case in enumerate(given["cases"])]
    value, checks = np.array(given["similarity"]), list[Check]()
    for n, expected in given["anchors"].items():
        anchors = best_anchors(value, int(n))
        ends = [*anchors[1:], len(value)]
        score = sum(value[a, a:end].sum() for a, end in zip(anchors, ends, strict=True))
        problem = differs("anchors", [*anchors], expected["anchors"]) or differs(
            "score", score, expected["score"], 2e-6
        )
        checks.append((f"{path.stem} {n}", problem))
    return checks


def same_bytes(case: dict[str, Any]) -> str | None:
    """What a step reads to find tokens, for all that an anchor may read."""
    n, whole = case["layers"], range(case["left_whole"])
    shape = ModelShape("vectors", n, case["Hk"], case["Hk"], case["d"], 1 << 20, tuple(range(n)))
    anchors = tuple(range(len(whole), len(whole) + case["anchors"]))
    found = dict[str, float]()
    for counts in ("anchor", "mean"):
        sharing = Sharing("given", anchors=anchors, comm_counts=counts)
        reuse = sharing.on(shape, whole)
        asked = sharing.of_anchors(BudgetRequest(Fraction(1, 2), None, Fraction(case["comm"])), reuse)
        assert asked.comm is not None
        of_anchor = find_bytes(shape, resolve(asked, case["s"], drops=False))
        if counts == "mean":
            found |= {"comm_at_anchors_if_mean": float(asked.comm)}
        else:
            found |= {"find_bytes_anchor": of_anchor, "find_bytes_step": of_anchor * len(reuse.anchors)}
            found |= {"comm_mean": float(comm_mean(asked.comm, reuse)), "find_bytes_reuse": 0}
            found |= {"key_bytes": key_bytes(shape, case["s"]), "compressed": len(reuse.anchors) + len(reuse.behind)}
            found |= {"without_reuse": of_anchor * found["compressed"]}
    return first(*(differs(key, found[key], case[key], 1e-12) for key in found))


def run_layers(meta: dict[str, Any], x: dict[str, np.ndarray], agg: Any, reuse: Reuse) -> str | None:
    """One step through all layers."""
    q, k, v = (torch.from_numpy(x[name]).unsqueeze(1) for name in ("q", "k", "v"))  # (L, 1, heads, T or -, d)
    n, last = len(q), meta["T"] - 1
    shape = ModelShape("vectors", n, meta["H"], meta["Hk"], meta["d"], 1 << 20, tuple(range(n)))
    trace = Trace(shape, last, k.device)
    for layer in range(n):
        trace.add(layer, k[layer, :, :, :last], v[layer, :, :, :last], Softmax(meta["d"] ** -0.5))
    params = Oracle.Params(agg, 0, Fraction(0), "inside", "fair", "renormalise")
    variant = Competing.variant_for(params, request(tokens=meta["k"]), shape, last)
    row = built(replace(variant, plan=Oracle.Plan(0, 0, meta["k"]), reuse=reuse).row(trace, 4))
    outs = [
        step(row, q[layer].unsqueeze(2), k[layer, :, :, last:], v[layer, :, :, last:], 1, layer)[0, :, 0]
        for layer in range(n)
    ]
    sets = torch.stack([row.picked[layer][0].sort(-1).values for layer in reuse.anchors])
    expected = x["anchor_sets"]
    sets = sets[:, 0] if expected.ndim == 2 else sets
    return differs("sets", sets, expected) or differs("outputs", torch.stack(outs), x["out"], 2e-5)


def run_kascade(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    found = Sharing("kascade", anchors=tuple(meta["anchors"]), anchor_attends="first_all").divided(
        range(meta["L"]), meta["anchors"]
    )
    heads = x["head_mapping"].tolist()
    behind = tuple(one._replace(heads=tuple(heads[one.layer])) for one in found.behind)
    return run_layers(meta, x, "group_sum", replace(found, behind=behind))


def run_omnikv(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    sharing = Sharing("omnikv", anchors=tuple(meta["anchors"]), anchor_attends="all", dense_behind=1)
    found = sharing.divided(range(meta["L"]), meta["anchors"])
    kinds = dict.fromkeys(found.dense, "dense") | {one.layer: "reuse" for one in found.behind}
    kinds |= dict.fromkeys(found.anchors, "anchor")
    wrong = [layer for layer, kind in enumerate(meta["layers"]) if kinds[layer] != kind]
    return f"kinds of layers {wrong}" if wrong else run_layers(meta, x, "layer_max", found)


def run_select(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    """OmniKV's own selector over a prompt, by its last query and by several."""
    h_kv, softmax = meta["Hk"], Softmax(meta["d"] ** -0.5)
    q, keys = torch.from_numpy(x["q_window"]), torch.from_numpy(x["k"])
    logits = softmax.bent(q.unflatten(0, (h_kv, -1)) @ keys.unsqueeze(1).mT).permute(2, 0, 1, 3)  # (w, h_kv, g, S)
    raw, soft = (token_scores(logits, agg, softmax) for agg in ("layer_logit_max", "layer_max"))  # (w, 1, S)
    age = torch.arange(len(soft)).flip(0).view(-1, 1, 1)
    scores = {
        "last": raw[-1:], "softmax_before_last": soft[-1:],
        "uniform": soft.sum(0, keepdim=True), "exp": (soft * 2.0**-age).sum(0, keepdim=True),
    }  # fmt: skip
    units = Units(meta["k"], meta["S"])

    def chosen(name: str) -> Tensor:
        found = best_tokens(scores[name], units)
        assert found is not None
        return found.flatten().sort().values

    return first(*(differs(name, chosen(name), x[f"idx_{name}"]) for name in scores))


def run_mapping(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    weights = torch.from_numpy(x["weights"])
    chosen = torch.from_numpy(x["top"]).long()
    sim = resemblance(weights, chosen).numpy()
    sharing = Sharing("given", anchors=tuple(meta["anchors"])).divided(range(meta["L"]), meta["anchors"])
    source = {one.layer: one.anchor for one in sharing.behind}
    mapping = [best_heads(sim[source.get(layer, layer), layer]) for layer in range(meta["L"])]
    return first(
        differs("sim", sim, x["sim"], 2e-5), differs("layers", layer_similarity(sim), x["layer_sim"], 2e-5),
        differs("mapping", mapping, x["head_mapping"]),
    )  # fmt: skip


def run_union(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    n, start, stop = meta["T"], meta["n_sink"], meta["T"] - meta["recent"]
    logits = torch.from_numpy(x["logits"])[None]
    middle = union(logits[..., start:stop], meta["k"])[0, 0] + start
    kept = [*range(start), *middle.tolist(), *range(stop, n)]
    return differs("kept", sorted(kept), sorted(x["kept"].tolist()))


RUNNERS: dict[str, Any] = {
    "kascade": run_kascade, "omnikv_select": run_select, "omnikv": run_omnikv, "mapping": run_mapping,
    "union": run_union,
}  # fmt: skip


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_reuse_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path) if problem] == []


# --- steps ---


@cache
def six_layers() -> Model:
    with patch.dict(COMMON, num_hidden_layers=6):
        return tiny()


class Outputs:
    """What every layer of every step put out."""

    def __init__(self) -> None:
        self.outs: list[Tensor] = []

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self.outs.append(out[torch.tensor(order).argsort()].clone())

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        self.outs.append(logits[torch.tensor(order).argsort()].clone())


def variant(one: Subject, sharing: Sharing | None = None, ratio: str = "0.3", **changes: Any) -> Variant:
    """The method on the model of six layers."""
    shape = six_layers().shape
    found = one.kind.variant_for(one.params, BudgetRequest(Fraction(ratio), None, Fraction(one.comm)), shape, S)
    reuse = None if sharing is None else sharing.on(shape, one.kind.whole_layers(one.params, shape))
    return replace(found, reuse=reuse and replace(reuse, **changes))


def run(variants: Sequence[Variant], n: int = N_NEW) -> tuple[list[Any], Outputs, list[list[int]]]:
    """Rows that answered together, what their layers put out, what they said."""
    model, outputs = six_layers(), Outputs()
    with model.hooked(), torch.inference_mode():
        trace = prefill(model, prompt(S), [what for one in variants for what in one.observations])
        rows = [built(one.row(trace, n + 4)) for one in variants]
        said = decode(model, trace, rows, max_new_tokens=n, watch=outputs)
    return rows, outputs, [answer.ids for answer in said.answers]


def entries(row: Any, layers: Sequence[int] = ()) -> list[Any]:
    return [entry for entry in row.store.ledger.entries if not layers or entry.layer in layers]


@pytest.mark.parametrize("name", METHODS)
def test_where_each_layer_is_an_anchor_nothing_changes(name: str) -> None:
    (alone,), expected, said = run([variant(ours(name))])
    (row,), found, again = run([variant(ours(name), Sharing("every", every=1))])
    assert said == again and entries(row) == entries(alone)
    assert all(torch.equal(x, y) for x, y in zip(found.outs, expected.outs, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_layers_behind_an_anchor_read_nothing_to_find_tokens(name: str) -> None:
    """They hold no index, attend to as many tokens as the anchor, and to the same of those that are fetched."""
    one = variant(ours(name), EVERY_2)
    assert one.reuse is not None and len(one.reuse.behind) >= 2
    (row,), _, _ = run([one])
    (usual,), _, _ = run([variant(ours(name))])
    for each in one.reuse.behind:
        mine, anchors = entries(row, [each.layer]), entries(row, [each.anchor])
        assert len(mine) == N_NEW - 1
        for entry, of_anchor in zip(mine, anchors, strict=True):
            found = entry.moved_meta_bytes, entry.read_meta_bytes, entry.searched_bytes
            assert found == (0, 0, 0) and entry.attended == of_anchor.attended
            factors = row.plan.meta_bytes(S, row.trace.shape)[0] if name == "shadowkv" else 0
            assert entry.resident_meta_bytes == factors
            assert entry.resident_kv_bytes == of_anchor.resident_kv_bytes or name == "clusterkv"  # of its own cache
        here, there = (row.store[layer].fetched() for layer in (each.layer, each.anchor))
        assert len(here) == len(there) and all(torch.equal(x, y) for x, y in zip(here, there, strict=True))
        assert not any(each.layer in getattr(row, kept, {}) for kept in ("index", "pending", "means", "scores", "hits"))
    assert not row.store.handed.chosen and not row.store.handed.released  # nothing outlives its step
    assert sum(entry.moved_meta_bytes for entry in entries(row)) <= sum(x.moved_meta_bytes for x in entries(usual))
    first_layers = [*row.skipped, one.reuse.anchors[0]]
    assert entries(row, first_layers)[: len(first_layers)] == entries(usual, first_layers)[: len(first_layers)]


@pytest.mark.parametrize("name", METHODS)
def test_the_whole_budget_is_full_attention(name: str) -> None:
    full = Full.variant_for(Full.Params(), EVERYTHING, six_layers().shape, S)
    rows, outputs, (said, reference) = run([variant(ours(name), EVERY_2, "1"), full])
    assert said == reference and rows[0].store.handed is None
    assert all(torch.equal(out[0], out[1]) for out in outputs.outs)


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_a_batch_share_no_choice(name: str) -> None:
    one = ours(name)
    third, whole = Sharing("every", every=3), Sharing("every", every=2, anchor_attends="all", dense_behind=1)
    variants = [
        variant(one, EVERY_2), variant(one), variant(one, third, "0.5"), variant(one, EVERY_2, "0.5"),
        variant(one, whole),
    ]  # fmt: skip
    rows, _, together = run(variants)
    for own, row, said in zip(variants, rows, together, strict=True):
        (alone,), _, (answer,) = run([own])
        assert answer == said
        for layer in row.trace.shape.attention_layers:
            assert torch.equal(row.store.attended(layer), alone.store.attended(layer))
        assert [entry._replace(searched_bytes=0) for entry in entries(row)] == [
            entry._replace(searched_bytes=0) for entry in entries(alone)
        ]


@pytest.mark.parametrize("name", METHODS)
def test_the_same_heads_are_an_identity_mapping(name: str) -> None:
    same = variant(ours(name), EVERY_2)
    assert same.reuse is not None
    mapped = tuple(one._replace(heads=(0, 1)) for one in same.reuse.behind)
    _, outputs, (one, other) = run([same, variant(ours(name), EVERY_2, behind=mapped)])
    assert one == other and all(torch.equal(out[0], out[1]) for out in outputs.outs)


@pytest.mark.parametrize("name", METHODS)
def test_a_head_takes_the_choice_of_the_one_that_it_is_mapped_to(name: str) -> None:
    """Query heads take that of the query head of the same number in its group."""
    usual = variant(ours(name), EVERY_2)
    assert usual.reuse is not None
    behind = tuple(one._replace(heads=(1, 1)) for one in usual.reuse.behind)
    (row,), _, _ = run([variant(ours(name), EVERY_2, behind=behind)])
    for one in behind:
        (here,), (there,) = (row.store[layer].fetched() for layer in (one.layer, one.anchor))
        half = there.shape[1] // 2
        assert torch.equal(here, there[:, half:].repeat(1, 2, 1))


@pytest.mark.parametrize("name", METHODS)
def test_anchors_may_attend_to_all_tokens(name: str) -> None:
    """They hold them, and are counted; those behind attend to what was chosen all the same."""
    given: dict[str, Any] = {"every": 3, "anchor_attends": "all", "dense_behind": 1}
    one = variant(ours(name), Sharing("every", **given))
    (row,), _, _ = run([one])
    reuse, h = one.reuse, row.trace.shape.h
    assert reuse is not None and reuse.dense and reuse.behind
    for entry in entries(row, [*reuse.anchors, *reuse.dense]):
        assert entry.attended == entry.tokens * h and entry.moved_kv_bytes == 0 and entry.resident_host_bytes == 0
    for layer in (*reuse.anchors, *reuse.dense):
        assert row.store.attended(layer).all()
    for entry in entries(row, [one.layer for one in reuse.behind]):
        assert entry.attended < entry.tokens * h and entry.moved_meta_bytes == entry.read_meta_bytes == 0
    summary = row.store.ledger.summary(row.budget, row.trace.shape, row.skipped, n_searching=len(reuse.anchors))
    assert not summary["within_budget"]
    (chosen,), _, _ = run([variant(ours(name), Sharing("every", every=3))])
    summary = chosen.store.ledger.summary(chosen.budget, row.trace.shape, row.skipped, n_searching=len(reuse.anchors))
    assert summary["within_budget"]


@pytest.mark.parametrize("name", METHODS)
def test_an_anchor_that_attends_to_all_tokens_gives_full_attention(name: str) -> None:
    """Nothing is corrected for what was left out: outputs are those of full attention, but for ShadowKV's outliers."""
    full = Full.variant_for(Full.Params(), EVERYTHING, six_layers().shape, S)
    n = len(ours(name).kind.whole_layers(ours(name).params, six_layers().shape))
    every = Sharing("every", every=1, anchor_attends="all")
    _, outputs, _ = run([variant(ours(name), every), full])
    for out in outputs.outs[: 6 + n]:
        torch.testing.assert_close(out[0], out[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("attends", ["chosen", "all"])
def test_a_feed_is_read_as_its_tokens_would_be(name: str, attends: Literal["chosen", "all"]) -> None:
    """Each token of a feed has a choice of its own; a fork goes on as its original."""
    model, one = six_layers(), variant(ours(name), Sharing("every", every=2, anchor_attends=attends))
    with model.hooked(), torch.inference_mode():
        trace = prefill(model, prompt(S), list(one.observations))
        rows = [built(one.row(trace, 40)) for _ in range(2)]
        feed = prompt(20, 1)
        logits = [
            Batch(model, trace, [row]).read([feed], how)
            for row, how in zip(rows, ("compressed", "tokenwise"), strict=True)
        ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    for layer in trace.shape.attention_layers:
        assert torch.equal(rows[0].store.attended(layer), rows[1].store.attended(layer))
    fork = fork_of(rows[0])
    assert fork.store.handed is not rows[0].store.handed and fork.store.handed.behind == rows[0].store.handed.behind


@pytest.mark.parametrize(
    ("name", "settings"),
    [("infllm", ["method.grow_blocks=true"]), ("infllm", ["method.position=fixed"]),
     ("infllm", ["method.repr_score=logit"]), ("quest", ["method.page_generated=true", "method.comm_mode=native"]),
     ("clusterkv", ["method.decode_period=6", "method.decode_clusters=1"]), ("loki", ["method.generated=compete"])],
    ids=str,
)  # fmt: skip
def test_tokens_leave_windows_together(name: str, settings: list[str]) -> None:
    """Methods that go on indexing: what is fetched behind an anchor is not resident there."""
    one = ours(name, *settings)
    one = replace(one, comm="1/8") if name == "quest" else one
    (row,), _, _ = run([variant(one, EVERY_2)], 40)
    for layer in row.trace.shape.attention_layers[:-1]:
        entry = entries(row, [layer])[-1]
        assert int(row.store.attended(layer).sum()) == entry.attended, layer


@pytest.mark.parametrize("attends", ["chosen", "all"])
@pytest.mark.parametrize("name", ["oracle", "quest", "pqcache"])
def test_caches_and_codes_are_each_layers_own(name: str, attends: Literal["chosen", "all"]) -> None:
    """A layer behind has hits of its own; what it fetches may be codes."""
    one, sharing = ours(name), Sharing("every", every=2, anchor_attends=attends)
    usual = variant(one, sharing)
    rows, _, _ = run([replace(usual, cache=BlockCacheSpec(64, 8, 4, "lfu"))])
    behind = [each.layer for each in rows[0].store.handed.reuse.behind]
    assert all(any(entry.cache_hits for entry in entries(rows[0], [layer])) for layer in behind)
    if name == "pqcache":
        kivi = ours("kivi")
        made = one.kind.variant_for(
            one.params,
            BudgetRequest(Fraction("0.3"), None, Fraction(one.comm)),
            six_layers().shape,
            S,
            quantizer=Quantizer(cast(Any, kivi.kind), kivi.params),
        )
        (row,), _, _ = run([replace(made, reuse=usual.reuse)])
        (exact,), _, _ = run([usual])
        for layer in behind:
            moved = [sum(entry.moved_kv_bytes for entry in entries(each, [layer])) for each in (row, exact)]
            assert 0 < moved[0] < moved[1]


# --- which layers, and what is refused ---


SHAPE = ModelShape("any", 8, 4, 2, 8, 1 << 20, tuple(range(8)))


def test_layers_in_front_of_the_first_anchor_attend_to_all_tokens() -> None:
    found = Sharing("given", anchors=(2, 5), dense_behind=1).on(SHAPE)
    assert found == Reuse((2, 5), (Behind(4, 2), Behind(7, 5)), (), (0, 1, 3, 6))
    assert Sharing("every", every=4).on(SHAPE, [0, 1]).anchors == (2, 6)
    hybrid = replace(SHAPE, attention_layers=(3, 7))  # layers of other kinds are nobody's
    assert Sharing("every", every=2).on(hybrid) == Reuse((3,), (Behind(7, 3),))


def test_comm_in_the_mean_pays_anchors_for_all_layers() -> None:
    sharing = Sharing("every", every=4, comm_counts="mean")
    reuse = sharing.on(SHAPE)
    asked = sharing.of_anchors(request("0.2", comm="1/64"), reuse)
    assert asked.comm is not None and asked.comm == Fraction(1, 16) and comm_mean(asked.comm, reuse) == Fraction(1, 64)
    assert sharing.of_anchors(request("0.2", comm="1/2"), reuse).comm == 1


def asked(*words: str) -> Any:
    cell = cell_of(from_words(["task.source=embedded", *words]))
    check(cell, COMMAND)
    return cell


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["method=magicpig"], "MagicPIG draws tokens, with weights that belong to the layer that drew them"),
        (["method=retroinfer"], "RetroInfer estimates what it does not fetch"),
        (["method=rocketkv"], "RocketKV keeps other tokens in each layer"),
        (["method=infinigen"], "InfiniGen chooses a layer's tokens in the layer below"),
        (["method=snapkv"], "SnapKV fetches nothing that another layer could"),
        (["method=kivi"], "fetches nothing that another layer could"),
        (["method=oracle", "memory=1/2", "reuse.comm_counts=mean"], "divides comm among layers, and there is none"),
        (["method=oracle", "reuse.heads=mapped"], "needs a calibration of the model"),
        (["method=oracle", "reuse.every=0"], "reuse.every=0"),
    ],
)
def test_what_cannot_hand_on_a_choice_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        asked("reuse=every", *words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["reuse=given", "reuse.anchors=[0,40]"], "reuse.anchors names layer 40, which the method does not compress"),
        (["reuse=given", "reuse.anchors=[0,4]", "method=quest"], "reuse.anchors names layer 0"),
        (["reuse=given", "reuse.anchors=[4,4]"], "each once"),
        (["reuse=file", "reuse.file=/dev/null"], "is no calibration file"),
        (["reuse=given"], "reuse.anchors is not given"),
    ],
)
def test_anchors_have_to_be_layers_that_search(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ask_one(from_words(["task.source=embedded", *words]), Lookups())


def test_reuse_is_part_of_a_label_and_of_what_identifies_a_run() -> None:
    usual, every = asked("method=quest"), asked("method=quest", "reuse=every", "reuse.every=4")
    assert every.label == f"{usual.label}, reuse every 4" and "reuse" not in usual.settings.resolved()
    assert every.settings.resolved()["reuse"]["every"] == 4
    given = asked("method=quest", "reuse=omnikv")
    assert given.label.endswith("reuse 2 8 18 (anchors to all, 1 dense behind)")
    assert asked("method=full", "reuse=every").settings.reuse is None


# --- the calibration ---


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, files.Calibration]:
    model, path = six_layers(), tmp_path_factory.mktemp("reuse") / "made.npz"
    with model.hooked():
        found = calibrate(model, "reuse", prompt(3 * 512 + 9), "drawn")
    files.write(path, found)
    return path, found


def test_a_layer_serves_itself_best(made: tuple[Path, files.Calibration]) -> None:
    sim, importance = (made[1].arrays[name] for name in ("sim", "importance"))
    assert sim.shape == (6, 6, 2, 2) and importance.shape == (6,) and (importance > 0).all()
    assert np.allclose(sim[range(6), range(6)][:, range(2), range(2)], 1) and sim.max() <= 1 + 1e-6
    assert not sim[np.tril_indices(6, -1)].any()


def test_anchors_and_heads_come_from_a_file(made: tuple[Path, files.Calibration]) -> None:
    path, found = made
    reuse = Sharing("file", n_anchors=3, file=path, heads="mapped").on(six_layers().shape)
    sim = found.arrays["sim"]
    assert reuse.anchors == best_anchors(layer_similarity(sim) * found.arrays["importance"], 3)
    assert len(reuse.anchors) == 3 and reuse.anchors[0] == 0
    assert all(one.heads == best_heads(sim[one.anchor, one.layer]) for one in reuse.behind)
    (row,), _, _ = run([replace(variant(ours("quest")), reuse=Sharing("file", n_anchors=2, file=path).on(
        six_layers().shape, range(2)))])  # fmt: skip
    assert row.store.handed.reuse.anchors[0] == 2
    with pytest.raises(ConfigError, match="n_anchors=7 is more than the 6 layers"):
        Sharing("file", n_anchors=7, file=path).on(six_layers().shape)
    with pytest.raises(ConfigError, match="is the calibration of a model of 6 layers"):
        Sharing("file", n_anchors=2, file=path).on(SHAPE)


def test_the_file_of_another_model_is_refused(made: tuple[Path, files.Calibration]) -> None:
    cell = asked("method=oracle", "reuse=file", f"reuse.file={made[0]}")
    model = Checkpoint(six_layers().shape, ("another",), 8)
    with pytest.raises(ConfigError, match="is the calibration of another model"):
        check(replace(cell, shape=model.shape), MODEL, model)
    check(replace(cell, shape=model.shape), MODEL, replace(model, digests=(six_layers().digest,)))


def test_a_choice_is_a_tenth_of_the_tokens() -> None:
    assert best_of(torch.rand(2, 3, 40)).shape == (2, 3, 4)


def test_one_set_for_all_heads_never_grows() -> None:
    """The oracle's sets of a whole layer are as large as those of one head."""
    for agg in ("layer_max", "layer_logit_max", "layer_union"):
        one = ours("oracle", f"method.agg={agg}")
        (row,), _, _ = run([variant(one, EVERY_2)])
        for layer in row.trace.shape.attention_layers:
            (idx,) = row.store[layer].fetched()
            assert idx.shape[2] == row.plan.k and torch.equal(idx[:, 0], idx[:, 1])
