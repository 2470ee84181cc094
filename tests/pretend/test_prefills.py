"""No sparse prefill waits for the device, and a layer of each launches no more kernels than it did."""

import pytest

from benchmarks.prefills import launches
from benchmarks.pretend.cuda import Machine

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
