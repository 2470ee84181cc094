"""Rows that read feeds of several tokens and answer after each: `Talk`.

A feed goes through the model in one pass over all rows, each with tokens of its own: shorter feeds are padded in front.
Within a layer a row takes its tokens one after the other, as it would step by step, so that every token sees what the
method offers for it and the tokens before it in the feed. Rows in which a token changes nothing but what is added take
many at once (`engine/turns/at_once.py`).

Not here: one token at a time (`engine/decode.py`), going back (`engine/turns/state.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.engine.attend import Part, attend_own, attend_rows
from kvbench.engine.books.clock import Clock
from kvbench.engine.books.spans import span
from kvbench.engine.caches.forks import fork, select_rows
from kvbench.engine.causal import Chunk, weighed
from kvbench.engine.decode import Answer, attend_groups, refuse_switch
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.chosen import Choices, HearsChoices
from kvbench.engine.passes.trace import Trace
from kvbench.engine.readers import Readers
from kvbench.engine.row import Row, Variant
from kvbench.engine.sampling.draws import marked, said
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import behind_rows, cut, step_rows
from kvbench.engine.turns.at_once import moments, read_at_once
from kvbench.engine.turns.feed import Feed
from kvbench.engine.turns.state import fork_of

if TYPE_CHECKING:
    from kvbench.engine.model import Model
    from kvbench.engine.passes.session import Call


class Talk(HearsChoices):
    """Rows on one trace, each at a position of its own; stands in the model's attention while they read.

    Layers that the model keeps to itself want rows of equal feeds and answers: `has_own_layers` says so.
    """

    def __init__(self, model: "Model", trace: Trace, rows: Sequence[Row], cache: Any = None) -> None:
        """`cache` is the model's own of its layers that nobody compresses, by default that behind the prompt."""
        self.model, self.trace, self.rows = model, trace, list(rows)
        self.cache = fork(trace.rest, len(rows)) if cache is None else cache
        self.has_own_layers = trace.shape.n_own > 0
        self.compressed = frozenset(trace.shape.attention_layers)
        # Rows of one class stand together, so that a class can work on all of its rows at once that are at one
        # position. In all passes rows have this order, which is that of the cache.
        self.order = sorted(range(len(rows)), key=lambda i: name_of(type(rows[i])))
        self.positions = [trace.s_prompt] * len(rows)  # of each row's next token
        self.clock, self.readers = Clock(), Readers(trace.shape)
        self.is_dense = False  # while a feed is read that attends to all that rows hold
        self.choices = Choices()
        self.calls: dict[int, Call] = {}
        self.growing: dict[int, Variant] = {}  # rows that hold a feed within a budget of this length once it is read
        self.asked: dict[tuple[int, int], list[Tensor]] = {}  # by row and layer the feed's queries, of those rows

    def fork(self) -> "Talk":
        """The same rows a second time, to go on from here."""
        rows = [fork_of(row) for row in self.rows]
        talk = Talk(self.model, self.trace, rows, fork(self.cache, 1))
        talk.positions = list(self.positions)
        return talk

    def read(
        self, feeds: Sequence[Sequence[int]], feed: str = "compressed", grown: Sequence[Variant | None] = ()
    ) -> Tensor:
        """Every row reads its own tokens, one or more: logits of the next one, (n, vocabulary) float32.

        A row with a `grown` variant then holds what it has within that one's budget.
        """
        self.growing = {
            i: variant for i, variant in enumerate(grown) if variant is not None and not self.rows[i].variant.is_full
        }
        assert len(feeds) == len(self.rows) and all(feeds), [len(each) for each in feeds]
        longest = max(map(len, feeds))
        pads = [longest - len(each) for each in feeds]
        ids = torch.tensor([[*[0] * pad, *each] for pad, each in zip(pads, feeds, strict=True)])
        ids = ids.to(self.model.device)
        # Rows that compress between steps read step by step.
        if self.readers.owner and feed == "dense":
            raise ConfigError(
                f"task.feed=dense needs layers with K and V of their own, and some of {self.trace.shape.name!r} attend "
                "to those of another; use task.feed=compressed"
            )
        # Where layers read another's K and V, that one's step has to be over before its next token.
        one_by_one = feed == "tokenwise" or bool(self.readers.owner)
        stepwise = [i for i in self.order if one_by_one or self.rows[i].of_answers]
        if stepwise and self.has_own_layers:
            stepwise = self.order
        at_once = [i for i in self.order if i not in stepwise]
        found: list[Tensor] = []
        self.is_dense = feed == "dense"
        if at_once:
            found.append(self.step(at_once, ids, pads))
        if stepwise:
            for j in range(longest):
                reading = [i for i in stepwise if pads[i] <= j]
                logits = self.step(reading, ids[:, j : j + 1], [0] * len(pads))
            found.append(logits)  # all of them read the last token
        self.is_dense = False
        if len(found) == 2:
            found[0][stepwise] = found[1][stepwise]
        self.extend()
        return found[0]

    def extend(self) -> None:
        """Let rows whose budget grows compress what they read."""
        with torch.inference_mode():
            for (i, layer), queries in self.asked.items():
                change = self.rows[i].extend(layer, torch.cat(queries, 2), self.growing[i])
                if change is not None:
                    self.rows[i].store.change_between(layer, change)
        self.growing, self.asked = {}, {}

    def answer(
        self, logits: Tensor, max_new_tokens: Sequence[int], stop_ids: Iterable[int] = (), min_new_tokens: int = 0,
        on_step: Callable[[], None] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Every row answers greedily; `logits` (n, vocabulary) are those of its first token.

        Its last token is not read: whoever goes on with this row has it read with the next feed.
        """
        stop_ids = frozenset(stop_ids)
        never = torch.tensor(
            [id for id in sorted(stop_ids) if id < logits.shape[-1]], dtype=torch.long, device=logits.device
        )
        answers = [Answer() for _ in self.rows]
        speaking, logits = self.order, logits[self.order]
        given = torch.zeros(len(self.rows), 1, dtype=torch.long, device=logits.device)
        while True:
            n_said = len(answers[speaking[0]].ids)
            if stop_ids and n_said < min_new_tokens:
                logits = logits.index_fill(1, never, -torch.inf)
            ids = logits.argmax(-1)
            for i, token in zip(speaking, map(said, marked(ids, logits).tolist()), strict=True):
                answers[i].take(token, stop_ids)
            keep = [at for at, i in enumerate(speaking) if answers[i].goes_on(max_new_tokens[i])]
            if not keep:
                return answers
            if len(keep) < len(speaking):
                speaking, ids = [speaking[at] for at in keep], ids[keep]
                if self.has_own_layers:
                    select_rows(self.cache, keep)
            given[speaking, 0] = ids
            logits = self.step(speaking, given, [0] * len(self.rows))[speaking]
            if on_step is not None:
                on_step()

    def seconds(self) -> list[float]:
        """Of every pass so far."""
        return self.clock.seconds()

    # A pass of the model.

    def step(self, which: Sequence[int], ids: Tensor, pads: Sequence[int]) -> Tensor:
        """The rows `which`, in their order, read their ids of (n, m), of which the first `pads` are none.

        Returns the logits of the next token, (n, vocabulary) float32; of other rows they are undefined.
        """
        assert not (self.has_own_layers and any(pads)), "layers that the model keeps to itself read feeds of one length"
        self.which = list(which)
        self.active, self.pads = [self.rows[i] for i in which], [pads[i] for i in which]
        m, which = ids.shape[1], list(which)
        self.starts = [self.positions[i] - pads[i] for i in which]
        refuse_switch(self.model, self.trace.s_prompt, max(self.starts) + m)
        starts = torch.tensor(self.starts, device=ids.device)
        places = (starts.unsqueeze(1) + torch.arange(m, device=ids.device)).clamp(min=0)
        self.plans: dict[tuple[int, ...], list[tuple[type[Row], slice]]] = {}
        looks_ahead = any(row.wants_lookahead for row in self.active)
        self.hears = any(row.wants_input for row in self.active)
        watching = self.model.watched(self.calls) if looks_ahead or self.hears else nullcontext()
        with self.clock.running(self.model.device), span("step"), watching, torch.inference_mode():
            read = self.model.step if m == 1 and not looks_ahead and not self.hears else self.model.forward
            logits = read(ids[which], places, self.cache, self)
        self.choices.enter(self.cache, self.active, self.starts, self.trace.s_prompt)
        for i in which:
            self.positions[i] += m - pads[i]
            if self.rows[i].of_answers:
                assert m - pads[i] == 1, "a row that compresses between steps reads step by step"
                cut(self.rows[i])
        found = logits.new_empty(len(self.rows), logits.shape[1])
        found[which] = logits
        return found

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None) -> Tensor:
        m = q.shape[2]
        if layer in self.readers.owner:
            return self.readers.attend(layer, q, soft)
        if layer not in self.compressed:
            attend_own_tokens = attend_own if m == 1 else attend_own_past
            return attend_own_tokens(q, k, v, soft, window, self.starts[0])
        rows, out = self.active, q.new_zeros(*q.shape[:3], v.shape[3])
        for at, i in enumerate(self.which if self.growing else ()):
            if i in self.growing and layer not in rows[at].skipped_layers():
                self.asked.setdefault((i, layer), []).append(q[at : at + 1, :, self.pads[at] :])
        ahead = self.look_ahead(layer, range(len(rows)))
        with span("attention", layer):
            left = []
            for i, row in enumerate(rows):
                if self.is_dense and row.store[layer].can_fetch:
                    for j in range(self.pads[i], m):
                        if i in ahead:
                            row.q_ahead = ahead[i][:, :, j : j + 1]
                        q_j, k_j, v_j = (x[i : i + 1, :, j : j + 1] for x in (q, k, v))
                        out[i : i + 1, :, j : j + 1] = read_dense(row, layer, q_j, k_j, v_j, soft)
                elif m > 1 and row.at_once(layer, m - self.pads[i]) > 1:
                    q_i, k_i, v_i = (x[i : i + 1, :, self.pads[i] :] for x in (q, k, v))
                    out[i : i + 1, :, self.pads[i] :] = read_stretches(row, layer, q_i, k_i, v_i, soft)
                else:
                    left.append(i)
        readers = self.readers if m == 1 else None
        for j in range(m):
            live = [i for i in left if self.pads[i] <= j]
            if not live:
                continue
            for i in live:
                if i in ahead:
                    rows[i].q_ahead = ahead[i][:, :, j : j + 1]
                if self.hears:
                    rows[i].x_now = self.calls[layer].x[i : i + 1, j : j + 1]
            whole = len(live) == len(rows)
            q_j, k_j, v_j = (x[:, :, j : j + 1] if whole else x[live, :, j : j + 1] for x in (q, k, v))
            found = attend_groups(self.groups(live), [rows[i] for i in live], layer, q_j, k_j, v_j, soft, None, readers)
            if whole:
                out[:, :, j : j + 1] = found
            else:
                out[live, :, j : j + 1] = found
        return out

    def groups(self, live: Sequence[int]) -> list[tuple[type[Row], slice]]:
        """Runs of rows of one class at one position among these, as slices: such rows can be worked on together."""
        key = tuple(live)
        if key not in self.plans:
            self.plans[key] = [*runs([self.active[i] for i in live], [self.starts[i] for i in live])]
        return self.plans[key]

    def look_ahead(self, layer: int, which: Sequence[int]) -> dict[int, Tensor]:
        """The queries that the layer below foretells, of the rows that want them: (1, h, m, d_h) each."""
        looking = [i for i in which if self.active[i].wants_lookahead and self.active[i].store[layer].can_fetch]
        if not looking:
            return {}
        beside = {key: rows_of(value, looking) for key, value in self.calls[layer].beside.items()}
        queries = self.model.speculate(layer, self.calls[layer - 1].x[looking], beside)
        return dict(zip(looking, queries.split(1), strict=True))


def read_stretches(row: Row, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax) -> Tensor:
    """A row's tokens (1, h, m, d_h), as many at a time as it may read in one call."""
    outs, start, m = list[Tensor](), 0, q.shape[2]
    while start < m:
        row.store[layer].leave()
        n = row.at_once(layer, m - start)
        q_n, k_n, v_n = (x[:, :, start : start + n] for x in (q, k, v))
        if n > 1:
            feed = Feed(q_n, k_n, v_n, soft, moments(row.store[layer], n))
            out = row.read_feed(layer, feed)
            outs.append(read_at_once(row, layer, feed) if out is None else out)
        else:
            outs.append(attend_groups([(type(row), slice(0, 1))], [row], layer, q_n, k_n, v_n, soft))
        start += n
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def runs(rows: Sequence[Row], positions: Sequence[int]) -> Iterator[tuple[type[Row], slice]]:
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or type(rows[i]) is not type(rows[start]) or positions[i] != positions[start]:
            yield type(rows[start]), slice(start, i)
            start = i


def rows_of(value: Any, which: Sequence[int]) -> Any:
    """These rows of a call's argument, where it has rows."""
    if isinstance(value, Tensor) and value.ndim > 1:
        return value[list(which)] if len(value) > 1 else value
    if isinstance(value, tuple) and value and all(isinstance(x, Tensor) for x in value):
        return tuple(rows_of(x, which) for x in value)
    return value


def attend_own_past(q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None, start: int) -> Tensor:
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
    if soft.is_plain:
        return torch.nn.functional.scaled_dot_product_attention(q, *grouped, attn_mask=seen, scale=soft.scale)
    hidden = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, -torch.inf)
    return soft.finish(*weighed(soft.logits(q, grouped[0]) + hidden, grouped[1], q.dtype))[0]


def read_dense(row: Row, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax) -> Tensor:
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
    out, _ = attend_rows(q, [parts], soft, [False])
    for _, change in behind_rows(kind, [row], layer, out.clone(), [None]):
        row.store.change(layer, change)
    at.meter.count_whole(n_held - at.n_kept - at.n_window)
    row.store.close(layer)
    return out
