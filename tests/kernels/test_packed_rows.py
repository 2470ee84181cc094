"""Packed K and V on a GPU: attention for many rows at once against rebuilt numbers, and packing of single tokens."""

import pytest
import torch
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.packed.attend import Packed, Side, attend_packed_ref
from kvbench.kernels.packed.codes import (
    BY_CHANNEL,
    BY_FLOAT,
    BY_TABLE,
    BY_TOKEN,
    BY_UNIT_TABLE,
    Quantised,
    by_group,
    pack,
    quantise_channels,
    quantise_tokens,
    with_room,
)
from kvbench.kernels.packed.floats import E2M1, E4M3, E5M2, FloatCode, Format, floats_with_room, quantise_floats, values
from kvbench.kernels.packed.rows import CodedRows, is_readable
from kvbench.kernels.packed.tokens import (
    Ageing,
    Book,
    FloatPacking,
    RangePacking,
    UnitPacking,
    packs,
    packs_floats,
)
from kvbench.kernels.select_attend import Tokens, attend_rows_triton
from kvbench.methods.quantising.codebooks import centroids, haar, midpoints
from kvbench.tests.kernels.test_capped import bent
from kvbench.tests.kernels.test_floats import CODES, NVFP4
from kvbench.tests.kernels.test_packed import float_side

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
pytestmark = pytest.mark.skipif(triton is None, reason="triton is not installed")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(GPU)


def side(
    kind: int, bits: int, group: int, n: int, total: int, h_kv: int, d: int, dtype: torch.dtype, seed: int
) -> Side:
    """Packed tokens with room for more behind them, and exact ones with rows of heads further apart than they are."""
    x = draw(1, h_kv, total, d, seed=seed, dtype=dtype)
    coded, exact = x[0, :, :n], torch.cat([x, x], 2)[:, :, n : n + total][:, :, : total - n]
    if kind == BY_CHANNEL:
        packed = with_room(quantise_channels(coded, bits, group), kind, total // group + 2)
        return Side(kind, bits, group, n, packed, exact)
    if kind == BY_TOKEN:
        return Side(kind, bits, group, n, with_room(quantise_tokens(coded, bits, group), kind, total + 5), exact)
    table = draw(16, seed=9).sort().values
    codes = torch.randint(0, 2**bits, (h_kv, n, d), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    codes, norms = codes.to(GPU), draw(h_kv, n, 1, seed=seed).abs().half()

    def rebuild() -> Tensor:
        numbers = table[codes.long()]
        return numbers / (numbers.square().sum(-1, keepdim=True) + 1e-16).sqrt() * norms.float()

    return Side(kind, bits, d, n, Quantised(pack(codes, bits), norms, norms), exact, table, rebuild)


def exactly(q: Tensor, x: Packed, scale: float, cap: float = 0.0) -> Tensor:
    """In float64, from numbers that are not rounded to the cache's dtype."""
    wide = []
    for each in x[:2]:
        packed = Quantised(each.packed.codes, each.packed.scales.float(), each.packed.zeros.float())
        wide.append(each._replace(packed=packed, exact=each.exact.float()).rebuilt(x.n).double())
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in wide)
    return bent((q.double() @ k.mT) * scale, cap).softmax(-1) @ v


def check(q: Tensor, rows: list[Packed], turned: Tensor | None = None, cap: float = 0.0) -> None:
    """All rows in one call: each at most twice as far from float64 as torch in the same dtype."""
    scale, coded = q.shape[3] ** -0.5, CodedRows(len(rows))
    assert all(is_readable(each, q) for row in rows for each in row[:2])
    tokens = [coded.add(i, row, turned if i == 0 else None) for i, row in enumerate(rows)]
    out, lse = attend_rows_triton(q, tokens, scale, others=coded, cap=cap)
    for i, row in enumerate(rows):
        own = q[i : i + 1] if turned is None or i else turned
        expected, their_lse = attend_packed_ref(own, row, scale, cap)
        exact = exactly(own, row, scale, cap)
        ours, theirs = ((x.double() - exact).abs().max() for x in (out[i : i + 1], expected))
        assert ours <= 2 * theirs + 2e-6, (i, float(ours), float(theirs))
        torch.testing.assert_close(lse[i : i + 1], their_lse, rtol=0, atol=2e-2 if q.dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "group", "d", "h", "h_kv"),
    [
        (2, 32, 64, 4, 2),
        (4, 16, 32, 3, 1),
        (2, 32, 288, 18, 1),  # in three parts, by programs for 16 and for 2 query heads
        pytest.param(4, 32, 128, 8, 2, marks=pytest.mark.slow),
        pytest.param(8, 64, 64, 2, 2, marks=pytest.mark.slow),
        pytest.param(4, 128, 128, 9, 3, marks=pytest.mark.slow),
    ],
)
def test_keys_by_channel(bits: int, group: int, d: int, h: int, h_kv: int, dtype: torch.dtype) -> None:
    total = 2 * group + 60
    n_k, n_v = (total // group - 1) * group, total - 41
    rows = [
        Packed(
            side(BY_CHANNEL, bits, group, n_k - less * group, total - less, h_kv, d, dtype, 1 + less),
            side(BY_TOKEN, bits, min(group, d), n_v - 9 * less, total - less, h_kv, d, dtype, 5 + less),
            total - less,
        )
        for less in (0, 1)
    ]
    check(draw(2, h, 1, d, seed=7, dtype=dtype), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "bits", "d"),
    [
        (BY_UNIT_TABLE, 2, 64),
        (BY_UNIT_TABLE, 3, 24),
        (BY_UNIT_TABLE, 4, 64),
        (BY_TOKEN, 4, 24),
        (BY_UNIT_TABLE, 3, 264),
        (BY_TOKEN, 4, 264),
    ],
)
def test_keys_by_token(kind: int, bits: int, d: int, dtype: torch.dtype) -> None:
    n = 70
    k = side(kind, bits, d, n, n + 3, 2, d, dtype, 0)
    v = side(BY_TOKEN, bits, d, n, n + 3, 2, d, dtype, 1)
    q = draw(1, 4, 1, d, seed=7, dtype=dtype)
    check(q, [Packed(k, v, n + 3)], turned=draw(1, 4, 1, d, seed=8, dtype=dtype))


