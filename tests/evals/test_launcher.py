"""Launchers and their keys; a sweep too wide for memory says what it says all at once."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from hydra.types import RunMode

from kvbench.engine.errors import ConfigError
from kvbench.evals import answer, runner
from kvbench.evals.batch import answers, reading
from kvbench.evals.composing import composing
from kvbench.evals.settings import RayPool, Settings, SlurmPool, settings
from kvbench.results import read_samples
from kvbench.tests.tiny_run import CONF, cell, save_tiny

TASK = ["task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[0,100]"]
METHODS = ("full", "snapkv", "h2o", "streamingllm", "oracle", "pyramidinfer", "sparq")
TIMES = {"prefill_s", "decode_s", "tpot_s", "batch_rows"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def sweep(model: Path, tmp_path: Path) -> Callable[..., dict[str, list[dict[str, Any]]]]:
    """The lines of all methods' samples, asked at once as the words say."""

    def run(out: str, *words: str) -> dict[str, list[dict[str, Any]]]:
        given = [
            *TASK,
            "model=any",
            f"model.id={model}",
            "task.max_new_tokens=6",
            "comm=1/8",
            "ratio=0.6",
        ]
        cells = [cell([*given, f"method={m}", *words], tmp_path / out, True) for m in METHODS]
        return {
            result.method: [row.to_dict() for row in read_samples(folder)] for folder, result in runner.run_cells(cells)
        }

    return run


def said(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {
        method: [{k: v for k, v in row.items() if k not in TIMES} for row in rows] for method, rows in found.items()
    }


def heights(found: dict[str, list[dict[str, Any]]]) -> list[int]:
    """How many variants were decoded with each one."""
    return [rows[0]["batch_rows"] for rows in found.values()]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that were read."""
    read, prefill = [], reading.prefill

    def noting(model: Any, ids: Sequence[int], *rest: Any) -> Any:
        read.append(len(ids))
        return prefill(model, ids, *rest)

    monkeypatch.setattr(reading, "prefill", noting)
    return read


def test_waves_say_what_all_variants_say_at_once(
    sweep: Any, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = sweep("at once", "sweep.max_variants=100")
    assert heights(at_once) == [6, 6, 6, 6, 6, 1, 6]  # one has a prefill of its own
    n_passes = len(passes)
    assert n_passes == 2 * 2
    by_two = sweep("by two", "sweep.max_variants=4")
    assert heights(by_two) == [4, 4, 4, 4, 2, 1, 2]
    monkeypatch.setattr(answer, "room_bytes", lambda *_: 0)
    one_by_one = sweep("one by one")
    assert heights(one_by_one) == [1] * 7
    assert len(passes) == 3 * n_passes, "a wave read the prompt again"
    assert said(by_two) == said(one_by_one) == said(at_once)


QUANTISED = ["method=hf_quantized_cache", "method.group=8", "memory=1/8"]
BYTES = ["model=any", "task=fidelity", "task.prompt_tokens=300", "task.windows=1", "task.steps=2"]


@pytest.mark.parametrize("task", [BYTES, ["model=any", *TASK, "task.max_new_tokens=2"]])
def test_a_cell_that_cannot_be_met_is_left_out_and_said_and_the_rest_runs(
    task: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one task the lengths of prompts are known before they are made, of the other they are not."""
    given = [*task, f"model.id={model}", "comm=1/8"]
    variants = [QUANTISED, ["method=snapkv", "memory=1/8"], ["method=full"]]
    cells = [cell([*given, *words, "sweep.refused=skip"], tmp_path / "all", True) for words in variants]
    done = runner.run_cells(cells)
    assert [result.method for _, result in done] == ["snapkv", "full"]
    assert sorted(path.name for path in (tmp_path / "all").iterdir() if path.is_dir()) == sorted(
        folder.name for folder, _ in done
    )
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("left out"))
    assert line.startswith("left out: method=hf_quantized_cache memory=1/8: memory=1/8 of a prompt of ")
    assert "use memory=0." in line
    stopping = [cell([*given, *words], tmp_path / "stopped", True) for words in variants]
    with pytest.raises(ConfigError, match="use memory=0"):
        runner.run_cells(stopping)
    with pytest.raises(ConfigError, match="every cell of this sweep is left out"):
        runner.run_cells(cells[:1])
    assert not (tmp_path / "stopped").exists()


