"""Samples of a sweep on many workers: `hydra/launcher=ray` and `submitit_slurm`.

The samples that a group of cells still misses are divided into shards. A worker loads the model and asks its shard's
samples, all cells of the group at once as `evals/loop.py` does; each cell's answers go into a run's folder of their
own, `shards/NAME` below the cell's. The process that was started holds the cells' folders meanwhile. When a shard has
ended it takes the answers over, and when all have, it puts them into the task's order: what is left is what one
process would have left.

A worker that is lost takes nothing along but the sample that it was at: its shard is given to another one, which finds
the answers that are there. So does the same command, after whatever end, with this or another launcher.

All machines must see the folders of the runs and this checkout under the same paths.

Not here: the workers' life, which is Ray's or Slurm's.
"""

import importlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import sleep
from typing import Any

import torch

from kvbench.checkout import ROOT
from kvbench.engine.errors import ConfigError, RunError
from kvbench.evals.answer import Answering
from kvbench.evals.cells import RUNS, ready_cells
from kvbench.evals.cells import ask as ask_for
from kvbench.evals.lines import standing
from kvbench.evals.loop import Group
from kvbench.evals.models import load_model
from kvbench.evals.prepare import Preparation, PreparedSample
from kvbench.evals.screen.progress import Progress, Standing, say
from kvbench.evals.settings import Pool, RayPool, Settings, SlurmPool
from kvbench.results import RunFolder, RunResult, SampleRow
from kvbench.results.opened import open_folders, results_of

LOOK_SECONDS = 1.0  # between two looks at what the workers have answered


@dataclass(frozen=True)
class Shard:
    """Some samples of a group's cells, as they are sent to a worker."""

    name: str
    cells: tuple[Settings, ...]
    paths: tuple[Path, ...]  # of each cell's folder
    answered: tuple[frozenset[str], ...]  # of each cell, before
    samples: tuple[tuple[int, str], ...]  # place in the task's order, and id
    cwd: Path

    def folder(self, path: Path) -> Path:
        """Where a cell's answers go."""
        return path / "shards" / self.name


Ended = tuple[Shard, ConfigError | RunError | None]  # a shard, and why it could not go on
Run = Callable[[Sequence[Shard], Callable[[], None]], Iterator[Ended]]


# --- in the process that was started ---


@dataclass
class Work:
    """A group whose samples are asked elsewhere."""

    group: Group
    shards: list[Shard]
    left: set[str] = field(default_factory=set)  # shards that have not ended


def run_groups(groups: Sequence[Group], pool: Pool) -> dict[Path, RunResult]:
    """Run groups of cells on a pool of workers: each cell's result."""
    if isinstance(pool, RayPool) and groups:
        first = groups[0].first.settings
        pool = pool.sized(torch.cuda.device_count(), first.device, first.device_map)
    n_shards = pool.shards
    assert isinstance(n_shards, int), n_shards
    run = runner(pool)
    for group in groups:
        refuse_timed(group)
    cells = [cell for group in groups for cell in group.cells]
    with ExitStack() as stack:
        folders = open_folders(cells, stack, say)
        works = []
        for number, group in enumerate(groups):
            waiting = group.enter(folders)
            if group.cells:
                works.append(divide(number, group, waiting, n_shards))
        with watching(works, folders) as look:
            ask(works, run, look, folders)
    return results_of(cells, folders)


def refuse_timed(group: Group) -> None:
    if group.first.task.is_timed:
        raise ConfigError(
            f"task={group.first.task.name} takes times, which workers beside each other would spoil; use "
            "hydra/launcher=fused"
        )


def divide(number: int, group: Group, waiting: Sequence[PreparedSample], n_shards: int) -> Work:
    """Cut what a group misses into shards; neighbours go to different ones, as their lengths are alike."""
    ids = [(one.place, one.sample.id) for one in waiting]
    n_shards = min(n_shards, len(ids))
    shards = [
        Shard(
            name=f"{number}-{i}-of-{n_shards}",
            cells=tuple(replace(cell.settings, pool=None) for cell in group.cells),
            paths=tuple(cell.path.resolve() for cell in group.cells),
            answered=tuple(frozenset(row.id for row in group.writer.folders[cell.path].rows) for cell in group.cells),
            samples=tuple(ids[i::n_shards]),
            cwd=Path.cwd(),
        )
        for i in range(n_shards)
    ]
    return Work(group, shards, {shard.name for shard in shards})


def ask(works: Sequence[Work], run: Run, look: Callable[[], None], folders: Mapping[Path, RunFolder]) -> None:
    """Let all shards run, take over what they leave, and finish each group after its last one."""
    by_name = {shard.name: work for work in works for shard in work.shards}
    for work in works:
        finish(work)
    for shard, refusal in run([shard for work in works for shard in work.shards], look):
        if refusal is not None:
            raise refusal
        look()
        work = by_name[shard.name]
        for cell, path in zip(work.group.cells, shard.paths, strict=True):
            folders[cell.path].take(shard.folder(path))
        work.left.discard(shard.name)
        finish(work)


