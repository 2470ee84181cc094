"""A serving engine as small as it can be, for what `serving/` does without vLLM: blocks, chunks, and the scheduler's
arithmetic, around a tiny model. It keeps K and V in tensors of vLLM's layout, and its own attention is dense.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.attend import Part, attend_rows
from kvbench.engine.causal import causal
from kvbench.engine.model import Model
from kvbench.engine.softmax import Softmax
from kvbench.serving.order import DROPPING, Order
from kvbench.serving.pages import Pages
from kvbench.serving.reader import Desk, Turn

BLOCK = 32


@dataclass
class Asked:
    """A request."""

    name: str
    ids: list[int]
    n_new: int
    said: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # that the scheduler has given it, and not taken back
    table: list[int] = field(default_factory=list)  # the worker's, which only grows
    n_read: int = 0
    is_placed: bool = False


class Pretend:
    """An engine with one method."""

    def __init__(self, model: Model, order: Order, n_blocks: int = 200) -> None:
        shape = model.shape
        self.model, self.order, self.free = model, order, list(range(n_blocks))[::-1]
        self.caches = {
            layer: torch.full((n_blocks, shape.h_kv, BLOCK, 2 * shape.d_h), torch.nan)
            for layer in shape.attention_layers
        }
        pages = {layer: Pages.of(cache) for layer, cache in self.caches.items()}
        self.desk = Desk(order, pages, dict.fromkeys(pages, Softmax(shape.d_h**-0.5)))
        self.living: dict[str, Asked] = {}

    def ask(self, name: str, ids: Sequence[int], n_new: int) -> Asked:
        self.living[name] = Asked(name, [*ids], n_new)
        return self.living[name]

    def give(self, one: Asked, n_tokens: int) -> None:
        """The scheduler's part, as `DroppingManager` has it."""
        s = len(one.ids)
        if self.order.rung == DROPPING and not one.is_placed and one.n_read >= s:
            one.is_placed = True
            stay = ceil(self.order.most_slots(s, one.n_read) / BLOCK)
            self.free += one.blocks[stay:]
            del one.blocks[stay:]
        wanted = self.order.most_slots(s, n_tokens) if one.is_placed else n_tokens
        for _ in range(ceil(wanted / BLOCK) - len(one.blocks)):
            block = self.free.pop()
            for cache in self.caches.values():
                cache[block] = torch.nan  # whoever reads what was freed, or not yet written, says so
            one.blocks.append(block)
            one.table.append(block)

    def preempt(self, one: Asked) -> None:
        self.free += one.blocks
        one.blocks, one.table, one.n_read, one.is_placed = [], [], 0, False

    def end(self, one: Asked) -> None:
        self.free += one.blocks
        del self.living[one.name]

    def step(self, one: Asked, n: int | None = None) -> None:
        """Read the request's next `n` tokens, all by default; behind its last one it says another."""
        text = one.ids + one.said
        stop = len(text) if n is None else min(len(text), one.n_read + n)
        self.give(one, stop)
        table = torch.tensor([one.table + [0] * 4])
        who = [(one.name, one.ids, one.n_new)]
        (turn,) = self.desk.turns(who, [0, stop - one.n_read], [stop], table, self.living)
        ids = torch.tensor([text[one.n_read : stop]])
        logits = self.model.forward(ids, one.n_read, self.model.new_cache(), Session(self, turn))
        one.n_read = stop
        if stop == len(text):
            one.said.append(int(logits[0].argmax()))

    def answer(self, one: Asked, chunk: int | None = None) -> list[int]:
        while len(one.said) < one.n_new:
            self.step(one, chunk)
        return one.said


@dataclass
class Session:
    """Stands in the model's attention for one request."""

    engine: Pretend
    turn: Turn

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: Any) -> Tensor:
        turn, pages = self.turn, self.engine.desk.pages[layer]
        trace = turn.reader.trace
        slots = torch.arange(turn.first, turn.seen)
        slots = trace.table[slots // BLOCK] * BLOCK + slots % BLOCK if turn.slots is None else turn.slots
        pages.write(torch.arange(len(pages.v)), slots.unsqueeze(0), k, v)
        if turn.is_step and turn.reader.is_still:  # what vLLM's kernel would do
            held = pages.read(trace.table, torch.arange(turn.n_attended).unsqueeze(0))
            out, _ = attend_rows(q, [[Part(*held)]], softmax, [False])
            turn.reader.count(layer)
            return out
        out = torch.full_like(q, torch.nan)
        if turn.n_prompt:
            past = pages.read(trace.table, torch.arange(turn.first + turn.n_prompt).unsqueeze(0))
            out[:, :, : turn.n_prompt] = causal(q[:, :, : turn.n_prompt], *past, softmax)[0]
        own_q, own_k, own_v = (x[0].transpose(0, 1) for x in (q, k, v))
        given = out[0].transpose(0, 1).contiguous()
        self.engine.desk.read(layer, turn, own_q, own_k, own_v, given)
        return given.transpose(0, 1).unsqueeze(0)
