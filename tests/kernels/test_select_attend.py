import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.kernels import build
from kvbench.kernels.jit import INTERPRETED, SHARED, triton
from kvbench.kernels.rows.each import attend_each
from kvbench.kernels.select_attend import (
    Near,
    Tokens,
    attend_parts_native,
    attend_parts_ref,
    attend_rows_native,
    attend_rows_triton,
    form_of,
    native,
    native_takes,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
has_native = pytest.mark.skipif(native() is None, reason="no C++ compiler")
has_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")
# h, h_kv, d_h, s, n_chosen, d_v; below 0: so many numbers of the key are the value
SHAPES = [
    (6, 2, 16, 40, 12, 16),
    (9, 3, 64, 700, 300, 64),
    (4, 4, 20, 30, 7, 20),
    (7, 1, 7, 9, 9, 7),
    (8, 2, 128, 300, 1, 128),
    (6, 2, 24, 60, 20, 16),
    (4, 2, 16, 60, 20, 40),
    (6, 1, 40, 130, 70, -32),
    (37, 1, 272, 90, 40, -256),
]


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(
    shape: tuple[int, int, int, int, int, int], per_query_head: bool, dtype: torch.dtype
) -> tuple[Tensor, Tokens, float]:
    """A query and chosen rows, some of them late, some of them no token."""
    h, h_kv, d_h, s, n, d_v = shape
    draws = torch.Generator().manual_seed(7)
    idx = torch.rand(1, h if per_query_head else h_kv, s + 5, generator=draws).topk(n).indices
    if n > 3:
        idx[0, 0, 1] = -1
        idx[0, -1, -2:] = -1

    def pair(n: int, seed: int) -> tuple[Tensor, Tensor]:
        k = draw(1, h_kv, n, d_h, seed=seed, dtype=dtype)
        return k, k[..., :-d_v] if d_v < 0 else draw(1, h_kv, n, d_v, seed=seed + 1, dtype=dtype)

    (k, v), late = pair(s, 1), pair(8, 3)
    return draw(1, h, 1, d_h, seed=5, dtype=dtype), Tokens(k, v, idx, late), d_h**-0.5


def doubled(part: Tokens) -> Tokens:
    late = part.late and (part.late[0].double(), part.late[1].double())
    return Tokens(part.k.double(), part.v.double(), part.idx, late)


def exact(q: Tensor, parts: list[Tokens], scale: float) -> tuple[Tensor, Tensor]:
    """A softmax over the union head by head in float64, token by token from where it lies."""
    h, outs, lses = q.shape[1], [], []
    for head in range(h):
        keys, values = [], []
        for part in map(doubled, parts):
            owner = head * part.k.shape[1] // h
            k, v = part.k[0, owner], part.v[0, owner]
            if part.late is not None:
                k, v = (torch.cat([k, part.late[0][0, owner]]), torch.cat([v, part.late[1][0, owner]]))
            if part.idx is not None:
                rows = part.idx[0, head * part.idx.shape[1] // h]
                k, v = k[rows[rows >= 0]], v[rows[rows >= 0]]
            keys.append(k)
            values.append(v)
        logits = (torch.cat(keys) @ q[0, head, 0].double()) * scale
        outs.append(logits.softmax(0) @ torch.cat(values))
        lses.append(logits.logsumexp(0))
    return torch.stack(outs).view(1, h, 1, -1), torch.stack(lses).view(1, h, 1)


def plain(q: Tensor, part: Tokens, scale: float) -> Tensor:
    """What torch makes of it in the tensors' own dtype."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in part.gathered())
    assert part.idx is not None
    hidden = (part.idx < 0).repeat_interleave(q.shape[1] // part.idx.shape[1], 1).unsqueeze(2)
    return ((q @ k.mT) * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def check(run: Callable[[Tensor, Tokens, float], tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    """Error at most twice that of plain torch in the same dtype, both against float64, plus a floor."""
    for shape in SHAPES:
        for per_query_head in (False, True):
            q, part, scale = problem(shape, per_query_head, dtype)
            out, lse = run(q, part, scale)
            right, right_lse = exact(q, [part], scale)
            allowed = 2 * (plain(q, part, scale) - right).abs().max() + 4e-7
            assert out.dtype == dtype
            assert out.shape == (*q.shape[:3], part.v.shape[3])
            assert (out - right).abs().max() <= allowed, (shape, per_query_head)
            assert lse.dtype == torch.float32
            torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=2e-6)


def in_triton(q: Tensor, part: Tokens, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = attend_rows_triton(q.to(GPU), [[changed(part, lambda x: deep_to(x, GPU))]], scale)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_a_softmax_over_the_chosen_tokens(dtype: torch.dtype) -> None:
    check(lambda q, part, scale: attend_parts_ref(q, [part], scale), dtype)


@has_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_agrees_with_float64(dtype: torch.dtype) -> None:
    check(lambda q, part, scale: attend_parts_native(q, [part], scale), dtype)


@has_native
@pytest.mark.parametrize("level", ["AVX2", "DEFAULT"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_of_every_level_agrees_with_float64(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ["DEFAULT", "AVX2", "AVX512"]
    if order.index(level) >= order.index(build.level()):
        pytest.skip(f"this processor's level is {build.level()}, which another test runs")
    monkeypatch.setattr(build, "level", lambda: level)
    build.library.cache_clear()
    native.cache_clear()
    try:
        check(lambda q, part, scale: attend_parts_native(q, [part], scale), dtype)
    finally:
        build.library.cache_clear()
        native.cache_clear()


@has_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_agrees_with_float64(dtype: torch.dtype) -> None:
    check(in_triton, dtype)


def batch(dtype: torch.dtype, d_v: int = 16) -> tuple[Tensor, list[list[Tokens]]]:
    """Rows with parts of every kind: whole, chosen by KV heads and by query heads, masked, far with copies near.

    Values have `d_v` numbers; below 0 they are the first numbers of their keys.
    """
    h, h_kv, d_h = 6, 2, 16
    draws = torch.Generator().manual_seed(3)

    def some(heads: int, n: int) -> tuple[Tensor, Tensor]:
        k = torch.randn(1, heads, n, d_h, generator=draws).to(dtype)
        return k, k[..., :-d_v] if d_v < 0 else torch.randn(1, heads, n, d_v, generator=draws).to(dtype)

    def chosen(heads: int, n: int, k: int) -> Tensor:
        return torch.rand(1, heads, n, generator=draws).topk(k).indices

    far, late = some(h_kv, 400), some(h_kv, 9)
    idx = chosen(h, 409, 130)
    idx[0, 2, 5:9] = -1
    keys = chosen(h_kv, 400, 270)
    slots = torch.where(torch.rand(h_kv, 400, generator=draws) < 0.5, torch.arange(400).expand(h_kv, -1), -1).int()
    copies = far[0].clone()
    near = Near(copies, copies[..., :-d_v] if d_v < 0 else far[1].clone(), slots)
    seen = torch.rand(1, h, 300, generator=draws) < 0.4
    own_q = torch.randn(1, h, 1, d_h, generator=draws).to(dtype)
    rows = [
        [Tokens(*some(h_kv, 41))],
        [Tokens(*some(h_kv, 12)), Tokens(*far, idx, late), Tokens(*some(h_kv, 0))],
        [Tokens(*some(h_kv, 300), mask=seen), Tokens(*some(h, 7), q=own_q)],
        [Tokens(*far, keys + (3 << 32), near=near)],
    ]
    return torch.randn(4, h, 1, d_h, generator=draws).to(dtype), rows


@has_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_v", [16, 8, 24, -8])
def test_one_launch_attends_for_rows_that_have_nothing_in_common(dtype: torch.dtype, d_v: int) -> None:
    q, rows = batch(dtype, d_v)
    moved = [[changed(part, lambda x: deep_to(x, GPU)) for part in parts] for parts in rows]
    n_tokens = sum(part.n_tokens() for part in rows[2])
    logits = [None, None, torch.empty(q.shape[1], n_tokens, device=GPU), None]
    out, lse = attend_rows_triton(q.to(GPU), moved, 0.25, logits)
    for i, parts in enumerate(rows):
        parts = [part if part.idx is None else replace(part, idx=part.idx.int().long()) for part in parts]
        plain, _ = attend_parts_ref(q[i : i + 1], parts, 0.25)
        wide = [changed(part, doubled_part) for part in parts]
        right, right_lse = attend_parts_ref(q[i : i + 1].float(), wide, 0.25)
        # Triton's interpreter cuts bfloat16 off where a GPU rounds.
        cut = right.abs().max() * torch.finfo(dtype).eps if INTERPRETED and dtype == torch.bfloat16 else 0
        assert (out[i : i + 1].cpu() - right).abs().max() <= 2 * (plain - right).abs().max() + 6e-7 + cut
        torch.testing.assert_close(lse[i : i + 1].cpu(), right_lse, rtol=1e-6, atol=2e-6)
    assert logits[2] is not None
    torch.testing.assert_close((logits[2] - lse[2]).exp().sum(-1), torch.ones(q.shape[1], device=GPU))


@pytest.mark.parametrize("cap", [0.5, 3.0])
@pytest.mark.parametrize(("d", "d_v"), [(16, 16), (24, 12), (256, 256), (72, 64)])
def test_one_launch_caps_the_logits_of_all_rows(cap: float, d: int, d_v: int) -> None:
    """Of narrow heads, of values narrower than keys and within them, and of heads of 256 numbers."""
    q, scale = draw(2, 4, 1, d, seed=1, dtype=torch.float32).to(GPU) * 3, d**-0.5
    k, v = (draw(1, 2, 70, n, seed=n, dtype=torch.float32).to(GPU) for n in (d, d_v))
    v = k[..., :d_v] if d == 72 else v
    out, lse = attend_rows_triton(q, [[Tokens(k, v)], [Tokens(k[:, :, :9], v[:, :, :9])]], scale, cap=cap)
    for i, n in enumerate((70, 9)):
        keys, values = (x[:, :, :n].repeat_interleave(2, 1).double() for x in (k, v))
        logits = cap * (q[i : i + 1].double() @ keys.mT * scale / cap).tanh()
        torch.testing.assert_close(out[i : i + 1].double(), logits.softmax(-1) @ values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse[i : i + 1].double(), logits.logsumexp(-1), atol=1e-4, rtol=1e-4)


@has_triton
@pytest.mark.parametrize(("d", "d_v"), [(128, 128), (272, 256), (40, 72)])
def test_heads_of_float32_are_worked_on_in_parts(d: int, d_v: int) -> None:
    """Of keys, of values, of both; logits and their sum are stored by one of the programs."""
    q = draw(1, 6, 1, d, seed=1, dtype=torch.float32).to(GPU)
    k, v = (draw(1, 2, 90, n, seed=n, dtype=torch.float32).to(GPU) for n in (d, d_v))
    logits = torch.full((6, 90), torch.nan, device=GPU)
    out, lse = attend_rows_triton(q, [[Tokens(k, v)]], d**-0.5, [logits])
    keys, values = (x.repeat_interleave(3, 1).double() for x in (k, v))
    right = q.double() @ keys.mT * d**-0.5
    torch.testing.assert_close(logits.double(), right[0, :, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), right.logsumexp(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), right.softmax(-1) @ values, atol=1e-5, rtol=1e-5)


def test_a_card_with_less_shared_memory_has_fewer_tiles_on_their_way() -> None:
    for d_h, d_v in ((256, 256), (576, 512)):
        stages = [form_of(8, d_h, d_v, 2, True, 1, SHARED[arch]).n_stages for arch in (86, 90)]
        assert stages == [2, 3], (d_h, stages)
    assert form_of(4, 128, 128, 2, True, 1, SHARED[86]).n_stages == 3


def changed(part: Tokens, change: Callable[[Any], Any]) -> Tokens:
    """The part with each of its fields changed."""
    return Tokens(*(change(getattr(part, spec.name)) for spec in fields(part) if spec.init))


def deep_to(x: object, device: str) -> Any:
    """A tensor, or a tuple of some, elsewhere; anything else as it is."""
    if isinstance(x, tuple):
        moved = [deep_to(each, device) for each in x]
        return type(x)(*moved) if isinstance(x, Near) else tuple(moved)
    return x.to(device) if isinstance(x, Tensor) else x


def doubled_part(x: object) -> Any:
    if isinstance(x, Near):
        return None  # copies are what they are copies of
    if isinstance(x, tuple):
        return tuple(each.float() for each in x)
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gets_llamas_shape_right(dtype: torch.dtype) -> None:
    q, part, scale = problem((32, 8, 128, 8192, 1000, 128), True, dtype)
    right, right_lse = exact(q, [part], scale)
    out, lse = in_triton(q, part, scale)
    assert (out - right).abs().max() <= 2 * (plain(q, part, scale) - right).abs().max() + 4e-7
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=2e-6)


@has_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_joined_to_their_union(dtype: torch.dtype) -> None:
    q, part, scale = problem(SHAPES[0], True, dtype)
    whole = draw(1, 2, 30, 16, seed=8, dtype=dtype)
    stretch = Tokens(whole[:, :, 3:23], whole[:, :, 5:25])  # strides of another tensor
    parts = [stretch, part, Tokens(part.k, part.v, torch.full((1, 2, 3), -1)), Tokens(part.k, part.v)]
    right, right_lse = exact(q, parts, scale)
    for run in (attend_parts_ref, attend_parts_native):
        out, lse = run(q, parts, scale)
        rounding = (right.to(dtype) - right).abs().max()
        assert (out - right).abs().max() <= 2 * rounding + 4e-7
        torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("path", ["ref", "native", "triton"])
def test_without_any_token_the_output_is_zero_and_weighs_nothing(path: str) -> None:
    q, part, scale = problem(SHAPES[0], False, torch.float32)
    part = replace(part, idx=torch.full((1, 2, 5), -1))
    if (path, None) in (("native", native()), ("triton", triton)):
        pytest.skip(f"no {path}")
    run = {
        "ref": lambda: attend_parts_ref(q, [part], scale),
        "native": lambda: attend_parts_native(q, [part], scale),
        "triton": lambda: in_triton(q, part, scale),
    }[path]
    out, lse = run()
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((1, 6, 1), -torch.inf))


@has_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[0], *SHAPES[5:8]])
def test_each_of_many_queries_has_places_of_its_own(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int, int],
    per_query_head: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, part, scale = problem(shape, per_query_head, dtype)
    assert part.idx is not None
    idx = torch.cat([part.idx, part.idx.flip(2) // 2, torch.full_like(part.idx, -1)])
    bias = draw(*idx.shape, seed=6, dtype=torch.float32)
    queries = torch.cat([q, q.flip(3), q], 2)
    for own_bias in (None, bias):
        out, lse = attend_each(queries, replace(part, idx=idx, bias=own_bias), scale)
        for i in range(3):
            one = replace(part, idx=idx[i : i + 1], bias=None if own_bias is None else bias[i : i + 1])
            right, right_lse = attend_parts_native(queries[:, :, i : i + 1], [one], scale)
            assert torch.equal(out[:, :, i : i + 1], right) and torch.equal(lse[:, :, i : i + 1], right_lse)
        with monkeypatch.context() as patch:
            patch.setattr("kvbench.kernels.select_attend.native", lambda: None)
            plain_out, plain_lse = attend_each(queries, replace(part, idx=idx, bias=own_bias), scale)
        torch.testing.assert_close(out, plain_out, atol=2e-2 if dtype != torch.float32 else 1e-6, rtol=0)
        torch.testing.assert_close(lse, plain_lse, atol=2e-6, rtol=1e-6)


@has_native
def test_large_logits_do_not_overflow() -> None:
    q, part, scale = problem(SHAPES[1], False, torch.float32)
    right, right_lse = exact(q * 200, [part], scale)
    out, lse = attend_parts_native(q * 200, [part], scale)
    torch.testing.assert_close(out.double(), right, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=1e-4)


@has_native
def test_threads_change_no_bit() -> None:
    q, part, scale = problem((8, 2, 64, 3000, 2000, 64), True, torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            results.append(attend_parts_native(q, [part], scale))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@has_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_v", [16, 24, -8])
def test_rows_of_one_call_are_what_each_is_alone(dtype: torch.dtype, d_v: int) -> None:
    q, rows = batch(dtype, d_v)
    rows = [[replace(part, q=None) for part in parts if part.mask is None] for parts in rows[:3]]
    k, v = (draw(1, 2, 9000, x.shape[3], seed=i, dtype=dtype) for i, x in enumerate((rows[0][0].k, rows[0][0].v)))
    rows, q = [*rows, [], [Tokens(k, v)], rows[0]], torch.cat([q[:3], q[:3]])
    before = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            out, lse = attend_rows_native(q, rows, 0.25)
            for i, parts in enumerate(rows):
                if parts:
                    alone, lse_alone = attend_parts_native(q[i : i + 1], parts, 0.25)
                    assert torch.equal(out[i : i + 1], alone), (i, n_threads)
                    assert torch.equal(lse[i : i + 1], lse_alone), (i, n_threads)
    finally:
        torch.set_num_threads(before)


@has_native
def test_what_cpp_cannot_read_goes_to_torch() -> None:
    q, part, scale = problem(SHAPES[0], True, torch.float32)
    turned = replace(part, k=part.k.mT.contiguous().mT)
    assert native_takes(q, [part])
    assert not native_takes(q, [turned])
    assert not native_takes(q.double(), [doubled(part)])
    out, _ = attend_parts_ref(q, [turned], scale)
    torch.testing.assert_close(out, attend_parts_native(q, [part], scale)[0])


def test_kernels_import_without_triton() -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'triton' else find(name, package)\n"
        "from kvbench.kernels import clusters, jit, pages, pq_scores, select_attend\n"
        "assert jit.triton is None"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
