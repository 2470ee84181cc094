"""`python run.py … --dry-run [hardware=h100]`: what a command would ask, and for how long, before weights are loaded.

Prompts are made and encoded, and every refusal that a run would say is said. Times are a roofline's: the model's own
products and its reading of weights and of each variant's whole cache, on this machine by what it reaches in two short
products, on other hardware by conf/hardware. What methods compute comes on top, so the time is a lower bound; a run
says at its start what it expects from a pass that it has timed.

Not here: the arithmetic (`evals/screen/roofline.py`), times as samples end (`evals/screen/progress.py`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.engine.terminal import say
from kvbench.evals.overrides import CONF
from kvbench.evals.screen.progress import duration
from kvbench.evals.settings import Settings
from kvbench.results import RunResult
from kvbench.results.read import answered

FLAG, KEY = "--dry-run", "hardware="
Run = Callable[[list[Settings]], list[tuple[Path, RunResult]]]


def asked(argv: Sequence[str]) -> tuple[list[str], Run]:
    """The command line without what asks for a dry run, and what to do with its cells in place of running them."""
    given = [word.removeprefix(KEY) for word in argv if word.startswith(KEY)]
    if len(given) > 1:
        raise ConfigError(f"{KEY}{given[1]} is a second one; give one, or none for this machine")
    if given and given[0] not in (known := [file.stem for file in (CONF / "hardware").glob("*.yaml")]):
        raise unknown_name("hardware", given[0], known)
    words = [word for word in argv if word != FLAG and not word.startswith(KEY)]

    def run(cells: list[Settings]) -> list[tuple[Path, RunResult]]:
        foretell(cells, given[0] if given else None)
        return []

    return words, run


def foretell(cells: Sequence[Settings], hardware: str | None) -> None:
    """Print a line for each group that shares its prompts, and the sum."""
    from kvbench.evals.runner import prepare

    ready = prepare(cells)
    from kvbench.evals.cells import distinct, grouped
    from kvbench.evals.loop import Group
    from kvbench.evals.screen.expect import how_many
    from kvbench.evals.screen.roofline import this_machine, times
    from kvbench.evals.studies.hardware import read_hardware

    given = None if hardware is None else read_hardware(hardware, KEY)
    total, where = 0.0, ""
    for each in grouped(distinct(ready)):
        group = Group(each)
        group.prepare()
        done = [answered(cell.path) for cell in group.cells]
        loads = [one.load for one in group.samples or () if not all(ids.issuperset(one.lines[None]) for ids in done)]
        if not loads:
            say(f"{group.title()}: every sample is answered")
            continue
        settings, n = group.first.settings, len(loads)
        machine = given or this_machine(settings.device, settings.dtype)
        reading, answering = times(settings, group.first.shape, loads, len(group.cells), machine)
        lengths = [load.n_read for load in loads]
        say(
            f"{group.title()}: {how_many(n, group.n)}, {sum(lengths):,} tokens to read ({max(lengths):,} at most): "
            f"{duration(reading)} to read, {duration(answering)} to answer"
        )
        total, where = total + reading + answering, machine.title
    if where:
        say(f"at least {duration(total)} on {where}, without what methods compute; no weights were loaded")
