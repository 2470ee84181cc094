"""Copies of finished runs for those who watch them elsewhere: `logger=wandb`.

The run's folder is the truth and a copy is made from its files, after result.json is in place. A copy that fails costs
nothing but a line on standard error, and the same command makes it later. W&B itself tries again where a connection
fails, keeps what it cannot send (WANDB_MODE=offline, `wandb sync`), and knows a run that is sent again by its id.

    wandb.json   in the run's folder: which result was copied, and its address

Not here: live curves while samples are asked (`evals/screen/progress.py`), the comparison of runs
(`plots/dashboard.py`).
"""

import hashlib
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.engine.errors import ConfigError, one_line
from kvbench.engine.foreign import parse_json
from kvbench.evals.cells import class_and_params
from kvbench.evals.refusals import refuse_missing_package
from kvbench.evals.screen.progress import say
from kvbench.evals.settings import Settings
from kvbench.results import RunResult, read_config, read_ledger
from kvbench.results.files import write
from kvbench.results.frame import OF_RUNS, frame

if TYPE_CHECKING:
    from pandas import DataFrame

BULKY = ("attended_bins",)  # of a sample: what the report draws, a hundred numbers
LONGEST = 10_000  # characters of a text in the table
OF_ONE_LAYER = ("tokens", "attended", "pseudo_tokens")  # of a curve; bytes are of all layers
CONFIGURATION = (  # of a result: where it was made, and of what
    *("method_label", "dataset", "data_source", "prefill", "versions", "git_sha", "config_hash", "notes"),
    "compressed_layers",
)


class Logger(ABC):
    """A place where copies of runs go."""

    Params: ClassVar[type]

    def __init__(self, params: Any, sweep: str | None) -> None:
        self.params, self.sweep = params, sweep

    @abstractmethod
    def check(self) -> None:
        """Raise `ConfigError` where no copy can be made; called before a model is loaded."""

    @abstractmethod
    def copy(self, folder: Path, result: RunResult) -> None:
        """Copy a finished run, unless that was done before."""

    def farewell(self, folders: Sequence[Path]) -> str | None:
        """Where the copies of these runs are, once all were made, and what is left to be done."""
        return None


class Nothing(Logger):
    """Make no copies."""

    @dataclass(frozen=True)
    class Params:
        pass

    def check(self) -> None:
        pass

    def copy(self, folder: Path, result: RunResult) -> None:
        pass


class Copies:
    """Copies the runs of one command. After a copy that failed it prints one line and copies nothing more."""

    def __init__(self, cells: Sequence[Settings], folders: Sequence[Path]) -> None:
        self.logger: Logger | None = None
        self.folders, self.sent = folders, set[Path]()
        if not cells:
            return
        kind, params = class_and_params(cells[0].logger)
        sweep = sweep_name(cells, folders) if cells[0].is_sweep else None
        self.logger = kind(params, sweep)

    def send(self, results: Mapping[Path, RunResult]) -> None:
        """Copy the runs that were not copied yet; after the last one, say where the copies are."""
        if self.sent.issuperset(self.folders):
            return
        for folder, result in results.items():
            if self.logger is None or folder in self.sent:
                continue
            try:
                self.logger.copy(folder, result)
                self.sent.add(folder)
            except Exception as error:  # whatever it is, the runs are safe and the others go on
                self.logger = None
                say(
                    f"{folder} was not copied ({one_line(error)}); the runs are complete, and the same command copies "
                    "them once that works"
                )
        if self.logger is not None and self.sent.issuperset(self.folders):
            if farewell := self.logger.farewell(self.folders):
                say(farewell)


def check_logger(cells: Sequence[Settings]) -> None:
    """Raise `ConfigError` where no copies of these runs could be made."""
    for cell in cells[:1]:
        kind, params = class_and_params(cell.logger)
        kind(params, None).check()


def sweep_name(cells: Sequence[Settings], folders: Sequence[Path]) -> str:
    """A sweep's name, the same for the same cells, whoever asks and whatever their order."""
    tasks = "-".join(sorted({cell.task.name for cell in cells}))
    models = "-".join(sorted({cell.model.name for cell in cells}))
    names = "\n".join(sorted(folder.name for folder in folders))
    return f"{tasks}-{models}"[:100] + "-" + hashlib.sha256(names.encode()).hexdigest()[:8]


