"""What all methods share: a variant, and when it is full attention itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest, resolve
from kvbench.engine.placement import Made
from kvbench.engine.search import select_rows
from kvbench.engine.selection import Found, selection
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.tests.vectors import built, step, trace_of

SHAPE = ModelShape("vectors", 1, 4, 2, 8, 1 << 20, (0,))


class Halving(SelectiveAttention):
    """Keeps every token, each at half its length: it attends to all and changes what it keeps."""

    title = "Halving"
    drops = True
    changes = True

    @dataclass(frozen=True)
    class Params:
        pass

    def arrange(self, layer: int) -> Made:
        everything = torch.arange(self.trace.s_prompt).expand(1, self.trace.shape.h_kv, -1)
        return Made(self.trace.keys(layer), self.trace.values(layer) * 0.5, everything)


def variant(tokens: int, n_answer: int | None = None, method: type[SelectiveAttention] = Halving) -> Variant:
    request = BudgetRequest(None, 60, Fraction(0))
    budget = replace(resolve(request, 60, drops=True), tokens=tokens, n_answer=n_answer)
    return Variant(method, method.Params(), budget, None)


def test_full_attention_attends_to_all_changes_nothing_and_never_evicts() -> None:
    unchanged = type("Unchanged", (Halving,), {"changes": False})
    assert variant(60, method=unchanged).is_full
    assert not variant(59, method=unchanged).is_full
    assert not variant(60).is_full
    assert not variant(60, n_answer=10, method=unchanged).is_full
    assert variant(70, n_answer=10, method=unchanged).is_full


def test_a_method_that_changes_what_it_keeps_is_asked_even_with_the_whole_prompt_in_its_budget() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 61, 8, generator=draw) for heads in (4, 2, 2))
    trace = trace_of(k, v, 4, 60)

    def out(method: type[SelectiveAttention]) -> Tensor:
        row = built(variant(60, method=method).row(trace, 4))
        return step(row, q[:, :, 60:], k[:, :, 60:], 0 * v[:, :, 60:])

    unchanged = type("Unchanged", (Halving,), {"changes": False})
    torch.testing.assert_close(out(Halving), out(unchanged) / 2)


def test_rows_of_one_kind_are_searched_together_and_answered_in_their_order() -> None:
    together: list[list[int]] = []

    class Searching(Halving):
        apart = True

        def kind(self, layer: int) -> int:
            return self.apart and self.budget.tokens

        @classmethod
        def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> list[Found]:
            together.append([row.budget.tokens for row in rows])
            return [None if one[0, 0, 0] == 3 else one[0, 0, 0] for one in q]

    draw = torch.Generator().manual_seed(0)
    _, k, v = (torch.randn(1, heads, 61, 8, generator=draw) for heads in (4, 2, 2))
    trace, q = trace_of(k, v, 4, 60), torch.arange(4.0).view(4, 1, 1, 1).expand(-1, 4, 1, 8)
    rows = [variant(tokens, method=Searching).row(trace, 4) for tokens in (50, 40, 50, 40)]
    selections = select_rows(Searching, rows, 0, q)  # type: ignore[arg-type]
    assert together == [[50, 50], [40, 40]]
    found = [selection(each).idx for each in selections]
    assert [None if idx is None else idx.item() for idx in found] == [0, 1, 2, None]
    Searching.apart = False
    assert len(select_rows(Searching, rows, 0, q)) == 4  # type: ignore[arg-type]
    assert together[2:] == [[50, 40, 50, 40]]
