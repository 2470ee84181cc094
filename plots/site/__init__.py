"""Site and report: one application of plain files, filled with runs, submissions and the scores that are kept.

    build.py     the site: a folder that opens from disk, its data loaded a benchmark at a time
    report.py    the report: the same with all data in one page; view.py opens it in a browser
    app.py       page, style and script of both, and data as they read them
    evidence.py  the scores that the repository keeps, as runs
    overview.py  what the page says of each run: scores, costs; compare.py, boards.py: how they compare, and ranks
    samples.py   the answers; origin.py: where a run comes from
    methods.py   what is known of each method: its card, paper, traits
    changes.py   what differs between two versions of the site

`js/` has the components that all pages share: `chart.js`, `sheet.js`, `filters.js`, `card.js`, `samples.js`.

Not here: whether a submission holds (`evals/verify.py`), whose verdicts are read.
"""