def floats(code: FloatCode, n: int, d: int, dtype: torch.dtype, seed: int) -> Side:
    x = draw(1, 2, n + 3, d, seed=seed, dtype=dtype)
    return float_side(code, x[0, :, :n].float(), x[:, :, n:].contiguous(), room=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [64, pytest.param(96, marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", [name for name in CODES if name not in ("nvfp4_one", "4over6")])
def test_floats(code: str, d: int, dtype: torch.dtype) -> None:
    """Two rows, whose scales that tokens share differ, and values of the same form and of another."""
    rows = [
        Packed(floats(CODES[code], 70 - i, d, dtype, i), floats(value, 69 - i, d, dtype, 5 + i), 72 - i)
        for i, value in enumerate((CODES[code], NVFP4, CODES[code]))
    ]
    check(draw(3, 4, 1, d, seed=7, dtype=dtype), rows)


@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1], ids=lambda form: form.name)
def test_every_code_of_a_float_is_its_number(form: Format) -> None:
    """Each is the values of a head with one token, and in one of 32 heads a key."""
    d, n_codes = 32, 2**form.bits
    codes, none = torch.arange(n_codes, dtype=torch.uint8, device=GPU).view(-1, 1, 1), draw(1, n_codes, 0, d, seed=0)
    scales, table = torch.tensor(0.7, device=GPU).expand(n_codes, 1, 1), values(form, codes.device)
    packed = Quantised(pack(codes.expand(-1, 1, d).contiguous(), form.bits), scales, scales)
    side, coded = Side(BY_FLOAT, form.bits, d, 1, packed, none, table, exponent=form.exponent_bits), CodedRows(1)
    q = torch.zeros(1, n_codes, 1, d, device=GPU)
    q[..., 3] = 1
    assert is_readable(side, q)
    out, lse = attend_rows_triton(q, [coded.add(0, Packed(side, side, 1), None)], 1.0, others=coded)
    right, real = table * 0.7, table.isfinite()
    torch.testing.assert_close(lse[0, real, 0], right[real], rtol=1e-6, atol=0)
    torch.testing.assert_close(out[0, real, 0], right[real].unsqueeze(1).expand(-1, d), rtol=1e-6, atol=0)
    assert not out[0, ~real].isfinite().any()


@pytest.mark.parametrize("cap", [0.5, 3.0])
def test_logits_of_codes_and_of_numbers_are_capped(cap: float) -> None:
    k = side(BY_CHANNEL, 4, 32, 64, 101, 2, 64, torch.float32, 1)
    v = side(BY_TOKEN, 4, 32, 50, 101, 2, 64, torch.float32, 2)
    check(draw(1, 4, 1, 64, seed=3) * 4, [Packed(k, v, 101)], cap=cap)


@pytest.mark.parametrize(("n_k", "n_v", "total"), [(0, 0, 7), (32, 0, 40), (32, 32, 32), (32, 70, 71), (96, 50, 101)])
def test_whatever_is_packed(n_k: int, n_v: int, total: int) -> None:
    k = side(BY_CHANNEL, 4, 32, n_k, total, 2, 64, torch.float32, 1)
    v = side(BY_TOKEN, 4, 32, n_v, total, 2, 64, torch.float32, 2)
    check(draw(1, 4, 1, 64, seed=3), [Packed(k, v, total)])


def test_rows_of_codes_and_rows_of_numbers_share_a_call() -> None:
    """Forms differ, and one row has no codes at all."""
    q, d, total = draw(4, 4, 1, 64, seed=3), 64, 100
    forms = [(BY_CHANNEL, 2, 32, 64), (BY_TOKEN, 4, 64, 90), (BY_CHANNEL, 4, 32, 96)]
    rows = [
        Packed(
            side(*form, total, 2, d, q.dtype, i), side(BY_TOKEN, form[1], 64, 80, total, 2, d, q.dtype, 9 + i), total
        )
        for i, form in enumerate(forms)
    ]
    coded, k = CodedRows(4), draw(1, 2, 90, d, seed=5)
    tokens = [coded.add(i, row, None) for i, row in enumerate(rows[:2])]
    tokens += [[Tokens(k, k)], coded.add(3, rows[2], None)]
    out, _ = attend_rows_triton(q, tokens, 0.1, others=coded)
    alone, _ = attend_rows_triton(q[2:3], [[Tokens(k, k)]], 0.1)
    assert torch.equal(out[2:3], alone)
    for at, row in zip((0, 1, 3), rows, strict=True):
        torch.testing.assert_close(out[at : at + 1], attend_packed_ref(q[at : at + 1], row, 0.1)[0], rtol=0, atol=1e-5)


def test_what_the_kernel_cannot_read_is_said() -> None:
    q = draw(1, 4, 1, 64, seed=1)
    assert not is_readable(side(BY_CHANNEL, 4, 8, 16, 20, 2, 64, q.dtype, 1), q)  # a tile is 16 tokens at least
    assert not is_readable(side(BY_UNIT_TABLE, 4, 64, 16, 20, 2, 64, q.dtype, 1)._replace(kind=BY_TABLE), q)
    assert not is_readable(side(BY_TOKEN, 4, 64, 16, 20, 2, 64, torch.bfloat16, 1), q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group", "d"), [(2, 32, 64), (4, 16, 80), (8, 64, 64), (4, 24, 24)])
def test_single_tokens_are_packed_as_many_are(bits: int, group: int, d: int, dtype: torch.dtype) -> None:
    assert packs(d, group)
    x = draw(3, 1, 2, 7, d, seed=bits, dtype=dtype)
    x[1, :, :, 2] = 0.5  # a range of nothing
    expected = [quantise_tokens(row[0], bits, group) for row in x]
    found = [with_room(quantise_tokens(row[0], bits, group), BY_TOKEN, 9) for row in x]
    for packed in found:
        for each in packed:
            each[:, 2] = 0
    RangePacking([Ageing(row[:, :, 2:3], packed, 2) for row, packed in zip(x, found, strict=True)], bits, group).pack()
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[:, :7], b)
    assert not packs(80, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "d"), [(2, 64), (3, 64), (4, 128), (3, 24)])
