"""Which of vLLM's attention backends have ours in their place: `put`, `take_back`. They are looked up once a process.

Not here: the backends (`serving/adapter/cpu.py`, `gpu.py`, `infer.py`).
"""
# pyright: reportMissingImports=false

import os
from collections.abc import Mapping

from kvbench.engine.errors import ConfigError

ON_GPU = "KVBENCH_SERVING_ON_GPU"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
BEFORE: dict[str, str | None] = {}  # of the environment, what `put` has changed
HERE = "kvbench.serving.adapter"
OURS: Mapping[str, Mapping[str, str]] = {  # by vLLM's platform: its name of a backend, and the path of ours
    "CPU": {"CPU_ATTN": f"{HERE}.cpu.Backend"},
    "CUDA": {
        "FLASH_ATTN": f"{HERE}.gpu.FlashBackend",
        "TRITON_ATTN": f"{HERE}.gpu.TritonBackend",
        "FLASHINFER": f"{HERE}.infer.Backend",
    },
}


def put() -> None:
    """Put ours in their place, whichever of them vLLM chooses then."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    platform = current_platform._enum.name
    if platform not in OURS:
        raise ConfigError(f"vLLM runs on {platform} here, of which the adapter knows no pages; it knows CPU and CUDA")
    if platform != "CPU":
        if os.environ.get(ON_GPU) != "1":
            raise ConfigError(
                f"nobody has run this adapter on a GPU; set {ON_GPU}=1 to be the first, and check answers"
            )
    BEFORE.setdefault(RUNNER, os.environ.get(RUNNER))
    os.environ[RUNNER] = (
        "0"  # the other one, which GPUs and a CPU with Triton have by default, keeps requests elsewhere
    )
    for name, path in OURS[platform].items():
        register_backend(AttentionBackendEnum[name], path)


def take_back() -> None:
    """vLLM's own again, and chosen anew: engines of this process before took ours, or were without."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from kvbench.serving.adapter.blocks import take_back_manager

    for name, value in BEFORE.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}
    BEFORE.clear()
    for names in OURS.values():
        for name in names:
            AttentionBackendEnum[name].clear_override()
    _cached_get_attn_backend.cache_clear()
    take_back_manager()