def finish(work: Work) -> None:
    if not work.left:
        work.group.finish()


@contextmanager
def watching(works: Sequence[Work], folders: Mapping[Path, RunFolder]) -> Iterator[Callable[[], None]]:
    """A live view of what the workers answer; what it yields is to be called now and then."""
    watches = [Watch(work, folders) for work in works]

    def standings() -> list[Standing]:
        return [one for watch in watches for one in watch.standings()]

    n = sum(work.group.n for work in works)
    n_left = sum(len(shard.samples) for work in works for shard in work.shards)
    n_shards = sum(len(work.shards) for work in works)
    title = f"{len(works)} group{'s' * (len(works) != 1)} in {n_shards} shards"
    with Progress(title, n, n - n_left, standings()) as progress:

        def look() -> None:
            for watch in watches:
                for id in watch.news():
                    progress.sample_done(id, standings())

        yield look


class Watch:
    """What the workers of a group have answered so far."""

    def __init__(self, work: Work, folders: Mapping[Path, RunFolder]) -> None:
        self.work = work
        self.rows = {cell.path: {row.id: row for row in folders[cell.path].rows} for cell in work.group.cells}
        self.tails = [
            (cell.path, Tail(shard.folder(path) / "samples.jsonl"))
            for shard in work.shards
            for cell, path in zip(work.group.cells, shard.paths, strict=True)
        ]
        self.open = [id for shard in work.shards for _, id in shard.samples]

    def standings(self) -> list[Standing]:
        return [standing(cell, [*self.rows[cell.path].values()]) for cell in self.work.group.cells]

    def news(self) -> list[str]:
        """Samples that all cells have answered since the last call."""
        for path, tail in self.tails:
            self.rows[path].update((row.id, row) for row in tail.rows())
        answered = [{row.sample_id for row in rows.values()} for rows in self.rows.values()]
        done = [id for id in self.open if all(id in ids for ids in answered)]
        self.open = [id for id in self.open if id not in set(done)]
        return done


class Tail:
    """The lines that another process adds to a file of samples, as far as they are whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.n_bytes = path, 0

    def rows(self) -> list[SampleRow]:
        """Lines that were added since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.n_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.n_bytes += len(whole) + len(newline)
        try:
            return [SampleRow.from_json(line.decode()) for line in whole.split(b"\n") if line]
        except ValueError as error:
            raise RunError(
                f"{self.path} has a line that is no sample ({error}); delete it and give the same command again"
            ) from None


# --- in a worker ---


def ask_shard(shard: Shard) -> ConfigError | RunError | None:
    """Ask a shard's samples that nobody has answered; why, where that is refused or cannot go on."""
    try:
        with at(shard.cwd), ExitStack() as stack:
            for path in shard.paths:
                refuse_link(shard.folder(path))
            ready = zip(ready_cells(ask_for(shard.cells)), shard.paths, strict=True)
            cells = [replace(cell, path=shard.folder(path)) for cell, path in ready]
            answered = dict(zip((cell.path for cell in cells), shard.answered, strict=True))
            group, folders = Group(cells), open_folders(cells, stack, say)
            model = load_model(group.first.settings)
            group.samples = samples_of(shard, group, model.tokenizer)
            waiting, n = group.enter(folders, answered), len(shard.samples)
            with Progress(f"shard {shard.name}", n, n - len(waiting), work=group.work(waiting)) as progress:
                group.ask_all(waiting, Answering(model, group.first, progress))
    except (ConfigError, RunError) as error:
        return error
    return None


def refuse_link(folder: Path) -> None:
    """A shard lies within a run's folder, where no link is followed."""
    for path in (folder, folder.parent):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link, which runs do not follow; remove the link")


def samples_of(shard: Shard, group: Group, tokenizer: Any) -> list[PreparedSample]:
    """A shard's samples, prepared; a cell that cannot answer one is left out."""
    preparation, prepared = Preparation(group.cells, tokenizer), list[PreparedSample]()
    for place, id in shard.samples:
        sample = preparation.samples[place]
        if sample.id != id:
            raise ConfigError(
                f"sample {place} is {sample.id!r} on {socket.gethostname()} and {id!r} where the command was given; "
                "all machines must read the same data"
            )
        prepared.append(preparation.prepare(place, sample))
    group.without(preparation.refused)
    return prepared


@contextmanager
def at(cwd: Path) -> Iterator[None]:
    """Work in the folder where the command was given: relative paths count from there."""
    if not cwd.is_dir():
        raise ConfigError(f"{socket.gethostname()} has no folder {cwd}; all machines must share the file system")
    with chdir(cwd):
        yield


