"""What a request really occupies, besides what the ledger counts: on the device, and on the host.

What counts is a request that let go of what it does not read (`Trace.release`). Without a GPU device and host are one
memory, and an index on one is not told from an index on the other: there the ledger stands for it.

Not here: how many requests fit (`tasks/memory.py`).
"""

from kvbench.engine.books.reached import tensors_of
from kvbench.engine.passes.trace import Trace
from kvbench.engine.row import Row
from kvbench.engine.turns.state import request_tensors
from kvbench.kernels.gather import bytes_of_both
from kvbench.kernels.jit import power_of_2


def device_bytes(trace: Trace, row: Row) -> int:
    """K and V with room for what comes, whatever tokens are found with, the model's own cache of other layers."""
    rest = sum(x.untyped_storage().nbytes() for x in tensors_of(trace.rest, set(), set()))
    if trace.device.type == "cuda":
        return rest + sum(x.untyped_storage().nbytes() for x in request_tensors(row) if x.is_cuda)
    index = max(row.store.ledger.totals("resident_meta_bytes"), default=0)
    return rest + row.store.allocated_bytes() + index


def viewed_bytes(trace: Trace, row: Row) -> int:
    """How much of what a row holds is the prompt's own K and V, where the pass over it left them.

    Of a prompt in chunks, between which tokens left, a row takes all over that the pass holds, layer by layer.
    """
    if trace.slots:
        return trace.peak_bytes * sum(trace.n_held.values()) // trace.peak_tokens
    prompt = [x for layer in trace.held_layers() for x in (trace.keys(layer), trace.values(layer))]
    places = {x.untyped_storage().data_ptr() for x in prompt}
    pairs = [(part.k, part.v) for layer in row.store.layers.values() for part in layer.resident()]
    pairs += [(at.host.k, at.host.v) for at in row.store.layers.values() if at.host is not None and at.host.is_near]
    return sum(bytes_of_both(k, v) for k, v in pairs if k.untyped_storage().data_ptr() in places)


def host_bytes(row: Row) -> int:
    """Bytes of the host's memory that another request like this one takes; without a GPU all that it holds is there."""
    sizes = [(x.untyped_storage().nbytes(), x.is_pinned()) for x in request_tensors(row) if not x.is_cuda]
    return sum(power_of_2(n) if is_pinned else n for n, is_pinned in sizes)  # torch pins the next power of two
