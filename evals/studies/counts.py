"""What a step of a variant reads, moves and keeps, as its ledger counts it on one layer of random keys: `count`.

The variant is built on one layer of the model's shape, at two short lengths, and steps are made; all that the ledger
counts grows linearly with the prompt, so a line through the two gives any length. The model is one of drawn weights:
what a method observes of queries is of random ones, and a gate, a calibration or a table of heads that it needs is
drawn too, which changes no count.

Not here: times (`evals/studies/hardware.py`), methods whose counts follow from what a prompt says, which are refused,
and layers that a method leaves whole, which count as the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.engine.books.ledger import Entry
from kvbench.engine.budget import BudgetRequest, token_bytes
from kvbench.engine.checkpoints.load import Letters
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.observe import ColumnSums
from kvbench.engine.passes.rotations import Tables, behind, in_halves, turner
from kvbench.engine.passes.session import Call
from kvbench.engine.passes.trace import SecondPassResult, Trace
from kvbench.engine.selection import Found
from kvbench.engine.shapes import DRAWN, ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import attend_group, cut
from kvbench.methods.base import SelectiveAttention, Variant, reported

AT = (2048, 4096)  # prompts that counts are taken at
CHOSEN = ("attended_bytes", "moved_kv_bytes")  # counts of chosen tokens
N_STEPS = 4
LAYER = 2  # of the one layer: beyond those that methods leave whole


@dataclass(frozen=True)
class Counts:
    """Counts of one variant, one layer, one step, one request; of the prompt where a field says so."""

    attended_bytes: float  # K and V that attention reads
    searched_bytes: float  # read in order to find tokens, whichever tier they come from
    moved_kv_bytes: float
    moved_meta_bytes: float
    resident_bytes: float  # on the device
    offloaded_bytes: float  # to the host during the prefill
    build_flops: float  # on the host, during the prefill
    observe_flops: float  # on the device, within it
    searched_numbers: float = 0.0  # made on the way to the chosen tokens
    second_pass_tokens: float = 0.0  # that the model reads after the prompt before the first step


def count(kind: type[SelectiveAttention], params: Any, request: BudgetRequest, model: ModelShape, s: int) -> Counts:
    """Counts at any length: a line through those at two short ones.

    Of a budget in tokens, what is attended to and fetched grows towards an end, as sets of query heads overlap less and
    less in a longer prompt: a line over 1 / s.
    """
    if kind.traits.prunes_prompt:
        raise ConfigError(f"{kind.title} shortens its own prefill, which the simulation does not know")
    if kind.traits_of(params).adapts:
        raise ConfigError(f"{kind.title} keeps as much as a prompt asks for, and the simulation's keys are random")
    first, second = lengths(request)
    if s == first or (request.tokens is not None and s <= second):
        return count_at(kind, params, request, model, s)
    low, high = (count_at(kind, params, request, model, n) for n in (first, second))
    share = (s - first) / (second - first)
    towards = share * second / s if request.tokens is not None else share
    values = {}
    for field in fields(Counts):
        a, b = getattr(low, field.name), getattr(high, field.name)
        values[field.name] = max(0.0, a + (b - a) * (towards if field.name in CHOSEN else share))
    observes = low.observe_flops / first**2  # quadratic, unlike all else
    return replace(Counts(**values), observe_flops=observes * s * s)


def lengths(request: BudgetRequest) -> tuple[int, int]:
    """Two lengths at which the budget leaves tokens out, as it does at all that are longer."""
    least = 4 * (request.tokens or 0)
    return max(AT[0], least), max(AT[1], 2 * least)


def count_at(kind: type[SelectiveAttention], params: Any, request: BudgetRequest, model: ModelShape, s: int) -> Counts:
    """The ledger's counts for one layer of random keys, after enough steps to fill a cache."""
    shape = replace(model, n_layers=LAYER + 1, attention_layers=(LAYER,), window=1 << 20, readers=())
    draw = torch.Generator().manual_seed(0)
    softmax = Softmax(shape.d_h**-0.5)

    def normal(heads: int, n: int, width: int = shape.d_h) -> torch.Tensor:
        # As wide as what is counted: of numbers of 16 bits many are equal, which makes a top-k longer.
        return torch.randn(1, heads, n, width, generator=draw).to(torch.bfloat16)

    with torch.inference_mode():
        q, k, v = normal(shape.h, s), normal(shape.h_kv, s), normal(shape.h_kv, s, shape.d_v)
        variant = kind.variant_for(params, request, shape, s)
        trace = Trace(shape, s, torch.device("cpu"))
        trace.ids, turn = range(s), turner(in_halves, Tables(angles))
        trace.turn = {LAYER: behind(turn, shape.d_v) if shape.is_latent else turn}
        trace.add(LAYER, k, v, softmax)
        for what in variant.observations:
            if what.of_input:
                trace.inputs[LAYER] = Call(normal(1, s, shape.d_model)[0], {})
            trace.observe(LAYER, what, q, k, softmax)
        read = run_second_passes(variant, trace, normal, softmax)
        before, period = kind.cycle(variant.plan, s)
        n_steps = max(N_STEPS, before + period)
        row = variant.row(trace, n_steps)
        if LAYER in row.skipped:
            raise ConfigError(f"{kind.title} leaves first and last layers whole, and the simulation has a single layer")
        if row.wants_lookahead:
            row.wants_lookahead = False
            row.q_ahead = q[:, :, -1:]
        row.build(LAYER)
        row.complete()
        numbers = Numbers()
        counting = numbers.of_search(kind)
        for _ in range(n_steps):
            numbers.n = 0
            new = normal(shape.h, 1), normal(shape.h_kv, 1), normal(shape.h_kv, 1, shape.d_v)
            attend_group(counting, [row], LAYER, *new, softmax)
            cut(row)
    last = mean_of(row.store.ledger.entries[-period:])
    build = float(reported(row).get("build_flops", 0.0))
    found = from_entry(last, shape, s, build, any(isinstance(what, ColumnSums) for what in variant.observations))
    return replace(found, searched_numbers=numbers.n, second_pass_tokens=read)


