"""No sparse prefill waits for the device, and a layer of each launches no more kernels than it did."""

import pytest
import torch
from torch import Tensor

from kvbench.benchmarks.prefills import launches
from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.causal import causal
from kvbench.engine.observe import query_lse
from kvbench.engine.softmax import Softmax
from kvbench.kernels import column_sums

LAUNCHES = {  # by a prefill's own parameters, and by a density
    "minference": (53, 749), "flexprefill_short": (224, 243), "xattention_short": (119, 138), "a_shape_short": (25, 25),
    "tri_shape_short": (25, 25), "block_sparse_short": (100, 119), "top_cdf_short": (129, 148),
}  # fmt: skip
QUICK = ("a_shape_short", "xattention_short")  # the interpreter takes ten seconds for each of the others


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAUNCHES]
)
def test_a_layer_launches_few_kernels_and_waits_for_none(machine: Machine, name: str) -> None:
    found = launches.costs(machine, name)
    assert found["waits"] == 0
    assert found["launches"] <= LAUNCHES[name][0] and found["launches_density"] <= LAUNCHES[name][1]
    assert found["launches_sums"] == 1


def test_every_prefill_is_counted() -> None:
    assert {*LAUNCHES} == {*launches.SMALL}


def test_what_torch_does_in_blocks_takes_few_of_them_on_a_gpu(machine: Machine, monkeypatch) -> None:
    """By a CPU's size of a block these are 100 of 4 queries for each of 2 KV heads."""
    (s, r), g, h_kv, softmax = (400, 399), 2, 2, Softmax(0.3, 5.0)
    monkeypatch.setattr(column_sums, "COLUMN_BLOCK_BYTES", 4 * 4 * g * s)
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, s, 8, generator=draw) for heads in (g * h_kv, h_kv))

    def found(q: Tensor, k: Tensor) -> list[Tensor]:
        out, lse = causal(q, k, k, softmax)
        sums = column_sums.column_sums_torch(q, k, softmax.scale, torch.ones(s, device=q.device), lse, softmax.cap)
        return [out, lse, query_lse(q[:, :, s - r :], k, softmax), sums]

    expected = found(q, k)
    with machine.counting() as counts:
        ours = found(q.to("cuda"), k.to("cuda"))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
    assert counts.launches < 3 * h_kv * 4 * 25, counts.lines("launch")  # three times 4 blocks of at most 25 launches
