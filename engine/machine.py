"""What this machine can, as far as the system says it, and what its arithmetic depends on, as far as torch says it.

Torch is asked where it is needed, not when this file is imported.

Not here: what follows for a run (`engine/checkpoints/load.py` chooses device and dtype).
"""

import os
import re
from pathlib import Path
from typing import Any

MULTIPLIES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # instructions by which libraries choose their kernels
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


def arithmetic(dtype: str, device: str) -> dict[str, Any]:
    """What the order of sums depends on beside the prompt and the rows of a batch, for env.json."""
    import torch

    from kernels.build import level, library

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
        }
    return found


def said(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
