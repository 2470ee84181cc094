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
from kvbench.serving.pages import Layout, Pages, beside, vec
from kvbench.serving.reader import Desk, Turn


@dataclass(frozen=True)
class Form:
    """Pages of one of vLLM's kernels."""

    block: int
    layout: Layout
    order: tuple[int, ...]  # of the axes (layers, blocks, h_kv, block, 2 d_h) in memory, as vLLM's KVCacheLayout has it

    def caches(self, n_layers: int, n_blocks: int, h_kv: int, d_h: int, device: torch.device) -> Tensor:
        shape = (n_layers, n_blocks, h_kv, self.block, 2 * d_h)
        made = torch.full([shape[axis] for axis in self.order], torch.nan, device=device)
        return made.permute([self.order.index(axis) for axis in range(5)])


FORMS = {
    "cpu": Form(32, vec, (0, 1, 2, 3, 4)),
    "flash": Form(16, beside, (0, 1, 3, 2, 4)),  # FlashAttention's and Triton's, FlashInfer's NHD: LBNHC
    "infer": Form(16, beside, (0, 1, 2, 3, 4)),  # FlashInfer's HND, which Blackwell takes: LBHNC
    "across": Form(16, beside, (1, 0, 3, 2, 4)),  # a block of all layers: BLNHC
}


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

    def __init__(self, model: Model, order: Order, form: Form = FORMS["cpu"], n_blocks: int = 200) -> None:
        shape = model.shape
        self.model, self.order, self.free = model, order, list(range(n_blocks))[::-1]
        self.block, layers = form.block, shape.attention_layers
        self.caches = form.caches(len(layers), n_blocks, shape.h_kv, shape.d_h, model.device)
        pages = {layer: Pages.of(cache, form.layout) for layer, cache in zip(layers, self.caches, strict=True)}
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
            stay = ceil(self.order.most_slots(s, one.n_read) / self.block)
            self.free += one.blocks[stay:]
            del one.blocks[stay:]
        wanted = self.order.most_slots(s, n_tokens) if one.is_placed else n_tokens
        for _ in range(ceil(wanted / self.block) - len(one.blocks)):
            block = self.free.pop()
            self.caches[:, block] = torch.nan  # whoever reads what was freed, or not yet written, says so
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
        table = torch.tensor([one.table + [0] * 4], device=self.model.device)
        who = [(one.name, one.ids, one.n_new)]
        (turn,) = self.desk.turns(who, [0, stop - one.n_read], [stop], table, self.living)
        ids = torch.tensor([text[one.n_read : stop]], device=self.model.device)
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
        turn, pages, block = self.turn, self.engine.desk.pages[layer], self.engine.block
        trace = turn.reader.trace
        slots = torch.arange(turn.first, turn.seen, device=q.device)
        slots = trace.table[slots // block] * block + slots % block if turn.slots is None else turn.slots
        pages.write(torch.arange(len(pages.v), device=q.device), slots.unsqueeze(0), k, v)
        if turn.is_step and turn.reader.is_still:  # what vLLM's kernel would do
            held = pages.read(trace.table, trace.span(0, turn.n_attended))
            out, _ = attend_rows(q, [[Part(*held)]], softmax, [False])
            turn.reader.count(layer)
            return out
        out = torch.full_like(q, torch.nan)
        if turn.n_prompt:
            past = pages.read(trace.table, trace.span(0, turn.first + turn.n_prompt))
            out[:, :, : turn.n_prompt] = causal(q[:, :, : turn.n_prompt], *past, softmax)[0]
        own_q, own_k, own_v = (x[0].transpose(0, 1) for x in (q, k, v))
        given = out[0].transpose(0, 1).contiguous()
        self.engine.desk.read(layer, turn, own_q, own_k, own_v, given)
        return given.transpose(0, 1).unsqueeze(0)
