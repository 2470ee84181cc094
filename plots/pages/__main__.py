"""Pages of docs/ from the answers that lie beside them.

    python -m kvbench.plots.pages                        all pages again: make pages
    python -m kvbench.plots.pages results register   two of them
    python -m kvbench.plots.pages RUNS                   with the answers of these runs added to what is kept
    python -m kvbench.plots.pages RUNS --out FOLDER      pages of these runs alone, where FOLDER holds none yet

Not here: what they say (the templates), what they ask (the YAML files).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.engine.terminal import say
from kvbench.plots.pages.write import PAGES, write

PROG = "kvbench.plots.pages"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {PROG}", description="Write pages of docs/.")
    parser.add_argument("words", nargs="*", metavar="PAGE or RUNS", help=f"{', '.join(PAGES)}; or a folder of runs")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the answers lie and pages are written")
    options = parser.parse_args(arguments)
    names = [word for word in options.words if word in PAGES]
    folders = [Path(word) for word in options.words if word not in PAGES]
    try:
        if len(folders) > 1 or (folders and not folders[0].is_dir()):
            raise ValueError(f"{folders[-1]} is no page ({', '.join(PAGES)}) and no folder of runs")
        paths = write(names, options.out, next(iter(folders), None))
    except (ValueError, OSError) as error:
        say(f"{PROG}: {error}", file=sys.stderr)
        return 2
    for path in paths:
        say(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
