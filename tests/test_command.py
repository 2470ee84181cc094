"""`kvbench WORD …`: every word leads to its command, a wrong one to its near miss, and help answers at once."""

import os
import shutil
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest

from kvbench import command
from kvbench.plots.site import view
from kvbench.tests.plots.made_runs import write

ROOT = Path(__file__).resolve().parents[1]
KVBENCH = [sys.executable, "-m", "kvbench"]
MOST_CPU_SECONDS = 0.4


def test_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == command.main([]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()[: len(said.splitlines()) // 2]
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    for word in command.WORDS:
        assert any(line.startswith(f"  {word} ") for line in lines)


def test_help_answers_at_once_and_loads_next_to_nothing() -> None:
    code = "import sys; from kvbench.command import main; main(['--help'])\nimport resource\n"
    code += "used = resource.getrusage(resource.RUSAGE_SELF)\n"
    code += (
        "print(used.ru_utime + used.ru_stime, *sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, *modules = done.stderr.split()
    assert float(seconds) < MOST_CPU_SECONDS
    assert not {"torch", "hydra", "pandas", "numpy", "yaml", "rich"} & {*modules}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tabel"], "no command 'tabel'; did you mean 'table'?"),
        (["zzz"], "no command 'zzz'; it is one of run, check, ls"),
        (["method=snapkv"], "runs start with `kvbench run`: kvbench run method=snapkv"),
        (["methods"], "did you mean `kvbench ls methods`?"),
        (["-m"], "runs start with `kvbench run`"),
        (["completion", "csh"], "give one of bash, zsh, fish"),
        (["run", "method=snapkvv"], "kvbench: no method 'snapkvv'; did you mean 'snapkv'"),
        (["ls", "metods"], "no list 'metods'; did you mean 'methods' or 'models'?"),
        (["view", "nowhere"], "nowhere holds no finished run"),
    ],
)
def test_wrong_words_are_a_sentence_and_exit_code_2(words: list[str], said: str) -> None:
    done = subprocess.run([*KVBENCH, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and "run.py" not in done.stderr


HELPS = """
import sys
from kvbench.command import main
words, sys.argv[:] = sys.argv[1:], ["/bin/kvbench"]
for word in words:
    print("----", word)
    try:
        assert main([word, "--help"]) == 0
    except SystemExit as end:
        assert not end.code, word
"""


def test_every_word_has_its_own_help() -> None:
    """In one process, as each alone would import torch."""
    words = [word for word, (_, _, module) in command.WORDS.items() if module]
    done = subprocess.run([sys.executable, "-c", HELPS, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    helps = done.stdout.split("---- ")[1:]
    assert [text.split()[0] for text in helps] == words
    for word, text in zip(words, helps, strict=True):
        assert f"kvbench {word}" in text and "run.py" not in text


def test_run_py_and_kvbench_run_say_the_same_with_their_own_names() -> None:
    one = subprocess.run([sys.executable, "run.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    other = subprocess.run([*KVBENCH, "run", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert other.stdout == one.stdout.replace("python run.py", "kvbench run")
    assert "python run.py" in one.stdout


def test_lists_are_those_of_conf() -> None:
    done = subprocess.run([*KVBENCH, "ls", "experiments"], cwd=ROOT, capture_output=True, text=True, check=True)
    for file in (ROOT / "conf" / "experiment").glob("*.yaml"):
        assert f"{file.stem} " in done.stdout


def completed(*words: str) -> list[str]:
    return [*command.completions(words)]


def test_completion_knows_words_groups_keys_and_names() -> None:
    assert completed("ver") == ["verify "]
    assert "method=" in completed("run", "me") and "memory=" in completed("run", "me")
    assert "method=full,snapkv" in completed("run", "-m", "method=full,sna")
    assert completed("run", "task=needle") == [f"task={name}" for name in command.names("task") if "needle" in name[:6]]
    assert completed("ls", "e") == ["experiments"]
    assert completed("table", "ru") == []


ASKED = {  # how each shell completes `kvbench run method=snapkv_p`
    "bash": 'eval "$(kvbench completion bash)"; COMP_WORDS=(kvbench run method=snapkv_p); COMP_CWORD=2; _kvbench; '
    'echo "${COMPREPLY[@]}"',
    "zsh": 'autoload -Uz compinit; compinit -u -D; eval "$(kvbench completion zsh)"; compadd() { print -r -- $found }; '
    "words=(kvbench run method=snapkv_p); CURRENT=3; _kvbench",
    "fish": "kvbench completion fish | source; complete -C 'kvbench run method=snapkv_p'",
}


@pytest.mark.parametrize("shell", ASKED)
def test_shells_complete(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    program = tmp_path / "kvbench"
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m kvbench "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run([shell, "-c", ASKED[shell]], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["method=snapkv_paper"]


def test_the_page_that_is_viewed_is_made_anew_and_nothing_else_is_served(tmp_path: Path) -> None:
    write(tmp_path, "full", "needle", [{}])
    server = view.serving(tmp_path, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = int(server.server_address[1])

        def get(path: str, host: str = f"127.0.0.1:{port}") -> tuple[int, bytes]:
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read()

        status, text = get("/")
        assert status == 200 and text.startswith(b"<!doctype html>")
        assert get("/result.json")[0] == get("/../etc/passwd")[0] == get("/", "evil.example:80")[0] == 404
        write(tmp_path, "snapkv", "needle", [{}])
        assert len(get("/")[1]) > len(text)
        assert [path.name for path in tmp_path.glob("*.html")] == []
    finally:
        server.shutdown()
        server.server_close()
