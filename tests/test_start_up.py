"""What is imported when: a wrong value is answered without torch, a right command loads no more than it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.tests import warm
from kvbench.tests.tiny_run import save_tiny

SHORT = ["task.lengths=[500]", "task.depths=[50]", "task.source=embedded", "dtype=float32"]  # of the needle
ROOT = Path(__file__).resolve().parents[1]
MOST_CPU_SECONDS = 4.0  # of a refusal; idle cores take a second
# Each command's exit code, the CPU seconds of the process up to then, and what of weight is imported.
WRONG = """
import resource, sys
from kvbench import run
commands = " ".join(sys.argv[1:]).split(" / ")
for words in commands:
    try:
        code = run.main(words.split())
    except SystemExit as stop:
        code = stop.code
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(code, used.ru_utime + used.ru_stime, *({"torch._C", "transformers"} & sys.modules.keys()))
"""
RIGHT = """
import sys
from kvbench import run
import kvbench.evals.batch.reading

def prefill(*_, **__):
    print(*sys.modules)
    raise KeyboardInterrupt

kvbench.evals.batch.reading.prefill = prefill
run.main(sys.argv[1:])
"""
UNUSED = (  # by a run up to its first prefill
    *("wandb", "matplotlib", "pandas", "datasets", "pyarrow", "sklearn", "rouge", "rouge_chinese", "jieba"),
    *("fuzzywuzzy", "Levenshtein", "ray", "submitit", "nltk", "evaluate", "plots"),
)


def python(code: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


VALUES = {
    "method=pqcache method.m=7": "method=pqcache ratio=0.2: method.m=7 does not divide d_h=64",
    "method=pqcach": "no method 'pqcach'; did you mean 'pqcache'",
    "task=needl": "no task 'needl'; did you mean 'needle'",
    "method=snapkv ratio=2": "ratio=2 is out of range",
    "method=quest comm=1/8 ratio=1/128": "method=quest ratio=1/128: ",
    "method=snapkv method.kernel=4": "method=snapkv: method.kernel=4 has no middle",
    "method=infllm budget=20": "method=infllm budget=20: a budget of 20 tokens",
    "-m method=full,quest ratio=0.5,0.1": "method=quest ratio=0.1: a budget of 100 tokens",
    "task=needle task.lengths=[90000]": "more than the window of smollm2-135m",
    "task=longbench task.datasets=[docs]": "no task.datasets 'docs'",
    "model=/no/such.gguf": "model=/no/such.gguf does not exist",
    "--dry-run hardware=h101": "no hardware 'h101'; did you mean 'h100'",
    "--check models": "models says nothing of a model",
    "task=shared_context method=rkv": "task=shared_context asks several questions",
}


def test_a_wrong_value_is_answered_without_torch_and_makes_nothing(tmp_path: Path) -> None:
    """In one process, each after the others: the first is the one that pays for the imports."""
    out = tmp_path / "run"
    command = [sys.executable, "-c", WRONG, " / ".join(f"{words} out={out}" for words in VALUES)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in found.stderr, found.stderr
    before = 0.0
    for words, line in zip(VALUES, found.stdout.splitlines(), strict=True):
        code, seconds, *imported = line.split()
        assert (code, imported) == ("2", []), words
        assert float(seconds) - before < MOST_CPU_SECONDS, words
        before = float(seconds)
    for says, said in zip(VALUES.values(), found.stderr.splitlines(), strict=True):
        assert says in said
    assert not out.exists()


def test_a_right_command_reaches_its_first_prefill_without_what_it_does_not_use(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "checkpoint")
    words = [f"model={model}", "method=snapkv", "task.lengths=[500]", "task.depths=[50]", "task.source=embedded"]
    loaded = {name.partition(".")[0] for name in python(RIGHT, *words, f"out={tmp_path / 'run'}").split()}
    assert "transformers" in loaded
    assert not loaded & set(UNUSED)


@pytest.mark.parametrize(
    "command", ["kvbench.tests.conformance", "kvbench.tests.golden", "kvbench.plots.table", "kvbench.evals.fetch"]
)
def test_a_command_of_a_python_without_packages_is_a_sentence(command: str) -> None:
    """With -S Python has its own library alone."""
    done = subprocess.run([sys.executable, "-S", "-m", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.endswith("; `make setup`, then `. .venv/bin/activate`\n")


@pytest.mark.parametrize("fails", ["import plots.nothing", "1 / 0"])
def test_a_fault_of_ours_is_shown_as_one(fails: str) -> None:
    lines = f"import sys; sys.argv[0] = '-m'; import plots; {fails}"
    done = subprocess.run([sys.executable, "-S", "-c", lines], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


@pytest.mark.parametrize(
    ("word", "package"),
    [("hydra/launcher=ray", "ray"), ("hydra/launcher=submitit_slurm", "submitit"), ("logger=wandb", "wandb")],
)
def test_a_package_that_is_not_there_is_named_without_torch(word: str, package: str) -> None:
    said, _, refusal = python(f"import sys; sys.modules[{package!r}] = None\n{WRONG}", word, *SHORT).partition("\n")
    assert (said.split()[0], said.split()[2:]) == ("2", [])
    assert f"{word} needs the package {package}" in refusal


@pytest.mark.parametrize("words", [["method=snapkv"], ["-m", "method=snapkv,quest"]], ids=" ".join)
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_used_is_refused_without_torch(words: list[str], place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said, _, refusal = python(WRONG, *words, *SHORT, f"out={tmp_path / place}").partition("\n")
    code, seconds, *imported = said.split()
    assert (code, imported) == ("2", [])
    assert f"{tmp_path / place} cannot be used" in refusal and refusal.endswith("out=DIR\n")
    assert float(seconds) < MOST_CPU_SECONDS


def test_a_folder_of_another_run_is_refused_without_the_model(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "checkpoint")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    said, _, refusal = python(WRONG, f"model={model}", *SHORT, f"out={tmp_path / 'run'}").partition("\n")
    assert said.split()[0] == "2" and "transformers" not in said
    assert "is not empty and is no folder of a run" in refusal


def test_finished_work_is_found_without_the_model(tmp_path: Path) -> None:
    words = ["-m", "method=full,snapkv", "ratio=0.2,0.3", f"model={save_tiny(tmp_path / 'checkpoint')}", *SHORT]
    words.append(f"out={tmp_path / 'runs'}")
    first, again = warm.python("-c", WRONG, *words).stdout.decode().splitlines(), printed(*words)
    assert again[-1].split()[0] == "0" and "transformers" not in again[-1]
    assert again[:-1] == first[:-1]


def printed(*words: str) -> list[str]:
    """What a command printed on standard output, and behind it what `WRONG` says of it."""
    done = subprocess.run([sys.executable, "-c", WRONG, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
