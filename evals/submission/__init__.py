"""Results that somebody hands in: a folder of runs with a manifest, believed as far as it can be given again.

    manifest.py  who hands it in, from which commit and hardware, under which licence
    folder.py    the files of a folder that may hold anything: counted and bounded before one is read
    frozen.py    benchmarks whose prompts and references are committed, as digests
    settings.py  a run's configuration as the settings that it was asked with
    check.py     one run: configuration, prompts, scores, result
    again.py     samples answered a second time

`kvbench submit RUNS` makes one, `kvbench verify FOLDER` judges it.

Not here: the site that shows what was verified (`plots/site/`).
"""
