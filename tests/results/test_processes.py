import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.results import Holder, read_samples
from kvbench.tests.results.made_rows import ROOT, contents, open_folder, run


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process in the repository's root that has the names of made_rows.py."""
    head = "import os, signal, sys, time\nfrom kvbench.tests.results.made_rows import *\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for 30 seconds"
        time.sleep(0.002)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_run_that_is_killed_again_and_again_ends_the_same(tmp_path: Path) -> None:
    n = 60
    run(tmp_path / "whole", n)
    stopped, draw = tmp_path / "stopped", random.Random(0)
    samples = stopped / "samples.jsonl"
    for _ in range(4):
        process = start(f"run(Path(sys.argv[1]), {n}, pause_s=0.002)", stopped)
        before = size(samples)
        wait_until(lambda before=before: size(samples) > before)
        time.sleep(draw.uniform(0, 0.04))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.communicate() == ("", None)
        assert not (stopped / "result.json").exists()
    run(stopped, n)
    assert contents(stopped) == contents(tmp_path / "whole")


KILL_AT_EACH_STEP = """
import itertools, kvbench.results, pyarrow.parquet
base = Path(sys.argv[1])
run(base / "whole", 2)  # imports everything that is imported late

def in_child(path, n_steps):
    # Runs in a fork that is killed just before its n-th file operation below `path`.
    if (pid := os.fork()) == 0:
        left = itertools.count(n_steps, -1)
        def hook(event, arguments):
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.mkdir"):
                if str(arguments[0]).startswith(str(path)) and next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        run(path, 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for n_steps in itertools.count():
    path = base / str(n_steps)
    path.mkdir()
    if (status := in_child(path, n_steps)) == 0:
        break
    assert status == -signal.SIGKILL
    in_child(path, n_steps // 2)  # stopped a second time, somewhere else
    run(path, 2)
    assert contents(path) == contents(base / "whole"), (n_steps, list(contents(path)))
print(n_steps)
"""


def test_a_kill_before_any_file_operation_changes_nothing(tmp_path: Path) -> None:
    process = start(KILL_AT_EACH_STEP, tmp_path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert int(out) > 30  # it did stop at the operations of opening, appending and finishing


def test_two_processes_at_once_repeat_and_lose_nothing(tmp_path: Path) -> None:
    run(tmp_path / "whole", 20)
    code = "run(Path(sys.argv[1]), 20, pause_s=0.002)"
    both = [start(code, tmp_path / "run") for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    said: list[Holder] = []
    path = tmp_path / "run"
    holding = "folder = open_folder(Path(sys.argv[1])); folder.append(ok_row(0), ledger_of(0))"
    first = start(f"{holding}; print('held', flush=True); sys.stdin.read()", path)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    second = Thread(target=run, args=(path,), kwargs={"on_wait": said.append})
    second.start()
    wait_until(lambda: bool(said))
    assert said[0].pid == first.pid and str(first.pid) in str(said[0])
    time.sleep(0.3)  # longer than the lock is asked for again
    assert len(read_samples(path)) == 1
    first.kill()
    first.communicate()
    second.join(timeout=30)
    run(tmp_path / "whole")
    assert contents(path) == contents(tmp_path / "whole")


def test_a_process_that_does_not_wait_names_the_holder(tmp_path: Path) -> None:
    process = start("folder = open_folder(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)", tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"{tmp_path} is in use by process {process.pid} on"):
            open_folder(tmp_path, wait=False)
    finally:
        process.kill()
        process.communicate()
    with open_folder(tmp_path, wait=False):  # a killed holder holds nothing
        pass


def test_a_command_that_uses_a_folder_twice_is_told_so(tmp_path: Path) -> None:
    with open_folder(tmp_path), pytest.raises(ConfigError, match="in use twice by this command"):
        open_folder(tmp_path)
