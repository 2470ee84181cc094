"""The k best of many scores, the lower index first among equals: a set that does not depend on the machine.

`torch.topk` promises no order among equal scores, and a stable sort takes ten times as long.

Shapes    scores (..., s) float32 -> indices (..., k) int64, in no order.
Paths     C++ on a CPU (8 rows x 32,768 scores, k = 512, one thread: 0.1 ms). Without it, and for other numbers than
          float32, topk, and where equal scores straddle the border the choice among them is made again: 1.1 times topk
          without such ties, 1.5 with them (1.5 and 2.0 ms; the packed form 2.6, a stable sort 16). On an accelerator,
          where asking for ties would wait for it, the packed form; a float64 has no bits to spare and is sorted.
Keys      A GPU's kernels store `pack_key` of a score and a position in place of the score: int64, no two equal, the
          best the smallest, the position in the lower half. The largest int64 stands for no token: its lower half is
          -1. `top_keys` are one launch: the border's upper half is found digit by digit, a histogram each, by programs
          that wait for those before them, and what is below it is written in its place. Who waits for seconds ends the
          kernel. Launches of torch's topk are 20 and more from 20,000 keys on, those of its sort 4 and more.
Checks    tests/kernels/test_topk.py.

Not here: which scores. Those without ties take `torch.topk`.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.build import library, remembered
from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.fast import takes
from kvbench.kernels.jit import cdiv, constants, jit, power_of_2, tl
from kvbench.kernels.scratch import Scratch, empty, finest

NO_KEY = (1 << 63) - 1
SPARE_BITS = 29  # by which a float64's mantissa is longer than a float32's
LARGEST = 2.0**128 - 2.0**104  # of float32


def top_stable(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` highest, in no order; there must be no NaN."""
    if k >= scores.shape[-1]:
        return torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    if scores.device.type == "cpu":
        return top_native(scores, k) if k and takes_native(scores) else top_border(scores, k)
    is_packed = scores.dtype == torch.float32 and finest(scores.device) == torch.float64
    return top_packed(scores, k) if is_packed else top_stable_ref(scores, k)


def takes_native(scores: Tensor) -> bool:
    """Whether the C++ can read them."""
    is_known = scores.dtype == torch.float32 and scores.device.type == "cpu"
    return is_known and native() is not None


@remembered
def native() -> Any:
    """The C function, or None."""
    lib = library("topk")
    if lib is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        lib.top.argtypes = [size, size, size, pointer, size, pointer, size]
        lib.top.restype = None
    return lib


def top_native(scores: Tensor, k: int) -> Tensor:
    """A row at a time; 0 < k < s. Ascending indices."""
    *sizes, s = scores.shape
    rows = scores.reshape(-1, s)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    idx = torch.empty(*sizes, k, dtype=torch.int64)
    native().top(len(rows), s, rows.stride(0), rows.data_ptr(), k, idx.data_ptr(), torch.get_num_threads())
    return idx


def top_border(scores: Tensor, k: int) -> Tensor:
    """Indices by topk; where more scores equal the lowest chosen one than are chosen, the first of them are taken."""
    chosen = scores.topk(k, sorted=False)
    if k == 0:
        return chosen.indices
    lowest = chosen.values.amin(-1, keepdim=True)
    equal, n_wanted = scores == lowest, (chosen.values == lowest).sum(-1, keepdim=True)
    if torch.equal(equal.sum(-1, keepdim=True), n_wanted):
        return chosen.indices
    taken = (scores > lowest) | (equal & (equal.cumsum(-1) <= n_wanted))
    return taken.nonzero()[:, -1].view(*scores.shape[:-1], k)


def top_packed(scores: Tensor, k: int) -> Tensor:
    """Indices by topk of float64, whose spare bits hold the index: no two scores are equal. Infinity is `LARGEST`."""
    s = scores.shape[-1]
    assert scores.dtype == torch.float32 and s < 1 << SPARE_BITS, (scores.dtype, s)
    index = torch.arange(s, device=scores.device)
    # More of a mantissa is further from zero: up where the score is positive, down where it is negative.
    low = torch.where(scores < 0, index, s - 1 - index)
    # The mantissa of infinity must stay empty; + 0.0 takes the sign off -0.0.
    wide = (scores + 0.0).clamp(-LARGEST, LARGEST).double()
    return (wide.view(torch.int64) | low).view(torch.float64).topk(k, sorted=False).indices


