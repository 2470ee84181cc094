"""What every method must hold, for every file in conf/method/: a new one falls under it by being there."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from kvbench.results.names import known
from kvbench.tests.conformance import AT_EACH_RATIO, METHODS, ONCE, RATIOS, Refused, ours, wide_enough

BESIDE_OTHERS = "the answer is the same alone and beside others"


# A preset has its method's code, so what that leaves behind for others is found without it.
SLOW = {(name, BESIDE_OTHERS) for name in METHODS if known(name) != name}


@pytest.fixture(autouse=True)
def heads(request: pytest.FixtureRequest) -> Iterator[None]:
    """The model has heads that the method of the test can pack."""
    called = getattr(request.node, "callspec", None)
    with wide_enough(ours(called.params["name"])) if called and "name" in called.params else nullcontext():
        yield


@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param(name, what, marks=[pytest.mark.slow] if (name, what) in SLOW else [])
        for name in METHODS
        for what in ONCE
    ],
)
def test_a_method_holds(name: str, what: str) -> None:
    try:
        ONCE[what](ours(name))
    except Refused as error:
        pytest.skip(f"{name} refuses the test model: {error}")


# A preset differs from its method in a few parameters, and has two of the ratios.
AT = [(name, ratio) for name in METHODS for ratio in RATIOS if known(name) == name or ratio in ("0.1", "0.5")]


@pytest.mark.parametrize(("name", "ratio"), AT)
def test_a_method_holds_at_every_ratio(name: str, ratio: str) -> None:
    refusals = list[Refused]()
    for check in AT_EACH_RATIO.values():
        try:
            check(ours(name), ratio)
        except Refused as error:
            refusals.append(error)
    if len(refusals) == len(AT_EACH_RATIO):
        pytest.skip(f"{name} cannot meet ratio {ratio} on the test model: {refusals[0]}")


KEPT = [
    ("snapkv", ["positions=contiguous"]), ("adakv", ["positions=contiguous", "dropped=merged"]),
    ("knorm", ["dropped=merged"]),
]  # fmt: skip


@pytest.mark.parametrize("what", ONCE)
@pytest.mark.parametrize(("name", "keys"), KEPT)
def test_a_method_holds_with_other_keys_and_values(name: str, keys: list[str], what: str) -> None:
    ONCE[what](ours(name, *keys))


def test_a_method_of_ours_lies_in_methods() -> None:
    assert [name for name in METHODS if not ours(name).kind.__module__.startswith("kvbench.methods.")] == []
