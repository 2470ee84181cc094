"""What one variant attended to, kept and moved on one sample: an entry per decode step and compressed layer.

Plain data and addition. The store writes it (`engine/store.py`, `engine/books/meter.py`), nothing else does; results,
tables and the check of a budget read it. Bytes of K and V are counted at 16 bits an element whatever the run computes
in (`engine/budget.py`).

Not here: means over samples (`results/`), and bytes really allocated (`Store.allocated_bytes`).
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

from kvbench.engine.budget import Budget, find_bytes, token_bytes
from kvbench.engine.shapes import ModelShape

MEAN_MARGIN = Fraction(1, 20)  # by which the mean of random selections may exceed the budget that they expect to hold


class Entry(NamedTuple):
    """One decode step of one layer.

    Tokens of `attended` and pseudo-tokens are summed over query heads, everything else over KV heads.
    """

    step: int  # 1 for the first token that is fed after the prefill
    layer: int
    tokens: int  # tokens that full attention would attend to, the current one included
    attended: int  # tokens attended to, summed over the query heads
    resident_kv_bytes: int  # device tier
    resident_meta_bytes: int  # device tier: whatever a method keeps there in order to find tokens
    resident_host_bytes: int  # host tier
    moved_kv_bytes: int  # host to device, cache misses only, a token of a KV head once
    moved_kv_heads_bytes: int  # the same, once per query head that asked
    moved_meta_bytes: int  # moved or read in order to find tokens: what `comm` prices
    searched_bytes: int  # read by an exact search, which no budget prices (oracle)
    filled_bytes: int  # host to device, blocks taken into the cache
    released_bytes: int  # device to host, tokens that left the window
    cache_hits: int  # lookups of (KV head, token) that found their block on the device
    cache_lookups: int
    pseudo_tokens: int = 0  # stood in attention for tokens that were not attended to, summed over the query heads
    made_kv_bytes: int = 0  # of fetched tokens, besides what moved: keys made on the device, numbers in place of codes
    read_meta_bytes: int = 0  # of an index on the device, read to find tokens, besides what `moved_meta_bytes` has


class PendingCounts(Protocol):
    """Counts that are not in the entries yet."""

    def fill(self, entries: list[Entry]) -> None:
        """Put them there."""
        ...


class Ledger:
    """The entries of one variant on one sample, in the order in which they were written."""

    def __init__(self) -> None:
        self.written: list[Entry] = []
        self.pending_counts: PendingCounts | None = None  # counts that an accelerator still has
        self.read: dict[int, tuple[int, int]] = {}  # by layer, in this step, of rows that are checked
        self.corrections: list[tuple[int, Callable[[Entry], Entry]]] = []  # of entries, by what the engine counted
        self.rebuilt_bytes = 0  # read and written between steps, to choose or to index tokens anew
        self.summed: tuple[int, list[tuple[int, ...]]] = 0, []  # of so many entries what `sums` says

    @property
    def entries(self) -> list[Entry]:
        """All entries, complete."""
        if self.pending_counts is not None:
            self.pending_counts, pending_counts = None, self.pending_counts
            pending_counts.fill(self.written)
            self.summed = 0, []
        while self.corrections:
            at, correct = self.corrections.pop()
            self.written[at] = correct(self.written[at])
            self.summed = 0, []
        return self.written

    def append(self, entry: Entry) -> None:
        self.written.append(entry)

    def correct(self, correct: Callable[[Entry], Entry]) -> None:
        """Let the newest entry, once it is complete, become what this makes of it."""
        self.corrections.append((len(self.written) - 1, correct))

    def count_rebuilt(self, n_bytes: int) -> None:
        """Add bytes that were read and written between steps, to choose or to index tokens anew."""
        self.rebuilt_bytes += n_bytes

    def behind(self, earlier: "Ledger") -> "Ledger":
        """One ledger that has another's entries first, then its own."""
        joint = Ledger()
        joint.written = [*earlier.entries, *self.entries]
        joint.rebuilt_bytes = earlier.rebuilt_bytes + self.rebuilt_bytes
        return joint

    def columns(self) -> dict[str, list[int]]:
        """The entries as columns, ready for a table."""
        columns = [*map(list, zip(*self.entries, strict=True))] or [[] for _ in Entry._fields]
        return dict(zip(Entry._fields, columns, strict=True))

    def totals(self, field: str) -> list[int]:
        """`field` summed over layers, per step."""
        i = Entry._fields.index(field)
        return [sums[i] for sums in self.sums()]

    def sums(self) -> list[tuple[int, ...]]:
        """Entries summed over layers, per step; all numbers at once, since who asks for one asks for most of them."""
        entries = self.entries
        if self.summed[0] != len(entries):
            steps: dict[int, list[Entry]] = {}
            for entry in entries:
                steps.setdefault(entry.step, []).append(entry)
            self.summed = len(entries), [tuple(map(sum, zip(*steps[step], strict=True))) for step in sorted(steps)]
        return self.summed[1]

    def priced(self, exempt: Iterable[int]) -> frozenset[int]:
        """The layers that a budget is checked on: those that are not exempt, and all where that leaves none."""
        layers = frozenset(entry.layer for entry in self.entries)
        return layers - frozenset(exempt) or layers

    def within(
        self, budget: Budget, shape: ModelShape, exempt: Iterable[int] = (), in_mean: bool = False,
        n_searching: int | None = None,
    ) -> bool:  # fmt: skip
        """Whether every step stayed within the tokens and any limit of finding bytes, a mean over layers not exempt.

        That limit is of those that search, `n_searching` of them; None: all.
        With `in_mean` the mean over the steps has to, give or take `MEAN_MARGIN`: of a method whose selections are
        random and hold a budget in expectation.
        """
        layers, priced = self.priced(exempt), Ledger()
        n_layers = len(layers)
        priced.written = [entry for entry in self.entries if entry.layer in layers]
        steps = sorted({entry.step for entry in priced.entries})
        tokens = priced.totals("attended"), [budget.allowance(step) * shape.h * n_layers for step in steps]
        n_priced = n_layers if n_searching is None else n_searching
        moved = priced.totals("moved_meta_bytes"), [find_bytes(shape, budget) * n_priced] * len(steps)
        bounds = [tokens] if budget.finds_freely else [tokens, moved]
        if in_mean:
            return all(sum(used) <= (1 + MEAN_MARGIN) * sum(allowed) for used, allowed in bounds)
        return all(x <= y for used, allowed in bounds for x, y in zip(used, allowed, strict=True))

    def buffers(self) -> list[int]:
        """Per step the bytes of the buffer for fetched tokens, of which one serves all layers."""
        most: dict[int, int] = {}
        for entry in self.entries:
            most[entry.step] = max(most.get(entry.step, 0), entry.moved_kv_bytes + entry.made_kv_bytes)
        return [most[step] for step in sorted(most)]

    def held(self, with_index: bool = True) -> list[int]:
        """Per step the bytes on the device, summed over layers, the buffer included."""
        index = self.totals("resident_meta_bytes") if with_index else [0] * len(self.buffers())
        return [sum(each) for each in zip(self.totals("resident_kv_bytes"), index, self.buffers(), strict=True)]

    def within_memory(self, budget: Budget, shape: ModelShape, with_index: bool, in_mean: bool = False) -> bool:
        """Whether the mean over all layers stayed within the bytes of every step, where the budget has any.

        A dropping method's scores and offsets are not weighed against its tokens: it gets none for `comm` either.
        With `in_mean` the mean over the steps counts, as in `within`.
        """
        if budget.memory is None:
            return True
        n_layers, steps = len({entry.layer for entry in self.entries}), sorted({entry.step for entry in self.entries})
        allowed = [budget.device_bytes(shape, step) * n_layers for step in steps]
        if in_mean:
            return sum(self.held(with_index)) <= (1 + MEAN_MARGIN) * sum(allowed)
        return all(used <= most for used, most in zip(self.held(with_index), allowed, strict=True))

    def summary(
        self, budget: Budget, shape: ModelShape, exempt: Iterable[int] = (), in_mean: bool = False,
        with_index: bool = True, n_searching: int | None = None,
    ) -> dict[str, float | int | bool | None]:  # fmt: skip
        """What a line of samples.jsonl says of the ledger; None where no step was decoded or nothing was looked up."""
        n = len(self.entries)
        if n == 0:
            return dict.fromkeys(SUMMARY) | {
                "steps": 0,
                "tokens_budget": budget.tokens,
                "within_budget": True,
            }
        attended = sum(entry.attended for entry in self.entries) / shape.h
        steps = len(self.totals("tokens"))
        device = [
            kv + meta
            for kv, meta in zip(self.totals("resident_kv_bytes"), self.totals("resident_meta_bytes"), strict=True)
        ]
        lookups = sum(self.totals("cache_lookups"))
        moved = sum(sum(self.totals(field)) for field in MOVED)
        keeps_bytes = self.within_memory(budget, shape, with_index, in_mean)
        is_within = self.within(budget, shape, exempt, in_mean, n_searching) and keeps_bytes
        return {
            "steps": steps,
            "tokens_budget": budget.tokens,
            "tokens_attended_mean": attended / n,
            "effective_ratio": attended / sum(entry.tokens for entry in self.entries),
            "bytes_resident_device": max(device),
            "bytes_resident_host": max(self.totals("resident_host_bytes")),
            "bytes_moved_kv_per_step": sum(self.totals("moved_kv_bytes")) / steps,
            "bytes_moved_kv_heads_per_step": sum(self.totals("moved_kv_heads_bytes")) / steps,
            "bytes_moved_meta_per_step": sum(self.totals("moved_meta_bytes")) / steps,
            "bytes_index_read_per_step": sum(map(sum, map(self.totals, INDEX_READ))) / steps,
            "bytes_comm_per_step": None
            if budget.finds_freely
            else find_bytes(shape, budget) * (n_searching or len(self.priced(exempt))),
            "bytes_searched_per_step": sum(self.totals("searched_bytes")) / steps,
            "bytes_filled_per_step": sum(self.totals("filled_bytes")) / steps,
            "bytes_released_per_step": sum(self.totals("released_bytes")) / steps,
            "cache_hit_rate": sum(self.totals("cache_hits")) / lookups if lookups else None,
            "pseudo_tokens_mean": sum(entry.pseudo_tokens for entry in self.entries) / shape.h / n,
            "resident_share": sum(self.held()) / (token_bytes(shape) * sum(entry.tokens for entry in self.entries)),
            "bytes_buffer": max(self.buffers()),
            "moved_bytes_per_step": moved / steps,
            "within_budget": is_within,
            **({"index_share": float(budget.index_share)} if budget.finds_freely else {}),
        } | self.costs(budget, shape)

    def costs(self, budget: Budget, shape: ModelShape) -> dict[str, float]:
        """Entries that the answer took, mean over layers and heads: the most at a step, and all of them.

        Of a budget that counts the answer, also at which share of the steps it was reached.
        """
        seen = self.totals("tokens")
        n_layers = len(self.entries) // len(seen)
        steps = [attended / shape.h / n_layers for attended in self.totals("attended")]
        s_prompt = seen[0] // n_layers - 1
        entries = footprint(s_prompt, steps)
        found = {
            "peak_entries": max(steps),
            "footprint_entries": entries,
            "footprint": share_of_full(entries, s_prompt, len(steps)),
        }
        if budget.counts is not None:
            found["reached_steps"] = sum(n >= budget.tokens for n in steps) / len(steps)
        return found


