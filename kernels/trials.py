"""Each op's kernel next to its plain form, on numbers drawn in the shapes of a model: what `kernels/fast.py` tries out.

A trial yields pairs, what a kernel found and what torch says. Whole numbers are to be equal, keys by their positions;
others as near as `fast.NEAR` says for the model's dtype. A few hundred tokens make every kernel go over several tiles.

Not here: odd shapes and strides (`tests/kernels`), what follows from a trial (`kernels/fast.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.kernels import attend_kept, clusters, column_sums, kmeans, pages, pq_scores, topk
from kvbench.kernels.gather import gather_split
from kvbench.kernels.packed.attend import Packed, Side
from kvbench.kernels.packed.codes import (
    BY_CHANNEL,
    BY_FLOAT,
    BY_TOKEN,
    BY_UNIT_TABLE,
    Quantised,
    pack,
    quantise_channels,
    quantise_tokens,
    unpack,
)
from kvbench.kernels.packed.floats import (
    E2M1,
    E4M3,
    E5M2,
    FloatCode,
    floats_with_room,
    quantise_floats,
    rebuild_floats,
    tables,
)
from kvbench.kernels.packed.rows import CodedRows, is_readable
from kvbench.kernels.packed.tokens import Ageing, Book, FloatPacking, RangePacking, UnitPacking, packs, packs_floats
from kvbench.kernels.pq_codes import PackedCodes, pq_codes_torch
from kvbench.kernels.rows import buckets, chunks, collisions, columns, landmarks, logits
from kvbench.kernels.rows.append import append_rows_ref, append_rows_triton
from kvbench.kernels.rows.blocks import BLOCK, SLOT, Cached, fill_rows_triton, look_up_rows_triton
from kvbench.kernels.rows.union import Ask, Far, fetch_rows_triton, union_rows_triton
from kvbench.kernels.rows.values import fetch_values_triton
from kvbench.kernels.rows.weights import Held, Row, Softening, receive_rows
from kvbench.kernels.select_attend import Near, Spans, Tokens, attend_parts_ref, attend_rows_triton

S, LATE = 300, 9  # tokens of a prompt, and after it
# Scales of a token, of all, of blocks.
FLOATS = (
    FloatCode(E4M3, scale="float"), FloatCode(E5M2), FloatCode(E2M1, 16, "e4m3", "layer"), FloatCode(E4M3, 32, "e8m0")
)  # fmt: skip
Pairs = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Heads:
    """A model's attention, and what draws numbers in its shapes."""

    h: int
    h_kv: int
    d_h: int
    d_v: int
    is_latent: bool  # values are the first numbers of their keys
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def g(self) -> int:
        return self.h // self.h_kv

    @property
    def scale(self) -> float:
        return self.d_h**-0.5

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.dtype if dtype is None else dtype).to(self.device)

    def wide(self, *size: int) -> Tensor:
        return self.normal(*size, dtype=torch.float32)

    def pair(self, s: int, n: int = 1) -> tuple[Tensor, Tensor]:
        k = self.normal(n, self.h_kv, s, self.d_h)
        return k, k[..., : self.d_v] if self.is_latent else self.normal(n, self.h_kv, s, self.d_v)

    def query(self, n: int = 1) -> Tensor:
        return self.normal(n, self.h, 1, self.d_h)

    def places(self, heads: int, k: int, below: int = S) -> Tensor:
        """(1, heads, k), each once."""
        drawn = torch.rand(heads, below, generator=self.generator).argsort(-1)[None, :, :k]
        return drawn.contiguous().to(self.device)

    def integers(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.int32, device=self.device)

    def ask(self, idx: Tensor, epoch: int = 1) -> Ask:
        room = idx.shape[1] // self.h_kv * idx.shape[2]
        stamps, slots = self.integers(self.h_kv, S + LATE), self.integers(self.h_kv, S + LATE)
        return Ask(idx, stamps, slots, self.integers(self.h_kv, room), self.integers(self.h_kv, room), epoch)


