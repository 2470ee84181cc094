"""Which layers choose tokens for those behind them, and whose choice a head takes, by Kascade's statistics.

`sim` (layers a, layers b, h2, h1) says how well the choice of head h1 of layer a serves head h2 of layer b.

Not here: the statistics (`methods/calibration/reuse.py`), what a run asks for (`methods/reuse.py`).
"""

import numpy as np


def layer_similarity(sim: np.ndarray) -> np.ndarray:
    """How well layer a's choice serves layer b, (L, L), by its heads' sim[a, b, h2, h1]."""
    return sim.max(-1).mean(-1)


def best_heads(sim: np.ndarray) -> tuple[int, ...]:
    """The anchor's head h1 that serves each head h2 best, of sim (h2, h1); the lower one where two are equal."""
    return tuple(sim.argmax(-1).tolist())


def best_anchors(value: np.ndarray, n: int) -> tuple[int, ...]:
    """The `n` layers, the first of all among them, with the largest sum of value[anchor, layer] over all layers.

    A layer's anchor is the last one in front of it or itself; of equal sums the one with earlier anchors is taken.
    """
    size = len(value)
    gains = np.concatenate([np.zeros((size, 1)), value.astype(np.float64).cumsum(1)], 1)  # of layers before i
    best, anchors = np.full(size + 1, -np.inf), list[np.ndarray]()
    best[0] = 0.0
    for _ in range(n):
        totals = np.full((size, size + 1), -np.inf)  # the last anchor, the layer behind the last that it serves
        for last in range(size):
            totals[last, last + 1 :] = best[last] + gains[last, last + 1 :] - gains[last, last]
        anchors.append(totals.argmax(0))
        best = totals.max(0)
    found, end = list[int](), size
    for each in reversed(anchors):
        end = int(each[end])
        found.append(end)
    return tuple(reversed(found))
