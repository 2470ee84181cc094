"""`kvbench fetch longbench`: a benchmark's files into the data folder, ahead of time.

Not here: the download itself (`tasks/download.py`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.tasks.download import cache_root, downloads, fetch


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvbench fetch", description="Fetch a benchmark's files into the data folder."
    )
    parser.add_argument("benchmark", nargs="+", help=", ".join(downloads()))
    parser.add_argument("--into", type=Path, help="data folder; the cache's without it")
    parser.add_argument("--only", nargs="+", default=(), help="patterns of files below it")
    given = parser.parse_args(arguments)
    root = given.into.expanduser() if given.into else cache_root()
    try:
        for name in given.benchmark:
            files = fetch(name, root, only=given.only, say=say)
            say(f"{name}: {len(files)} files in {root}")
    except ConfigError as error:
        say(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
