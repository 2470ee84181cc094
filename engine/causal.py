"""Attention of every prompt token over itself and its past, or over the last `window` tokens of it.

Each call returns the output and every query's log-sum-exp, which all these kernels compute anyway: observations that
weigh all queries need no second pass. With a window, blocks of queries meet the keys that their windows reach, all
blocks in one call, so that no mask is longer than a block and its window, on any device.

Not here: a sparse pass (`engine/sparse/`), attention of a decode step (`engine/attend.py`).
"""

import logging
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import inf

import torch
from torch import Tensor

from kvbench.engine.softmax import Softmax
from kvbench.kernels.column_sums import rows_per_block
from kvbench.kernels.gather import is_within

logger = logging.getLogger(__name__)

# Queries of a block of sliding-window attention. A block meets window + BLOCK - 1 keys: larger ones compute more that
# is hidden, smaller ones read keys more often. 6,000 tokens, a window of 512, d_h 256, CPU seconds at 64, 128, 256 and
# 512: 0.25, 0.25, 0.26 and 0.33 (a mask of 6,000 x 6,000: 2.3).
BLOCK = 128
FUSED = ("cpu", "cuda")  # devices whose fused kernels give log-sum-exps


@dataclass(frozen=True)
class Chunk:
    """In place of a window: a token sees those before it in its own chunk of so many tokens, from position 0 on."""

    n: int

    def n_seen(self, position: int) -> int:
        """Tokens that the one at this position sees, itself included."""
        return position % self.n + 1


def causal(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None = None
) -> tuple[Tensor, Tensor]:
    """Output (1, h, s, d_v) and log-sum-exps (1, h, s) float32, for q (1, h, s, d_h), k and v (1, h_kv, s, d_h or d_v).

    A query's weight on a token is the exponential of the logit less the log-sum-exp: that has the layer's sinks.
    """
    return softmax.finish(*over_past(q, k, v, softmax, window))


def over_past(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None = None
) -> tuple[Tensor, Tensor]:
    """Attention (`causal`) without sinks, to be joined with other tokens. q may have the last tokens alone."""
    s = q.shape[2]
    if isinstance(window, Chunk):
        chunks = zip(q.split(window.n, 2), k.split(window.n, 2), v.split(window.n, 2), strict=True)
        parts = [over_past(q_c, k_c, v_c, softmax) for q_c, k_c, v_c in chunks]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)
    if window is not None and window >= k.shape[2]:
        window = None
    if s < k.shape[2]:
        return blocks(q, k, v, softmax, window)
    if takes_flash(q, v, softmax):
        return flash(q, k, v, softmax, window)
    if softmax.cap or q.device.type not in FUSED:
        return blocks(q, k, v, softmax, window)
    if q.is_cuda and q.shape[1] != k.shape[1]:  # the kernel for float32 knows no groups, and what does stores s x s
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if window is None:
        return fused(q, k, v, softmax.scale)
    return banded(q, k, v, softmax.scale, window)


