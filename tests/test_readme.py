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
from kvbench.results import interval
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


assert len(COMMANDS) > 80


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


@pytest.mark.parametrize("page", PAGES[:-1], ids=lambda page: page.name)
def test_no_page_has_numbers_under_intervals_of_an_older_rule(page: Path) -> None:
    """Four pages printed some 7,000 of them and called them too narrow."""
    text = page.read_text()
    words = " ".join(text.split())
    assert "from before [intervals.md]" not in words
    assert "Wilson" not in text or page.name == "intervals.md"
    if "It has no numbers now." in words:
        assert "|" not in text and "![" not in text and "    python -m kvbench.plots." in text


@pytest.mark.parametrize(
    ("page", "part", "n"),
    [("methods.md", "## Needle", 15), ("methods.md", "## Compressing before the question", 8),
     ("needle.md", "## Retrieving methods", 20)],
)  # fmt: skip
def test_intervals_of_hits_are_todays(page: str, part: str, n: int) -> None:
    text = (ROOT / "docs" / page).read_text().partition(part)[2].partition("\n## ")[0]
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|") and " of 15 " not in line)
    cells = re.findall(r"(?<![\d,.])(\d{1,3})(?: %)? \((\d+) to (\d+)\)", rows)
    assert len(cells) > 6
    for share, *ends in cells:
        hits = round(int(share) * n / 100)
        found = interval([1.0] * hits + [0.0] * (n - hits))
        assert found is not None and abs(100 * hits / n - int(share)) <= 0.5
        assert [round(100 * end) for end in (found.low, found.high)] == [*map(int, ends)], share


def test_costs_of_a_cpu_are_headed_so_and_a_gpus_are_as_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    """0.55 to 0.69 of full attention is a CPU's step: a GPU's reader took it home."""
    text = (ROOT / "docs" / "cost.md").read_text()
    heading, _, part = text.partition("## A step on a CPU")[2].partition("\n")
    part = part.partition("\n## ")[0]
    assert heading == ", and one on a GPU" and "*simulated*" in part
    (command,) = re.findall(r"python -m kvbench.evals.studies.hardware (.+)    # the 10.9 ms", text)
    assert hardware.main(command.split()) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines() if "  " in line.strip()]
    heads = next(line for line in lines if "TPOT ms" in line)
    steps = [float(line[heads.index("TPOT ms")]) for line in lines if {"Full", "PQCache"} & {*line}]
    full, pqcache = steps
    assert full < pqcache and f"{pqcache:.1f} ms against {full:.1f}" in " ".join(part.split())


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
