"""Graphs as lists of edges: what stands in a prompt, what is right, and graphs that are drawn.

Not here: what an answer is worth (`scores.py`).
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

Edge = tuple[str, str]
HEADING = "The graph has the following edges:"
OPERATION = "Operation:"
EDGE = re.compile(r"^(\S+) -> (\S+)$", re.MULTILINE)
PARENTS = re.compile(r"Find the parents of node (\S+?)\.")
BFS = re.compile(r"Perform a BFS from node (\S+) with depth (\d+)\.")
NO_PARENTS = 0.1  # share of drawn questions whose answer is empty
MOST_NODES = 20  # of a drawn answer
TRIES = 400


@dataclass(frozen=True)
class Walk:
    """An operation on a graph."""

    kind: str  # parents | bfs
    node: str
    depth: int  # 1 for parents

    @property
    def words(self) -> str:
        if self.kind == "parents":
            return f"Find the parents of node {self.node}."
        return f"Perform a BFS from node {self.node} with depth {self.depth}."


def walk_of(text: str) -> Walk | None:
    """The operation that a text asks for."""
    if found := PARENTS.search(text):
        return Walk("parents", found[1], 1)
    found = BFS.search(text)
    return Walk("bfs", found[1], int(found[2])) if found else None


def edges_of(prompt: str) -> list[Edge]:
    """The graph of a prompt: the edges after its last heading."""
    return EDGE.findall(prompt.rpartition(HEADING)[2].rpartition(OPERATION)[0])


def answer(edges: Sequence[Edge], walk: Walk) -> frozenset[str]:
    """Nodes whose shortest distance from the start is the depth; or those with an edge to the node. Never itself."""
    if walk.kind == "parents":
        return frozenset(a for a, b in edges if b == walk.node) - {walk.node}
    after: dict[str, set[str]] = {}
    for a, b in edges:
        after.setdefault(a, set()).add(b)
    seen, now = {walk.node}, {walk.node}
    for _ in range(walk.depth):
        now = {b for a in now for b in after.get(a, ())} - seen
        seen |= now
    return frozenset(now)


def name_of(number: int) -> str:
    return hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()[:10]


def draw_edges(rng: random.Random, n_edges: int, out_degree: int) -> list[Edge]:
    """Every node's edges one after the other; the last node may have fewer."""
    n_nodes = -(-n_edges // out_degree)
    names = [name_of(number) for number in rng.sample(range(10 * n_nodes + 10), n_nodes)]
    sources = [name for name in names for _ in range(out_degree)][:n_edges]
    return [(source, rng.choice(names)) for source in sources]


def draw_walk(rng: random.Random, edges: Sequence[Edge], kind: str, depths: Sequence[int]) -> Walk | None:
    """An operation with 1 to 20 nodes to answer, of some parents none; None where the graph has none such."""
    nodes = sorted({node for edge in edges for node in edge})
    empty = kind == "parents" and rng.random() < NO_PARENTS
    for _ in range(TRIES):
        walk = Walk(kind, rng.choice(nodes), rng.choice(tuple(depths)) if kind == "bfs" else 1)
        n = len(answer(edges, walk))
        if n == 0 if empty else 1 <= n <= MOST_NODES:
            return walk
    return None
