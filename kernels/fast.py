"""Whether a GPU's kernel takes an op's place: `takes(op, device)`, which is asked before Triton is.

The torch form of an op is its definition, and runs wherever torch does. `kernels=torch` chooses it for all ops; without
Triton it is all there is. Of the others `try_out` asks each once, in the shapes of the model at hand, whether it says
here what its torch form says (`kernels/trials.py`), and leaves out those that do not, by name.

Ops are named after their file. `step` stands for what the rows of a decode step share: taking in, fetching, attention.
Where it is left out the step takes a CPU's path, and searches their plain forms: the positions that a search's kernel
finds are keys, which the step's kernels alone read.

What was found is remembered next to the compiled C++ (`kernels/build.py`), by whatever it depends on: the GPU, its
driver, versions, our sources, the model's shapes. What could not be run at all is tried again by the next process, as a
compiler may be there by then, or memory.

Not here: the C++ of the ops (`kernels/build.py`), the trials themselves.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.build import is_plain, library_path, open_trusted, own_folder
from kvbench.kernels.jit import INTERPRETED, triton

logger = logging.getLogger(__name__)

STEP = "step"
OF_PROMPTS = frozenset(("attend_kept", "column_sums", "kmeans"))  # that work without the step's
LEFT_OUT: dict[torch.device, Mapping[str, str]] = {}  # by device the ops, and why
# How far numbers may be from torch's, relative to the largest: rounding moves them by a third of it at most, and a
# kernel that is wrong by all of it.
NEAR = {"torch.float32": 1e-3, "torch.bfloat16": 3e-2, "torch.float16": 4e-3}


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


def left_out(device: torch.device) -> Mapping[str, str]:
    """Ops whose kernels were found wanting there, and why."""
    return {} if triton is None or is_plain() else LEFT_OUT.get(device, {})


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model that kernels are compiled for."""

    h: int
    h_kv: int
    d_h: int
    d_v: int
    is_latent: bool
    dtype: torch.dtype


def shapes_of(model: Any, dtype: torch.dtype) -> Shapes:
    """The sizes of a model, whose shape has them by the same names."""
    return Shapes(model.h, model.h_kv, model.d_h, model.d_v, model.is_latent, dtype)


def try_out(shapes: Shapes, device: torch.device) -> None:
    """Leave out what does not do there what it should; one line says so."""
    if device.type != "cuda" or triton is None or is_plain() or str(shapes.dtype) not in NEAR:
        return
    found = verdicts(shapes, device)
    if found and found != LEFT_OUT.get(device):
        reasons = dict.fromkeys(found.values())
        each = [f"{', '.join(op for op, why in found.items() if why == reason)} ({reason})" for reason in reasons]
        logger.warning("torch does the work of these kernels on %s: %s", device, "; ".join(each))
    LEFT_OUT[device] = found


def verdicts(shapes: Shapes, device: torch.device) -> dict[str, str]:
    """The ops that are left out, and why; none of them is tried that was before."""
    trials: Mapping[str, Callable[..., object]] = import_module("kvbench.kernels.trials").TRIALS
    name = f"tried-{sha256(repr((facts(device), shapes)).encode()).hexdigest()[:16]}.json"
    known = remembered_verdicts(name)
    said, is_new = dict[str, str](), False
    for op in trials:
        if op in known:
            said[op] = known[op]
        elif STEP not in said or not said[STEP] or op in OF_PROMPTS:
            said[op], lasts = verdict(op, shapes, device)
            if lasts:
                known[op], is_new = said[op], True
    if is_new:
        remember(name, known)
    return {op: why for op, why in said.items() if why}


def verdict(op: str, shapes: Shapes, device: torch.device) -> tuple[str, bool]:
    """Why an op is left out, "" where it is not; and whether another process would find the same."""
    trials = import_module("kvbench.kernels.trials")
    try:
        with torch.inference_mode(), torch.cuda.device(device):
            heads = trials.Heads(*vars(shapes).values(), device)
            apart = max((apart_by(*pair) for pair in trials.TRIALS[op](heads)), default=0.0)
            torch.cuda.synchronize(device)
    except Exception as error:  # whatever a compiler, a linker or a driver has to say
        words = " ".join(str(error).split())[:200]
        if type(error).__name__ == "OutOfResources":
            return f"it asks for more than the GPU has: {words}", True
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return f"it asks for more memory than is free: {words}", False
        return f"it cannot be launched: {type(error).__name__} {words}; {remedy()}", False
    if apart <= NEAR[str(shapes.dtype)]:
        return "", True
    return f"it says something else than torch, by {apart:.2g} of the largest number", True


def apart_by(found: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest number; of whole numbers infinite where any differ."""
    found, right = found.cpu(), right.cpu()
    if found.shape != right.shape:
        return float("inf")
    if not found.is_floating_point():
        return 0.0 if torch.equal(found.long(), right.long()) else float("inf")
    found, right = found.double(), right.double()
    largest = right.where(right.isfinite(), 0).abs().amax() if right.numel() else right.new_zeros(())
    apart = ((found - right).abs() / largest.clamp(min=1e-6)).masked_fill(found == right, 0)
    return float(apart.nan_to_num(float("inf")).amax()) if apart.numel() else 0.0


def facts(device: torch.device) -> tuple[object, ...]:
    """What a verdict depends on besides the model's shapes."""
    sources = sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(file.read_bytes())
    versions = torch.__version__, torch.version.cuda, torch.version.hip, triton.__version__, platform.python_version()
    gpu = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return (gpu, driver(), versions, sources.hexdigest(), INTERPRETED)


def driver() -> str:
    """The version text of the kernel's driver module; "" where there is none."""
    for file in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError):
            return Path(file).read_text()
    return ""


def folder() -> Path:
    return library_path("pages", "DEFAULT").parent


def remembered_verdicts(name: str) -> dict[str, str]:
    """Verdicts that an earlier process wrote, if nobody else could have."""
    with suppress(OSError, ValueError):
        there = own_folder(folder())
        try:
            if (file := open_trusted(there, name)) is not None:
                with os.fdopen(file, encoding="utf-8") as handle:
                    read = json.load(handle)
                if isinstance(read, dict) and all(isinstance(x, str) for pair in read.items() for x in pair):
                    return read
        finally:
            os.close(there)
    return {}


def remember(name: str, said: Mapping[str, str]) -> None:
    """Write verdicts for processes to come; a folder that cannot be written to costs the trials once more."""
    with suppress(OSError):
        there, new = own_folder(folder()), f"{name}.{os.getpid()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with os.fdopen(os.open(new, flags, 0o600, dir_fd=there), "w", encoding="utf-8") as handle:
                json.dump(said, handle)
            os.rename(new, name, src_dir_fd=there, dst_dir_fd=there)
        finally:
            os.close(there)


def remedy() -> str:
    """What Triton's launchers are compiled with and this machine lacks."""
    compilers, header = ("gcc", "clang"), Path(sysconfig.get_config_var("INCLUDEPY") or "", "Python.h")
    lacks = [] if os.environ.get("CC") or any(map(shutil.which, compilers)) else ["a C compiler (apt install gcc)"]
    lacks += [] if header.is_file() else [f"Python's headers, {header} (apt install python3-dev)"]
    return f"it needs {' and '.join(lacks)}" if lacks else "is the driver as new as torch's CUDA asks for?"
