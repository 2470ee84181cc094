"""Kernels are tried out before they are believed: what is wrong, fails or asks for too much is left out by name."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.evals.screen import check
from kvbench.kernels import build, column_sums, fast, select_attend, trials
from kvbench.kernels.fast import Shapes, verdict, verdicts
from kvbench.kernels.jit import triton
from kvbench.tests.tiny_run import run, save_tiny

GPU = torch.device("cuda", 0)
TINY = Shapes(4, 2, 16, 16, False, torch.float32)
MODELS = [TINY, Shapes(6, 2, 20, 20, False, torch.bfloat16), Shapes(6, 1, 40, 32, True, torch.bfloat16)]
WORDS = ["model=any", "model.name=tiny", "ratio=0.5", "task=fidelity", "task.prompt_tokens=40", "task.windows=1"]


@pytest.fixture(autouse=True)
def forgotten(own_cache: Path) -> Iterator[None]:
    """Nothing is remembered from elsewhere, nor from here."""
    for file in fast.folder().glob("tried-*.json"):
        file.unlink()
    yield
    fast.LEFT_OUT.clear()
    build.choose("auto")


@pytest.mark.parametrize("shapes", MODELS, ids=str)
@pytest.mark.parametrize("op", trials.TRIALS)
def test_every_kernel_does_what_torch_does(machine: Machine, op: str, shapes: Shapes) -> None:
    """And none of them falls back on torch to do so."""
    with machine.counting() as counts:
        assert verdict(op, shapes, GPU) == ("", True)
    assert counts.launches or op in ("codes", "packing")  # of which there are none for some heads


def wrong(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def tenth_more(*args: Any, **kwargs: Any) -> Any:
        found = kernel(*args, **kwargs)
        return found * 1.1 if isinstance(found, Tensor) else (found[0] * 1.1, *found[1:])

    return tenth_more


def raising(make: Callable[[], Exception]) -> Callable[..., Any]:
    def failing(_: Callable[..., Any]) -> Callable[..., Any]:
        def failed(*args: Any, **kwargs: Any) -> Any:
            raise make()

        return failed

    return failing


def too_large() -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300_000, 232_448, "shared memory")


WAYS = {
    "wrong": (wrong, "it says something else than torch, by 0.1 of the largest number"),
    "fails": (raising(lambda: RuntimeError("gcc\nsays no")), "it cannot be launched: RuntimeError gcc says no; "),
    "large": (raising(too_large), "it asks for more than the GPU has: out of resource: shared memory"),
    "full": (raising(lambda: torch.OutOfMemoryError("CUDA out of memory")), "it asks for more memory than is free: "),
}


STEP = ("step", select_attend, "attend_table", "snapkv")
SUMS = ("column_sums", column_sums, "column_sums_triton", "h2o")


@pytest.mark.parametrize(
    ("way", "op", "module", "name", "method"),
    [("wrong", *STEP), ("wrong", *SUMS), ("fails", *STEP), ("large", *STEP), ("full", *SUMS)],
    ids=["wrong step", "wrong sums", "fails", "large", "full"],
)
def test_what_does_not_do_is_left_out_by_name(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path,
    way: str, op: str, module: Any, name: str, method: str,
) -> None:  # fmt: skip
    """Once on the screen, in env.json and in the notes of the result, which is that of torch alone."""
    words = [*WORDS, f"model.id={save_tiny(tmp_path / 'tiny')}", f"method={method}", "task.steps=4"]
    expected, (row,) = run([*words, "kernels=torch"], tmp_path / "plain", "cuda")
    make, why = WAYS[way]
    monkeypatch.setattr(module, name, make(getattr(module, name)))
    with caplog.at_level(logging.WARNING):
        result, (found,) = run(words, tmp_path / "out", "cuda")
    assert [line for line in caplog.messages if line.startswith("torch does the work")] == [
        f"torch does the work of these kernels on cuda:0: {op} ({fast.LEFT_OUT[GPU][op]})"
    ]
    assert [*fast.LEFT_OUT[GPU]] == [op] and fast.LEFT_OUT[GPU][op].startswith(why)
    assert (found.prediction, found.score) == (row.prediction, row.score)
    assert found.ledger == row.ledger
    assert f"torch did the work of the kernel {op}: {fast.LEFT_OUT[GPU][op]}" in result.notes
    assert not any("torch did the work" in note for note in expected.notes)
    (env,) = (tmp_path / "out").rglob("env.json")
    assert json.loads(env.read_text())["arithmetic"]["left_out"] == dict(fast.LEFT_OUT[GPU])


def test_a_run_is_found_again_whatever_its_kernels_are(machine: Machine, tmp_path: Path) -> None:
    words = [*WORDS, f"model.id={save_tiny(tmp_path / 'tiny')}", "method=streamingllm", "task.steps=2"]
    first, _ = run([*words, "kernels=torch"], tmp_path / "out", "cuda")
    (env,) = (tmp_path / "out").rglob("env.json")
    before = env.read_text()
    again, _ = run(words, tmp_path / "out", "cuda")
    assert again.config_hash == first.config_hash and env.read_text() == before
    assert json.loads(before)["arithmetic"]["kernels"] == "torch"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that are tried from now on, of which one is wrong and one does not compile."""
    found = list[str]()

    def trial(op: str, found_by: Callable[[], float]) -> Callable[..., Any]:
        def tries(_: Any) -> Any:
            found.append(op)
            yield torch.tensor([found_by()]), torch.tensor([1.0])

        return tries

    def fails() -> float:
        raise RuntimeError("no compiler")

    ops = {"step": lambda: 1.0, "topk": lambda: 2.0, "kmeans": fails}
    monkeypatch.setattr(trials, "TRIALS", {op: trial(op, by) for op, by in ops.items()})
    return found


