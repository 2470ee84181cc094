"""What an answer to GraphWalks is worth: F1 of the nodes in its last line.

The card's code leaves `Final Answer: [` at the first node, so that this node never counts (`card`). What evaluators in
use read begins at the bracket (`harness`). Both want the list in the very last line, in which case an answer that ends
in a line break fails.

Not here: what is right (`graphs.py`).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

LIST = re.compile(r"Final Answer: ?\[.*\]")
CUE = "Final Answer:"


@dataclass(frozen=True)
class Verdict:
    precision: float
    recall: float
    f1: float
    exact: float
    failed: bool  # no list was found


def nodes_of(prediction: str, extraction: str = "harness") -> list[str] | None:
    """The nodes of an answer; None where there is no list."""
    found = LIST.search(prediction.split("\n")[-1])
    if found is None:
        return None
    text = found[0] if extraction == "card" else found[0][found[0].index("[") :]
    return [part.strip() for part in text.strip("[]").split(",") if part.strip()]


def verdict(prediction: str, reference: Collection[str], extraction: str = "harness") -> Verdict:
    found = nodes_of(prediction, extraction)
    nodes, right = set(found or ()), set(reference)
    if found is not None and not nodes and not right:
        return Verdict(1.0, 1.0, 1.0, 1.0, False)
    n = len(nodes & right)
    precision, recall = n / len(nodes) if nodes else 0.0, n / len(right) if right else 0.0
    f1 = 2 * precision * recall / (precision + recall) if n else 0.0
    return Verdict(precision, recall, f1, float(found is not None and nodes == right), found is None)
