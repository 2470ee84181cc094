"""The results site: a folder of plain files that opens from disk, its data loaded a benchmark at a time.

    build.py     the command: runs, submissions and verdicts to files
    boards.py    what the leaderboard says besides the report's comparisons: ranks, machines, verdicts
    methods.py   what is known of each method: its card, paper, traits
    changes.py   what differs between two versions of the site

Tables, charts and samples are the report's (`plots/report/js`); `plots/site/js` has the pages around them.

Not here: whether a submission holds (`evals/verify.py`), whose verdicts are read.
"""
