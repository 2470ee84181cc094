"""A step of one layer: the current token is taken in, what else is attended to is found and fetched, and after
attention tokens leave as each row says. Rows stand by class, each of which works on all of its rows at once.

Not here: which tokens (`methods`), the loop over steps (`engine/batch.py`), all rows' memory at once
(`engine/rows.py`).
"""

from collections.abc import Sequence

from torch import Tensor

from kvbench.engine.attend import Part, attend_rows
from kvbench.engine.books.audit import count_parts
from kvbench.engine.books.spans import span
from kvbench.engine.layouts.handed import follows, hand_on_change, is_silent, take_over_change
from kvbench.engine.layouts.launch_plan import LaunchPlan
from kvbench.engine.placement import Change
from kvbench.engine.readers import Held, Readers, end
from kvbench.engine.row import Row
from kvbench.engine.rows import append_rows, fetch_rows
from kvbench.engine.search import select_rows
from kvbench.engine.selection import Selection, selection
from kvbench.engine.softmax import Softmax
from kvbench.kernels.fast import takes


def step_rows(
    kind: type[Row], rows: Sequence[Row], layer: int,
    q: Tensor, k_new: Tensor, v_new: Tensor,
) -> list[list[Part]]:  # fmt: skip
    """Append the current token of every row, select, fetch: the parts that each row attends to."""
    with span("append", layer):
        append_rows([row.store[layer] for row in rows], k_new, v_new)
    parts = [row.resident(layer, q[i : i + 1]) for i, row in enumerate(rows)]
    return [[*own, *more] for own, more in zip(parts, fetched_rows(kind, rows, layer, q), strict=True)]


def fetched_rows(kind: type[Row], rows: Sequence[Row], layer: int, q: Tensor) -> list[list[Part]]:
    """What each row attends to in addition to what is resident."""
    parts: list[list[Part]] = [[] for _ in rows]
    fetching = [i for i, row in enumerate(rows) if row.store[layer].can_fetch]
    if not fetching:
        return parts
    with span("search", layer):
        queries = q if len(fetching) == len(rows) else q[fetching]
        found = [selection(each) for each in select_rows(kind, [rows[i] for i in fetching], layer, queries)]
    for i, chosen in zip(fetching, found, strict=True):
        rows[i].store.spend(layer, chosen.cost)
    asking = [(i, chosen, chosen.idx) for i, chosen in zip(fetching, found, strict=True) if chosen.idx is not None]
    if asking:
        with span("fetch", layer):
            fetched = fetch_rows(
                [rows[i].store[layer] for i, _, _ in asking], [idx for *_, idx in asking], kind.traits.pads
            )
        for (i, chosen, _), part in zip(asking, fetched, strict=True):
            parts[i].append(as_chosen(part, chosen))
    for i, chosen in zip(fetching, found, strict=True):
        if chosen.stand_ins:
            parts[i] += chosen.stand_ins
            h, meter = rows[i].trace.shape.h, rows[i].store[layer].meter
            meter.count_pseudo(sum(part.n_tokens() for part in chosen.stand_ins) * h)
    return parts


def as_chosen(part: Part, chosen: Selection) -> Part:
    """What was fetched, as its row wants to attend to it."""
    if chosen.keys is not None:
        part.k = chosen.keys
    part.bias = chosen.bias
    return part if chosen.turned is None else chosen.turned(part)


def behind_rows(
    kind: type[Row], rows: Sequence[Row], layer: int,
    out: Tensor, weights: Sequence[Tensor | None], on_gpu: bool = False,
) -> list[tuple[Row, Change]]:  # fmt: skip
    """Behind attention: outputs (n, h, 1, d_h) are corrected in place. How tokens leave, which is not done yet."""
    after = kind.after_rows_on_gpu if on_gpu else kind.after_rows
    if all(row.store.handed is None for row in rows):
        changes = zip(rows, after(rows, layer, out, weights), strict=False)
        return [(row, change) for row, change in changes if change is not None]
    found: list[tuple[Row, Change | None]] = []
    if own := [i for i, row in enumerate(rows) if not is_silent(row, layer)]:
        asked, corrected = [rows[i] for i in own], out[own]
        changed = after(asked, layer, corrected, [weights[i] for i in own])
        found = [*zip(asked, [*changed] or [None] * len(asked), strict=True)]
        for i, row, made in zip(own, asked, corrected, strict=True):
            if row.store.handed is None or layer not in row.store.handed.reuse.all_too:
                out[i] = made  # a layer that attended to all tokens lacks none that a correction would stand for
    for row, change in found:
        hand_on_change(row, layer, change)
    found += [(row, take_over_change(row, layer)) for row in rows if follows(row, layer)]
    return [(row, change) for row, change in found if change is not None]


def cut(row: Row) -> None:
    """Between two steps, once all layers are through: tokens leave as the row says, layer by layer."""
    for layer, change in row.after_step():
        row.store.change(layer, change)


def attend_groups(
    groups: Sequence[tuple[type[Row], slice]], rows: Sequence[Row], layer: int,
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, readers: Readers | None = None, plan: LaunchPlan | None = None,
) -> Tensor:  # fmt: skip
    """One layer of one step for rows that stand by class: their parts, attention, the books; (n, h, 1, d_h).

    Where other layers read this one's K and V, `readers` ends its step; `plan` has its launches on an accelerator.
    """
    if plan is not None and plan.holds(q):
        return plan.take_step(q, k, v, softmax)
    with span("append", layer):
        append_rows([row.store[layer] for row in rows], k, v)
        resident = residents(rows, layer, q)
    fetched = [part for kind, at in groups for part in fetched_rows(kind, rows[at], layer, q[at])]
    with span("attention", layer):
        parts = [[*own, *more] for own, more in zip(resident, fetched, strict=True)]
        count_parts(rows, layer, parts)
        out, weights = attend_rows(q, parts, softmax, [row.wants_weights for row in rows])
        if plan is not None:
            plan.make(parts, fetched, q)
    with span("after", layer):
        for i, row in enumerate(rows):
            if (queries := row.store[layer].queries) is not None:
                queries.push(q, i)
        on_gpu = takes("evict", q.device) and not (
            readers is not None and layer in readers.last
        )  # where a kernel evicts at once
        changes: list[tuple[Row, Change]] = []
        for kind, at in groups:
            changes += behind_rows(kind, rows[at], layer, out if len(groups) == 1 else out[at], weights[at], on_gpu)
        if plan is not None:
            plan.forget() if changes else plan.plan_update()
        held = Held(rows, parts, changes)
        if readers is not None:
            readers.hold(layer, held)
        else:
            end(layer, held)
    return out


def residents(
    rows: Sequence[Row], layer: int, q: Tensor
) -> list[list[Part]]:  # fmt: skip
    """What each row attends to without a fetch."""
    return [row.resident(layer, q[i : i + 1]) for i, row in enumerate(rows)]


def attend_group(
    kind: type[Row], rows: Sequence[Row], layer: int,
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax,
) -> list[Tensor]:  # fmt: skip
    """`attend_groups` for rows of one class; (1, h, 1, d_h) each."""
    out = attend_groups([(kind, slice(0, len(rows)))], rows, layer, q, k, v, softmax)
    return [out[i : i + 1] for i in range(len(rows))]
