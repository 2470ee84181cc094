"""KIVI against the authors' vectors, its bytes against the page's formula, and what it refuses."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.codes import quantise_channels, quantise_tokens, rebuild_channels, rebuild_tokens, unpack
from kvbench.methods.quantising.kivi import KIVI, KIVICache
from kvbench.methods.rules import planned
from kvbench.tests.conformance import answers, model, ours, variant
from kvbench.tests.vectors import Check, differs, first, load, row_of, step, trace_of

VECTORS = Path(__file__).parents[2] / "golden" / "kivi"
PARAMS = KIVI.Params(4, 4, 32, 128)
WHOLE = BudgetRequest(Fraction(1), None, Fraction(0))


def in_bytes(memory: str) -> BudgetRequest:
    return BudgetRequest(None, None, Fraction(0), memory=Fraction(memory))


def shape_of(h: int, h_kv: int, d_h: int) -> ModelShape:
    return ModelShape("x", 1, h, h_kv, d_h, 1 << 20, (0,))


def run_vectors(path: Path) -> list[Check]:
    meta, arrays = load(path)
    return [(path.stem, (quantised if path.stem.startswith("quant_") else traced)(meta, arrays))]


def quantised(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    """One tensor through the quantiser."""
    x, bits, group, valid = torch.from_numpy(arrays["x"]), meta["bits"], meta["group"], arrays["code_valid"]
    h_kv, n, d = x.shape
    if meta["axis"] == "channel":
        packed = quantise_channels(x, bits, group)
        codes = unpack(packed.codes, bits, group).transpose(2, 3).reshape(h_kv, n, d)
        scales, zeros = (y.transpose(1, 2) for y in packed[1:])
        rebuilt = rebuild_channels(packed, bits, group)
        stream = packed.codes.transpose(1, 2).reshape(h_kv, d, -1)
    else:
        packed = quantise_tokens(x, bits, group)
        codes, (_, scales, zeros) = unpack(packed.codes, bits, d), packed
        rebuilt, stream = rebuild_tokens(packed, bits, group), packed.codes
    words = stream.contiguous().numpy().view(np.int32) if valid.all() else arrays["packed"]
    return first(
        differs("codes", codes.numpy()[valid], arrays["code"][valid]),
        differs("scales", scales, arrays["scale"]),
        differs("zeros", zeros, arrays["zero"]),
        differs("packed", words, arrays["packed"]),
        differs("rebuilt", rebuilt, arrays["dequant"]),
    )


def traced(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    """Prompt and steps through the engine."""
    n, s, group = meta["n_steps"], meta["S"], meta["group"]
    params = KIVI.Params(meta["k_bits"], meta["v_bits"], group, meta["residual"])
    k, v = (torch.from_numpy(arrays[name]).unsqueeze(0) for name in "kv")
    row = row_of(KIVI, params, trace_of(k, v, meta["Hq"]), WHOLE, n_new=n)
    quantized: KIVICache = row.store[0].quantized
    counts = [[quantized.n_k, quantized.late_k.n, quantized.n_v, quantized.late_v.n]]
    outs = []
    for t in range(n):
        q, k_new, v_new = (torch.from_numpy(arrays[f"{name}_step"][t])[None, :, None] for name in "qkv")
        outs.append(step(row, q, k_new, v_new, t + 1)[0, :, 0])
        counts.append([quantized.n_k, quantized.late_k.n, quantized.n_v, quantized.late_v.n])
        entry = row.store.ledger.entries[-1]
        if entry.attended != meta["Hq"] * (s + t + 1):
            return f"step {t + 1} attends to {entry.attended} tokens of query heads"
    h_kv, d, filled = meta["Hk"], meta["d"], quantized.n_k // group
    k_codes = unpack(quantized.keys.codes[:, :filled], params.key_bits, group).transpose(2, 3).reshape(h_kv, -1, d)
    v_codes = unpack(quantized.values.codes[:, : quantized.n_v], params.value_bits, d)
    problems = [
        differs("counts", counts, arrays["counts"]),
        differs("out", torch.stack(outs), arrays["out"], 1e-5),
        differs("key codes", k_codes, arrays["k_code"]),
        differs("key scales", quantized.keys.scales[:, :filled].transpose(1, 2), arrays["k_scale"]),
        differs("key zeros", quantized.keys.zeros[:, :filled].transpose(1, 2), arrays["k_zero"]),
        differs("value codes", v_codes, arrays["v_code"]),
        differs("value scales", quantized.values.scales[:, : quantized.n_v], arrays["v_scale"]),
        differs("value zeros", quantized.values.zeros[:, : quantized.n_v], arrays["v_zero"]),
    ]
    if "k_hat" in arrays:
        seen = quantized.part().gathered()
        problems += [differs(f"{name} as seen", getattr(seen, name)[0], arrays[f"{name}_hat"], 1e-6) for name in "kv"]
    return first(*problems)


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.npz")), ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    for name, problem in run_vectors(path):
        assert problem is None, f"{name}: {problem}"


@pytest.mark.parametrize(("h", "h_kv"), [(8, 2), (9, 3)])
@pytest.mark.parametrize(("bits", "group", "residual"), [((2, 2), 32, 128), ((4, 4), 16, 32), ((4, 2), 32, 64)])
def test_bytes_are_the_formula_at_every_length(
    h: int, h_kv: int, bits: tuple[int, int], group: int, residual: int
) -> None:
    """In the rules for lengths 1 to 3,000; as the quantized counts them for some, and as generated tokens come."""
    d, plan, shape = 32, KIVI.Plan(*bits, group, residual), shape_of(h, h_kv, 32)

    def formula(n: int) -> Fraction:
        r_k, r_v = n % residual, min(n, residual)
        return h_kv * d * (
            (n - r_k) * (Fraction(bits[0], 8) + Fraction(4, group)) + 2 * r_k
            + (n - r_v) * (Fraction(bits[1], 8) + Fraction(4, group)) + 2 * r_v
        )  # fmt: skip

    assert [KIVI.code_bytes(plan, n, shape) for n in range(1, 3001)] == [formula(n) for n in range(1, 3001)]
    k = torch.randn(1, h_kv, 3000, d)
    for n in (1, residual - 1, residual, residual + 1, 777, 3000):
        quantized = KIVICache(plan, k[:, :, :n], k[:, :, :n], 80)
        assert quantized.counted_bytes() == formula(n)
        for t in range(1, 81, 1):
            quantized.append(k[:, :, :1], k[:, :, :1])
            quantized.pack_due()
            assert quantized.counted_bytes() == formula(n + t)


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        ((2, 2, 32, 128), 7_919_616),
        ((2, 2, 64, 128), 6_648_832),
        ((4, 2, 32, 128), 10_475_520),
        ((4, 4, 32, 128), 13_002_752),
    ],
)
def test_the_page_s_table(plan: tuple[int, int, int, int], share: int) -> None:
    assert KIVI.code_bytes(KIVI.Plan(*plan), 10_000, shape_of(32, 8, 128)) == share


@pytest.mark.parametrize(
    ("memory", "plan"),
    [
        ("3/5", (8, 8, 32, 128)),
        ("1/3", (4, 4, 32, 128)),
        ("0.3", (4, 4, 64, 128)),
        ("1/5", (2, 2, 32, 128)),
        ("1/6", (2, 2, 64, 128)),
    ],
)
def test_memory_takes_the_first_setting_that_fits(memory: str, plan: tuple[int, int, int, int]) -> None:
    _, made, _ = planned(KIVI, PARAMS, in_bytes(memory), shape_of(32, 8, 128), 10_000)
    assert made == KIVI.Plan(*plan)


def test_too_little_memory_names_the_least_and_a_composition() -> None:
    shape = shape_of(32, 8, 128)
    with pytest.raises(ConfigError, match=r"use memory=0\.\d+ or more, or method=snapkv compose=kivi") as caught:
        planned(KIVI, PARAMS, in_bytes("1/8"), shape, 10_000)
    least = str(caught.value).split("use memory=")[1].split()[0]
    planned(KIVI, PARAMS, in_bytes(least), shape, 10_000)


def test_a_residual_is_whole_groups() -> None:
    with pytest.raises(ConfigError, match=r"method\.residual=100 is no multiple of method\.group=32; use 128"):
        KIVI.Params(4, 4, 32, 100)


def test_a_share_of_the_tokens_and_a_group_that_fits_no_head_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ratio=0\.2 drops tokens, and KIVI attends to everything"):
        KIVI.check(PARAMS, BudgetRequest(Fraction(1, 5), None, Fraction(0)), shape_of(8, 2, 64))
    with pytest.raises(ConfigError, match=r"method\.group=32 does not divide the 48 dimensions"):
        KIVI.check(PARAMS, WHOLE, shape_of(8, 2, 48))


def test_eight_bits_answer_like_full_attention_and_a_short_prompt_is_exact() -> None:
    small = KIVI.Params(8, 8, 8, 16)
    one = KIVI.variant_for(small, WHOLE, model().shape, 240)
    full = variant(ours("full"), "1")
    assert not one.is_full
    said, reference = answers([one, full])
    assert said.ids[:8] == reference.ids[:8]
    k = torch.randn(1, 2, 40, 8)
    row = row_of(KIVI, KIVI.Params(2, 2, 8, 64), trace_of(k, k, 4), WHOLE)
    q = torch.randn(1, 4, 1, 8)
    out = step(row, q, k[:, :, :1], k[:, :, :1])
    tokens = torch.cat([k, k[:, :, :1]], 2).repeat_interleave(2, 1)
    torch.testing.assert_close(out, ((q @ tokens.mT) * 8**-0.5).softmax(-1) @ tokens)


def test_the_axes_are_right() -> None:
    """Keys with channels that are large for all tokens lose far less per channel than per token."""
    torch.manual_seed(0)
    keys = torch.randn(2, 256, 64) + 20 * (torch.rand(64) > 0.9)
    channel = rebuild_channels(quantise_channels(keys, 2, 32), 2, 32)
    token = rebuild_tokens(quantise_tokens(keys, 2, 32), 2, 32)
    assert (channel - keys).norm() < 0.5 * (token - keys).norm()
