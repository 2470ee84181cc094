"""Copies, and each Triton op against its plain reference in the shape of a layer.

The error may be twice that of torch in the same dtype, both against float64; selections must be the same. Then time,
and bytes over time as a share of the copy's.

Not here: whole models (`benchmarks/gpu/models.py`).
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from kvbench.benchmarks.bench_packed import FLOATS, coded
from kvbench.benchmarks.gpu.results import Result
from kvbench.kernels import clusters, kmeans, pages, pq_codes, pq_fit, pq_scores, select_attend
from kvbench.kernels.jit import INTERPRETED
from kvbench.kernels.packed.attend import Packed, Side, attend_packed_ref
from kvbench.kernels.packed.codes import BY_CHANNEL, BY_TOKEN, Quantised, quantise_channels, quantise_tokens
from kvbench.kernels.packed.rows import CodedRows
from kvbench.kernels.rows import values
from kvbench.kernels.topk import best_keys, top_keys, top_stable, top_stable_ref

GROUP = 32  # tokens or channels of packed codes that share a scale
N_CALLS = 20
OPS = ("attend", "codes", "pages", "clusters", "pq", "top")  # groups of kernels


@dataclass(frozen=True)
class Shape:
    """A layer, and what is chosen of it."""

    h: int
    h_kv: int
    d_h: int
    s: int
    k: int
    page_len: int
    m: int
    b: int


LLAMA = Shape(32, 8, 128, 32768, 1638, 16, 2, 6)
SMALL = Shape(4, 2, 32, 256, 24, 16, 2, 4)


def seconds_of(call: Callable[[], object], device: torch.device, most: int | None = None) -> float:
    """Median seconds of a call, the first ones left out: they compile."""
    n = N_CALLS if most is None else min(most, N_CALLS)
    for _ in range(min(3, n)):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(max(3, n // 4)):
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
        return statistics.median(times)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    others = torch.empty(10 * cache, dtype=torch.uint8, device=device)
    for start, stop in marks:
        others.zero_()  # what the cache held is gone, and while this runs the call is asked for
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(stop) for start, stop in marks) / 1e3


def copies(device: torch.device, n_bytes: int) -> Iterator[Result]:
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device)
    shape = f"{n_bytes / 1e6:,.0f} MB"
    yield Result("copy, device", shape, True, ms=seconds * 1e3, gb_s=2 * n_bytes / seconds / 1e9)
    if device.type == "cuda":
        pinned = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        seconds = seconds_of(lambda: target.copy_(pinned, non_blocking=True), device)
        yield Result("copy, host to device", shape, True, ms=seconds * 1e3, gb_s=n_bytes / seconds / 1e9)
        yield reads(pinned, device)


def reads(pinned: Tensor, device: torch.device) -> Result:
    """A kernel that reads chosen rows of 256 bytes where they lie, in pinned memory of the host."""
    rows = pinned.view(torch.bfloat16).view(1, 8, -1, 128)
    n = rows.shape[2]
    idx = torch.rand(1, 8, n, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., : max(1, n // 10)].to(device)
    found = values.fetch_values_triton(rows, idx)
    seconds = seconds_of(lambda: values.fetch_values_triton(rows, idx), device)
    expected = rows.gather(2, idx.cpu().unsqueeze(-1).expand(-1, -1, -1, 128))
    same = torch.equal(found.cpu().view(torch.int16), expected.view(torch.int16))  # bits: some are no numbers
    return Result(
        "read from pinned memory", f"{idx.shape[2]:,} of {n:,} rows of 256 bytes", same, 0.0, 1e3 * seconds,
        gb_s=found.nbytes / seconds / 1e9,
    )  # fmt: skip


def worst(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max())


def kernels(shape: Shape, device: torch.device, names: Sequence[str] = OPS) -> Iterator[Result]:
    """Groups of kernels, by the names in `OPS`."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(device, torch.bfloat16)

    q = normal(1, shape.h, 1, shape.d_h)
    k, v = (normal(1, shape.h_kv, shape.s, shape.d_h) for _ in range(2))
    groups: dict[str, Callable[[], Iterator[Result]]] = {
        "attend": lambda: iter([attention(shape, q, k, v, draw)]),
        "codes": lambda: codes_of(shape, q, k, v),
        "pages": lambda: pages_of(shape, q, k),
        "clusters": lambda: clusters_of(shape, k),
        "pq": lambda: pq(shape, q, k),
        "top": lambda: iter([top(shape, torch.rand(shape.h_kv, shape.s, generator=draw).to(device))]),
    }
    for name in names:
        yield from groups[name]()


def top(shape: Shape, scores: Tensor) -> Result:
    """The highest scores, where many are the same."""
    scores[:, ::3] = 0.5  # ties, of which the lower positions are taken
    expected = top_stable_ref(scores, shape.k).sort(-1).values
    return Result(
        "top_stable", f"{shape.k} of {shape.s}",
        torch.equal(top_stable(scores, shape.k).sort(-1).values, expected), 0.0,
        ms=1e3 * seconds_of(lambda: top_stable(scores, shape.k), scores.device),
        reference_ms=1e3 * seconds_of(lambda: top_stable_ref(scores, shape.k), scores.device),
    )  # fmt: skip


