"""KVarN (Müller et al., 2026): divide tiles of tokens by a scale per token and one per channel until all vary alike.

Keys and values are turned along their channels by a Hadamard matrix, which spreads large channels over all. A tile of
them is then divided by both scales in turns, so that no token is coded by the range of another: errors of a token's
size are those that add up over a long answer. What is left is rounded to the nearest code, keys per channel, values per
token, and the scale and zero of a range take in one of the two scales. Nothing is calibrated.

Paper     arXiv:2606.03458, 2026; Müller; KVarN: Variance-Normalized KV-Cache Quantization Mitigates Error Accumulation
          in Reasoning Tasks
Symbols   code: group = tile = page, sink; the scale of columns = `others`.
Per step  moved: nothing; resident: h_kv * (tiles * (d_h * g * (bK + bV) / 8 + 2 * (2 * d_h + g) + 2 * (d_h + 2 * g)) +
          4 * d_h * exact) bytes: tiles are the whole blocks of g tokens behind the sink, and exact ones the others; all
          of it is read. The matrix is a constant.
Differs   follows the authors' code, of which the paper's abstract was at hand: 8 rounds, 4 and 2 bits, a sink of one
          block; `kvarn_paper` has 16 rounds and 2 bits. Numbers beyond float16's are held at its largest. Layers with a
          sliding window stay whole, and the code's own path for latents is not here. With `memory` the setting is the
          first of a fixed list that fits. On a CPU attention reads codes in the frame that they lie in, elsewhere keys
          and values are rebuilt for the length of a layer's attention.
Fails     short prompts: sink and unfinished block are exact, and a prompt below two blocks is as large as ever.
Figures   keep fewer bits, or made keys: #04787E, hourglass, -
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import exp
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.engine.attend import Part, Partial
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest
from kvbench.engine.caches.quantized import QuantizedCache
from kvbench.engine.declared import Count, Index
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Quantize
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.packed.attend import Packed, Side
from kvbench.kernels.packed.codes import BY_TABLE, Quantised, pack, unpack
from kvbench.methods.quantising import codebooks
from kvbench.methods.quantising.base import QuantisingMethod
from kvbench.methods.quantising.kivi import bits_words

# (key bits, value bits, group) in the order in which a byte budget tries them: a short prompt may be smaller in small
# tiles, which leave a smaller sink and tail.
SETTINGS = ((4, 4, 128), (4, 4, 64), (4, 2, 128), (4, 2, 64), (2, 2, 128), (2, 2, 64))

NUMBER_BYTES = 2  # of a scale or a zero, float16
LARGEST = 65504.0  # of float16
STD = 1e-3, 1e3  # by which a row or column is divided in one round
SCALE = exp(-0.3), exp(10)  # of a row or column, after all of them
LEAST_STEP = 1e-10  # between two codes
LEAST_SPREAD = 1e-8  # of the row that varies least, which others are compared with
BLOCKS = 8  # of tokens that are packed at once: what float copies need
AT_ONCE = {"cpu": 1}  # tiles that are balanced at once, which stay in a CPU's cache; elsewhere all of those blocks


class Tiles(NamedTuple):
    """Codes of tiles, and what makes numbers of them: (code * scale + zero) of a row times another of the column.

    Rows of keys are channels and their columns tokens; of values it is the other way round.
    """

    codes: Tensor  # (h_kv, tiles, rows, columns * b / 8) uint8, packed
    scales: Tensor  # (h_kv, tiles, rows) float16
    zeros: Tensor
    others: Tensor  # (h_kv, tiles, columns) float16


@cache
def rotation_of(d_h: int, device: torch.device) -> Tensor:
    return codebooks.hadamard(d_h).to(device)


def halves(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).half()


def deviation(x: Tensor, dim: int) -> Tensor:
    """The standard deviation of rows or columns; on a CPU torch's own, to the last bit, takes four times as long."""
    if x.device.type != "cpu":
        return x.std(dim, keepdim=True)
    away = x.double()
    away = away - away.mean(dim, keepdim=True)
    return (away.square().sum(dim, keepdim=True) / (x.shape[dim] - 1)).sqrt().float()


