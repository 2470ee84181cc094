"""`kernels=torch` on a CPU: none of our C++, and the same answers in float32."""

from collections.abc import Iterator

import pytest

from kvbench.kernels import build, select_attend
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import answer

needs_compiler = pytest.mark.skipif(select_attend.native() is None, reason="no C++ compiler")
NAMES = ("full", "h2o", "kivi", "turboquant", "quest", "clusterkv", "pqcache", "magicpig", "double_sparsity", "kvzip")


@pytest.fixture(autouse=True)
def chosen() -> Iterator[None]:
    yield
    build.choose("auto")


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_torch_alone_answers_as_cpp_does(name: str) -> None:
    expected = answer(conformance.model(), name)
    build.choose("torch")
    assert answer(conformance.model(), name) == expected


@needs_compiler
def test_every_op_hears_of_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was loaded before; what the environment says stays."""
    for kernels, is_there in (("torch", False), ("auto", True), ("auto", True)):
        build.choose(kernels)
        assert (select_attend.native() is not None) == (build.library("pages") is not None) == is_there
        assert build.is_plain() == (not is_there)
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    build.choose("torch")
    build.choose("auto")
    assert build.is_plain() and select_attend.native() is None
    monkeypatch.delenv("KVBENCH_KERNELS")
    build.choose("torch")
