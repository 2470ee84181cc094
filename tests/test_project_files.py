"""Pages, workflows and issue forms name only what there is, and the citation is of this version."""

import os
import re
import subprocess
import tomllib
from datetime import date
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import kvbench
from kvbench.command import LISTS, WORDS
from kvbench.evals.settings import from_words
from kvbench.tests.conformance import AT_EACH_RATIO, ONCE
from kvbench.tests.test_layers import MAY_IMPORT, TOP
from kvbench.tests.tiny_run import example_file

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]
PAGES = [ROOT / name for name in ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "llms.txt", "README.md")]
PAGES += [GITHUB / "pull_request_template.md", ROOT / "runs" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = [*PAGES, *WORKFLOWS, *FORMS]
OWN = [path for path in FILES if path.parent not in (ROOT / "docs", ROOT / "runs") and path.name != "README.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
PLACES = "|".join([r"\.ci", r"\.github", "benchmarks", "conf", "docs", "kvbench", "tests", *TOP])
PLACEHOLDER = re.compile(r"NAME|FAMILY|ROOM|FILE")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_of(text: str) -> str:
    """What a page has between backticks or indented by four, which is all of a workflow's steps."""
    return "\n".join([*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^    .+", text, re.MULTILINE)])


def missing_paths(text: str, folder: Path = ROOT) -> set[str]:
    """Paths below our folders, files of the root and links that lead nowhere from the root or the page's folder."""
    named = re.findall(rf"(?<![\w/.$-])((?:{PLACES})/[\w./*-]*|[A-Z]+\.(?:md|cff)|[a-z]+\.toml|llms\.txt)", text)
    named += [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = {path.rstrip("./") for path in named if not PLACEHOLDER.search(path)}
    return {path for path in paths if not any(ROOT.glob(path)) and not (folder / path).exists()}


def unknown_targets(text: str) -> set[str]:
    asked = {name for words in re.findall(r"\bmake((?: [a-z][a-z-]*)+)", code_of(text)) for name in words.split()}
    return asked - {*re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)}


def unknown_words(text: str) -> set[str]:
    """Words behind `kvbench`, lists behind `ls`, and modules and names of ours that Python would not find."""
    code = code_of(text)
    wrong = {*re.findall(r"\bkvbench\"? ([a-z]+)", code)} - WORDS.keys() - {"make"}  # a container's name
    wrong |= {*re.findall(r"\bls ([a-z]+)", code)} - {*LISTS, "dist"}
    wrong |= {*re.findall(r"\bkvbench\.(\w+)\(", code)} - {*kvbench.__all__}
    modules = re.findall(r"python -m (kvbench[\w.]*\w)|from (kvbench[\w.]*\w) import", text)
    wrong |= {name for pair in modules for name in pair if name and find_spec(name) is None}
    return wrong | {*re.findall(r"(?:kvbench|\{wheel\})\[(\w+)\]", text)} - PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_path_target_and_word_that_a_file_names_is_there(path: Path) -> None:
    text = path.read_text()
    assert missing_paths(text, path.parent) == set()
    assert unknown_targets(text) == set()
    assert unknown_words(text) == set()


def test_what_is_not_there_is_seen() -> None:
    text = "See docs/gone.md, `methods/NAME.py`, `tests/gone/*.npz`, GONE.md, [a page](gone/page.html); make it run.\n"
    assert missing_paths(text) == {"docs/gone.md", "tests/gone/*.npz", "GONE.md", "gone/page.html"}
    assert unknown_targets(text) == set() and unknown_targets("- run: `make lint gone ARGS=x`") == {"gone"}
    text = "`kvbench runn`, `kvbench.compares(…)`, `kvbench ls pets`, `python -m kvbench.evals.gone`, `kvbench[gone]`"
    assert unknown_words(text) == {"runn", "compares", "pets", "kvbench.evals.gone", "gone"}


RUNS = sorted({line for path in OWN for line in re.findall(r"kvbench\"? run( [^`#\n]*=[^`#\n]*)", path.read_text())})


assert len(RUNS) > 4 and any("-m method=" in words for words in RUNS)


@pytest.mark.parametrize("words", RUNS)
def test_every_run_that_a_file_shows_composes(words: str, tmp_path: Path) -> None:
    """Each cell of it; a method's file is the example of docs/adding-a-method.md."""
    example_file(tmp_path, "smallest_keys")
    given = [word for word in words.replace("/tmp", str(tmp_path)).split() if word != "-m"]
    keys = [(key, values.split(",")) for key, _, values in (word.partition("=") for word in given)]
    for cell in product(*[[f"{key}={value}" for value in values] for key, values in keys]):
        from_words(cell)


def test_agents_are_told_how_many_properties_hold() -> None:
    assert f"`0 of {len(ONCE) + len(AT_EACH_RATIO)} properties broken`" in (ROOT / "AGENTS.md").read_text()


def test_the_rooms_of_contributors_may_import_what_the_tests_allow() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert {room for room, _ in rows} == {*TOP} - {"hydra_plugins"}
    for room, cell in rows:
        named = {*cell.split(", ")}
        if named <= {*TOP}:  # a cell of other words says roughly what a long list has
            assert named == MAY_IMPORT[room] - {room}, room


def test_the_summary_for_language_models_has_its_form() -> None:
    """A title, a paragraph, then sections of links with a line each."""
    head, *sections = (ROOT / "llms.txt").read_text().split("\n## ")
    assert re.match(r"# KVBench\n\n> [^\n]+\n", head)
    for section in sections:
        lines = section.splitlines()[2:]
        assert lines and all(re.fullmatch(r"- \[[^]]+\]\([^)]+\): .+", line) for line in lines if line), section
    linked = {*re.findall(r"\]\(docs/([^)]+)\)", "".join(sections))}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= linked


def test_the_changelog_begins_with_this_version() -> None:
    heads = re.findall(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [Version(version) for version, _ in heads]
    assert heads[0][0] == kvbench.__version__
    assert versions == sorted({*versions}, reverse=True)
    days = [date.fromisoformat(day) for i, (_, day) in enumerate(heads) if i or day != "unreleased"]
    assert days == sorted(days, reverse=True)


JOBS: dict[str, dict[str, Any]] = {
    f"{path.name}: {name}": job for path in WORKFLOWS for name, job in yaml.safe_load(path.read_text())["jobs"].items()
}


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_may_only_read_and_watches_paths_that_are_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    asked = workflow[True]  # `on`, which YAML 1.1 reads as a truth value
    watched = (asked["pull_request"] or {}).get("paths", [])
    assert all(any(ROOT.glob(pattern.removesuffix("/**"))) for pattern in watched)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends_by_itself_and_keeps_no_password(name: str) -> None:
    job = JOBS[name]
    assert 0 < job["timeout-minutes"] <= 120
    assert {*job.get("permissions", {})} <= {"id-token", "pages"}
    for step in job["steps"]:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_workflows_take_the_pythons_that_users_may_have() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    tested = [
        version for job in JOBS.values() for version in job.get("strategy", {}).get("matrix", {}).get("python", [])
    ]
    steps = [step for job in JOBS.values() for step in job["steps"]]
    others = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    others = [version for version in others if "${{" not in version]
    assert tested and others and all(isinstance(version, str) for version in [*tested, *others]), "3.10 would be 3.1"
    assert all(allowed.contains(version) for version in [*tested, *others])
    pythons = re.findall(r"python(3\.\d+)", re.findall(r"^PYTHONS := .*", MAKEFILE, re.MULTILINE)[0])
    assert tested == pythons, "those that make looks for"
    assert f">={tested[0]}" == PROJECT["requires-python"]
    made = {word for step in steps for word in re.findall(r"PYTHONS=python(\S.*)", step.get("run", ""))}
    assert made == {*others, "${{ matrix.python }}"}, "a job's environment is made with the Python that it has set up"


@pytest.mark.parametrize(
    ("tag", "day", "says"),
    [
        ("v1.2.3", "2026-12-01", ""),
        ("v1.2.4", "2026-12-01", "the tag of version 1.2.3 is v1.2.3"),
        ("v1.2.3", "unreleased", "CHANGELOG.md has no date for 1.2.3"),
    ],
)
def test_only_the_version_of_a_tag_is_published(tag: str, day: str, says: str, tmp_path: Path) -> None:
    """The workflow's own step, with a command that says a version."""
    workflow = yaml.safe_load((GITHUB / "workflows" / "wheel.yml").read_text())
    (step,) = [one for one in workflow["jobs"]["wheel"]["steps"] if "tag" in one.get("if", "")]
    command = tmp_path / "fresh" / "bin" / "kvbench"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\necho kvbench 1.2.3\n")
    command.chmod(0o755)
    (tmp_path / "CHANGELOG.md").write_text(f"## [1.2.3] - {day}\n")
    own = {"RUNNER_TEMP": str(tmp_path), "GITHUB_REF_NAME": tag}
    shell = ["bash", "--noprofile", "--norc", "-e", "-c", step["run"]]
    done = subprocess.run(shell, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (int(bool(says)), says), done.stderr


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_a_form_is_one_that_github_shows(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "title", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) and any(
        field.get("validations", {}).get("required") for field in fields
    )
    for field in form["body"]:
        wanted = {"markdown": "value", "dropdown": "options", "checkboxes": "options"}.get(field["type"], "label")
        assert field["type"] in ("markdown", "input", "textarea", "dropdown", "checkboxes")
        assert field["attributes"][wanted] and (field["type"] == "markdown" or field["attributes"]["label"])


def test_the_citation_is_of_this_version_and_the_readme_says_the_same() -> None:
    """Of the schema of version 1.2.0, as GitHub reads it; the licence by its SPDX name."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"message", "title", "authors"} <= citation.keys() and isinstance(citation["date-released"], date)
    given = [citation[key] for key in ("cff-version", "type", "license", "version")]
    assert given == ["1.2.0", "software", "Apache-2.0", kvbench.__version__]
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    (entry,) = re.findall(r"@software\{.*?\}\}\}", (ROOT / "README.md").read_text(), re.DOTALL)
    fields = dict(re.findall(r"(\w+) = \{+([^{}]*)\}+", entry))
    said = {"author": citation["authors"][0]["name"], "title": citation["title"], "version": kvbench.__version__}
    assert fields.items() >= (said | {"year": str(citation["date-released"].year)}).items()
