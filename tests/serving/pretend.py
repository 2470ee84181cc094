"""A serving engine as small as it can be, for what `serving/` does without vLLM: blocks, chunks, and the scheduler's
arithmetic, around a tiny model. It keeps K and V in tensors of vLLM's layout, and its own attention is dense.
"""

from collections import Counter
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
from kvbench.serving.order import PAGES, Note, Order
from kvbench.serving.pages import Layout, Pages, beside, vec
from kvbench.serving.pagetable import of_one_head
from kvbench.serving.reader import Asked, Desk, Turn
from kvbench.tests.serving.paged import flash_attn_varlen_func


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


BLOCK = 32  # tokens of a CPU's
FORMS = {
    "cpu": Form(BLOCK, vec, (0, 1, 2, 3, 4)),
    "flash": Form(16, beside, (0, 1, 3, 2, 4)),  # FlashAttention's and Triton's, FlashInfer's NHD: LBNHC
    "infer": Form(16, beside, (0, 1, 2, 3, 4)),  # FlashInfer's HND, which Blackwell takes: LBHNC
    "across": Form(16, beside, (1, 0, 3, 2, 4)),  # a block of all layers: BLNHC
}


@dataclass
class Request:
    """A request."""

    name: str
    ids: list[int]
    n_new: int
    note: Note
    said: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # that the scheduler has given it, and not taken back
    table: list[int] = field(default_factory=list)  # the worker's, which only grows
    n_read: int = 0
    n_found: int = 0  # tokens that came from the prefix cache
    going: slice | None = None  # of the blocks: those that leave before the next pass
    is_placed: bool = False

    @property
    def s_prompt(self) -> int:
        assert self.note.s_prompt is not None
        return self.note.s_prompt

    @property
    def text(self) -> list[int]:
        return self.ids + self.said


