import pytest
import torch
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.rows.buckets import Hidden, find_rows
from kvbench.kernels.rows.collisions import (
    Hashed,
    Tables,
    build_tables,
    build_tables_ref,
    chance,
    chance_of_two,
    find_twice,
    find_twice_ref,
    native,
    pack_codes,
    pack_codes_ref,
)

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
has_native = pytest.mark.skipif(native() is None, reason="no C++ compiler")


def problem(dtype: torch.dtype, d_h: int = 20, n: int = 300) -> tuple[Tensor, Tensor, Tensor, Hashed]:
    """Codes and queries of 6 heads, the keys of 2, of which those from the sixth on are hashed with random codes."""
    draw, bits, tables = torch.Generator().manual_seed(2), 3, 9
    keys = torch.randn(1, 2, n + 9, d_h, generator=draw).to(dtype)
    middle = keys[0, :, 5 : 5 + n].float()
    means = middle.mean(1)
    codes = torch.randint(1 << bits, (2, tables, n), generator=draw).short()
    hashed = Hashed(build_tables_ref(codes, bits), means, (middle - means.unsqueeze(1)).norm(dim=-1), 5)
    own = torch.randint(1 << bits, (6, tables), generator=draw).short()
    return own, torch.randn(6, d_h, generator=draw), keys, hashed


def test_buckets_hold_their_tokens_in_order() -> None:
    codes = torch.tensor([[[3, 1, 3, 0], [0, 0, 2, 0]]], dtype=torch.int16)
    made = build_tables_ref(codes, 2)
    assert made.tokens.tolist() == [[[3, 1, 0, 2], [0, 1, 3, 2]]]
    assert made.starts.tolist() == [[[0, 1, 2, 2, 4], [0, 3, 3, 4, 4]]]


@has_native
@pytest.mark.parametrize("n", [1, 7, 500])
def test_cpp_builds_the_same_tables(n: int) -> None:
    codes = torch.randint(16, (3, 5, n), generator=torch.Generator().manual_seed(n)).short()
    ours, theirs = build_tables(codes, 4), build_tables_ref(codes, 4)
    assert isinstance(ours, Tables)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.starts, theirs.starts)