def attention(shape: Shape, q: Tensor, k: Tensor, v: Tensor, draw: torch.Generator) -> Result:
    """Attention over chosen tokens, against gathering them for torch's own."""
    scale, device = shape.d_h**-0.5, q.device
    chosen = torch.rand(1, shape.h_kv, shape.s, generator=draw).topk(shape.k).indices.to(device)
    parts = [select_attend.Tokens(k, v, chosen)]
    wide = [select_attend.Tokens(k.double(), v.double(), chosen)]
    exact = select_attend.attend_parts_ref(q.double(), wide, scale)[0]
    plain = select_attend.attend_parts_ref(q, parts, scale)[0]
    found = select_attend.attend_rows_triton(q, [parts], scale)[0]
    error, allowed = worst(found, exact), 2 * worst(plain, exact) + 1e-5
    seconds = seconds_of(lambda: select_attend.attend_rows_triton(q, [parts], scale), device)
    return Result(
        "attend_rows", f"{shape.k} of {shape.s} per KV head", error <= allowed, error, 1e3 * seconds,
        1e3 * seconds_of(lambda: select_attend.attend_parts_ref(q, parts, scale), device),
        2 * shape.h_kv * shape.k * shape.d_h * 2 / seconds / 1e9,
    )  # fmt: skip


def codes_of(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Result]:
    """Attention over a cache of packed K and V, against rebuilding its numbers."""
    scale, n = shape.d_h**-0.5, shape.s
    forms = dict[str, tuple[Side, Side]]()
    for bits in (4, 2):
        keys, values = quantise_channels(k[0], bits, GROUP), quantise_tokens(v[0], bits, GROUP)
        none = k[:, :, :0]
        forms[f"{bits} bit"] = (
            Side(BY_CHANNEL, bits, GROUP, n, keys, none),
            Side(BY_TOKEN, bits, GROUP, n, values, none),
        )
    forms |= {name: (coded(k, of_k), coded(v, of_v)) for name, (of_k, of_v) in FLOATS.items()}
    for form, sides in forms.items():
        packed = Packed(*sides, n)
        exact = attend_packed_ref(q.float(), Packed(widened(sides[0]), widened(sides[1]), n), scale)[0]
        plain = attend_packed_ref(q, packed, scale)[0]

        def attend(packed: Packed = packed) -> Tensor:
            rows = CodedRows(1)
            return select_attend.attend_rows_triton(q, [rows.add(0, packed, None)], scale, others=rows)[0]

        error, allowed = worst(attend(), exact), 2 * worst(plain, exact) + 1e-5
        if INTERPRETED:  # which cuts bfloat16 off, where floats' numbers lose nothing before
            allowed += 2.0**-8 * float(exact.abs().max())
        seconds = seconds_of(attend, q.device)
        memory = {x.data_ptr(): x.untyped_storage().nbytes() for side in sides for x in side.packed}
        yield Result(
            "attend_codes", f"{form}, {n} tokens", error <= allowed, error, 1e3 * seconds,
            1e3 * seconds_of(lambda packed=packed: attend_packed_ref(q, packed, scale), q.device),
            sum(memory.values()) / seconds / 1e9,
        )  # fmt: skip


def widened(side: Side) -> Side:
    """The same codes, of which numbers are made in float32."""
    codes, scales, zeros = side.packed
    return side._replace(packed=Quantised(codes, scales.float(), zeros.float()), exact=side.exact.float())


