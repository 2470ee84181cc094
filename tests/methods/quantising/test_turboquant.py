"""TurboQuant against vLLM's slots and an exact implementation's codes, its bytes, and what it refuses."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.quantized import QuantizedLayer
from kvbench.engine.shapes import ModelShape
from kvbench.methods.quantising import codebooks, turboquant
from kvbench.methods.quantising.turboquant import PRESETS, Book, TurboQuant, TurboQuantCache
from kvbench.methods.rules import planned
from kvbench.tests.conformance import answers, model
from kvbench.tests.vectors import Check, differs, first, load, row_of, step, trace_of

VECTORS = Path(__file__).parents[2] / "golden" / "turboquant"
WHOLE = BudgetRequest(Fraction(1), None, Fraction(0))
PARAMS = TurboQuant.Params("4bit_nc", "hadamard", "mse", "uniform", 0, 0)
LARGE = ModelShape("l", 32, 32, 8, 128, 1 << 20, tuple(range(32)))


def run_vectors(path: Path) -> list[Check]:
    meta, arrays = load(path) if path.stem != "paper_codebooks" else ({}, dict(np.load(path)))
    run = {"vllm": served, "paper_codebooks": solved, "paper_mse": rebuilt, "paper_prod": unbiased}
    return [(path.stem, next(run[name] for name in run if path.stem.startswith(name))(meta, arrays))]


def solved(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    problems = []
    for name in (name for name in arrays if name.startswith("centroids")):
        d, b = (int(part[1:]) for part in name.split("_")[1:])
        found, error = codebooks.solved(d, b)
        problems += [
            differs(name, np.array(found) * d**0.5, arrays[name] * d**0.5, 1e-6),
            differs(f"error of {name}", error, arrays[name.replace("centroids", "mse")], 1e-6),
        ]
    return first(*problems)


def rebuilt(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    x, rotation, table = (torch.from_numpy(arrays[name]).double() for name in ("x", "rotation", "centroids"))
    codes, norms = codebooks.mse_codes(x, rotation, table)
    return first(
        differs("idx", codes, arrays["idx"]),
        differs("norm", norms[:, 0], arrays["norm"], 1e-6),
        differs("x_hat", codebooks.mse_rebuilt(codes, norms, rotation, table), arrays["x_hat"], 1e-5),
    )


def unbiased(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    names = ("x", "rotation", "centroids", "s")
    x, rotation, table, s = (torch.from_numpy(arrays[name]).double() for name in names)
    codes, norms = codebooks.mse_codes(x, rotation, table)
    signs, lengths = codebooks.signs_of(x, norms, table[codes.long()] @ rotation, s)
    hat = codebooks.prod_rebuilt(codes, norms, signs, lengths, rotation, table, s)
    real = arrays["norm"] > 0  # of a zero vector the residual has no sign
    return first(
        differs("idx", codes, arrays["idx"]),
        differs("sign", (signs.int() * 2 - 1)[torch.from_numpy(real)], arrays["sign"][real]),
        differs("gamma", lengths[:, 0], arrays["gamma"], 1e-6),
        differs("x_hat", hat, arrays["x_hat"], 1e-5),
    )


def served(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    """vLLM's slots and answers, with its own codebook."""
    preset = meta["preset"].removeprefix("turboquant_")
    params, plan = replace(PARAMS, preset=preset), TurboQuant.Plan(preset, meta["key_bits"], meta["value_bits"])
    rotation, table, midpoints = (torch.from_numpy(arrays[x]) for x in ("rotation", "centroids", "midpoints"))
    book, theirs = Book(rotation, table, midpoints, None, None), turboquant.book_of
    turboquant.book_of = lambda params, plan, d_h: book  # type: ignore[assignment]
    try:
        return answered(params, plan, meta, arrays)
    finally:
        turboquant.book_of = theirs


