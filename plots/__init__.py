"""Tables, figures and a report over many runs, from what stands in their folders; no model is loaded.

`read.py` and `run_sets.py` find runs and say which belong together, `stats.py` and `style.py` serve all; rooms of their
own: `tables`, `figures`, `report`.

Not here: a single run's own pictures, which are its task's (`tasks/needle/heatmap.py`).
"""

from kvbench.engine.terminal import refuse_without_packages

refuse_without_packages()
