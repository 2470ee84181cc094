"""The harness: from a command line to cells, from cells to samples, from answers to folders of results.

In reading order: `overrides.py` (words of a command line), `settings.py` (their values), `outside.py` and `plugins.py`
(what is not in this repository), `cells.py` (one variant on one task with one model, and what is refused),
`runner.py`, `loop.py`, and what becomes of a sample: `prepare.py`, `answer.py`, `lines.py`
and `write.py`. `shards.py` asks workers, `logger.py` copies. Four rooms: `batch` (one pass and the answers after it),
`screen` (the terminal), `studies` (no model needed) and `submission` (results that somebody hands in). Commands:
`calibrate.py`, `fetch.py`, `rescore.py`, `submit.py`, `verify.py`.

Not here: benchmarks (`tasks`), a run's folder (`results`), how a model decodes (`engine`), what a method keeps
(`methods`), summaries over runs (`plots`).
"""

from kvbench.engine.terminal import refuse_without_packages

refuse_without_packages()
