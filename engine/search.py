"""What an engine makes of a retrieving method's scores: the best units of an index, and the tokens that they stand for.

A unit is as many tokens as any other (`Units`). Of units with equal scores the first are chosen.

Not here: scores (`methods/indexed.py`), fetching (`engine/step.py`), where nothing is told anew
(`engine/layouts/launch_plan.py`).
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.engine.layouts.handed import follows, hand_on, take_over
from kvbench.engine.selection import ALWAYS, FREE, Cost, Found
from kvbench.kernels.clock import Since
from kvbench.kernels.jit import constants
from kvbench.kernels.pages import expand_keys_triton
from kvbench.kernels.scratch import Scratch
from kvbench.kernels.topk import KeyChoice, top_stable

Launch = Callable[[Tensor, Tensor, Tensor, Since], Tensor]
"""From rows' queries (n, h, 1, d_h), their newest K and V, and the number of steps since the plan was made: keys
(n, heads, units) of `kernels/topk.py`. Of units that a later step has there are none yet."""


def together(rows: Sequence[Any], layer: int) -> list[list[int]]:
    """Which rows of a class are searched at once: those of one kind."""
    places: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(row.kind(layer), []).append(i)
    return [*places.values()]


def select_rows(kind: Any, rows: Sequence[Any], layer: int, q: Tensor) -> Sequence[Found]:
    """What rows of a class attend to besides what is resident: they search for it with their queries (n, h, 1, d_h),
    or another layer has."""
    if all(row.store.handed is None for row in rows):
        return searched(kind, rows, layer, q)
    found: list[Found] = [None] * len(rows)
    own = [i for i, row in enumerate(rows) if not follows(row, layer)]
    if own:
        for i, one in zip(own, searched(kind, [rows[i] for i in own], layer, q[own]), strict=True):
            found[i] = hand_on(rows[i], layer, one)
    for i in set(range(len(rows))) - set(own):
        found[i] = take_over(rows[i], layer)
    return found


def searched(kind: Any, rows: Sequence[Any], layer: int, q: Tensor) -> Sequence[Found]:
    """What rows of a class find."""
    groups = together(rows, layer)
    if len(groups) == 1:
        return kind.search(rows, layer, q)
    found: list[Found] = [None] * len(rows)
    for alike in groups:
        for i, one in zip(alike, kind.search([rows[i] for i in alike], layer, q[alike]), strict=True):
            found[i] = one
    return found


def search_rows(
    kind: Any, rows: Sequence[Any], layer: int, q: Tensor, scratch: Scratch, ahead: int
) -> "Search | None":  # fmt: skip
    """How a search that rows of a class have just made goes on at `ahead` steps to come at most, if they do nothing
    after attention; None where each step is planned anew."""
    groups = together(rows, layer)
    if len(groups) == 1:
        return kind.search_again(rows, layer, q, scratch, ahead)
    each: list[tuple[Search, Sequence[int], Tensor]] = []
    for alike in groups:
        one = kind.search_again([rows[i] for i in alike], layer, q[alike], scratch, ahead)
        if one is None:
            return None
        each.append((one, alike, constants(tuple(alike), q.device)))
    return Searches(each)


class Units(NamedTuple):
    """Which units of an index compete for a step, and how many of them are fetched."""

    k: int
    stop: int  # position after the last token that competes
    start: int = 0  # position of the first one
    length: int = 1  # tokens of a unit
    origin: int = 0  # position of the first token of unit 0
    more: int = 0  # so many more are fetched at each step to come
    grows: bool = False  # with every token there is a candidate more

    @property
    def first(self) -> int:
        """The first unit that competes."""
        return (self.start - self.origin) // self.length

    @property
    def behind(self) -> int:
        """The unit after the last one."""
        return ceil((self.stop - self.origin) / self.length)

    @property
    def n_chosen(self) -> int:
        return max(0, min(self.k, self.behind - self.first))


def products(q: Tensor, keys: Tensor) -> Tensor:
    """Queries (n, h_kv, g, c) times keys of all rows together (1, h_kv, s, c) or of each (n, …): (n, h_kv, g, s).

    Keys that rows share are read once for all of them.
    """
    if len(keys) == len(q):
        return q @ keys.mT
    n, h_kv, g, c = q.shape
    found = q.transpose(0, 1).reshape(h_kv, n * g, c) @ keys[0].mT
    return found.view(h_kv, n, g, -1).transpose(0, 1)


def best_tokens(scores: Tensor, units: Units) -> Tensor | None:
    """Tokens of the best units by scores (n, heads, units): (n, heads, k) positions, -1 where a unit is short."""
    first, k, length = units.first, units.n_chosen, units.length
    if k == 0:
        return None
    best = top_stable(scores[..., first : units.behind], k)
    if length == 1:
        return best + (first + units.origin)
    within = torch.arange(units.origin, units.origin + length, device=best.device)
    tokens = ((best.sort(-1).values + first).unsqueeze(-1) * length + within).flatten(2)
    return tokens.masked_fill(tokens >= units.stop, -1) if (units.stop - units.origin) % length else tokens


class Search:
    """A search of some rows at steps that are alike: those do nothing but take in tokens and fetch as many others."""

    idx: Sequence[Tensor]  # of each row (1, heads, k), where the positions of every step come to lie
    made_keys: Sequence[Tensor] = ()  # of each row (1, h_kv, k, d_h), which it makes; none: the host has them
    more: Sequence[int] = ()  # so many more at each step, head by head after those of `idx`; none: nowhere
    n_steps: int = ALWAYS  # for so many
    corrects: bool = False  # True: `correct` has something to do
    is_repeatable: bool = False  # True: a step may be searched twice
    is_replayable: bool = True  # False: the host does something at each step that no captured graph could do

    def holds(self) -> bool:
        """Whether what is searched is what it was."""
        return True

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        """For the rows' queries and newest K and V (n, heads, 1, d_h)."""
        raise NotImplementedError

    def costs(self, age: int) -> Sequence[Cost]:
        """What each row's search took so many steps after it was planned, whose tokens its layer has taken in."""
        raise NotImplementedError

    def enter(self, age: int) -> None:
        """What the host does after the launches of that step, for what rows count for themselves."""

    def chosen(self, age: int) -> Sequence[Tensor]:
        """`idx` of that step."""
        if not self.more:
            return self.idx
        longer = ((*x.shape[:2], x.shape[2] + age * grows) for x, grows in zip(self.idx, self.more, strict=True))
        return [x.as_strided(size, x.stride()) for x, size in zip(self.idx, longer, strict=True)]

    def correct(self, out: Tensor) -> None:
        """Behind attention, in place: (n, h, 1, d_h)."""


