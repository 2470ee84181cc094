"""The launcher of every multirun: hands all of its cells to the task function at once.

Hydra's own launchers call the task function cell by cell, and every cell would prefill each sample
again. Every cell is composed before the first one runs, so a bad cell ends the sweep at once.

`hydra/launcher=fused`, `ray` and `submitit_slurm` are one class. What else stands in their files
under conf/hydra/launcher says where samples are asked, and goes to the runner with the cells.

The sweeper makes the cells as Hydra's own does, but composes none of them itself and writes no file: a process that is
killed leaves nothing behind.

Hydra takes launchers from the namespace package `hydra_plugins` only and imports this file at every
start; so this folder is no package, and nothing heavy is imported.

Not here: what runs beside what (`evals/runner.py`), shards and their workers (`evals/shards.py`).
"""

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class CellSweeper(BasicSweeper):
    def sweep(self, arguments: list[str]) -> Any:
        """Every combination of the values that the experiment and the command line sweep, at once."""
        assert self.hydra_context is not None and self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        (cells,) = self.split_arguments(overrides, max_batch_size=None)
        done = self.launcher.launch(cells, initial_job_idx=0)
        for one in done:
            _ = one.return_value  # raises what a job of Hydra's own launcher raised
        return [done]


class FusedLauncher(Launcher):
    def __init__(self, **where: Any) -> None:
        """The keys of the launcher's file; the runner finds them in each cell's `hydra` node."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from kvbench.evals.composing import FilesReadOnce

        self.loader = hydra_context.config_loader
        self.loader.repository = FilesReadOnce(self.loader.repository)  # pyright: ignore[reportAttributeAccessIssue]
        self.task_function = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Cells keep their `hydra` node: it says which files each of them was composed from."""
        HydraConfig.instance().set_config(self.config)
        cells = [self.loader.load_sweep_config(self.config, list(words)) for words in job_overrides]
        self.task_function(cells)  # says itself what came of them; a sweep may leave some out
        return [
            JobReturn(overrides=words, cfg=cell, status=JobStatus.COMPLETED)
            for words, cell in zip(job_overrides, cells, strict=True)
        ]
