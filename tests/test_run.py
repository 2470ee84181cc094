"""run.py as its users meet it: what it says, with which exit code, and what it hands to the runner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.evals.settings import Settings
from kvbench.results import RunResult
from kvbench.run import Terminated, main

RUN = Path(__file__).resolve().parents[1] / "run.py"


def result_of(cell: Settings, **changes: Any) -> RunResult:
    """What a runner would say of this cell; what is not named was not measured."""
    named = {"schema_version", "notes", "prefill", "prefill_params", "simulated", "sampling", "n_failed", "adapts"}
    facts: dict[str, Any] = {field.name: None for field in fields(RunResult) if field.name not in named}
    facts |= {"method": cell.method.name, "method_label": cell.method.name.title(), "params": {}}
    facts |= {"task": cell.task.name, "task_version": 1, "dataset": "d", "data_source": "embedded"}
    facts |= {"model": cell.model.name, "compressed_layers": [0], "dtype": "float32", "device": "cpu"}
    facts |= {"seed": 0, "ratio_exact": "0.2", "comm_exact": "1/64", "protocol": cell.scope}
    facts |= {"config_hash": "0123456789", "versions": {}, "peak_rss_bytes": 1, "status": "ok"}
    facts |= {"n_samples": 4, "n_oom": 0, "score": 0.5, "score_ci95": [0.25, 0.75], "comm": 0.1}
    facts |= {"tokens_budget_mean": 200.5, "tokens_attended_mean": 123.4, "prefill_s": 1.2}
    facts |= {"bytes_resident_device": 2e6, "bytes_moved_kv_per_step": 1.5e6, "tpot_s": 0.01}
    return RunResult(**facts | changes)


STOPPED = "run.py: stopped; the same command goes on from here\n"
WAITING = """
import sys, threading, time
from types import ModuleType
from kvbench import run

def run_cells(cells):
    threading.Thread(target=time.sleep, args=(60,)).start()  # as clustering beside a prefill
    print("running", flush=True)
    time.sleep(60)

