"""`make report`: every finished run on one HTML page that opens from disk and asks no network.

    kvbench report [RUNS] [--out FILE]

The page is the site (`build.py`) with all of its data in it, unpacked as they are wanted.

Not here: statistics (`plots/stats.py`), tables and figures for a paper (`plots/tables/`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.engine.foreign import one_line
from kvbench.engine.terminal import say
from kvbench.plots.read import Run, default_root, load
from kvbench.plots.site.app import page as page_of
from kvbench.plots.site.build import Handed, Site

LARGEST = 17_000_000  # bytes that answers may take on a page of 20 MB


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench report", description="Write every finished run into one HTML page.")
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--out", type=Path, help="the page; RUNS/report.html where not given")
    given = parser.parse_args(argv)
    out: Path = given.out or given.runs / "report.html"
    runs = load(given.runs)
    if not runs:
        return refuse(
            f"{given.runs} holds no finished run; make some first, for example with "
            "python run.py -m method=full,snapkv,quest task=needle ratio=0.2"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A name may hold bytes that are no character.
        out.write_text(page(runs, given.runs), encoding="utf-8", errors="replace")
    except OSError as error:
        return refuse(f"{out} cannot be written ({error.strerror}); choose another file with --out")
    say(f"{one_line(str(out))}: {len(runs)} run{'s' * (len(runs) != 1)}, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def refuse(sentence: str) -> int:
    say("kvbench report:", one_line(sentence), file=sys.stderr)
    return 2


def page(runs: Sequence[Run], root: Path) -> str:
    """The whole page."""
    site = Site(runs, root, Handed(), LARGEST)
    data = [*site.files(), site.first(f"KVBench report of {root.resolve().name}/")]
    elements = (f'<script type="text/plain" id="{name}">{text}</script>' for name, text in data)
    return page_of("\n".join(elements))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