def pages_of(shape: Shape, q: Tensor, k: Tensor) -> Iterator[Result]:
    device, n_pages = q.device, -(-shape.s // shape.page_len)
    low, high = pages.page_bounds_triton(k, shape.page_len)
    expected = pages.page_bounds_ref(k, shape.page_len)
    seconds = seconds_of(lambda: pages.page_bounds_triton(k, shape.page_len), device)
    yield Result(
        "page_bounds", f"{n_pages} pages", torch.equal(low, expected[0]) and torch.equal(high, expected[1]),
        0.0, 1e3 * seconds, 1e3 * seconds_of(lambda: pages.page_bounds_ref(k, shape.page_len), device),
        k.numel() * 2 / seconds / 1e9,
    )  # fmt: skip
    k_pages = max(1, shape.k // shape.page_len)
    found = (f(q, low, high, "group_max") for f in (pages.page_keys_triton, pages.page_keys_ref))
    ours, reference = (best_keys(keys, k_pages).int().sort(-1).values for keys in found)
    other = float((ours != reference).float().mean())
    seconds = seconds_of(lambda: pages.page_keys_triton(q, low, high, "group_max"), device)
    yield Result(
        "page_keys", f"{n_pages} pages", other < 1e-2, other, 1e3 * seconds,
        1e3 * seconds_of(lambda: pages.page_keys_ref(q, low, high, "group_max"), device),
        2 * low.numel() * 2 / seconds / 1e9, "error: share of other pages",
    )  # fmt: skip


def clusters_of(shape: Shape, k: Tensor) -> Iterator[Result]:
    """ClusterKV's k-means on the device, and its indexing."""
    device, c = k.device, max(4, shape.s // 80)
    start = kmeans.draw_points(k[0].float(), c, torch.Generator().manual_seed(0))
    found = kmeans.kmeans(k[0], start, 5, "cosine")
    expected = kmeans.kmeans_ref(k[0], start, 5, "cosine")
    same = float((found.labels == expected.labels).float().mean())
    seconds = seconds_of(lambda: kmeans.kmeans(k[0], start, 5, "cosine"), device, 5)
    flops = 6 * 2 * k.numel() * c
    yield Result(
        "kmeans, cosine", f"{shape.h_kv} x {shape.s} in {c}, 5 rounds", same > 0.99, 1 - same, 1e3 * seconds,
        1e3 * seconds_of(lambda: kmeans.kmeans_ref(k[0], start, 5, "cosine"), device, 3),
        note=f"{flops / seconds / 1e12:.1f} TFLOP/s; error: share of other labels",
    )  # fmt: skip
    sizes = found.sizes
    order = torch.rand(1, shape.h_kv, c, generator=torch.Generator().manual_seed(1)).to(device).argsort(-1)
    tokens = found.labels.argsort(dim=-1, stable=True)
    asked = (order, sizes, sizes.cumsum(-1), tokens, shape.k)
    ours = clusters.cluster_tokens_triton(*asked)
    yield Result(
        "cluster_tokens", f"{shape.k} of {shape.s}",
        torch.equal(ours.cpu(), clusters.cluster_tokens_ref(*asked).cpu()), 0.0,
        1e3 * seconds_of(lambda: clusters.cluster_tokens_triton(*asked), device),
        1e3 * seconds_of(lambda: clusters.cluster_tokens_torch(*asked), device),
    )  # fmt: skip


def pq(shape: Shape, q: Tensor, k: Tensor) -> Iterator[Result]:
    """PQCache's fit, codes and search."""
    device, c, d_m = q.device, 2**shape.b, shape.d_h // shape.m
    points = k[0].float().unflatten(-1, (shape.m, d_m)).transpose(1, 2).flatten(0, 1).contiguous()
    idx = torch.randperm(shape.s, generator=torch.Generator().manual_seed(0))[:c].to(device)
    found, expected = (f(points, idx, 5) for f in (pq_fit.pq_fit, pq_fit.pq_fit_ref))
    objective = float((found.inertia / expected.inertia - 1).abs().max())
    seconds = seconds_of(lambda: pq_fit.pq_fit(points, idx, 5), device, 5)
    shape_text = f"{len(points)} x {shape.s} x {d_m} in {c}, 5 rounds"
    yield Result(
        "pq_fit", shape_text, objective < 5e-3, objective, 1e3 * seconds,
        1e3 * seconds_of(lambda: pq_fit.pq_fit_ref(points, idx, 5), device, 3),
        note="error: of the objective",
    )  # fmt: skip
    centroids = expected.centroids.unflatten(0, (shape.h_kv, shape.m))
    codes = pq_codes.pq_codes(k[0], centroids)
    plain = pq_codes.pq_codes_ref(k[0], centroids)
    other = float((codes != plain).float().mean())
    yield Result(
        "pq_codes", f"{shape.s} keys", other < 1e-3, other,
        1e3 * seconds_of(lambda: pq_codes.pq_codes(k[0], centroids), device),
        1e3 * seconds_of(lambda: pq_codes.pq_codes_ref(k[0], centroids), device),
        note="error: share of other codes",
    )  # fmt: skip
    packed = pq_codes.PackedCodes(shape.h_kv, shape.m, shape.b, shape.s, device)
    packed.extend(plain)
    newest = torch.zeros_like(k[:, :, :1])
    told = pq_scores.table_of([pq_scores.Coded(centroids, packed, 0, shape.s)], device)

    def search() -> Tensor:
        return top_keys(pq_scores.pq_keys_triton(q, newest, told, shape.d_h**-0.5), [shape.k])

    def search_ref() -> Tensor:
        tables = pq_scores.pq_tables(q[0, :, 0], centroids)
        return pq_scores.pq_top_ref(tables, packed, shape.s, shape.k, shape.d_h**-0.5)

    agree = float((search()[0].int() == search_ref().sort(-1).values).float().mean())
    seconds = seconds_of(search, device)
    yield Result(
        "pq_keys", f"{shape.k} of {shape.s}, {shape.m} x {shape.b}", agree > 0.999, 1 - agree, 1e3 * seconds,
        1e3 * seconds_of(search_ref, device),
        shape.h_kv * shape.m * shape.s * shape.b / 8 / seconds / 1e9, "error: share of other tokens",
    )  # fmt: skip
