"""What waits for a pretended GPU on purpose, and what must not."""

import gc

import pytest
import torch

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.machine import free_memory
from kvbench.engine.sampling.draws import Draws
from kvbench.engine.sampling.spec import Sampling


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=3), Sampling(1.0), Sampling(1.0, top_p=0.5)], ids=str)
def test_drawing_waits_for_nothing_once_its_numbers_are_there(machine: Machine, sampling: Sampling) -> None:
    """Nor where rows end: those that are left are named by a copy that nobody waits for."""
    draws = Draws(sampling, [1, 2, 3], 4, torch.device("cuda"))
    logits = torch.zeros(3, 8, device="cuda")
    with machine.counting() as counts:
        every = draws.pick(logits, [0, 1, 2], 0)
        left = draws.pick(logits[:2], [0, 2], 1)
    assert counts.waits == 0, counts.lines("wait")
    assert counts.by_kind["copy from pinned memory"] == 1
    assert len(every) == 3 and len(left) == 2


def test_pinned_memory_of_a_failed_attempt_is_freed_behind_the_kernels_that_read_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator knows of copies alone, and would give the memory away while kernels still read it."""
    done = list[str]()
    monkeypatch.setattr(gc, "collect", lambda: done.append("free"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: done.append(f"wait for {index}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("give back"))
    free_memory()
    assert done == ["wait for 0", "wait for 1", "free", "give back"]