INDEX_READ = ("moved_meta_bytes", "read_meta_bytes")  # in order to find tokens, in whichever tier
MOVED = ("moved_kv_bytes", "moved_meta_bytes", "filled_bytes", "released_bytes")  # between the tiers


SUMMARY = (
    "steps", "tokens_budget", "tokens_attended_mean", "effective_ratio", "bytes_resident_device", "bytes_resident_host",
    "bytes_moved_kv_per_step", "bytes_moved_kv_heads_per_step", "bytes_moved_meta_per_step",
    "bytes_index_read_per_step", "bytes_comm_per_step", "bytes_searched_per_step",
    "bytes_filled_per_step", "bytes_released_per_step", "cache_hit_rate", "pseudo_tokens_mean",
    "resident_share", "bytes_buffer", "moved_bytes_per_step", "within_budget",
    "peak_entries", "footprint_entries", "footprint",
)  # fmt: skip


def triangle(n: int) -> float:
    """Entries of full attention over `n` tokens; one is a token that a KV head of a layer holds for a query."""
    return n * (n + 1) / 2


def footprint(s_prompt: int, steps: Sequence[float], of_prompt: float | None = None) -> float:
    """Entries of a prompt and of what is attended to at each step after it; a dense prefill unless `of_prompt`."""
    return (triangle(s_prompt) if of_prompt is None else of_prompt) + sum(steps)


def share_of_full(entries: float, s_prompt: int, n_steps: int) -> float:
    """A footprint relative to full attention over the same tokens."""
    return entries / triangle(s_prompt + n_steps)
