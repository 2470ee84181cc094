"""KVBench: KV-cache compression methods for long-context inference, compared under one budget.

    kvbench run method=pqcache task=needle ratio=0.2     the command line: `kvbench --help`
    kvbench.compare(MODEL, METHODS, task=…, ratio=…)     methods side by side, as a DataFrame
    kvbench.results(FOLDER)                              the samples of finished runs, as a DataFrame
    kvbench.means(SAMPLES, KEYS)                         means, intervals and differences of any groups of them
    from kvbench.methods.base import SelectiveAttention  what a method of your own is made of

In a checkout the rooms (`kvbench.methods`, `kvbench.tasks`, …) are links to the folders next to this one.

Not here: anything that takes time to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvbench import checkout

if TYPE_CHECKING:
    from kvbench.comparing import compare
    from kvbench.plots.means import means
    from kvbench.results.frame import frame as results

__version__ = checkout.VERSION
__all__ = ["__version__", "compare", "means", "results"]

checkout.hide_rooms()


def __getattr__(name: str) -> Any:
    """`compare`, `means` and `results`, imported when they are first asked for."""
    if name == "results":
        return import_module("kvbench.results")
    if name == "compare":
        return import_module("kvbench.comparing").compare
    if name == "means":
        return import_module("kvbench.plots.means").means
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
