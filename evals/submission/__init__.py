"""Results that somebody hands in: a folder of runs with a manifest, believed as far as it can be recomputed.

    manifest.py  what a submission says of itself: every file with its SHA-256, commit, hardware, licence
    folder.py    the files of a folder that may hold anything: counted, bounded, compared with the manifest
    frozen.py    benchmarks whose prompts and references are committed, as digests
    settings.py  a run's configuration as the settings that it was asked with
    check.py     one run: configuration, prompts, scores, result, ledger, budget
    jail.py      a method's own file in a process without network
    again.py     samples answered a second time

`kvbench submit RUNS` makes one, `kvbench verify FOLDER` judges it.

Not here: the site that shows what was verified (`plots/site/`).
"""
