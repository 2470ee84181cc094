"""Layers of a model on several GPUs: accelerate divides them, and moves what one layer hands to the next.

Not here: which tensors of ours lie where (`Trace.device_of`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvbench.engine.errors import ConfigError

OFF_GPU = ("cpu", "disk")  # where accelerate puts what fits no GPU


def device_map_of(hf: Any, how: str, dtype: torch.dtype) -> dict[str, torch.device]:
    """The GPU of each module, by name; those without an entry lie with their parent. `hf` may be without weights."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole: Any = [*(hf._no_split_modules or ())]  # names of classes whose modules stay on one device
    memory: Any = {i: torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())} | {"cpu": 0}
    if how != "sequential":
        low = how == "balanced_low_0"
        memory = get_balanced_memory(hf, memory, no_split_module_classes=whole, dtype=dtype, low_zero=low)
    found = infer_auto_device_map(hf, max_memory=memory, no_split_module_classes=whole, dtype=dtype)
    return on_gpus(found, how)


def on_gpus(found: Mapping[str, Any], how: str) -> dict[str, torch.device]:
    """Refuse a map that leaves modules outside of the GPUs: each step would have to bring their weights."""
    outside = [name for name, device in found.items() if str(device) in OFF_GPU]
    if outside:
        raise ConfigError(
            f"device_map={how} finds no room on the GPUs for {outside[0] or 'the model'} and {len(outside) - 1} other "
            "modules; use more GPUs, a smaller dtype or a smaller model"
        )
    return {name: torch.device("cuda", int(index)) for name, index in found.items()}


def spread(hf: Any, how: str, dtype: torch.dtype) -> None:
    """Move a model that is in memory to all GPUs."""
    from accelerate import dispatch_model

    devices: Any = device_map_of(hf, how, dtype)
    dispatch_model(hf, device_map=devices, skip_keys=[*(hf._skip_keys_device_placement or ())])


def layer_devices(layers: Iterable[Any]) -> tuple[torch.device, ...]:
    """The device of each decoder layer's weights."""
    return tuple(next(layer.parameters()).device for layer in layers)
