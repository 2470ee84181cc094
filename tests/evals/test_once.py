"""What has no budget runs once; whatever can be refused is refused before the first folder is made."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvbench.evals.cells
from kvbench.engine.checkpoints.load import read_shape
from kvbench.engine.errors import ConfigError
from kvbench.engine.machine import arithmetic
from kvbench.evals import models
from kvbench.evals.runner import prepare, run_cells
from kvbench.evals.settings import Settings
from kvbench.methods.calibration import files
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.quantising.kivi import KIVI
from kvbench.tests.tiny_run import cell, save_tiny

WORDS = ("task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def cells(checkpoint: Path, tmp_path: Path) -> list[Settings]:
    """A sweep over budget and comm."""
    variants = (
        [f"method={method}", budget, f"comm={comm}"]
        for method in ("full", "oracle")
        for budget in ("ratio=0.2", "ratio=0.5", "budget=90")
        for comm in ("1/64", "1/32")
    )
    return [asked(checkpoint, tmp_path, *words) for words in variants]


def asked(checkpoint: Path, out: Path, *words: str) -> Settings:
    return cell([*WORDS, "model=any", f"model.id={checkpoint}", *words], out / "runs", is_sweep=True)


def folders(out: Path) -> list[Path]:
    return sorted((out / "runs").iterdir()) if (out / "runs").exists() else []


def test_full_attention_runs_once_whatever_budgets_the_others_get(cells: Sequence[Settings], tmp_path: Path) -> None:
    done = run_cells(cells)
    assert len(done) == len(cells) == 12  # one for each cell that was asked for
    assert len({path for path, _ in done[:6]}) == 1
    assert len(folders(tmp_path)) == 1 + 6
    full = done[0][1]
    assert (full.ratio_exact, full.budget, full.comm_exact) == ("1", None, "0")
    assert full.effective_ratio == 1


def test_a_later_sweep_at_other_budgets_finds_it(checkpoint: Path, tmp_path: Path) -> None:
    ((first, _),) = run_cells([asked(checkpoint, tmp_path, "method=full", "ratio=0.2")])
    before = (first / "result.json").stat().st_mtime_ns
    ((second, _),) = run_cells([asked(checkpoint, tmp_path, "method=full", "budget=77", "cache.tokens=256")])
    assert second == first
    assert (first / "result.json").stat().st_mtime_ns == before


def test_what_only_a_later_groups_prompts_tell_is_refused_before_a_folder_is_made(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    words = ("method=streamingllm", "method.n_sink=32", "ratio=0.1", "comm=0", "task.buffer=100")
    fitting, short = (asked(checkpoint, tmp_path, *words, f"task.lengths=[{n}]") for n in (600, 300))
    prepare([fitting, short])  # nothing is known before prompts are read
    with pytest.raises(ConfigError, match=r"method=streamingllm ratio=0\.1: a budget of"):
        run_cells([fitting, short])
    assert folders(tmp_path) == []


def test_a_folder_of_somebody_elses_is_refused_before_others_are_made(checkpoint: Path, tmp_path: Path) -> None:
    pair = [asked(checkpoint, tmp_path, "method=oracle", f"ratio={ratio}") for ratio in ("0.2", "0.5")]
    path = prepare(pair)[1].path
    path.mkdir(parents=True)
    (path / "diary.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"diary\.txt"):
        run_cells(pair)
    assert folders(tmp_path) == [path]
    assert [file.name for file in path.iterdir()] == ["diary.txt"]


def test_what_a_variant_refuses_while_it_is_built_names_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arrange(self: StreamingLLM, layer: int) -> None:
        raise ConfigError("it cannot")

    monkeypatch.setattr(StreamingLLM, "arrange", arrange)
    pair = [asked(checkpoint, tmp_path, f"method={name}", "ratio=0.5") for name in ("streamingllm", "oracle")]
    with pytest.raises(ConfigError, match=r"method=streamingllm ratio=0\.5: it cannot"):
        run_cells(pair[:1])
    with pytest.raises(ConfigError, match=r"it cannot; sweep\.refused=skip runs the other cells"):
        run_cells(pair)
    assert folders(tmp_path) == [], "nothing was answered"
    ((path, result),) = run_cells([replace(each, skips_refused=True) for each in pair])
    assert (result.method, result.status) == ("oracle", "ok") and folders(tmp_path) == [path]
    with pytest.raises(ConfigError, match="every cell of this sweep is left out"):
        run_cells([replace(pair[0], skips_refused=True)])
    assert folders(tmp_path) == [path]


# --- what only the model's files tell -----------------------------------------------------------


def table_of_another(folder: Path) -> str:
    """A table of heads that fits the tiny model's shape, and says that it was made of another one."""
    shape = read_shape("tiny", str(folder))
    rows = "\n".join("\t".join(["1"] * shape.h_kv) for _ in range(shape.n_layers))
    path = folder / "heads.tsv"
    path.write_text(f"# model: other\n# model_digest: 0123456789ab\n{rows}\n")
    return f"method.heads={path}"