def uneven(columns: Tensor, rows: Tensor) -> Tensor:
    """How unevenly tiles vary: the largest deviation over the smallest, of columns and of rows; (…, 1, 1)."""
    a, b = (x.amax((-2, -1), True) / x.amin((-2, -1), True).clamp(min=LEAST_SPREAD) for x in (columns, rows))
    return a + b


def balanced(x: Tensor, n_rounds: int) -> tuple[Tensor, Tensor]:
    """Scales of columns (…, 1, columns) and rows (…, rows, 1) of tiles x (…, rows, columns), of the best round."""
    columns, rows = deviation(x, -2), deviation(x, -1)
    of_columns, of_rows = torch.ones_like(columns), torch.ones_like(rows)
    least, best = uneven(columns, rows), (of_columns, of_rows)
    for _ in range(n_rounds):
        of_columns = (of_columns * columns.clamp(*STD)).clamp(*SCALE)
        of_rows = (of_rows * deviation(x / of_columns / of_rows, -1).clamp(*STD)).clamp(*SCALE)
        now = x / of_columns / of_rows
        columns, rows = deviation(now, -2), deviation(now, -1)
        is_better = (found := uneven(columns, rows)) <= least
        least = torch.where(is_better, found, least)
        best = torch.where(is_better, of_columns, best[0]), torch.where(is_better, of_rows, best[1])
    return best


def coded(x: Tensor, bits: int, n_rounds: int) -> Tiles:
    """Tiles x (…, rows, columns) float32 as codes."""
    of_columns, of_rows = balanced(x, n_rounds)
    even = x / of_columns / of_rows
    low, high = even.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=LEAST_STEP)
    codes = ((even - low) / step).round().clamp(0, 2**bits - 1).to(torch.uint8)
    scales, zeros = (halves(of_rows * y).squeeze(-1) for y in (step, low))
    return Tiles(pack(codes, bits), scales, zeros, halves(of_columns).squeeze(-2))


def rebuilt(tiles: Tiles, bits: int) -> Tensor:
    """Numbers of tiles, (h_kv, tiles, rows, columns) float32."""
    codes = unpack(tiles.codes, bits, tiles.others.shape[-1])
    scales, zeros = (x.float().unsqueeze(-1) for x in (tiles.scales, tiles.zeros))
    return (codes * scales + zeros) * tiles.others.float().unsqueeze(-2)


def product(x: Tensor, tiles: Tiles, bits: int) -> Tensor:
    """x (tiles, g, rows) times the tiles of one head, (tiles, g, columns), without their numbers."""
    codes, scales, zeros, others = tiles
    scaled = x * scales.float().unsqueeze(1)
    # Codes that lie in one byte are columns next to each other.
    places = [scaled @ ((codes >> shift) & (2**bits - 1)).float() for shift in range(0, 8, bits)]
    found = torch.stack(places, -1).flatten(-2) + x @ zeros.float().unsqueeze(-1)
    return found * others.float().unsqueeze(1)


