"""MagicPIG (Chen et al., 2024): attend to a random sample of the keys, each weighed by its chance to be in it.

Keys are hashed into tables by random hyperplanes. A query fetches the keys that share a bucket with it in at least two
tables. Hyperplanes find a key the more often the smaller its angle to the query, and how often is known. So a found
key's logit is lowered by the logarithm of that chance, and the softmax over the sample estimates that over all keys.
Nothing is dropped.

Paper     arXiv:2410.16179, 2024; Chen, Zhuoming; MagicPIG: LSH Sampling for Efficient LLM Generation
Symbols   paper K, L, w = `bits`, `tables`, hyperplanes; u = `chance`; m = the prompt's tokens between sinks and window.
Per step  read to find: the query's bucket in each table, 4 bytes an entry, and 8 bytes for its bounds; moved: K and V
          of each query head's sample, 4 * d_h bytes each, a token of a KV head once; resident: sinks, window, generated
          tokens. The host holds, besides K and V, 4 * tables + 4 bytes a token and KV head, and 8 * 2^bits * tables
          a KV head for the bounds, which is as a rule more than K and V (`method_report` has it).
Differs   - a sample's size is random and differs by query head. `tables: auto` takes the largest number for which the
            prompt's last 32 queries find no more than the budget, and read no more than `comm`, in the mean: of each
            layer and prompt, at least 2. So the budget holds in the mean and is checked so, within 5 %; a sample is
            never trimmed, which would spoil the estimate.
          - sinks and window are inside the budget, the authors' outside. Generated tokens are not hashed and stay, as
            published.
          - one set of hyperplanes per KV head for all layers, drawn from `seed` alone, the same for every prompt.
          - the mean of the middle keys is taken from all keys before hashing, as in the authors' code. It shifts all
            logits of a head alike, so attention reads keys as they are. Cosines are clamped to -1 to 1.
          - on a GPU the tables stay in the host's memory, as in the authors' server, but the GPU reads its buckets
            there by itself and weighs what it finds, where theirs has the host do both.
Fails     where attention is on a few keys that point elsewhere than the query: they are found rarely and weigh much,
          up to 10,000 times. The layers that stay whole decide more than the tables. On latents it hashes whole rows:
          their angles are not those of a single head's keys.
Figures   retrieve single tokens: #02A574, thin diamond, -

Not here: buckets and weights (`kernels/rows/collisions.py`, a GPU's `kernels/rows/buckets.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.books.spans import span
from kvbench.engine.budget import Budget, BudgetRequest, find_bytes, key_bytes, show, token_bytes
from kvbench.engine.declared import Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries, Observation
from kvbench.engine.placement import Offloaded
from kvbench.engine.sampling.draws import seeded
from kvbench.engine.selection import Cost, FeedSelection, Found, Reads, Selection
from kvbench.engine.shapes import ModelShape
from kvbench.engine.turns.feed import Feed
from kvbench.kernels.fast import takes
from kvbench.kernels.rows.buckets import Hidden, find_rows
from kvbench.kernels.rows.collisions import (
    Hashed,
    Tables,
    build_tables,
    chance_of_two,
    find_twice,
    one_table,
    pack_codes,
)
from kvbench.kernels.scratch import at_once, finer, finest
from kvbench.methods.base import SelectiveAttention, overall_ratio

ENTRY_BYTES, BOUND_BYTES, NORM_BYTES = 4, 8, 4  # of a token in a table, of a bucket, of a token's norm
MOST_BITS = 15  # a code is a 16-bit whole number with a sign
FEWEST_TABLES = 2  # a find is two collisions
PUBLISHED_TABLES = 150  # with codes of 10 bits

LEAST = 1e-4  # added to a chance, so that no find weighs more than 10,000

CALIBRATION = LastQueries(32)

HASHED_AT_ONCE = 256  # vectors, whose products with 150 tables of 10 planes are 1.5 MB

BIN_BITS = 16  # of a float32 that are left out where numbers are counted: bins 0.8 % wide


@dataclass(frozen=True)
class Index:
    """A layer's index of a prompt: tables and norms on the host, pinned where a GPU reads them."""

    hashed: Hashed
    planes: Tensor  # (h_kv or 1, d_h, tables * bits)
    expected: float | None  # sample's size in the mean over the prompt's last queries; None: not asked
    near: tuple[Tensor, Tensor] | None  # hyperplanes and the keys' means (h_kv, d_h) where a GPU searches

    @property
    def n_tables(self) -> int:
        return self.hashed.tables.tokens.shape[1]


