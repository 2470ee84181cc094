"""docs/scopes.md: methods with the question in what is compressed, and without it, side by side.

    python -m kvbench.plots.scopes [RUNS] [--out docs]

Only runs count that were made in both scopes with the same settings. Nothing on the page is typed. `make paper-tables`
writes the same tables next to the papers', as Markdown, LaTeX and CSV.

Not here: how a table is made of runs (`plots/tables/generic.py`) and worded (`plots/tables/words.py`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.plots.command import Page
from kvbench.plots.read import Run
from kvbench.plots.tables.generic import Pivot, pivots
from kvbench.plots.tables.words import records, sheet_of
from kvbench.results.sheet import markdown, texts, write

NAME = "scopes"
SCOPES = frozenset({"full_prompt", "context_only"})
HEAD = """\
# With the question and without it

`compression_scope=full_prompt` compresses a prompt whose end is the question, so a method can keep what the question
asks for. With `context_only` the question comes after the compression, as it does where one context serves many
questions. This page is output; the runs and it are made by

{commands}
    python -m kvbench.plots.scopes runs/scopes --out docs

"(C)" marks methods that drop tokens for good and get more of them in return ([fair budgets](fair-budgets.md)); all
methods have their default settings. In parentheses: 95 % intervals over samples.

"""

STYLES = {"own": "scopes_needle", "own_name": "scopes_name"}  # experiments by the needle's style
EXPERIMENTS = (*STYLES.values(), "scopes_longbench")


def experiment_of(run: Run) -> str:
    """The experiment that made the run, where it is one of this page's."""
    task = run.setting("task") or {}
    return STYLES.get(task["params"].get("style"), "") if task["name"] == "needle" else f"scopes_{task['name']}"


def head(runs: Sequence[Run]) -> str:
    """The page's first words, with the commands of the runs that it shows."""
    shown = set(map(experiment_of, in_both(runs)))
    commands = (f"    python run.py -m experiment={name} out=runs/scopes" for name in EXPERIMENTS if name in shown)
    return HEAD.format(commands="\n".join(commands))


def in_both(runs: Sequence[Run]) -> list[Run]:
    """Runs of which there is one in each scope, the same but for it."""
    seen: dict[str, set[str]] = {}
    keys = [f"{key_of(run)}" for run in runs]
    for run, key in zip(runs, keys, strict=True):
        seen.setdefault(key, set()).add(run.result.protocol)
    return [run for run, key in zip(runs, keys, strict=True) if seen[key] >= SCOPES]


def key_of(run: Run) -> list[object]:
    """What identifies a run, but for the scope and its samples' own prompts."""
    apart = ("compression_scope", "data_digest")
    return [(key, repr(value)) for key, value in sorted(run.config.items()) if key not in apart]


def tables(runs: Sequence[Run]) -> list[Pivot]:
    """A table for each task with its settings: methods down, budgets and scopes across."""
    both = in_both(runs)
    return pivots(both, ["method"], ["ratio", "scope"]) if both else []


def write_tables(out: Path, runs: Sequence[Run]) -> list[Path]:
    """The tables in all formats; nothing without runs of both scopes."""
    made = tables(runs)
    if not made:
        return []
    return write(out, NAME, texts([sheet_of(pivot) for pivot in made], records(made)))


def write_page(out: Path, runs: Sequence[Run]) -> list[Path]:
    """The page; nothing without runs of both scopes."""
    made = tables(runs)
    if not made:
        return []
    page = head(runs) + "\n".join(markdown(sheet_of(pivot)) for pivot in made)
    return write(out, NAME, {"md": page})


NOTHING = "no run below {} was made in both scopes"
main = Page("kvbench.plots.scopes", (__doc__ or "").partition("\n")[0], write_page, NOTHING).main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
