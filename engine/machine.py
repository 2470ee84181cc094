"""What this machine can, as far as the system says it, and what its arithmetic depends on, as far as torch says it.

Torch is asked where it is needed, not when this file is imported.

Not here: what follows for a run (`engine/checkpoints/load.py` chooses device and dtype).
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MULTIPLIES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # instructions by which libraries choose their kernels
LOAD = Path("/proc/loadavg")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
LOOKS, PAUSE_S = 10, 0.02  # a thread that wakes for a moment is none that runs
CHOOSES = (  # variables by which they are told to choose others
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DYNAMIC", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)


def cpu_flags() -> set[str]:
    """The instructions that the CPU has, by their names in Linux; none elsewhere."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    return set(text.partition("flags")[2].partition("\n")[0].split())


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has AVX512-BF16 or AMX; elsewhere bfloat16 is emulated and slower than float32."""
    return not cpu_flags().isdisjoint(("avx512_bf16", "amx_bf16"))


def busy_cores() -> int:
    """How many threads of others run now, or wait for a core; 0 where the system does not say."""
    found = []
    for _ in range(LOOKS):
        with suppress(OSError, ValueError, IndexError):
            found.append(int(LOAD.read_text().split()[3].partition("/")[0]) - 1)  # less the one that asks
        time.sleep(PAUSE_S)
    return round(sum(found) / len(found)) if found else 0


def leave_busy_cores() -> str:
    """Let torch use the cores that are free, and say so in words; "" where all are, or the user has said how many.

    Two processes with a thread for every core wait for each other at the end of every product: ten times as long as
    with a core each.
    """
    import torch

    threads = torch.get_num_threads()
    if threads < 2 or "OMP_NUM_THREADS" in os.environ or not (busy := busy_cores()):
        return ""
    free = max(1, threads - busy)
    torch.set_num_threads(free)
    others = "another thread runs" if busy == 1 else f"{busy} other threads run"
    here = "one thread" if free == 1 else f"{free} threads"
    return f"{others} on the {threads} cores of this machine: {here} here, and times are of a shared machine"


def arithmetic(dtype: str, device: str) -> dict[str, Any]:
    """What the order of sums depends on besides the prompt and the rows of a batch, for env.json."""
    import torch

    from kvbench.kernels import fast
    from kvbench.kernels.build import is_plain, level, library

    config = torch.__config__.show()
    found: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "threads": torch.get_num_threads(),
        "instructions": [flag for flag in MULTIPLIES if flag in cpu_flags()],
        "torch_instructions": torch.backends.cpu.get_cpu_capability(),
        "blas": said(r"BLAS_INFO=(\w+)", config),
        "mkl": said(r"Math Kernel Library Version (\S+)", config),
        "onednn": said(r"MKL-DNN (\S+)", config),
        "kernels": "torch" if library("select_attend") is None else f"native {level()}",
        "variables": {name: os.environ[name] for name in CHOOSES if name in os.environ},
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "n_gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "triton": None if fast.triton is None or is_plain() else fast.triton.__version__,
            "left_out": left_out(),
        }
    return found


def choose(kernels: str) -> None:
    """From now on ops are torch's alone (torch), or whatever is fast here (auto)."""
    from kvbench.kernels import build

    build.choose(kernels)


def left_out() -> dict[str, str]:
    """The kernels whose work torch does, and why: they were found wanting on one of the GPUs."""
    from kvbench.kernels import fast

    return {op: why for device in fast.LEFT_OUT for op, why in fast.left_out(device).items()}


def said(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def machine_bytes(device: "torch.device") -> int:
    """All memory of a device, used or not."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: "torch.device") -> int:
    """Bytes that may still be allocated on a device."""
    import torch

    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return min(free_ram_bytes(), free_cgroup_bytes())


def free_ram_bytes() -> int:
    """The machine's available memory; half of all where the system does not say what is available."""
    if MEMINFO.is_file():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def free_cgroup_bytes() -> int:
    """Bytes that a container's limit leaves; its page cache counts as free. Unlimited without such a limit."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        text = (CGROUP / limit).read_text().strip() if (CGROUP / limit).is_file() else "max"
        if text == "max":
            continue
        stat = dict(line.split() for line in (CGROUP / cache).read_text().splitlines())
        freeable = int(stat.get("inactive_file", 0))
        return int(text) - int((CGROUP / used).read_text()) + freeable
    return 1 << 62


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whichever device."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's allocator on the CPU


def free_memory() -> None:
    """Give back what the failed attempt holds; its frames are gone once the handler was left."""
    import gc

    import torch

    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.cuda.synchronize(i)  # kernels read pinned memory where it lies, of which torch's allocator knows nothing
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
