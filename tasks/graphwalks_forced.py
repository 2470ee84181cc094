"""GraphWalks, token by token: the right nodes are fed, and how often the next token would have been theirs.

Names       GraphWalks, forced; walks in drawn graphs, forced
Asks        each token of the nodes at a depth of a graph, or that lead to a node
Lengths     as graphwalks
Answers     none: the list is fed
Licence     MIT by its card

The samples of `task=graphwalks`, with the list of the right nodes, in the order of their names, read through the
compressed cache. A model that searches no graph by itself still finds a node's next token easier where its edge is
there to read.

Score       the share of tokens whose likeliest next token was the right one. `nll` is the mean loss in nats;
            `nodes_agreement` and `nodes_nll` are of the nodes alone.

Not here: graphs (`tasks/graphwalks`), what is measured (`forced_answers.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from methods.base import SelectiveAttention
from tasks.base import Sample
from tasks.forced import ForcedContinuation, ForcedTask, ForcedWatch
from tasks.forced_answers import PLACES, Agreed, Fed, places_of
from tasks.graphwalks.scores import CUE
from tasks.graphwalks.task import GraphWalks
from tasks.lazy import LazySamples


class GraphWalksForced(ForcedTask, GraphWalks):
    """The samples of each chosen problem, whose nodes are fed."""

    name = "graphwalks_forced"
    version = 1

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        return Fed(Written(GraphWalks.samples(self, tokenizer)), tokenizer, node_places)

    def watch(
        self, sample: Sample, continuation: ForcedContinuation, rows: Sequence[SelectiveAttention]
    ) -> ForcedWatch:
        assert continuation.ids is not None
        return Agreed(continuation.ids, len(rows), sample.fields[PLACES], "nodes")


class Written(LazySamples):
    """Samples whose nodes stand in the line that an answer ends with."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.places = samples

    def sample(self, i: int) -> Sample:
        one = self.places[i]
        return replace(one, references=(f"{CUE} [{', '.join(one.references)}]",))


def node_places(tokenizer: Any, sample: Sample) -> Sequence[int]:
    """The tokens between the brackets."""
    (reference,) = sample.references
    return places_of(tokenizer, reference, [(len(CUE) + 2, len(reference) - 1)])
