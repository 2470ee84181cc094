"""Lets built variants answer a conversation, and writes a line for each turn.

Not here: the order in which rows read and answer (`evals/turns/ask.py`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.prefill import Trace
from engine.width import room_bytes, variant_bytes
from evals.cells import Cell
from evals.studies import accesses
from evals.turns.ask import Asker
from evals.turns.encode import TalkPrompt
from evals.turns.lines import turn_line
from methods.base import SelectiveAttention
from results import SampleRow
from results.files import file_stem
from tasks.base import Sample

if TYPE_CHECKING:
    from evals.loop import Group


def converse(
    group: "Group", sample: Sample, prompt: TalkPrompt, cells: Sequence[Cell], rows: Sequence[SelectiveAttention],
    trace: Trace, prefill_s: float,
) -> None:  # fmt: skip
    """Every turn of a sample; the lines are written once all turns are there, so that a sample is there or not."""
    talk, stops = sample.conversation, group.stops(sample)
    assert talk is not None, sample.id
    n_new = [turn.max_new_tokens for turn in talk.turns]
    group.progress.answering(sample.id, len(rows), sum(n_new))
    grows = talk.asking.budget_base == "conversation"
    asker = Asker(
        group.model, trace, rows, prompt, talk.asking, n_new, stops, prompt.end_ids(stops),
        rows_at_once(group, cells, prompt), group.progress.advance,
        (lambda row, n: cells[row].variant(n, prompt.frame)) if grows else None,
    )  # fmt: skip
    tokenizer = group.model.tokenizer
    lines: list[tuple[Cell, SampleRow, dict[str, list[int]] | None]] = []
    for said in asker.ask():
        cell = cells[said.variant]
        line, ledger = turn_line(sample, prompt, cell, said, tokenizer, prefill_s)
        accesses.keep(group.folders[cell.path].placing, file_stem(line.id), said.row.store, said.n_before)
        lines.append((cell, line, ledger))
    for cell, line, ledger in sorted(lines, key=lambda each: each[1].fields["turn"]):
        if line.id in group.missing_lines(cell, sample):
            group.folders[cell.path].append(line, ledger)


def rows_at_once(group: "Group", cells: Sequence[Cell], prompt: TalkPrompt) -> int:
    """How many rows are decoded at once: those of several questions, where there is memory for them."""
    if (limit := group.first.settings.max_variants) is not None:
        return limit
    model, element_bytes = group.model, group.model.dtype.itemsize
    sizes = [variant_bytes(group.variant(cell, prompt), model.shape, prompt.n_new, element_bytes) for cell in cells]
    return len(cells) * max(1, room_bytes(model.shape, 0, element_bytes, model.layers_on) // max(1, sum(sizes)))
