"""Reads a prompt once for all cells that share the pass, and builds their rows.

Every variant takes a layer over while the pass goes on with the next one. Cells that memory has no room for at once
are built in waves, one after the other, from what the pass left.

Not here: the pass itself (`engine/prefill.py`), how many cells have room (`engine/books/width.py`).
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from kvbench.engine.books.stopwatch import Stopwatch
from kvbench.engine.model import Model
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import n_home, prefill
from kvbench.evals.cells import Cell
from kvbench.evals.prepare import PreparedSample
from kvbench.evals.refusals import naming
from kvbench.evals.screen.progress import Progress
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.tasks.forced import ForcedContinuation


@dataclass(frozen=True)
class Wave:
    """Cells that answer at once: their rows, built after one pass over the prompt."""

    cells: Sequence[Cell]
    rows: list[SelectiveAttention]
    trace: Trace
    prefill_s: float


def read(
    model: Model, one: PreparedSample, waves: Sequence[Sequence[Cell]], forced: ForcedContinuation | None,
    progress: Progress,
) -> Iterator[Wave]:  # fmt: skip
    """Read the prompt in one pass, then yield each wave of cells."""
    first, *others = waves
    cells = [cell for wave in waves for cell in wave]
    variants = [one.variants[cell.path] for cell in cells]
    n_new = one.packed.n_behind(one.sample)
    rows: list[SelectiveAttention] = []  # of the wave that answers now
    clock = Stopwatch()  # of what the variants build during the pass

    def begin(wave: Sequence[Cell], trace: Trace) -> None:
        for cell in wave:
            rows.append(one.variants[cell.path].row(trace, n_new))
            rows[-1].draw = cell.draw or 0
            if cell.settings.accesses:
                rows[-1].store.accesses = []

    def build_beside(trace: Trace, layer: int) -> None:
        with clock.running(trace.keys(layer).device):
            if not rows:
                begin(first, trace)
            build(first, rows, layer)
            if others:
                trace.hold(layer)
        progress.advance()

    progress.reading(one.sample.id, len(one.packed), len(model.shape.attention_layers))
    ids, pruning, sparsity = one.prompt.context_ids, variants[0].pruning, cells[0].sparsity
    observations = [what for variant in variants for what in variant.observations]
    home = n_home(variants, model.shape)
    chunk, evicts = cells[0].settings.chunk, evicting(cells[0], variants[0])
    trace = prefill(model, ids, observations, build_beside, pruning, sparsity, chunk, home, evicts)
    if forced is not None and pruning is sparsity is evicts is None:
        forced.plain = trace
    prefill_s = trace.seconds - sum(clock.seconds())
    for cell, variant in zip(cells, variants, strict=True):
        if variant.second_passes:
            with naming(cell.settings):  # who asks for what cannot be read
                run_second_passes(model, trace, variant.second_passes)
    for wave in waves:
        if wave is not first:
            rows.clear()  # which have answered: their memory is for the next ones
        if not rows:  # a later wave; or the model chooses by itself, and no layer was taken over
            begin(wave, trace)
            for layer in trace.shape.attention_layers:
                build(wave, rows, layer)
        complete(rows)
        yield Wave(wave, rows, trace, prefill_s)


def evicting(cell: Cell, variant: Variant) -> Variant | None:
    """The variant where it drops tokens while the prompt is read, in a pass of its own."""
    return variant if cell.settings.evicts and not variant.is_full else None


def pass_of(cell: Cell, variant: Variant) -> Hashable:
    """Cells for which it is equal can share a pass over a prompt; None: the ordinary one."""
    return variant.pruning if evicting(cell, variant) is None else id(variant)


def build(cells: Sequence[Cell], rows: Sequence[SelectiveAttention], layer: int) -> None:
    """Let every variant take over a layer of the prompt; what one refuses names it."""
    for cell, row in zip(cells, rows, strict=True):
        with naming(cell.settings):
            row.build(layer)


def complete(rows: Sequence[SelectiveAttention]) -> None:
    """Finish the prompt; by a function, so that no name holds a row of a wave that is over."""
    for row in rows:
        row.complete()