sys.modules["kvbench.evals.runner"] = ModuleType("kvbench.evals.runner")
sys.modules["kvbench.evals.runner"].run_cells = run_cells
run.stop_at_signals()
sys.exit(run.main(["-m", "ratio=0.1,0.2"]))
"""
Runner = Callable[[list[Settings]], list[tuple[Path, RunResult]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[Settings]]:
    """A runner in place of ours that notes what it is given; no model is loaded."""
    calls: list[list[Settings]] = []

    def run_cells(cells: list[Settings]) -> list[tuple[Path, RunResult]]:
        calls.append(cells)
        return [(Path("runs") / cell.method.name, result_of(cell)) for cell in cells]

    replace_runner(monkeypatch, run_cells)
    return calls


def replace_runner(monkeypatch: pytest.MonkeyPatch, run_cells: Runner) -> None:
    module = ModuleType("kvbench.evals.runner")
    module.__dict__["run_cells"] = run_cells
    monkeypatch.setitem(sys.modules, "kvbench.evals.runner", module)
    monkeypatch.setattr(sys, "argv", ["run.py"])  # main rewrites it for Hydra
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # and sets this; both are put back


def code(*argv: str) -> int:
    """The exit code of this command line."""
    try:
        return main(list(argv))
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


# --- in a shell of its own ---


def test_help_answers_at_once_without_torch_and_hydra_and_lists_what_there_is() -> None:
    code = "import sys; from kvbench import run; run.main(['--help']); assert not {'torch', 'hydra'} & {*sys.modules}"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=RUN.parent, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode == 0
    assert done.stderr == ""
    for word in ("oracle", "needle", "smollm2-135m", "ratio:", "budget:", "-m", "examples"):
        assert word in done.stdout
    assert seconds < 2


def test_wrong_input_is_one_line_on_stderr_and_code_2() -> None:
    done = subprocess.run([sys.executable, RUN, "rato=0.2"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("run.py: no key 'rato'; did you mean 'ratio'?") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_process_leaves_no_file_and_no_traceback(number: signal.Signals, tmp_path: Path) -> None:
    """A thread of it goes on, so that the interpreter waits; the second signal ends that."""
    made = {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(RUN.parent)}
    (tmp_path / "tmp").mkdir()
    running = subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=tmp_path, env=os.environ | made,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None and running.stderr is not None
    assert running.stdout.readline() == "running\n"
    running.send_signal(number)
    if number == signal.SIGKILL:
        assert running.wait(30) == -number
    else:
        assert running.stderr.readline() == STOPPED
        running.send_signal(number)
        assert running.wait(30) == -number
    assert running.stderr.read() == ""
    running.stdout.close()
    running.stderr.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list((tmp_path / "tmp").glob("kvbench-*")) == []


# --- in this process ---


@pytest.mark.parametrize(
    "argv",
    [
        *(["method=snapvk"], ["method.agz=1"], ["task.lenghts=[1]"], ["model=lama"], ["foo"]),
        *(["ratio=0"], ["ratio=1.5"], ["ratio=abc"], ["ratio=0.1", "budget=5"], ["budget=0"]),
        *(["comm=-1"], ["limit=0"], ["seed=-1"], ["dtype=foo"], ["device=foo"], ["kernels=foo"]),
        *(["compression_scope=foo"], ["ratio=0.1,0.2"], ["--multrun"], ["model=any"]),
        *(["ratio=${foo}"], ["ratio=${"], ["~seed"], ["+ratio=1"], ["hydra.foo=1"], ["+method=full"]),
        *(["hydra/launcher=foo"], ["-m", "method=oracle", "ratio=0.1,2"]),
        *(["-m", "ratio=0.1,0"], ["-m", "method=full,foo"], ["-m", "ratio=interval(0,1)"]),
    ],
    ids=" ".join,
)
def test_no_runner_is_called_for_wrong_input(
    argv: list[str], calls: list[list[Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code(*argv) == 2
    shown = capsys.readouterr()
    assert calls == []
    assert shown.out == ""
    assert shown.err.startswith("run.py: ")
    assert shown.err.count("\n") == 1


def test_no_arguments_print_the_examples_and_run_nothing(
    calls: list[list[Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code() == 0
    said = capsys.readouterr().out
    assert calls == []
    assert "python run.py method=oracle task=needle ratio=0.2" in said and "python run.py --help" in said
    assert len(said.splitlines()) < 12


def test_examples_stand_first_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("--help") == 0
    said = capsys.readouterr().out
    assert said.index("\nexamples\n") < said.index("\nusage\n") < said.index("\ngroups\n")


def test_what_is_not_said_is_as_in_the_defaults(calls: list[list[Settings]]) -> None:
    assert code("seed=0") == 0
    ((cell,),) = calls
    assert (cell.method.name, cell.task.name, cell.is_sweep) == ("oracle", "needle", False)


def test_a_sweep_is_handed_over_whole(calls: list[list[Settings]]) -> None:
    assert code("-m", "method=full,oracle", "ratio=0.1,0.2", "out=x") == 0
    (cells,) = calls
    assert [(cell.method.name, str(cell.budget.ratio)) for cell in cells] == [
        *(("full", "1/10"), ("full", "1/5"), ("oracle", "1/10"), ("oracle", "1/5"))
    ]
    assert all(cell.is_sweep and cell.out == Path("x") for cell in cells)


def test_hydras_own_launcher_runs_cell_by_cell(calls: list[list[Settings]]) -> None:
    assert code("-m", "hydra/launcher=basic", "ratio=0.1,0.2") == 0
    assert [len(cells) for cells in calls] == [1, 1]


def test_a_model_needs_no_file(calls: list[list[Settings]]) -> None:
    assert code("model=org/Some-1B") == 0
    assert (calls[0][0].model.name, calls[0][0].model.id) == ("some-1b", "org/Some-1B")


@pytest.mark.usefixtures("calls")
def test_hydra_leaves_nothing_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert code("ratio=0.1") == 0
    assert code("-m", "ratio=0.1,0.2") == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("calls")
def test_the_table_shows_the_score_beside_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("method=oracle") == 0
    shown = capsys.readouterr().out
    for word in (
        *("Oracle", "needle d (embedded data)", "ratio 0.2", "comm 1/64", "50.0", "too few to compare"),
        *("123.4", "200.5", "1,500", "2.0", "1.20", "0.010", "runs/oracle"),
    ):
        assert word in shown


def test_printing_a_configuration_runs_nothing(calls: list[list[Settings]], capsys: pytest.CaptureFixture[str]) -> None:
    assert code("--cfg", "job", "method=full") == 0
    assert calls == []
    assert "_target_: kvbench.methods.full.Full" in capsys.readouterr().out


def test_out_of_memory_is_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    oom = {"status": "oom", "n_oom": 4, "n_samples": 0, "score": None, "score_ci95": None}
    replace_runner(monkeypatch, lambda cells: [(Path("x"), result_of(cells[0], **oom))])
    assert code("method=oracle") == 1
    assert "Oracle (out of memory)" in capsys.readouterr().out


def test_what_the_runner_refuses_is_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_cells(cells: list[Settings]) -> Any:
        raise ConfigError("the model's window is too short")

    replace_runner(monkeypatch, run_cells)
    for argv in (["ratio=0.1"], ["-m", "ratio=0.1,0.2"]):
        assert code(*argv) == 2
        assert capsys.readouterr().err == "run.py: the model's window is too short\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cells(cells: list[Settings]) -> Any:
        raise ZeroDivisionError

    replace_runner(monkeypatch, run_cells)
    with pytest.raises(ZeroDivisionError):
        code("ratio=0.1")


@pytest.mark.parametrize(("stop", "ends"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_stopped_run_says_that_it_can_go_on(
    stop: type[BaseException], ends: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_cells(cells: list[Settings]) -> Any:
        raise stop

    replace_runner(monkeypatch, run_cells)
    for argv in (["ratio=0.1"], ["-m", "ratio=0.1,0.2"]):
        assert code(*argv) == ends
        assert capsys.readouterr().err == STOPPED


def test_a_sentence_repeats_no_endless_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("method=" + "a" * 9_000) == 2
    assert len(capsys.readouterr().err) < 2_000


def test_a_python_without_the_dependencies_is_told_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hydra.errors", None)
    assert main(["method=full"]) == 2
    said = capsys.readouterr().err
    assert said == f"run.py: {sys.executable} has no hydra.errors; `make setup`, then `. .venv/bin/activate`\n"