def test_what_is_found_shares_two_buckets() -> None:
    own, q, keys, hashed = problem(torch.float32)
    idx, weights, n_entries = find_twice_ref(own, q, keys, hashed, 1e-4)
    (_, tables, n), total = hashed.tables.tokens.shape, 0
    for head in range(6):
        met = torch.zeros(n, dtype=torch.int64)
        for table in range(tables):
            begin, end = hashed.tables.starts[head // 3, table, int(own[head, table]) :][:2].tolist()
            for token in hashed.tables.tokens[head // 3, table, begin:end].tolist():
                met[token] += 1
            total += end - begin
        mine = idx[0, head][idx[0, head] >= 0]
        assert mine.tolist() == ((met >= 2).nonzero()[:, 0] + 5).tolist()
        centred = keys[0, head // 3, mine].double() - hashed.means[head // 3].double()
        cosine = torch.cosine_similarity(centred, q[head].double().unsqueeze(0))
        expected = -(chance(cosine, 3, tables) + 1e-4).log()
        torch.testing.assert_close(weights[0, head, : len(mine)].double(), expected, atol=1e-5, rtol=0)
    assert int(n_entries.sum()) == total


@has_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpp_finds_and_weighs_the_same(dtype: torch.dtype) -> None:
    for d_h, n in ((20, 300), (64, 40), (7, 1)):
        asked = problem(dtype, d_h, n)
        ours, theirs = find_twice(*asked, 1e-4), find_twice_ref(*asked, 1e-4)
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=0)
        assert torch.equal(ours[2], theirs[2])


def test_a_key_that_is_the_mean_is_no_number_too_few() -> None:
    own, q, keys, hashed = problem(torch.float32, n=1)  # its only key is the mean
    codes = torch.zeros(2, 9, 1, dtype=torch.int16)
    same = hashed._replace(tables=build_tables_ref(codes, 3))
    for find in (find_twice, find_twice_ref):
        idx, weights, _ = find(torch.zeros_like(own), q, keys, same, 1e-4)
        assert idx.tolist() == [[[5]] * 6]
        assert torch.isfinite(weights).all()


def test_the_chance_is_that_of_two_hits_or_more() -> None:
    p = torch.tensor([0.0, 0.1, 0.5, 1.0], dtype=torch.float64)
    expected = [sum(c * x**i * (1 - x) ** (3 - i) for i, c in ((2, 3), (3, 1))) for x in p.tolist()]
    torch.testing.assert_close(chance_of_two(p, 3), torch.tensor(expected, dtype=torch.float64))
    # Beyond the ends of what a cosine can be, which rounding reaches: always and never.
    assert chance(torch.tensor([1.0001, -1.0001]), 4, 6).tolist() == [1.0, 0.0]


@has_native
def test_cpp_packs_the_same_codes() -> None:
    products = torch.randn(70, 5 * 7, generator=torch.Generator().manual_seed(0))
    products[3, 2:5] = 0
    room = torch.full((7, 100), -1, dtype=torch.int16)
    pack_codes(products, 5, room[:, 10:80])
    theirs = torch.empty(7, 70, dtype=torch.int16)
    pack_codes_ref(products, 5, theirs)
    assert torch.equal(room[:, 10:80], theirs)
    assert (room[:, :10] == -1).all()
    assert theirs[0, 3] & 4 == 0
    assert theirs.max() < 32


def hidden(dtype: torch.dtype, d_h: int, n: int, tables: int, bits: int, shared: bool) -> tuple[Hidden, Hashed, Tensor]:
    """One row's keys, hashed by planes of each KV head or by one set, and those planes."""
    draw = torch.Generator().manual_seed(n)
    keys = torch.randn(1, 2, n + 9, d_h, generator=draw).to(dtype)
    planes = torch.randn(1 if shared else 2, d_h, tables * bits, generator=draw)
    middle = keys[0, :, 5 : 5 + n].float()
    means = middle.mean(1)
    centred = middle - means.unsqueeze(1)
    codes = torch.empty(2, tables, n, dtype=torch.int16)
    for head in range(2):
        pack_codes_ref(centred[head] @ planes[head % len(planes)], bits, codes[head])
    hashed = Hashed(build_tables_ref(codes, bits), means, centred.norm(dim=-1), 5)
    far = [x.pin_memory() if GPU == "cuda" else x for x in (*hashed.tables[1:], keys, hashed.norms)]
    counts = torch.zeros(6, dtype=torch.int32, device=GPU)
    made = Hidden(Tables(bits, *far[:2]), planes.to(GPU), far[2], means.to(GPU), far[3], 5, counts)
    return made, hashed, planes


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d_h", [16, 20, 40, 96])
def test_triton_finds_and_weighs_the_same_for_all_rows(dtype: torch.dtype, d_h: int) -> None:
    rows = [hidden(dtype, d_h, n, tables, bits, bits == 3) for n, tables, bits in ((150, 5, 3), (40, 3, 2), (1, 2, 4))]
    q = torch.randn(len(rows), 6, 1, d_h, generator=torch.Generator().manual_seed(0)).to(dtype)
    for _ in range(2):
        found, entries = find_rows(q.to(GPU), [row for row, _, _ in rows], 1e-4)
    for i, (row, hashed, planes) in enumerate(rows):
        codes = torch.empty(6, row.tables.tokens.shape[1], dtype=torch.int16)
        for head in range(6):
            products = q[i, head].float() @ planes[head // 3 % len(planes)]
            pack_codes_ref(products, row.tables.bits, codes[head].unsqueeze(1))
        idx, weights, n_entries = find_twice_ref(codes, q[i, :, 0].float(), row.keys.cpu(), hashed, 1e-4)
        ours, our_weights = (x.cpu() for x in found[i])
        assert ours.shape == (1, 6, hashed.norms.shape[1])
        assert torch.equal(entries[i].cpu().long(), n_entries)
        assert torch.equal(row.n_found.cpu(), 2 * (idx >= 0).sum(-1)[0].int())  # of two calls
        for head in range(6):
            there = ours[0, head] >= 0
            n_mine = int(there.sum())
            assert torch.equal(ours[0, head][there], idx[0, head, :n_mine])
            assert (our_weights[0, head][~there] == 0).all()
            mine = our_weights[0, head][there]
            torch.testing.assert_close(mine, weights[0, head, :n_mine], atol=2e-5, rtol=0)
