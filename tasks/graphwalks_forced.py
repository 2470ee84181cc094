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
from typing import Any

from kvbench.tasks.base import Sample
from kvbench.tasks.forced_answers import FedTask, places_of
from kvbench.tasks.graphwalks.scores import CUE
from kvbench.tasks.graphwalks.task import GraphWalks


class GraphWalksForced(FedTask, GraphWalks):
    """The samples of each chosen problem, whose nodes are fed."""

    name = "graphwalks_forced"
    version = 1
    part = "nodes"

    def part_of(self, tokenizer: Any, sample: Sample, answer: str) -> Sequence[int]:
        """The tokens between the brackets."""
        return places_of(tokenizer, answer, [(len(CUE) + 2, len(answer) - 1)])
