"""vLLM's pages on a pretended GPU: what a method does with them is done where they lie."""

import pytest
import torch

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.kernels.fast import LEFT_OUT
from kvbench.serving.order import DROPPING, VISIBLE
from kvbench.tests.conformance import model
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.serving.pretend import FORMS, Pretend
from kvbench.tests.serving.test_reader import S, by_the_main_engine, order_of, variants
from kvbench.tests.tiny import prompt

N = 6
CASES = [(name, DROPPING) for name in ("snapkv", "streamingllm", "tova")]
CASES += [(name, VISIBLE) for name in ("oracle", "adakv", "quest", "pqcache", "sparq", "clusterkv")]


@pytest.mark.parametrize(("name", "rung"), CASES)
def test_it_answers_as_on_a_cpu(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, rung: str) -> None:
    """Also where it is preempted and reads its answer again. Our kernels are left out there, which read memory that a
    layer has not."""
    ids, _ = by_the_main_engine(name)
    there = moved(model(), "cuda:0")
    monkeypatch.delitem(LEFT_OUT, torch.device("cuda:0"), raising=False)
    serving = Pretend(there, order_of(variants(name), there, rung), form=FORMS["flash"])
    one = serving.ask("a", prompt(S), N)
    with there.hooked(), machine.counting() as counts:
        for _ in range(N):
            serving.step(one)
        serving.preempt(one)
        serving.step(one)
        assert one.said == ids[: N + 1]
    assert counts.launches and LEFT_OUT[torch.device("cuda:0")]