class KernelSearch(Search):
    """One whose scores a kernel makes: positions in the lower halves of keys."""

    def __init__(
        self, rows: Sequence[Any], layer: int, launch: Launch, scratch: Scratch | None, n_steps: int = ALWAYS
    ) -> None:
        self.is_repeatable = not rows[0].takes_newest  # nothing is added to the index
        self.rows, self.layer, self.launch, self.n_steps = rows, layer, launch, n_steps
        self.units = [row.units(layer) for row in rows]
        units, ks = self.units[0], [each.n_chosen for each in self.units]
        self.more = [each.more for each in self.units] if any(each.more for each in self.units) else ()
        device, heads = rows[0].store[layer].device, rows[0].n_choosing
        grows = any(each.more or each.grows for each in self.units)
        is_all = min(ks) == units.behind - units.first == units.behind and not grows
        self.choice = None
        if max(ks) and not is_all:
            grown = n_steps if self.more else 0
            self.choice = KeyChoice(len(rows), heads, ks, device, scratch, self.more, grown)
        if self.choice is not None and units.length == 1:
            self.tokens: Tensor = self.choice.out
        else:
            size = len(rows), heads, max(ks) * units.length
            self.tokens = torch.empty(size, dtype=torch.int64, device=device)
        each = zip(rows, self.tokens.split(1), ks, strict=True)
        self.idx = [row.of_heads(own[..., : k * units.length]) for row, own, k in each]

    @property
    def is_settled(self) -> bool:
        """Whether it is said by now how many units the rows fetch at each step to come."""
        return all(each.n_chosen and (each.n_chosen == each.k or not each.grows) for each in self.units)

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        keys, units = self.launch(q, k_new, v_new, since), self.units[0]
        if self.choice is not None:
            keys = self.choice.take(keys, since)
        if units.length > 1:
            expand_keys_triton(keys, units.origin, units.length, units.stop, self.tokens)
        elif self.choice is None and self.tokens.shape[2]:
            self.tokens.copy_(keys)

    def costs(self, age: int) -> Sequence[Cost]:
        return [row.cost(self.layer) for row in self.rows]

    def enter(self, age: int) -> None:
        for row in self.rows:
            if not row.store.placed[self.layer].is_over:
                row.count_search(self.layer)


class Searches(Search):
    """Several searches, for rows that are searched apart."""

    def __init__(self, each: Sequence[tuple[Search, Sequence[int], Tensor]]) -> None:
        """Each with its rows, and the same on the device."""
        self.each, places = each, [(i, idx) for search, at, _ in each for i, idx in zip(at, search.idx, strict=True)]
        self.idx = [idx for _, idx in sorted(places, key=lambda place: place[0])]
        keys = {i: made for search, at, _ in each for i, made in zip(at, search.made_keys, strict=False)}
        self.made_keys = [made for _, made in sorted(keys.items(), key=lambda place: place[0])]
        grown = {i: grows for search, at, _ in each for i, grows in zip(at, search.more, strict=False)}
        self.more = [grown.get(i, 0) for i in range(len(self.idx))] if grown else ()
        self.n_steps = min(search.n_steps for search, *_ in each)
        self.corrects = any(search.corrects for search, *_ in each)
        self.is_replayable = all(search.is_replayable for search, *_ in each)
        self.is_repeatable = all(search.is_repeatable for search, *_ in each)

    def holds(self) -> bool:
        return all(search.holds() for search, *_ in self.each)

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        for search, _, rows in self.each:
            search.find(q.index_select(0, rows), k_new.index_select(0, rows), v_new.index_select(0, rows), since)

    def costs(self, age: int) -> Sequence[Cost]:
        costs = [FREE] * len(self.idx)
        for search, at, _ in self.each:
            for i, cost in zip(at, search.costs(age), strict=True):
                costs[i] = cost
        return costs

    def enter(self, age: int) -> None:
        for search, *_ in self.each:
            search.enter(age)

    def correct(self, out: Tensor) -> None:
        for search, _, rows in self.each:
            if search.corrects:
                own = out.index_select(0, rows)
                search.correct(own)
                out.index_copy_(0, rows, own)
