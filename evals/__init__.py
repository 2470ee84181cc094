"""The harness: from a command line to cells, from cells to samples, from answers to folders of results.

In reading order: `overrides.py` (words of a command line), `settings.py` and `typed.py` (their values), `outside.py`
(methods in the user's own files), `asked.py` (what is refused without torch), `cells.py` (one variant on one task with
one model), `runner.py`, `loop.py` (samples) and `lines.py` (what is written of them), `shards.py` (workers),
`logger.py`. Four rooms of their own: `tasks` (benchmarks), `results` (a run's folder), `screen` (the terminal),
`studies` (no model needed). Two commands: `fetch.py`, `rescore.py`. `foreign.py` reads and writes what others made.

Not here: how a model decodes (`engine`), what a method keeps (`methods`), summaries over runs (`plots`).
"""
