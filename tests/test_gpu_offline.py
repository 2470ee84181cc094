"""The kit for a GPU machine without network: jobs that end in every way, what is brought, and the parts' names."""

import csv
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvbench.benchmarks.gpu import ops, serving
from kvbench.benchmarks.gpu.facts import main as facts
from kvbench.benchmarks.gpu.offline import pack, parts
from kvbench.benchmarks.gpu.offline.__main__ import main, merge, unpack
from kvbench.benchmarks.gpu.offline.jobs import Job, Jobs
from kvbench.benchmarks.gpu.steps import main as steps

ROOT = Path(__file__).resolve().parents[1]
WAYS = {  # what a job runs, and its verdict
    "good": ("print('fine')", "ok"),
    "wrong": ("import sys; print('Full: WRONG'); sys.exit(1)", "failed: exit code 1"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "crashed: SIGSEGV"),
    "hangs": ("import time\ndef stuck():\n    time.sleep(60)\nstuck()", "timed out after 1 s"),
    "deaf": (
        "import faulthandler, signal, time; faulthandler.disable(); signal.signal(6, signal.SIG_IGN); time.sleep(60)",
        "timed out after 1 s",
    ),
}


def test_a_job_that_fails_hangs_or_crashes_ends_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    monkeypatch.setattr("kvbench.benchmarks.gpu.offline.jobs.GRACE", 0.5)
    said = list[str]()
    jobs = Jobs(tmp_path, 60, said.append, lambda job: None)
    todo = [Job("ways", name, [sys.executable, "-c", code], 1) for name, (code, _) in WAYS.items()]
    for job in todo[:3]:
        job.seconds = 30
    jobs.run([*todo, Job("ways", "missing", ["/no/such/program"], 1)], 3)
    verdicts = {job.name: job.verdict for job in jobs.done}
    assert verdicts == {name: verdict for name, (_, verdict) in WAYS.items()} | {
        "missing": "failed: No such file or directory"
    }
    summary = (tmp_path / "summary.txt").read_text()
    assert "1 of 6 ok" in summary and "hangs: timed out" in summary and "good:" not in summary
    assert "in stuck" in (tmp_path / "logs" / "ways-hangs.log").read_text(), "no stack of what hung"
    assert any("Full: WRONG" in line for line in said)


def test_a_jobs_children_end_with_it(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(alive)!r}).touch()"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    Jobs(tmp_path, 60, lambda _: None, lambda _: None).run([Job("a", "parent", [sys.executable, "-c", code], 30)], 1)
    time.sleep(4)
    assert not alive.exists()


def test_the_limit_of_all_is_kept(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, 6, lambda _: None, lambda _: None)
    start = time.monotonic()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    jobs.run([Job("a", "first", sleep, 60), Job("a", "second", sleep, 60)], 1)
    assert time.monotonic() - start < 20
    assert [job.verdict for job in jobs.done] == ["cut off by --limit", "not started: no time is left of --limit"]


def test_what_is_stopped_says_what_it_did_not_run(tmp_path: Path) -> None:
    def stop(job: Job) -> None:
        if job.name == "one":
            raise KeyboardInterrupt

    jobs = Jobs(tmp_path, 60, lambda _: None, stop)
    with pytest.raises(KeyboardInterrupt):
        jobs.run([Job("a", name, [sys.executable, "-c", "pass"], 30) for name in ("one", "two")], 1)
    assert "two: not started" in (tmp_path / "summary.txt").read_text()


def test_rows_of_many_files_stand_in_one(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    for i, (what, ms) in enumerate((("a", "1"), ("b", "2"), ("a", "3"))):
        rows = tmp_path / f"{i}.csv"
        rows.write_text(f"what,shape,ms\n{what},x,{ms}\n")
        merge(Job("p", str(i), [], 1, rows=rows), path)
    with path.open(newline="") as file:
        assert [(row["what"], row["ms"]) for row in csv.DictReader(file)] == [("b", "2"), ("a", "3")]
    merge(Job("p", "none", [], 1, rows=tmp_path / "missing.csv"), path)


def test_only_what_is_lacking_is_brought(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("torch-9.9-py3-none-any", "nowhere_else-1.2-py3-none-any", "compiled-1.0-cp39-cp39-linux_x86_64"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}_kit/__init__.py", "")
    assert unpack(sorted(tmp_path.glob("*.whl")), tmp_path / "site") == ["nowhere_else 1.2"]
    assert [file.name for file in (tmp_path / "site").iterdir()] == ["nowhere_else_kit"]
    assert "for another Python" in capsys.readouterr().err


def test_the_parts_name_what_there_is() -> None:
    assert parts.OPS == ops.OPS and parts.RUNGS == (*serving.METHODS,)
    kernels = {file.stem for file in (ROOT / "tests" / "kernels").glob("test_*.py")}
    assert kernels >= parts.NEED_NO_GPU | {f"test_{name}" for name in parts.SANITIZED}
    assert {name for group in parts.USUAL for name in group.split("+")} <= parts.PARTS.keys()
    constraints = (ROOT / "constraints.txt").read_text()
    assert len(pack.pinned((*pack.PACKAGES, *pack.COMPILED), constraints)) == len(pack.PACKAGES) + len(pack.COMPILED)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_its_part_says_so_and_goes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert [job.name for job in parts.serving(parts.Plan(tmp_path, True, ()))] == ["vllm-is-not-installed"]
    assert serving.main(["dropping"]) == 0
    assert "vLLM is not installed here" in capsys.readouterr().out


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["facts+kernel"])
    assert ended.value.code == 2 and "no part kernel; there are facts" in capsys.readouterr().err


def test_facts_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "triton kernel" in said and "right" in said and "torch" in said


def test_steps_are_watched_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert steps(["--device", "cpu", "--small", "quest"]) == 0
    said = capsys.readouterr().out
    assert "ms a step" in said and "the host, by operator" in said
    assert steps(["--device", "cpu", "--small", "qeust"]) == 2
