"""The step loop: one batch, a row per variant, each layer's attention row by row to its method.

All rows of a batch read the same prompt and are at the same position; they differ in what they attend to, and so in
what they generate. A row leaves the batch behind its last token.

Not here: what a row attends to (`methods`), what text its tokens are (`evals/answer.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvbench.engine.attend import Part, attend_own, attend_rows
from kvbench.engine.books.audit import count_parts
from kvbench.engine.books.clock import Clock
from kvbench.engine.books.spans import span
from kvbench.engine.caches.forks import fork, select_rows
from kvbench.engine.causal import Chunk
from kvbench.engine.errors import LengthError
from kvbench.engine.layouts.portions import Portion, may_be_steady, portions_of
from kvbench.engine.layouts.steady import Steady
from kvbench.engine.passes.chosen import Choices, HearsChoices
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Change
from kvbench.engine.readers import Held, Readers, end
from kvbench.engine.row import Row
from kvbench.engine.rows import append_rows
from kvbench.engine.sampling.cues import Cue
from kvbench.engine.sampling.draws import Draws, marked, said
from kvbench.engine.sampling.spec import Sampling
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import behind_rows, cut, fetched_rows
from kvbench.kernels.clock import Clock as StepClock
from kvbench.kernels.fast import STEP, takes, takes_all

if TYPE_CHECKING:
    from kvbench.engine.model import Model
    from kvbench.engine.passes.session import Call


@dataclass
class Answer:
    """What one row generated."""

    ids: list[int] = field(default_factory=list)  # generated tokens, a stop token included
    stopped: bool = False  # by a stop token; otherwise the allowance was used up
    is_finite: bool = True  # False: it ends where its logits were NaN or infinite

    def take(self, token: int | None, stop_ids: frozenset[int]) -> None:
        """The next token; None where the logits choose none."""
        self.is_finite = token is not None
        self.ids += [] if token is None else [token]
        self.stopped = token in stop_ids

    def goes_on(self, max_new_tokens: int) -> bool:
        return self.is_finite and not self.stopped and len(self.ids) < max_new_tokens


@dataclass
class Decoded:
    """What a batch of rows generated, in their order, and how long its steps took."""

    answers: list[Answer]
    step_seconds: list[float]
    by_graphs: int | None = None  # steps of a GPU that replayed captured ones
    why_no_graphs: str | None = None  # of a GPU where they cannot be captured


class Watch(Protocol):
    """Looks on while rows decode, and changes nothing. `order` names the call's row behind each row of a tensor."""

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """A compressed layer of the step has ended: q and out (n, h, 1, d_h), the token's k and v (n, h_kv, 1, d_h)."""
        ...

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        """The step has ended: logits of the next token, (n, vocabulary) float32."""
        ...


