"""A batch: rows on one trace that read tokens and answer, each at a position of its own.

Tokens go through the model in one pass over all rows. One token a row is a step, which a class of rows makes at once.
Of a feed of several tokens each row has its own: shorter ones are padded in front. Within a layer a row takes its
tokens one after the other, as it would step by step, so that every token sees what the method offers for it and the
tokens before it in the feed. Rows in which a token changes nothing but what is added take many at once
(`engine/turns/at_once.py`).

Not here: what a row attends to (`methods`), a layer's step (`engine/step.py`), going back (`engine/turns/state.py`),
what text tokens are (`evals/answer.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvbench.engine.attend import attend_own, attend_own_past
from kvbench.engine.books.spans import span
from kvbench.engine.books.stopwatch import Stopwatch
from kvbench.engine.caches.forks import fork, select_rows
from kvbench.engine.causal import Chunk
from kvbench.engine.errors import ConfigError, LengthError
from kvbench.engine.layouts.sub_batches import SubBatch, can_be_planned, runs, sub_batches_of
from kvbench.engine.passes.chosen import Choices, HearsChoices
from kvbench.engine.passes.replay import Replay, obstacle
from kvbench.engine.passes.trace import Trace
from kvbench.engine.readers import Readers
from kvbench.engine.row import Row, Variant
from kvbench.engine.sampling.cues import Cue
from kvbench.engine.sampling.draws import Draws, marked, said
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import attend_groups, cut
from kvbench.engine.turns.at_once import read_dense, read_stretches
from kvbench.engine.turns.state import fork_of
from kvbench.kernels.clock import Clock
from kvbench.kernels.fast import STEP, takes, takes_all
from kvbench.kernels.jit import upload

if TYPE_CHECKING:
    from kvbench.engine.model import Model
    from kvbench.engine.passes.session import Call

OnStep = Callable[[int, int], None]  # gets the number of steps so far, and of rows that made the last one


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


class Watch(Protocol):
    """Looks on while rows decode, and changes nothing. `order` names the row of the batch for each row of a tensor."""

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """A compressed layer of the step has ended: q and out (n, h, 1, d_h), the token's k and v (n, h_kv, 1, d_h)."""
        ...

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        """The step has ended: logits of the next token, (n, vocabulary) float32."""
        ...


