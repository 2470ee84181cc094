"""What `run.py --check` says of this machine, and of others that are made up."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from kvbench import run
from kvbench.engine.books.width import PASS_VALUES, SHARE
from kvbench.engine.checkpoints import header, load, packages
from kvbench.engine.errors import ConfigError
from kvbench.evals.screen import check, fits
from kvbench.evals.screen.fits import ROOT, Shipped, architecture_file, shipped
from kvbench.kernels import build, fast
from kvbench.tasks import known
from kvbench.tasks.known import known_tasks
from kvbench.tasks.reasoning import judge

GB = 10**9
N_KERNELS = len([*build.SOURCES.glob("*.cpp")])


def screen(capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, str]]:
    """Exit code, text, and the lines that begin with a name, wraps undone."""
    code, text = check.main(), capsys.readouterr().out
    lines: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        first = line[:14].strip()
        name = first or name
        lines[name] = f"{lines[name]} {line.strip()}" if name in lines else line[14:].strip()
    return code, text, lines


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KVBENCH_KERNELS", "KVBENCH_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CUDA as on a machine with two H200, of which the first is half full."""
    free = (70 * GB, 150 * GB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name="NVIDIA H200"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[getattr(device, "index", device)], 150 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def test_this_machine_can_do_the_main_job(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, lines = screen(capsys)
    assert code == 0
    assert text.rstrip().endswith("make run")
    assert f"torch {torch.__version__.partition('+')[0]}" in lines["Python"]  # +cu130 is not in the package's version
    assert lines["dtype"].startswith(f"auto is {load.resolve_dtype('auto', 'auto')} on ")
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text.replace("hf download …", ""), "something was cut"
    for file in (ROOT / "conf" / "model").glob("*.yaml"):
        assert file.stem == "any" or file.stem in text
    for name, kind in known_tasks().items():
        assert (name in lines) == (vars(kind).get("data") is not None)


def versions_with(**others: str) -> Callable[[str], str]:
    """What is installed here, but for some packages."""
    return lambda name: others.get(name) or version(name)


def test_an_older_transformers_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", versions_with(transformers="5.12.0"))
    code, text, _ = screen(capsys)
    assert code == 1
    assert "\ntransformers 5.12.0 is installed, and KVBench asks for <5.24,>=5.17; run `make setup`\n" in text
    assert "main job works" not in text


def test_it_is_a_flag_of_the_command_and_takes_seconds() -> None:
    before = os.times().children_user
    done = subprocess.run([sys.executable, "run.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert "embedded model" in done.stdout and not done.stderr
    assert os.times().children_user - before < 15  # a third of it where nothing else runs
    assert "--check" in run.help_text()


def test_gpus_are_named_and_the_first_ones_memory_decides(
    h200: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "where", lambda model: "here" if model.name.startswith("llama-3.1") else model.id)
    monkeypatch.setattr(fast, "verdicts", lambda *_: {})
    code, text, lines = screen(capsys)
    assert code == 0
    assert lines["Triton"] == f"{version('triton')}; every kernel does what torch does"
    assert "CUDA 12.8: cuda:0 NVIDIA H200, 70.0 GB of 150.0 GB free; cuda:1" in lines["processors"]
    assert lines["dtype"] == "auto is bfloat16 on cuda: on a GPU it is fast"
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert " 121,885" in rows["llama-3.1-8b-instruct"], "of 70 GB, not of 150"
    assert "does not fit" in rows["llama-3.1-70b-instruct"]


def test_an_nvidia_driver_that_torch_cannot_use_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "nvidia-smi is there, but torch" in screen(capsys)[2]["processors"]


def test_a_cpu_that_emulates_bfloat16_takes_float32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(load, "cpu_multiplies_bfloat16", lambda: False)
    lines = screen(capsys)[2]
    assert lines["dtype"].startswith("auto is float32 on cpu: this CPU has neither AVX512-BF16 nor AMX")


def test_a_machine_without_a_compiler_works_and_says_what_is_slower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    code, _, lines = screen(capsys)
    assert code == 0
    assert lines["C++ kernels"].startswith(f"0 of {N_KERNELS} built: no C++ compiler")
    assert "torch does their work" in lines["C++ kernels"]
    assert "converted at the first start" in lines["embedded model"]


def test_kernels_that_are_not_built_yet_and_those_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "my-c++")
    path = build.library_path("clusters", build.level())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert check.kernels().text == f"1 of {N_KERNELS} built; my-c++ compiles the others when first used"
    with monkeypatch.context() as locked:
        locked.setattr(check, "writable", lambda path: False)
        assert f"cannot be written; torch does that of the other {N_KERNELS - 1}, slower" in check.kernels().text
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    assert check.kernels().text.startswith("switched off")


def test_without_the_embedded_model_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(header, "EMBEDDED_PACKAGE", "no_such_package")
    code, text, lines = screen(capsys)
    assert code == 1
    assert lines["embedded model"] == "not installed"
    assert "make setup" in text.splitlines()[-1]


def test_without_packages_it_says_only_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "gguf" else True)
    code, text, _ = screen(capsys)
    assert code == 1
    assert text.splitlines()[-1] == "the packages gguf are not installed; run `make setup`"


@pytest.mark.parametrize("what", ["cache", "runs"])
def test_a_folder_that_cannot_be_written_is_a_sentence(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    is_cache = what == "cache"
    monkeypatch.setattr(check, "writable", lambda path: path.is_relative_to(tmp_path) != is_cache)
    code, text, _ = screen(capsys)
    assert code == 1
    assert "cannot be written; unlock it, or " in text.splitlines()[-1]
    assert ("XDG_CACHE_HOME" in text.splitlines()[-1]) == is_cache


def test_too_little_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("kvbench.engine.books.width.free_bytes", lambda device: GB // 2)
    code, text, _ = screen(capsys)
    assert code == 1
    assert "needs about 2 GB of free memory and 0.5 GB are free" in text.splitlines()[-1]


def test_extras_that_are_missing_are_named_with_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if name == "ray":
            return "2.50"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "version", found)
    text = check.extras().text
    assert text.startswith(
        "ray 2.50; pip install -c constraints.txt: flash-attn (prompts on a GPU), wandb (logger=wandb"
    )


def test_graders_that_are_missing_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "installed", lambda name: None if name in ("langdetect", "tree-sitter-go") else "1.0")
    text = check.graders().text
    assert text.startswith(
        "missing: langdetect (ifeval_system), tree-sitter-go (scbench); pip install -c constraints.txt"
    )
    monkeypatch.setattr(check, "installed", lambda name: "1.0")
    monkeypatch.setattr(judge, "RUNTIME", tmp_path / "grader")
    assert "--target" in check.graders().text and "antlr4-python3-runtime==4.13.2" in check.graders().text
    (tmp_path / "grader").mkdir()
    assert check.graders().text == "math-verify 1.0, langdetect, nltk, tree-sitter with six grammars"
    assert check.ANTLR in (ROOT / "Makefile").read_text()


def test_data_are_found_where_a_run_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    for name in ("test.jsonl", "gsm8k_prompt_formal.txt"):
        (tmp_path / "gsm8k" / name).write_text("")
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    lines = {fact.name: fact.text for fact in check.data()}
    assert lines["gsm8k"] == f"2 files in {tmp_path}"
    assert "kvbench fetch infinitebench" in lines["infinitebench"]


def test_a_model_in_the_hubs_cache_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = next(one for one in shipped() if one.name == "opt-6.7b")
    snapshot = tmp_path / "hub" / "models--facebook--opt-6.7b" / "snapshots" / "abc"
    assert check.where(model) == "facebook/opt-6.7b"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert check.where(model) == "facebook/opt-6.7b", "without weights"
    (snapshot / "model-00001-of-00002.safetensors").write_text("")
    assert check.where(model) == "here, in the hub's cache"


# Billions of weights of the text models, counted from their shapes; as far as cards give digits, they agree.
BILLIONS = {
    "deepseek-v2-lite-chat": 15.706, "gemma-3-12b-it": 11.766, "gemma-3-27b-it": 27.009, "gemma-3-4b-it": 3.880,
    "glm-4.7-flash": 29.943, "gpt-oss-120b": 116.829, "gpt-oss-20b": 20.915, "llama-3.2-1b-instruct": 1.236,
    "llama-3.3-70b-instruct": 70.554, "ministral-3-8b-instruct": 8.490, "mistral-small-3.2-24b-instruct": 23.572,
    "olmo-3-7b-instruct": 7.298, "phi-4": 14.660, "qwen3-0.6b": 0.596, "qwen3-30b-a3b": 30.532, "qwen3-8b": 8.191,
    "qwen3-14b": 14.768, "qwen3-32b": 32.762, "deepseek-r1-distill-qwen-7b": 7.616, "phi-4-reasoning": 14.660,
    "qwen3-next-80b-a3b-instruct": 79.674, "smollm3-3b": 3.075, "smollm2-135m": 0.1345,
}  # fmt: skip


@pytest.mark.parametrize("one", [model for model in shipped() if model.name in BILLIONS], ids=lambda model: model.name)
def test_the_shape_of_a_shipped_model_has_its_number_of_weights(one: Shipped) -> None:
    assert one.n_weights / 1e9 == pytest.approx(BILLIONS[one.name], rel=0.001)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite-chat"])
def test_a_token_takes_what_the_compressed_layers_keep_of_it(name: str) -> None:
    shape = next(one for one in shipped() if one.name == name).shape
    kept = {"llama-3.1-8b": 32 * 8 * 256, "gpt-oss-20b": 12 * 8 * 128, "deepseek-v2-lite-chat": 27 * 576}[name]
    assert fits.token_values(shape, PASS_VALUES) == kept + PASS_VALUES * shape.d_model


def test_every_shipped_model_has_an_architecture() -> None:
    names = {file.stem for file in (ROOT / "conf" / "model").glob("*.yaml")} - {"any"}
    assert {model.name for model in shipped()} == names
    used = {architecture_file(name) for name in names}
    assert used == {*(ROOT / "conf" / "architecture").glob("*.yaml")}


def test_the_longest_prompt_is_the_formulas() -> None:
    model = next(one for one in shipped() if one.name == "llama-3.1-8b")
    shape, n_weights = model.shape, model.n_weights
    n = fits.longest(shape, n_weights, 24 * GB, 2, SHARE, PASS_VALUES)
    taken = 2 * (n_weights + n * fits.token_values(shape, PASS_VALUES))
    assert 0 < n < shape.window
    assert SHARE * 24 * GB - 2 * fits.token_values(shape, PASS_VALUES) < taken <= SHARE * 24 * GB
    assert fits.longest(shape, n_weights, 10 * GB, 2, SHARE, PASS_VALUES) == 0
    assert (
        fits.longest(shape, n_weights, 900 * GB, 2, SHARE, PASS_VALUES)
        == shape.window
        == yaml.safe_load((ROOT / "conf" / "architecture" / "llama-3.1-8b.yaml").read_text())["max_position_embeddings"]
    )


def test_a_gpu_without_triton_is_slower_and_says_so_once(
    h200: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "triton", None)
    load.warn_of_triton.cache_clear()
    assert [load.resolve_device(device) for device in ("auto", "cuda", "cuda:0", "cpu")][2:] == ["cuda:0", "cpu"]
    load.warn_of_triton.cache_clear()
    assert ["Triton is not installed, and torch does" in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.parametrize("device", ["cuda:3", "mps", "xpu:0"])
def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device={device} needs a GPU that torch can use, and there is none"):
        load.resolve_device(device)


def test_another_accelerator_is_taken_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    found = [load.torch_device(device) for device in ("mps", "xpu", "xpu:0")]
    assert found == [torch.device("mps", 0), torch.device("xpu", 1), torch.device("xpu", 0)]
    with pytest.raises(ConfigError, match="torch can use 2 GPUs, xpu:0 to xpu:1"):
        load.torch_device("xpu:2")


def test_a_triton_that_was_not_tried_is_said_once_and_by_the_check(
    h200: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = "triton 3.9.0 is installed, and KVBench asks for <3.8,>=3.6"
    monkeypatch.setattr(packages, "version", versions_with(triton="3.9.0"))
    monkeypatch.setattr(fast, "verdicts", lambda *_: {})
    load.warn_of_triton.cache_clear()
    for device in ("auto", "cuda", "cuda:0"):
        load.resolve_device(device)
    load.warn_of_triton.cache_clear()
    assert [words in record.getMessage() for record in caplog.records] == [True]
    assert check.triton().text.startswith(f"3.9.0; {words}: no kernel was tried with it")
    monkeypatch.setattr(packages, "version", versions_with(triton="3.6.0"))
    assert packages.out_of_bounds("triton") is None


def test_a_task_that_cannot_be_imported_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(known.CONF, tmp_path / "task")
    (folder / "mine.yaml").write_text("_target_: tasks.not_there.Mine\n")
    monkeypatch.setattr(known, "CONF", folder)
    assert known_tasks.__wrapped__() == known_tasks()
    assert capsys.readouterr().err.startswith("task=mine is left out: ModuleNotFoundError: ")
