"""Copies of finished runs for those who watch them elsewhere: `logger=wandb`.

The run's folder is the truth and a copy is made from its files, after result.json is in place. So a run is copied whole
and once, whether its samples were asked in one go or after a stop; a run that was finished before it was given a logger
is copied then; and a copy that fails costs nothing but a line on standard error.

    wandb.json   in the run's folder: which result was copied, under which id, and whether the copy was finished

Not here: live curves while samples are asked (`evals/screen/progress.py`), the comparison of runs
(`plots/dashboard.py`).
"""

import hashlib
import importlib
import json
import netrc
import os
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlparse

from filelock import FileLock

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import parse_json
from kvbench.evals.cells import class_and_params
from kvbench.evals.refusals import refuse_missing_package
from kvbench.evals.screen.progress import say
from kvbench.evals.settings import Settings
from kvbench.results import RunResult, read_config, read_ledger
from kvbench.results.files import is_file, write
from kvbench.results.frame import OF_RUNS, frame

if TYPE_CHECKING:
    from pandas import DataFrame

BULKY = ("attended_bins",)  # of a sample: what the report draws, a hundred numbers
LONGEST = 10_000  # characters of a text in the table


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
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                say(
                    f"{folder} was not copied ({reason}); the runs are complete, and the same command copies them "
                    "once that works"
                )
        if self.logger is not None and self.sent.issuperset(self.folders):
            farewell = self.logger.farewell(self.folders)
            if farewell is not None:
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


class Nothing(Logger):
    """Make no copies."""

    @dataclass(frozen=True)
    class Params:
        pass

    def check(self) -> None:
        pass

    def copy(self, folder: Path, result: RunResult) -> None:
        pass


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
        refuse_missing_package("wandb", "logger=wandb")
        wandb = importlib.import_module("wandb")
        if self.mode(wandb) in ("online", "shared", "run") and not has_account():
            raise ConfigError(
                "logger=wandb finds no account; run `wandb login`, or set WANDB_MODE=offline to keep the copies here"
            )

    @staticmethod
    def mode(wandb: Any) -> str:
        """The mode as wandb reads it from its variables and settings files."""
        return os.environ.get("WANDB_MODE") or str(wandb.Settings().mode)

    def copy(self, folder: Path, result: RunResult) -> None:
        wandb = importlib.import_module("wandb")
        if self.mode(wandb) == "disabled":
            return
        with FileLock(folder / ".wandb.lock"):
            digest = hashlib.sha256((folder / "result.json").read_bytes()).hexdigest()[:10]
            marker = folder / "wandb.json"
            before = read_marker(marker)
            if before.get("result") == digest and before.get("state") == "finished":
                return
            if before.get("state") == "begun":  # a copy that was cut off
                remove_offline(folder, before)
            self.send(wandb, folder, result, marker, digest)

    def send(self, wandb: Any, folder: Path, result: RunResult, marker: Path, digest: str) -> None:
        """Open a run of W&B, fill it and close it; the marker says how far that went."""
        note = {"result": digest, "id": f"{result.config_hash}-{digest}", "state": "begun"}
        run = wandb.init(
            id=note["id"],
            resume="allow",
            name=folder.name,
            job_type=result.task,
            project=self.params.project or os.environ.get("WANDB_PROJECT") or "kvbench",
            entity=self.params.entity,
            group=self.params.group or os.environ.get("WANDB_RUN_GROUP") or self.sweep,
            tags=[*self.params.tags] or None,
            config=configuration(folder, result),
            dir=os.environ.get("WANDB_DIR") or str(folder),
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=60, disable_git=True, save_code=False,
                x_disable_stats=True, x_disable_meta=True,
            ),
        )  # fmt: skip
        try:
            made = {"folder": str(Path(run.dir).parent), "mode": self.mode(wandb), "url": run.url}
            write_marker(marker, note | made)
            self.fill(wandb, run, folder, result)
        except BaseException:
            run.finish(exit_code=1)
            raise
        run.finish()
        write_marker(marker, read_marker(marker) | {"state": "finished"})

    def farewell(self, folders: Sequence[Path]) -> str | None:
        markers = [read_marker(folder / "wandb.json") for folder in folders]
        offline = [Path(str(marker["folder"])) for marker in markers if marker.get("mode") == "offline"]
        if offline:
            return f"W&B is offline: {counted(len(offline))} in {shown(common(offline))}; to send: {sync(offline)}"
        urls = [str(marker["url"]) for marker in markers if marker.get("url")]
        return f"W&B: {counted(len(urls))} at {urls[0].partition('/runs/')[0]}" if urls else None

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


