"""A feed's token that attends to all that its row holds, whatever the method selects: `task.feed=dense`.

The method takes its step all the same, so that its window, codes and counters go on as ever; what it would have
attended to and corrected is replaced. The books say that the token attended to everything, and that all of the host's
tokens moved for it.

Not here: which feeds are read like this (`engine/turns/talk.py`).
"""

from torch import Tensor

from engine.attend import Part, attend_rows
from engine.errors import ConfigError
from engine.row import Row
from engine.softmax import Softmax
from engine.step import behind_rows, step_rows


def read_dense(row: Row, layer: int, q: Tensor, k: Tensor, v: Tensor, soft: Softmax) -> Tensor:
    """The output (1, h, 1, d_h) of one token over the host tier's tokens, the generated ones included."""
    kind, at = type(row), row.store[layer]
    host = at.host
    if row.wants_weights or host is None or not host.has_keys:
        raise ConfigError(
            f"task.feed=dense needs keys and values of the whole context, which {kind.title} does not hold"
        )
    step_rows(kind, [row], layer, q, k, v)
    n_held = at.n_seen - at.n_gone  # that the host numbers, those on the device included
    parts = [Part(k.to(q.device), v.to(q.device)) for k, v in host.held(n_held)]
    out, _ = attend_rows(q, [parts], soft, [False])
    for _, change in behind_rows(kind, [row], layer, out.clone(), [None]):
        row.store.change(layer, change)
    at.meter.count_whole(n_held - at.n_kept - at.n_window)
    row.store.close(layer)
    return out
