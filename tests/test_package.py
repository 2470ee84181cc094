"""One package: what is ours is `kvbench.…` and goes by no other name, and a wheel has what it needs."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvbench import checkout

ROOT = Path(__file__).resolve().parents[1]
ROOMS = sorted(checkout.ROOMS)
STAND_IN = """\
class Meta(type):
    def __getattr__(kind, name):
        return kind()

class Anything(metaclass=Meta):  # a decorator that changes nothing, a flag, a repository
    def __init__(self, *values, **named):
        pass

    def __call__(self, first=None, *values, **named):
        return first

    def __or__(self, other):
        return self

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
"""
MOST_SECONDS = 0.2  # of `import kvbench`


def python(code: str, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_room_has_a_link_and_every_link_a_room() -> None:
    own = {name.split("/")[0] for name in tracked() if name.endswith(".py") and "/" in name}
    assert own - {"kvbench", "hydra_plugins"} | {"conf", "run"} == {*ROOMS}
    for name in {*ROOMS} - {"run"}:
        assert (ROOT / "kvbench" / name).readlink() == Path("..", name)
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"]
    assert {f"kvbench/{name}" for name in {*ROOMS} - {"run", "conf"}} <= {
        *checked
    }  # pyright looks into no link by itself


def test_nothing_of_ours_goes_by_another_name_with_the_checkout_as_working_directory() -> None:
    """Before anything of ours is imported (the .pth file of set-up does that), and behind it."""
    code = "import importlib.util as u, json, sys\n"
    code += "assert not [name for name in sys.modules if name.split('.')[0] == 'kvbench']\n"
    code += f"before = [n for n in {ROOMS} if u.find_spec(n)]\nimport kvbench\n"
    code += f"print(json.dumps([before, [n for n in {ROOMS} if u.find_spec(n)]]))"
    assert json.loads(python(code)) == [[], []]


def test_without_set_up_it_holds_once_kvbench_is_imported(tmp_path: Path) -> None:
    """`-S` leaves out .pth files; the folder is searched, and everything else in it is found."""
    code = f"import importlib.util as u, kvbench\nprint([n for n in [*{ROOMS}, 'hydra_plugins'] if u.find_spec(n)])"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['hydra_plugins']"
    other = tmp_path / "tasks.py"
    other.write_text("x = 1\n")
    assert python("import kvbench, tasks; print(tasks.__file__)", tmp_path).strip() == str(other)


def test_each_file_is_one_module() -> None:
    """All modules of ours that can be imported here, in one process, which also runs what imports them by name."""
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for room in ("engine", "evals", "kernels", "methods", "plots", "results", "tasks")
        for file in sorted((ROOT / room).rglob("*.py"))
        if file.stem != "__main__" and file.parent.name not in ("native", "frozen")
    ]
    code = "import importlib, json, os, sys\n"
    code += f"for name in {modules}:\n    importlib.import_module('kvbench.' + name)\n"
    code += "files = {}\n"
    code += "for name, module in [*sys.modules.items()]:\n"
    code += "    file = getattr(module, '__file__', None)\n"
    code += f"    own = file and os.path.isabs(file) and os.path.realpath(file).startswith({str(ROOT)!r} + os.sep)\n"
    code += "    if own and '.venv' not in file:\n"
    code += "        files.setdefault(os.path.realpath(file), set()).add(name)\n"
    code += "print(json.dumps([len(files), {f: sorted(n) for f, n in files.items() if len(n) > 1},\n"
    code += "    sorted(n for names in files.values() for n in names if not n.startswith('kvbench'))]))"
    n, twice, foreign = json.loads(python(code))
    assert n > 400
    assert twice == {} and foreign == []


def test_no_file_of_these_tests_is_a_module_twice() -> None:
    """In the process that runs them: a helper that is imported under two names has two of everything."""
    if not __name__.startswith("kvbench."):
        pytest.skip("pytest was given tests/…, and names its files so; `make test` gives kvbench/tests")
    files: dict[str, set[str]] = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(ROOT) and ".venv" not in file and name != "__main__":
            files.setdefault(os.path.realpath(file), set()).add(name)
    assert {file: names for file, names in files.items() if len(names) > 1} == {}


def test_hugging_faces_kernels_is_found_in_our_folders_place(tmp_path: Path) -> None:
    """transformers imports it where it is installed; here a stand-in of its name and version is."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    package = tmp_path / "site" / "kernels"
    facts = package.parent / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    for file in (package / "__init__.py", facts):
        file.parent.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    facts.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    code = "from transformers.utils.import_utils import is_kernels_available\nassert is_kernels_available()\n"
    code += "import kernels, kvbench.kernels\nprint(kernels.__file__, kvbench.kernels.__file__)"
    theirs, ours = python(code, PYTHONPATH=str(package.parent)).split()
    assert Path(theirs) == package / "__init__.py" and Path(ours).resolve() == ROOT / "kernels" / "__init__.py"
    words = ["method=snapkv", "task=needle", "task.source=embedded", "ratio=0.2", "limit=1", "task.lengths=[300]"]
    done = subprocess.run(
        [sys.executable, "run.py", *words, f"out={tmp_path / 'run'}"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(package.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").is_file()


def test_import_takes_no_time_and_loads_no_torch() -> None:
    code = "import sys, time\nbefore, start = {*sys.modules}, time.process_time()\nimport kvbench\n"
    code += "print(time.process_time() - start, *sorted({*sys.modules} - before))"
    seconds, *modules = python(code).split()
    assert float(seconds) < MOST_SECONDS
    assert not {"torch", "numpy", "pandas", "yaml", "hydra"} & {*modules}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without the network, with the setuptools that is here; from a copy, as building leaves much behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(copy)], check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


def tracked() -> list[str]:
    """Files of the checkout, new ones too, but for vectors and pages."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = (name for name in done.stdout.split("\n") if name and not name.startswith(("docs/", "tests/golden/")))
    return [name for name in names if (ROOT / name).exists() or (ROOT / name).is_symlink()]


def test_a_wheel_has_every_file_that_runs_read(wheel: Path) -> None:
    names = {*zipfile.ZipFile(wheel).namelist()}
    rooms = {*ROOMS} - {"run", "tests"}
    wanted = {f"kvbench/{name}" for name in tracked() if name.split("/")[0] in rooms}
    assert len(wanted) > 900 and wanted - names == set()
    assert "kvbench/tests/conformance.py" in names and "hydra_plugins/kvbench_launcher.py" in names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"kvbench", "hydra_plugins"}
    assert wheel.stat().st_size < 4e6


@pytest.mark.slow
def test_a_wheel_runs_outside_a_checkout(wheel: Path, tmp_path: Path) -> None:
    """Its files alone, with the packages that are here; runs/ comes into the working folder."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site)}

    def kvbench(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "kvbench", *words]
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)

    place = subprocess.run(
        [sys.executable, "-c", "import kvbench.methods.base as b; print(b.__file__)"], cwd=work, env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert place.stdout.startswith(str(site))
    words = ["method=snapkv", "task=needle", "task.source=embedded", "ratio=0.2", "limit=1", "task.lengths=[300]"]
    done = kvbench("run", *words)
    assert done.returncode == 0, done.stderr
    (folder,) = (work / "runs").glob("needle-snapkv-*")
    assert (folder / "result.json").is_file()
    table = kvbench("table")
    assert table.returncode == 0 and "SnapKV" in table.stdout, table.stderr
    wrong = kvbench("run", "method=snapkvv")
    assert wrong.returncode == 2 and "run.py" not in wrong.stderr
    check = kvbench("check")
    assert check.returncode == 0 and "make" not in check.stdout.split(), check.stdout


def test_the_package_says_where_it_is_installed_from() -> None:
    finder = sysconfig.get_path("purelib")
    assert Path(finder, "kvbench-rooms.pth").is_file(), "set-up has not run: make setup"


IMPORTED_AS = {
    "huggingface-hub": "huggingface_hub", "hydra-core": "hydra", "pyyaml": "yaml", "rouge-score": "rouge_score",
    "tree-sitter": "tree_sitter", "math-verify": "math_verify", "annotated-types": "annotated_types",
}  # fmt: skip


def test_what_is_asked_for_is_imported() -> None:
    """Of what every user gets, and of two extras: a package that nothing imports is weight."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {Requirement(line).name.lower().replace("_", "-") for line in project["dependencies"]}
    asked |= {Requirement(line).name for extra in ("wandb", "tasks") for line in extras[extra]}
    rooms = ("engine", "evals", "kernels", "methods", "plots", "results", "tasks")
    text = "\n".join(file.read_text() for room in rooms for file in (ROOT / room).rglob("*.py"))
    unused = set[str]()
    for name in asked:
        module = "tree_sitter" if name.startswith("tree-sitter-") else IMPORTED_AS.get(name, name)
        ways = rf"^ *(?:from|import) {module}\b", rf"(?:import_module|find_spec)\(f?[\"']{module}"
        if not any(re.search(way, text, re.MULTILINE) for way in ways):
            unused.add(name)
    assert unused == set()