def far(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of k and v on the host, where a GPU reads them."""
    there = k.cpu().pin_memory()
    return there, there[..., : v.shape[3]] if v.data_ptr() == k.data_ptr() else v.cpu().pin_memory()


def scores(keys: Tensor) -> Tensor:
    """Scores that keys were made of; 0 in place of none."""
    rising = (~(keys >> 32)).int()
    found = (rising ^ ((rising >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return found.masked_fill(keys == topk.NO_KEY, 0)


def step(on: Heads) -> Pairs:
    """Tokens are taken in, brought from the host and attended to, in all the ways in which they may lie."""
    (k, v), (k_late, v_late), (k_new, v_new) = on.pair(S), on.pair(LATE), on.pair(1, 2)
    host, late = far(k, v), far(k_late, v_late)
    taken, right = ([(k.clone(), v.clone()), far(late[0].clone(), late[1].clone())] for _ in range(2))
    append_rows_triton(k_new, v_new, [[(*taken[0], 3)], [(*taken[1], 7)]])
    append_rows_ref(k_new.cpu(), v_new.cpu(), [[], [(*right[1], 7)]])
    append_rows_ref(k_new, v_new, [[(*right[0], 3)]])
    if k.device.type == "cuda":
        torch.cuda.synchronize(k.device)
    yield from zip((*taken[0], *taken[1]), (*right[0], *right[1]), strict=True)

    few, many = on.places(on.h_kv, 70, S + LATE), on.places(on.h, 70, S + LATE)
    ask = on.ask(many)
    near = [x.new_zeros(1, on.h_kv, ask.tokens.shape[1], x.shape[3]) for x in (k, v)]
    near[1] = near[0][..., : on.d_v] if on.is_latent else near[1]
    counts = union_rows_triton([ask], on.h_kv, 0)
    fetch_rows_triton([ask], [Far(*host, late, near[0], near[1])], counts)
    asked = torch.zeros(on.h_kv, S + LATE, device=on.device).scatter_(1, many[0].view(on.h_kv, -1), 1.0)
    yield counts[0, :, 1], asked.sum(1).int()
    slots = ask.slots.long().repeat_interleave(on.g, 0).gather(1, many[0]).unsqueeze(0)
    for mine, early, behind in zip(near, (k, v), (k_late, v_late), strict=True):
        yield gather_split(mine, None, slots), gather_split(early, behind, many)
    yield fetch_values_triton(host[0], few.clamp(max=S - 1)), gather_split(k, None, few.clamp(max=S - 1))

    q, mask = on.query(3), torch.rand(1, on.h, S, generator=on.generator).to(on.device) > 0.3
    counts_of = torch.tensor([S - 7 * i for i in range(on.h_kv)], device=on.device).clamp(min=1)
    spans = Spans(torch.arange(on.h_kv, device=on.device), counts_of, S)
    bias, here = on.wide(1, on.h_kv, S), (k_late, v_late)
    resident = Tokens(k, v, mask=mask), Tokens(k, v, bias=bias), Tokens(k, v, spans=spans)
    found = [Tokens(*host, few, late), Tokens(*host, many, late, near=Near(near[0], near[1], ask.slots))]
    plain = [Tokens(k, v, few, here), Tokens(k, v, many, here)]
    rows = [[resident[0], found[0]], [resident[1], found[1]], [resident[2]]]
    right = [[resident[0], plain[0]], [resident[1], plain[1]], [resident[2]]]
    room = [None, None, None, torch.zeros(on.h, S, device=on.device)]
    out, lse = attend_rows_triton(q, rows, on.scale)
    for i, parts in enumerate(right):
        theirs, of_them = attend_parts_ref(q[i : i + 1], parts, on.scale)
        yield out[i : i + 1], theirs
        yield lse[i : i + 1], of_them
    attend_rows_triton(q[:1], [[Tokens(k, v)]], on.scale, room[3:])
    products = q[0].view(on.h_kv, on.g, on.d_h).float() @ k[0].float().mT * on.scale
    assert room[3] is not None
    yield room[3], products.flatten(0, 1)


def blocks(on: Heads) -> Pairs:
    """A cache holds two blocks: both leave for the next two, which are there when they are asked for again."""
    (k, v), length = on.pair(S), 16
    cached, made = [x.new_zeros(1, on.h_kv, 2 * length, x.shape[3]) for x in (k, v)], on.ask(on.places(on.h_kv, 8))
    near = [x.new_zeros(1, on.h_kv, 8, x.shape[3]) for x in (k, v)]
    if on.is_latent:
        cached[1], near[1] = cached[0][..., : on.d_v], near[0][..., : on.d_v]
    tables = on.integers(len(BLOCK), S // length + 1), on.integers(len(SLOT), 2), on.integers(2)
    tables[0][BLOCK.index("where")] = -1
    host, n = far(k, v), 8 * on.h_kv
    for epoch, (first, expected) in enumerate(((0, (0, 0, 2)), (2, (0, 0, 2)), (2, (n, n, 0))), 1):
        idx = on.places(on.h_kv, 8, length) * 2 + first * length
        ask = made._replace(idx=idx, epoch=epoch)
        one = Cached(ask, *tables, cached[0], cached[1], length, 2, False, 0, S // length)
        there, counts = Far(*host, None, near[0], near[1], (cached[0], cached[1])), union_rows_triton([ask], on.h_kv, 0)
        yield look_up_rows_triton([one], counts, [0])[0], torch.tensor(expected)
        fetch_rows_triton([ask], [there], counts)
        fill_rows_triton([one], [there])
        slots = ask.slots.long().gather(1, idx[0]).unsqueeze(0)
        for mine, right in zip(near, (k, v), strict=True):
            yield gather_split(mine, None, slots), gather_split(right, None, idx)


def codes(on: Heads) -> Pairs:
    """Keys by channel, by token, by entries of a table and as floats, values by token and as floats."""
    k, v, d, n = on.normal(on.h_kv, 192, on.d_h), on.normal(on.h_kv, 192, on.d_h), on.d_h, 192
    none, table = on.normal(1, on.h_kv, 0, d), on.wide(16).sort().values
    values = Side(BY_TOKEN, 4, d, n, quantise_tokens(v, 4, d), none)
    drawn = torch.randint(16, (on.h_kv, n, d), generator=on.generator).to(on.device, torch.uint8)
    norms = on.wide(on.h_kv, n, 1).abs().half()
    units = table[drawn.long()]
    units = units / (units.square().sum(-1, keepdim=True) + 1e-16).sqrt() * norms.float()
    keys = [
        Side(BY_CHANNEL, 2, 32, n, quantise_channels(k, 2, 32), none),
        Side(BY_TOKEN, 4, d, n, quantise_tokens(k, 4, d), none),
        Side(BY_UNIT_TABLE, 4, d, n, Quantised(pack(drawn, 4), norms, norms), none, table, lambda: units),
    ]
    q, pairs = on.query(), [(side, values) for side in keys]
    for code in FLOATS if d % 32 == 0 else ():
        as_keys, as_values = (float_side(x.float(), code, none) for x in (k, v))
        pairs += [(as_keys, as_values), (as_keys, values)]
    for side, behind in pairs if d == on.d_v and d % 2 == 0 else ():
        if is_readable(side, q) and is_readable(behind, q):
            packed, coded = Packed(side, behind, n), CodedRows(1)
            rows = [coded.add(0, packed, None)]
            found, right = attend_rows_triton(q, rows, on.scale, others=coded), packed.rebuilt(d)
            yield from zip(found, attend_parts_ref(q, [Tokens(*right)], on.scale), strict=True)


def float_side(x: Tensor, code: FloatCode, none: Tensor) -> Side:
    shared = torch.full((1, 1, 1), 0.01 if code.scale == "e4m3" else 1.0, device=x.device)
    packed, (table, of_bytes) = quantise_floats(x, code, shared), tables(code, shared)
    width, of = code.width(x.shape[2]), code.format
    return Side(
        BY_FLOAT, of.bits, width, x.shape[1], packed, none, table,
        lambda: rebuild_floats(packed, code, shared), of_bytes, of.exponent_bits,
    )  # fmt: skip


def packing(on: Heads) -> Pairs:
    x, d = on.normal(2, on.h_kv, 1, on.d_h), on.d_h
    if packs(d, d) and d % 8 == 0:
        to = [quantise_tokens(on.normal(on.h_kv, 5, d), 4, d) for _ in range(2)]
        RangePacking([Ageing(x[i : i + 1], to[i], 3) for i in range(2)], 4, d).pack()
        for i, mine in enumerate(to):
            yield from zip((y[:, 3:4] for y in mine), quantise_tokens(x[i], 4, d), strict=True)
        rotation, middle = torch.eye(d, device=on.device), torch.linspace(-1, 1, 15, device=on.device) * d**-0.5
        keys, values = (
            Quantised(*(y.clone().half() if y.is_floating_point() else y.clone() for y in to[0])) for _ in range(2)
        )
        ages = [Ageing(x[:1], keys, 2)], [Ageing(x[1:], values, 2)]
        UnitPacking(*ages, Book(rotation, middle, 4, 4, 1e-10)).pack(x[:1], x[1:])
        norm = x[0].float().norm(dim=-1, keepdim=True)
        right = torch.bucketize(x[0].float() / (norm + 1e-10), middle, right=True)
        apart = (unpack(keys.codes[:, 2:3], 4, d).int() - right.int()).abs()
        yield (apart > 0).float().mean() < 0.02, torch.tensor(True)  # but for those that lie on a border
        yield keys.scales[:, 2:3], norm.half()
    for code in FLOATS:
        if not packs_floats(code, d):
            continue
        shared = torch.full((1, 1, 1), 0.01 if code.scale == "e4m3" else 1.0, device=on.device)
        right = [quantise_floats(row.float(), code, shared) for row in x]
        made = [floats_with_room(each, code, 3) for each in right]
        ages = [Ageing(x[i : i + 1], to, 2, shared) for i, to in enumerate(made)]
        FloatPacking(ages[:1], ages[1:], code, code).pack(x[:1], x[1:])
        for to, each in zip(made, right, strict=True):
            yield to.codes[:, 2:3], each.codes
            yield to.scales[:, 2:3], each.scales


def soften(on: Heads) -> Pairs:
    x = on.wide(2, on.h, 70)
    lse, weights = x.logsumexp(-1, keepdim=True), [each.clone() for each in x]
    Softening(weights).take(lse)
    yield from zip(weights, (x - lse).exp(), strict=True)


def evict(on: Heads) -> Pairs:
    """The token of the lowest sum goes, and the newest takes its slot."""
    n, (k, v) = 40, (on.normal(1, on.h_kv, 40, on.d_h) for _ in range(2))
    weights, before = on.wide(1, on.h, n).abs(), on.wide(1, on.h_kv, n - 1).abs()
    sums = weights.view(1, on.h_kv, on.g, n).sum(2)
    sums[..., :-1] += before
    hole, kept = sums[..., : n - 1].argmin(-1, keepdim=True), torch.arange(n - 1, device=on.device)
    at = hole.unsqueeze(-1).expand(-1, -1, -1, on.d_h)
    right = [x.scatter(2, at, x[:, :, -1:])[:, :, :-1] for x in (k, v)]
    (done,) = receive_rows([Row(weights, on.h_kv, "sum", before, Held(k, v, None, n - 1, n - 1), 0, n - 1)])
    assert done.positions is not None and done.evicted is not None
    yield done.evicted, hole
    yield done.positions, kept.expand(1, on.h_kv, -1).scatter(-1, hole, n - 1)
    yield done.sums[..., :-1], sums.scatter(-1, hole, sums[..., -1:])[..., :-1]
    yield from zip((k[:, :, :-1], v[:, :, :-1]), right, strict=True)


def top(on: Heads) -> Pairs:
    for n in (S, topk.ALONE + S):
        keys = topk.pack_keys_ref(on.wide(2, on.h_kv, n), torch.arange(n, device=on.device))
        yield topk.top_keys_triton(keys, [40, 70]), topk.top_keys_ref(keys, [40, 70])
    yield topk.sort_keys_triton(keys[..., :S].contiguous()), keys[..., :S].sort(-1).values


def page(on: Heads) -> Pairs:
    keys, q = on.normal(1, on.h_kv, S, on.d_h), on.query(2)
    bounds = pages.page_bounds_ref(keys, 16)
    yield from zip(pages.page_bounds_triton(keys, 16), bounds, strict=True)
    for agg in pages.AGGREGATES:
        found = pages.page_keys_triton(q, *bounds, agg)
        yield scores(found), scores(pages.page_keys_ref(q, *bounds, agg))
        best = topk.best_keys(found, 5)
        yield pages.expand_keys_triton(best, 3, 16, S), pages.expand_keys_ref(best, 3, 16, S)


def cluster(on: Heads) -> Pairs:
    q, centroids, c = on.query(2), on.wide(on.h_kv, 19, on.d_h), 19
    for agg in ("query_head", "group_mean"):
        found = clusters.cluster_keys_triton(q, centroids, agg)
        yield scores(found), scores(clusters.cluster_keys_ref(q, centroids, agg))
    sizes = torch.arange(c, device=on.device).expand(on.h_kv, c).contiguous()
    order, owned = found.sort(-1).values, (sizes, sizes.cumsum(-1), on.places(on.h_kv, c * (c - 1) // 2)[0])
    right = clusters.cluster_tokens_torch(order.int().long(), *owned, 30)
    yield clusters.cluster_tokens_triton(order, *owned, 30), right
    mass = clusters.mass_keys_triton(q, centroids.to(on.dtype), sizes, on.scale)
    yield scores(mass), clusters.mass_scores(q, centroids.to(on.dtype), sizes, on.scale)
    yield from zip(clusters.stand_in_triton(order, sizes), clusters.stand_in_ref(order, sizes), strict=True)


def sums(on: Heads) -> Pairs:
    q, k, weights = on.normal(1, on.h, S, on.d_h), on.normal(1, on.h_kv, S, on.d_h), on.wide(S).abs()
    logits = (q[0].float() @ k[0].float().repeat_interleave(on.g, 0).mT) * on.scale
    lse = logits.masked_fill(torch.ones(S, S, dtype=torch.bool, device=on.device).triu(1), -torch.inf).logsumexp(-1)
    for voices in (None, weights):
        found = column_sums.column_sums_triton(q, k, on.scale, voices, lse.unsqueeze(0))
        yield found, column_sums.column_sums_ref(q, k, on.scale, voices)


def kept(on: Heads) -> Pairs:
    q, (k, v) = on.normal(1, on.h, S, on.d_h), on.pair(S)
    if not attend_kept.holds(on.d_h, q.element_size()):
        return
    n = -(-S // 32)
    chosen = torch.rand(on.h, n, n, generator=on.generator) > 0.5
    blocks = (chosen | torch.eye(n, dtype=torch.bool)).to(on.device)
    some = attend_kept.Kept(S, 32, S, blocks, 32)
    out, lse, pairs = attend_kept.attend_kept_triton(q, k, v, on.scale, some)
    right = attend_kept.attend_kept_torch(q, k, v, on.scale, some)
    yield from zip((out, lse, pairs), right, strict=True)
    mine = attend_kept.kept_sums_triton(q, k, on.scale, some, right[1])
    yield mine, attend_kept.kept_sums_torch(q, k, on.scale, some, right[1])


def means(on: Heads) -> Pairs:
    points, centroids = on.wide(on.h_kv, S, on.d_h), on.wide(on.h_kv, 12, on.d_h)
    for is_l2 in (False, True):
        alike = points @ centroids.mT - (0.5 * centroids.square().sum(-1).unsqueeze(1) if is_l2 else 0)
        labels = kmeans.nearest_triton(points, centroids, is_l2)
        yield alike.gather(-1, labels.unsqueeze(-1)).squeeze(-1), alike.amax(-1)
    found = kmeans.cluster_means_triton(points, labels, centroids)
    yield from zip(found, kmeans.cluster_means_ref(points, labels, centroids), strict=True)


def quantised(on: Heads) -> Pairs:
    m, n, start = 2 if on.d_h % 2 == 0 else 1, S - 40, 8
    centroids, q, newest = on.wide(on.h_kv, m, 16, on.d_h // m), on.query(2), on.normal(2, on.h_kv, 1, on.d_h)
    first, other = (PackedCodes(on.h_kv, m, 4, S, on.device) for _ in range(2))
    for codes in (first, other):
        codes.extend(torch.randint(16, (on.h_kv, m, n), generator=on.generator).to(on.device, torch.uint8))
    rows = [pq_scores.Coded(centroids, codes, start, start + n) for codes in (first, other)]
    rows[1] = rows[1]._replace(newest=n)
    found = pq_scores.pq_keys_triton(q, newest, pq_scores.table_of(rows, on.device), on.scale)[..., start:]
    for i, right in enumerate(pq_scores.pq_keys_ref(q, newest, rows, on.scale)):
        yield scores(found[i : i + 1]), scores(right)
        yield found[i : i + 1].int(), right.int()
    other.n += 1
    yield other.codes(n), pq_codes_torch(newest[1].float(), centroids)


def products(on: Heads) -> Pairs:
    """Products of queries with keys, with a few channels of keys, with means of blocks."""
    q, prompt, late = on.query(2), on.normal(1, on.h_kv, S, on.d_h), on.normal(1, on.h_kv, LATE, on.d_h)
    n, grouped = S + 4, q.view(2, on.h_kv, on.g, on.d_h).float()
    keys = torch.cat([prompt, late], 2)[0, :, :n].float()
    told = logits.table_of([logits.Searched(prompt, late, n, 5, S)] * 2, q.device)
    found, lses = logits.token_logits(q, told, on.scale)
    right = grouped @ keys.mT * on.scale
    yield found, right.flatten(1, 2)
    mass = scores(logits.weigh_logits(found, lses, told, "group_sum"))[..., 5:S]
    yield mass, right.softmax(-1).sum(2)[..., 5:S]
    basis, partial = on.wide(on.h_kv, on.d_h, 4), on.wide(on.h_kv, S, 4)
    yield scores(logits.channel_keys(q, basis, partial, "group_mean")), (grouped @ basis @ partial.mT).mean(2)
    blocks = on.wide(20, on.h_kv, on.d_h)
    yield (
        scores(logits.block_keys(q, logits.blocks_of([blocks] * 2), 20, True)),
        (grouped @ blocks.permute(1, 2, 0)).flatten(1, 2),
    )


def largest(q: Tensor, h_kv: int, r: int, scale: float) -> tuple[Tensor, Tensor]:
    """The r largest components of groups (h_kv, r), and what keys are multiplied with there, (h_kv, g, r)."""
    grouped = q.view(h_kv, -1, q.shape[-1]).float()
    idx = grouped.abs().sum(1).sort(descending=True, stable=True).indices[:, :r]
    chosen = grouped.gather(-1, idx.unsqueeze(1).expand(-1, grouped.shape[1], -1))
    share = chosen.abs().sum(-1, keepdim=True) / grouped.abs().sum(-1, keepdim=True)
    return idx, chosen * scale * share.rsqrt()


def components(on: Heads) -> Pairs:
    r, n, k = min(4, on.d_h), S + 4, 30
    q, value, mean = on.query(), on.normal(1, on.h_kv, 1, on.d_h), on.wide(1, on.h_kv, 1, on.d_h)
    prompt, late, taken = on.normal(1, on.h_kv, S, on.d_h), on.normal(1, on.h_kv, LATE, on.d_h), mean.clone()
    told = columns.table_of([columns.Columns(prompt[0].mT, late, taken, n, 5, S, k)], q.device)
    idx, weights = columns.find_components(q, value, told, r, on.scale)
    keys, approximate, lses = columns.component_keys(q, idx, weights, told)
    right_idx, right = largest(q, on.h_kv, r, on.scale)
    mean = mean + (value.float() - mean) / n
    yield idx[0].long(), right_idx
    yield taken, mean
    whole = torch.cat([prompt, late], 2)[0, :, :n].float().mT
    logits = right @ whole.gather(1, right_idx.unsqueeze(-1).expand(-1, -1, n))  # (h_kv, g, n)
    yield approximate[0], logits.flatten(0, 1)
    yield scores(keys)[0, :, 5:S], logits.sum(1)[:, 5:S]
    best, out = topk.best_keys(keys, k).contiguous(), on.normal(1, on.h, 1, on.d_h)
    covered, weight = columns.cover(best, approximate, lses, told), logits.softmax(-1)
    fetched = weight.gather(-1, best[0].int().long().unsqueeze(1).expand(-1, on.g, -1)).sum(-1)
    share = (fetched + weight[..., :5].sum(-1) + weight[..., S:].sum(-1)).view(on.h, 1, 1)
    yield covered[0], share.flatten()
    right_out = torch.lerp(mean[0].repeat_interleave(on.g, 0), out[0].float(), share)
    columns.blend(out, covered, told, on.h_kv)
    yield out[0], right_out


def bounded(on: Heads) -> Pairs:
    n, chunk, r = S, 8, min(4, on.d_h)
    keys, q = on.normal(1, on.h_kv, n, on.d_h), on.query()
    low, high = pages.page_bounds_ref(keys, chunk)
    right = torch.cat([high, low], -1)[0].mT.contiguous()  # (h_kv, 2 d_h, chunks)
    before = torch.cat([*reversed(pages.page_bounds_ref(keys[:, :, :-1], chunk))], -1)[0].mT.contiguous()
    told = chunks.table_of([chunks.Chunked(before, n, chunk, r)], q.device)
    found = chunks.chunk_keys(q, keys[:, :, -1:].contiguous(), told, on.scale)
    idx, weights = largest(q, on.h_kv, r, on.scale)
    down = q.view(on.h_kv, on.g, -1).float().sum(1).gather(-1, idx) <= 0
    rows = (idx + on.d_h * down).unsqueeze(-1).expand(-1, -1, right.shape[2])
    sizes = torch.full((right.shape[2],), float(chunk), device=q.device)
    sizes[-1] = n - (right.shape[2] - 1) * chunk
    logits = weights @ right.float().gather(1, rows)
    shares = (logits - (logits + sizes.log()).logsumexp(-1, keepdim=True)).exp().mean(1)
    yield before, right
    yield scores(found)[0], shares.repeat_interleave(chunk, -1)[:, :n]


def landmark(on: Heads) -> Pairs:
    """The best chunks' tokens, and keys made of factors, in the order of positions."""
    c, chunk, r, best = 30, 8, 24, 4
    marks, factors, basis = on.normal(on.h_kv, c, on.d_h), on.normal(c * chunk, r), on.normal(on.h_kv, r, on.d_h)
    q, none = on.query(), torch.zeros(on.h_kv, 0, dtype=torch.int64, device=on.device)
    row = landmarks.Chunks(marks, none, factors, basis, chunk, best)
    making = landmarks.KeyMaking([row], on.h, None, on.scale)
    making.take(q)
    (idx,), (keys,) = making.idx, making.keys
    logits = q.view(on.h_kv, on.g, -1).float() @ marks.float().mT
    most = (logits * on.scale).log_softmax(-1).amax(1).topk(best).indices.sort(-1).values
    right = (most.unsqueeze(-1) * chunk + torch.arange(chunk, device=q.device)).flatten(1)
    places = idx[0].sort(-1)
    yield places.values, right
    mine = keys[0].gather(1, places.indices.unsqueeze(-1).expand(-1, -1, on.d_h))
    yield mine, factors.float()[right] @ basis.float()


def bucket(on: Heads) -> Pairs:
    bits, n_tables = 3, 9
    q, keys = on.query(), on.normal(1, on.h_kv, S, on.d_h)
    middle = keys[0, :, 5:].float()
    centre, planes = middle.mean(1), on.wide(on.h_kv, on.d_h, n_tables * bits)
    centred = middle - centre.unsqueeze(1)
    asked = q.view(on.h_kv, on.g, on.d_h).float()

    def hashed(x: Tensor) -> Tensor:
        made = torch.empty(len(x), n_tables, x.shape[1], dtype=torch.int16)
        for own, to in zip(x.cpu() @ planes.cpu(), made, strict=True):
            collisions.pack_codes_ref(own, bits, to)
        return made

    held = collisions.build_tables_ref(hashed(centred), bits)
    norms, host = centred.norm(dim=-1).cpu(), keys.cpu()
    own = hashed(asked).mT.reshape(on.h, n_tables)
    idx, weights, n_read = collisions.find_twice_ref(
        own, asked.flatten(0, 1).cpu(), host, collisions.Hashed(held, centre.cpu(), norms, 5), 1e-4
    )
    tables = collisions.Tables(bits, held.tokens.pin_memory(), held.starts.pin_memory())
    row = buckets.Hidden(
        tables, planes, host.pin_memory(), centre, norms.pin_memory(), 5, on.integers(on.h)
    )  # fmt: skip
    (found,), entries = buckets.find_rows(q, [row], 1e-4)
    yield entries[0], n_read
    for head in range(on.h):
        here, there = found[0][0, head] >= 0, idx[0, head] >= 0
        yield found[0][0, head][here], idx[0, head][there]
        yield found[1][0, head][here], weights[0, head][there]


TRIALS: dict[str, Callable[[Heads], Pairs]] = {
    "step": step,
    "blocks": blocks,
    "codes": codes,
    "packing": packing,
    "soften": soften,
    "evict": evict,
    "topk": top,
    "pages": page,
    "clusters": cluster,
    "logits": products,
    "columns": components,
    "chunks": bounded,
    "landmarks": landmark,
    "buckets": bucket,
    "pq_scores": quantised,
    "column_sums": sums,
    "attend_kept": kept,
    "kmeans": means,
}