def top_stable_ref(scores: Tensor, k: int) -> Tensor:
    """The `k` largest scores by a stable sort, best first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


# Keys.


def top_keys(keys: Tensor, ks: Sequence[int]) -> Tensor:
    """The smallest of keys (n, heads, s), `ks[i]` of row i, in the order of positions; after them `NO_KEY`.

    Their lower halves are the positions, (n, heads, max(ks)). Along a head keys of tokens rise with their positions
    where scores are equal; no two are the same.
    """
    ks = [min(k, keys.shape[-1]) for k in ks]
    assert len(ks) == len(keys), (ks, keys.shape)
    if min(ks) == keys.shape[-1] or max(ks) == 0:
        return keys[..., : max(ks)]
    return top_keys_triton(keys, ks) if takes("topk", keys.device) else top_keys_ref(keys, ks)


def best_keys(keys: Tensor, k: int) -> Tensor:
    """The `k` smallest of keys (..., n), best first."""
    return keys.sort(dim=-1).values[..., :k]


def top_keys_ref(keys: Tensor, ks: Sequence[int]) -> Tensor:
    """Chosen keys by a sort of keys, and one of positions."""
    best = best_keys(keys, max(ks))
    behind = torch.arange(max(ks), device=keys.device) >= torch.tensor(ks, device=keys.device).view(-1, 1, 1)
    best = best.masked_fill(behind, NO_KEY)
    places = (best & 0xFFFFFFFF).masked_fill(best == NO_KEY, NO_KEY)
    return best.gather(-1, places.sort(dim=-1, stable=True).indices)


def sort_keys(keys: Tensor) -> Tensor:
    """Keys (..., n) of some thousand clusters, best first."""
    return sort_keys_triton(keys) if takes("topk", keys.device) else keys.sort(-1).values


def pack_keys_ref(scores: Tensor, positions: Tensor) -> Tensor:
    """Keys of float32 scores."""
    bits = (scores + 0.0).view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((~rising).long() << 32) | positions


@jit
def pack_key(score, position):
    """A float32 as an integer that rises where the score falls, the position below it."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((rising ^ -1).to(tl.int64) << 32) | position.to(tl.int64)


# On a GPU.

ALONE = 4096  # keys of a head that one program works on; of more each digit is the work of `CHUNKS`
CHUNKS = 16
KEYS = 1024  # that a program reads at once
DIGITS = 4  # of the upper half
BINS = 256
RANKED = 32  # keys that a program ranks
LOOKS = 1 << 24  # of a program that waits, half a microsecond each: then something is wrong


@cache
def counters(device: torch.device, stream: int, n: int) -> Tensor:
    """Zeros, which every launch leaves as zeros: a stream has them to itself, for its launches follow each other."""
    return torch.zeros(n, dtype=torch.int32, device=device)


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def top_keys_triton(keys: Tensor, ks: Sequence[int]) -> Tensor:
    """`top_keys` in one launch."""
    assert keys.is_contiguous(), keys.stride()
    n_rows, heads, _ = keys.shape
    return KeyChoice(n_rows, heads, ks, keys.device).take(keys)