def whole(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attention where every query (1, h, s_q, d_h) sees all keys (1, h_kv, s, d_h): all stand before it. No sinks."""
    if takes_flash(q, v, softmax):
        return flash(q, k, v, softmax, None, is_causal=False)
    if softmax.cap or q.device.type not in FUSED:
        return blocks(q, k, v, softmax, None, is_causal=False)
    if q.is_cuda and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return fused(q, k, v, softmax.scale, is_causal=False)


def takes_flash(q: Tensor, v: Tensor, softmax: Softmax) -> bool:
    width = max(q.shape[3], v.shape[3])
    fits = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256
    fits = fits and has_flash(q.device)
    return fits and (not softmax.cap or flash_attn_is_here())


def weighed(logits: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention by its logits (…, n) float32 over values (…, n, d_h), in `dtype`, and their log-sum-exps."""
    lse = logits.logsumexp(-1)
    weights = (logits - lse.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
    return (weights @ values.float()).to(dtype), lse


def blocks(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None, is_causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Attention without sinks, from logits of some queries at a time: no fused kernel of torch knows caps.

    Where it is causal, the queries are the last of the tokens.
    """
    (_, h, s, _), (_, h_kv, n, _) = q.shape, k.shape
    g, n_rows = h // h_kv, rows_per_block(h // h_kv, n, q.device)
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3], device=q.device)
    for kv_head in range(h_kv):
        heads = slice(kv_head * g, (kv_head + 1) * g)
        for start in range(0, s, n_rows):
            stop = min(start + n_rows, s)
            before = n - s  # tokens in front of the first query's
            first = 0 if window is None else max(0, before + start - window + 1)
            keys = slice(first, before + stop if is_causal else n)
            logits = softmax.logits(q[:, heads, start:stop], k[:, kv_head : kv_head + 1, keys])
            if is_causal:
                query = torch.arange(before + start, before + stop, device=q.device).unsqueeze(1)
                token = torch.arange(first, before + stop, device=q.device)
                hidden = token > query if window is None else (token > query) | (token <= query - window)
                logits.masked_fill_(hidden, -inf)
            some = weighed(logits, v[:, kv_head : kv_head + 1, keys], q.dtype)
            out[:, heads, start:stop], lse[:, heads, start:stop] = some
    return out, lse


def banded(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Causal attention within a window, for more tokens than the window has."""
    s = q.shape[2]
    assert q.shape[0] == 1 and window < s, (q.shape, window)
    parts = [fused(q[:, :, :window], k[:, :, :window], v[:, :, :window], scale)]
    reach = window + BLOCK - 1
    # What a block's query sees of the keys from its first query's window on: as many before it as the window takes.
    distance = torch.arange(BLOCK, device=q.device).unsqueeze(1) + window - 1 - torch.arange(reach, device=q.device)
    # A GPU's kernel for float32 takes masks whose rows begin at multiples of 16 numbers.
    hidden = torch.zeros(BLOCK, -(-reach // 16) * 16, dtype=q.dtype, device=q.device)[:, :reach]
    hidden.masked_fill_((distance < 0) | (distance >= window), -inf)
    n_blocks = (s - window) // BLOCK
    if n_blocks:
        stop = window + n_blocks * BLOCK
        queries = q[0, :, window:stop].unflatten(1, (n_blocks, BLOCK)).transpose(0, 1)  # (blocks, h, BLOCK, d_h)
        keys, values = (
            x[0, :, 1:stop].unfold(1, reach, BLOCK).permute(1, 0, 3, 2) for x in (k, v)
        )  # (blocks, h_kv, reach, d_h), views
        out, lse = fused(queries, keys, values, scale, hidden)
        parts.append((out.transpose(0, 1).flatten(1, 2).unsqueeze(0), lse.transpose(0, 1).flatten(1, 2).unsqueeze(0)))
    if rest := (s - window) % BLOCK:
        first = s - rest
        keys, values = (x[:, :, first - window + 1 :] for x in (k, v))
        parts.append(fused(q[:, :, first:], keys, values, scale, hidden[:rest, : rest + window - 1]))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None = None, is_causal: bool = True
) -> tuple[Tensor, Tensor]:
    """What scaled_dot_product_attention calls, with the log-sum-exps that it drops; causal where nothing is `hidden`.

    On a GPU k and v have as many heads as q. `hidden` (s_q, s_k) has -inf where a query does not see a key.
    """
    is_causal, d_v = is_causal and hidden is None, v.shape[3]
    if not q.is_cuda:
        q, k, v = of_one_width(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=is_causal, attn_mask=hidden, scale=scale
        )
        return out[..., :d_v], lse
    bias = None if hidden is None else hidden.expand(*q.shape[:2], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, is_causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # it pads them


def of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v for kernels that know one width: zeros after what is narrower, or keys that values lie in."""
    more = q.shape[3] - v.shape[3]
    if not more:
        return q, k, v
    if more < 0:
        return torch.nn.functional.pad(q, (0, -more)), torch.nn.functional.pad(k, (0, -more)), v
    return q, k, k if is_within(k, v) else torch.nn.functional.pad(v, (0, more))


def flash(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None, is_causal: bool = True
) -> tuple[Tensor, Tensor]:
    """FlashAttention on a GPU: the optional package, or the one in torch."""
    left, right = -1 if window is None else window - 1, 0 if is_causal else -1
    d_v = v.shape[3]
    q, k, v = of_one_width(q, k, v)
    tokens = [x.transpose(1, 2) for x in (q, k, v)]
    if flash_attn_is_here():
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]  # optional

        out, lse, _ = flash_attn_func(
            *tokens,
            softmax_scale=softmax.scale,
            causal=is_causal,
            window_size=(left, right),
            softcap=softmax.cap,
            return_attn_probs=True,
        )
    else:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *tokens, None, None, q.shape[2], k.shape[2], 0.0, is_causal, False, scale=softmax.scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
    return out.transpose(1, 2)[..., :d_v], lse


@cache
def has_flash(device: torch.device) -> bool:
    """Whether FlashAttention knows the GPU: from Ampere on, compute capability 8.0."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def flash_attn_is_here() -> bool:
    """Whether the optional package is installed and can be loaded: one built for another torch cannot."""
    if find_spec("flash_attn") is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it imports; errors in tests
            import_module("flash_attn")
    except (ImportError, OSError) as error:
        logger.warning("flash-attn is installed and cannot be loaded (%s): torch's attention takes its place", error)
        return False
    return True
