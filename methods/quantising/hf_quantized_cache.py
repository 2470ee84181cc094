"""transformers' QuantizedCache (5.23, backend quanto), the ecosystem's baseline: named after KIVI, and another method.

The whole prompt is packed at once, keys as well as values per token. Generated tokens stay exact until `residual` of
them are there; then everything, the prompt's rebuilt tokens included, is packed anew.

Symbols   nbits, q_group_size, residual_length = `bits`, `group`, `residual`.
Per step  moved: nothing; resident: 2 * h_kv * d_h * (n * (b / 8 + 4 / g) + 2 * r) bytes, with r exact tokens, 0 behind
          the prompt and at most `residual` - 1.
Differs   groups are of one token and head; transformers' lie one behind the other in memory, which is the same where g
          divides d_h. Codes are attended to packed, where transformers rebuilds the prefix at every step: its latency
          is not measured here. Shifts are counted at 16 bits.
Fails     no prompt token is exact, and keys with a few large channels suffer at 2 bits.
"""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from engine.attend import Part
from engine.caches.coded import Codec
from engine.store import Coder
from kernels.packed.attend import Packed, Side
from kernels.packed.codes import BY_TOKEN, Quantised, quantise_tokens
from kernels.rows.append import Place
from methods.quantising.base import QuantisingMethod
from methods.rules.quantising.hf_quantized_cache import HFQuantizedCacheRules
from methods.rules.quantising.kivi import packed_bytes


class WholeCodec(Codec):
    """A prefix that is packed as a whole, and exact tokens behind it."""

    def __init__(self, plan: HFQuantizedCacheRules.Plan, k: Tensor, v: Tensor, n_new: int) -> None:
        self.plan, self.n, self.nothing = plan, k.shape[2], k[:, :, :0]
        self.h_kv, self.d_h = k.shape[1], k.shape[3]
        _, heads, _, d_h = k.shape
        self.late = k.new_empty(2, 1, heads, min(plan.residual, n_new), d_h)
        self.pack(k, v)

    def pack(self, k: Tensor, v: Tensor) -> None:
        """Pack these, which are all tokens."""
        self.keys, self.values = (self.packed(x[0]) for x in (k, v))
        self.n_packed = k.shape[2]

    def packed(self, x: Tensor) -> Quantised:
        return quantise_tokens(x, self.plan.bits, self.plan.group)

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        at = self.n - self.n_packed
        self.late[0, :, :, at : at + 1] = k_new
        self.late[1, :, :, at : at + 1] = v_new
        self.n += 1

    @classmethod
    def append_rows(
        cls, codecs: Sequence[Codec], k_new: Sequence[Tensor], v_new: Sequence[Tensor]
    ) -> list[list[Place]]:
        return [codec.places() for codec in cast("Sequence[WholeCodec]", codecs)]

    def places(self) -> list[Place]:
        """Where the current token is to be written."""
        self.n += 1
        return [(self.late[0], self.late[1], self.n - 1 - self.n_packed)]

    def sides(self) -> tuple[Side, Side]:
        plan = self.plan
        return (
            Side(BY_TOKEN, plan.bits, plan.group, self.n_packed, self.keys, self.late[0]),
            Side(BY_TOKEN, plan.bits, plan.group, self.n_packed, self.values, self.late[1]),
        )

    def part(self) -> Part:
        return Part(self.nothing, self.nothing, packed=Packed(*self.sides(), self.n))

    def settle(self) -> None:
        if self.n - self.n_packed >= self.plan.residual:
            self.pack(*(side.rebuilt(self.n) for side in self.sides()))

    def counted_bytes(self) -> int:
        exact = self.n - self.n_packed
        return 2 * packed_bytes(self.h_kv, self.d_h, self.n_packed, exact, self.plan.bits, self.plan.group)

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, self.late]


class HFQuantizedCache(HFQuantizedCacheRules, QuantisingMethod):
    params: HFQuantizedCacheRules.Params
    plan: HFQuantizedCacheRules.Plan

    @classmethod
    def coder(cls, params: HFQuantizedCacheRules.Params, plan: HFQuantizedCacheRules.Plan) -> Coder:
        return lambda k, v, n_new: WholeCodec(plan, k, v, n_new)

    def report(self) -> dict[str, Any]:
        return {} if self.variant.is_full else {"bits": self.plan.bits, "group": self.plan.group}