class KeyChoice:
    """What the launch is told of rows that choose `ks` keys each, however many there are.

    With `more` a row chooses so many more at every step, and there is memory for `n_steps` of them. What is told for
    steps to come has `scratch`, and counters of its own: they are zeros whichever stream or graph launches it.
    """

    def __init__(
        self, n_rows: int, heads: int, ks: Sequence[int], device: torch.device, scratch: Scratch | None = None,
        more: Sequence[int] = (), n_steps: int = 0,
    ) -> None:  # fmt: skip
        more = more or [0] * n_rows
        room, self.rows = empty if scratch is None else scratch.take, n_rows * heads
        self.width = max(k + n_steps * grows for k, grows in zip(ks, more, strict=True))
        self.out = torch.empty(n_rows, heads, self.width, dtype=torch.int64, device=device)
        self.counts = room("counts", device, torch.int32, (2 * BINS + 1) * self.rows * CHUNKS)
        self.state = room("state", device, torch.int64, self.rows, DIGITS, 2)
        is_same = min(ks) == self.width
        self.table = self.out if is_same else constants((*ks, *more), device)
        self.device, self.n_counters = device, power_of_2(self.rows + 2)
        self.counters = None if scratch is None else torch.zeros(self.n_counters, dtype=torch.int32, device=device)
        self.sizes = (self.width, heads, self.rows), is_same

    def take(self, keys: Tensor, since: Since | None = None) -> Tensor:
        """Choose among keys (n_rows, heads, n); where the result lies is always the same."""
        n, since = keys.shape[-1], now(self.device) if since is None else since
        n_chunks, (sizes, is_same) = 1 if n <= ALONE else CHUNKS, self.sizes
        counted = self.counters
        if counted is None:
            counted = counters(self.device, stream_of(self.device), self.n_counters)
        select_keys[(self.rows * n_chunks * (1 if n_chunks == 1 else DIGITS + 1),)](
            keys, self.table, self.out, counted, self.counts, self.state, *since, n, *sizes, cdiv(n, n_chunks),
            is_same, n_chunks, KEYS, DIGITS, BINS, LOOKS, num_warps=16 if n_chunks == 1 else 8,
        )  # fmt: skip
        return self.out


