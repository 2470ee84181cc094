import torch

from kvbench.kernels.clock import Clock, now


def test_devices_and_host_count_the_same_steps() -> None:
    clock, cpu = Clock(), torch.device("cpu")
    clock.tick()
    told = clock.since_now(cpu)
    for _ in range(3):
        clock.tick()
    assert clock.now == 4 and int(told.clock) - told.start == 3
    assert int(clock.at(cpu)) - told.later(2).start == 1


def test_a_graph_advances_the_devices_and_the_host_follows() -> None:
    clock, cpu = Clock(), torch.device("cpu")
    count = clock.at(cpu)
    clock.tick_devices()
    assert (clock.now, int(count)) == (0, 1)
    clock.tick_host()
    assert (clock.now, int(count)) == (1, 1)


def test_a_launch_on_its_own_is_at_the_step_it_was_told() -> None:
    clock, start = now(torch.device("cpu"))
    assert int(clock) - start == 0
