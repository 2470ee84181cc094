"""What the engine counts by itself of methods that it does not know: those in a file outside this repository.

Rows that are `checked_for` somebody have their selections looked at before memory is read there, the parts that they
hand to attention counted in addition to what they say, and the tensors of their own added up. `KVBENCH_CHECK=1` in the
environment checks every row. It takes a pass over every selection, and on a GPU waits for it.

Not here: what a method may do and no count shows, which `tests/conformance.py` looks for.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.ledger import Entry, Ledger
from kvbench.engine.books.reached import tensors_of
from kvbench.engine.budget import ELEMENT_BYTES, token_bytes
from kvbench.engine.errors import ConfigError, RunError
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.placement import Placement
from kvbench.engine.row import Row
from kvbench.engine.shapes import ModelShape

LARGEST_ID_BYTES = 4  # of whole numbers, as the books count positions and ids
FAR_ABOVE = 2  # times what is counted, and this share of the full cache more:
SPARE_SHARE = 8
LISTED = 5  # positions that a sentence names


def check_positions(idx: Tensor, shape: ModelShape, lowest: int, end: int, where: str) -> None:
    """Raise `RunError` unless idx (1, h_kv or h, k) holds positions from `lowest` to `end`, each once per head."""
    if idx.is_floating_point() or idx.dtype == torch.bool:
        raise RunError(f"{where} are {idx.dtype}, and positions are whole numbers; return torch.int64")
    if idx.ndim != 3 or idx.shape[0] != 1 or idx.shape[1] not in (shape.h, shape.h_kv):
        raise RunError(
            f"{where} have the shape {tuple(idx.shape)}, and it is (1, h_kv or h, k) with h_kv {shape.h_kv} and "
            f"h {shape.h}; return one row of positions per head"
        )
    if wrong := idx[(idx < lowest) | (idx >= end)].tolist():
        raise RunError(f"{where} hold {listed(wrong)}, and there are {lowest} to {end - 1}; return none beyond")
    for head, positions in enumerate(idx[0]):
        found, counts = positions[positions >= 0].unique(return_counts=True)
        if twice := found[counts > 1].tolist():
            raise RunError(f"{where} hold {listed(twice)} of head {head} twice; return each once")


def check_kept(placement: Placement, layer: int, shape: ModelShape, s_prompt: int, checked_for: str) -> None:
    """`check_positions` of what a row that is checked keeps: (1, h_kv or h, k), or (k,) of single heads."""
    chosen = getattr(placement, "chosen", None)
    for positions in (chosen if isinstance(chosen, Sequence) else [chosen]) if checked_for else ():
        if isinstance(positions, Tensor):
            idx = positions.expand(1, shape.h_kv, -1) if positions.ndim == 1 else positions
            lowest = 0 if idx.shape[1:2] == (shape.h_kv,) else -1  # query heads may choose different numbers
            where = f"{checked_for}: the positions kept in layer {layer}"
            check_positions(idx, shape, lowest, s_prompt, where)


def check_selection(layer: Layer, idx: Tensor, end: int, padded: bool) -> None:
    """Raise `RunError` where a step fetches what is not there, what it has already, or anything twice."""
    shape, host = layer.meter.shape, layer.host
    assert host is not None
    where = (
        f"{layer.checked_for}: the positions selected in step {layer.n_seen - layer.s_prompt} of layer {layer.index}"
    )
    if idx.is_cuda:
        idx = idx.int().long()  # keys have scores in their upper halves
    check_positions(idx, shape, -1 if padded else 0, end, where)
    if layer.n_kept + layer.n_window == 0:
        return
    resident = layer.positions()[0].repeat_interleave(idx.shape[1] // shape.h_kv, 0)
    for head, positions in enumerate(host.positions_of(idx, layer.s_prompt)[0]):
        if there := positions[(positions >= 0) & torch.isin(positions, resident[head])].tolist():
            raise RunError(
                f"{where} hold {listed(there)} of head {head}, which the device holds and the step attends to already; "
                "return positions between what is kept and the window"
            )


def listed(positions: Sequence[int]) -> str:
    """`position 3`, or `positions 3, 5, 8 and 4 more`."""
    first, more = sorted(set(positions))[:LISTED], len(set(positions)) - LISTED
    rest = f" and {more} more" if more > 0 else ""
    return f"position{'s' * (len(first) > 1)} {', '.join(map(str, first))}{rest}"


def tokens_of(part: Part, h: int) -> int:
    """Tokens of a part that attention reads, summed over query heads."""
    if part.spans is not None:
        return int(part.spans.counts.sum()) * (h // len(part.spans.counts))
    there = part.mask
    if there is None and part.idx is not None and part.idx.is_cuda:
        there = part.idx.int() >= 0
    if there is None:
        return part.n_tokens() * h
    return int(there.sum()) * (h // there.shape[1])


def tokens_and_pseudo(parts: Iterable[Part], h: int) -> tuple[int, int]:
    """Tokens and pseudo-tokens that attention reads, summed over query heads."""
    found = [0, 0]
    for part in parts:
        found[part.is_pseudo] += tokens_of(part, h)
    return found[0], found[1]


def count_parts(rows: Sequence[Row], layer: int, parts: Sequence[Sequence[Part]]) -> None:
    """Keep what attention reads of rows that are checked, until their step ends."""
    for row, own in zip(rows, parts, strict=True):
        if row.store.checked_for:
            check_skips(row)
            row.store.ledger.read[layer] = tokens_and_pseudo(own, row.trace.shape.h)


def correct_entry(ledger: Ledger, layer: int, shape: ModelShape) -> None:
    """Let the entry of a step have no less than attention read."""
    if (read := ledger.read.pop(layer, None)) is not None:
        ledger.correct(lambda entry: corrected(entry, *read, shape))


def corrected(entry: Entry, n_tokens: int, n_pseudo: int, shape: ModelShape) -> Entry:
    """The entry with no less than attention read.

    K and V of a pseudo-token are read in order to stand for tokens: `comm` prices them, as it does RetroInfer's.
    """
    pseudo_bytes = n_pseudo * token_bytes(shape) // shape.h
    return entry._replace(
        attended=max(entry.attended, n_tokens),
        pseudo_tokens=max(entry.pseudo_tokens, n_pseudo),
        moved_meta_bytes=max(entry.moved_meta_bytes, pseudo_bytes),
    )


def check_skips(row: Row) -> None:
    """Raise `ConfigError` for a method that leaves every layer whole."""
    layers = row.trace.shape.attention_layers
    if not row.variant.is_full and layers and set(layers) <= set(row.skipped):
        raise ConfigError(
            f"whole_layers() of {type(row).__name__} names all {len(layers)} layers, so that no budget is checked; "
            "leave one to compress, or run method=full"
        )


def bytes_beside(row: Row) -> int:
    """Bytes of a row's own tensors, besides the store's and the trace's K and V; numbers at 16 bits, ids at 32."""
    prompt = [x for layer in row.trace.held_layers() for x in (row.trace.keys(layer), row.trace.values(layer))]
    known = {x.untyped_storage().data_ptr() for x in prompt}
    skipped = {id(each) for each in (row.trace, row.variant, row.params, row.plan, row.budget, row.store)}
    found = tensors_of(row, known, skipped)
    return sum(as_counted(x) for x in found if row.traits.drops or not is_turned(x, prompt))


def is_turned(x: Tensor, prompt: Sequence[Tensor]) -> bool:
    """Whether a tensor is the prompt's own K or V by components, which the books have on the tier where it lies."""
    return any(x.shape == of[0].mT.shape and torch.equal(x.to(of.device), of[0].mT) for of in prompt)


def as_counted(x: Tensor) -> int:
    """Bytes of a tensor's memory, by the rules of the books."""
    n = x.untyped_storage().nbytes() // x.itemsize
    return n * min(x.itemsize, ELEMENT_BYTES if x.is_floating_point() else LARGEST_ID_BYTES)


def uncounted_bytes(row: Row) -> int:
    """How much a row holds in tensors of its own, where that is far above what the books have of it; else 0."""
    at_most: dict[int, int] = {}
    for entry in row.store.ledger.entries:
        n_bytes = entry.resident_meta_bytes + row.store[entry.layer].meter.host_meta_bytes
        at_most[entry.layer] = max(at_most.get(entry.layer, 0), n_bytes)
    shape = row.trace.shape
    full = token_bytes(shape) * row.trace.s_prompt * len(shape.attention_layers)
    held = bytes_beside(row)
    return held if held > FAR_ABOVE * sum(at_most.values()) + full // SPARE_SHARE else 0