def sort_keys_triton(keys: Tensor, kept: Tensor | None = None, since: Since | None = None) -> Tensor:
    """A key's place is the number of smaller ones: one launch, where a sort takes four.

    `kept` (steps, ...) gets them too: its steps take turns.
    """
    out, n = torch.empty_like(keys), keys.shape[-1]
    since = now(keys.device) if since is None else since
    assert keys.is_contiguous() and (kept is None or kept.is_contiguous()), keys.stride()
    if keys.numel():
        turns = 0 if kept is None else len(kept)
        rank_keys[(cdiv(n, RANKED), keys.numel() // n)](
            keys, out, out if kept is None else kept, *since, n, turns, turns > 0, RANKED, 4 * RANKED
        )  # fmt: skip
    return out


@jit
def trap(x):
    """End the kernel with an error, and all else that this process has on the GPU: better than to hang."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@jit(unspecialized=("start", "n", "width", "n_rows", "length"))
def select_keys(
    keys, ks, out, counters, counts, state, clock, start, n, width, heads, n_rows, length,
    SAME: tl.constexpr, CHUNKS: tl.constexpr, KEYS: tl.constexpr, DIGITS: tl.constexpr, BINS: tl.constexpr,
    LOOKS: tl.constexpr,
):  # fmt: skip
    """One digit of one chunk of a head, or, after the last digit, what the chunk has of the chosen keys.

    Programs take their work in the order in which they start, digit by digit, and wait for work that was taken before:
    whoever is waited for runs already.
    """
    ticket, bin, part = tl.atomic_add(counters, 1), tl.arange(0, BINS), tl.arange(0, CHUNKS)
    row, chunk = ticket % (n_rows * CHUNKS) // CHUNKS, ticket % CHUNKS
    begin_phase = 0 if CHUNKS == 1 else ticket // (n_rows * CHUNKS)
    end_phase = DIGITS + 1 if CHUNKS == 1 else begin_phase + 1
    k = width
    if not SAME:
        age = steps_since(clock, start)
        k = (tl.load(ks + row // heads) + tl.load(ks + (n_rows + row) // heads) * age).to(tl.int32)
    mine, done = keys + row.to(tl.int64) * n, counters + 2 + row
    begin = chunk * length
    end = tl.minimum(begin + length, n)
    fewer_at = counts + 2 * n_rows * CHUNKS * BINS + row * CHUNKS
    for phase in range(begin_phase, end_phase):
        seen, looks = tl.atomic_add(done, 0), ticket * 0
        while seen < phase * CHUNKS:
            seen = tl.atomic_add(done, 0)
            looks += 1
            if looks == LOOKS:
                trap(looks)
        tl.debug_barrier()
        # What is known of the border's upper half, and how many keys are wanted of those that agree with it so far.
        known = state + (row * DIGITS + phase - 1) * 2
        border = tl.load(known, phase > 1, other=0, cache_modifier=".cg")
        left = tl.load(known + 1, phase > 1, other=0, cache_modifier=".cg").to(tl.int32)
        left = tl.where(phase > 1, left, k)
        n_taken, n_equal = k * 0, k * 0
        if phase > 0:
            at = counts + ((phase - 1) % 2 * n_rows + row).to(tl.int64) * (CHUNKS * BINS)
            each = tl.load(at + part[:, None] * BINS + bin[None], cache_modifier=".cg")
            every = tl.sum(each, 0)
            digit = tl.sum((tl.cumsum(every, 0) < left).to(tl.int32), 0)
            left -= tl.sum(tl.where(bin < digit, every, 0), 0)
            border = border * BINS + digit
            # Of the chunks before this one, which counts once the last digit is known.
            before = (part < chunk)[:, None]
            n_equal = tl.sum(tl.sum(tl.where(before & (bin == digit)[None], each, 0), 1), 0)
            fewer = tl.load(fewer_at + part, part < chunk, other=0, cache_modifier=".cg")
            n_taken = tl.sum(tl.sum(tl.where(before & (bin < digit)[None], each, 0), 1) + fewer, 0)
            n_taken += tl.minimum(n_equal, left)
            if (chunk == 0) & (phase < DIGITS):
                tl.store(known + 2, border)
                tl.store(known + 3, left.to(tl.int64))
        if phase < DIGITS:
            count, fewer = tl.zeros((BINS,), tl.int32), tl.zeros((KEYS,), tl.int32)
            shift = 8 * (DIGITS - 1 - phase)
            for front in range(begin, end, KEYS):
                place = front + tl.arange(0, KEYS)
                inside = place < end
                upper = (tl.load(mine + place, inside, other=0) >> 32) + 2147483648
                front = upper >> (shift + 8)
                count += tl.histogram((upper >> shift & 255).to(tl.int32), BINS, inside & (front == border))
                fewer += (inside & (front < border)).to(tl.int32)
            tl.store(counts + ((phase % 2 * n_rows + row).to(tl.int64) * CHUNKS + chunk) * BINS + bin, count)
            tl.store(fewer_at + chunk, tl.sum(fewer, 0))
        else:
            to = out + row.to(tl.int64) * width
            for front in range(begin, end, KEYS):
                place = front + tl.arange(0, KEYS)
                inside = place < end
                key = tl.load(mine + place, inside, other=0)
                upper = (key >> 32) + 2147483648
                equal = (inside & (upper == border)).to(tl.int32)
                is_first = n_equal + tl.cumsum(equal, 0) <= left
                taken = (inside & ((upper < border) | ((equal > 0) & is_first))).to(tl.int32)
                tl.store(to + n_taken + tl.cumsum(taken, 0) - taken, key, taken > 0)
                n_equal += tl.sum(equal, 0)
                n_taken += tl.sum(taken, 0)
            if chunk == 0:
                for front in range(k, width, KEYS):
                    place = front + tl.arange(0, KEYS)
                    tl.store(to + place, tl.full((KEYS,), 0x7FFFFFFFFFFFFFFF, tl.int64), place < width)
        tl.debug_barrier()
        tl.atomic_add(done, 1)
    # Nobody waits any more when the last one ends.
    if tl.atomic_add(counters + 1, 1) == tl.num_programs(0) - 1:
        for front in range(0, n_rows + 2, BINS):
            tl.store(counters + front + bin, tl.zeros((BINS,), tl.int32), front + bin < n_rows + 2)


@jit(unspecialized=("start", "n", "turns"))
def rank_keys(
    keys, out, kept, clock, start, n, turns, KEEPS: tl.constexpr, RANKED: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1)
    mine, place = keys + row.to(tl.int64) * n, block * RANKED + tl.arange(0, RANKED)
    key = tl.load(mine + place, place < n, other=0)
    rank = tl.zeros((RANKED,), tl.int32)
    for front in range(0, n, KEYS):
        other = front + tl.arange(0, KEYS)
        each = tl.load(mine + other, other < n, other=0x7FFFFFFFFFFFFFFF)
        rank += tl.sum((each[None] < key[:, None]).to(tl.int32), 1)
    tl.store(out + row.to(tl.int64) * n + rank, key, place < n)
    if KEEPS:
        turn = (steps_since(clock, start) % turns).to(tl.int64)
        tl.store(kept + (turn * tl.num_programs(1) + row) * n + rank, key, place < n)
