"""The methods of ours by what they take, as experiments ask for all of them.

Not here: methods of others (`outside.py`), what a configuration chooses (`settings.py`).
"""

from importlib import import_module
from typing import Any

import yaml
from omegaconf import OmegaConf

from kvbench.engine.lazy import wait_for_torch
from kvbench.methods.named import METHODS
from kvbench.results.names import FIRST, known, own_methods


def own_class(name: str) -> Any:
    """The class of a method of ours. torch is loaded when it is used."""
    wait_for_torch()
    module, _, found = yaml.safe_load((METHODS / f"{name}.yaml").read_text())["_target_"].rpartition(".")
    return getattr(import_module(module), found)


def methods_for(budget: str) -> list[str]:
    """Methods of ours that take such a budget (`Traits.takes`), full attention first."""
    return sorted(
        (name for name in own_methods() if budget in own_class(name).traits.takes), key=lambda name: name != "full"
    )


def every_method(budget: str, others: str = "") -> str:
    """`${every_method:ratio,-random infllm_short}`, of an experiment: all but `random`, InfLLM by that preset.

    `-first` leaves out full attention and the methods of `FIRST`.
    """
    words = others.split()
    if "-first" in words:
        words += [f"-{name}" for name in ("full", *FIRST)]
    presets = {known(word): word for word in words if not word.startswith("-")}
    return ",".join(presets.get(name, name) for name in methods_for(budget) if f"-{name}" not in words)


OmegaConf.register_new_resolver("every_method", every_method, replace=True)
