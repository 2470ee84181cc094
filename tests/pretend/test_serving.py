"""Pages of vLLM on a pretended GPU: nothing that a method does with them is made on the host."""

import pytest

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.serving.order import DROPPING, VISIBLE
from kvbench.tests.conformance import model
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.serving.pretend import FORMS, Pretend
from kvbench.tests.serving.test_reader import by_the_main_engine, order_of, variants
from kvbench.tests.serving.test_reader import S
from kvbench.tests.tiny import prompt

N = 6


@pytest.mark.parametrize(
    ("name", "rung"),
    [("snapkv", DROPPING), ("streamingllm", DROPPING), ("tova", DROPPING), ("oracle", VISIBLE), ("adakv", VISIBLE), ("quest", VISIBLE), ("pqcache", VISIBLE), ("sparq", VISIBLE), ("clusterkv", VISIBLE), ("snapkv", VISIBLE)],
)
def test_it_answers_as_on_a_cpu(machine: Machine, name: str, rung: str) -> None:
    ids, _ = by_the_main_engine(name)
    there = moved(model(), "cuda:0")
    serving = Pretend(there, order_of(variants(name), there, rung), FORMS["flash"])
    one = serving.ask("a", prompt(S), N)
    with there.hooked():
        assert serving.answer(one, 100) == ids[:N]
