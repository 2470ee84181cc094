"""Several tokens of a feed in one call, for rows whose steps only add their token and select in the same way.

All tokens of the feed see what was resident before it, as long as it is; among themselves they are causal; what they
fetch is selected for all of them and attended to in one call. The books get an entry for each token, as if it had come
alone.

Not here: which rows may (`methods/base.py`), rows of which each token changes what the next one finds
(`engine/batch.py`).
"""

import torch
from torch import Tensor

from kvbench.engine.attend import Part, attend_rows
from kvbench.engine.causal import fused, over_past, weighed, whole
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.fetching import Fetching
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.slots import Slots
from kvbench.engine.passes.second_pass import joined
from kvbench.engine.row import Row
from kvbench.engine.selection import FeedSelection
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import attend_groups, behind_rows, step_rows
from kvbench.engine.turns.feed import Feed, Moment
from kvbench.kernels.rows.each import attend_each


def read_stretches(row: Row, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """A row's tokens (1, h, m, d_h), as many at a time as it may read in one call."""
    outs, start, m = list[Tensor](), 0, q.shape[2]
    while start < m:
        row.store[layer].leave()
        n = row.at_once(layer, m - start)
        q_n, k_n, v_n = (x[:, :, start : start + n] for x in (q, k, v))
        if n > 1:
            feed = Feed(q_n, k_n, v_n, softmax, moments(row.store[layer], n))
            out = row.read_feed(layer, feed)
            outs.append(read_at_once(row, layer, feed) if out is None else out)
        else:
            outs.append(attend_groups([(type(row), slice(0, 1))], [row], layer, q_n, k_n, v_n, softmax))
        start += n
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def read_at_once(row: Row, layer: int, feed: Feed) -> Tensor:
    """The outputs (1, h, m, d_h) of the tokens, which the layer takes in."""
    at = row.store[layer]
    parts = [over_past(feed.q, feed.k, feed.v, feed.softmax), *past(at, feed)]
    selected = FeedSelection()
    if at.can_fetch:
        at.host.write(at.n_seen - at.s_prompt, feed.k, feed.v)
        selected = row.select_feed(layer, feed)
    if selected.idx is not None:
        parts.append(fetched(at, feed, selected))
    out, lse = feed.softmax.finish(*joined(parts))
    take_in(row, layer, feed, selected)
    out = row.after_feed(layer, feed, out, lse)
    row.store.close(layer)
    return out


def fetched(at: Fetching, feed: Feed, selected: FeedSelection) -> tuple[Tensor, Tensor]:
    """Attention of each token over what is fetched for it."""
    assert selected.idx is not None
    n_seen, n_window = feed.moments[-1]
    part = at.host.tokens(selected.idx.contiguous(), None, late=n_seen - at.s_prompt > n_window)
    part.bias = selected.bias
    return attend_each(feed.q, part.tokens(), feed.softmax.scale, feed.softmax.cap)


def take_in(row: Row, layer: int, feed: Feed, selected: FeedSelection) -> None:
    """Count every token in, write all of them to their slots, and the books of all but the last."""
    at, m = row.store[layer], feed.k.shape[2]
    places = []
    for t in range(m):
        places.append(at.advance(feed.k[:, :, t : t + 1], feed.v[:, :, t : t + 1]))
        if selected.costs:
            row.store.spend(layer, selected.costs[t])
        if selected.idx is not None:
            at.fetch(selected.idx[t : t + 1], row.traits.pads)
        if t < m - 1:
            row.store.close(layer)
    at.write_window(places, feed.k, feed.v)


def past(at: Slots, feed: Feed) -> list[tuple[Tensor, Tensor]]:
    """Attention of each token over what is resident before the feed and still there when it comes."""
    parts, hidden = [part for part in at.resident() if part.n_tokens()], outgoing(at, len(feed.moments), feed.q.dtype)
    hides: list[Tensor | None] = [None] * len(parts)
    if hidden is not None:
        hides[-1] = torch.nn.functional.pad(hidden, (parts[-1].n_tokens() - at.n_window, 0))
    return [over(feed.q, part, feed.softmax, hide) for part, hide in zip(parts, hides, strict=True)]


def over(q: Tensor, part: Part, softmax: Softmax, hide: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of all queries over one part, and the log-sum-exps; `hide` (m, tokens) has -inf on what is hidden."""
    part = part.gathered()
    if part.mask is None and part.bias is None:
        if hide is None:
            return whole(q, part.k, part.v, softmax)
        if not softmax.cap:
            return fused(q, part.k, part.v, softmax.scale, hide)
    groups = q.shape[1] // part.k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).float() for x in (part.k, part.v))
    logits = softmax.bent(q.float() @ keys.mT)
    if hide is not None:
        logits = logits + hide
    if part.bias is not None:
        logits = logits + part.bias.repeat_interleave(q.shape[1] // part.bias.shape[1], 1).unsqueeze(2)
    if part.mask is not None:
        mask = part.mask.repeat_interleave(q.shape[1] // part.mask.shape[1], 1)
        logits = logits.masked_fill(~mask.unsqueeze(2), -torch.inf)
    return weighed(logits, values, q.dtype)


def moments(at: Layer, m: int) -> list[Moment]:
    """Moments of the next `m` tokens."""
    return [Moment(at.n_seen + t, min(at.capacity, at.n_window + t)) for t in range(1, m + 1)]


def outgoing(at: Layer, m: int, dtype: torch.dtype) -> Tensor | None:
    """Which of the window's slots are overwritten before each of `m` tokens: (m, n_window), -inf there, 0 elsewhere.

    None where the window has room for all of them.
    """
    if at.n_window + m <= at.capacity:
        return None
    device = at.device
    slots, t = torch.arange(at.n_window, device=device), torch.arange(1, m + 1, device=device)
    age = (at.n_seen - 1 - at.start - slots) % at.capacity
    hidden = torch.zeros(m, at.n_window, dtype=dtype, device=device)
    return hidden.masked_fill_(age >= at.capacity - t.unsqueeze(1), -torch.inf)


def read_dense(row: Row, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """The output (1, h, 1, d_h) of one token over all that its row's host tier holds: `task.feed=dense`.

    The method takes its step all the same, so that its window, codes and counters go on as ever; what it would have
    attended to and corrected is replaced. The books say that the token attended to everything, and that all of the
    host's tokens moved for it.
    """
    kind, at = type(row), row.store[layer]
    host = at.host
    if row.wants_weights or host is None or not host.has_keys:
        raise ConfigError(
            f"task.feed=dense needs keys and values of the whole context, which {kind.title} does not hold"
        )
    step_rows(kind, [row], layer, q, k, v)
    n_held = at.n_seen - at.n_gone  # that the host numbers, those on the device included
    parts = [Part(k.to(q.device), v.to(q.device)) for k, v in host.held(n_held)]
    out, _ = attend_rows(q, [parts], softmax, [False])
    for _, change in behind_rows(kind, [row], layer, out.clone(), [None]):
        row.store.change(layer, change)
    at.meter.count_whole(n_held - at.n_kept - at.n_window)
    row.store.close(layer)
    return out
