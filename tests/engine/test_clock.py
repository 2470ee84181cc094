from time import sleep

import torch

from kvbench.engine.books.stopwatch import Stopwatch, asked_so_far

CPU = torch.device("cpu")


def test_stretches_of_a_cpu_are_seconds() -> None:
    clock = Stopwatch()
    for seconds in (0.0, 0.01):
        with clock.running(CPU):
            sleep(seconds)
    first, second = clock.seconds()
    assert first >= 0 and second >= 0.01
    assert asked_so_far(CPU) is None
