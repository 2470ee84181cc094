"""Methods and tasks of packages that are built and installed as anybody's are."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.evals import outside
from kvbench.evals.submission.settings import settings_of
from kvbench.evals.submit import main as submit
from kvbench.evals.verify import main as verify
from kvbench.plots.read import load
from kvbench.plots.site.origin import words
from kvbench.results import read_config, read_runs
from kvbench.results.names import ROOT
from kvbench.tests.tiny_run import example_file, example_task, save_tiny
from kvbench.tests.warm import python

PYPROJECT = """
[project]
name = "{name}"
version = "0.1"
[project.entry-points."kvbench.methods"]
{methods}
[tool.setuptools]
packages = ["{package}"]
"""
HALVES = '''
"""Halves (nobody, 2026): keep both ends of a prompt."""

from kvbench.engine.placement import Kept
from kvbench.methods.base import SelectiveAttention

from .share import SHARE


class Halves(SelectiveAttention):
    title, drops = "Halves", True

    def arrange(self, layer: int) -> Kept:
        n_first = int(self.budget.tokens * SHARE)
        return Kept(n_first, n_window=self.budget.tokens - n_first)
'''
PARTS = """
halves = "parts.halves:Halves"
no_class = "parts.share:SHARE"
"2nd name" = "parts.halves:Halves"
[project.entry-points."kvbench.tasks"]
silent = "parts.silent:Silent"
unmade = "parts.silent:Unmade"
"""
SILENT = '''
"""Tasks that say too little, and that take too little."""

from dataclasses import dataclass

from kvbench.tasks.base import Task


class Silent(Task):
    name, version, dataset = "silent", 1, "none"

    @dataclass(frozen=True)
    class Params:
        pass

    def __init__(self, params, data_dir, seed):
        pass

    def check(self, shape):
        pass

    def samples(self, tokenizer):
        return []


class Unmade(Silent):
    def __init__(self):
        pass
'''
BROKEN = '''
"""Where what it imports is missing."""

import nothing_of_the_kind
'''
MISSING = "line 3 of __init__.py: ModuleNotFoundError: No module named 'nothing_of_the_kind'; mend or uninstall it"
BROKEN_POINTS = 'broken = "broken:Broken"\nends = "broken.ends:Ends"\nnowhere = "broken"'
CLASH_POINTS = 'snapkv = "clash.method:X"\nsmallest_keys = "clash.method:X"'
# What a worker does with the settings that it is sent.
WORKER = """
import pickle, sys
from kvbench.engine.errors import ConfigError
from kvbench.evals.settings import load_class
try:
    print(load_class(pickle.loads(sys.stdin.buffer.read())).title)
except ConfigError as error:
    print(error)
"""
SENDER = """
import pickle, sys
from kvbench.evals.settings import from_words
sys.stdout.buffer.write(pickle.dumps(from_words(["method=halves"]).method))
"""
IMPORTS_NOTHING = """
import sys
from kvbench.evals import plugins
from kvbench.evals.settings import from_words
found = plugins.names("method")
from_words(["method=snapkv"])
print(len(found), *({"parts", "broken", "smallest_keys"} & sys.modules.keys()))
"""


@dataclass(frozen=True)
class Site:
    """A folder that packages are installed into."""

    folder: Path
    more: tuple[Path, ...] = ()

    def python(self, *words: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        where = os.pathsep.join(map(str, (self.folder, *self.more)))
        environment = os.environ | {"PYTHONPATH": where, "PYTHONDONTWRITEBYTECODE": "1"}
        return python(*words, env=environment, given=given)

    def kvbench(self, *words: str) -> tuple[int, str, str]:
        done = self.python("-m", "kvbench", *words)
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return done.returncode, done.stdout.decode(), done.stderr.decode()


@dataclass(frozen=True)
class Runs:
    """A sweep over plug-ins and a method of ours."""

    out: Path
    words: list[str]  # but for its methods
    table: str


def write(folder: Path, name: str, package: str, methods: str, **files: str) -> Path:
    for file, text in files.items():
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / f"{file}.py").write_text(text.lstrip())
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, package=package, methods=methods))
    return folder


def install(site: Path, packages: Sequence[Path]) -> Path:
    """Build each to a wheel and install it, from what is here alone."""
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    pip += ["--disable-pip-version-check", "--no-compile", "--target", str(site)]
    done = subprocess.run([*pip, *map(str, packages)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The package of the docs, one with a folder of modules, and one that fails in every way."""
    root = tmp_path_factory.mktemp("packages")
    docs = example_file(root / "docs").parent
    (toml,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "adding-a-method.md").read_text(), re.DOTALL)
    (docs / "pyproject.toml").write_text(toml)
    example_task(root / "task")["phone_book.py"].rename(docs / "phone_book.py")
    files = {"__init__": "", "halves": HALVES, "share": "SHARE = 0.5\n", "silent": SILENT}
    parts = write(root / "parts", "kvbench-parts", "parts", PARTS, **files)
    ends = "raise SystemExit(3)\n"
    broken = write(root / "broken", "kvbench-broken", "broken", BROKEN_POINTS, __init__=BROKEN, ends=ends)
    return Site(install(root / "site", [docs, parts, broken]))