class Pretend:
    """An engine with one method. With `is_shared` it has a prefix cache."""

    def __init__(
        self, model: Model, order: Order, n_blocks: int = 200, is_shared: bool = False, form: Form = FORMS["cpu"]
    ) -> None:
        shape = model.shape
        self.model, self.order, self.free, self.is_shared = model, order, list(range(n_blocks))[::-1], is_shared
        self.block, layers = form.block, shape.attention_layers
        self.caches = form.caches(len(layers), n_blocks, shape.h_kv, shape.d_h, model.device)
        pages = {layer: Pages.of(cache, form.layout) for layer, cache in zip(layers, self.caches, strict=True)}
        self.desk = Desk(order, pages, dict.fromkeys(pages, Softmax(shape.d_h**-0.5)), is_shared)
        self.living: dict[str, Request] = {}
        self.holders: Counter[int] = Counter()  # of each block
        self.cached: dict[tuple[int, ...], int] = {}  # by the text to a block's end
        self.left: dict[str, Request] = {}  # turns that are over, from which others go on

    def ask(self, name: str, ids: Sequence[int], n_new: int) -> Request:
        self.living[name] = one = Request(name, [*ids], n_new, Note(len(ids)))
        return one

    def take(self, blocks: Sequence[int]) -> list[int]:
        self.holders.update(blocks)
        return [*blocks]

    def new(self, n: int) -> list[int]:
        """Blocks of nobody. Whoever reads what was freed, or not yet written, says so."""
        found = [self.free.pop() for _ in range(n)]
        self.cached = {text: block for text, block in self.cached.items() if block not in found}
        self.caches[:, torch.tensor(found, dtype=torch.long, device=self.model.device)] = torch.nan
        return self.take(found)

    def release(self, blocks: Sequence[int]) -> None:
        self.holders.subtract(blocks)
        self.free[:0] = [block for block in blocks if not self.holders[block]]  # the last ones to be given again

    def find(self, one: Request) -> None:
        """What the prefix cache has of a request that begins."""
        most = min(self.order.most_shared(one.s_prompt), len(one.text) - 1)
        while (
            one.n_read + self.block <= most
            and (block := self.cached.get((*one.text[: one.n_read + self.block],))) is not None
        ):
            if block in self.free:
                self.free.remove(block)
            one.blocks += self.take([block])
            one.n_read = one.n_found = one.n_read + self.block
        one.table = [*one.blocks]

    def give(self, one: Request, n_tokens: int) -> None:
        """The scheduler's part, as `Manager` has it."""
        s = one.s_prompt
        if one.going is not None:
            self.release(one.blocks[one.going])
            del one.blocks[one.going]
            one.going, one.is_placed = None, True
        slots = self.order.most_slots(s, n_tokens)
        before = len(one.blocks)
        one.blocks += self.new(max(0, ceil((slots if one.is_placed else n_tokens) / self.block) - before))
        if self.is_shared and not one.is_placed:
            for at in range(min(n_tokens, s) // self.block):
                self.cached.setdefault((*one.text[: (at + 1) * self.block],), one.blocks[at])
        if self.order.moves(s) and not one.is_placed and n_tokens >= s:
            stay, n = ceil(slots / self.block), len(one.blocks)
            one.blocks += self.new(stay) if self.is_shared else []
            one.going = slice(0 if self.is_shared else stay, n)
        one.table += one.blocks[before:]

    def preempt(self, one: Request) -> None:
        self.release(one.blocks)
        one.blocks, one.table, one.n_read, one.going, one.is_placed = [], [], 0, None, False

    def end(self, one: Request) -> None:
        del self.living[one.name]
        if self.order.chains:
            self.left[one.name] = one
        else:
            self.release(one.blocks)

    def go_on(self, name: str, one: Request, ids: Sequence[int], n_new: int) -> Request:
        """The next turn of a request that is over: more text behind its own."""
        before = self.left.pop(one.name)
        note = Note(before.s_prompt, before.name, [*self.left])
        self.living[name] = made = Request(name, [*before.text, *ids], n_new, note)
        made.blocks, made.n_read, made.is_placed = before.blocks, before.n_read, before.is_placed
        made.table = [*made.blocks]
        return made

    def step(self, one: Request, n: int | None = None) -> None:
        """Read the request's next `n` tokens, all by default; behind its last one it says another."""
        text = one.text
        if not one.blocks and self.is_shared:
            self.find(one)
        stop = len(text) if n is None else min(len(text), one.n_read + n)
        self.give(one, stop)
        table = torch.tensor([one.table + [0] * 4], device=self.model.device)
        who = [Asked(one.name, one.ids, 4096 if self.order.chains else one.n_new, one.note)]
        (turn,) = self.desk.turns(who, [0, stop - one.n_read], [stop], table, self.living)
        ids = torch.tensor([text[one.n_read : stop]], device=self.model.device)
        logits = self.model.forward(ids, one.n_read, self.model.new_cache(), Session(self, turn))
        one.n_read = stop
        if stop == len(text):
            one.said.append(int(logits[0].argmax()))

    def answer(self, one: Request, chunk: int | None = None) -> list[int]:
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
        kept = slots >= 0
        everyone = torch.arange(len(pages.v), device=q.device)
        pages.write(everyone, slots[kept].unsqueeze(0), k[:, :, kept], v[:, :, kept])
        if turn.is_step and turn.reader.is_still:  # what vLLM's kernel would do
            held = pages.read(trace.table, trace.span(0, turn.n_attended))
            out, _ = attend_rows(q, [[Part(*held)]], softmax, [False])
            turn.reader.count(layer)
            return out
        if turn.is_step and trace.rung == PAGES:
            return self.attend_pages(layer, q, k, v, softmax)
        out = torch.full_like(q, torch.nan)
        if turn.n_prompt:
            past = pages.read(trace.table, trace.span(0, turn.first + turn.n_prompt))
            out[:, :, : turn.n_prompt] = causal(q[:, :, : turn.n_prompt], *past, softmax)[0]
        own_q, own_k, own_v = (x[0].transpose(0, 1) for x in (q, k, v))
        given = out[0].transpose(0, 1).contiguous()
        self.engine.desk.read(layer, turn, own_q, own_k, own_v, given)
        return given.transpose(0, 1).unsqueeze(0)

    def attend_pages(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """What a paged kernel would do, to which each KV head is a request of its own."""
        reader, h_kv = self.turn.reader, k.shape[1]
        cache = self.engine.caches[[*self.engine.desk.pages].index(layer)]
        blocks, tables, lengths = of_one_head([(reader.parts(layer, q, k, v), reader.trace.table)], cache)
        queries, most = q.view(h_kv, -1, q.shape[3]), int(lengths.max())
        out = flash_attn_varlen_func(
            queries, *blocks.transpose(1, 2).chunk(2, -1), out=torch.empty_like(queries), seqused_k=lengths,
            cu_seqlens_q=torch.arange(h_kv + 1), block_table=tables, softmax_scale=softmax.scale, causal=True,
            max_seqlen_q=1, max_seqlen_k=most,
        ).view(q.shape)  # fmt: skip
        reader.behind(layer, out)
        return out
