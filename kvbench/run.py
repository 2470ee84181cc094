"""compose → check → run → print one table.

Not here: any logic of its own. The command line is checked in `evals/overrides.py`, values in
`evals/settings.py`; samples, models and folders are the runner's. Imports stand in functions, so
that `--help` and a misspelt key answer at once.
"""

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.engine.errors import ConfigError, RunError
from kvbench.engine.terminal import is_kvbench, lacks, say

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvbench.evals.screen.dry import Run
    from kvbench.results import RunResult

    Show = Callable[[Sequence[tuple[Path, RunResult]]], None]

PROGRAM = "kvbench" if is_kvbench() else "run.py"
CONF = (Path(__file__).parent / "conf").resolve()
EXAMPLES = """\
KVBench: KV-cache compression methods under the same budget, with what each one really costs.

examples
  python run.py method=oracle task=needle ratio=0.2
  python run.py method=streamingllm task=needle ratio=1/10 limit=5 out=/somewhere/else
  python run.py -m method=full,oracle,streamingllm task=needle ratio=0.1,0.2
  python run.py model=meta-llama/Llama-3.2-1B-Instruct task=needle task.grid=32k"""
HELP = f"""\
{EXAMPLES}

usage
  python run.py [group=NAME | key=value] …
  python run.py -m [group=NAME,NAME | key=value,value] …    every combination at once

groups
{{groups}}
                  model=ORG/NAME, model=FOLDER and model=FILE.gguf work as well
                  method=FILE.py runs a method of your own (docs/adding-a-method.md)

keys, with their defaults (a group's own keys stand in conf/GROUP/NAME.yaml: method.n_sink=8)
{{keys}}

flags
  -m, --multirun     run every combination of the values given with commas
  --list tasks       say what each task asks, its lengths, answers and licence, and which of its data are here
  --list methods     say what each method does, by families, and its presets; --list models: sizes and windows
  --check            say what this machine has, and whether the main job works on it
  --check model=X    say what a model has and which methods run on it, and with tokens=32k memory=4GB what fits
  --dry-run          say how many samples and tokens, and how long they take at least, without the model's weights;
                     hardware=h100 beside it: on that machine (conf/hardware)
  --cfg job          print the composed configuration instead of running it
  --hydra-help       flags of Hydra, which composes the configuration

exit code: 0 done, 1 out of memory or an error of ours, 2 wrong input, 130 or 143 stopped; a
stopped command goes on where it was when given again"""
LONGEST = 400  # characters of one word in a sentence


def help_text() -> str:
    """Groups and keys as the YAML files have them; read as text, parsers drop the comments."""
    listed, folders = [], {path.relative_to(CONF).parent.as_posix() for path in CONF.glob("*/**/*.yaml")}
    for folder in sorted(folders - {"architecture"}):  # which nobody chooses: a model's name leads to its file there
        names = ", ".join(sorted(file.stem for file in (CONF / folder).glob("*.yaml")))
        lines = textwrap.wrap(names, 80, break_on_hyphens=False)
        listed.append(f"  {folder:<16}" + ("\n" + " " * 18).join(lines))
    return HELP.format(groups="\n".join(listed), keys=textwrap.indent(keys_text(), "  "))


def keys_text() -> str:
    """The keys of conf/config.yaml with their defaults and comments, which a parser drops."""
    config = (CONF / "config.yaml").read_text(encoding="utf-8")
    return config[config.index("\nratio:") : config.index("\nhydra:")].strip()


