"""Packing codes, and attention over packed K and V: C++ against rebuilt numbers, both against float64."""

import pytest
import torch
from torch import Tensor

from kvbench.kernels.packed.attend import Packed, Side, attend_packed_native, attend_packed_ref, native, takes_packed
from kvbench.kernels.packed.codes import (
    BY_CHANNEL,
    BY_FLOAT,
    BY_TABLE,
    BY_TOKEN,
    BY_UNIT_TABLE,
    Quantised,
    min_max,
    pack,
    quantise_channels,
    quantise_tokens,
    rebuild_channels,
    rebuild_tokens,
    unpack,
)
from kvbench.kernels.packed.floats import (
    E2M1,
    E4M3,
    E5M2,
    FloatCode,
    Format,
    floats_with_room,
    measured,
    quantise_floats,
    rebuild_floats,
    tables,
    values,
)
from kvbench.tests.kernels.test_floats import CODES, NVFP4

HEADS = [(8, 2), (9, 3), (4, 4), (16, 2), (7, 1)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def floats(
    code: FloatCode, n: int, total: int, h_kv: int, d: int, dtype: torch.dtype, seed: int, room: int = 0
) -> Side:  # fmt: skip
    """Tokens as floats, with room for more, and exact ones after them."""
    x = randn(1, h_kv, total, d, seed=seed, dtype=dtype)
    return float_side(code, x[0, :, :n].float(), x[:, :, n:].contiguous(), room)


def float_side(code: FloatCode, x: Tensor, exact: Tensor, room: int = 0) -> Side:
    shared = measured(x, code)
    packed, (table, of_bytes) = quantise_floats(x, code, shared), tables(code, shared)
    wide, of = floats_with_room(packed, code, x.shape[1] + room), code.format
    return Side(
        BY_FLOAT, of.bits, code.width(x.shape[2]), x.shape[1], wide, exact, table,
        lambda: rebuild_floats(packed, code, shared), of_bytes, of.exponent_bits,
    )  # fmt: skip


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [8, 40, 64])
def test_codes_come_back_from_their_stream(bits: int, n: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, n * bits // 8)
    assert unpack(packed, bits, n).equal(codes)
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes[0, 0].tolist()))
    assert bytes(packed[0, 0].tolist()) == number.to_bytes(n * bits // 8, "little")


def test_halves_go_to_the_even_code_and_a_constant_group_is_its_value() -> None:
    x = torch.tensor([[0.0, 0.5, 1.5, 2.5, 3.0], [7.0] * 5])
    codes, scale, zero = min_max(x, 2)
    assert codes.tolist() == [[0, 0, 2, 2, 3], [0] * 5]
    assert (scale.tolist(), zero.tolist()) == ([1.0, 0.0], [0.0, 7.0])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_number_is_further_off_than_half_a_step(bits: int) -> None:
    x = randn(2, 64, 32)
    for quantise, rebuild in ((quantise_channels, rebuild_channels), (quantise_tokens, rebuild_tokens)):
        packed = quantise(x, bits, 16)
        off = (rebuild(packed, bits, 16) - x).abs().max()
        assert off <= packed.scales.max() * 0.5001


def side(
    kind: int, bits: int, group: int, n: int, total: int, h_kv: int, d: int, dtype: torch.dtype, seed: int
) -> Side:
    x = randn(1, h_kv, total, d, seed=seed, dtype=dtype)
    coded, exact = x[0, :, :n], x[:, :, n:].contiguous()
    if kind == BY_CHANNEL:
        return Side(kind, bits, group, n, quantise_channels(coded, bits, group), exact)
    if kind == BY_TOKEN:
        return Side(kind, bits, group, n, quantise_tokens(coded, bits, group), exact)
    table = randn(16, seed=9).sort().values
    codes = torch.randint(0, 16, (h_kv, n, d), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    norms = randn(h_kv, n, 1, seed=seed).abs().half()

    def rebuild() -> Tensor:
        numbers = table[codes.long()]
        if kind == BY_UNIT_TABLE:
            numbers = numbers / (numbers.square().sum(-1, keepdim=True) + 1e-16).sqrt()
        return numbers * norms.float()

    return Side(kind, bits, d, n, Quantised(pack(codes, 4), norms, norms), exact, table, rebuild)


def check(k: Side, v: Side, n: int, h: int, d: int, dtype: torch.dtype) -> None:
    """The C++ is at most twice as far from float64 as torch in the same dtype."""
    q, packed = randn(1, h, 1, d, seed=5, dtype=dtype), Packed(k, v, n)
    assert takes_packed(q, packed)
    out, lse = attend_packed_native(q, packed, d**-0.5)
    exact_k, exact_v = (as_float(x, n).repeat_interleave(h // x.exact.shape[1], 1).double() for x in (k, v))
    logits = (q.double() @ exact_k.mT) * d**-0.5
    truth = logits.softmax(-1) @ exact_v
    ours = (out.double() - truth).abs().max()
    theirs = (attend_packed_ref(q, packed, d**-0.5)[0].double() - truth).abs().max()
    assert ours <= 2 * theirs + 2e-6, (float(ours), float(theirs))
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=0, atol=1e-4)


def as_float(x: Side, n: int) -> Tensor:
    """Rebuilt without the rounding of the cache's dtype."""
    wide = Quantised(x.packed.codes, x.packed.scales.float(), x.packed.zeros.float())
    return x._replace(packed=wide, exact=x.exact.float()).rebuilt(n)


@pytest.mark.skipif(native() is None, reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("h", "h_kv"), HEADS)
@pytest.mark.parametrize(
    ("bits", "group", "d"),
    [(2, 32, 64), (4, 32, 128), (4, 16, 32), (2, 16, 16), (8, 32, 64), (2, 128, 128), (4, 64, 64)],
)
def test_keys_by_channel(bits: int, group: int, d: int, h: int, h_kv: int, dtype: torch.dtype) -> None:
    total = 5 * group + 300
    n_k, n_v = (total // group - 1) * group, total - 41
    k = side(BY_CHANNEL, bits, group, n_k, total, h_kv, d, dtype, 1)
    v = side(BY_TOKEN, bits, min(group, d), n_v, total, h_kv, d, dtype, 2)
    check(k, v, total, h, d, dtype)


@pytest.mark.skipif(native() is None, reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [BY_TOKEN, BY_TABLE, BY_UNIT_TABLE])
@pytest.mark.parametrize(("h", "h_kv", "d"), [(8, 2, 64), (9, 3, 128), (2, 2, 32)])
def test_keys_by_token(kind: int, h: int, h_kv: int, d: int, dtype: torch.dtype) -> None:
    k = side(kind, 4, d, 515, 520, h_kv, d, dtype, 1)
    v = side(BY_TOKEN, 4, d, 515, 520, h_kv, d, dtype, 2)
    check(k, v, 520, h, d, dtype)


@pytest.mark.skipif(native() is None, reason="no compiler")
@pytest.mark.parametrize(
    ("n_k", "n_v", "total"), [(0, 0, 7), (32, 0, 40), (32, 32, 32), (256, 300, 301), (512, 250, 530)]
)
def test_whatever_is_packed(n_k: int, n_v: int, total: int) -> None:
    k = side(BY_CHANNEL, 4, 32, n_k, total, 2, 64, torch.float32, 1)
    v = side(BY_TOKEN, 4, 32, n_v, total, 2, 64, torch.float32, 2)
    check(k, v, total, 4, 64, torch.float32)


@pytest.mark.skipif(native() is None, reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("h", "h_kv", "d"), [(8, 2, 64), (9, 3, 128), (2, 2, 96)])
def test_floats(code: str, h: int, h_kv: int, d: int, dtype: torch.dtype) -> None:
    k = floats(CODES[code], 514, 520, h_kv, d, dtype, 1, room=7)
    for value in (CODES[code], NVFP4):
        check(k, floats(value, 513, 520, h_kv, d, dtype, 2), 520, h, d, dtype)


@pytest.mark.skipif(native() is None, reason="no compiler")
@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1], ids=lambda form: form.name)
def test_every_code_of_a_float_is_its_number(form: Format) -> None:
    """Each as a key of a head of its own, whose logit it is, and as values of the only token; some are no number."""
    d, n_codes = 32, 2**form.bits
    codes, none = torch.arange(n_codes, dtype=torch.uint8).view(-1, 1, 1), torch.empty(1, n_codes, 0, d)
    scales, table = torch.tensor(0.7).expand(n_codes, 1, 1), values(form, torch.device("cpu"))
    packed = Quantised(pack(codes.expand(-1, 1, d).contiguous(), form.bits), scales, scales)
    side = Side(BY_FLOAT, form.bits, d, 1, packed, none, table, exponent=form.exponent_bits)
    q = torch.zeros(1, n_codes, 1, d)
    q[..., 3] = 1
    assert takes_packed(q, Packed(side, side, 1))
    out, lse = attend_packed_native(q, Packed(side, side, 1), 1.0)
    right = table * 0.7
    real = right.isfinite()
    torch.testing.assert_close(lse[0, real, 0], right[real], rtol=1e-6, atol=0)
    torch.testing.assert_close(out[0, real, 0], right[real].unsqueeze(1).expand(-1, d), rtol=1e-6, atol=0)
    assert not lse[0, ~real].isfinite().any() and not out[0, ~real].isfinite().any()
    assert int((~real).sum()) == {"e4m3": 2, "e5m2": 8, "e2m1": 0}[form.name]


def test_floats_of_odd_groups_are_rebuilt() -> None:
    side = floats(CODES["one"], 4, 6, 2, 40, torch.float32, 1)
    q, packed = randn(1, 4, 1, 40), Packed(side, side, 6)
    assert not takes_packed(q, packed)
    keys = side.rebuilt(6).repeat_interleave(2, 1)
    torch.testing.assert_close(attend_packed_ref(q, packed, 0.1)[0], ((q @ keys.mT) * 0.1).softmax(-1) @ keys)


def test_other_groups_take_the_other_path() -> None:
    k = side(BY_CHANNEL, 4, 8, 16, 20, 2, 64, torch.float32, 1)
    v = side(BY_TOKEN, 4, 64, 16, 20, 2, 64, torch.float32, 2)
    q = randn(1, 4, 1, 64)
    assert not takes_packed(q, Packed(k, v, 20))
    out, _ = attend_packed_ref(q, Packed(k, v, 20), 0.1)
    keys, values = (x.rebuilt(20).repeat_interleave(2, 1) for x in (k, v))
    torch.testing.assert_close(out, ((q @ keys.mT) * 0.1).softmax(-1) @ values)
