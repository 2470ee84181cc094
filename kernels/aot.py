"""Compile every Triton kernel for GPUs that need not be there: `python -m kvbench.kernels.aot`.

Triton's driver is replaced by one that only names a target, and a launch by a compilation. So the ops' own launch sites
run, on tensors without memory in the shapes of real models, and what is compiled is what would have been launched.
Prints each specialisation's registers, spilled bytes and shared memory, as Triton's ptxas says, with `--sass` also its
loads by width. Exit code 1: a kernel does not compile, asks for more shared memory than a program can have, lacks
registers, or was not reached by any launch site here.

Not here: whether results are right (`tests/kernels`, in Triton's interpreter).
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # before kernels are imported
    os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor

from kvbench.kernels import attend_kept, clusters, column_sums, kmeans, pages, pq_scores, select_attend, topk
from kvbench.kernels.jit import INTERPRETED, SHARED, triton
from kvbench.kernels.packed import rows as packed_rows
from kvbench.kernels.packed import tokens
from kvbench.kernels.packed.attend import Packed, Side, float_side
from kvbench.kernels.packed.codes import BY_CHANNEL, BY_TOKEN, BY_UNIT_TABLE, Quantised
from kvbench.kernels.packed.floats import E2M1, E4M3, E5M2, SCALE_BYTES, FloatCode
from kvbench.kernels.pq_codes import PackedCodes
from kvbench.kernels.rows import (
    append,
    blocks,
    buckets,
    chunks,
    collisions,
    columns,
    landmarks,
    logits,
    union,
    values,
    weights,
)

ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # A100; A10 and RTX 3090; L40S and RTX 4090; H100 and H200; B200; RTX 5090
LENGTHS = (4096, 32768, 131072)
ONE_LENGTH = {True: 32768, False: 700}  # of models, and of shapes from tests
MOST_ELSEWHERE = 256  # bytes, where registers are left


@dataclass(frozen=True)
class Shape:
    """A model's attention."""

    h: int
    h_kv: int
    d_h: int
    d_v: int = 0  # of a value: the first numbers of its key, or more than it has; 0: apart, as wide as that
    cap: float = 0.0  # of logits; 0: none
    has_sinks: bool = False  # a learned one of each query head
    dtype: torch.dtype = torch.bfloat16

    @property
    def weighing(self) -> dict[str, Any]:
        """How kernels that weigh tokens by themselves are told of cap and sinks."""
        return {"cap": self.cap, "sink": empty(self.h, dtype=torch.float32) if self.has_sinks else None}

    def pair(self, s: int) -> tuple[Tensor, Tensor]:
        """K and V of `s` tokens."""
        k = self.empty(1, self.h_kv, s, self.d_h)
        return k, k[..., : self.d_v] if 0 < self.d_v < self.d_h else self.empty(1, self.h_kv, s, self.d_v or self.d_h)

    def empty(self, *size: int) -> Tensor:
        return empty(*size, dtype=self.dtype)


MODELS = {
    "llama-3.1-8b": Shape(32, 8, 128),
    "smollm2-135m": Shape(9, 3, 64),
    "llama-2-7b": Shape(32, 32, 128),
    "qwen2.5-7b": Shape(28, 4, 128),
    "deepseek-v3": Shape(128, 1, 576, 512),
    "gemma-2-9b": Shape(16, 8, 256, cap=50.0),
    "gpt-oss-20b": Shape(64, 8, 64, has_sinks=True),
}
# What tests/kernels have: heads of odd widths, of groups of odd sizes; and wide ones that no model here has.
TESTED = {
    "7-heads-of-7": Shape(7, 1, 7),
    "4-heads-of-16": Shape(4, 2, 16, 40),
    "4-heads-of-20": Shape(4, 4, 20, cap=3.0),
    "6-heads-of-24": Shape(6, 2, 24, 16),
    "4-heads-of-36": Shape(4, 2, 36),
    "6-heads-of-40": Shape(6, 1, 40, 32),
    "10-heads-of-80": Shape(10, 2, 80),
    "6-heads-of-96": Shape(6, 2, 96),
    "2-heads-of-256": Shape(2, 2, 256, cap=3.0),
    "3-heads-of-264": Shape(3, 1, 264),
    "37-heads-of-272": Shape(37, 1, 272, 256),
    "10-heads-of-320": Shape(10, 2, 320),
    "8-heads-of-512": Shape(8, 1, 512),
}
SHAPES = MODELS | TESTED
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
# One scale for all, one of each token, those of blocks; the first and the third together, too.
FLOATS = (
    FloatCode(E4M3), FloatCode(E4M3, scale="float"), FloatCode(E2M1, 16, "e4m3", "layer"), FloatCode(E2M1, 32, "e8m0"),
    FloatCode(E4M3, 32, "e8m0"), FloatCode(E5M2),
)  # fmt: skip
Key = tuple[Any, ...]


