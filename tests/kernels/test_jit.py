"""Kernels before their first launch, and what a launch is told of its device."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.kernels import jit
from kvbench.kernels.jit import SHARED, Kernel, Later, shared_memory

SOURCE = """
def helper():
    pass

def entry():
    return language, helper
"""


def test_a_second_thread_waits_until_a_kernel_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is still making what the kernel calls when the second one comes."""
    names: dict[str, Any] = {"language": Later("math")}
    exec(SOURCE, names)
    entry, calling = Kernel(names["entry"], ()), threading.Event()
    names |= {"entry": entry, "helper": Kernel(names["helper"], ())}

    def compiled(fn: Any, do_not_specialize: list[str]) -> Any:
        if fn.__name__ == "helper":
            calling.set()
            time.sleep(0.2)
        return SimpleNamespace(fn=fn)

    monkeypatch.setattr(jit, "triton", SimpleNamespace(jit=compiled))
    first = threading.Thread(target=entry.ready)
    first.start()
    assert calling.wait(10)
    made = entry.ready()
    assert not [name for name, value in names.items() if isinstance(value, Kernel | Later)]
    first.join()
    assert entry.ready() is made is names["entry"]


def test_a_device_says_how_much_shared_memory_a_program_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is not in our table, such as a new architecture."""
    told = SimpleNamespace(shared_memory_per_block_optin=123_456)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert shared_memory(torch.device("cuda", 0)) == 123_456
    assert shared_memory(torch.device("cpu")) == SHARED[max(SHARED)]
    assert {80, 86, 89, 90, 100, 120} <= SHARED.keys()
