"""What the README and the docs promise: their commands compose and their files exist.

Their example of a method is tested in tests/evals/test_outside.py.
"""

import re
import subprocess
from pathlib import Path

import pytest
from hydra import compose

from kvbench.evals.composing import composing
from kvbench.evals.overrides import check_overrides
from kvbench.evals.screen import room
from kvbench.evals.screen.check import refuse_others
from kvbench.evals.screen.dry import asked
from kvbench.evals.settings import settings
from kvbench.evals.studies import hardware
from kvbench.results.names import STAND_INS
from kvbench.tests.tiny_run import example_file, example_task

ROOT = Path(__file__).resolve().parents[1]


def tasks_of(command: str) -> list[str]:
    """The tasks that a command line names."""
    return [name for words in re.findall(r" task=(\S+)", command) for name in words.split(",")]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "runs" / "README.md"]


def commands(text: str) -> set[str]:
    """Runs that a page shows, but for those of the package that it tells how to write: tests/evals/test_plugins.py."""
    brought = {f"={name}" for name in re.findall(r'^(\w+) = "[\w.]+:\w+"$', text, re.MULTILINE)}
    lines = (line.strip().split("#")[0].strip() for line in text.splitlines())
    asked = {line for line in lines if line.startswith(("python run.py", "kvbench run "))}
    return {line for line in asked if not any(name in line.replace(",", "=") for name in brought)}


COMMANDS = sorted({line for page in PAGES for line in commands(page.read_text())})


assert len(COMMANDS) > 60


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_docs_composes(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"method=\S*path/to/(\w+)\.py", line):
        example_file(tmp_path / "path" / "to", name)
    example_task(tmp_path / "path" / "to")
    monkeypatch.chdir(tmp_path)
    given = line.replace("…", "DATA").split()[2:]
    if "--check" in given:
        given.remove("--check")
        refuse_others(given)
        given = ["method=full", *room.asked(given)[1]]  # as the screen looks the model up
    words = check_overrides(asked(given)[0])
    first = [re.sub(r"=([^,\[]*),.*", r"=\1", word) for word in words if word != "-m"]  # a sweep's first cell
    with composing(ROOT / "conf"):
        cfg = compose("config", first, return_hydra_config=True)
    settings(cfg, cfg.hydra.runtime.choices)


@pytest.mark.parametrize("command", [line for line in COMMANDS if set(tasks_of(line)) & STAND_INS.keys()])
def test_a_benchmark_in_a_command_says_where_its_rows_come_from(command: str) -> None:
    assert re.search(r"task\.source=|task\.path=|data_dir=", command)  # without, it would be refused on most machines


def test_a_file_in_a_folder_is_started_as_a_module() -> None:
    for page in (*PAGES, *(ROOT / "benchmarks").glob("*.py")):  # `python FOLDER/FILE.py` looks for our packages there
        assert not re.findall(r"python [a-z_]+/[\w/]+\.py", page.read_text()), page


MADE = {file.name.removesuffix(".j2") for file in (ROOT / "plots" / "pages").glob("*.md.j2")}


@pytest.mark.parametrize(
    "page", [page for page in (ROOT / "docs").glob("*.md") if page.name not in MADE], ids=lambda page: page.name
)
def test_only_pages_that_are_made_from_kept_scores_print_intervals(page: Path) -> None:
    """Those of the others were typed in: of 5 to 15 samples, and under a second budget that no title named."""
    assert not re.findall(r"^\|.*\([-+]?[\d.]+ to [-+]?[\d.]+\)", page.read_text(), re.MULTILINE)


def test_costs_of_a_cpu_are_headed_so_and_a_gpus_are_as_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    """0.55 to 0.69 of full attention is a CPU's step: a GPU's reader took it home."""
    text = (ROOT / "docs" / "cost.md").read_text()
    heading, _, part = text.partition("## A step on a CPU")[2].partition("\n")
    part = part.partition("\n## ")[0]
    assert heading == ", and one on a GPU" and "*simulated*" in part
    (command,) = re.findall(r"python -m kvbench.evals.studies.hardware (.+--memory 1/8)\n", text)
    assert hardware.main(command.split()) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines() if "  " in line.strip()]
    heads = next(line for line in lines if "TPOT ms" in line)
    steps = [float(line[heads.index("TPOT ms")]) for line in lines if {"Full", "PQCache"} & {*line}]
    full, pqcache = steps
    assert full < pqcache and f"{pqcache:.1f} ms against {full:.1f}" in " ".join(part.split())


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 6_000


def targets_of(text: str) -> set[str]:
    return {name for words in re.findall(r"\bmake((?: [a-z-]+)+)", text) for name in words.split()}


def test_a_container_and_a_slurm_job_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    script = ROOT / "benchmarks" / "gpu" / "sweep.sbatch"
    run = re.findall(r"^RUN (.*make.*)$|^CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    asked = [targets_of(" ".join(re.findall(r"[\w-]+", "".join(line)))) for line in run]
    assert asked == [{"setup", "setup-gpu"}, {"check"}] and set.union(*asked) <= targets
    assert targets_of(script.read_text()) == {"check"}
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_the_spine_is_read_in_an_hour() -> None:
    text = (ROOT / "README.md").read_text()
    spine, said = re.search(r"## The spine(.+?): ([\d,]+) lines", text, re.DOTALL).groups()  # type: ignore[union-attr]
    files = re.findall(r"`([\w/.]+\.py)`", spine)
    assert len(files) >= 6
    n = sum((ROOT / file).read_text().count("\n") for file in files)
    assert n <= 1_900 and abs(n - int(said.replace(",", ""))) <= 100


def patterns_of(file: str) -> set[str]:
    """What a file of patterns leaves out, without the signs of its syntax."""
    lines = (ROOT / file).read_text().split()
    return {line.removeprefix("**/").strip("/") for line in lines if not line.startswith(("#", "!"))}


def test_what_a_command_writes_by_default_is_no_part_of_the_repository() -> None:
    sources = [file.read_text() for room in ("plots", "evals", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    outs = re.findall(r'"--out",[^)]*default=Path\("([^"]+)"\)|(?<=, )"(outputs/\w+)"', "\n".join(sources))
    folders = {(given or page).partition("/")[0] for given, page in outs} - {"docs"}  # whose pages are kept
    assert {"site", "outputs"} <= folders
    assert folders <= patterns_of(".gitignore")


def test_a_container_gets_nothing_that_git_ignores() -> None:
    assert patterns_of(".gitignore") <= patterns_of(".dockerignore")
