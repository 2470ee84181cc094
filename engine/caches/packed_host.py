"""A host tier of codes: each token is a row of bytes, which a step fetches alone and rebuilds.

A row holds the codes of K and V, then their scales, so that one fetch brings all that makes numbers of it but what the
tokens of a layer share, which stays on the device. Attention sees what is rebuilt; what the device holds (sinks,
window) is exact.

Not here: what a row counts (`engine/caches/token_code.py`).
"""

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.caches.host import Host
from kvbench.engine.caches.token_code import Codec, TokenCode
from kvbench.engine.passes.trace import Trace
from kvbench.kernels.rows.values import fetch_values


class PackedHost(Host):
    """All tokens of the prompt and generated ones, one after the other."""

    is_packed = True

    def __init__(self, prompt: Tensor, code: TokenCode, codec: Codec, widths: tuple[int, int], n_new: int) -> None:
        """`prompt` (h_kv, n, bytes) has the prompt's rows, never written to."""
        h_kv, n, width = prompt.shape
        self.code, self.codec, self.widths = code, codec, widths
        self.rows = torch.empty(h_kv, n + n_new, width, dtype=torch.uint8, pin_memory=prompt.is_pinned())
        self.rows[:, :n] = prompt
        self.positions, self.is_near, self.has_keys = None, False, True
        self.n_prompt, self.device = n, prompt.device

    def write(self, at: int, k_new: Tensor, v_new: Tensor) -> None:
        at += self.n_prompt
        self.rows[:, at : at + k_new.shape[2]] = self.codec.rows(k_new[0], v_new[0])

    def far_bytes(self, of_token: int, of_value: int) -> int:
        return self.code.token_bytes(*self.widths)

    def near_bytes(self) -> int:
        return self.code.shared_bytes(len(self.rows))

    def tokens(self, idx: Tensor, mask: Tensor | None, late: bool) -> Part:
        """The tokens at `idx` (1, h_kv or h, k), rebuilt in new memory; where there is none (-1) some token stands."""
        there = idx.clamp(min=0)
        h_kv, heads = len(self.rows), idx.shape[1]
        of_heads = there.reshape(1, h_kv, -1)  # query heads of a group one after the other
        rows = fetch_values(self.rows.unsqueeze(0), of_heads)
        k, v = (x.unflatten(1, (heads // h_kv, -1)).flatten(0, 1) for x in self.codec.rebuilt(rows[0]))
        return Part(k.unsqueeze(0), v.unsqueeze(0), mask)

    def held(self, stop: int) -> list[tuple[Tensor, Tensor]]:
        k, v = self.codec.rebuilt(self.rows[:, :stop])
        return [(k.unsqueeze(0), v.unsqueeze(0))]

    def keys(self, start: int, stop: int) -> Tensor:
        return self.codec.rebuilt(self.rows[:, start:stop])[0]


def joined(*each: Tensor) -> Tensor:
    """Rows (h_kv, n, bytes) of what they hold, one after the other."""
    return torch.cat([x.contiguous().view(torch.uint8) for x in each], -1)


def host_of(trace: Trace, layer: int, code: TokenCode | None, n_new: int) -> Host:
    """All tokens of a layer, as `code` has them (None: exact). Variants with one code share the prompt's rows."""
    trace.offload(layer)
    if code is None:
        return Host(*trace.host(layer), n_new)
    k, v = trace.keys(layer)[0], trace.values(layer)[0]

    def pack() -> tuple[Tensor, Codec]:
        codec = code.codec(k, v, lambda what: trace.observed(what, layer))
        rows = codec.rows(k, v)
        return rows if trace.device == trace.host_device else rows.cpu().pin_memory(), codec

    rows, codec = trace.once(("host of codes", layer, code), pack)
    return PackedHost(rows, code, codec, (k.shape[-1], v.shape[-1]), n_new)
