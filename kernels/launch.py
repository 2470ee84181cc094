"""Whether a GPU takes a kernel: one is compiled, launched, and its numbers compared with its reference's.

Triton compiles a launcher in C for every kernel, so that a machine with a GPU and a driver may still lack something.

Not here: what else a machine has (`evals/screen/check.py`), all kernels (`tests/kernels`).
"""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from kvbench.kernels.column_sums import column_sums, column_sums_ref
from kvbench.kernels.jit import triton


def fault() -> str | None:
    """A sentence that says what is wrong, and what is missing; None where all is well."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 32, 16, generator=draw) for _ in range(2))
    logits = (q @ k.mT / 4).masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), -torch.inf)
    lse, want = logits.logsumexp(-1), column_sums_ref(q, k, 0.25)
    try:
        found = column_sums(q.cuda(), k.cuda(), 0.25, lse=lse.cuda()).cpu()
    except Exception as error:  # whatever a compiler, a linker or a driver has to say
        why = " ".join(str(error).split())[:300] or type(error).__name__
        return f"Triton {triton.__version__} cannot launch a kernel ({why}); {remedy()}, or use device=cpu"
    if not torch.allclose(found, want, atol=1e-3):
        apart = (found - want).abs().max().item()
        return (
            f"a kernel says something else than its reference (by {apart:.2g}); use device=cpu, and run make test-gpu"
        )
    return None


def remedy() -> str:
    """What Triton's launchers are compiled with and this machine lacks."""
    compilers, header = ("gcc", "clang"), Path(sysconfig.get_config_var("INCLUDEPY") or "", "Python.h")
    lacks = [] if os.environ.get("CC") or any(map(shutil.which, compilers)) else ["a C compiler (apt install gcc)"]
    lacks += [] if header.is_file() else [f"Python's headers, {header} (apt install python3-dev)"]
    return f"it needs {' and '.join(lacks)}" if lacks else "is the driver as new as torch's CUDA asks for?"
