"""What this machine can, as far as the system says it: no torch is asked.

Not here: what follows for a run (`engine/checkpoints/load.py` chooses device and dtype).
"""

from pathlib import Path


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has AVX512-BF16 or AMX; elsewhere bfloat16 is emulated and slower than float32."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.is_file() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags
