"""Exact attention over a chosen set of tokens: part by part, joined by their log-sum-exps.

A row of the batch attends to a few parts: what is resident, what was fetched. A part is keys and values that lie
together in memory, or places of a cache that are read where they are. It holds KV heads, or query heads where each
query head chose its own tokens.

Not here: choosing tokens (`methods`), moving them (`engine/layouts`), the prompt's own pass (`engine/causal.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.engine.caches.asked import Asked, Asking, alike
from kvbench.engine.causal import Chunk, fused, weighed
from kvbench.engine.softmax import Softmax
from kvbench.kernels.fast import STEP, takes
from kvbench.kernels.gather import move_both
from kvbench.kernels.packed.attend import Packed, attend_packed_native, takes_packed
from kvbench.kernels.packed.rows import CodedRows, takes_codes
from kvbench.kernels.rows.weights import soften_rows
from kvbench.kernels.select_attend import (
    Near,
    Spans,
    Tokens,
    attend_parts_native,
    attend_rows_native,
    attend_rows_triton,
    native_takes,
)

Partial = tuple[Tensor, Tensor]  # attention over some tokens, and the log-sum-exp of their logits
MANY = 512  # tokens of a part from which it is worth asking whether rows share it


@dataclass(slots=True)  # not frozen: to make a part would take 1.5 us more, a row makes some in every layer and step
class Part:
    """Keys and values of some tokens; `heads` is h_kv, or h where each query head has tokens of its own.

    With `idx`, k and v are a cache (1, h_kv, places, d_h); with `spans`, every KV head has rows of its own, as many as
    it has. Who needs a part's tokens next to each other calls `gathered()`.
    """

    k: Tensor  # (n, heads, s, d_h)
    v: Tensor  # (n, heads, s, d_v); of latents the first numbers of the keys, in the same memory
    mask: Tensor | None = None  # (n, heads or h, s) bool, False on what is hidden
    q: Tensor | None = None  # (n, h, 1, d_h), a query turned to other positions for this part alone
    idx: Tensor | None = None  # (1, heads, s) places in k and v, -1 where the mask is False
    late: tuple[Tensor, Tensor] | None = None  # the places after those of k and v
    near: Near | None = None  # copies of its tokens, where k and v are another memory
    spans: Spans | None = None  # where KV heads have different counts; k and v (1, h_kv or 1, rows, d_h)
    bias: Tensor | None = None  # (n, heads, s) float32 added to scaled logits, the logarithms of tokens' weights
    is_pseudo: bool = False  # each stands for tokens that are not attended to, and counts as none
    packed: Packed | None = None  # in place of k and v, which have no tokens
    asked: Asked | None = None  # how queries are made for it, which are its `q` then
    # Attention to `packed` by who packed it, where no kernel reads such codes: as `partial`, without rebuilt numbers.
    by_codes: Callable[[Tensor, Softmax], Partial] | None = None
    # What `tokens` made: a part that a layer holds is asked at every step, when it is complete.
    made: Tokens | None = field(default=None, init=False)

    def n_tokens(self) -> int:
        """Tokens of a head, hidden ones included; of heads with different counts the most."""
        if self.packed is not None:
            return self.packed.n
        if self.spans is not None:
            return self.spans.longest
        return self.k.shape[2] if self.idx is None else self.idx.shape[2]

    def gathered(self) -> "Part":
        """This part without `idx`, `spans` and `packed`; its tokens are copied if need be."""
        if self.packed is not None:
            k, v = self.packed.rebuilt(self.v.shape[3])
            return replace(self, k=k, v=v, packed=None)
        if self.idx is None and self.spans is None:
            return self
        tokens = self.tokens()
        k, v = tokens.gathered()
        mask = self.mask if self.spans is None else tokens.is_real()
        return replace(self, k=k, v=v, mask=mask, idx=None, late=None, spans=None)

    def sent_to(self, device: torch.device) -> "Part":
        """This part with its tokens gathered where they lie and copied to another memory, where mask and bias are."""
        if self.idx is None:
            return self
        there = replace(self, idx=self.idx.to(self.k.device)).gathered()
        there.k, there.v = move_both(lambda x: x.to(device), there.k, there.v)
        return there

    def tokens(self) -> Tokens:
        """The part in the form that kernels take; codes are rebuilt for the length of a call."""
        if self.packed is not None:
            return self.gathered().tokens()
        if self.made is None:
            self.made = Tokens(self.k, self.v, self.idx, self.late, self.mask, self.q, self.near, self.spans, self.bias)
        return self.made


def attend_rows(
    q: Tensor, rows: Sequence[list[Part]], softmax: Softmax, wants_weights: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """One query per head of every row (n, h, 1, d_h) over the row's own parts, and the weights of rows that want them.

    On a GPU one launch for all rows. What q has after the rows is
    nobody's.
    """
    ask_parts(q, rows)
    if not takes(STEP, q.device):
        return attend_rows_cpu(q, rows, softmax, wants_weights)
    h = q.shape[1]
    logits = [
        q.new_empty(h, sum(part.n_tokens() for part in parts), dtype=torch.float32) if wants else None
        for parts, wants in zip(rows, wants_weights, strict=True)
    ]
    coded = CodedRows(len(rows))
    tokens = [
        [each for part in parts for each in tokens_of(q, part, None if wants else coded, i)]
        for i, (parts, wants) in enumerate(zip(rows, wants_weights, strict=True))
    ]
    out, lse = attend_rows_triton(q, tokens, softmax.scale, logits, coded if coded.by_form else None, softmax.cap)
    if softmax.sink is not None:
        out[: len(rows)], lse = softmax.finish(out[: len(rows)], lse)
    return out, soften_rows(logits, lse)


def ask_parts(q: Tensor, rows: Sequence[list[Part]]) -> None:
    """Give parts that are asked in a way of their own the queries that go with their keys."""
    for some in alike([(i, part) for i, parts in enumerate(rows) for part in parts]):
        asking = Asking([i for i, _ in some], [part.asked for _, part in some], len(rows), q.device)
        for (_, part), own in zip(some, asking.take(q).split(1), strict=True):
            part.q = own


def value_width(rows: Sequence[list[Part]]) -> int:
    """Dimensions of a value, of which all parts have as many."""
    return next(part.v.shape[3] for parts in rows for part in parts)


def attend_rows_cpu(
    q: Tensor, rows: Sequence[list[Part]], softmax: Softmax, wants_weights: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """One call of C++ for all rows of plain parts that join nothing else; the others take turns, on any device."""
    shared, left = attend_shared(q, rows, softmax, wants_weights)
    plain: list[list[Tokens]] = []
    weights: list[Tensor | None] = [None] * len(rows)
    for i, (parts, wants) in enumerate(zip(left, wants_weights, strict=True)):
        found = [] if i in shared else [part.tokens() for part in parts if is_plain(part)]
        is_whole = len(found) == len(parts) and native_takes(q, found)
        plain.append(found if is_whole else [])
        if wants and plain[-1]:
            weights[i] = q.new_empty(1, q.shape[1], sum(part.n_tokens() for part in found), dtype=torch.float32)
    if any(plain):
        out, lse = attend_rows_native(q, plain, softmax.scale, softmax.cap, weights)
        for own, x in zip(lse, weights, strict=True):
            if x is not None and softmax.sink is not None:
                x *= (own - softmax.sink.view(-1, 1)).sigmoid()
        out, _ = softmax.finish(out, lse)
    else:
        out = q.new_empty(*q.shape[:3], value_width(rows))
    for i, found in enumerate(plain):
        if found:
            continue
        if wants_weights[i]:
            out[i : i + 1], weights[i] = attend_weights(q[i : i + 1], left[i], softmax)
        else:
            out[i : i + 1] = attend(q[i : i + 1], left[i], softmax, shared.get(i, ()))
    return out, weights


def tokens_of(q: Tensor, part: Part, coded: CodedRows | None, row: int) -> list[Tokens]:
    """A part as the kernel takes it; its packed tokens go to `coded`, whose kernel reads them as they are."""
    if part.packed is None or coded is None or not takes_codes(q, part.packed):
        return [part.tokens()]
    return coded.add(row, part.packed, part.q)


def attend_shared(
    q: Tensor, rows: Sequence[list[Part]], softmax: Softmax, wants_weights: Sequence[bool]
) -> tuple[dict[int, list[Partial]], Sequence[list[Part]]]:
    """Attention over parts that several rows have in common, which are read once for all of them.

    By row what `attend` is to join with the row's other parts, and those. Only parts of many tokens are worth it.
    """
    if len(rows) == 1:
        return {}, rows
    places: dict[tuple[int, ...], list[int]] = {}
    for i, parts in enumerate(rows):
        for part in () if wants_weights[i] else parts:
            if part.k.shape[2] >= MANY and is_stretch(part):
                places.setdefault(memory_of(part), []).append(i)
    owners = {memory: which for memory, which in places.items() if len(which) > 1}
    if not owners:
        return {}, rows
    done: dict[int, list[Partial]] = {}
    for memory, which in owners.items():
        part = next(part for part in rows[which[0]] if memory_of(part) == memory)
        asking = q[which].unflatten(1, (part.k.shape[1], -1)).squeeze(3).transpose(0, 1)  # (h_kv, rows, g, d_h)
        found = partial(asking.reshape(1, -1, 1, q.shape[3]), part, softmax)  # as if they were heads of one row
        out, lse = (x[0].unflatten(1, (len(which), -1)).transpose(0, 1) for x in found)  # (rows, h_kv, g, d_h)
        for at, i in enumerate(which):
            done.setdefault(i, []).append((out[at : at + 1], lse[at : at + 1]))
    left = [
        [part for part in parts if i not in done or memory_of(part) not in owners] for i, parts in enumerate(rows)
    ]  # fmt: skip
    return done, left


def is_stretch(part: Part) -> bool:
    """Whether a part is tokens next to each other and nothing else."""
    others = part.mask, part.q, part.idx, part.spans, part.bias, part.packed
    return all(x is None for x in others)


def memory_of(part: Part) -> tuple[int, ...]:
    """Equal where two stretches are the same tokens; nothing where it is none."""
    return (part.k.data_ptr(), part.v.data_ptr(), *part.k.shape, *part.k.stride()) if is_stretch(part) else ()


def attend(q: Tensor, parts: list[Part], softmax: Softmax, joins: Sequence[Partial] = ()) -> Tensor:
    """Softmax attention of one query per head over the union of `parts`, and of what `joins` already attended to."""
    assert parts or joins, "a query must attend to something"
    n, h, _, _ = q.shape
    done, rest = [*joins], [part for part in parts if part.n_tokens()]
    # One call of ours for all parts: a quarter of the time of torch's attention for each and their join at 130 tokens
    # (9 heads of 64, two parts), and no more than it at 30,000.
    plain = [part for part in rest if is_plain(part)]
    tokens = [part.tokens() for part in plain]
    if tokens and native_takes(q, tokens):
        done.append(attend_parts_native(q, tokens, softmax.scale, softmax.cap))
        rest = [] if len(plain) == len(rest) else [part for part in rest if not is_plain(part)]
    done += [partial(q if part.q is None else part.q, part, softmax) for part in rest]
    if len(done) == 1:
        out, lse = done[0]
        return softmax.finish(out.reshape(n, h, 1, -1), lse.reshape(n, h, 1))[0]
    lse = torch.stack([lse.reshape(n, h, 1) for _, lse in done])  # (parts, n, h, 1) float32
    out = torch.stack([out.reshape(n, h, 1, -1) for out, _ in done])  # (parts, n, h, 1, d_v)
    joined = (out * lse.softmax(0).unsqueeze(-1)).sum(0)
    return softmax.finish(joined, lse.logsumexp(0))[0].to(q.dtype) if softmax.sink is not None else joined.to(q.dtype)


def is_plain(part: Part) -> bool:
    """Whether it is for the query that all parts share, and hides nothing but places in `idx` without a token."""
    return part.packed is None and part.q is None and (part.mask is None or part.idx is not None)


def attend_weights(q: Tensor, parts: list[Part], softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attention and the weights over the concatenated parts, (n, h, s) float32, for methods that watch them."""
    n, h, _, _ = q.shape
    parts = [part.gathered() for part in parts]
    logits = torch.cat([part_logits(q, part, softmax).reshape(n, h, -1) for part in parts], -1)  # (n, h, s)
    weights = softmax.weights(logits, (-1,))
    d_v = parts[0].v.shape[3]
    out, start = torch.zeros(n, h, 1, d_v, dtype=torch.float32, device=q.device), 0
    for part in parts:
        heads, s = part.k.shape[1], part.k.shape[2]
        w = weights[..., start : start + s].reshape(n, heads, h // heads, s)
        out += (w @ part.v.float()).reshape(n, h, 1, d_v)
        start += s
    return out.to(q.dtype), weights


def partial(q: Tensor, part: Part, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attention over one part, (n, heads, h // heads, d_h), and the log-sum-exp of its logits, the same without d_h.

    Sinks are left to who joins parts.
    """
    n, h, _, d_h = q.shape
    if part.packed is not None and takes_packed(q, part.packed):
        return attend_packed_native(q, part.packed, softmax.scale, softmax.cap)
    if part.packed is not None and part.by_codes is not None:
        return part.by_codes(q, softmax)
    part = part.gathered()
    heads = part.k.shape[1]
    q = q.reshape(n, heads, h // heads, d_h)  # the group's query heads become queries of one KV head: no repeated K
    if part.mask is None and part.bias is None and q.device.type == "cpu" and not softmax.cap:
        # Accumulates in float32 whatever the dtype and returns the log-sum-exp; 0.5-0.9 of the time of two matrix
        # products up to 1,000 tokens in bfloat16 and float32: for tokens that several rows share, and without C++.
        return fused(q, part.k, part.v, softmax.scale, is_causal=False)
    logits = part_logits(q.reshape(n, h, 1, d_h), part, softmax)  # (n, heads, g, s) float32
    return weighed(logits, part.v, q.dtype)


def part_logits(q: Tensor, part: Part, softmax: Softmax) -> Tensor:
    """Logits in float32, -inf on padding: (n, heads, h // heads, s)."""
    n, h, _, d_h = q.shape
    heads = part.k.shape[1]
    q = (q if part.q is None else part.q).reshape(n, heads, h // heads, d_h)
    logits = softmax.bent(q.float() @ part.k.float().mT)
    if part.bias is not None:
        logits = logits + part.bias.unflatten(1, (heads, -1))
    if part.mask is None:
        return logits
    return logits.masked_fill(~part.mask.unflatten(1, (heads, -1)), -torch.inf)


def attend_own(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None, position: int) -> Tensor:
    """Attention of one token per row in a layer that is left as it is: all that its own cache holds, (n, h, 1, d_h).

    The rows are at `position`; a cache that holds a chunk's number of tokens may have some of the chunk before.
    """
    if window is not None:
        n_seen = window.n_seen(position) if isinstance(window, Chunk) else window
        k, v = k[:, :, -n_seen:], v[:, :, -n_seen:]
    n, h, _, d_h = q.shape
    grouped = q.reshape(n, k.shape[1], -1, d_h)
    if softmax.is_plain:
        out = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, scale=softmax.scale)
        return out.reshape(n, h, 1, -1)
    out, lse = weighed(softmax.bent(grouped.float() @ k.float().mT), v, q.dtype)
    return softmax.finish(out.reshape(n, h, 1, -1), lse.reshape(n, h, 1))[0]


def attend_own_past(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None, start: int
) -> Tensor:
    """Attention of several tokens from `start` on in a layer that is left as it is.

    Its cache ends with their own keys.
    """
    m, s = q.shape[2], k.shape[2]
    grouped = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    ends = torch.arange(start, start + m, device=q.device).unsqueeze(1)
    positions = torch.arange(start + m - s, start + m, device=q.device)
    seen = positions <= ends
    if isinstance(window, Chunk):
        seen &= positions // window.n == ends // window.n
    elif window is not None:
        seen &= ends - positions < window
    if softmax.is_plain:
        return torch.nn.functional.scaled_dot_product_attention(q, *grouped, attn_mask=seen, scale=softmax.scale)
    hidden = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, -torch.inf)
    return softmax.finish(*weighed(softmax.logits(q, grouped[0]) + hidden, grouped[1], q.dtype))[0]
