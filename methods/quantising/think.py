"""ThinK (Xu et al., 2024): keys with fewer channels. Those that the prompt's last queries use least are not stored.

Every KV head drops its own channels, the same for all tokens of the prompt but the latest. All tokens are attended to;
values are whole, and so are keys that are generated.

Paper     arXiv:2407.21018, 2024; Xu, Yuhui; ThinK: Thinner Key Cache by Query-Driven Pruning
Symbols   paper lambda, code `keep_idx` (of what is dropped) = `share`, its complement; n = int(d_h * share).
Per step  moved: nothing; resident: h_kv * 2 * ((s - recent) * (d_h - n + d_v) + (recent + t) * (d_h + d_v)) bytes at
          step t, and h_kv * d_h / 8 for the mask; keys are read without their dropped channels.
Differs   - a KV head has one set, by its group's squared queries, as kvpress has it. `per: query_head` is the authors':
          each query head drops its own. They hold keys g times for it; here a KV head holds what any of its
          group keeps, which is mostly all, and a query head looks at its own.
          - kvpress sets channels of all tokens to 0 and saves nothing; `recent: 0` makes the same numbers.
          - with `memory` alone, n is the fewest that fit; values stay, so that half and the mask is the least.
          - equal scores: the lower channel goes. Logits are divided by sqrt(d_h) of the whole head, as in both codes.
          - after a method that drops, norms are those of the keys that it keeps, queries the prompt's.
Fails     where a question's queries lean on other channels than the context's last ones.
Figures   keep fewer bits, or made keys: #DB3ACD, hourglass, -.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, cast

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from kvbench.engine.caches.asked import Reordered
from kvbench.engine.caches.quantized import QuantizedCache
from kvbench.engine.declared import Is, Tokens, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.observe import LastQueries, Observation
from kvbench.engine.placement import Quantize
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.rows.append import NO_RING, Place
from kvbench.kernels.scratch import finer
from kvbench.kernels.topk import top_stable
from kvbench.methods.quantising.base import QuantisingMethod


def channel_scores(q: Tensor, k: Tensor, heads: int) -> Tensor:
    """Scores of channels between the queries (1, h, w, d_h) and keys (1, h_kv, n, d_h): (heads, d_h) float64.

    Mean squares of a head's queries times those of its keys; with h_kv heads, of a whole group's queries.
    """
    asked = finer(q[0]).square().unflatten(0, (heads, -1)).mean((1, 2))
    held = finer(k[0]).square().mean(1)
    return asked * held.repeat_interleave(heads // len(held), 0)


def kept_channels(scores: Tensor, n_dropped: int) -> Tensor:
    """The channels with the highest of scores (heads, d_h), ascending, the higher one first among equals."""
    d_h = scores.shape[1]
    return (d_h - 1 - top_stable(scores.flip(1), d_h - n_dropped)).sort(dim=-1).values


class ThinKCache(QuantizedCache):
    """Thin keys and whole values of the prompt's first tokens; the latest and all that come are whole."""

    def __init__(self, plan: "ThinK.Plan", k: Tensor, v: Tensor, n_new: int, q: Tensor) -> None:
        _, h_kv, self.n, d_h = k.shape
        self.plan, self.d_h, h = plan, d_h, q.shape[1]
        self.n_thin = n = max(0, self.n - plan.recent)
        heads = h if plan.per_query_head else h_kv
        kept = kept_channels(channel_scores(q[:, :, -plan.window :], k, heads), plan.n_dropped)
        looks = torch.zeros(h_kv, heads // h_kv, d_h, dtype=torch.bool, device=k.device)
        looks.flatten(0, 1).scatter_(1, kept, True)
        stored = looks.any(1)  # by any query head of the group
        self.width = int(stored.sum(1).max())
        self.channels = stored.byte().sort(dim=-1, descending=True, stable=True).indices[:, : self.width]
        at = self.channels[None, :, None].expand(1, -1, n, -1)
        # A row more, so that the last key too can be read as if it had all channels: what lies there meets zeros.
        self.thin = k.new_zeros(h_kv * n * self.width + d_h)
        self.thin[: h_kv * n * self.width].view(1, h_kv, n, self.width).copy_(k[:, :, :n].gather(3, at))
        self.v = v[:, :, :n].clone()
        room = self.n - n + n_new
        self.late_k, self.late_v = k.new_empty(1, h_kv, room, d_h), v.new_empty(1, h_kv, room, v.shape[3])
        self.late_k[:, :, : self.n - n], self.late_v[:, :, : self.n - n] = k[:, :, n:], v[:, :, n:]
        # Of each query head, which of its numbers meets a stored channel; d_h: none does.
        seen = looks.gather(2, self.channels.unsqueeze(1).expand(-1, looks.shape[1], -1))
        asks = self.channels.unsqueeze(1).where(seen, d_h).repeat_interleave(h // heads, 1).flatten(0, 1)
        self.asks = torch.nn.functional.pad(asks, (0, d_h - self.width), value=d_h).view(1, h, 1, d_h)

    @property
    def n_late(self) -> int:
        return self.n - self.n_thin

    def keys(self) -> Tensor:
        """Thin keys (1, h_kv, n, width)."""
        h_kv = len(self.channels)
        return self.thin[: h_kv * self.n_thin * self.width].view(1, h_kv, self.n_thin, self.width)

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        for late, new in ((self.late_k, k_new), (self.late_v, v_new)):
            late[:, :, self.n_late : self.n_late + 1] = new
        self.n += 1

    @classmethod
    def append_rows(
        cls, caches: Sequence[QuantizedCache], k_new: Sequence[Tensor], v_new: Sequence[Tensor]
    ) -> list[list[Place]]:
        places: list[list[Place]] = []
        for quantized in cast("Sequence[ThinKCache]", caches):
            places.append([(quantized.late_k, quantized.late_v, quantized.n_late)])
            quantized.n += 1
        return places

    def growing(self) -> Growing | None:
        place = self.late_k, self.late_v, self.n_late - 1, NO_RING
        return Growing((0, 1) if self.n_thin else (1,), (place,), self.late_k.shape[2] - self.n_late)

    def repeat(self) -> None:
        self.n += 1

    def parts(self) -> list[Part]:
        late = Part(self.late_k[:, :, : self.n_late], self.late_v[:, :, : self.n_late])
        if not self.n_thin:
            return [late]
        return [Part(self.wide(), self.v, asked=Reordered(self.asks)), late]

    def wide(self) -> Tensor:
        """Keys of d_h numbers, of which queries in the order of `asks` meet the stored ones first, and zeros then.

        LatestTokens overlap: nothing is copied.
        """
        h_kv, n, m, d_h = len(self.channels), self.n_thin, self.width, self.d_h
        return self.thin.as_strided((1, h_kv, n, d_h), (h_kv * n * m, n * m, m, 1))

    def part(self) -> Part:
        k, v = self.rebuilt()
        return Part(k, v)

    def rebuilt(self) -> tuple[Tensor, Tensor]:
        at = self.channels[None, :, None].expand(1, -1, self.n_thin, -1)
        first = self.late_k.new_zeros(*self.v.shape[:3], self.d_h).scatter_(3, at, self.keys())
        late = slice(0, self.n_late)
        return torch.cat([first, self.late_k[:, :, late]], 2), torch.cat([self.v, self.late_v[:, :, late]], 2)

    def pack_due(self) -> None:
        """Do nothing: no key is thinned later."""

    def counted_bytes(self) -> int:
        h_kv, d_v = len(self.channels), self.v.shape[3]
        return thin_bytes(h_kv, self.asks.shape[1], self.d_h, d_v, self.n_thin, self.n_late, self.width, self.plan)

    def tensors(self) -> list[Tensor]:
        return [self.thin, self.v, self.late_k, self.late_v]


def thin_bytes(
    h_kv: int, h: int, d_h: int, d_v: int, n_thin: int, n_late: int, width: int, plan: "ThinK.Plan"
) -> int:  # fmt: skip
    """A layer's keys and values, and a bit for each channel of a head that has channels of its own."""
    mask = (h if plan.per_query_head else h_kv) * d_h // 8 if n_thin else 0
    return h_kv * ELEMENT_BYTES * (n_thin * (width + d_v) + n_late * (d_h + d_v)) + mask


class ThinK(QuantisingMethod):
    title = "ThinK"
    no_latents = "drops channels of keys apart from values: here they are one"
    composes = True

    @dataclass(frozen=True)
    class Params:
        share: Annotated[Fraction, Ge(0), Lt(1), Is("the share of channels that are dropped, from 0 and below 1")]
        window: Window
        recent: Tokens
        per: Literal["kv_head", "query_head"]

    @dataclass(frozen=True)
    class Plan:
        n_dropped: int  # channels of a head
        window: int
        recent: int  # latest tokens whose keys are whole
        per_query_head: bool

    params: Params
    plan: Plan

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        n = int(shape.d_h * params.share)
        if params.share and n < 1:
            raise ConfigError(
                f"method.share={show(params.share)} of {shape.d_h} channels is none; use "
                f"{show(Fraction(1, shape.d_h))} or more, or 0"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return cls.dropping(params, int(shape.d_h * params.share))

    @classmethod
    def dropping(cls, params: Params, n: int) -> Plan:
        return ThinK.Plan(n, params.window, params.recent, params.per == "query_head")

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[Plan]:
        for n in range(shape.d_h):
            yield cls.dropping(params, n)

    @classmethod
    def code_bytes(cls, plan: Plan, n: int, shape: ModelShape) -> int:
        """Bytes at most: a group's query heads may keep channels of which none is another's."""
        n_late = min(n, plan.recent)
        width = min(shape.d_h, (shape.d_h - plan.n_dropped) * (shape.g if plan.per_query_head else 1))
        return thin_bytes(shape.h_kv, shape.h, shape.d_h, shape.d_v, n - n_late, n_late, width, plan)

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (LastQueries(params.window),)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return cls.title if request.memory is not None and request.memory_alone else cls.title_of(params)

    @classmethod
    def title_of(cls, params: Params) -> str:
        notes = ", per query head" if params.per == "query_head" else ""
        return f"{cls.title} {show(params.share)}{notes}"

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        return f"({report['dropped_channels']} channels less)"

    @classmethod
    def quantize(cls, params: Params, plan: Plan) -> Quantize:
        queries = LastQueries(params.window)
        return lambda k, v, n_new, seen: ThinKCache(plan, k, v, n_new, seen(queries))

    def report(self) -> dict[str, Any]:
        """How many channels go, which the budget may choose, and how many tokens are old enough to lose them."""
        thin = max(0, self.trace.s_prompt - self.plan.recent)
        return {"dropped_channels": self.plan.n_dropped, "thin_tokens": thin}
