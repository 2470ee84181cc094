"""Small floats: every code and midpoint, blocks of every kind, and what does not depend on other numbers."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.kernels.packed.codes import unpack
from kvbench.kernels.packed.floats import (
    E2M1,
    E4M3,
    E5M2,
    FloatCode,
    Format,
    bounds,
    encode,
    floats_with_room,
    measured,
    native,
    pack_token,
    powers,
    quantise_floats,
    rebuild_floats,
    tables,
    values,
)

CPU = torch.device("cpu")
FORMATS = (E4M3, E5M2, E2M1)
NVFP4 = FloatCode(E2M1, 16, "e4m3", "layer", E2M1.top * E4M3.top)
CODES = {
    "one": FloatCode(E4M3),
    "tensor": FloatCode(E4M3, 0, "none", "layer", E4M3.top),
    "head": FloatCode(E5M2, 0, "none", "head", E5M2.top),
    "token_head": FloatCode(E4M3, 0, "float"),
    "nvfp4": NVFP4,
    "nvfp4_one": NVFP4._replace(shared="one"),
    "4over6": NVFP4._replace(tries=(6, 4)),
    "mxfp4": FloatCode(E2M1, 32, "e8m0"),
    "mxfp8": FloatCode(E4M3, 32, "e8m0"),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coded(x: Tensor, code: FloatCode) -> Tensor:
    shared = measured(x, code)
    return rebuild_floats(quantise_floats(x, code, shared), code, shared)


def by_hand(code: int, form: Format) -> float:
    """What a code reads as, from its fields."""
    n_mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15), "e2m1": (1, 1)}[form.name]
    sign = -1.0 if code >> (form.bits - 1) else 1.0
    size = code % (1 << (form.bits - 1))
    exponent, mantissa = size >> n_mantissa, size % (1 << n_mantissa)
    if form is E4M3 and size == 127:
        return math.nan
    if form is E5M2 and size >= 124:
        return sign * math.inf if size == 124 else math.nan
    part = mantissa / (1 << n_mantissa)
    return sign * (part * 2.0 ** (1 - bias) if exponent == 0 else (1 + part) * 2.0 ** (exponent - bias))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_each_code_reads_as_its_fields_say_and_its_value_has_that_code(form: Format) -> None:
    table = values(form, CPU)
    expected = [by_hand(code, form) for code in range(1 << form.bits)]
    np.testing.assert_array_equal(table.numpy(), np.array(expected, np.float32))
    real = [code for code in range(1 << form.bits) if abs(expected[code]) <= form.top]
    assert encode(table[real], form).tolist() == real, "-0 has a code of its own too"
    assert max(expected[code] for code in real) == form.top and 2.0**form.largest_exponent <= form.top


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer(form: Format) -> None:
    sizes = [float(x) for x in values(form, CPU)[: 1 << (form.bits - 1)] if abs(x) <= form.top]
    for code, (low, high) in enumerate(pairwise(sizes)):
        middle = torch.tensor((low + high) / 2)
        below, above = (torch.nextafter(middle, torch.tensor(x)) for x in (-math.inf, math.inf))
        found = encode(torch.stack([below, middle, above, -middle]), form).tolist()
        even = code if code % 2 == 0 else code + 1
        assert found == [code, even, code + 1, even + (1 << (form.bits - 1))]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_too_large_numbers_and_infinity_become_the_largest(form: Format) -> None:
    x = torch.tensor([form.top * 1.2, 61_440.0, 1e30, math.inf])
    assert values(form, CPU)[encode(torch.cat([x, -x]), form).int()].tolist() == [form.top] * 4 + [-form.top] * 4


@pytest.mark.parametrize("form", (E4M3, E5M2), ids=lambda form: form.name)
def test_what_is_no_number_stays_none(form: Format) -> None:
    assert encode(torch.tensor([math.nan]), form).tolist() == [127]


@pytest.mark.parametrize("form", (E4M3, E5M2), ids=lambda form: form.name)
def test_casts_round_as_the_table_says(form: Format) -> None:
    """Devices whose casts are not known look numbers up."""
    x = torch.cat([randn(20_000, seed=i) * scale for i, scale in enumerate((1e-8, 1e-6, 1e-3, 1, 300, 1e5))])
    looked_up = torch.bucketize(x.abs(), bounds(form, CPU)).to(torch.uint8) | (x.signbit().to(torch.uint8) << 7)
    assert torch.equal(looked_up, encode(x, form))


def test_errors_of_normal_numbers_are_half_a_step_at_most() -> None:
    x = randn(1, 200, 64) * 10
    for form, most, least in ((E4M3, 2**-4, 2**-6), (E5M2, 2**-3, 2**-14)):
        off = (coded(x, FloatCode(form)) - x).abs() / x.abs()
        assert off[x.abs() >= least].max() <= most


def test_powers_are_exact_down_to_the_smallest() -> None:
    found = powers(CPU).double()
    assert found[:255].tolist() == [2.0 ** (i - 127) for i in range(255)] and found[255].isnan()


@pytest.mark.parametrize("name", CODES)
def test_a_token_s_codes_depend_on_no_other_token(name: str) -> None:
    code, x = CODES[name], randn(2, 40, 64)
    shared = measured(x, code)
    every = quantise_floats(x, code, shared)
    for i in (0, 17, 39):
        one = quantise_floats(x[:, i : i + 1], code, shared)
        assert torch.equal(every.codes[:, i : i + 1], one.codes)
        if code.scale != "none":
            assert torch.equal(every.scales[:, i : i + 1], one.scales)


@pytest.mark.parametrize("name", CODES)
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    code, x = CODES[name], randn(2, 40, 64)
    shared = measured(x, code)
    packed = floats_with_room(quantise_floats(x, code, shared), code, 45)
    held = packed.codes.nbytes + (packed.scales.nbytes if code.scale != "none" else 0)
    assert held == 2 * 45 * code.token_bytes(64)
    assert code.shared_bytes(2) == (0 if code.shared == "one" else shared.nbytes)
    assert packed.scales is packed.zeros and packed.codes[0].is_contiguous()
    same = rebuild_floats(type(packed)(*(part[:, :40] for part in packed)), code, shared)
    assert torch.equal(same, coded(x, code))


@pytest.mark.parametrize("name", CODES)
def test_numbers_are_values_times_scales_as_attention_reads_them(name: str) -> None:
    code, x = CODES[name], randn(2, 9, 64)
    shared = measured(x, code)
    codes, scales, _ = quantise_floats(x, code, shared)
    table, of_bytes = tables(code, shared)
    real = scales if of_bytes is None else of_bytes[scales.int()]
    numbers = table[unpack(codes, code.format.bits, 64).int()]
    width = code.width(64)
    expected = numbers.unflatten(-1, (-1, width)) * real.expand(2, 9, 64 // width).unsqueeze(-1)
    torch.testing.assert_close(coded(x, code), expected.flatten(-2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "token_head"])
def test_zeros_denormals_and_one_outlier_harm_no_other_block(name: str) -> None:
    code, x = CODES[name], randn(2, 6, 64)
    plain = coded(x, code._replace(shared="one"))
    odd = x.clone()
    odd[:, 1], odd[:, 2], odd[:, 3, 7] = 0, 1e-39, 2700.0
    found = coded(odd, code._replace(shared="one"))
    assert found.isfinite().all() and (found[:, 1] == 0).all() and (found[:, 2].abs() <= 2e-39).all()
    assert torch.equal(found[:, (0, 4, 5)], plain[:, (0, 4, 5)])
    width = code.width(64)
    assert torch.equal(found[:, 3, width:], plain[:, 3, width:])
    assert abs(float(found[0, 3, 7]) / 2700 - 1) < 0.27  # of MX, whose largest saturates by a quarter at most


def test_the_largest_block_has_the_largest_scale() -> None:
    x = randn(2, 30, 64)
    packed = quantise_floats(x, NVFP4, measured(x, NVFP4))
    assert int(packed.scales.max()) == 126 and float(measured(x, NVFP4)) == float(x.abs().max() / 2688)


def test_a_negative_number_that_becomes_zero_keeps_its_sign() -> None:
    x = torch.full((1, 1, 16), -1e-12)
    x[0, 0, 0] = 1e-12
    packed = quantise_floats(x, NVFP4._replace(shared="one"), torch.ones(1, 1, 1))
    assert packed.scales.tolist() == [[[0]]] and unpack(packed.codes, 4, 16).tolist() == [[[0] + [8] * 15]]
    zeros = quantise_floats(torch.zeros(1, 1, 32), CODES["mxfp4"], torch.ones(1, 1, 1))
    assert not zeros.codes.any() and not zeros.scales.any()


@pytest.mark.parametrize("name", ["nvfp4", "4over6"])
def test_twice_the_numbers_with_twice_the_scale_are_the_same_bytes(name: str) -> None:
    x, code = randn(2, 30, 64), CODES[name]
    once, twice = (quantise_floats(each, code, measured(each, code)) for each in (x, 2 * x))
    assert torch.equal(once.codes, twice.codes) and torch.equal(once.scales, twice.scales)


def test_the_better_of_two_scales_never_loses_more() -> None:
    x = randn(2, 200, 64, seed=3)
    six, both = (
        (coded(x, CODES[name]) - x).double().unflatten(-1, (-1, 16)).square().sum(-1) for name in ("nvfp4", "4over6")
    )
    assert (both <= six).all() and (both < six).float().mean() > 0.1


def test_a_power_of_two_is_read_off_the_exponent() -> None:
    """A rounded logarithm would take the next power for the number just below one."""
    x = torch.zeros(1, 3, 32)
    x[0, :, 0] = torch.tensor([4.0, float(np.nextafter(np.float32(4), np.float32(0))), 2.0**-149])
    packed = quantise_floats(x, CODES["mxfp4"], torch.ones(1, 1, 1))
    assert packed.scales.flatten().tolist() == [127, 126, 0]


@pytest.mark.skipif(native() is None, reason="the C++ of the ops was not compiled")
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_a_token_packed_in_cpp_has_the_same_bytes(code: FloatCode) -> None:
    drawn = torch.Generator().manual_seed(0)
    for trial in range(60):
        x = torch.randn(3, 1, 64, generator=drawn) * 10 ** (12 * torch.rand(3, 1, 1, generator=drawn) - 7)
        x[0] = 0 if trial % 3 == 0 else x[0]
        x[1, 0, :32] = torch.linspace(-6, 6, 32) / 4 if trial % 5 == 0 else x[1, 0, :32]
        x[2, 0, :3] = torch.tensor([1e-39, -0.0, 3e4])
        shared = measured(x, code)
        wanted = quantise_floats(x, code, shared)
        to = floats_with_room(quantise_floats(x[:, :0], code, shared), code, 3)
        to.codes.fill_(99)
        pack_token(x, code, shared, to, 1)
        assert torch.equal(to.codes[:, 1:2], wanted.codes) and (to.codes[:, ::2] == 99).all()
        if code.scale != "none":
            assert torch.equal(to.scales[:, 1:2], wanted.scales)
