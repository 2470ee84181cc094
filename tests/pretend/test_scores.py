"""What kernels make of units, held to the formula that every `Indexed` method writes: one test for all of them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.kernels.clock import now
from kvbench.kernels.topk import NO_KEY
from kvbench.methods.indexed import Indexed
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import answer, moved

KINDS = [
    *("quest", "quest method.agg=group_mean", "quest method.page_generated=true", "oracle", "loki", "double_sparsity"),
    *("oracle method.agg=query_head", "loki method.granularity=kv_head", "sparq", "infinigen", "infllm"),
    "infllm method.per_head=true",
]


def scores_of(keys: Tensor) -> Tensor:
    """The float32 in the upper halves; -inf where a key stands for no unit."""
    rising = ~(keys >> 32).int()
    scores = (rising ^ ((rising >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return scores.masked_fill(keys == NO_KEY, -torch.inf)


@pytest.mark.parametrize("words", KINDS)
def test_a_kernel_scores_units_as_the_formula_does(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    name, *settings = words.split()
    compared = list[int]()
    by_kernel = Indexed.search_by_kernel.__func__  # type: ignore[attr-defined]

    def both(cls: type[Indexed], rows: Sequence[Any], layer: int, q: Tensor) -> Any:
        found = by_kernel(cls, rows, layer, q)
        k, v = (torch.cat([row.store[layer].newest[i] for row in rows]) for i in (0, 1))
        keys = cls.plan_search(rows, layer, None, 0).launch(q, k, v, now(q.device)).cpu()
        for row in () if cls.takes_newest else rows:  # whose kernel takes the token in
            row.append(layer)
        for i, (row, (ranking, _)) in enumerate(zip(rows, cls.scored(rows, layer, q), strict=True)):
            units = row.units(layer)
            competing = slice(units.first, units.behind)
            scores = scores_of(keys[i, :, competing])
            assert (keys[i, :, competing].int() == torch.arange(units.first, units.behind)).all()
            torch.testing.assert_close(scores, ranking[0].cpu()[:, competing], atol=2e-5, rtol=2e-5)
            compared.append(scores.numel())
        return found

    monkeypatch.setattr(Indexed, "search_by_kernel", classmethod(both))
    answer(moved(conformance.model(), "cuda:0"), name, *settings, n_new=3)
    assert min(compared) > 0