def answered(params: Any, plan: Any, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    s, n = meta["S"], meta["n_steps"]
    k, v = (torch.from_numpy(arrays[name]).unsqueeze(0) for name in "kv")
    row = row_of(TurboQuant, params, trace_of(k, v, meta["Hq"], s), WHOLE, n_new=n)
    outs = []
    for t in range(n):
        q = torch.from_numpy(arrays["q_step"][t])[None, :, None]
        outs.append(step(row, q, k[:, :, s + t : s + t + 1], v[:, :, s + t : s + t + 1], t + 1)[0, :, 0])
    quantized: TurboQuantCache = row.store[0].quantized
    if quantized.counted_bytes() != meta["Hk"] * (s + n) * meta["slot_bytes"]:
        return f"{quantized.counted_bytes()} bytes are counted"
    return first(
        differs("slots", slots_of(quantized), arrays["slots"]),
        differs("keys as seen", quantized.rebuilt_keys().half(), arrays["k_hat_rotated"], 2e-3),
        differs("values as seen", quantized.rebuilt_values().half(), arrays["v_hat"], 2e-3),
        differs("out", torch.stack(outs), arrays["out"], 1e-5),
    )


def slots_of(quantized: TurboQuantCache) -> np.ndarray:
    """A token's bytes one behind the other, as vLLM keeps them."""
    norms = () if quantized.plan.key_bits == 8 else (quantized.keys.scales,)
    parts = [quantized.keys.codes, *norms, quantized.values.codes, quantized.values.scales, quantized.values.zeros]
    return np.concatenate([x[:, : quantized.n].numpy().copy(order="C").view(np.uint8) for x in parts], -1)


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.npz")), ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    for name, problem in run_vectors(path):
        assert problem is None, f"{name}: {problem}"


@pytest.mark.parametrize(("bits", "error"), [(1, 0.361), (2, 0.1160), (3, 0.0340), (4, 0.0093)])
def test_unit_vectors_lose_what_the_page_says(bits: int, error: float) -> None:
    x = torch.nn.functional.normalize(torch.randn(4000, 128, generator=torch.Generator().manual_seed(0)), dim=-1)
    table = codebooks.centroids(128, bits, is_normal=False)
    rotation = codebooks.haar(128, 0)
    codes, norms = codebooks.mse_codes(x, rotation, table)
    lost = (codebooks.mse_rebuilt(codes, norms, rotation, table) - x).square().sum(-1).mean()
    assert abs(float(lost) / error - 1) < 0.03


@pytest.mark.parametrize(
    ("preset", "share"), [("k8v4", 196), ("4bit_nc", 134), ("k3v4_nc", 118), ("3bit_nc", 102), ("2bit_nc", 70)]
)
def test_the_page_s_bytes(preset: str, share: int) -> None:
    plan = TurboQuant.Plan(preset, *PRESETS[preset])
    assert TurboQuant.token_bytes_of(PARAMS, plan, 128) == share


@pytest.mark.parametrize(("h", "h_kv"), [(8, 2), (9, 3)])
@pytest.mark.parametrize("preset", PRESETS)
def test_bytes_are_the_formula_and_those_that_are_kept(preset: str, h: int, h_kv: int) -> None:
    params, bits = replace(PARAMS, preset=preset), PRESETS[preset]
    k = torch.randn(1, h_kv, 43, 32)
    row = row_of(TurboQuant, params, trace_of(k[:, :, :40], k[:, :, :40], h), WHOLE, n_new=3)
    for t in range(3):
        out = step(row, torch.randn(1, h, 1, 32), k[:, :, 40 + t : 41 + t], k[:, :, 40 + t : 41 + t], t + 1)
        assert out.isfinite().all()
    of_token = (32 if bits.key == 8 else 4 * bits.key + 2) + 4 * bits.value + 4
    entry = row.store.ledger.entries[-1]
    assert entry.resident_kv_bytes == h_kv * 43 * of_token
    assert row.store.allocated_bytes() == h_kv * 43 * of_token


@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
@pytest.mark.parametrize("objective", ["mse", "prod"])
@pytest.mark.parametrize("values", ["uniform", "mse"])
def test_more_bits_come_nearer_to_full_attention(rotation: str, objective: str, values: str) -> None:
    torch.manual_seed(0)
    k, v, q = torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64), torch.randn(1, 8, 1, 64)
    truth = ((q @ k.repeat_interleave(4, 1).mT) / 8).softmax(-1) @ v.repeat_interleave(4, 1)
    errors = []
    for preset in ("2bit_nc", "3bit_nc", "4bit_nc"):
        params = replace(PARAMS, preset=preset, rotation=rotation, objective=objective, values=values)
        row = row_of(TurboQuant, params, trace_of(k[:, :, :-1], v[:, :, :-1], 8), WHOLE, n_new=1)
        errors.append(float((step(row, q, k[:, :, -1:], v[:, :, -1:]) - truth).norm() / truth.norm()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.35


def test_memory_takes_the_first_preset_that_fits_whole_layers_included() -> None:
    def chosen(memory: str, params: TurboQuant.Params = PARAMS) -> str:
        request = BudgetRequest(None, None, Fraction(0), memory=Fraction(memory))
        return planned(TurboQuant, params, request, LARGE, 10_000)[1].preset

    shares = {preset: chosen(memory) for preset, memory in (("k8v4", "0.39"), ("4bit_nc", "0.27"), ("3bit_nc", "0.2"))}
    assert all(preset == found for preset, found in shares.items())
    with_ends = replace(PARAMS, boundary_layers=2)
    assert chosen("0.355", with_ends) == "4bit_nc" and chosen("0.353", with_ends) == "k3v4_nc"
    with pytest.raises(ConfigError, match=r"use memory=0\.1368 or more"):
        chosen("1/8")


def test_refused_settings() -> None:
    with pytest.raises(ConfigError, match=r"method\.rotation=hadamard needs a power of two"):
        TurboQuant.check(PARAMS, WHOLE, ModelShape("x", 1, 4, 2, 80, 1 << 20, (0,)))
    with pytest.raises(ConfigError, match=r"method\.objective=prod needs a codebook"):
        replace(PARAMS, preset="k8v4", objective="prod")
    with pytest.raises(ConfigError, match=r"method\.boundary_layers=16 leaves no layer"):
        TurboQuant.check(replace(PARAMS, boundary_layers=16), WHOLE, LARGE)


def test_layers_at_the_ends_stay_whole() -> None:
    params = replace(PARAMS, boundary_layers=1)
    (said,) = answers([TurboQuant.variant_for(params, WHOLE, model().shape, 240)])
    assert [isinstance(said.row.store[layer], QuantizedLayer) for layer in range(3)] == [False, True, False]