def test_variants_that_run_out_of_memory_together_are_asked_in_halves(
    sweep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = answers.decode

    def small(model: Any, trace: Any, rows: Sequence[Any], **rest: Any) -> Any:
        if len(rows) > 2:
            raise torch.OutOfMemoryError(f"no room for {len(rows)}")
        return decode(model, trace, rows, **rest)

    at_once = sweep("at once")
    monkeypatch.setattr(answers, "decode", small)
    halved = sweep("halved")
    assert max(heights(halved)) <= 2
    assert said(halved) == said(at_once)


def composed(*words: str) -> Settings:
    with composing(CONF):
        cfg = compose("config", list(words), return_hydra_config=True)
    return settings(cfg, cfg.hydra.runtime.choices)


def test_launchers_say_where_samples_are_asked() -> None:
    assert composed().pool is None
    assert composed("hydra/launcher=basic").pool is None
    ray = composed("hydra/launcher=ray", "hydra.launcher.gpus=0.5").pool
    assert ray == RayPool(None, "auto", 1, Fraction(1, 2), 3)
    slurm = composed("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu").pool
    assert isinstance(slurm, SlurmPool)
    assert (slurm.cluster, slurm.partition, slurm.mem_gb) == ("slurm", "gpu", None)
    assert composed("sweep.max_variants=7").max_variants == 7
    assert composed().max_variants is None


def test_ray_gets_a_gpu_for_each_shard_by_itself() -> None:
    ray = composed("hydra/launcher=ray").pool
    assert isinstance(ray, RayPool) and ray.gpus == ray.shards == "auto"
    assert (ray.sized(4, "cuda", None).gpus, ray.sized(4, "cuda", None).shards) == (1, 4)
    assert (ray.sized(4, "cuda", "auto").gpus, ray.sized(4, "cuda", "auto").shards) == (4, 1)
    assert (ray.sized(4, "cpu", None).gpus, ray.sized(4, "cpu", None).shards) == (0, 2)
    assert (ray.sized(0, "cuda", None).gpus, ray.sized(0, "cuda", None).shards) == (1, 1)
    halves = composed("hydra/launcher=ray", "hydra.launcher.gpus=0.5").pool
    assert isinstance(halves, RayPool) and halves.sized(2, "cuda", None).shards == 4
    given = composed("hydra/launcher=ray", "hydra.launcher.gpus=0", "hydra.launcher.shards=3").pool
    assert isinstance(given, RayPool) and given.sized(4, "cuda", None) == given


def test_how_a_sweep_is_run_is_no_part_of_its_identity() -> None:
    there = composed("hydra/launcher=ray", "sweep.max_variants=3")
    assert there.resolved() == composed().resolved()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sweep.max_variants=0"], "it is a whole number from 1, or auto"),
        (["sweep.max_variants=few"], "use a whole number from 1, or auto"),
        (["hydra/launcher=ray", "hydra.launcher.shards=0"], "hydra.launcher.shards=0 is out"),
        (["hydra/launcher=ray", "hydra.launcher.cpus=x"], "hydra.launcher.cpus=x is not a whole"),
        (["hydra/launcher=submitit_slurm", "hydra.launcher.cluster=pbs"], "use slurm or local"),
    ],
)
def test_bad_values_are_named(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        composed(*words)


def test_cells_share_the_files_that_they_are_composed_of_and_nothing_else() -> None:
    """Files are parsed once for a sweep; what one cell's words change in them does not show in the next one."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from omegaconf import OmegaConf

    from kvbench.evals.composing import FilesReadOnce

    words = [f"method={m} ratio={r} task={t}" for m in ("h2o", "full") for r in (0.1, 0.3) for t in ("needle", "pg19")]
    shared, apart = (ConfigLoaderImpl(create_config_search_path(str(CONF))) for _ in range(2))
    shared.repository = FilesReadOnce(shared.repository)  # pyright: ignore[reportAttributeAccessIssue]

    def composed(loader: ConfigLoaderImpl) -> list[dict[str, Any]]:
        made = [loader.load_configuration("config", each.split(), RunMode.RUN) for each in words]
        return [{k: v for k, v in OmegaConf.to_container(cfg).items() if k != "hydra"} for cfg in made]  # type: ignore[union-attr]

    assert composed(shared) == composed(apart)
    assert len({str(cell) for cell in composed(shared)}) == len(words)