class Resumable:
    """`ask_shard` as submitit wants it: a job that is preempted or runs out of time is queued again as it is."""

    def __call__(self, shard: Shard) -> ConfigError | RunError | None:
        return ask_shard(shard)

    def checkpoint(self, shard: Shard) -> Any:
        return importlib.import_module("submitit").helpers.DelayedSubmission(self, shard)


# --- what runs workers ---


def runner(pool: Pool) -> Run:
    """How shards are run on this pool."""
    package = importlib.import_module(pool.package)
    if isinstance(pool, RayPool):
        return lambda shards, look: on_ray(package, pool, shards, look)
    return lambda shards, look: on_submitit(package, pool, shards, look)


def lost(shard: Shard, n_tries: int, reason: object) -> RunError:
    return RunError(
        f"shard {shard.name} was lost {n_tries} times ({reason}); its answers are kept, and the same command goes on"
    )


# Ray's workers yield to all else on the machine; next to another job a sweep would stand still without a word.
USUAL_PRIORITY = {"worker_niceness": 0}


def on_ray(ray: Any, pool: RayPool, shards: Sequence[Shard], look: Callable[[], None]) -> Iterator[Ended]:
    """A task per shard; Ray itself runs one again whose worker was lost."""
    if not shards:
        return
    errors = ray.exceptions
    losses = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": ROOT}}}
    if pool.address is None:
        options |= {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, pool.cpus)}
        # A worker that Ray ends because memory is short would come back for ever otherwise.
        options["_system_config"] = {"task_oom_retries": pool.retries} | USUAL_PRIORITY
    else:
        reach(pool.address)
    try:
        ray.init(pool.address, log_to_driver=False, logging_level="ERROR", **options)
    except ConnectionError as error:
        raise no_cluster(pool.address, error) from None
    try:
        if ray.cluster_resources().get("GPU", 0) < pool.gpus and pool.address is None:
            raise ConfigError(
                f"hydra.launcher.gpus={float(pool.gpus):g} is more than this machine has; use 0, auto or an address"
            )
        task = ray.remote(num_cpus=pool.cpus, num_gpus=float(pool.gpus), max_retries=pool.retries, max_calls=1)(
            ask_shard
        )
        refs = {task.remote(shard): shard for shard in shards}
        while refs:
            done, _ = ray.wait(list(refs), timeout=LOOK_SECONDS)
            look()
            for ref in done:
                shard = refs.pop(ref)
                try:
                    refusal = ray.get(ref)
                except losses as error:
                    raise lost(shard, pool.retries + 1, type(error).__name__) from None
                yield shard, refusal
    finally:
        ray.shutdown()


def reach(address: str) -> None:
    """Refuse a head node that does not answer; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # auto, which Ray looks up
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise no_cluster(address, error) from None


def no_cluster(address: str | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"hydra.launcher.address={address} is no Ray cluster that answers ({error}); start one with "
        "`ray start --head`, or use null for this machine alone"
    )


def on_submitit(submitit: Any, pool: SlurmPool, shards: Sequence[Shard], look: Callable[[], None]) -> Iterator[Ended]:
    """A job per shard; one that ends without a result is submitted again."""
    if not shards:
        return
    folder = Path(pool.folder).expanduser() if pool.folder else RUNS / "submitit"
    try:
        executor = submitit.AutoExecutor(folder, cluster=pool.cluster)
    except RuntimeError as error:
        raise ConfigError(
            f"hydra/launcher=submitit_slurm finds no Slurm here ({error}); run it where srun is, or with "
            "hydra.launcher.cluster=local"
        ) from None
    wanted = {
        "name": "kvbench", "timeout_min": pool.timeout_min, "cpus_per_task": pool.cpus, "gpus_per_node": pool.gpus,
        "mem_gb": pool.mem_gb, "slurm_partition": pool.partition, "slurm_account": pool.account,
    }  # fmt: skip
    executor.update_parameters(**{key: value for key, value in wanted.items() if value is not None})
    tries = dict.fromkeys((shard.name for shard in shards), 1)
    with python_path():
        jobs = {executor.submit(Resumable(), shard): shard for shard in shards}
        try:
            while jobs:
                sleep(LOOK_SECONDS)
                look()
                for job in [job for job in jobs if job.done()]:
                    shard, error = jobs.pop(job), job.exception()
                    if error is None:
                        yield shard, job.result()
                    elif isinstance(error, submitit.core.utils.FailedJobError):
                        raise error
                    elif tries[shard.name] > pool.retries:
                        raise lost(shard, tries[shard.name], f"logs in {folder}")
                    else:
                        say(f"job {job.job_id} of shard {shard.name} was lost; submitting it again")
                        tries[shard.name] += 1
                        jobs[executor.submit(Resumable(), shard)] = shard
        finally:
            for job in jobs:
                job.cancel()


@contextmanager
def python_path() -> Iterator[None]:
    """Jobs inherit the environment, and find this checkout by it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, before)))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