def decode(
    model: "Model",
    trace: Trace,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    min_new_tokens: int = 0,
    feed: Sequence[int] = (),
    sampling: Sampling | None = None,
    seeds: Sequence[int] = (),
    cues: Mapping[int, Cue] | None = None,
    on_step: Callable[[int, int], None] | None = None,
    watch: Watch | None = None,
) -> Decoded:
    """Let every row read `feed` through its compressed cache, then answer: greedily, or drawn by `sampling` and a seed.

    Without `feed` the first token comes from the prefill's own logits, for every row the same. With
    `max_new_tokens=0` rows only read; the first `min_new_tokens` are no stop tokens; `cues` interrupt some answers.
    `on_step` gets the number of steps done and of rows still generating; `watch` sees every step, and the steps'
    seconds include what it does.
    """
    assert rows, "no rows to decode"
    assert trace.logits is not None, "the trace has no logits: it was not made by prefill()"
    refuse_switch(model, trace.s_prompt, trace.s_prompt + len(feed) + max(0, max_new_tokens - 1))
    stop_ids = frozenset(stop_ids)
    stops = sorted(id for id in stop_ids if id < len(trace.logits))
    answers = [Answer() for _ in rows]
    batch = _Batch(model, trace, rows, watch)
    clock, n_steps, graphs = Clock(), 0, model.graphs
    n_replayed = graphs.n_replayed
    logits = trace.logits.expand(len(rows), -1)
    draws = None if sampling is None else Draws(sampling, seeds, max_new_tokens, logits.device)
    given, never = (torch.tensor(ids, dtype=torch.long, device=logits.device) for ids in (feed, stops))
    fed, doubt = 0, torch.zeros(len(rows), device=logits.device) if feed else None
    while batch.rows:
        if fed and doubt is not None:  # a feed is read, of which nothing is read back
            doubt = marked(doubt, logits)
        if fed < len(feed):
            ids = given[fed].expand(len(batch.rows))
            fed += 1
        elif max_new_tokens == 0:
            break
        else:
            if stop_ids and len(answers[batch.order[0]].ids) < min_new_tokens:
                logits = logits.index_fill(1, never, -torch.inf)
            t = len(answers[batch.order[0]].ids)
            ids = logits.argmax(-1) if draws is None else draws.pick(logits, batch.order, t)
            for i, row in enumerate(batch.order if cues else ()):
                cue = None if cues is None or row not in cues else cues[row].token(answers[row].ids)
                if cue is not None:
                    ids[i] = cue
            marks = marked(ids, logits) if doubt is None else marked(ids, logits) + doubt
            tokens, doubt = marks.tolist(), None  # where a GPU works, all that a step waits for
            for row, token in zip(batch.order, map(said, tokens), strict=True):
                answers[row].take(token, stop_ids)
            unfinished = [i for i, row in enumerate(batch.order) if answers[row].goes_on(max_new_tokens)]
            if len(unfinished) < len(tokens):
                if not unfinished:
                    break
                ids = batch.only(unfinished, ids)
        with clock.running(model.device), span("step"):
            logits = batch.step(ids)
        n_steps += 1
        if watch is not None:
            watch.predicted(batch.order, logits)
        if on_step is not None:
            on_step(n_steps, len(batch.rows))
    batch.settle()
    for row, mark in zip(batch.order, [] if doubt is None else doubt.tolist(), strict=False):
        answers[row].is_finite = said(mark) is not None
    if model.device.type != "cuda":
        return Decoded(answers, clock.seconds())
    return Decoded(answers, clock.seconds(), graphs.n_replayed - n_replayed, graphs.why_not)


def refuse_switch(model: "Model", s_prompt: int, n: int) -> None:
    """Raise `LengthError` where a text grows from its prompt to `n` tokens past a change of all rotations."""
    if s_prompt <= model.switching_length < n:
        raise LengthError(
            f"a prompt of {s_prompt} tokens and its answer go past {model.switching_length} tokens, behind which "
            f"the model {model.shape.name!r} reads all of its text again in another way (longrope), and KVBench "
            "compresses a text that is read once; use prompts that are longer, or shorter by the answer"
        )