def has_account() -> bool:
    """Whether wandb would find credentials without asking; `wandb.login` may ask, or look for a server."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def counted(n: int) -> str:
    return "1 copy" if n == 1 else f"{n} copies"


def common(paths: Sequence[Path]) -> Path:
    """The folder that all of them lie in."""
    return Path(os.path.commonpath([path.parent for path in paths]))


def shown(path: Path) -> str:
    """A path as a shell reads it, from where the command was given if it is below."""
    path = path.absolute()
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def sync(offline: Sequence[Path]) -> str:
    """The command that sends copies: their folders by name, or as a pattern where they are many."""
    if len(offline) <= 3:
        return " ".join(["wandb sync", *map(shown, offline)])
    below = {path.parent.relative_to(common(offline)).parts for path in offline}
    stars = ["*" if len({*names}) > 1 else shlex.quote(names[0]) for names in zip(*below, strict=False)]
    return f"wandb sync {'/'.join([shown(common(offline)), *stars, 'offline-run-*'])}"


def read_marker(path: Path) -> dict[str, Any]:
    """{} where there is none that can be read."""
    if not is_file(path):
        return {}
    try:
        note = parse_json(path.read_bytes(), is_ours=True)
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write_marker(path: Path, note: Mapping[str, Any]) -> None:
    write(path, json.dumps(note, indent=2) + "\n")


def remove_offline(folder: Path, note: Mapping[str, Any]) -> None:
    """Remove what a copy that was cut off left on disk: syncing it and the next one would count the run twice."""
    path = Path(str(note.get("folder", "")))
    if path.name.startswith("offline-run-") and path.name.endswith(str(note.get("id"))):
        shutil.rmtree(path, ignore_errors=True)


def configuration(folder: Path, result: RunResult) -> dict[str, Any]:
    """config.yaml, and what the result says of where it was made."""
    config = read_config(folder)
    keys = (
        "method_label",
        "dataset",
        "data_source",
        "prefill",
        "versions",
        "git_sha",
        "config_hash",
        "notes",
        "compressed_layers",
    )
    return config | {"run": {key: getattr(result, key) for key in keys}}


def summary(result: RunResult) -> dict[str, Any]:
    """The numbers and states of result.json, the task's own measures among them."""
    low, high = result.score_ci95 or (None, None)
    kept = {
        key: value
        for key, value in vars(result).items()
        if (isinstance(value, int | float) or value is None) and key not in ("budget", "seed", "metric")
    }
    measures = {f"measures/{name}": value for name, value in (result.measures or {}).items()}
    kept |= {
        "status": result.status,
        "metric": result.metric or "score",
        "score_low": low,
        "score_high": high,
    }
    return {key: value for key, value in (kept | measures).items() if value is not None}


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
    names = [name for name in table if name not in ("sample_id", "step", "layer")]
    totals: dict[int, dict[str, float]] = {}
    samples: dict[int, set[str]] = {}
    layers = max(1, len(set(table.get("layer", []))))
    for i, step in enumerate(table.get("step", [])):
        sums = totals.setdefault(step, dict.fromkeys(names, 0.0))
        samples.setdefault(step, set()).add(table["sample_id"][i])
        for name in names:
            sums[name] = fsum((sums[name], table[name][i] or 0))
    rows = []
    for step in sorted(totals):
        n, sums = len(samples[step]), totals[step]
        row = {
            f"ledger/{name}": sums[name] / n / (layers if name in ("tokens", "attended", "pseudo_tokens") else 1)
            for name in names
            if name not in ("cache_hits", "cache_lookups")
        }
        if sums.get("cache_lookups"):
            row["ledger/cache_hit_rate"] = sums["cache_hits"] / sums["cache_lookups"]
        rows.append({"ledger/step": float(step), "ledger/samples": float(n)} | row)
    return rows