def draw_planes(h_kv: int, d_h: int, bits: int, tables: int, seed: int) -> Tensor:
    """Hyperplanes (h_kv, d_h, tables * bits), a table's next to each other; more tables begin with those of fewer."""
    draw = seeded(seed, bits, h_kv, d_h)
    found = [torch.randn(h_kv, d_h, bits, generator=draw) for _ in range(tables)]
    return torch.cat(found, -1)


def codes_of(x: Tensor, planes: Tensor, bits: int) -> Tensor:
    """Codes of vectors (heads, n, d_h) in every table, (heads, tables, n) int16."""
    heads, n, _ = x.shape
    codes = torch.empty(heads, planes.shape[-1] // bits, n, dtype=torch.int16, device=x.device)
    for head in range(heads):
        own = planes[head if len(planes) > 1 else 0]
        for first in range(0, n, at_once(HASHED_AT_ONCE, x.device)):
            rows = slice(first, first + at_once(HASHED_AT_ONCE, x.device))
            pack_codes(x[head, rows] @ own, bits, codes[head, :, rows])
    return codes


def cosines(q: Tensor, centred: Tensor, norms: Tensor) -> Tensor:
    """Cosines between queries (h, n_q, d_h) and centred keys (h_kv, m, d_h) with these norms: (h, n_q, m)."""
    grouped = q.unflatten(0, (len(centred), -1)).flatten(1, 2)  # (h_kv, g * n_q, d_h)
    inner = grouped @ centred.mT
    lengths = grouped.norm(dim=-1, keepdim=True) * norms.unsqueeze(1)
    return (inner / lengths.clamp(min=torch.finfo(torch.float32).tiny)).unflatten(1, (-1, q.shape[1])).flatten(0, 1)


def affordable_tables(one: Tensor, k: int, n_bytes: int | None) -> tuple[int, float]:
    """The most tables that find at most `k` tokens and read at most `n_bytes` in the mean, and what they find.

    `one` (h, n_q, m) is the chance of each key to meet each query in one table. At least two tables; where bytes are
    not limited, at most as many as are published.
    """
    (h, n_q, _), (means, counts) = one.shape, binned(one)
    entries = float(means @ counts) / n_q  # of a table's buckets, summed over query heads

    def found(tables: int) -> float:
        return float(chance_of_two(means, tables) @ counts) / (h * n_q)

    paid = PUBLISHED_TABLES if n_bytes is None else int(n_bytes / (h * BOUND_BYTES + ENTRY_BYTES * entries))
    low, high = FEWEST_TABLES, max(FEWEST_TABLES, paid)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if found(middle) <= k else (low, middle - 1)
    return low, found(low)


def binned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Means and counts of bins of many numbers from 0 to 1, float64.

    Sums of a function of them come out alike to some 1e-5, in a thousandth of the numbers.
    """
    n_bins = (0x3F800000 >> BIN_BITS) + 1  # up to the bits of 1
    sums, counts = (torch.zeros(n_bins, dtype=finest(x.device), device=x.device) for _ in "sc")
    for part in x:
        flat = part.flatten()
        bins = (flat.view(torch.int32) >> BIN_BITS).long()
        sums += torch.bincount(bins, finer(flat), minlength=n_bins)
        counts += torch.bincount(bins, minlength=n_bins)
    return sums / counts.clamp(min=1), counts


class MagicPIG(SelectiveAttention):
    title = "MagicPIG"
    unshared = "draws tokens, with weights that belong to the layer that drew them"
    eager = "fetches as many tokens as collide, which each step decides"
    no_growth = "samples tokens by tables whose size follows from the context's length"
    drops = False
    keeps_budget_in = "mean"
    pads = True

    @dataclass(frozen=True)
    class Params:
        bits: Annotated[int, Ge(1), Le(MOST_BITS)]
        tables: Annotated[int, Ge(FEWEST_TABLES)] | Literal["auto"]
        n_sink: Tokens
        window: Tokens
        dense_every: Annotated[int, Ge(0)]
        seed: Annotated[int, Ge(0)]

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided."""

        n_sink: int
        window: int  # the prompt's last tokens
        k: int  # tokens that a sample has in the mean
        find_bytes: int | None  # that a step may read to find them, in the mean; None: no limit

        def middle(self, s: int) -> int:
            """Tokens of a prompt that are hashed; with less than the whole budget there are at least two."""
            return s - self.n_sink - self.window

    params: Params
    plan: Plan
    indexes: dict[int, Index]
    n_found: int  # tokens of all samples so far
    found: dict[torch.device, Tensor]  # the same by query head of a GPU's samples, (h,) int32
    n_samples: int

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1 and request.comm == 0 and params.tables == "auto":
            raise ConfigError("comm=0 pays for no table; use 1/64 or more, or give method.tables")
        if len(dense_layers(params, shape.attention_layers)) == len(shape.attention_layers):
            raise ConfigError(
                f"method.dense_every={params.dense_every} leaves no layer of {shape.name} to compress; use 0, which "
                "leaves none whole, or a larger number"
            )

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return f"{cls.title} (budget in the mean)"

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        tokens, s = budget.tokens, budget.s_prompt
        n_sink, window = min(params.n_sink, tokens // 4), min(params.window, tokens // 4)
        paid = None if budget.finds_freely else find_bytes(shape, budget)
        plan = MagicPIG.Plan(n_sink, window, tokens - n_sink - window, paid)
        if params.tables != "auto" or budget.attends_all or paid is None:
            return plan
        # Where all keys were spread evenly over the buckets; real ones come in larger bits.
        entries = Fraction(plan.middle(s), 1 << params.bits)
        least = FEWEST_TABLES * shape.h * (BOUND_BYTES + ENTRY_BYTES * entries)
        if least > paid:
            enough = ceil(10_000 * least / key_bytes(shape, s)) / 10_000
            raise ConfigError(
                f"comm={show(budget.comm)} does not pay for {FEWEST_TABLES} tables of {params.bits} bits for a prompt "
                f"of {s} tokens; use comm={enough} or more, or more method.bits"
            )
        return plan

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        return held(
            budget,
            shape,
            plan.n_sink + plan.window,
            fetched=plan.k * shape.g,
            n_whole=len(cls.whole_layers(params, shape)),
        )

    @classmethod
    def whole_layers(cls, params: Params, shape: ModelShape) -> Sequence[int]:
        return dense_layers(params, shape.attention_layers)

    def setup(self) -> None:
        self.indexes, self.found, self.n_found, self.n_samples = {}, {}, 0, 0

    # While the prompt is read.

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (CALIBRATION,) if params.tables == "auto" else ()

    def arrange(self, layer: int) -> Offloaded:
        plan, params = self.plan, self.params
        asked = (plan.k, plan.find_bytes) if params.tables == "auto" else params.tables
        key = ("MagicPIG", layer, plan.n_sink, plan.window, params.bits, asked, params.seed)
        with span("hash", layer):
            self.indexes[layer] = self.trace.once(key, lambda: self.hashed(layer))
        return Offloaded(plan.n_sink, plan.window, index_bytes=self.index_bytes(layer))

    def planes(self, tables: int) -> Tensor:
        shape, params = self.trace.shape, self.params
        return self.trace.once(
            ("MagicPIG's hyperplanes", params.bits, tables, params.seed),
            lambda: draw_planes(shape.h_kv, shape.d_h, params.bits, tables, params.seed),
        )

    def hashed(self, layer: int) -> Index:
        """The layer's tables."""
        trace, plan, bits = self.trace, self.plan, self.params.bits
        keys = trace.keys(layer)[0, :, plan.n_sink : trace.s_prompt - plan.window].float()  # (h_kv, m, d_h)
        means = keys.mean(1)
        centred = keys - means.unsqueeze(1)
        norms = centred.norm(dim=-1)
        expected, tables = None, self.params.tables
        if isinstance(tables, str):
            one = one_table(cosines(trace.observed(CALIBRATION, layer)[0].float(), centred, norms), bits)
            tables, expected = affordable_tables(one, plan.k, plan.find_bytes)
        planes, device = self.planes(tables), keys.device
        near_planes = planes if planes.device == device else trace.once(
            ("MagicPIG's hyperplanes", bits, tables, self.params.seed, device), lambda: planes.to(device).contiguous()
        )  # fmt: skip
        built, norms = build_tables(codes_of(centred, near_planes, bits).cpu(), bits), norms.cpu()
        if not takes("buckets", device):
            return Index(Hashed(built, means.cpu(), norms, plan.n_sink), planes, expected, None)
        built = Tables(bits, built.tokens.pin_memory(), built.starts.pin_memory())
        return Index(
            Hashed(built, means.cpu(), norms.pin_memory(), plan.n_sink), planes, expected, (near_planes, means)
        )

    def index_bytes(self, layer: int) -> int:
        """Bytes that the layer's tables, their bounds and the norms take in the host's memory, as counted."""
        index, shape = self.indexes[layer], self.trace.shape
        of_token = ENTRY_BYTES * index.n_tables + NORM_BYTES
        return shape.h_kv * (
            self.plan.middle(self.trace.s_prompt) * of_token + BOUND_BYTES * index.n_tables * (1 << self.params.bits)
        )

    # A decode step.

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        if not takes("buckets", q.device):
            return super().search(rows, layer, q)
        h = q.shape[1]
        selections: list[Found] = [None] * len(rows)
        searched = [i for i, row in enumerate(rows) if row.plan.middle(row.trace.s_prompt)]
        if not searched:
            return selections
        hidden = [rows[i].hidden(layer, h) for i in searched]
        found, entries = find_rows(q if len(searched) == len(rows) else q[searched], hidden, LEAST)
        for at, i in enumerate(searched):
            row, (idx, weights) = rows[i], found[at]
            cost = Cost(
                moved_bytes=BOUND_BYTES * h * row.indexes[layer].n_tables, reads=Reads(entries[at], ENTRY_BYTES)
            )
            selections[i] = Selection(idx, cost, bias=weights)
            row.n_samples += h
        return selections

    def hidden(self, layer: int, h: int) -> Hidden:
        """The part of the layer's index that a GPU searches with."""
        index, host = self.indexes[layer], self.store[layer].host
        assert index.near is not None, "the layer's tables are not where a GPU reads them"
        planes, means = index.near
        if means.device not in self.found:
            self.found[means.device] = torch.zeros(h, dtype=torch.int32, device=means.device)
        tables, _, norms, first = index.hashed
        return Hidden(tables, planes, host.k, means, norms, first, self.found[means.device])

    def select(self, layer: int, q: Tensor) -> Selection:
        """Each query head's sample, with its log-weights; the host finds it."""
        index, at = self.indexes[layer], self.store[layer]
        h_kv, (h, d_h) = self.trace.shape.h_kv, q.shape[1::2]
        queries = q[0, :, 0].float().cpu()
        codes = codes_of(queries.view(h_kv, h // h_kv, d_h), index.planes, self.params.bits).mT.reshape(h, -1)
        idx, weights, n_entries = find_twice(codes, queries, at.host.k.cpu(), index.hashed, LEAST)
        cost = Cost(moved_bytes=ENTRY_BYTES * int(n_entries.sum()) + BOUND_BYTES * h * index.n_tables)
        self.n_found += int((idx >= 0).sum())
        self.n_samples += h
        if not idx.shape[-1]:
            return Selection(cost=cost)
        return Selection(idx.to(q.device), cost, bias=weights.to(q.device))

    # A feed.

    def selects_feeds(self, layer: int) -> bool:
        return True

    def select_feed(self, layer: int, feed: Feed) -> FeedSelection:
        """The heads of all queries, KV head by KV head, are searched as if they were those of one."""
        index, host, (h, m, d_h) = self.indexes[layer], self.store[layer].host, feed.q.shape[1:]
        h_kv = self.trace.shape.h_kv
        grouped = feed.q[0].float().reshape(h_kv, -1, d_h)  # (h_kv, g * m, d_h)
        codes = codes_of(grouped, index.planes, self.params.bits).mT.reshape(h * m, -1)
        idx, weights, n_entries = find_twice(codes, grouped.flatten(0, 1), host.k, index.hashed, LEAST)
        self.n_found += int((idx >= 0).sum())
        self.n_samples += h * m
        read = ENTRY_BYTES * n_entries.view(h, m).sum(0) + BOUND_BYTES * h * index.n_tables
        costs = [Cost(moved_bytes=n) for n in read.tolist()]
        idx, weights = (x.view(h, m, x.shape[-1]).transpose(0, 1).contiguous() for x in (idx, weights))
        return FeedSelection(idx, costs, weights)

    def report(self) -> dict[str, Any]:
        indexes, n_layers = list(self.indexes.values()), len(self.indexes)
        report: dict[str, Any] = {
            "budget_holds_in": "mean",
            "tables": [index.n_tables for index in indexes],
            "overall_ratio": overall_ratio(self, self.budget.tokens / self.budget.s_prompt),
            "index_host_bytes": sum(self.index_bytes(layer) for layer in self.indexes),
            "cache_host_bytes": token_bytes(self.trace.shape) * self.trace.s_prompt * n_layers,
        }
        expected = [index.expected for index in indexes if index.expected is not None]
        if expected:
            report["sample_expected"] = sum(expected) / n_layers
        if self.n_samples:
            report["sample_mean"] = (self.n_found + sum(int(x.sum()) for x in self.found.values())) / self.n_samples
        return report


def dense_layers(params: MagicPIG.Params, layers: Sequence[int]) -> list[int]:
    """Layers that stay whole: the first, and every so many layers another one."""
    return [layer for layer in layers if params.dense_every and layer % params.dense_every == 0]