class _Batch(HearsChoices):
    """The rows that still generate; stands in the model's attention during decoding."""

    def __init__(
        self,
        model: "Model",
        trace: Trace,
        rows: Sequence[Row],
        watch: Watch | None = None,
    ) -> None:
        self.model, self.trace, self.watch = model, trace, watch
        are_steady = [takes_all(trace.device) and may_be_steady(row) for row in rows]
        # Rows of one class stand together, so that a class can work on all of its rows at once.
        self.order = sorted(
            range(len(rows)),
            key=lambda i: (not are_steady[i], f"{type(rows[i]).__module__}.{type(rows[i]).__qualname__}"),
        )
        self.are_steady = [are_steady[i] for i in self.order]
        self.rows = [rows[i] for i in self.order]
        self.clock = StepClock()
        self.group()
        self.cache = fork(trace.rest, len(rows))
        self.compressed = frozenset(trace.shape.attention_layers)
        self.readers = Readers(trace.shape)
        self.position = trace.s_prompt
        self.choices = Choices()
        self.calls: dict[int, Call] = {}  # of this step, by layer, where a row wants to look ahead

    def group(self) -> None:
        """Divide the rows: by how they take steps, and by class."""
        self.looks_ahead = any(row.wants_lookahead for row in self.rows)
        self.hears = any(row.wants_input for row in self.rows)
        self.compressing = [row for row in self.rows if row.of_answers]
        self.portions = portions_of(self.rows, self.are_steady, self.clock)
        self.whole = self.portions[0] if len(self.portions) == 1 else Portion(self.rows, self.clock)

    def settle(self) -> None:
        """Bring all steps into the books."""
        for portion in self.portions:
            portion.unwritten.settle()

    def only(self, keep: list[int], ids: Tensor) -> Tensor:
        """Let all rows go but those at `keep`: their tokens, of the rows' tokens `ids`."""
        self.settle()
        self.order, self.rows = [self.order[i] for i in keep], [self.rows[i] for i in keep]
        self.are_steady = [self.are_steady[i] for i in keep]
        select_rows(self.cache, keep)
        self.group()
        return ids[keep]

    def step(self, ids: Tensor) -> Tensor:
        """Feed one token per row, (n,): logits of the next, (n, vocabulary) float32."""
        self.clock.tick()
        if self.looks_ahead or self.hears:
            with self.listening(takes(STEP, ids.device)):
                logits = self.model.forward(ids.unsqueeze(1), self.position, self.cache, self)
        else:
            logits = self.model.step(ids.unsqueeze(1), self.position, self.cache, self)
        self.choices.enter(self.cache, self.rows, [self.position] * len(self.rows), self.trace.s_prompt)
        self.position += 1
        if self.compressing:
            with span("compress"):
                for row in self.compressing:
                    cut(row)
        return logits

    @contextmanager
    def listening(self, on_gpu: bool) -> Iterator[None]:
        """Inside, rows get what they want beside queries: of the layer below, or of their own layer's input."""
        foresees = self.looks_ahead and on_gpu
        with self.model.foreseen(self.foresees) if foresees else nullcontext():
            with nullcontext() if foresees and not self.hears else self.model.watched(self.calls):
                yield

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax, window: int | Chunk | None) -> Tensor:
        if layer in self.readers.owner:
            return self.readers.attend(layer, q, soft)
        if layer not in self.compressed:  # the model's own cache already gave k and v within the layer's window
            return attend_own(q, k, v, soft, window, self.position)
        if len(q) > len(self.rows):
            for row, ahead in zip(self.rows, q[len(self.rows) :].split(1), strict=True):
                row.q_ahead = ahead
        elif self.looks_ahead:
            for _, where in self.whole.groups:
                self.look_ahead(layer, where)
        if self.hears:
            for row, x in zip(self.rows, self.calls[layer].x[: len(self.rows)].split(1), strict=True):
                row.x_now = x
        step, once = self.position - self.trace.s_prompt + 1, layer not in self.readers.last and takes_all(q.device)
        outs: list[Tensor] = []
        for portion in self.portions if once else [self.whole]:
            steady = portion.steady_of(layer) if once else None
            # Queries that look ahead stand behind those of all rows.
            at = slice(portion.at.start, len(q) if portion.at.stop == len(self.rows) else portion.at.stop)
            own = (q, k, v) if at == slice(0, len(q)) else (q[at], k[at], v[at])
            outs.append(
                attend_groups(portion.groups, portion.rows, layer, *own, soft, step, self.readers, steady)
            )  # fmt: skip
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if self.watch is not None:
            self.watch.attended(layer, self.order, *(x[: len(self.rows)] for x in (q, k, v, out)))
        return out

    def foresees(self, layer: int) -> bool:
        """Whether a row wants the query that the layer below foretells."""
        wanting = (row for row in self.rows if row.wants_lookahead)
        return layer in self.compressed and any(row.store[layer].can_fetch for row in wanting)

    def look_ahead(self, layer: int, where: slice) -> None:
        """Give each row that wants it the query that its input of the layer below foretells."""
        which = range(where.start, where.stop)
        looking = [i for i in which if self.rows[i].wants_lookahead and self.rows[i].store[layer].can_fetch]
        if looking:
            below = self.calls[layer - 1].x[looking].to(self.trace.device_of(layer))
            queries = self.model.speculate(layer, below, self.calls[layer].beside)
            for i, q in zip(looking, queries.split(1), strict=True):
                self.rows[i].q_ahead = q


