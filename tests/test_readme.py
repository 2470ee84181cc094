"""What the README and the docs promise: their commands compose and their files exist.

Their example of a method is tested in tests/evals/test_outside.py.
"""

import re
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from evals.overrides import check_overrides
from evals.screen.dry import asked
from evals.settings import settings
from results.names import STAND_INS
from tests.tiny_run import example_file

ROOT = Path(__file__).resolve().parents[1]


def tasks_of(command: str) -> list[str]:
    """The tasks that a command line names."""
    return [name for words in re.findall(r" task=(\S+)", command) for name in words.split(",")]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "runs" / "README.md"]
COMMANDS = sorted({
    line.strip().split("#")[0].strip()
    for page in PAGES
    for line in page.read_text().splitlines()
    if line.strip().startswith("python run.py")
})  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_docs_composes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"path/to/(\w+)\.py", command):
        example_file(tmp_path / "path" / "to", name)
    monkeypatch.chdir(tmp_path)
    words = check_overrides(asked(command.replace("…", "DATA").split()[2:])[0])
    first = [re.sub(r"=([^,\[]*),.*", r"=\1", word) for word in words if word != "-m"]  # a sweep's first cell
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", first, return_hydra_config=True)
    settings(cfg, cfg.hydra.runtime.choices)


@pytest.mark.parametrize("command", [line for line in COMMANDS if set(tasks_of(line)) & STAND_INS.keys()])
def test_a_benchmark_in_a_command_says_where_its_rows_come_from(command: str) -> None:
    assert re.search(r"task\.source=|task\.path=|data_dir=", command)  # without, it would be refused on most machines


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_and_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"python -m ([a-z_.]+[a-z])", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
    rooms = "benchmarks|conf|engine|evals|kernels|methods|plots|results|tasks|tests"
    for file in re.findall(rf"`((?:{rooms})/[\w/.]+\.\w+)`", text):
        assert (ROOT / file).exists() or "NAME" in file, file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "benchmarks").glob("*.py"))], ids=lambda page: page.name)
def test_a_file_in_a_folder_is_started_as_a_module(page: Path) -> None:
    # `python FOLDER/FILE.py` looks for our packages in FOLDER.
    assert not re.findall(r"python [a-z_]+/[\w/]+\.py", page.read_text())


def targets_of(text: str) -> set[str]:
    return {name for words in re.findall(r"\bmake((?: [a-z-]+)+)", text) for name in words.split()}


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text())) <= targets


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
