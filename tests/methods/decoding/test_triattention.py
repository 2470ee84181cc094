from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Known, Trace
from kvbench.engine.placement import Stay
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import cut
from kvbench.methods.calibration.known import Calibrated
from kvbench.methods.calibration.queries import Queries, as_complex
from kvbench.methods.decoding.triattention import TriAttention, key_scores, offsets_of, standardised, statistics
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import Check, built, differs, first, load, request, step

PARAMS = TriAttention.Params(8, "per_head", True, "mean", "max", 17, "slack", True, True, "missing", None)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "triattention").glob("*.npz"))


def known(x: dict[str, np.ndarray], n_layers: int, h: int) -> Tensor:
    """A vector's statistics as a calibration has them, NaN of heads that it leaves out: (layers, h, 4, f)."""
    parts = [torch.from_numpy(x[name]) for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")]
    # A scaled rotary embedding has scaled queries and keys once each, where the page has its square beside both.
    rows = torch.stack([part * torch.from_numpy(x["freq_scale_sq"]) for part in parts], 1)  # (m, 3, f)
    found = torch.full((n_layers, h, 4, rows.shape[-1]), torch.nan)
    found[:, :, 3] = torch.from_numpy(x["omega"])
    layers, heads = torch.from_numpy(x["heads"]).long().T
    found[layers, heads, :3] = rows
    return found


def row_on(
    k: Tensor, h: int, s: int, found: Tensor, params: TriAttention.Params, tokens: int, interval: int | None = None
) -> Any:
    """The method on the first `s` of rotated keys (layers, h_kv, T, d_h), whose values are its keys."""
    n_layers, h_kv, n, d_h = k.shape
    shape = ModelShape("vectors", n_layers, h, h_kv, d_h, 1 << 20, tuple(range(n_layers)))
    trace = Trace(shape, s, k.device)
    for layer in range(n_layers):
        trace.add(layer, k[layer : layer + 1, :, :s], k[layer : layer + 1, :, :s], Softmax(d_h**-0.5))
    trace.know(statistics(params), Known(dict(enumerate(found))))
    variant = TriAttention.variant_for(params, request(tokens=tokens), shape, s)
    if interval is not None:
        variant = replace(variant, plan=replace(variant.plan, interval=interval))
    return built(variant.row(trace, n - s))


def take(row: Any, p: int, k: Tensor) -> None:
    q = torch.zeros(1, row.trace.shape.h, 1, k.shape[3])
    for layer in range(len(k)):
        new = k[layer : layer + 1, :, p : p + 1]
        step(row, q, new, new, p + 1 - row.trace.s_prompt, layer)
    cut(row)


def held(row: Any) -> np.ndarray:
    """Positions per layer and head, (layers, h_kv, n)."""
    return np.stack([layer.positions()[0].numpy() for layer in row.store.layers.values()])


def run_vectors(path: Path) -> list[Check]:
    """The authors' scores and selections of one cut, and a trace of several."""
    meta, x = load(path)
    k = torch.from_numpy(x["k"])
    found = known(x, len(k), meta["H"])
    params = replace(
        PARAMS, mode=meta["mode"], normalize=meta["normalize"], aggregate=meta["aggregation"],
        reduce=meta["layer_head_aggregation"], n_offsets=len(x["offsets"]), interval=meta.get("interval", 1),
    )  # fmt: skip
    if "cache_len" in x:
        params = replace(
            params,
            trigger="slack" if meta["slack_trigger"] else "gated",
            count_prompt=meta["count_prompt_tokens"],
        )
        return [(path.stem, check_trace(meta, x, k, found, params))]
    assert offsets_of(params.n_offsets) == x["offsets"].tolist()
    scores = [
        key_scores(
            found[i], k[i : i + 1, :, meta["prompt"] :], meta["absolute_position"], params.n_offsets, params.aggregate
        )
        for i in range(len(k))
    ]
    by_head = torch.stack(scores)[tuple(torch.from_numpy(x["heads"]).long().T)]
    check = check_refusal if meta["budget"] <= meta["prompt"] else check_cut
    return [(path.stem, first(differs("scores", by_head, x["raw_score"], 3e-3), check(meta, x, k, found, params)))]


def check_cut(
    meta: dict[str, Any], x: dict[str, np.ndarray], k: Tensor, found: Tensor, params: TriAttention.Params
) -> str | None:
    """One cut, of a cache whose tokens may have gaps between them, as earlier cuts leave them."""
    positions, n = torch.from_numpy(x["positions"]).long(), meta["absolute_position"]
    spread = torch.zeros(*k.shape[:2], n, k.shape[3])
    spread[:, :, positions] = k
    row = row_on(spread, meta["H"], meta["prompt"], found, params, meta["budget"], n - meta["budget"])
    for p in range(meta["prompt"], n):
        if p == n - 1:  # what earlier cuts took
            row.plan = replace(row.plan, interval=meta["n"] - meta["budget"])
            for layer in [*row.store.layers]:
                row.store.change_between(layer, Stay(positions[:-1].expand(1, meta["Hk"], -1), 1))
        take(row, p, spread)
    theirs = {"global": lambda y: y[None, None], "per_head": lambda y: y[None], "per_layer_head": lambda y: y}
    expected = np.broadcast_to(theirs[meta["mode"]](x["keep"]), (len(k), meta["Hk"], meta["budget"]))
    return differs("kept", held(row), x["positions"][expected])


def check_refusal(
    meta: dict[str, Any], x: dict[str, np.ndarray], k: Tensor, found: Tensor, params: TriAttention.Params
) -> str | None:
    """Where the prompt fills the budget the authors keep the first slots and lose the answer, and we refuse."""
    with pytest.raises(ConfigError, match="does not hold a protected prompt"):
        row_on(k, meta["H"], meta["prompt"], found, params, meta["budget"])
    return differs("the authors' first slots", np.arange(meta["budget"]), x["keep"])


def check_trace(
    meta: dict[str, Any], x: dict[str, np.ndarray], k: Tensor, found: Tensor, params: TriAttention.Params
) -> str | None:
    row = row_on(k, meta["H"], meta["S"], found, params, meta["budget"])
    lengths, cuts, kept = [held(row).shape[2]], [], []
    for p in range(meta["S"], meta["T"]):
        take(row, p, k)
        lengths.append(held(row).shape[2])
        if row.store[0].evictions is not None:
            cuts.append(p)
            kept.append(held(row)[0] if meta["mode"] != "per_layer_head" else held(row))
    return first(
        differs("lengths", lengths, x["cache_len"]),
        differs("positions of cuts", cuts, x["compress_pos"]),
        differs("kept", np.stack(kept)[:, 0] if meta["mode"] == "global" else np.stack(kept), x["kept_pos"]),
    )


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_triattention_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def drawn(n: int, layers: int = 2, h: int = 4, h_kv: int = 2, d_h: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys (layers, h_kv, n, d_h), and statistics of queries that have a centre."""
    draw = torch.Generator().manual_seed(seed)
    k = torch.randn(layers, h_kv, n, d_h, generator=draw)
    q = torch.randn(layers, h, 50, d_h, generator=draw) + torch.randn(layers, h, 1, d_h, generator=draw)
    found = [Queries().of_layer(q[i : i + 1], k[i : i + 1])["statistics"] for i in range(layers)]
    return k, torch.stack(found)


@pytest.mark.parametrize("mode", ["per_head", "global", "per_layer_head"])
def test_the_prompt_stays_and_a_cut_leaves_the_target(mode: str) -> None:
    k, found = drawn(70)
    row = row_on(k, 4, 9, found, replace(PARAMS, mode=mode), 24)
    for p in range(9, 70):
        take(row, p, k)
        n = p + 1 if p < 31 else 24 + (p - 31) % 8
        assert held(row).shape[2] == n
        assert (np.sort(held(row))[..., :9] == np.arange(9)).all()
    n_sets = {tuple(np.sort(head).tolist()) for layer in held(row) for head in layer}
    assert len(n_sets) == {"per_head": 2, "global": 1, "per_layer_head": 4}[mode]
    n, last = 24 + 8, row.store.ledger.entries[-2 * ((69 - 31) % 8) - 2 :]
    expected = {"per_head": [4 * 2 * n, 0], "global": [4 * n, 0], "per_layer_head": [4 * 2 * n] * 2}[mode]
    assert [entry.resident_meta_bytes for entry in last[:2]] == expected


def test_heads_without_statistics_have_no_say() -> None:
    """A KV head with some goes by those; one without by the mean of all heads; a layer without any by position."""
    k, found = drawn(27)
    found[0, 1, :3] = found[1, :, :3] = torch.nan  # of four heads on two KV heads: all but one in a layer, none in one
    found[0, 2:, :3] = torch.nan
    only = standardised(key_scores(found[0], k[:1, :, 5:], 27, 17, "mean"))[0]
    best = {*(only.topk(11).indices + 5).tolist(), *range(5)}
    for mode in ("per_head", "global", "per_layer_head"):
        row = row_on(k, 4, 5, found, replace(PARAMS, mode=mode, interval=11), 16)
        for p in range(5, 27):
            take(row, p, k)
        layers = held(row)
        assert [{*head.tolist()} for head in layers[0]] == [best] * 2
        of_last = best if mode != "per_layer_head" else {*range(16)}
        assert [{*head.tolist()} for head in layers[1]] == [of_last] * 2


def test_scores_depend_on_distances_alone() -> None:
    """Keys moved on with the current position are worth the same; and the formula with phases, term by term."""
    k, found = drawn(20, layers=1)
    speeds, positions = found[0, 0, 3].double(), torch.arange(20)
    pairs = as_complex(k[0].double())

    def at(shift: int) -> Tensor:
        turned = pairs * torch.exp(1j * (positions + shift).view(-1, 1) * speeds)
        rotated = torch.cat([turned.real, turned.imag], -1).float().unsqueeze(0)
        return key_scores(found[0], rotated, 20 + shift, 5, "mean")

    torch.testing.assert_close(at(0), at(5000), atol=1e-4, rtol=0)
    centre = as_complex(torch.cat([found[0, :, 0], found[0, :, 1]], -1).double())
    for h in range(4):
        phase = torch.angle(centre[h] * pairs[h // 2].conj())
        size = centre[h].abs() * pairs[h // 2].abs()
        terms = [
            (size * torch.cos((20 - positions.view(-1, 1) + o) * speeds + phase)).sum(-1) for o in (1, 2, 4, 8, 16)
        ]
        strays = ((found[0, h, 2].double() - centre[h].abs()) * pairs[h // 2].abs()).sum(-1)
        torch.testing.assert_close(at(0)[h].double(), torch.stack(terms).mean(0) + strays, atol=1e-4, rtol=0)


def test_without_a_centre_tokens_rank_by_the_size_of_their_keys() -> None:
    k, found = drawn(20, layers=1)
    found[:, :, :2] = 0
    expected = (found[0, :, 2].unflatten(0, (2, 2)) @ as_complex(k[0]).abs().mT).flatten(0, 1)
    torch.testing.assert_close(key_scores(found[0], k, 20, 17, "mean"), expected)


def test_a_budget_that_does_not_hold_the_prompt_is_refused() -> None:
    k, found = drawn(70)
    with pytest.raises(ConfigError, match=r"budget=30 does not hold a protected prompt of 25 .* use budget=33 or more"):
        row_on(k, 4, 25, found, PARAMS, 30)
    row = row_on(k, 4, 25, found, replace(PARAMS, protect_prompt=False), 20)
    for p in range(25, 70):
        take(row, p, k)
    assert held(row).shape[2] <= 28 and not (np.sort(held(row))[..., :20] == np.arange(20)).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_statistics_are_those_of_queries_before_rotation(kind: str) -> None:
    model, ids = tiny(kind), prompt(60)
    with model.hooked():
        found = Queries().measure(model, ids)["statistics"]
    assert found.shape == (3, 6, 4, 4)
    attention = model.hf.model.layers[0].self_attn
    x = model.hf.model.layers[0].input_layernorm(model.hf.model.embed_tokens(torch.tensor([ids])))
    q = attention.q_proj(x).unflatten(-1, (6, 8))
    q = (attention.q_norm(q) if kind == "qwen3" else q)[0].transpose(0, 1)
    pairs = as_complex(q.double())
    expected = torch.stack([pairs.real.mean(1), pairs.imag.mean(1), pairs.abs().mean(1)], 1)
    torch.testing.assert_close(found[0, :, :3].double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[0, 0, 3], model.hf.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("kind", ["glm", "opt"])
def test_models_that_rotate_otherwise_are_refused(kind: str) -> None:
    model = tiny(kind)
    with model.hooked(), pytest.raises(ConfigError, match="does not rotate all 8 dimensions of a head"):
        Queries().measure(model, prompt(20))


def test_what_it_asks_of_the_model() -> None:
    assert statistics(PARAMS) == Calibrated("queries", "statistics", None, True)
    with pytest.raises(ConfigError, match=r"use method\.mode=per_layer_head with it"):
        replace(PARAMS, reduce="mean")