class Batch(HearsChoices):
    """Rows that read and answer; stands in the model's attention meanwhile.

    Layers that the model keeps to itself want rows of equal feeds and answers: `has_own_layers` says so.
    """

    def __init__(
        self, model: "Model", trace: Trace, rows: Sequence[Row], cache: Any = None, watch: Watch | None = None
    ) -> None:
        """`cache` is the model's own of its layers that nobody compresses, by default that of the prompt."""
        self.model, self.trace, self.rows, self.watch = model, trace, list(rows), watch
        self.cache = fork(trace.rest, len(rows)) if cache is None else cache
        self.has_own_layers = trace.shape.n_own > 0
        self.compressed = frozenset(trace.shape.attention_layers)
        self.are_planned = [takes_all(trace.device) and can_be_planned(row) for row in rows]
        # Rows of one class stand together, so that a class can work on all of its rows at once that are at one
        # position. In all passes rows have this order, which is that of the cache.
        self.order = sorted(range(len(rows)), key=lambda i: (not self.are_planned[i], name_of(type(rows[i]))))
        self.positions = [trace.s_prompt] * len(rows)  # of each row's next token
        self.doubt = torch.zeros(len(rows), device=trace.device)  # NaN: of rows whose logits were, as they read
        self.time, self.readers = Stopwatch(), Readers(trace.shape)
        self.clock, self.n_steps = Clock(), 0
        self.choices = Choices()
        self.calls: dict[int, Call] = {}  # of this pass, by layer, where a row wants to know
        self.is_dense = False  # while a feed is read that attends to all that rows hold
        self.growing: dict[int, Variant] = {}  # rows that hold a feed within a budget of this length once it is read
        self.asked: dict[tuple[int, int], list[Tensor]] = {}  # by row and layer the feed's queries, of those rows
        self.which: list[int] = []  # rows of the pass
        self.sub_batches: list[SubBatch] = []
        self.replay: Replay | None = None  # of these rows' steps, where they may be alike
        self.n_replayed = 0  # of the steps
        self.why_no_graphs = obstacle(model)
        self.is_last = False  # while rows answer that nobody asks again

    def fork(self) -> "Batch":
        """Copies of the rows, which go on from here."""
        batch = Batch(self.model, self.trace, [fork_of(row) for row in self.rows], fork(self.cache, 1))
        batch.positions = list(self.positions)
        return batch

    def read(
        self, feeds: Sequence[Sequence[int]], feed: str = "compressed", grown: Sequence[Variant | None] = (),
        on_step: OnStep | None = None,
    ) -> Tensor:  # fmt: skip
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
        if self.readers.owner and feed == "dense":
            raise ConfigError(
                f"task.feed=dense needs layers with K and V of their own, and some of {self.trace.shape.name!r} attend "
                "to those of another; use task.feed=compressed"
            )
        # Where layers read another's K and V, that one's step has to be over before its next token. Rows that compress
        # between steps read step by step.
        one_by_one = feed == "tokenwise" or bool(self.readers.owner)
        stepwise = [i for i in self.order if one_by_one or self.rows[i].traits.of_answers]
        if stepwise and self.has_own_layers:
            stepwise = self.order
        at_once = [i for i in self.order if i not in stepwise]
        found = torch.empty(0)
        self.is_dense, self.doubt = feed == "dense", torch.zeros_like(self.doubt)

        def enter(which: Sequence[int], logits: Tensor) -> None:
            nonlocal found
            found = found if len(found) else logits.new_empty(len(self.rows), logits.shape[1])
            found[which] = logits

        if at_once:
            enter(at_once, self.step(at_once, ids[at_once], [pads[i] for i in at_once], on_step))
        for j in range(longest if stepwise else 0):
            reading = [i for i in stepwise if pads[i] <= j]
            logits = self.step(reading, ids[reading, j : j + 1], on_step=on_step)
            if j < longest - 1:  # of which nothing is read back
                self.doubt[reading] = marked(self.doubt[reading], logits).to(self.doubt.dtype)
            else:
                enter(reading, logits)
        self.is_dense = False
        self.extend()
        return found

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
        draws: Draws | None = None, cues: Mapping[int, Cue] | None = None, on_step: OnStep | None = None,
        is_last: bool = False,
    ) -> list[Answer]:  # fmt: skip
        """Every row answers, greedily or as `draws` say; `logits` (n, vocabulary) are those of its first token.

        Its last token is not read: whoever goes on with this row has it read with the next feed, but for the `is_last`
        answer of all.
        """
        stop_ids = frozenset(stop_ids)
        stops = sorted(id for id in stop_ids if id < logits.shape[-1])
        never = torch.tensor(stops, dtype=torch.long, device=logits.device)
        answers, self.is_last = [Answer() for _ in self.rows], is_last
        speaking, logits, doubt, t = self.order, logits[self.order], self.doubt[self.order], 0
        while True:
            if stop_ids and t < min_new_tokens:
                logits = logits.index_fill(1, never, -torch.inf)
            ids = logits.argmax(-1) if draws is None else draws.pick(logits, speaking, t)
            for at, i in enumerate(speaking if cues else ()):
                cue = None if cues is None or i not in cues else cues[i].token(answers[i].ids)
                if cue is not None:
                    ids[at] = cue
            marks = marked(ids, logits) if t else marked(ids, logits) + doubt
            t += 1
            for sub_batch in self.sub_batches:
                sub_batch.pending.write()  # while a GPU makes the step
            tokens = marks.tolist()  # all that a step waits for
            for i, token in zip(speaking, map(said, tokens), strict=True):
                answers[i].take(token, stop_ids)
            keep = [at for at, i in enumerate(speaking) if answers[i].goes_on(max_new_tokens[i])]
            if not keep:
                return answers
            if len(keep) < len(speaking):
                speaking, ids = [speaking[at] for at in keep], ids[keep]
                if self.has_own_layers:
                    select_rows(self.cache, keep)
            logits = self.step(speaking, ids.unsqueeze(1), on_step=on_step)

    def seconds(self) -> list[float]:
        """Seconds of every pass so far."""
        return self.time.seconds()

    def flush(self) -> None:
        """Bring all steps into the books."""
        for sub_batch in self.sub_batches:
            sub_batch.pending.flush()

    # A pass of the model.

    def step(
        self, which: Sequence[int], ids: Tensor, pads: Sequence[int] = (), on_step: OnStep | None = None
    ) -> Tensor:  # fmt: skip
        """The rows `which` read their ids (n, m), of which the first `pads` are none.

        Returns the logits of the next token, (n, vocabulary) float32.
        """
        m = ids.shape[1]
        self.pads = list(pads) or [0] * len(which)
        assert not (self.has_own_layers and any(self.pads)), "layers of the model's own read feeds of one length"
        self.starts = [self.positions[i] - pad for i, pad in zip(which, self.pads, strict=True)]
        refuse_switch(self.model, self.trace.s_prompt, max(self.starts) + m)
        with self.time.running(self.model.device), span("step"), torch.inference_mode():
            logits = None
            if self.replay is not None and m == 1:
                logits = self.replay.take(list(which), ids, self.cache, self.is_last)
                self.n_replayed += logits is not None
            if logits is None:
                self.choose(which)
                make = partial(self.make, ids)
                if self.replay is None or m > 1:
                    logits = make()
                else:
                    logits = self.replay.make(ids, self.places(ids), make)
                    self.why_no_graphs = self.replay.why_not
            self.cut(which, m)
        for i, pad in zip(which, self.pads, strict=True):
            self.positions[i] += m - pad
        self.n_steps += 1
        if self.watch is not None:
            self.watch.predicted(which, logits)
        if on_step is not None:
            on_step(self.n_steps, len(which))
        return logits

    def make(self, ids: Tensor) -> Tensor:
        """The pass itself."""
        m = ids.shape[1]
        self.clock.tick()
        if m == 1 and not self.looks_ahead and not self.hears:
            logits = self.model.forward(ids, self.places(ids), self.cache, self)
        else:
            with self.listening(m == 1 and takes(STEP, ids.device)):
                logits = self.model.forward(ids, self.places(ids), self.cache, self)
        self.choices.enter(self.cache, self.active, self.starts, self.trace.s_prompt)
        return logits

    def cut(self, which: Sequence[int], m: int) -> None:
        """Let rows that compress between steps do so."""
        cutting = [self.rows[i] for i in which if self.rows[i].traits.of_answers]
        if cutting:
            assert m == 1, "a row that compresses between steps reads step by step"
            with span("compress"):
                for row in cutting:
                    cut(row)

    def choose(self, which: Sequence[int]) -> None:
        """Let these rows make the pass: how they stand to each other, and what they want."""
        if self.which == list(which) and self.apart == [start - self.starts[0] for start in self.starts]:
            return
        self.flush()
        self.which, self.active = list(which), [self.rows[i] for i in which]
        self.apart = [start - self.starts[0] for start in self.starts]
        self.looks_ahead = any(row.wants_lookahead for row in self.active)
        self.hears = any(row.wants_input for row in self.active)
        self.runs: dict[tuple[int, ...], list[tuple[type[Row], slice]]] = {}
        self.sub_batches = sub_batches_of(self.active, self.apart, [self.are_planned[i] for i in which], self.clock)
        is_one = len(self.sub_batches) == 1
        self.whole = self.sub_batches[0] if is_one else SubBatch(self.active, self.apart, self.clock)
        self.replay = Replay(self.model, self.whole, which, self.clock) if self.may_be_replayed else None

    @property
    def may_be_replayed(self) -> bool:
        """Whether steps of these rows may be alike for all that the batch knows."""
        differs = self.looks_ahead or self.hears or self.readers.last or self.watch is not None
        is_planned = len(self.sub_batches) == 1 and self.are_planned[self.which[0]]
        return is_planned and not differs and self.why_no_graphs is None

    def places(self, ids: Tensor) -> int | Tensor:
        """The positions of ids (n, m): that of the first one where all rows are at it."""
        if not any(self.apart):
            return self.starts[0]
        starts = upload(self.starts, ids.device).unsqueeze(1)
        return (starts + torch.arange(ids.shape[1], device=ids.device)).clamp(min=0)

    @contextmanager
    def listening(self, on_gpu: bool) -> Iterator[None]:
        """Inside, rows get what they want besides queries: that of the layer below, or their own layer's input."""
        foresees = self.looks_ahead and on_gpu and not any(self.apart)
        with self.model.foreseen(self.foresees) if foresees else nullcontext():
            with nullcontext() if foresees and not self.hears else self.model.watched(self.calls):
                yield

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        m, n = q.shape[2], len(self.active)
        if layer in self.readers.owner:
            return self.readers.attend(layer, q, softmax)
        if layer not in self.compressed:  # the model's own cache already gave k and v within the layer's window
            attend_own_tokens = attend_own if m == 1 else attend_own_past
            return attend_own_tokens(q, k, v, softmax, window, self.starts[0])
        for at, i in enumerate(self.which if self.growing else ()):
            if i in self.growing and layer not in self.active[at].skipped:
                self.asked.setdefault((i, layer), []).append(q[at : at + 1, :, self.pads[at] :])
        ahead = dict(enumerate(q[n:].split(1))) if len(q) > n else self.look_ahead(layer)
        if m > 1 or self.is_dense:
            return self.attend_several(layer, q, k, v, softmax, ahead)
        self.tell(layer, range(n), 0, ahead)
        out = self.attend_one(layer, q, k, v, softmax)
        if self.watch is not None:
            self.watch.attended(layer, self.which, *(x[:n] for x in (q, k, v, out)))
        return out

    def tell(self, layer: int, which: Iterable[int], j: int, ahead: Mapping[int, Tensor]) -> None:
        """Give rows what they want to know of their token `j`."""
        for i in which if ahead or self.hears else ():
            if i in ahead:
                self.active[i].q_ahead = ahead[i][:, :, j : j + 1]
            if self.hears:
                self.active[i].x_now = self.calls[layer].x[i : i + 1, j : j + 1]

    def attend_one(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """A step of all rows. Queries that look ahead follow those of all rows."""
        once, n = layer not in self.readers.last and takes_all(q.device), len(self.active)
        outs: list[Tensor] = []
        for sub_batch in self.sub_batches if once else [self.whole]:
            plan = sub_batch.plan_of(layer) if once else None
            at = slice(sub_batch.at.start, len(q) if sub_batch.at.stop == n else sub_batch.at.stop)
            own = (q, k, v) if at == slice(0, len(q)) else (q[at], k[at], v[at])
            outs.append(attend_groups(sub_batch.groups, sub_batch.rows, layer, *own, softmax, self.readers, plan))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attend_several(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, ahead: Mapping[int, Tensor]
    ) -> Tensor:  # fmt: skip
        """The tokens (n, h, m, d_h) of a feed, one after the other where they cannot be read at once."""
        rows, m, out = self.active, q.shape[2], q.new_zeros(*q.shape[:3], v.shape[3])
        with span("attention", layer):
            left = []
            for i, row in enumerate(rows):
                if self.is_dense and row.store[layer].can_fetch:
                    for j in range(self.pads[i], m):
                        self.tell(layer, [i], j, ahead)
                        q_j, k_j, v_j = (x[i : i + 1, :, j : j + 1] for x in (q, k, v))
                        out[i : i + 1, :, j : j + 1] = read_dense(row, layer, q_j, k_j, v_j, softmax)
                elif m > 1 and row.at_once(layer, m - self.pads[i]) > 1:
                    q_i, k_i, v_i = (x[i : i + 1, :, self.pads[i] :] for x in (q, k, v))
                    out[i : i + 1, :, self.pads[i] :] = read_stretches(row, layer, q_i, k_i, v_i, softmax)
                else:
                    left.append(i)
        readers = self.readers if m == 1 else None
        for j in range(m):
            live = [i for i in left if self.pads[i] <= j]
            if not live:
                continue
            self.tell(layer, live, j, ahead)
            is_whole = len(live) == len(rows)
            q_j, k_j, v_j = (x[:, :, j : j + 1] if is_whole else x[live, :, j : j + 1] for x in (q, k, v))
            groups = self.runs_of(live)
            found = attend_groups(groups, [rows[i] for i in live], layer, q_j, k_j, v_j, softmax, readers)
            if is_whole:
                out[:, :, j : j + 1] = found
            else:
                out[live, :, j : j + 1] = found
        return out

    def runs_of(self, live: Sequence[int]) -> list[tuple[type[Row], slice]]:
        """Slices of these rows that can be worked on together."""
        key = tuple(live)
        if key not in self.runs:
            self.runs[key] = runs([self.active[i] for i in live], [self.apart[i] for i in live])
        return self.runs[key]

    def foresees(self, layer: int) -> bool:
        """Whether a row wants the query that the layer below foretells."""
        wanting = (row for row in self.active if row.wants_lookahead)
        return layer in self.compressed and any(row.store[layer].can_fetch for row in wanting)

    def look_ahead(self, layer: int) -> dict[int, Tensor]:
        """The queries that the layer below foretells, of the rows that want them: (1, h, m, d_h) each."""
        rows = self.active if self.looks_ahead else []
        looking = [i for i, row in enumerate(rows) if row.wants_lookahead and row.store[layer].can_fetch]
        if not looking:
            return {}
        beside = {key: rows_of(value, looking) for key, value in self.calls[layer].beside.items()}
        below = self.calls[layer - 1].x[looking].to(self.trace.device_of(layer))
        return dict(zip(looking, self.model.speculate(layer, below, beside).split(1), strict=True))


def refuse_switch(model: "Model", s_prompt: int, n: int) -> None:
    """Raise `LengthError` where a text grows from its prompt to `n` tokens past a change of all rotations."""
    if s_prompt <= model.switching_length < n:
        raise LengthError(
            f"a prompt of {s_prompt} tokens and its answer go past {model.switching_length} tokens, behind which "
            f"the model {model.shape.name!r} reads all of its text again in another way (longrope), and KVBench "
            "compresses a text that is read once; use prompts that are longer, or shorter by the answer"
        )


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def rows_of(value: Any, which: Sequence[int]) -> Any:
    """These rows of a call's argument, where it has rows."""
    if isinstance(value, Tensor) and value.ndim > 1:
        return value[list(which)] if len(value) > 1 else value
    if isinstance(value, tuple) and value and all(isinstance(x, Tensor) for x in value):
        return tuple(rows_of(x, which) for x in value)
    return value
