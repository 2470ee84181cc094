"""Rows that answer a prompt: `decode` lets a batch read a feed, if there is one, and answer.

All rows read the same prompt and begin at the same position; they differ in what they attend to, and so in what they
generate.

Not here: the batch and its steps (`engine/batch.py`), what text its tokens are (`evals/answer.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.engine.batch import Answer, Batch, OnStep, Watch, refuse_switch
from kvbench.engine.passes.trace import Trace
from kvbench.engine.row import Row
from kvbench.engine.sampling.cues import Cue
from kvbench.engine.sampling.draws import Draws, said
from kvbench.engine.sampling.spec import Sampling

if TYPE_CHECKING:
    from kvbench.engine.model import Model


HANDS_ON = "has layers that attend to what another one chose (reuse), and each step of these is launched anew"


@dataclass
class Decoded:
    """What a batch of rows generated, in their order, and how long its steps took."""

    answers: list[Answer]
    step_seconds: list[float]
    by_graphs: int | None = None  # steps of a GPU that replayed a captured one
    why_no_graphs: str | None = None  # why none of a GPU's was captured


def decode(
    model: "Model",
    trace: Trace,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    min_new_tokens: int = 0,
    feed: Sequence[int] = (),
    sampling: Sampling | None = None,
    seeds: Sequence[int] = (),
    cues: Mapping[int, Cue] | None = None,
    on_step: OnStep | None = None,
    watch: Watch | None = None,
) -> Decoded:
    """Let every row read `feed` through its compressed cache, then answer: greedily, or drawn by `sampling` and a seed.

    Without `feed` the first token comes from the prefill's own logits, for every row the same. With
    `max_new_tokens=0` rows only read; the first `min_new_tokens` are no stop tokens; `cues` interrupt some answers.
    `on_step` gets the number of steps done and of rows that made the last one; `watch` sees every step, and the steps'
    seconds do not include what it does with logits.
    """
    assert rows, "no rows to decode"
    assert trace.logits is not None, "the trace has no logits: it was not made by prefill()"
    refuse_switch(model, trace.s_prompt, trace.s_prompt + len(feed) + max(0, max_new_tokens - 1))
    batch = Batch(model, trace, rows, watch=watch)
    logits = trace.logits.expand(len(rows), -1)
    if feed:
        logits = batch.read([feed] * len(rows), "tokenwise", on_step=on_step)
    if max_new_tokens:
        draws = None if sampling is None else Draws(sampling, seeds, max_new_tokens, logits.device)
        allowed = [max_new_tokens] * len(rows)
        answers = batch.answer(logits, allowed, stop_ids, min_new_tokens, draws, cues, on_step, is_last=True)
    else:
        answers = [Answer(is_finite=said(mark) is not None) for mark in batch.doubt.tolist()]
    batch.flush()
    if model.device.type != "cuda":
        return Decoded(answers, batch.seconds())
    return Decoded(answers, batch.seconds(), batch.n_replayed, batch.why_no_graphs or eager(rows))


def eager(rows: Sequence[Row]) -> str | None:
    """What methods of a batch do at each step that no captured one could do again."""
    whys = [(row, HANDS_ON if row.store.handed is not None else row.traits.eager) for row in rows]
    said = dict.fromkeys(f"{row.title} {why}" for row, why in whys if why and not row.variant.is_full)
    return "; ".join(said) or None