def mean_of(entries: Sequence[Entry]) -> Entry:
    return Entry._make(sum(numbers) / len(entries) for numbers in zip(*entries, strict=True))  # type: ignore[arg-type]


def angles(x: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (n, s, d) as rotary embeddings have them: which, changes no count."""
    at = where.unsqueeze(-1) * torch.logspace(0, -4, x.shape[-1] // 2).repeat(2)
    return at.cos(), at.sin()


def run_second_passes(
    variant: Variant, trace: Trace, normal: Callable[[int, int], torch.Tensor], softmax: Softmax
) -> int:
    """Let the trace know what second passes find of random queries; how many tokens they read."""
    of_words, n_tokens = Model(None, Letters(), trace.shape, torch.bfloat16, trace.device, DRAWN), 0
    for what in variant.second_passes:
        found = list[torch.Tensor]()
        for at in what.passes(of_words, trace.ids):
            near = torch.cat([trace.keys(LAYER)[:, :, some.start : some.stop] for some in at.near], 2)
            q = normal(trace.shape.h, len(at.ids))
            found.append(what.observe(at, q, near, softmax, torch.full(q.shape[:3], log(trace.s_prompt))))
            n_tokens += len(at.ids)
        trace.second_passes[what] = SecondPassResult({LAYER: what.join(found)}, 0.0)
    return n_tokens


class Numbers(TorchDispatchMode):
    """Counts the numbers that torch's operations make while it is entered; a view makes none."""

    n = 0

    def of_search(self, kind: type[SelectiveAttention]) -> type[SelectiveAttention]:
        """The class, with a search whose numbers are counted here."""

        def search(rows: Sequence[SelectiveAttention], layer: int, q: torch.Tensor) -> Sequence[Found]:
            with self:
                return kind.search(rows, layer, q)

        return type(f"Counting{kind.__name__}", (kind,), {"search": staticmethod(search)})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            parts = out if isinstance(out, tuple | list) else [out]
            self.n += sum(part.numel() for part in parts if isinstance(part, torch.Tensor))
        return out


def from_entry(entry: Entry, shape: ModelShape, s: int, build_flops: float, sums_columns: bool) -> Counts:
    """The counts in one line of a ledger."""
    token = token_bytes(shape) // shape.h_kv
    there = entry.resident_kv_bytes + entry.moved_kv_bytes + entry.made_kv_bytes  # less than 16 bits a number of codes
    return Counts(
        attended_bytes=min(entry.attended / shape.h * shape.h_kv * token, there),
        searched_bytes=entry.moved_meta_bytes + entry.read_meta_bytes + entry.searched_bytes,
        moved_kv_bytes=entry.moved_kv_bytes,
        moved_meta_bytes=entry.moved_meta_bytes if entry.resident_host_bytes else 0,
        resident_bytes=entry.resident_kv_bytes + entry.resident_meta_bytes,
        offloaded_bytes=s * shape.h_kv * token if entry.resident_host_bytes else 0,
        build_flops=build_flops,
        # Logits once more, and an exponential each.
        observe_flops=(shape.h * shape.d_h + shape.h) * s * s if sums_columns else 0,
    )
