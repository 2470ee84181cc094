"""A request in vLLM whose prompt a method takes over: `Reader`; and all of a worker's: `Desk`.

vLLM reads prompts in chunks, skips what its prefix cache has, mixes them with requests that decode, and after a
preemption reads prompt and answer again in one pass. So a prompt is taken over layer by layer, in the pass that reads
its last token, and what a pass reads of an answer goes to the row as a feed does. In a chain of turns a request goes on
with the reader of the one before it: its own text is read as an answer is.

Not here: vLLM's objects (`serving/adapter`), memory (`serving/pagestore.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.audit import count_parts
from kvbench.engine.observe import ModelFact
from kvbench.engine.readers import Held, end
from kvbench.engine.rows import leave_kernels_out
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import behind_rows, step_rows
from kvbench.engine.turns.at_once import read_stretches
from kvbench.serving.order import DROPPING, PAGES, VISIBLE, Note, Order, Unserved
from kvbench.serving.pages import Pages
from kvbench.serving.pagestore import PageStore, PageTrace

NO_NOTE, MOST_BOOKS = Note(), 10_000


class Reader:
    """One request, from its first token to its last or to its preemption."""

    def __init__(
        self, order: Order, ids: Sequence[int], n_new: int, pages: Mapping[int, Pages], softmax: Mapping[int, Softmax]
    ) -> None:
        self.order, self.s_prompt = order, len(ids)
        self.variant = order.variant(self.s_prompt)
        self.trace = PageTrace(own_shape(order, pages), self.s_prompt, pages, order.rung)
        self.trace.ids, self.trace.softmax = ids, dict(softmax)
        self.row = self.variant.row(self.trace, n_new, PageStore)
        self.store: PageStore = self.row.store  # type: ignore[assignment]
        if self.row.wants_lookahead:
            raise Unserved("looks a layer ahead, which vLLM's model does not")
        self.queries: dict[int, Tensor] = {}  # by layer: the latest of the prompt, (1, h, n, d_h)
        self.is_placed = False
        self.n_seen = 0  # tokens that vLLM has read, those that it found included
        self.n_gone = 0  # blocks at the head of vLLM's table that are not the request's, or stand in `first`
        self.first = self.trace.table  # blocks that are its first ones

    # The prompt.

    def look(self, layer: int, q: Tensor) -> None:
        """Queries of the prompt's next tokens (1, h, n, d_h); as many stay as somebody looks at."""
        wanted = [what.looks_at for what in self.variant.observations]
        if not wanted:
            return
        q = torch.cat([self.queries[layer], q], 2) if layer in self.queries else q
        most = None if None in wanted else max(n for n in wanted if n is not None)
        self.queries[layer] = q.clone() if most is None else q[:, :, -most:].clone()

    def build(self, layer: int) -> None:
        """The layer has the whole prompt: the method places it."""
        trace = self.trace
        least = self.s_prompt - self.order.most_shared(self.s_prompt)
        n = self.queries[layer].shape[2] if layer in self.queries else least  # it looks at none
        assert n >= least, "the prefix cache handed on what the method looks at"
        trace.taken.append(layer)
        for what in self.variant.observations:
            if isinstance(what, ModelFact):
                raise Unserved("asks for what a calibration has found of the model, which is not looked up here")
            if what.of_input:
                raise Unserved("looks at what goes into a layer's attention, of which pages have keys and values alone")
            trace.observe(layer, what, self.queries[layer], trace.keys(layer), trace.softmax[layer])
        self.queries.pop(layer, None)
        self.row.build(layer)
        trace.settle()  # what it sends to the host is there when an answer is read again in this pass
        if len(trace.taken) == len(trace.shape.attention_layers):
            self.row.complete()
            trace.settle()
            self.is_placed = True

    def take_blocks(self, table: Tensor, n_tokens: int, block: int, is_shared: bool) -> None:
        """On the dropping rung, in the pass that ends the prompt: the blocks to which survivors move.

        Where others may hold the prompt's, they stand after those of the pass's tokens; else they are the first ones.
        """
        n, stay = -(-n_tokens // block), -(-self.order.most_slots(self.s_prompt, n_tokens) // block)
        at = n if is_shared else 0
        self.first = self.trace.own = table[at : at + stay].clone()
        self.n_gone = max(n, at + stay)

    def blocks(self, table: Tensor) -> Tensor:
        """The blocks that are the request's, of vLLM's table (m,), which only ever grows."""
        return torch.cat([self.first, table[self.n_gone :]]) if self.is_placed else table

    def check_slots(self, n_tokens: int) -> None:
        """On the dropping rung, that no more has survived than the scheduler counts."""
        most = self.order.most_slots(self.s_prompt, n_tokens)
        if (held := self.store.n_held()) > most:
            raise Unserved(f"holds {held} tokens where its budget is {most}, by which vLLM's scheduler counts")

    def go_on(self) -> None:
        """Stand for the next turn's request, whose table begins with the blocks that this one had."""
        self.first, self.n_gone = self.first[:0], 0

    # A step.

    @property
    def is_still(self) -> bool:
        """Whether vLLM's own attention over the request's slots is the method's."""
        return self.order.rung == DROPPING and self.row.is_still

    def n_attended(self, n: int) -> int:
        """Slots that vLLM's own attention reads in a step of `n` tokens."""
        at = next(iter(self.row.store.layers.values()))
        return at.n_kept + max(n, min(at.n_window + n, at.capacity))

    def count(self, layer: int) -> None:
        """A step that vLLM's own attention made: its books."""
        self.row.store[layer].advance(*(torch.empty(0),) * 2)
        self.row.store.close(layer)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of tokens after the prompt, one after the other or several at once: (1, h, n, d_h)."""
        rung = self.trace.rung
        self.trace.rung = VISIBLE if rung == PAGES else rung  # where vLLM's kernel does not read pages for it
        out = read_stretches(self.row, layer, q, k, v, self.trace.softmax[layer])
        self.trace.rung = rung
        return out

    def parts(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> list[Part]:
        """Keys and values that one token attends to, on the rung where vLLM's kernel reads it."""
        parts = step_rows(type(self.row), [self.row], layer, q, k, v)
        count_parts([self.row], layer, parts)
        return parts[0]

    def behind(self, layer: int, out: Tensor) -> None:
        """Make the changes that follow a token's step."""
        changes = behind_rows(type(self.row), [self.row], layer, out, [None])
        end(layer, Held([self.row], [], changes))

    def books(self) -> dict[str, Any]:
        """The ledger as a line of samples.jsonl has it."""
        row, rules = self.row, self.variant.method
        exempt, in_mean = row.skipped, rules.traits.keeps_budget_in == "mean"
        with_index = not rules.traits.drops
        return {"s_prompt": self.s_prompt} | row.store.ledger.summary(
            row.budget, self.trace.shape, exempt, in_mean, with_index=with_index
        )


def own_shape(order: Order, pages: Mapping[int, Pages]) -> ModelShape:
    """The model's shape with the heads of this worker."""
    shape, n = order.chosen.shape, order.ranks
    return replace(shape, h=shape.h // n, h_kv=shape.h_kv // n, attention_layers=tuple(sorted(pages)))


@dataclass
class Turn:
    """A request's tokens of one step."""

    reader: Reader
    rows: slice  # of the step's tokens
    first: int  # the position of the first of them
    slots: Tensor | None = None  # on the dropping rung: where they go
    n_attended: int = 0  # there: slots that vLLM's own attention reads

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt among them."""
        return max(0, min(self.reader.s_prompt - self.first, self.rows.stop - self.rows.start))

    @property
    def seen(self) -> int:
        """Tokens so far, these included."""
        return self.first + self.rows.stop - self.rows.start

    @property
    def ends_prompt(self) -> bool:
        return self.n_prompt > 0 and self.first + self.n_prompt == self.reader.s_prompt

    @property
    def is_step(self) -> bool:
        """Whether it is one token after a prompt that is placed."""
        return self.n_prompt == 0 and self.seen == self.first + 1


@dataclass(frozen=True)
class Asked:
    """A request as vLLM's worker knows it."""

    name: str
    ids: Sequence[int]  # of the prompt
    n_new: int  # tokens that may follow
    note: Note = NO_NOTE


@dataclass
class Desk:
    """The requests of a worker."""

    order: Order
    pages: Mapping[int, Pages]
    softmax: Mapping[int, Softmax]
    is_shared: bool = False  # whether other requests may hold a prompt's pages: vLLM's prefix cache is on
    readers: dict[str, Reader] = field(default_factory=dict)
    kept: dict[str, Reader] = field(default_factory=dict)  # of requests that ended, from which others may go on
    books: dict[str, Any] = field(default_factory=dict)  # of requests that ended, of the latest of them
    replays: int = 0  # requests that read their own answers again
    n_steps: int = 0
    most_decoding: int = 0  # requests in one step after their prompts

    def __post_init__(self) -> None:
        leave_kernels_out(next(iter(self.pages.values())).device, "they read a layer's own memory, and it has none")

    @property
    def block(self) -> int:
        return next(iter(self.pages.values())).block

    def turns(
        self, who: Sequence[Asked], starts: Sequence[int], seen: Sequence[int], tables: Tensor, alive: Collection[str]
    ) -> list[Turn]:
        """Each request's turn in this step."""
        for name in [name for name in self.readers if name not in alive]:
            self.close(name)
        turns = []
        arrived = [asked.note for asked in who if asked.name not in self.readers]
        for i, asked in enumerate(who):
            n, table = starts[i + 1] - starts[i], tables[i].long()
            first = seen[i] - n
            reader = self.readers.get(asked.name)
            if reader is None or reader.n_seen != first:  # new, or from the beginning again
                reader = self.readers[asked.name] = self.begin(asked, first, seen[i])
            reader.n_seen = seen[i]
            reader.trace.table = reader.trace.own = reader.blocks(table)
            turn = Turn(reader, slice(starts[i], starts[i + 1]), first)
            if self.order.rung == DROPPING:
                if reader.is_placed:
                    turn.slots, turn.n_attended = self.slots(reader, n), reader.n_attended(n)
                elif turn.ends_prompt and self.order.moves(reader.s_prompt):
                    reader.take_blocks(table, turn.seen, self.block, self.is_shared)
            turns.append(turn)
        for note in arrived:  # once all of them have taken theirs
            self.kept = {name: reader for name, reader in self.kept.items() if name in note.kept}
        self.n_steps += 1
        self.most_decoding = max(self.most_decoding, sum(turn.reader.is_placed for turn in turns))
        return turns

    def begin(self, asked: Asked, first: int, seen: int) -> Reader:
        """A request's reader, of which vLLM reads the tokens from `first` to `seen`."""
        note = asked.note
        if note.chain is not None and first > (note.s_prompt or 0):  # else it was preempted, and its chain is gone
            reader = self.kept.pop(note.chain)
            assert reader.n_seen == first, (asked.name, note.chain, reader.n_seen, first)
            reader.go_on()
            return reader
        reader = Reader(self.order, asked.ids[: note.s_prompt], asked.n_new, self.pages, self.softmax)
        self.replays += seen > reader.s_prompt
        return reader

    def slots(self, reader: Reader, n: int) -> Tensor:
        """Where vLLM puts the next `n` tokens among all of its slots; -1: nowhere."""
        if n > 1:  # a window may roll over what the first of them still attend to: they are written one by one
            return torch.full((n,), -1, device=reader.trace.device)
        slots = reader.store.next_slots(n)
        return reader.trace.table[slots // self.block] * self.block + slots % self.block

    def read(self, layer: int, turn: Turn, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """A layer's tokens of one request, q, k, v and out (n, heads, d_h); vLLM's own attention has been made.

        It is right for the prompt's tokens. What comes after them attends as the method says.
        """
        reader, n = turn.reader, turn.n_prompt
        if n:
            reader.look(layer, folded(q[:n]))
        if turn.ends_prompt:
            reader.build(layer)
        if n < len(q):
            out[n:] = reader.attend(layer, *(folded(x[n:]) for x in (q, k, v)))[0].transpose(0, 1)
        if turn.ends_prompt and reader.is_placed and reader.order.rung == DROPPING:
            reader.check_slots(turn.seen)

    def close(self, name: str) -> None:
        """The request is over, or its client is gone."""
        reader = self.readers.pop(name)
        if reader.is_placed:
            self.books[name] = reader.books()
            if len(self.books) > MOST_BOOKS:
                self.books.pop(next(iter(self.books)))
            if self.order.chains:
                self.kept[name] = reader

    def told(self) -> dict[str, Any]:
        """The account of what happened so far, for the front end."""
        for name in [*self.readers]:
            self.close(name)
        return {
            "books": self.books, "steps": self.n_steps, "replays": self.replays, "most_decoding": self.most_decoding,
        }  # fmt: skip


def folded(tokens: Tensor) -> Tensor:
    """(n, heads, d_h) as (1, heads, n, d_h)."""
    return tokens.transpose(0, 1).unsqueeze(0)
