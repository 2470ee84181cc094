"""What heads ask for of tokens that lie far away: counted, and each token brought once per KV head.

`union_rows` finds the distinct tokens of every KV head, and which of them earlier steps brought; `fetch_rows` copies
them to where attention reads them, from the copy that is there or from the host. A selection has a number, `epoch`; the
stamp of a token is twice that of the last selection that had it, and one more where a copy was there before. So no list
is searched, nothing has to be cleared, and programs look at tokens of one KV head side by side: what any of them writes
as a token's stamp is the same.

Shapes    idx (1, h_kv or h, k) int64, of which the lower half counts, -1: no token; stamps, slots (h_kv, s) int32;
          tokens, sources (h_kv, room) int32; counts (h_kv, 3 + ages) int32: what the heads ask for, each token once,
          what the heads ask for of tokens that are there, and how many were asked for last 1, 2, … epochs ago.
Checks    tests/kernels/test_union.py.

Not here: bytes (`engine/books/meter.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.gather import apart
from kvbench.kernels.jit import cdiv, distance, jit, lanes_of, power_of_2, tl, upload

TILE = 1024  # of what heads ask for, looked at at once
TOKENS, COPIED = 16, 32768  # that one program copies, and bytes that registers hold of their keys


class Ask(NamedTuple):
    """What one row asks for, and what it keeps of what it asked for before."""

    idx: Tensor
    stamps: Tensor
    slots: Tensor  # where a token's copy is, right where its stamp is recent
    tokens: Tensor  # made: the distinct ones, in no order
    sources: Tensor  # made: the slot where a copy is, -1: none, below: in a cache of blocks
    epoch: int  # above those before, and above `ages`
    n_turns: int = 1  # stretches of copies, which take turns with each epoch

    @property
    def first(self) -> int:
        """Slot from which on this epoch's copies lie."""
        return self.epoch % self.n_turns * self.tokens.shape[1]


class Far(NamedTuple):
    """Where tokens lie, and where their copies come to lie."""

    k: Tensor  # (1, h_kv, s, d_h)
    v: Tensor
    late: tuple[Tensor, Tensor] | None  # tokens from s on
    k_near: Tensor  # (1, h_kv, slots, d_h)
    v_near: Tensor
    held: tuple[Tensor, Tensor] | None = None  # a cache on the device, whose slot i is the source -2 - i


