"""`make clean-cache`: what the cache folder holds that can be made again, and the command that frees it.

Nothing is removed here. Downloaded data are listed apart, because a machine without a network could not get them again;
models of the hub are the hub's: `hf cache ls`, `hf cache rm`. runs/ is elsewhere, and is not looked at.

Not here: leftovers of killed conversions and compilers, which the next start removes
(`engine/checkpoints/conversion.py`, `kernels/build.py`).
"""

import shlex
import sys
from pathlib import Path

from kvbench.engine.checkpoints.digests import cache_home
from kvbench.engine.terminal import say
from kvbench.evals.screen.room import size

REMARKS = {  # by what a name begins with
    "models": "converted models: made again by the next run with one, in a minute",
    "kernels": "compiled kernels: made again by the next run, in seconds",
    "digests": "hashes of checkpoints: made again by the next run with one",
    "calibrations": "calibrations of models: made again by the next run that needs one, in seconds",
    "frames": "rows of finished runs: read again from their folders",
    "checked": "attention that was compared: compared again when a model is loaded",
    "tokenizers": "tokenizers that were tried out: tried again",
    "vega": "scripts of older reports: of no use",
}


def main(_: list[str]) -> int:
    home = cache_home()
    say(f"The cache folder is {home}")
    found = {path: weigh(path) for path in sorted(home.glob("*"))}
    ours = [path for path in found if path.name.partition("-")[0] in REMARKS]
    for path in ours:
        say(f"  {size(found[path]):>9}  {path.name}: {REMARKS[path.name.partition('-')[0]]}")
    if ours:
        say(f"  {size(sum(found[path] for path in ours)):>9}  in all; to free it, while no run is at work:")
        say("rm -r", *(shlex.quote(str(path)) for path in ours))
    for path in found.keys() - {*ours}:
        say(f"Not made here: {size(found[path])} in {path}; remove what you do not need by hand")
    return 0


def weigh(path: Path) -> int:
    """Bytes of a file or of all files below a folder; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_symlink() or not each.is_dir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
