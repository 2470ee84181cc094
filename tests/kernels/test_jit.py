"""Kernels before their first launch."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kernels import jit
from kernels.jit import Kernel, Later

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