def test_what_was_found_is_remembered(machine: Machine, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what could not be run, and until the driver, the sources or the model's shapes are others."""
    first = verdicts(TINY, GPU)
    assert [*first] == ["topk", "kmeans"] and tried == ["step", "topk", "kmeans"]
    tried.clear()
    assert verdicts(TINY, GPU) == first and tried == ["kmeans"]
    tried.clear()
    verdicts(MODELS[1], GPU)
    assert tried == ["step", "topk", "kmeans"]
    tried.clear()
    monkeypatch.setattr(fast, "driver", lambda: "another")
    verdicts(TINY, GPU)
    assert tried == ["step", "topk", "kmeans"]
    monkeypatch.setattr(triton, "__version__", "99")
    tried.clear()
    verdicts(TINY, GPU)
    assert tried == ["step", "topk", "kmeans"]


def test_what_others_can_write_is_not_believed(machine: Machine, tried: list[str]) -> None:
    verdicts(TINY, GPU)
    (file,) = fast.folder().glob("tried-*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o666)
    tried.clear()
    verdicts(TINY, GPU)
    assert tried == ["step", "topk", "kmeans"]
    file.write_text("[1]")
    tried.clear()
    assert [*verdicts(TINY, GPU)] == ["topk", "kmeans"]


def test_without_the_step_only_what_reads_prompts_is_tried(
    machine: Machine, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches find positions in the form that the step's kernels read."""
    broken = trials.TRIALS["topk"]
    monkeypatch.setattr(trials, "TRIALS", trials.TRIALS | {"step": broken})
    fast.try_out(TINY, GPU)
    assert tried == ["topk", "kmeans"] and [*fast.LEFT_OUT[GPU]] == ["step", "kmeans"]
    assert not fast.takes("topk", GPU) and not fast.takes_all(GPU) and fast.takes("column_sums", GPU)
    assert fast.takes("topk", torch.device("cuda", 1)) and not fast.takes("topk", torch.device("cpu"))


@pytest.mark.parametrize(
    ("lacking", "says"),
    [("compiler", "it needs a C compiler (apt install gcc)"), ("header", "(apt install python3-dev)")],
)
def test_the_check_names_what_a_launch_lacks(
    machine: Machine, tried: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str, says: str
) -> None:
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    place = tmp_path / "nowhere" if lacking == "header" else tmp_path
    monkeypatch.setattr(fast.sysconfig, "get_config_var", lambda name: str(place))
    monkeypatch.setattr(fast.shutil, "which", lambda name: None if lacking == "compiler" else f"/usr/bin/{name}")
    fact = check.triton()
    assert "torch does the work of topk, as it says something else" in fact.text and fact.problem is None
    assert "kmeans, as it cannot be launched: RuntimeError no compiler; it needs" in fact.text and says in fact.text


def test_the_check_says_that_all_is_well(machine: Machine, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TRIALS", {"step": trials.TRIALS["step"]})
    assert check.triton().text.endswith("every kernel does what torch does")
