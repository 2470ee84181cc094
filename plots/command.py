"""The command line of a page: `python -m kvbench.plots.NAME [RUNS] [--out FOLDER]`.

Not here: what stands on a page (`plots/turns.py`, `plots/parts.py`, `plots/costs.py`).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.plots.read import default_root, load


@dataclass(frozen=True)
class Page:
    """A page that is made of runs."""

    prog: str  # plots.NAME
    about: str  # in a line
    write: Callable[[Path, Any], list[Path]]  # what was loaded, into a folder; no paths where no run is of the page
    nothing: str  # what to say then of RUNS, which stands as {}
    out: str = "docs"
    shows: bool = False  # whether the first file is printed too
    load: Callable[[Path], Any] = load  # the runs below a folder

    def main(self, arguments: Sequence[str]) -> int:
        parser = argparse.ArgumentParser(prog=f"python -m {self.prog}", description=self.about)
        parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
        parser.add_argument("--out", type=Path, default=Path(self.out), help="where to write")
        options = parser.parse_args(arguments)
        try:
            paths = self.write(options.out, self.load(options.runs))
        except (ConfigError, ValueError, OSError) as error:
            return self.refuse(str(error))
        if not paths:
            return self.refuse(self.nothing.format(options.runs))
        if self.shows:
            say(paths[0].read_text(encoding="utf-8"))
        for path in paths:
            say(path)
        return 0

    def refuse(self, sentence: str) -> int:
        say(f"{self.prog}: {sentence}", file=sys.stderr)
        return 2
