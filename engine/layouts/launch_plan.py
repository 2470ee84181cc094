"""A plan of one layer's launches on an accelerator, made at one step for some like it.

While rows only take in tokens, each goes to the next slot, some parts have one token more, and everything else that
kernels read stays as it is. So kernels get it once and read from a clock (`kernels/clock.py`) which step it is: no
parts are made, nothing is sent, and every launch is the same as at the step before. What a row fetches has to lie where
it lay before; positions may be others, and more of them at every step.

Not here: which parts grow (`Layer.growing`), a step of any kind (`engine/step.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.pending import PendingSteps
from kvbench.engine.books.spans import stretches
from kvbench.engine.caches.asked import Asking, alike
from kvbench.engine.caches.eviction import Update, UpdatePlan
from kvbench.engine.caches.quantized import Packing, QuantizedCache
from kvbench.engine.layouts.fetching import Fetching
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.quantized import QuantizedLayer
from kvbench.engine.row import Row
from kvbench.engine.rows import FetchPlan
from kvbench.engine.search import Search, search_rows
from kvbench.engine.softmax import Softmax
from kvbench.kernels.clock import Clock
from kvbench.kernels.packed.rows import CodedRows, takes_codes
from kvbench.kernels.rows.append import Places
from kvbench.kernels.rows.values import fetch_values_triton
from kvbench.kernels.rows.weights import Softening
from kvbench.kernels.scratch import Scratch
from kvbench.kernels.select_attend import Tokens, attend_table, growing_table

MOST_MISSES = 4  # steps in a row that were planned in vain
MOST_AHEAD = 256  # steps for which there is room


@dataclass
class PlannedSearch:
    """How rows of one class search, and bring what they find where attention does not read it where it is."""

    search: Search
    at: slice  # of the batch
    fetch_plans: list[tuple[FetchPlan, list[int]]]  # and which of these rows
    values: Sequence[Tensor] = ()  # of each row, where its values come to lie beside keys that the search makes

    def holds(self, age: int) -> bool:
        for fetch_plan, _ in self.fetch_plans:
            if not fetch_plan.holds(age):
                return False
        return self.search.holds()

    def counts(self, age: int) -> list[Tensor | None]:
        """Counts of what was brought for each row at that step."""
        counts: list[Tensor | None] = [None] * len(self.search.idx)
        for fetch_plan, rows in self.fetch_plans:
            for i, own in zip(rows, fetch_plan.counts(age).unbind(), strict=True):
                counts[i] = own
        return counts


class LaunchPlan:
    """Launches of one layer for a fixed set of rows."""

    def __init__(
        self, groups: Sequence[tuple[type[Row], slice]], rows: Sequence[Row], layer: int, scratch: Scratch,
        pending: PendingSteps, clock: Clock,
    ) -> None:  # fmt: skip
        """`pending`, `scratch` and `clock` are those of all layers. Nobody else asks for the parts of its steps."""
        self.groups, self.rows, self.index, self.scratch = groups, rows, layer, scratch
        self.pending, self.n_flushed = pending, -1
        are_stored = all(
            row.is_stored and not row.store.checked_for and row.store.handed is None for row in rows
        )  # fmt: skip
        self.n_misses = 0 if are_stored else MOST_MISSES
        self.clock, self.start, self.n_steps = clock, 0, 0  # when it was told, and for how many steps that holds
        self.update_plan: UpdatePlan | None = None
        self.softening: Softening | None = None  # where rows want weights
        self.searches = list[PlannedSearch]()

    def make(self, parts: Sequence[Sequence[Part]], fetched: Sequence[Sequence[Part]], q: Tensor) -> None:
        """Remember the step at hand for those to come: all parts of each row, the fetched ones last."""
        self.forget()
        self.n_misses += 1
        self.layers = [row.store[self.index] for row in self.rows]
        ahead = min(row.store.n_new - at.n_generated for row, at in zip(self.rows, self.layers, strict=True))
        if ahead <= 0:
            return
        self.ahead, self.start = min(ahead, MOST_AHEAD), self.clock.now
        self.since = self.clock.since_now(q.device)
        found = [at.growing() for at in self.layers]
        growing = [each for each in found if each is not None]
        if len(growing) < len(found):
            return
        if any(len(got) > 1 or not all(map(is_refetchable, got)) for got in fetched) or not q.is_contiguous():
            return
        each = zip(parts, fetched, strict=True)
        if not all(is_fixed(part) for own, got in each for part in own[: len(own) - len(got)]):
            return
        searches = self.searching(fetched, q)
        if searches is None:
            return
        self.searches = searches
        if (found := self.tokens_of(q, parts, growing, fetched)) is None:
            return
        tokens, more = found
        for planned in self.searches:
            for i, own in enumerate(tokens[planned.at]):
                made = {"k": planned.search.made_keys[i]} if planned.values else {"idx": planned.search.idx[i]}
                own[-1] = replace(own[-1], **made)
        chosen = [0] * len(self.rows)
        for planned in self.searches:
            if planned.search.more:
                chosen[planned.at] = planned.search.more
                for own, n in zip(more[planned.at], planned.search.more, strict=True):
                    own[-1] = n
        wants = any(row.wants_weights for row in self.rows)
        # Of a row's parts the last resident one alone grows, so that logits lie next to each other.
        grown = zip(self.rows, growing, chosen, strict=True)
        moves = any(row.wants_weights and (n or any(at.more[:-1])) for row, at, n in grown)
        if wants and moves:
            return
        self.more = [sum(each.more) for each in growing]
        room, self.logits = self.room_for_logits(q, parts, fetched) if wants else ([], [])
        coded = self.coded
        self.table, n_steps = growing_table(q, tokens, more, self.scratch, self.ahead, room, coded)
        self.softening = Softening(self.logits, self.more, self.ahead) if wants else None
        places = [[place[:3] for place in each.places] for each in growing]
        self.places = Places.of(places, q.device, [[ring for *_, ring in each.places] for each in growing])
        self.marks = [(at.start, at.n_seen, 0) for at in self.layers]
        rings = [[] if at.queries is None else [at.queries] for at in self.layers]
        turns = [[(0, ring.w) for ring in of_row] for of_row in rings]
        self.rings = Places.of([[ring.place() for ring in of_row] for of_row in rings], q.device, turns)
        self.packing = self.packed_again()
        limits = [each.n_steps for each in growing] + [planned.search.n_steps for planned in self.searches]
        if self.searches:  # generated tokens may be chosen once the window is full and has none of the prompt
            stays = zip(self.layers, growing, fetched, strict=True)
            limits += [
                at.n_window - at.n_generated
                for at, each, own in stays
                if own and not each.more[0] and own[0].late is None
            ]
        self.n_steps = max(0, min(n_steps, *limits))

    def tokens_of(
        self, q: Tensor, parts: Sequence[Sequence[Part]], growing: Sequence[Growing], fetched: Sequence[Sequence[Part]]
    ) -> tuple[list[list[Tokens]], list[list[int]]] | None:
        """What kernels are told of each row's parts, and how many tokens each has more at every step; None: unknown.

        Codes that a kernel reads as they are go to `coded`.
        """
        coded, tokens, more = CodedRows(len(parts)), list[list[Tokens]](), list[list[int]]()
        asked: dict[int, Tensor] = {}  # by the part's id
        self.asking: list[tuple[Asking, Tensor]] = []  # and where its queries are made
        for some in alike([(i, part) for i, own in enumerate(parts) for part in own]):
            room = q.new_empty(len(some), *q.shape[1:])
            asking = Asking([i for i, _ in some], [part.asked for _, part in some], len(parts), q.device)
            self.asking.append((asking, room))
            asked |= {id(part): own for (_, part), own in zip(some, room.split(1), strict=True)}
        for i, (own, each, got) in enumerate(zip(parts, growing, fetched, strict=True)):
            tokens.append([])
            more.append([])
            for part, n in zip(own, (*each.more, *(0 for _ in got)), strict=True):
                its_q = asked.get(id(part))
                if part.packed is None:
                    tokens[i].append(part.tokens() if its_q is None else replace(part.tokens(), q=its_q))
                    more[i].append(n)
                elif self.rows[i].wants_weights or not takes_codes(q, part.packed):
                    return None
                else:
                    left = coded.add(i, part.packed, its_q)
                    if coded.more[i] and not left:
                        return None
                    tokens[i] += left
                    more[i] += [coded.more[i]] * len(left)
        self.coded = coded if coded.by_form else None
        return tokens, more

    def packed_again(self) -> list[Packing]:
        """What caches of each kind pack at steps to come."""
        kinds: dict[type[QuantizedCache], list[int]] = {}
        for i, at in enumerate(self.layers):
            if isinstance(at, QuantizedLayer):
                kinds.setdefault(type(at.quantized), []).append(i)
        found: list[Packing | None] = []
        for kind, rows in kinds.items():
            layers = [self.layers[i] for i in rows]
            found.append(kind.packing([at.quantized for at in layers], [at.newest for at in layers], rows))
        return [packing for packing in found if packing is not None]

    def room_for_logits(
        self, q: Tensor, parts: Sequence[Sequence[Part]], fetched: Sequence[Sequence[Part]]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Where rows that want weights have their logits, with room for steps to come; those of resident tokens."""
        h, numbers = q.shape[1], [[part.n_tokens() for part in own] for own in parts]
        each = zip(self.rows, numbers, self.more, strict=True)
        rooms = [sum(ns) + self.ahead * more if row.wants_weights else 0 for row, ns, more in each]
        flat = self.scratch.take("logits", q.device, torch.float32, h * sum(rooms)).split([h * n for n in rooms])
        room = [x.view(h, n) if n else None for x, n in zip(flat, rooms, strict=True)]
        counts = [sum(ns[: len(ns) - len(got)]) for ns, got in zip(numbers, fetched, strict=True)]
        return room, [x if x is None else x[:, :n] for x, n in zip(room, counts, strict=True)]

    def plan_update(self) -> None:
        """Plan, after a step, how rows are updated at those to come."""
        if not self.n_steps or self.softening is None:
            return
        rows, more = list[Update](), list[int]()
        for row, x, grows in zip(self.rows, self.logits, self.more, strict=True):
            if x is None:
                continue
            room = x.as_strided((1, x.shape[0], x.shape[1] + grows), (0, *x.stride()))
            found = row.update(self.index, room, 1)
            if found is None:
                return self.forget()
            rows.append(found)
            more.append(grows)
        self.update_plan = UpdatePlan(rows, more, self.n_steps)
        self.n_steps = self.update_plan.n_steps
        evicting = {id(row.layer) for row in rows if row.evicts}
        self.marks = [(at.start, at.n_seen, int(id(at) in evicting)) for at in self.layers]

    def searching(
        self, fetched: Sequence[Sequence[Part]], q: Tensor
    ) -> list[PlannedSearch] | None:  # fmt: skip
        """How rows search, class by class, that do nothing but take in tokens and fetch; None where one does more."""
        if any(at.queries is not None and len(at.queries) < at.queries.w for at in self.layers):
            return None
        found: list[PlannedSearch] = []
        for kind, at in self.groups:
            rows, layers = self.rows[at], self.layers[at]
            if not any(layer.can_fetch for layer in layers):
                if not all(row.is_still or row.wants_weights or self.index in row.skipped for row in rows):
                    return None
                continue
            fetch = zip(layers, fetched[at], strict=True)
            alike = all(layer.can_fetch and layer.can_refetch(own) for layer, own in fetch)
            search = search_rows(kind, rows, self.index, q[at], self.scratch, self.ahead) if alike else None
            if search is None:
                return None
            brought = fetch_plans(layers, fetched[at], search.idx, self.ahead)
            if brought and any(search.more):
                return None
            values = [part.v for (part,) in fetched[at]] if search.made_keys else ()
            found.append(PlannedSearch(search, at, brought, values))
        return found

    @property
    def is_replayable(self) -> bool:
        """Whether a captured graph can do `launch` again: then the host has to do `enter` at each step."""
        return self.n_steps > 0 and all(planned.search.is_replayable for planned in self.searches)

    @property
    def is_repeatable(self) -> bool:
        """Whether `launch` may be done twice for one step: nothing adds up."""
        adds_up = self.update_plan is not None or any(planned.fetch_plans for planned in self.searches)
        return not adds_up and all(planned.search.is_repeatable for planned in self.searches)

    @property
    def is_of_use(self) -> bool:
        """Whether it may hold at some step."""
        return self.n_misses < MOST_MISSES

    @property
    def age(self) -> int:
        """Steps since it was told, the one at hand included."""
        return self.clock.now - self.start

    def forget(self) -> None:
        """The steps to come are others."""
        self.n_steps = 0
        self.update_plan = self.softening = None

    def holds(self, q: Tensor) -> bool:
        """Whether the step at hand may be like the one that was planned."""
        if self.age > self.n_steps or not q.is_contiguous() or (self.table.is_even and q.data_ptr() % 16):
            return False
        if self.pending.n_flushed != self.n_flushed and not self.is_as_it_was(self.age - 1):
            return False
        for planned in self.searches:
            if not planned.holds(self.age):
                return False
        return True

    def is_as_it_was(self, age: int) -> bool:
        """Whether layers have made so many steps since and done nothing else; the books have all of these."""
        index = self.index
        for row, at, (start, n_seen, moves) in zip(self.rows, self.layers, self.marks, strict=True):
            if row.store.placed[index] is not at or at.start != start + moves * age or at.n_seen != n_seen + age:
                return False
        return True

    def keep(self, k_new: Tensor, v_new: Tensor) -> None:
        """Write the current token of every row to where it stays."""
        for packing in self.packing:
            packing.take(k_new, v_new, self.since)
        if self.places is not None:
            self.places.take(k_new, v_new, self.since)

    def take_step(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """The whole step, where it holds and rows do nothing but take in their tokens and search as they did."""
        out = self.launch(q, k, v, softmax)
        self.enter()
        return out

    def launch(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """What the device does at such a step: the same launches each time, of which the clock alone says which it is.

        Where a search is no exception (`is_replayable`).
        """
        n = q.shape[0]  # which `len` takes longer to say
        with stretches(self.index) as begin:
            begin("append")
            self.keep(k, v)
            for planned in self.searches:
                begin("search")
                at = planned.at
                is_all = at.stop - at.start == n
                planned.search.find(*((q, k, v) if is_all else (q[at], k[at], v[at])), self.since)
                for fetch_plan, _ in planned.fetch_plans:
                    begin("fetch")
                    fetch_plan.take(self.since)
                for layer, idx, values in zip(self.layers[at], planned.search.idx, planned.values, strict=False):
                    begin("fetch")
                    fetch_values_triton(layer.host.v, idx, values)
            begin("attention")
            out = self.attend_planned(q, softmax)
            for planned in self.searches:
                if planned.search.corrects:
                    begin("after")
                    planned.search.correct(out[planned.at])
            if self.update_plan is not None or self.rings is not None:
                begin("after")
            if self.update_plan is not None:
                self.update_plan.take(self.since)
            if self.rings is not None:
                self.rings.take(q, q, self.since)
        self.newest = k, v
        return out

    def enter(self) -> None:
        """What the host does at such a step, which the clock shows: it is to be in the books."""
        self.enter_searches()
        self.pending.add(self.write, self.age)
        self.n_flushed = self.pending.n_flushed

    def enter_searches(self) -> None:
        """What the host does for searches at such a step."""
        for planned in self.searches:
            planned.search.enter(self.age)
            for fetch_plan, _ in planned.fetch_plans:
                fetch_plan.enter(self.age)

    def write(self, age: int) -> None:
        """Bring such a step into the books."""
        index, rows = self.index, self.rows
        for at in self.layers:
            if at.is_over:
                continue
            at.repeat(*self.newest)  # nobody asks for what is newest
            if at.queries is not None:
                at.queries.take_in()
        for planned in self.searches:
            at, search = planned.at, planned.search
            each = zip(
                rows[at], self.layers[at], search.costs(age), search.chosen(age), planned.counts(age), strict=True
            )  # fmt: skip
            for row, layer, cost, idx, count in each:
                if not layer.is_over:
                    row.store.spend(index, cost)
                    layer.refetch(idx, count)
        if self.update_plan is not None:
            self.update_plan.write(age)
        for row, at in zip(rows, self.layers, strict=True):
            if not at.is_over:
                row.store.close(index)

    def attend_planned(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attention of all rows over what was planned."""
        self.n_misses = 0
        for asking, room in self.asking:
            asking.take(q, room)
        out, lse = attend_table(q, self.table, softmax.scale, softmax.cap, self.coded, self.since)
        if softmax.sink is not None:
            n = self.table.n_rows
            out[:n], lse = softmax.finish(out[:n], lse)
        if self.softening is not None:
            self.softening.take(lse, self.since)
        return out


def fetch_plans(
    layers: Sequence[Layer], fetched: Sequence[Sequence[Part]], selections: Sequence[Tensor], ahead: int
) -> list[tuple[FetchPlan, list[int]]]:  # fmt: skip
    """For the rows whose fetched tokens are copied, by how long the copies stay."""
    places: dict[int, list[int]] = {}
    for i, (layer, own) in enumerate(zip(layers, fetched, strict=True)):
        if own[0].near is not None:
            assert isinstance(layer, Fetching)
            places.setdefault(layer.n_recent, []).append(i)
    return [
        (FetchPlan([layers[i] for i in rows], [selections[i] for i in rows], ages, ahead), rows)  # type: ignore[misc]
        for ages, rows in places.items()
    ]


def is_fixed(part: Part) -> bool:
    """Whether kernels read nothing that another step makes anew of what a layer holds, which says how it grows."""
    return part.q is None or part.asked is not None


def is_refetchable(part: Part) -> bool:
    """Whether the same holds for a fetched part but for its positions."""
    return is_fixed(part) and part.packed is part.bias is None and (part.mask is None or part.idx is not None)