def calibration_of_another(folder: Path) -> str:
    shape = read_shape("tiny", str(folder))
    about = files.about("pca", shape, "0123456789ab", "a text", 100, "today")
    files.write(folder / "of_another.npz", files.Calibration(about, {}))
    return f"method.calibration_file={folder / 'of_another.npz'}"


LATE = {
    "a table of heads": (["method=duo_attention"], table_of_another, "made of other with the digest 0123456789ab"),
    "a calibration": (["method=loki"], calibration_of_another, "of another model"),
    "no calibration": (["method=loki", "method.calibrate=never"], None, "there is no calibration of kind pca"),
    "none of queries": (["method=triattention", "method.calibrate=never"], None, "no calibration of kind queries"),
}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("case", LATE)
def test_what_the_model_refuses_is_refused_before_a_folder_is_made_or_left_out(
    case: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, file, says = LATE[case]
    words = [*words, *(["budget=700", "comm=0"] if "triattention" in words[0] else ["ratio=0.5", "comm=1/4"])]
    words += [] if file is None else [file(checkpoint)]
    pair = [asked(checkpoint, tmp_path, "method=full", "ratio=0.5"), asked(checkpoint, tmp_path, *words)]
    with monkeypatch.context() as patch:
        patch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
        with pytest.raises(ConfigError, match=says):
            run_cells(pair)
    assert folders(tmp_path) == []
    ((path, result),) = run_cells([replace(each, skips_refused=True) for each in pair])
    assert (result.method, result.status) == ("full", "ok") and folders(tmp_path) == [path]


def test_weights_that_a_checkpoint_lacks_are_missed_before_a_folder_is_made(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    lacking = tmp_path / "lacking"
    shutil.copytree(checkpoint, lacking)
    weights = load_file(lacking / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    pair = [asked(folder, tmp_path, "method=full") for folder in (checkpoint, lacking)]
    with pytest.raises(ConfigError, match=r"no weights of the right size for model\.layers\.1\.mlp\.up_proj"):
        run_cells(pair)
    assert folders(tmp_path) == []
    ((path, result),) = run_cells([replace(each, skips_refused=True) for each in pair])
    assert result.status == "ok" and folders(tmp_path) == [path]


def test_a_model_that_cannot_be_had_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def early_shape(settings: Settings) -> None:
        looked.append(settings.model.id)
        raise ConfigError("it cannot be had")

    monkeypatch.setattr(kvbench.evals.cells, "early_shape", early_shape)
    pair = [asked(tmp_path, tmp_path, "method=oracle", f"ratio={ratio}") for ratio in ("0.2", "0.5")]
    with pytest.raises(ConfigError, match="every cell of this sweep is left out"):
        run_cells([replace(each, skips_refused=True) for each in pair])
    assert looked == [str(tmp_path)]


# --- what else belongs to a run ------------------------------------------------------------------


def test_a_refusal_says_how_to_run_the_other_cells_where_there_are_some(checkpoint: Path, tmp_path: Path) -> None:
    fitting = asked(checkpoint, tmp_path, "method=oracle", "ratio=0.5")
    small = [asked(checkpoint, tmp_path, "method=streamingllm", f"budget={n}", "method.n_sink=200") for n in (3, 4)]
    hint = r"; sweep\.refused=skip runs the other cells without this one$"
    with pytest.raises(ConfigError, match=hint):  # by its settings
        run_cells([fitting, asked(checkpoint, tmp_path, "method=snapkv", "method.window=999999")])
    with pytest.raises(ConfigError, match=hint):  # by its prompts
        run_cells([*small, fitting])
    for alone in (small, small[:1]):
        with pytest.raises(ConfigError) as caught:
            run_cells(alone)
        assert "sweep.refused" not in str(caught.value)
    assert folders(tmp_path) == []


def test_a_composing_methods_version_belongs_to_a_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KIVI, "check_shape", lambda *_: None)  # the tiny model's heads hold no group of 32
    composed = asked(checkpoint, tmp_path, "method=snapkv", "ratio=0.5", "compose=kivi")
    plain = asked(checkpoint, tmp_path, "method=snapkv", "ratio=0.5")
    before = [cell.path for cell in prepare([composed, plain])]
    assert "compose_version" not in prepare([composed])[0].config  # as runs of the first version were recorded
    monkeypatch.setattr(KIVI, "version", 2)
    (first, other) = prepare([composed, plain])
    assert first.path != before[0] and first.config["compose_version"] == 2
    assert other.path == before[1]
    assert first.group() == other.group(), "one prefill is enough for both"


def test_env_says_what_sums_depend_on(checkpoint: Path, tmp_path: Path) -> None:
    ((folder, _),) = run_cells([asked(checkpoint, tmp_path, "method=full")])
    made = json.loads((folder / "env.json").read_text())["arithmetic"]
    assert made == json.loads(json.dumps(arithmetic("float32", "cpu")))
    assert (made["dtype"], made["device"], made["threads"]) == ("float32", "cpu", torch.get_num_threads())
    assert {"instructions", "torch_instructions", "blas", "kernels", "variables"} <= made.keys()