class KVarNCache(QuantizedCache):
    """The sink, tiles of whole blocks, and exact tokens of the block that is not full yet."""

    def __init__(self, plan: "KVarN.Plan", k: Tensor, v: Tensor, n_new: int) -> None:
        self.plan, self.nothing = plan, k[:, :, :0]
        self.n = self.n_prompt = k.shape[2]
        self.h_kv, self.d_h = k.shape[1], k.shape[3]
        self.turn = rotation_of(self.d_h, k.device)
        n, end = plan.tiles(self.n), plan.tiles(self.n + n_new)
        self.keys = self.room(end, self.d_h, plan.group, plan.key_bits)
        self.values = self.room(end, plan.group, self.d_h, plan.value_bits)
        self.n_tiles = 0
        for blocks in range(0, n, BLOCKS):
            first, last = (plan.sink + at * plan.group for at in (blocks, min(blocks + BLOCKS, n)))
            self.store(k[0, :, first:last], v[0, :, first:last])
        room = plan.sink + plan.group if end > n else plan.exact(self.n + n_new)
        self.late = tuple(x.new_empty(1, self.h_kv, room, self.d_h) for x in (k, v))
        for late, x in zip(self.late, (k, v), strict=True):
            first = min(plan.sink, self.n)
            late[:, :, :first] = x[:, :, :first]
            late[:, :, first : self.n_exact] = x[:, :, first + n * plan.group :]

    def room(self, n: int, rows: int, columns: int, bits: int) -> Tiles:
        shape = self.h_kv, n
        codes = torch.empty(*shape, rows, columns * bits // 8, dtype=torch.uint8, device=self.turn.device)
        numbers = (codes.new_empty(*shape, width, dtype=torch.float16) for width in (rows, rows, columns))
        return Tiles(codes, *numbers)

    def store(self, k: Tensor, v: Tensor) -> None:
        """Pack the next blocks of tokens, (h_kv, tokens, d_h)."""
        plan = self.plan
        k, v = (halves(x.float() @ self.turn).float().unflatten(1, (-1, plan.group)) for x in (k, v))
        end = self.n_tiles + k.shape[1]
        both = (self.keys, k.mT.contiguous(), plan.key_bits), (self.values, v, plan.value_bits)
        for held, x, bits in both:
            some = x.flatten(0, 1).split(AT_ONCE.get(x.device.type, x.shape[0] * x.shape[1]))
            made = zip(*(coded(tiles, bits, plan.iterations) for tiles in some), strict=True)
            for target, new in zip(held, made, strict=True):
                target[:, self.n_tiles : end] = torch.cat(new).unflatten(0, x.shape[:2])
        self.n_tiles = end

    @property
    def n_exact(self) -> int:
        return self.n - self.n_tiles * self.plan.group

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        for late, new in zip(self.late, (k_new, v_new), strict=True):
            late[:, :, self.n_exact : self.n_exact + 1] = new
        self.n += 1

    def pack_due(self) -> None:
        plan = self.plan
        if plan.tiles(self.n) > self.n_tiles:
            k, v = (late[0, :, plan.sink :] for late in self.late)
            self.store(k, v)

    def filled(self) -> tuple[Tiles, Tiles]:
        keys, values = (Tiles(*(x[:, : self.n_tiles] for x in tiles)) for tiles in (self.keys, self.values))
        return keys, values

    def rebuilt_keys(self) -> Tensor:
        """What attention sees of coded tokens, (h_kv, tokens, d_h) float32."""
        return rebuilt(self.filled()[0], self.plan.key_bits).mT.flatten(1, 2) @ self.turn

    def rebuilt_values(self) -> Tensor:
        return rebuilt(self.filled()[1], self.plan.value_bits).flatten(1, 2) @ self.turn

    def attended(self, q: Tensor, softmax: Softmax) -> Partial:
        """Attention to coded tokens in their own frame, head by head: what is made of codes stays in a CPU's cache."""
        plan = self.plan
        turned = (q.float() @ self.turn).unflatten(1, (self.h_kv, -1)).squeeze(-2)[0]  # (h_kv, g, d_h)
        outs, sums = [], []
        for head, asks in enumerate(turned):
            keys, values = (Tiles(*(x[head] for x in tiles)) for tiles in self.filled())
            logits = softmax.bent(product(asks.expand(self.n_tiles, -1, -1), keys, plan.key_bits))
            sums.append(logits.transpose(0, 1).flatten(1).logsumexp(-1))
            weights = (logits - sums[-1].unsqueeze(-1)).exp()  # (tiles, g, tokens)
            outs.append(product(weights, values, plan.value_bits).sum(0))
        return (torch.stack(outs) @ self.turn).to(q.dtype).unsqueeze(0), torch.stack(sums).unsqueeze(0)

    def part(self) -> Part:
        """The coded tokens."""
        plan, n = self.plan, self.n_tiles * self.plan.group
        keys, values = (
            Side(BY_TABLE, bits, plan.group, n, Quantised(*tiles[:3]), self.nothing, rebuild=rebuild)
            for tiles, bits, rebuild in (
                (self.keys, plan.key_bits, self.rebuilt_keys), (self.values, plan.value_bits, self.rebuilt_values),
            )
        )  # fmt: skip
        return Part(self.nothing, self.nothing, packed=Packed(keys, values, n), by_codes=self.attended)

    def parts(self) -> list[Part]:
        """All tokens in their order; without tiles cut where full attention is, whose answer they give bit for bit."""
        cut = self.plan.sink if self.n_tiles else self.n_prompt
        every = self.exact(0, cut), self.part(), self.exact(cut, self.n_exact)
        return [part for part in every if part.n_tokens()]

    def exact(self, first: int, last: int) -> Part:
        k, v = (late[:, :, first:last] for late in self.late)
        return Part(k, v)

    def rebuilt(self) -> tuple[Tensor, Tensor]:
        parts = [part.gathered() for part in self.parts()]
        return torch.cat([part.k for part in parts], 2), torch.cat([part.v for part in parts], 2)

    def counted_bytes(self) -> int:
        return self.h_kv * (self.n_tiles * self.plan.tile_bytes(self.d_h) + self.n_exact * token_bytes(self.d_h))

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, *self.late]