def test_keys_become_norms_and_codes_of_rotated_units(bits: int, d: int, dtype: torch.dtype) -> None:
    table, rotation, n_rows, least = centroids(d, bits, is_normal=True).to(GPU), haar(d, 0).to(GPU), 2, 1e-8
    k, v = (draw(n_rows, 2, 1, d, seed=i, dtype=dtype) for i in range(2))
    n_bytes = -(-d * bits // 8)

    def room(n_numbers: int) -> Quantised:
        codes = torch.zeros(2, 5, n_bytes, dtype=torch.uint8, device=GPU)
        scales, zeros = (by_group(torch.zeros(2, 5, n_numbers, dtype=torch.float16, device=GPU)) for _ in range(2))
        return Quantised(codes, scales, zeros)

    keys, values = ([room(1) for _ in range(n_rows)] for _ in range(2))
    to_pack = [[Ageing(x[i : i + 1], to[i], 3) for i in range(n_rows)] for x, to in ((k, keys), (v, values))]
    UnitPacking(to_pack[0], to_pack[1], Book(rotation, midpoints(table), bits, bits, least)).pack(k, v)
    for i in range(n_rows):
        x = k[i].float()
        norm = x.norm(dim=-1, keepdim=True)
        codes = torch.bucketize((x / (norm + least)) @ rotation.mT, midpoints(table), right=True)
        assert torch.equal(keys[i].codes[:, 3:4], pack(codes.to(torch.uint8), bits))
        torch.testing.assert_close(keys[i].scales[:, 3:4], norm.half())
        low, high = v[i].float().aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp(min=least)
        codes = ((v[i].float() - low) / scale + 0.5).trunc().clamp(0, 2**bits - 1)
        assert torch.equal(values[i].codes[:, 3:4], pack(codes.to(torch.uint8), bits))
        torch.testing.assert_close(values[i].scales[:, 3:4], scale.half())
        torch.testing.assert_close(values[i].zeros[:, 3:4], low.half())
        assert not keys[i].codes[:, [0, 1, 2, 4]].any() and not values[i].codes[:, [0, 1, 2, 4]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [64, 96])
@pytest.mark.parametrize("code", [name for name in CODES if name != "4over6"])
def test_tokens_become_the_floats_that_torch_makes(code: str, d: int, dtype: torch.dtype) -> None:
    """Blocks of nothing, of what is too small for a scale and too large, ties; as values those of another form."""
    forms, n_rows = (CODES[code], NVFP4), 2
    assert all(packs_floats(form, d) for form in forms) and not packs_floats(CODES["4over6"], d)
    x = [draw(n_rows, 2, 1, d, seed=i, dtype=dtype) for i in range(2)]
    for each in x:
        each[0, 0, 0, :32] = 0
        each[0, 0, 0, 3] = -0.0
        each[0, 1] = torch.linspace(-6, 6, 49, device=GPU).repeat(2)[:d] * 2
        each[1, 0, 0, :16] *= 1e-5
        each[1, 0, 0, 16:32] *= 1e-38
        each[1, 1, 0, 5] = 1e5
    shared = [torch.full((1, 1, 1), g, device=GPU) for g in (0.01, 0.125)]
    shared = [g if form.shared != "one" else torch.ones_like(g) for form, g in zip(forms, shared, strict=True)]
    expected = [
        [quantise_floats(row.float(), *own) for row in each]
        for each, own in zip(x, zip(forms, shared, strict=True), strict=True)
    ]
    found = [
        [floats_with_room(quantise_floats(torch.ones(2, 4, d, device=GPU), form, g), form, 9) for _ in range(n_rows)]
        for form, g in zip(forms, shared, strict=True)
    ]
    ageing = [
        [Ageing(each[i : i + 1], to, 3, g) for i, to in enumerate(own)]
        for each, own, g in zip(x, found, shared, strict=True)
    ]
    FloatPacking(*ageing, *forms).pack(*x)
    for form, side, right in zip(forms, found, expected, strict=True):
        for mine, theirs in zip(side, right, strict=True):
            assert torch.equal(mine.codes[:, 3:4], theirs.codes)
            assert torch.equal(mine.scales[:, 3:4], theirs.scales)
            ones = quantise_floats(torch.ones(2, 1, d, device=GPU), form, shared[0 if form is forms[0] else 1])
            assert torch.equal(mine.codes[:, 2:3], ones.codes)


@pytest.mark.parametrize("form", [E4M3, E5M2, E2M1], ids=lambda form: form.name)
def test_every_float_and_all_between_them_are_coded_as_torch_does(form: Format) -> None:
    sizes = values(form, torch.device(GPU))
    sizes = sizes[sizes.isfinite()].sort().values
    middle = (sizes[1:] + sizes[:-1]) / 2
    near = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf)]
    numbers = torch.cat([sizes, middle, *near, torch.tensor([1e30, -torch.inf, 1e-30, -1e-30], device=GPU)])
    x = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(-1, 1, 1, 64)
    code, one = FloatCode(form), torch.ones(1, 1, 1, device=GPU)
    found = [floats_with_room(quantise_floats(row, code, one), code, 1) for row in torch.zeros_like(x)]
    ageing = [Ageing(x[i : i + 1], to, 0) for i, to in enumerate(found)]
    FloatPacking(ageing, ageing, code, code).pack(x, x)
    for mine, row in zip(found, x, strict=True):
        assert torch.equal(mine.codes, quantise_floats(row, code, one).codes)