@pytest.fixture(scope="module")
def clashing(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The same with a package beside it that has a name of its own and one of ours."""
    root = tmp_path_factory.mktemp("clash")
    clash = write(root / "clash", "kvbench-clash", "clash", CLASH_POINTS, __init__="", method="raise SystemExit(3)\n")
    return Site(site.folder, (install(root / "site", [clash]),))


@pytest.fixture(scope="module")
def runs(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    words = [f"model={save_tiny(root / 'tiny')}", "task=phone_book", "task.entries=20", "task.rows=2", "ratio=0.3"]
    words += ["dtype=float32", "device=cpu", f"out={root / 'out'}"]
    code, table, said = site.kvbench("run", "-m", "method=full,smallest_keys,halves", *words)
    assert code == 0, said
    return Runs(root / "out", words, table)


def test_a_method_and_a_task_of_packages_run_beside_ours(site: Site, runs: Runs) -> None:
    assert "Smallest keys (C)" in runs.table and "Halves (C)" in runs.table
    found = {result.method: (folder, result) for folder, result in read_runs(runs.out)}
    assert found.keys() == {"full", "smallest_keys", "halves"}
    folder, result = found["smallest_keys"]
    assert folder.name.startswith("phone_book-smallest_keys-tiny-")
    assert (result.task, result.dataset, result.params) == ("phone_book", "drawn", {"n_recent": 32})
    assert result.within_budget
    config = read_config(folder)
    for group in ("method", "task"):
        assert config[group]["package"] == "kvbench-smallest-keys==0.1"
        assert re.fullmatch("[0-9a-f]{16}", config[group]["digest"])
    assert config["task"]["params"] == {"entries": 20, "rows": 2}
    assert [*words(config)][:2] == ["method=smallest_keys", "method.n_recent=32"]  # of the command on the report's page
    (shown,) = [run for run in load(runs.out) if run.folder == folder]
    assert shown.file == {"package": f"kvbench-smallest-keys==0.1 {config['method']['digest'][:8]}"}
    with pytest.raises(ConfigError, match=r"its method is of the package 'kvbench-smallest-keys==0\.1', which is not"):
        settings_of(config)
    code, _, said = site.kvbench("run", "method=smallest_keys", "method.n_recent=0", *runs.words)
    assert code == 2 and "method.n_recent=0 is out of range" in said


def test_lists_have_plugins_and_name_those_that_cannot_be_asked(site: Site) -> None:
    code, listed, said = site.kvbench("ls", "methods")
    assert code == 0
    shown = " ".join(listed.partition("from installed packages")[2].split())
    assert "halves Halves (nobody, 2026): keep both ends of a prompt kvbench-parts==0.1" in shown
    assert "smallest_keys Smallest keys: keep the last tokens" in shown and "kvbench-smallest-keys==0.1" in shown
    lines = said.splitlines()
    assert len(lines) == 5
    for name, package, why in (
        ("broken", "broken", f"cannot be imported: {MISSING}"),
        ("ends", "broken", f"cannot be imported: {MISSING}"),
        ("nowhere", "broken", "has the entry point 'broken'; write package.module:Class there"),
        ("no_class", "parts", "is no class that inherits from SelectiveAttention"),
        ("2nd name", "parts", "has a name that no folder can have"),
    ):
        (line,) = [line for line in lines if line.startswith(f"method={name} of the package kvbench-{package}==0.1 ")]
        assert why in line
    code, listed, said = site.kvbench("ls", "tasks")
    assert code == 0 and "parts.silent:Unmade" in said and len(said.splitlines()) == 1
    assert "cannot be made (too many positional arguments); its __init__ takes (self, params, data_dir, seed)" in said
    shown = " ".join(listed.partition("\nphone_book ")[2].split())
    card = "one number of a list of names needs none prompts any · answers 12 tokens · licence CC0, drawn"
    assert shown.startswith(f"{card} package kvbench-smallest-keys==0.1 ")


WRONG = {
    "method=smalest_keys": "no method 'smalest_keys'; did you mean 'smallest_keys'",
    "task=phonebook": "no task 'phonebook'; did you mean 'phone_book'",
    "method=broken": f"method=broken of the package kvbench-broken==0.1 cannot be imported: {MISSING}",
    "method=no_class": "method=no_class of the package kvbench-parts==0.1 is no class that inherits from Selec",
    "task=silent": "task=silent has no data_source, which results print; see tasks/base.py",
    "method.n_recnt=3": "no method key 'n_recnt'; did you mean 'n_recent'?",
}


def test_what_is_wrong_is_a_sentence(site: Site) -> None:
    commands = [["method=smallest_keys" if "." in word else "ratio=0.2", word] for word in WRONG]
    done = site.python("-c", f"from kvbench.run import main\nfor words in {commands}: print(main(words))")
    assert done.stdout.decode().split() == ["2"] * len(WRONG)
    for said, says in zip(done.stderr.decode().splitlines(), WRONG.values(), strict=True):
        assert says in said


def test_namesakes_are_named_with_their_packages_and_refused(clashing: Site) -> None:
    two = "method=smallest_keys is of several packages, kvbench-smallest-keys==0.1 and kvbench-clash==0.1"
    ours = "method=snapkv is one of KVBench, and the package kvbench-clash==0.1 has another of this name"
    for word, says in (("method=smallest_keys", two), ("method=snapkv", ours)):
        code, _, said = clashing.kvbench("run", word)
        assert code == 2 and says in said
    code, listed, said = clashing.kvbench("ls", "methods")
    assert code == 0 and "halves" in listed and "smallest_keys" not in listed
    assert [sum(line.startswith(says) for line in said.splitlines()) for says in (two, ours)] == [1, 1]


def test_nothing_of_a_package_is_imported_until_it_is_asked_for(site: Site) -> None:
    assert site.python("-c", IMPORTS_NOTHING).stdout == b"7\n"


def test_an_edited_package_is_another_run_and_a_worker_refuses_it(site: Site, runs: Runs) -> None:
    sent = site.python("-c", SENDER).stdout

    def worker(site: Site) -> str:
        return site.python("-c", WORKER, given=sent).stdout.decode().strip()

    assert worker(site) == "Halves"
    assert "is of the package kvbench-parts, which is not installed here" in worker(Site(runs.out))
    file = site.folder / "parts" / "share.py"  # which the method's own module imports
    before = file.read_text()
    try:
        file.write_text(before.replace("0.5", "0.4"))
        assert "is not what kvbench-parts==0.1 was when the command was given" in worker(site)
        assert site.kvbench("run", "-m", "method=full,halves", *runs.words)[0] == 0
    finally:
        file.write_text(before)
    methods = [read_config(folder)["method"] for folder, _ in read_runs(runs.out)]
    assert sorted(method["name"] for method in methods) == ["full", "halves", "halves", "smallest_keys"]
    assert len({method.get("digest") for method in methods}) == 4


def test_conformance_takes_a_name(site: Site) -> None:
    code, said, _ = site.kvbench("conformance", "halves", "--ratio", "0.2")
    assert code == 0 and "0 of 11 properties broken" in said and said.startswith("Halves: Halves of ")


def test_answers_are_scored_again_by_the_package(site: Site, runs: Runs) -> None:
    folder = next(folder for folder, result in read_runs(runs.out) if result.method == "full")
    done = site.python("-m", "kvbench.evals.rescore", str(folder))
    assert (done.returncode, b"over 2, 0 differ" in done.stdout) == (0, True), done.stderr
    done = Site(runs.out).python("-m", "kvbench.evals.rescore", str(folder))
    assert done.returncode == 2
    assert b"is of the package kvbench-smallest-keys==0.1, which is not installed" in done.stderr


def test_a_run_of_a_package_is_reported(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(runs.out), "--out", str(tmp_path / "in"), "--submitter", "us", "--licence", "CC0-1.0"]
    assert submit(words) == 0
    verify([str(tmp_path / "in"), "--again", "1"])
    shown = capsys.readouterr().out
    assert "task is of the package 'kvbench-smallest-keys==0.1', which is not imported" in shown
    assert "reproduced" not in shown


def test_a_class_from_outside_is_known_by_its_target() -> None:
    target = f"some==1.0/{words.__module__}:words@{'0' * 16}"
    assert outside.is_target(target) and outside.file_of(target) == words.__code__.co_filename
    assert outside.origin(target) == {"package": "some==1.0", "digest": "0" * 16}
    assert outside.origin(f"/a==b/mine.py:Mine@{'0' * 16}") == {"digest": "0" * 16}
    assert not outside.is_target("kvbench.methods.full.Full") and outside.origin("kvbench.methods.full.Full") == {}