def union_rows_ref(asks: Sequence[Ask], h_kv: int, ages: int) -> Tensor:
    """Head by head, token by token: counts (n, h_kv, 3 + ages)."""
    counts = torch.zeros(len(asks), h_kv, 3 + ages, dtype=torch.int32)
    for i, ask in enumerate(asks):
        per_head = ask.idx[0].int().view(h_kv, -1)
        for head in range(h_kv):
            asked = [token for token in per_head[head].tolist() if token >= 0]
            age = {token: ask.epoch - int(ask.stamps[head, token]) // 2 for token in asked}
            distinct = list(dict.fromkeys(asked))
            counts[i, head, 0], counts[i, head, 1] = len(asked), len(distinct)
            counts[i, head, 2] = sum(age[token] <= ages for token in asked)
            for j, token in enumerate(distinct):
                ask.tokens[head, j] = token
                ask.sources[head, j] = ask.slots[head, token] if age[token] <= ages else -1
                if age[token] <= ages:
                    counts[i, head, 2 + age[token]] += 1
                ask.stamps[head, token] = 2 * ask.epoch + (age[token] <= ages)
    return counts


def fetch_rows_ref(asks: Sequence[Ask], far: Sequence[Far], counts: Tensor) -> None:
    """Token by token."""
    for i, (ask, at) in enumerate(zip(asks, far, strict=True)):
        for head in range(len(ask.stamps)):
            for j in range(int(counts[i, head, 1])):
                token, source, slot = int(ask.tokens[head, j]), int(ask.sources[head, j]), ask.first + j
                s = at.k.shape[2]
                sides = ((at.k_near, at.k, 0), (at.v_near, at.v, 1))
                for near, early, late in sides if apart(at.k_near, at.v_near) else sides[:1]:
                    if source < -1:
                        assert at.held is not None
                        near[0, head, slot] = at.held[late][0, head, -2 - source]
                    elif source >= 0:
                        near[0, head, slot] = near[0, head, source]
                    elif token < s:
                        near[0, head, slot] = early[0, head, token]
                    else:
                        assert at.late is not None
                        near[0, head, slot] = at.late[late][0, head, token - s]
                ask.slots[head, token] = slot


ASK = 11  # numbers of an ask, as `union_tokens` reads them


def union_rows_triton(asks: Sequence[Ask], h_kv: int, ages: int) -> Tensor:
    """A program for some of what a KV head's heads ask for: counts (n, h_kv, 3 + ages), sent as zeros with the asks."""
    n_counts = len(asks) * h_kv * (3 + ages)
    zeros = [0] * (2 * cdiv(n_counts, 4))  # of 64 bits; asks begin at a multiple of 16 bytes
    numbers = [number for ask in asks for number in ask_numbers(ask, h_kv)]
    sent = upload(zeros + numbers, asks[0].idx.device)
    counts = sent[: len(zeros)].view(torch.int32)[:n_counts].view(len(asks), h_kv, 3 + ages)
    union_tokens[union_grid(asks, h_kv)](
        sent[len(zeros) :], counts, *now(sent.device), 0, 0, ages, power_of_2(ages + 1), ASK, TILE
    )
    return counts


def union_grid(asks: Sequence[Ask], h_kv: int) -> tuple[int, int, int]:
    n_tiles = cdiv(max(ask.idx.shape[1] // h_kv * ask.idx.shape[2] for ask in asks), TILE)
    return max(1, n_tiles), h_kv, len(asks)


def ask_numbers(ask: Ask, h_kv: int) -> tuple[int, ...]:
    idx, stamps, slots, tokens, sources, epoch, _ = ask
    assert idx.dtype == torch.int64 and idx.stride(-1) == 1, (idx.dtype, idx.stride())
    assert {x.dtype for x in (stamps, slots, tokens, sources)} == {torch.int32}, "not int32"
    assert all(x.is_contiguous() for x in (stamps, slots, tokens, sources)), "not contiguous"
    return (
        idx.data_ptr(), idx.stride(1), idx.shape[1] // h_kv, idx.shape[2], stamps.data_ptr(), slots.data_ptr(),
        stamps.shape[1], tokens.data_ptr(), sources.data_ptr(), tokens.shape[1], epoch,
    )  # fmt: skip


def fetch_rows_triton(asks: Sequence[Ask], far: Sequence[Far], counts: Tensor) -> None:
    """A program for some tokens of a KV head."""
    start = far[0].k_near
    numbers, sizes = far_numbers(asks, far)
    fetch_tokens[fetch_grid(asks, start)](
        start, upload(numbers, start.device), counts, *now(start.device), 0, 0, counts.shape[2], *sizes
    )


def fetch_grid(asks: Sequence[Ask], start: Tensor) -> tuple[int, int, int]:
    return cdiv(max(ask.tokens.shape[1] for ask in asks), tokens_at_once(start)), start.shape[1], len(asks)


def tokens_at_once(start: Tensor) -> int:
    return min(TOKENS, COPIED // (power_of_2(start.shape[3]) * start.element_size()))


def far_numbers(asks: Sequence[Ask], far: Sequence[Far]) -> tuple[list[int], tuple[int, ...]]:
    """What `fetch_tokens` reads of each row, and its sizes."""
    start, (_, h_kv, _, d_h) = far[0].k_near, far[0].k_near.shape
    d_v, numbers = apart(far[0].k_near, far[0].v_near), []
    for ask, at in zip(asks, far, strict=True):
        k_late, v_late = at.late or (at.k, at.v)
        k_held, v_held = at.held or (at.k_near, at.v_near)
        for k, v in ((at.k_near, at.v_near), (k_late, v_late), (k_held, v_held)):
            assert not d_v or k.stride(1) * d_v == v.stride(1) * d_h or h_kv == 1, (k.stride(), v.stride())
        numbers += [
            ask.tokens.data_ptr(), ask.sources.data_ptr(), ask.tokens.shape[1], ask.slots.data_ptr(),
            ask.slots.shape[1], ask.epoch,
            *(distance(x, start) for x in (at.k_near, at.v_near)), at.k_near.stride(1),
            *(distance(x, start) for x in (at.k, at.v)), at.k.stride(1), at.v.stride(1),
            *(distance(x, start) for x in (k_late, v_late)), k_late.stride(1), at.k.shape[2],
            *(distance(x, start) for x in (k_held, v_held)), k_held.stride(1), ask.n_turns,
        ]  # fmt: skip
    fields = len(numbers) // len(asks)
    strides_and_distances = (x for i in (*range(6, 16), *range(17, 20)) for x in numbers[i::fields])
    lanes, widths = lanes_of(start, (d_h, d_v, *strides_and_distances)), (power_of_2(d_h), power_of_2(d_v))
    return numbers, (d_h, d_v, h_kv, fields, tokens_at_once(start), *widths, lanes)


class FetchLaunch:
    """What both launches are told of rows that ask at every step, from where they asked: `epochs` later each time."""

    def __init__(self, asks: Sequence[Ask], far: Sequence[Far], ages: int, epochs: int, ahead: int) -> None:
        """Take rows that ask, with room for the counts of `ahead` steps."""
        self.start, h_kv = far[0].k_near, far[0].k_near.shape[1]
        device, numbers = self.start.device, [number for ask in asks for number in ask_numbers(ask, h_kv)]
        self.asked, (told, self.sizes) = upload(numbers, device), far_numbers(asks, far)
        self.told, self.ages, self.epochs = upload(told, device), ages, epochs
        self.grids = union_grid(asks, h_kv), fetch_grid(asks, self.start)
        self.counts = torch.zeros(ahead + 1, len(asks), h_kv, 3 + ages, dtype=torch.int32, device=device)  # by step

    def take(self, since: Since) -> None:
        """Bring what is asked for by now, and count it."""
        counts, ages, moves = self.counts, self.ages, (self.epochs, self.counts.stride(0))
        union_tokens[self.grids[0]](self.asked, counts, *since, *moves, ages, power_of_2(ages + 1), ASK, TILE)
        fetch_tokens[self.grids[1]](self.start, self.told, counts, *since, *moves, 3 + ages, *self.sizes)


@jit(unspecialized=("start", "epochs", "n_counted"))
def union_tokens(
    asks, counts, clock, start, epochs, n_counted, ages, AGES: tl.constexpr, ASK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Each step's counts are `n_counted` further on, and its epoch is `epochs` later."""
    head, row, t = tl.program_id(1).to(tl.int64), tl.program_id(2), steps_since(clock, start)
    at = asks + row * ASK
    stride, per_head, k = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    s, room, epoch = tl.load(at + 6), tl.load(at + 9), tl.load(at + 10).to(tl.int32) + epochs * t
    idx = tl.load(at).to(tl.pointer_type(tl.int64)) + head * per_head * stride
    stamps = tl.load(at + 4).to(tl.pointer_type(tl.int32)) + head * s
    slots = tl.load(at + 5).to(tl.pointer_type(tl.int32)) + head * s
    tokens = tl.load(at + 7).to(tl.pointer_type(tl.int32)) + head * room
    sources = tl.load(at + 8).to(tl.pointer_type(tl.int32)) + head * room
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = tl.load(idx + place // k * stride + place % k, place < per_head * k, other=-1).to(tl.int32)
    real = token >= 0
    # Who finds this epoch takes over what it says; what was found before is the same for all who find it.
    seen = tl.load(stamps + token, real, other=0)
    there = tl.where(seen >> 1 == epoch, seen & 1, (epoch - (seen >> 1) <= ages).to(tl.int32))
    age = epoch - (tl.atomic_xchg(stamps + token, 2 * epoch + there, mask=real) >> 1)
    is_first = real & (age > 0)  # of those that ask for this token one finds an older stamp
    is_there = is_first & (there > 0)
    mine = counts + t * n_counted + (row * tl.num_programs(1) + head) * (3 + ages)
    tl.atomic_add(mine, tl.sum(real.to(tl.int32), 0))
    tl.atomic_add(mine + 2, tl.sum(tl.where(real, there, 0), 0))
    first = tl.atomic_add(mine + 1, tl.sum(is_first.to(tl.int32), 0))
    to = first + tl.cumsum(is_first.to(tl.int32), 0) - 1
    tl.store(tokens + to, token, is_first)
    tl.store(sources + to, tl.load(slots + token, is_there, other=-1), is_first)
    ages_of = tl.arange(0, AGES)
    by_age = tl.sum(((age[:, None] == ages_of[None] + 1) & is_there[:, None]).to(tl.int32), 0)
    tl.atomic_add(mine + 3 + ages_of, by_age, mask=ages_of < ages)


@jit(unspecialized=("start", "epochs", "n_counted"))
def fetch_tokens(
    origin, asks, counts, clock, start, epochs, n_counted, n_counts, d_h, d_v, h_kv,
    FIELDS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    block, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    at, t = asks + row * FIELDS, steps_since(clock, start)
    room, s_slots = tl.load(at + 2), tl.load(at + 4)
    first = (tl.load(at + 5) + epochs * t) % tl.load(at + 20) * room
    tokens = tl.load(at).to(tl.pointer_type(tl.int32)) + head * room
    sources = tl.load(at + 1).to(tl.pointer_type(tl.int32)) + head * room
    slots = tl.load(at + 3).to(tl.pointer_type(tl.int32)) + head * s_slots
    near_stride, late_stride, s = tl.load(at + 8), tl.load(at + 15), tl.load(at + 16)
    k_near = tl.multiple_of(tl.load(at + 6) + head * near_stride, LANES)
    v_near = tl.multiple_of(tl.load(at + 7) + head * (near_stride // d_h * d_v), LANES)
    k = tl.multiple_of(tl.load(at + 9) + head * tl.load(at + 11), LANES)
    v = tl.multiple_of(tl.load(at + 10) + head * tl.load(at + 12), LANES)
    k_late = tl.multiple_of(tl.load(at + 13) + head * late_stride, LANES)
    v_late = tl.multiple_of(tl.load(at + 14) + head * (late_stride // d_h * d_v), LANES)
    held_stride = tl.load(at + 19)
    k_held = tl.multiple_of(tl.load(at + 17) + head * held_stride, LANES)
    v_held = tl.multiple_of(tl.load(at + 18) + head * (held_stride // d_h * d_v), LANES)
    n = tl.load(counts + t * n_counted + (row * h_kv + head) * n_counts + 1)
    place, column = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    real = place < n
    token = tl.load(tokens + place, real, other=0).to(tl.int64)
    source = tl.load(sources + place, real, other=-1).to(tl.int64)
    is_late, is_there, is_held = token >= s, source >= 0, source < -1
    early, behind = tl.where(is_late, 0, token), tl.where(is_late, token - s, 0)
    beside, cached = tl.where(is_there, source, 0), tl.where(is_held, -2 - source, 0)
    from_k = tl.where(is_there, k_near + beside * d_h, tl.where(is_late, k_late + behind * d_h, k + early * d_h))
    from_v = tl.where(is_there, v_near + beside * d_v, tl.where(is_late, v_late + behind * d_v, v + early * d_v))
    from_k = tl.where(is_held, k_held + cached * d_h, from_k)
    from_v = tl.where(is_held, v_held + cached * d_v, from_v)
    there, to = real[:, None] & (column < d_h)[None], (first + place).to(tl.int64)
    of_value = tl.arange(0, VALUES)
    in_value = real[:, None] & (of_value < d_v)[None]
    key = tl.load(origin + from_k[:, None] + column[None], there, other=0.0)
    value = tl.load(origin + from_v[:, None] + of_value[None], in_value, other=0.0)
    tl.store(origin + k_near + to[:, None] * d_h + column[None], key, there)
    tl.store(origin + v_near + to[:, None] * d_v + of_value[None], value, in_value)
    tl.store(slots + token, (first + place).to(tl.int32), real)
