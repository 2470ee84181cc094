"""Built rows answer as one batch: each in its own words, or all reading what a task feeds and watches.

Not here: how a row decodes (`engine/decode.py`), several turns (`evals/batch/conversation.py`).
"""

from collections.abc import Iterator

from engine.decode import decode
from engine.model import Model
from engine.sampling.cues import cues_of
from engine.sampling.draws import Draws
from engine.sampling.finite import why_lost
from engine.sampling.spec import draw_seed
from evals.batch.reading import Wave
from evals.batch.reply import Reply
from evals.prepare import PreparedSample
from evals.screen.progress import Progress
from tasks.forced import ForcedContinuation


def answers(
    model: Model, one: PreparedSample, wave: Wave, stop_ids: frozenset[int], forced: ForcedContinuation | None,
    progress: Progress,
) -> Iterator[Reply]:  # fmt: skip
    """What each cell of a wave gives to a sample."""
    sample, trace, settings = one.sample, wave.trace, wave.cells[0].settings
    for row in wave.rows:
        row.complete()
    feed, watch, beside, draws, n_new = one.prompt.question_ids, None, [], None, sample.max_new_tokens
    cues, n_steps = cues_of(wave.rows, model.tokenizer), len(feed) + n_new - (not feed)
    if not (settings.sampling.is_greedy or forced):
        assert trace.logits is not None
        seeds = [draw_seed(settings.seed, sample.id, cell.draw or 0) for cell in wave.cells]
        draws = Draws(settings.sampling, seeds, n_new, trace.logits.device)
    if forced is not None:
        beside = forced.beside(model, stop_ids)
        feed, watch, n_new = forced.feed, forced.task.watch(sample, forced, wave.rows), 0
    trace.settle()
    progress.answering(sample.id, len(wave.rows), n_steps)
    decoded = decode(
        model, trace, [*wave.rows, *beside], draws=draws, cues=cues,
        max_new_tokens=n_new, min_new_tokens=sample.min_new_tokens, stop_ids=stop_ids, feed=feed,
        on_step=lambda step, speaking: progress.advance(), watch=watch,
    )  # fmt: skip
    n = len(wave.rows)
    outcomes = [None] * n if watch is None else watch.outcomes()
    is_sound = all(answer.is_finite for answer in decoded.answers[n:])
    for cell, row, answer, outcome in zip(wave.cells, wave.rows, decoded.answers[:n], outcomes, strict=True):
        if answer.is_finite and is_sound:
            yield Reply(cell, row, answer, decoded, wave.prefill_s, outcome)
        else:
            yield Reply(cell, lost=("failed", why_lost(len(answer.ids))))
