"""`make run`: does a method keep the model's answers, and what does it take? One table, one picture, in two minutes.

What is run stands in conf/experiment/first_look.yaml; words of the command line change it as those of run.py do. Where
the processor is slow at the dtype, fewer samples are asked, and the first line says so.

Not here: how anything is run (`run.py`), compared or drawn (`plots/comparison.py`).
"""

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench import run
from kvbench.engine.machine import arithmetic, cpu_multiplies_bfloat16
from kvbench.engine.terminal import say

if TYPE_CHECKING:
    from kvbench.results import RunResult

STARTED = time.monotonic()
OUT = "runs/first_look"
BRIEF = "needle_brief"  # where the dtype is slow


def main(argv: Sequence[str]) -> int:
    given = {key: value for key, _, value in (word.partition("=") for word in argv)}
    words = ["-m", "experiment=first_look", *argv]
    if "out" not in given:
        words.append(f"out={OUT}")
    if "task" not in given and (why := slow(given.get("dtype", "auto"))):
        say(f"{why}: fewer samples, task={BRIEF}", file=sys.stderr)
        words.append(f"task={BRIEF}")
    code = run.main(words, lambda done: show(done, Path(given.get("out", OUT))))
    if code == 0:
        say(f"took {cpu_seconds():.0f} s of CPU time, {time.monotonic() - STARTED:.0f} s of wall time")
    return code


def slow(dtype: str) -> str:
    """Why this processor is slow at the dtype that will be used; "" where it is not, or a GPU may be used."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return ""
    if dtype == "auto":
        return "" if cpu_multiplies_bfloat16() else "float32, as this processor does not multiply bfloat16"
    if dtype == "bfloat16" and cpu_multiplies_bfloat16():
        return ""
    return f"dtype={dtype} is slow on this processor"


def show(done: "Sequence[tuple[Path, RunResult]]", out: Path) -> None:
    """The table, the picture and the page; run.py's own table where the runs are no comparison."""
    from kvbench.evals.screen.table import print_table
    from kvbench.plots.comparison import compare, draw, is_comparable, made_otherwise, print_comparison
    from kvbench.plots.site.report import main as report

    if not is_comparable([result for _, result in done]):
        return print_table(done)
    found = compare([folder for folder, _ in done])
    print_comparison(found)
    first = done[0][1]
    for line in made_otherwise(found, arithmetic(first.dtype, first.device)):
        say(line)
    say(f"picture: {draw(found, out)}")
    report([str(out)])
    return None


def cpu_seconds() -> float:
    """User and system time of this process and of those that it has started."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


if __name__ == "__main__":
    run.stop_at_signals()
    sys.exit(main(sys.argv[1:]))