class KVarN(QuantisingMethod):
    title = "KVarN"
    composes = True
    no_widths = "turns both by one matrix"
    no_latents = "packs keys and values apart: here they are one"

    @dataclass(frozen=True)
    class Params:
        key_bits: Literal[2, 4]
        value_bits: Literal[2, 4]
        group: Literal[64, 128]
        sink: Index | Literal["group"]
        iterations: Count

        def __post_init__(self) -> None:
            if self.sink != "group" and self.sink % self.group:
                raise ConfigError(
                    f"method.sink={self.sink} is no multiple of method.group={self.group}, whose blocks are packed; "
                    f"use {-(-self.sink // self.group) * self.group}, or group for one block"
                )

    @dataclass(frozen=True)
    class Plan:
        key_bits: int
        value_bits: int
        group: int
        sink: int
        iterations: int

        def tiles(self, n: int) -> int:
            """How many blocks of the first `n` tokens are coded."""
            return max(0, (n - self.sink) // self.group)

        def exact(self, n: int) -> int:
            return n - self.tiles(n) * self.group

        def tile_bytes(self, d_h: int) -> int:
            codes = d_h * self.group * (self.key_bits + self.value_bits) // 8
            return codes + 3 * NUMBER_BYTES * (d_h + self.group)

    params: Params
    plan: Plan

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        if shape.d_h & (shape.d_h - 1):
            raise ConfigError(
                f"{cls.title} turns heads by a Hadamard matrix, which needs a power of two, and {shape.name} has "
                f"{shape.d_h} dimensions; use kivi in its place"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return plan_of(params, params.key_bits, params.value_bits, params.group)

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[Plan]:
        for setting in SETTINGS:
            plan = plan_of(params, *setting)
            if plan.sink % plan.group == 0:
                yield plan

    @classmethod
    def code_bytes(cls, plan: Plan, n: int, shape: ModelShape) -> int:
        return shape.h_kv * (plan.tiles(n) * plan.tile_bytes(shape.d_h) + plan.exact(n) * token_bytes(shape.d_h))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return cls.title if request.memory_alone else cls.title_of(params)

    @classmethod
    def title_of(cls, params: Params) -> str:
        return f"{cls.title} {bits_words(params.key_bits, params.value_bits)}"

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        return bits_words(report["key_bits"], report["value_bits"])

    @classmethod
    def quantize(cls, params: Params, plan: Plan) -> Quantize:
        return lambda k, v, n_new, _: KVarNCache(plan, k, v, n_new)

    def report(self) -> dict[str, Any]:
        plan = self.plan
        return {"key_bits": plan.key_bits, "value_bits": plan.value_bits, "group": plan.group, "sink": plan.sink}


def plan_of(params: KVarN.Params, key_bits: int, value_bits: int, group: int) -> KVarN.Plan:
    sink = group if params.sink == "group" else params.sink
    return KVarN.Plan(key_bits, value_bits, group, sink, params.iterations)


def token_bytes(d_h: int) -> int:
    """Bytes of an exact token of a KV head."""
    return 2 * d_h * ELEMENT_BYTES
