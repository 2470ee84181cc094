"""How a property of a method or a task stands: `held`, `BROKEN` or `refused`, as `kvbench conformance` prints it.

Not here: the properties (`conformance.py`, `task_conformance.py`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import extract_tb


class Refused(Exception):
    """The method cannot meet a ratio on so small a model, and says so."""


def judged(check: Callable[[], None], file: str) -> tuple[str, str]:
    """`held`, `BROKEN` or `refused`, and why."""
    try:
        check()
    except Refused as error:
        return "refused", str(error)
    except AssertionError as error:
        return "BROKEN", str(error) or raised(error, file)
    except (Exception, SystemExit) as error:  # whatever a method raises is a case that breaks it
        return "BROKEN", raised(error, file)
    return "held", ""


def raised(error: BaseException, file: str) -> str:
    """An exception in a line, with the method's own line that led to it."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    where = f" at line {lines[-1]} of {Path(file).name}" if lines else ""
    return f"{type(error).__name__}{where}: {' '.join(str(error).split())}"


def report(checks: Mapping[str, Callable[[], tuple[str, str]]]) -> bool:
    """Print how each property stands: whether none is broken."""
    broken, told = 0, set[str]()
    for name, judge in checks.items():
        verdict, why = judge()
        broken += verdict == "BROKEN"
        print(f"{verdict:<8}{name}" + (f": {'as above' if why in told else why}" if why else ""))
        told.add(why)
    print(f"{broken} of {len(checks)} properties broken")
    return broken == 0
