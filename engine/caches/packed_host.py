"""A host tier of codes: each token is a row of bytes, which a step fetches alone and rebuilds.

A row holds the codes of K and V, then their scales and zero points in the cache's dtype, so that one fetch brings all
that makes numbers of it. Attention sees what is rebuilt; what the device holds (sinks, window) is exact.

Not here: what a row counts (`engine/caches/token_code.py`).
"""

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.caches.host import Host
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.passes.trace import Trace
from kvbench.kernels.packed.codes import Quantised, quantise_tokens, rebuild_tokens
from kvbench.kernels.rows.values import fetch_values


class PackedHost(Host):
    """All tokens of the prompt and generated ones, one after the other."""

    is_packed = True

    def __init__(self, prompt: Tensor, code: TokenCode, like: tuple[Tensor, Tensor], n_new: int) -> None:
        """`prompt` (h_kv, n, bytes) has the prompt's rows, never written to; K and V `like` have the cache's dtype."""
        h_kv, n, width = prompt.shape
        self.code, self.dtype, (self.d_h, self.d_v) = code, like[0].dtype, (x.shape[-1] for x in like)
        self.rows = torch.empty(h_kv, n + n_new, width, dtype=torch.uint8, pin_memory=prompt.is_pinned())
        self.rows[:, :n] = prompt
        self.positions, self.is_near, self.has_keys = None, False, True
        self.n_prompt, self.device = n, prompt.device

    def write(self, at: int, k_new: Tensor, v_new: Tensor) -> None:
        at += self.n_prompt
        self.rows[:, at : at + k_new.shape[2]] = packed_rows(k_new[0], v_new[0], self.code)

    def far_bytes(self, of_token: int, of_value: int) -> int:
        return self.code.token_bytes(self.d_h, self.d_v)

    def tokens(self, idx: Tensor, mask: Tensor | None, late: bool) -> Part:
        """The tokens at `idx` (1, h_kv or h, k), rebuilt in new memory; where there is none (-1) some token stands."""
        there = idx.clamp(min=0)
        h_kv, heads = len(self.rows), idx.shape[1]
        of_heads = there.reshape(1, h_kv, -1)  # query heads of a group one after the other
        rows = fetch_values(self.rows.unsqueeze(0), of_heads)
        k, v = (x.unflatten(1, (heads // h_kv, -1)).flatten(0, 1) for x in self.rebuilt(rows[0]))
        return Part(k.unsqueeze(0), v.unsqueeze(0), mask)

    def held(self, stop: int) -> list[tuple[Tensor, Tensor]]:
        k, v = self.rebuilt(self.rows[:, :stop])
        return [(k.unsqueeze(0), v.unsqueeze(0))]

    def keys(self, start: int, stop: int) -> Tensor:
        return self.rebuilt(self.rows[:, start:stop])[0]

    def rebuilt(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V (h_kv, n, d_h) of rows (h_kv, n, bytes)."""
        code = self.code
        keys, values = (side.codes for side in code.sides(self.d_h, self.d_v))
        of_key, of_value = (width // code.group * self.dtype.itemsize for width in (self.d_h, self.d_v))
        codes_k, codes_v, *numbers = rows.split([keys, values, of_key, of_key, of_value, of_value], -1)
        scale_k, zero_k, scale_v, zero_v = (x.contiguous().view(self.dtype) for x in numbers)
        k = rebuild_tokens(Quantised(codes_k, scale_k, zero_k), code.key_bits, code.group)
        return k, rebuild_tokens(Quantised(codes_v, scale_v, zero_v), code.value_bits, code.group)


def host_of(trace: Trace, layer: int, code: TokenCode | None, n_new: int) -> Host:
    """All tokens of a layer, as `code` has them (None: exact). Variants with one code share the prompt's rows."""
    trace.offload(layer)
    if code is None:
        return Host(*trace.host(layer), n_new)

    def pack() -> Tensor:
        rows = packed_rows(trace.keys(layer)[0], trace.values(layer)[0], code)
        return rows if trace.device == trace.host_device else rows.cpu().pin_memory()

    return PackedHost(
        trace.once(("host of codes", layer, code), pack), code, (trace.keys(layer), trace.values(layer)), n_new
    )


def packed_rows(k: Tensor, v: Tensor, code: TokenCode) -> Tensor:
    """Rows (h_kv, n, bytes) of K and V (h_kv, n, d_h)."""
    keys, values = quantise_tokens(k, code.key_bits, code.group), quantise_tokens(v, code.value_bits, code.group)
    numbers = (keys.scales, keys.zeros, values.scales, values.zeros)
    return torch.cat([keys.codes, values.codes, *(x.contiguous().view(torch.uint8) for x in numbers)], -1)
