"""Whether a method can be served on a rung, found by letting it serve: `rehearse`.

A small prompt of drawn keys and values lies in pages like vLLM's, and the method places it and makes some steps. Where
it asks for something that pages do not have, what is asked says so in a sentence; nobody keeps a list of methods. It
takes under a second, and vLLM is not there yet.

Not here: vLLM, its flags (`serving/adapter`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.serving.order import DROPPING, PAGES, RUNGS, Order, Unserved, refuse
from kvbench.serving.pages import Pages
from kvbench.serving.pagetable import tables_of
from kvbench.serving.reader import Asked, Desk, Reader, Turn, folded

LENGTHS = (1024, 1531, 4096, 8192)  # of prompts; two of them
LAYERS, STEPS, ROOM = 3, 4, 4096
BLOCK = 32  # tokens of a block, where nothing else is said


def rehearse(order: Order, block: int = BLOCK) -> Order:
    """The order, with what its scheduler has to know; `Unserved` where the method cannot be served so."""
    if order.rung not in RUNGS:
        raise ConfigError(f"rung={order.rung} is unknown; use {', '.join(RUNGS[:-1])} or {RUNGS[-1]}")
    cell = order.chosen.cell
    refuse(cell, order.rung)
    try:
        slacks = slacks_of(order, block)
    except Unserved as error:
        raise Unserved(f"{cell.rules.title} cannot be served on rung={order.rung}: it {error}") from None
    if order.rung != DROPPING or len(set(slacks)) > 1:
        return replace(order, slack=None)  # where it depends on the prompt, an answer is counted as it grows
    return replace(order, slack=slacks[0])


def slacks_of(order: Order, block: int) -> list[int | None]:
    """`slack_of` two prompts; of other lengths where a budget is too small for the first ones."""
    found: list[int | None] = []
    for n in LENGTHS:
        try:
            found.append(slack_of(order, n, block))
        except Unserved:
            raise
        except ConfigError as error:
            refused = error
        if len(found) == 2:
            return found
    if not found:
        raise refused  # type: ignore[possibly-undefined]
    return found


def check_prompt(order: Order, n: int) -> None:
    """`ConfigError` where the budget is too small for a prompt of `n` tokens."""
    order.variant(n)


def rehearsed_shape(shape: ModelShape, n_layers: int) -> ModelShape:
    n = min(n_layers, shape.n_layers)
    return replace(shape, n_layers=n, attention_layers=tuple(range(n)), readers=())


def slack_of(order: Order, s: int, block: int) -> int | None:
    """Tokens that an answer adds before others leave, None where all of it stays."""
    params = order.chosen.cell.params
    n_layers = LAYERS + (getattr(params, "full_layers", 0) if order.chosen.cell.traits.skips else 0)
    shape = rehearsed_shape(order.chosen.shape, n_layers)
    own = replace(order, slack=None)
    own.__dict__["chosen"] = replace(order.chosen, shape=shape)
    variant = own.variant(s)
    if variant.second_passes:
        raise Unserved("reads more behind the prompt, and vLLM's prefill ends there")
    if variant.post_processing.changes:
        raise Unserved("changes the keys or values that it keeps, and pages hold the model's")
    drawn = torch.Generator().manual_seed(0)
    heads, d_h = shape.h_kv // own.ranks, shape.d_h
    n_blocks = -(-s // block) + 1  # one more for the answer
    caches = {at: torch.zeros(n_blocks, heads, block, 2 * d_h) for at in shape.attention_layers}
    pages = {at: Pages.of(cache) for at, cache in caches.items()}
    table = torch.arange(n_blocks)
    for each in pages.values():
        k, v = (torch.randn(1, heads, s, d_h, generator=drawn) for _ in range(2))
        each.write(table, torch.arange(s).unsqueeze(0), k, v)
    desk = Desk(own, pages, dict.fromkeys(pages, Softmax(d_h**-0.5)))

    def turn(seen: int, n: int) -> Turn:
        return desk.turns([Asked("it", range(s), ROOM)], [0, n], [seen], table.unsqueeze(0), {"it"})[0]

    first = turn(s, s)
    q_heads = shape.h // own.ranks
    for at in pages:
        q = torch.randn(s, q_heads, d_h, generator=drawn)
        desk.read(at, first, q, q[:, :heads], q[:, :heads], torch.empty_like(q))
    reader = first.reader
    if not reader.is_placed:
        raise Unserved("says nothing of some layers")
    for step in range(STEPS):
        now = turn(s + step + 1, 1)
        for at in pages:
            token = [torch.randn(1, n, d_h, generator=drawn) for n in (q_heads, heads, heads)]
            try_step(desk, now, at, token, table)
    return slack(reader)


def try_step(desk: Desk, turn: Turn, at: int, token: Sequence[torch.Tensor], table: torch.Tensor) -> None:
    q, k, v = token
    if turn.reader.is_still:
        turn.reader.count(at)
    elif desk.order.rung == PAGES:
        parts = turn.reader.parts(at, *map(folded, token))
        tables_of(parts, table, k.shape[1], desk.block)
        turn.reader.behind(at, folded(q))
    else:
        desk.read(at, turn, q, k, v, torch.empty_like(q))


def slack(reader: Reader) -> int | None:
    """How far its layers can grow beyond the budget."""
    most = max(at.n_kept + at.capacity for at in reader.row.store.layers.values())
    beyond = most - reader.variant.budget.tokens
    return None if beyond >= ROOM or reader.variant.is_full else max(0, beyond)