@dataclass
class Compiled:
    """A specialisation of a kernel for one architecture."""

    kernel: str
    arch: int
    constants: dict[str, Any]
    dtypes: str
    where: str  # the first launch site that asked for it
    registers: int = 0
    spilled: int = 0  # bytes
    shared: int = 0  # bytes
    warps: int = 0
    loads: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def spills(self) -> bool:
        """Whether it lacks registers. Where some are left, ptxas took fewer, so that more programs run at once: a few
        bytes are its bargain, thousands are not (sm_120 kept 4,840 bytes elsewhere with 64 of 255 registers taken).
        """
        of_thread = min(255, 65536 // (32 * max(1, self.warps)))
        return self.spilled > 0 and (self.registers > of_thread - 8 or self.spilled > MOST_ELSEWHERE)


# --- launch sites -----------------------------------------------------------------------------


def empty(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def positions(*size: int) -> Tensor:
    return empty(*size, dtype=torch.int64)


def integers(*size: int) -> Tensor:
    return empty(*size, dtype=torch.int32)


def attention_sites(shape: Shape, s: int) -> None:
    q, (k, v), late = shape.empty(1, shape.h, 1, shape.d_h), shape.pair(s), shape.pair(64)
    for heads in sorted({shape.h_kv, shape.h}):
        for n in (s // 10, 82):
            part = select_attend.Tokens(k, v, positions(1, heads, n), late)
            select_attend.attend_rows_triton(q, [[part]], shape.d_h**-0.5, cap=shape.cap)


def page_sites(shape: Shape, s: int) -> None:
    k = shape.empty(1, shape.h_kv, s, shape.d_h)
    for page_len in (16, 32, 128):
        kmin, kmax = pages.page_bounds_triton(k, page_len)
        for agg in pages.AGGREGATES:
            keys = pages.page_keys_triton(shape.empty(2, shape.h, 1, shape.d_h), kmin, kmax, agg)
            pages.expand_keys_triton(keys[..., : max(1, s // 10 // page_len)], 0, page_len, s)


def cluster_sites(shape: Shape, s: int) -> None:
    c = max(4, s // 80)
    tables = positions(shape.h_kv, c), positions(shape.h_kv, c), positions(shape.h_kv, s - 16)
    clusters.cluster_tokens_triton(positions(1, shape.h, c), *tables, s // 10)
    centroids = empty(shape.h_kv, c, shape.d_h, dtype=torch.float32)
    for agg in ("query_head", "group_mean"):
        clusters.cluster_keys_triton(shape.empty(2, shape.h, 1, shape.d_h), centroids, agg)
    points = empty(shape.h_kv, s - 16, shape.d_h, dtype=torch.float32)
    kmeans.cluster_means_triton(points, kmeans.nearest_triton(points, centroids, is_l2=False), centroids)
    c = max(8, s // 16)
    order = clusters.mass_keys_triton(
        shape.empty(2, shape.h, 1, shape.d_h), shape.empty(shape.h_kv, c, shape.d_h), positions(shape.h_kv, c),
        shape.d_h**-0.5, **shape.weighing,
    )  # fmt: skip
    clusters.stand_in_triton(order[..., : c // 4], positions(shape.h_kv, c))


def choice_sites(shape: Shape, s: int) -> None:
    for heads, n in ((shape.h_kv, s), (shape.h, s // 16)):
        for ks in ((n // 10, n // 10), (n // 10, n // 5)):
            topk.top_keys_triton(positions(2, heads, n), ks)
    topk.sort_keys_triton(positions(1, shape.h, max(4, s // 80)))


def quantiser_sites(shape: Shape, s: int) -> None:
    for m, b in ((2, 6), (4, 8), (2, 4), (2, 2)):
        centroids = empty(shape.h_kv, m, 1 << b, shape.d_h // m, dtype=torch.float32)
        for n in (s - 32, s - 31):  # candidates are one more each step
            codes = PackedCodes(shape.h_kv, m, b, n, "meta")
            codes.n = n
            told = pq_scores.table_of([pq_scores.Coded(centroids, codes, 32, 32 + n, n)] * 2, centroids.device)
            queries, keys = shape.empty(2, shape.h, 1, shape.d_h), shape.empty(2, shape.h_kv, 1, shape.d_h)
            pq_scores.pq_keys_triton(queries, keys, told, shape.d_h**-0.5, **shape.weighing)
        points, flat = empty(shape.h_kv * m, s - 32, shape.d_h // m, dtype=torch.float32), centroids.flatten(0, 1)
        kmeans.cluster_means_triton(points, kmeans.nearest_triton(points, flat, is_l2=True), flat)


def search_sites(shape: Shape, s: int) -> None:
    scale, q, k = shape.d_h**-0.5, shape.empty(2, shape.h, 1, shape.d_h), shape.empty(1, shape.h_kv, s, shape.d_h)
    late, mean = shape.empty(1, shape.h_kv, 64, shape.d_h), empty(1, shape.h_kv, 1, shape.d_h, dtype=torch.float32)
    searched = logits.table_of([logits.Searched(k, late, s + 9, 32, s)] * 2, q.device)
    for agg in logits.AGGREGATES[:4]:
        logits.weigh_logits(*logits.token_logits(q, searched, scale, **shape.weighing), searched, agg)
    for agg, c in product(("query_head", "group_max", "group_mean"), (25, 20)):
        basis, partial = shape.empty(shape.h_kv, shape.d_h, c), shape.empty(shape.h_kv, s, c)
        logits.channel_keys(q, basis.float(), partial.float(), agg)
    for heads, per_head in ((shape.h, False), (shape.h_kv, True)):
        means = empty(s // 128, heads, shape.d_h, dtype=torch.float32)
        logits.block_keys(q, logits.blocks_of([means] * 2), len(means), per_head)
    bounds, new = shape.empty(shape.h_kv, 2 * shape.d_h, s // 16 + 8), shape.empty(2, shape.h_kv, 1, shape.d_h)
    told = chunks.table_of([chunks.Chunked(bounds, s, 16, 32)] * 2, q.device)
    chunks.chunk_keys(q, new, told, scale, **shape.weighing)
    for prompt in (k[0].mT, shape.empty(shape.h_kv, shape.d_h, s)):
        row = columns.Columns(prompt, late, mean, s + 9, 32, s, s // 10)
        told = columns.table_of([row] * 2, q.device)
        found = columns.find_components(q, shape.empty(2, shape.h_kv, 1, shape.d_h), told, 2, scale)
        _, approximate, lses = columns.component_keys(q, *found, told)
        covered = columns.cover(positions(2, shape.h_kv, s // 10), approximate, lses, told)
        columns.blend(shape.empty(2, shape.h, 1, shape.d_h), covered, told, shape.h_kv)
    tables = collisions.Tables(10, integers(shape.h_kv, 75, s), integers(shape.h_kv, 75, 1025))
    planes, norms = empty(shape.h_kv, shape.d_h, 750, dtype=torch.float32), empty(shape.h_kv, s, dtype=torch.float32)
    means, found = empty(shape.h_kv, shape.d_h, dtype=torch.float32), integers(shape.h)
    buckets.find_rows(q, [buckets.Hidden(tables, planes, k, means, norms, 0, found)] * 2, 1e-4)


def prompt_sites(shape: Shape, s: int) -> None:
    q, k = shape.empty(1, shape.h, s, shape.d_h), shape.empty(1, shape.h_kv, s, shape.d_h)
    lse = empty(1, shape.h, s, dtype=torch.float32)
    column_sums.column_sums_triton(q, k, shape.d_h**-0.5, None, lse, 100, cap=shape.cap)
    column_sums.column_sums_triton(q, k, shape.d_h**-0.5, empty(s, dtype=torch.float32), lse, cap=shape.cap)
    if not attend_kept.holds(shape.d_h, q.element_size()):
        return
    columns = attend_kept.Kept(s, 64, s - 100, vertical=empty(shape.h, s, dtype=torch.bool))
    columns = replace(columns, met=empty(shape.h, s + 63, dtype=torch.bool))
    for kept in (
        columns,
        *(attend_kept.Kept(s, b, s, empty(shape.h, s // b, s // b, dtype=torch.bool), b) for b in (16, 32, 64, 128)),
        attend_kept.Kept(s, 128, s, empty(shape.h, s // 128, s // 64, dtype=torch.bool), 64),
    ):
        attend_kept.attend_kept_triton(q, k, k, shape.d_h**-0.5, kept, cap=shape.cap)
        attend_kept.kept_sums_triton(q, k, shape.d_h**-0.5, kept, lse, 100, cap=shape.cap)


def weight_sites(shape: Shape, s: int) -> None:
    n = s // 10 + 1
    lse = empty(2, shape.h, 1, dtype=torch.float32)
    weights.Softening([empty(shape.h, n, dtype=torch.float32)] * 2).take(lse)
    k, got = shape.empty(1, shape.h_kv, n + 40, shape.d_h), empty(1, shape.h, n, dtype=torch.float32)
    for owners in sorted({shape.h_kv, 1}):
        held = weights.Held(k, k, positions(1, shape.h_kv, n - 1), n - 1, s)
        before = empty(1, owners, n - 1, dtype=torch.float32)
        weights.receive_rows([weights.Row(got, owners, "sum", before, held, 32, s)] * 2)


def code_sites(shape: Shape, s: int) -> None:
    """KIVI's codes, those of transformers' cache, TurboQuant's; exact tokens after values alone, and after both."""
    h_kv, d_h = shape.h_kv, shape.d_h
    q, exact = shape.empty(2, shape.h, 1, d_h), shape.empty(1, h_kv, 130, d_h)
    norm = empty(h_kv, s, 1, dtype=torch.float16)
    for bits in (2, 3, 4):
        codes = empty(h_kv, s, d_h * bits // 8, dtype=torch.uint8)
        uniform = Side(BY_TOKEN, bits, d_h, s, Quantised(codes, norm, norm), exact)
        table = empty(16, dtype=torch.float32)
        unit = Side(BY_UNIT_TABLE, bits, d_h, s, Quantised(codes, norm, norm), exact, table)
        coded([(unit, uniform)] * 2, q, s)
        ageing = [tokens.Ageing(q[:1, :h_kv], uniform.packed, 7)] * 2
        book = tokens.Book(
            empty(d_h, d_h, dtype=torch.float32), empty((1 << bits) - 1, dtype=torch.float32), bits, bits, 1e-8
        )
        tokens.UnitPacking(ageing, ageing, book).pack(ageing[0].x, ageing[0].x)
        for group in (32, 64) if bits != 3 and d_h % 32 == 0 else ():
            beside = shape.empty(h_kv, s, d_h // group)
            of_group, channels = (
                empty(h_kv, s // group, d_h, group * bits // 8, dtype=torch.uint8),
                shape.empty(h_kv, s // group, d_h),
            )
            v = Side(BY_TOKEN, bits, group, s - 128, Quantised(codes, beside, beside), exact)
            k = Side(BY_CHANNEL, bits, group, s - 64, Quantised(of_group, channels, channels), exact)
            coded([(k, v), (v._replace(n=s - 128), v)], q, s)
            tokens.RangePacking([tokens.Ageing(exact[:, :, :1], v.packed, 7)] * 2, bits, group).pack()


def float_sites(shape: Shape, s: int) -> None:
    h_kv, q = shape.h_kv, shape.empty(2, shape.h, 1, shape.d_h)
    sides = [(code, as_floats(code, shape, s)) for code in FLOATS if shape.d_h % max(code.group, 8) == 0]
    for (k_code, k), (v_code, v) in [*zip(sides, sides, strict=True), *zip(sides[:1], sides[2:3], strict=False)]:
        coded([(k, v)] * 2, q, s)
        k_ages, v_ages = ([tokens.Ageing(q[:1, :h_kv], side.packed, 7, side.table)] * 2 for side in (k, v))
        tokens.FloatPacking(k_ages, v_ages, k_code, v_code).pack(q[:1, :h_kv], q[:1, :h_kv])


def as_floats(code: FloatCode, shape: Shape, s: int) -> Side:
    n_bytes, groups = shape.d_h * code.format.bits // 8, shape.d_h // code.width(shape.d_h)
    dtype = torch.uint8 if SCALE_BYTES[code.scale] == 1 else torch.float32
    scales = empty(shape.h_kv, groups, s, dtype=dtype).transpose(1, 2)
    packed = Quantised(empty(shape.h_kv, s, n_bytes, dtype=torch.uint8), scales, scales)
    exact, shared = shape.empty(1, shape.h_kv, 130, shape.d_h), empty(1, 1, 1, dtype=torch.float32)
    return float_side(packed, s, exact, code, shared)


def landmark_sites(shape: Shape, s: int) -> None:
    h_kv, d_h, rank, c = shape.h_kv, shape.d_h, 160, s // 8 - 48
    means, basis = shape.empty(h_kv, c, d_h), shape.empty(h_kv, rank, d_h)
    row = landmarks.Chunks(means, positions(h_kv, 48), shape.empty(s, rank), basis, 8, s // 64)
    tables = empty(s, d_h, dtype=torch.float32)
    for rotation in (landmarks.Rotation(positions(d_h), tables, tables), None):
        making = landmarks.KeyMaking([row] * 2, shape.h, rotation, d_h**-0.5, **shape.weighing)
        making.take(shape.empty(2, shape.h, 1, d_h))


def coded(sides: Sequence[tuple[Side, Side]], q: Tensor, n: int) -> None:
    rows = packed_rows.CodedRows(len(sides))
    exact = [rows.add(i, Packed(k, v, n), None) for i, (k, v) in enumerate(sides)]
    select_attend.attend_rows_triton(q, exact, q.shape[3] ** -0.5, others=rows)


def row_sites(shape: Shape, s: int) -> None:
    k, late = shape.empty(1, shape.h_kv, s, shape.d_h), shape.empty(1, shape.h_kv, 64, shape.d_h)
    new = shape.empty(2, shape.h_kv, 1, shape.d_h)
    append.append_rows_triton(new, new, [[(k, k, 7), (late, late, 3)]] * 2)
    n, n_total = s // 10, s + 64
    stamps, tokens = (empty(shape.h_kv, size, dtype=torch.int32) for size in (n_total, n))
    for ages in (0, 1):
        ask = union.Ask(positions(1, shape.h, n), stamps, stamps, tokens, tokens, 3)
        counts = union.union_rows_triton([ask] * 2, shape.h_kv, ages)
        union.fetch_rows_triton([ask] * 2, [union.Far(k, k, (late, late), k, k)] * 2, counts)
    cache = integers(len(blocks.BLOCK), n_total // 128 + 1), integers(len(blocks.SLOT), 32), integers(2), late, late
    cached = blocks.Cached(ask, *cache, 128, 32, False, 4, s // 128)
    blocks.look_up_rows_triton([cached] * 2, counts, [0, 1])
    blocks.fill_rows_triton([cached] * 2, [union.Far(k, k, (late, late), k, k, (late, late))] * 2)
    values.fetch_values_triton(k, positions(1, shape.h_kv, n))


SITES: dict[str, Callable[[Shape, int], None]] = {
    "attention": attention_sites,
    "pages": page_sites,
    "choices": choice_sites,
    "clusters": cluster_sites,
    "quantiser": quantiser_sites,
    "prompt": prompt_sites,
    "search": search_sites,
    "rows": row_sites,
    "weights": weight_sites,
    "codes": code_sites,
    "floats": float_sites,
    "landmarks": landmark_sites,
}


def kernels() -> set[str]:
    """Names of all kernels in this folder that are launched; functions that only kernels call are no kernels."""
    names = set[str]()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        source = file.read_text()
        defined = re.findall(r"^@jit.*\ndef (\w+)\(", source, re.MULTILINE)
        names |= {name for name in defined if re.search(rf"\b{name}\[", source)}
    return names


# --- compiling --------------------------------------------------------------------------------


class NoGpu:
    """A driver that knows a target and nothing else."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # kernels are kept per device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_interface(self) -> Any:
        return torch


class Compiler:
    """Takes the place of Triton's launch, and compiles each specialisation once per architecture."""

    def __init__(self, sass: bool, say: Callable[[Compiled], None]) -> None:
        self.sass, self.say = sass, say
        self.arch, self.where = 0, ""
        self.found: dict[Key, Compiled] = {}
        self.launch = triton.runtime.JITFunction.run

    @contextmanager
    def targeting(self, arch: int) -> Iterator[None]:
        """Inside, launches are compilations for `arch`."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self.compile(kernel, args, grid, kwargs)

        self.arch = arch
        with (
            patch.object(triton.runtime.driver, "_active", NoGpu(arch)),
            patch.object(triton.runtime.JITFunction, "run", run),
        ):
            yield

    def compile(self, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        named = dict(zip(kernel.arg_names, args, strict=True))
        constants = {parameter.name: named[parameter.name] for parameter in kernel.params if parameter.is_constexpr}
        # Triton compiles anew for integers that are 1, and for those that 16 divides, but for some.
        fixed = {*constants, *(parameter.name for parameter in kernel.params if parameter.do_not_specialize)}
        numbers = {name: (x == 1, x % 16 == 0) for name, x in named.items() if type(x) is int and name not in fixed}
        dtypes = " ".join(str(x.dtype).removeprefix("torch.") for x in args if isinstance(x, Tensor))
        key = (kernel.fn.__name__, self.arch, dtypes, *constants.items(), *numbers.items())
        if key in self.found:
            return
        made = self.found[key] = Compiled(kernel.fn.__name__, self.arch, constants, dtypes, self.where)
        self.assemble(made, kernel, args, grid, kwargs)
        self.say(made)

    def assemble(self, made: Compiled, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        """Compile a specialisation and note what becomes of it."""
        said = StringIO()
        try:
            with redirect_stdout(said), triton.knobs.nvidia.scope():
                triton.knobs.nvidia.dump_ptxas_log = True
                compiled = self.launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:  # whatever the compiler raises is the kernel's failure
            made.error = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            return
        read_ptxas(made, said.getvalue())
        made.shared, made.warps = compiled.metadata.shared, compiled.metadata.num_warps
        check_shared(made)
        if self.sass:
            made.loads = loads_of(compiled.asm["cubin"])


def read_ptxas(made: Compiled, said: str) -> None:
    """Registers and spilled bytes; an assembler that says neither is a failure."""
    registers = re.search(r"Used (\d+) registers", said)
    if registers is None:
        made.error = "ptxas did not say how many registers it used"
        return
    made.registers = int(registers[1])
    made.spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))


def check_shared(made: Compiled) -> None:
    """Note as an error what asks for more than there is: it compiles, and is refused when it is launched."""
    most = SHARED.get(made.arch, made.shared)
    if made.shared > most:
        made.error = f"{made.shared} bytes of shared memory where a program can have {most}"


@cache
def disassembler() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def loads_of(cubin: bytes) -> dict[str, int]:
    """Loads from global memory by their width in bits, as machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([disassembler(), file.name], capture_output=True, text=True, check=True)
    counts: dict[str, int] = {}
    for op in re.findall(r"\b((?:LDG|LDGSTS)\.[\w.]+)", done.stdout):
        width = next((bits for bits in ("128", "64", "U8", "S8", "U16", "S16") if f".{bits}" in f"{op}."), "32")
        width = {"U8": "8", "S8": "8", "U16": "16", "S16": "16"}.get(width, width)
        counts[width] = counts.get(width, 0) + 1
    return counts


def lengths_of(name: str, dtype: str) -> Sequence[int]:
    """All lengths for models in bfloat16; what a length changes is the same in another type, and of other shapes."""
    is_model = name in MODELS
    return LENGTHS if is_model and dtype == "bfloat16" else [ONE_LENGTH[is_model]]


def compile_all(
    architectures: Sequence[int], shapes: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int],
    sites: Sequence[str], sass: bool, say: Callable[[Compiled], None] = lambda _: None,
) -> list[Compiled]:  # fmt: skip
    """Every specialisation that these launch sites ask for; `say` gets each as soon as it is there."""
    compiler = Compiler(sass, say)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # an earlier result would not say what ptxas said
        for arch in architectures:
            with compiler.targeting(arch):
                for name, dtype in product(shapes, dtypes):
                    shape = replace(SHAPES[name], dtype=DTYPES[dtype])
                    for s, site in product(lengths or lengths_of(name, dtype), sites):
                        compiler.where = f"{site}, {name}, {dtype}, {s} tokens"
                        SITES[site](shape, s)
    return list(compiler.found.values())


# --- the table --------------------------------------------------------------------------------


def line_of(made: Compiled) -> str:
    constants = ",".join(f"{name}={x}" for name, x in made.constants.items())
    head = f"{made.kernel} sm_{made.arch} {made.dtypes.partition(' ')[0]} {constants}"
    if made.error:
        return f"{head}: FAILED {made.error} ({made.where})"
    loads = "".join(f", {n} loads of {bits} bits" for bits, n in sorted(made.loads.items(), key=lambda x: -int(x[0])))
    spilled = f"SPILLS {made.spilled} bytes ({made.where})" if made.spills else "no spill"
    if made.spilled and not made.spills:
        spilled = f"{made.spilled} bytes elsewhere with registers left ({made.where})"
    return f"{head}: {made.registers} registers, {spilled}, {made.shared} bytes shared, {made.warps} warps{loads}"


def say(made: Compiled) -> None:
    print(line_of(made), flush=True)  # noqa: T201


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.kernels.aot", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--arch", nargs="+", type=int, default=ARCHITECTURES, help="80 for sm_80")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--lengths", nargs="+", type=int, default=(), help="tokens in the cache")
    parser.add_argument("--only", nargs="+", choices=SITES, default=[*SITES], help="the launch sites of some ops")
    parser.add_argument("--sass", action="store_true", help="count loads by width in the machine code")
    asked = parser.parse_args(words)
    if triton is None or INTERPRETED:
        print("error: this needs Triton, and TRITON_INTERPRET unset", file=sys.stderr)  # noqa: T201
        return 2
    # Whole it takes many minutes: a line as soon as there is one, and what is wrong once more after them.
    found = compile_all(asked.arch, asked.shapes, asked.dtypes, asked.lengths, asked.only, asked.sass, say)
    wrong = [made for made in found if made.error or made.spilled]
    n_elsewhere = sum(made.spilled > 0 and not made.spills for made in found)
    for made in sorted(wrong, key=lambda made: (made.kernel, made.arch, str(made.constants))):
        say(made)
    missing = sorted(kernels() - {made.kernel for made in found}) if asked.only == [*SITES] else []
    n_failed, n_spilling = sum(bool(made.error) for made in found), sum(made.spills for made in found)
    print(  # noqa: T201
        f"triton {triton.__version__}: {len(found)} specialisations, {n_failed} failed, {n_spilling} spill"
        + (f", {n_elsewhere} keep some bytes elsewhere with registers left" if n_elsewhere else "")
        + (f"; no launch site reaches {', '.join(missing)}" if missing else "")
    )
    return int(bool(n_failed or n_spilling or missing))


if __name__ == "__main__":
    sys.exit(main())
