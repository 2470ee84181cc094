"""The line of one turn in samples.jsonl: what every sample's line says, of this turn alone.

Beside that it says its sample and turn, how it was asked, how long its feed took, and what the feed's tokens and the
answer's attended to, apart. `measures` has the score under the turn's name, so that a run has a mean for every turn.

Not here: lines of samples without turns (`evals/lines.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from engine.books.ledger import Entry
from engine.decode import Decoded
from engine.sampling.finite import why_lost
from evals.cells import Cell
from evals.lines import answer_line, lost_line, sample_hash
from evals.turns.ask import Said
from evals.turns.encode import TalkPrompt
from results import SampleRow
from tasks.base import Sample
from tasks.prompt import Prompt, answer_text
from tasks.turns.questions import one_question


def turn_line(
    sample: Sample, prompt: TalkPrompt, cell: Cell, said: Said, tokenizer: Any, prefill_s: float
) -> tuple[SampleRow, dict[str, list[int]] | None]:
    """A turn's line, and its ledger as columns where there is an answer."""
    assert sample.conversation is not None, sample.id
    own, asking = one_question(sample, said.turn), sample.conversation.asking
    if not said.answer.is_finite:
        line = lost_line(own, prompt, "failed", why_lost(len(said.answer.ids)), cell)
        return replace(line, prompt_sha256=sample_hash(sample, prompt)), None
    text = answer_text(own, tokenizer.decode(said.answer.ids, skip_special_tokens=True))
    asked = Prompt(prompt.context_ids, said.feed_ids, prompt.frame)
    decoded = Decoded([said.answer] * said.n_rows, said.step_s)
    line = answer_line(own, asked, cell, said.row, said.answer, text, decoded, prefill_s, None)
    entries, h = said.row.store.ledger.entries, cell.shape.h
    fed = len(said.feed_ids) * len(said.row.store.layers)
    fields = {
        "feed": asking.feed,
        "budget_base": asking.budget_base,
        "feed_tokens": len(said.feed_ids),
        "bytes_rebuilt": said.row.store.ledger.rebuilt_bytes,
        "feed_s": said.feed_s,
        "attended_by_feed": attended(entries[:fed], h),
        "attended_by_answer": attended(entries[fed:], h),
        "measures": {f"turn_{said.turn + 1}": line.score},
    }
    line = replace(line, prompt_sha256=sample_hash(sample, prompt), fields={**line.fields, **fields})
    return line, said.row.store.ledger.columns()


def attended(entries: Sequence[Entry], h: int) -> float | None:
    """Tokens that a query head attended to, mean over steps and layers."""
    return fmean(entry.attended / h for entry in entries) if entries else None
