"""MRCR, token by token: the wanted piece is fed, and how often the next token would have been the piece's.

Names       MRCR, forced; alike pieces in a dialogue, forced
Asks        each token of the i-th of several alike pieces of a dialogue
Lengths     as mrcr
Answers     none: the piece is fed
Licence     MIT

The samples of `task=mrcr`, each question in a prompt of its own, and the right answer read through the compressed
cache. A model that repeats no piece by itself still finds its next word easier where the piece is there to read.

Score       the share of tokens whose likeliest next token was the right one, the ten characters included, which the
            question has. `nll` is the mean loss in nats; `piece_agreement` and `piece_nll` are of the piece alone.

Not here: dialogues (`tasks/mrcr`), what is measured (`forced_answers.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvbench.tasks.base import Sample
from kvbench.tasks.forced_answers import FedTask, places_of
from kvbench.tasks.mrcr.task import MRCR


class MRCRForced(FedTask, MRCR):
    """A sample for each question, whose piece is fed."""

    name = "mrcr_forced"
    version = 1
    part = "piece"

    def __init__(self, params: Any, data_dir: str | None, seed: int) -> None:
        apart = replace(params, mode="query_aware") if params.questions > 1 else params
        MRCR.__init__(self, apart, data_dir, seed)
        self.asking = None  # no turns: each question has a prompt of its own

    def part_of(self, tokenizer: Any, sample: Sample, answer: str) -> Sequence[int]:
        """The tokens after the ten characters."""
        return places_of(tokenizer, answer, [(len(sample.fields["start"]), len(answer))])
