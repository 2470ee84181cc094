"""KVBench: KV-cache compression methods for long-context inference, compared under one budget.

    kvbench run method=pqcache task=needle ratio=0.2    the command line: `kvbench --help`
    from kvbench.methods.base import SelectiveAttention  what a method of your own is made of

In a checkout the rooms (`kvbench.methods`, `kvbench.tasks`, …) are links to the folders beside this one.

Not here: anything that takes time to import.
"""

from kvbench import checkout

__version__ = "0.2.0"

checkout.hide_rooms()
