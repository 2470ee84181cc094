"""Whether a GPU's kernel takes an op's place: `takes(op, device)`, which is asked before Triton is.

The torch form of an op is its definition, and runs wherever torch does. `kernels=torch` chooses it for all ops; without
Triton it is all there is. Of the others a device leaves out those that did not do there what their torch form does.

Ops are named after their file. `step` stands for what the rows of a decode step share: taking in, fetching, attention.
Where it is left out the step takes a CPU's path, and searches their plain forms: the positions that a search's kernel
finds are keys, which the step's kernels alone read.

Not here: the C++ of the ops (`kernels/build.py`).
"""

from collections.abc import Mapping

import torch

from kvbench.kernels.build import is_plain
from kvbench.kernels.jit import triton

STEP = "step"
OF_PROMPTS = frozenset(("attend_kept", "column_sums", "kmeans"))  # that work without the step's
LEFT_OUT: dict[torch.device, Mapping[str, str]] = {}  # by device the ops, and why


def takes(op: str, device: torch.device) -> bool:
    """Whether the op's kernel may be launched there."""
    return device.type == "cuda" and is_taken(op, device)


def takes_all(device: torch.device) -> bool:
    """Whether kernels may be told once what a step does: where each op has one."""
    return device.type == "cuda" and triton is not None and not is_plain() and not LEFT_OUT.get(device)


def is_taken(op: str, device: torch.device) -> bool:
    if triton is None or is_plain():
        return False
    out = LEFT_OUT.get(device)
    return not out or (op not in out and (STEP not in out or op in OF_PROMPTS))