class Wandb(Logger):
    """Weights & Biases: configuration, summary, samples as a table, pictures, curves of the ledger.

    A run's id is made of its configuration and its result, so a second copy of one run is the same run. Curves are
    logged with their step given, so that W&B drops them when it has them.
    """

    @dataclass(frozen=True)
    class Params:
        project: str | None
        entity: str | None
        group: str | None
        tags: tuple[str, ...]

    def check(self) -> None:
        """A terminal is asked for a key by W&B itself."""
        refuse_missing_package("wandb", "logger=wandb")
        wandb = importlib.import_module("wandb")
        if mode_of(wandb) in ("offline", "disabled"):
            return
        try:
            reason = "" if wandb.login() else "no API key is configured; run `wandb login`"
        except wandb.Error as error:
            reason = one_line(error).rstrip(".")
        if reason:
            raise ConfigError(f"logger=wandb: {reason}, or set WANDB_MODE=offline to keep the copies here")

    def copy(self, folder: Path, result: RunResult) -> None:
        wandb = importlib.import_module("wandb")
        digest = hashlib.sha256((folder / "result.json").read_bytes()).hexdigest()[:10]
        if mode_of(wandb) == "disabled" or copied(folder).get("result") == digest:
            return
        with wandb.init(
            id=f"{result.config_hash}-{digest}",
            resume="allow",
            name=folder.name,
            job_type=result.task,
            project=self.params.project or os.environ.get("WANDB_PROJECT") or "kvbench",
            entity=self.params.entity,
            group=self.params.group or os.environ.get("WANDB_RUN_GROUP") or self.sweep,
            tags=[*self.params.tags] or None,
            config=read_config(folder) | {"run": {key: getattr(result, key) for key in CONFIGURATION}},
            dir=os.environ.get("WANDB_DIR") or str(folder),
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=60, disable_git=True, save_code=False,
                x_disable_stats=True, x_disable_meta=True,
            ),
        ) as run:  # fmt: skip
            self.fill(wandb, run, folder, result)
            made = {"result": digest, "url": run.url}
        write(folder / "wandb.json", json.dumps(made, indent=2) + "\n")

    def farewell(self, folders: Sequence[Path]) -> str | None:
        notes = [note for folder in folders if (note := copied(folder))]
        if urls := [note["url"] for note in notes if note.get("url")]:
            return f"W&B: {len(urls)} runs at {urls[0].partition('/runs/')[0]}"
        below = os.environ.get("WANDB_DIR") or os.path.commonpath([folder.parent.absolute() for folder in folders])
        where = quote(below) if os.environ.get("WANDB_DIR") else f"{quote(below)}/*"
        return f"W&B is offline; to send the copies: wandb sync {where}/wandb/offline-run-*" if notes else None

    def fill(self, wandb: Any, run: Any, folder: Path, result: RunResult) -> None:
        run.define_metric("ledger/step")
        run.define_metric("ledger/*", step_metric="ledger/step")
        steps = curves(read_ledger(folder, result))
        for at, row in enumerate(steps):
            run.log(row, step=at)
        logged: dict[str, Any] = {"samples": wandb.Table(dataframe=sample_table(folder))}
        for picture in sorted(folder.glob("*.png")):
            logged[f"figures/{picture.stem}"] = wandb.Image(str(picture), file_type="png")
        run.log(logged, step=len(steps))
        run.summary.update(summary(result))


def mode_of(wandb: Any) -> str:
    """The mode as wandb reads it from its variables and settings files."""
    return os.environ.get("WANDB_MODE") or str(wandb.Settings().mode)


def copied(folder: Path) -> dict[str, Any]:
    """What is noted of a run's copy; {} where there is none."""
    try:
        note = parse_json((folder / "wandb.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def summary(result: RunResult) -> dict[str, Any]:
    """The numbers and states of result.json, the task's own measures among them."""
    low, high = result.score_ci95 or (None, None)
    own = {"status": result.status, "metric": result.metric or "score", "score_low": low, "score_high": high}
    numbers = {key: value for key, value in vars(result).items() if isinstance(value, int | float)}
    every = numbers | own | {f"measures/{name}": value for name, value in (result.measures or {}).items()}
    return {key: value for key, value in every.items() if value is not None and key not in ("budget", "seed")}


def sample_table(folder: Path) -> "DataFrame":
    """The run's rows of `kvbench.results`, without what its configuration has and what is `BULKY`; texts are cut."""
    every: Any = frame(folder)
    names = [name for name in every if "." not in name or name.partition(".")[0] in ("measures", "report")]
    table = every[[name for name in names if name not in BULKY and name not in OF_RUNS]]
    for name in table:
        if str(table[name].dtype) in ("category", "str", "object"):
            table[name] = table[name].astype(object).where(table[name].notna(), None).map(cut)
    return table


def cut(value: Any) -> Any:
    return value[:LONGEST] if isinstance(value, str) else value


def curves(table: Mapping[str, list[Any]]) -> list[dict[str, float]]:
    """Per decode step, means over the samples that came so far: bytes of all layers, tokens of one."""
    from pandas import DataFrame

    every: Any = DataFrame(table)
    if every.empty:
        return []
    steps = every.groupby("step")
    sums, n = steps.sum(numeric_only=True), steps["sample_id"].nunique()
    rows = sums.drop(columns=["layer", "cache_hits", "cache_lookups"], errors="ignore").div(n, axis=0)
    for name in OF_ONE_LAYER:
        if name in rows:
            rows[name] /= every["layer"].nunique()
    if "cache_lookups" in sums:
        rows["cache_hit_rate"] = sums["cache_hits"] / sums["cache_lookups"]
    found = rows.assign(samples=n, step=rows.index).astype(float).add_prefix("ledger/").to_dict("records")
    return [{name: value for name, value in row.items() if value == value} for row in found]