def attend_groups(
    groups: Sequence[tuple[type[Row], slice]], rows: Sequence[Row], layer: int,
    q: Tensor, k: Tensor, v: Tensor, soft: Softmax, step: int | None = None, readers: Readers | None = None,
    steady: Steady | None = None,
) -> Tensor:  # fmt: skip
    """One layer of one step for rows that stand by class: their parts, attention, the books; (n, h, 1, d_h).

    Without a `step` each row's is that of its own newest token. Where other layers read this one's K and V, `readers`
    ends its step; `steady` is what kernels were told at the last ones.
    """
    again = steady is not None and steady.holds(q)
    if steady is not None and again and steady.is_still:
        return steady.take_step(q, k, v, soft, step)
    is_read = readers is not None and layer in readers.last
    resident, parts = list[list[Part]](), list[list[Part]]()
    out, weights = None, list[Tensor | None]([None] * len(rows))
    with span("append", layer):
        if steady is not None and again:
            steady.append(k, v)
        else:
            append_rows([row.store[layer] for row in rows], k, v)
            resident = residents(groups, rows, layer, q)
    fetched = [part for kind, at in groups for part in fetched_rows(kind, rows[at], layer, q[at])]
    with span("attention", layer):
        if steady is not None and again:
            out = steady.attend(q, fetched, soft)
        if out is None:
            parts = [
                [*own, *more] for own, more in zip(resident or residents(groups, rows, layer, q), fetched, strict=True)
            ]
            count_parts(rows, layer, parts)
            out, weights = attend_rows(q, parts, soft, [row.wants_weights for row in rows], rows[0].store[layer].work)
            if steady is not None:
                steady.tell(parts, fetched, q)
    with span("after", layer):
        for i, row in enumerate(rows):
            if (queries := row.store[layer].queries) is not None:
                queries.push(q, i)
        on_gpu = takes("evict", q.device) and not is_read  # where a kernel evicts at once
        changes: list[tuple[Row, Change]] = []
        for kind, at in groups:
            changes += behind_rows(kind, rows[at], layer, out if len(groups) == 1 else out[at], weights[at], on_gpu)
        if steady is not None:
            steady.forget() if changes else steady.learn()
        held = Held(rows, parts, changes, step)
        if readers is not None:
            readers.hold(layer, held)
        else:
            end(layer, held)
    return out


def residents(
    groups: Sequence[tuple[type[Row], slice]], rows: Sequence[Row], layer: int, q: Tensor
) -> list[list[Part]]:  # fmt: skip
    """What each row attends to without a fetch."""
    return [own for kind, at in groups for own in kind.resident_rows(rows[at], layer, q[at])]


def attend_group(
    kind: type[Row], rows: Sequence[Row], layer: int,
    q: Tensor, k: Tensor, v: Tensor, soft: Softmax, step: int,
) -> list[Tensor]:  # fmt: skip
    """`attend_groups` for rows of one class; (1, h, 1, d_h) each."""
    out = attend_groups([(kind, slice(0, len(rows)))], rows, layer, q, k, v, soft, step)
    return [out[i : i + 1] for i in range(len(rows))]