def compose_and_run(argv: list[str], run: "Run | None" = None) -> "list[tuple[Path, RunResult]]":
    """Compose one configuration, or all cells of a sweep, and run them, or do what `run` does with them.

    One that is run is composed once. What flags ask for is Hydra's to do, which composes it a second time to read a key
    of its own.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from kvbench.evals.composing import composition
    from kvbench.evals.settings import settings

    done: list[tuple[Path, RunResult]] = []
    refused: list[ConfigError | RunError] = []

    def job(cfgs: "DictConfig | list[DictConfig]") -> "list[tuple[Path, RunResult]]":
        """Hydra hands over one configuration without its own node; our launcher hands over all of a sweep's."""
        try:
            if isinstance(cfgs, list):
                cells = [settings(cfg, cfg.hydra.runtime.choices, is_sweep=True) for cfg in cfgs]
            else:
                own = cfgs.get("hydra") or HydraConfig.get()
                cells = [settings(cfgs, own.runtime.choices, launcher=own.launcher)]
            if any(cell.task.target == "kvbench.tasks.serving.task.Serving" for cell in cells):
                from kvbench.serving.run import run_cells
            else:
                from kvbench.evals.runner import run_cells

            results = (run or run_cells)(cells)
        except (ConfigError, RunError) as error:
            refused.append(error)  # Hydra would add a line of its own to any exception
            return []
        done.extend(results)
        return results

    if any(word.startswith(("-", "hydra.verbose")) for word in argv):
        sys.argv[1:] = argv
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    else:
        job(composition(CONF, tuple(argv)))
    if refused:
        raise refused[0]
    return done


def refuse(error: Exception) -> int:
    """Wrong input: one sentence, no traceback."""
    words = (w if len(w) <= LONGEST else f"{w[:LONGEST]}…" for w in str(error).split())
    say(f"{PROGRAM}:", " ".join(words), file=sys.stderr)
    return 2


class Terminated(KeyboardInterrupt):
    """SIGTERM, such as a cluster sends before it takes a machine back."""


def stop_at_signals() -> None:
    """Let Ctrl-C and SIGTERM leave through `main`; a second one ends the process at once, whatever it waits for."""

    def stop(number: int, frame: Any) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


def main(argv: list[str], show: "Show | None" = None) -> int:
    """Run a command line; `show` prints what was run in place of the table."""
    if not argv:
        say(f"{EXAMPLES}\n\nNothing was asked, so nothing is run; python run.py --help lists groups, keys and flags.")
        return 0
    if {"-h", "--help"} & set(argv):
        say(help_text())
        return 0
    if "--list" in argv:
        return listed([word for word in argv if word != "--list"])
    if "--check" in argv:
        return checked([word for word in argv if word != "--check"])
    try:
        return answer(argv, show)
    except KeyboardInterrupt as stop:
        say(f"{PROGRAM}: stopped; the same command goes on from here", file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130


def listed(words: list[str]) -> int:
    """Say what can be asked."""
    from kvbench.evals.screen.listing import main as show_list

    try:
        return show_list(words)
    except ConfigError as error:
        return refuse(error)


def checked(words: list[str]) -> int:
    """Say what this machine has, or with `model=NAME` what a model has."""
    from kvbench.evals.screen import check

    if not words:
        return check.main()
    try:
        check.refuse_others(words)
        from kvbench.evals.screen.model import main as check_model

        return check_model(words)
    except ConfigError as error:
        return refuse(error)


def answer(argv: list[str], show: "Show | None") -> int:
    """Run what the command line says and print the table: the exit code."""
    try:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException
    except ModuleNotFoundError as error:
        return refuse(ConfigError(lacks(error)))
    from kvbench.evals.overrides import check_overrides

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises then, where it would print and exit with 1
    try:
        run = None
        if "--dry-run" in argv:
            from kvbench.evals.screen.dry import asked

            argv, run = asked(argv)
        done = compose_and_run(check_overrides(argv), run)
    except (ConfigError, RunError, HydraException, OmegaConfBaseException) as error:
        return min(refuse(error), 1 if isinstance(error, RunError) else 2)
    if done:  # nothing was run with --cfg or --info
        from kvbench.evals.screen.table import print_table

        (show or print_table)(list(dict(done).items()))  # a run that stands in the place of several cells is one row
    return int(any(result.status != "ok" for _, result in done))


if __name__ == "__main__":
    stop_at_signals()
    sys.exit(main(sys.argv[1:]))
