"""Submissions that are not what they say: each is named, and a true one passes."""

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.evals import verify
from kvbench.evals.submission import folder as bounds
from kvbench.evals.submission import frozen
from kvbench.evals.submission.check import LEVELS
from kvbench.evals.submission.folder import Finding
from kvbench.evals.submission.manifest import MANIFEST
from kvbench.evals.submit import main as submit_main
from kvbench.results.files import sealed
from kvbench.tests.evals.submission.forge import Forge, Row
from kvbench.tests.test_embedded import known_conversion


@pytest.fixture
def forge(true: Path, tmp_path: Path) -> Forge:
    shutil.copytree(true, tmp_path / "in")
    return Forge(tmp_path / "in")


def found_in(forge: Forge, registry: Path) -> verify.Verification:
    found = verify.Verification(forge.root, registry)
    found.run()
    return found


def test_a_true_submission_passes_in_time(
    true: Path, registry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = sum(os.times()[:4])  # of this process and of those that it waited for
    words = [str(true), "--registry", str(registry), "--again", "2", "--out", str(tmp_path / "verdicts.json")]
    assert verify.main(words) == 0, capsys.readouterr().out
    assert sum(os.times()[:4]) - began < 10
    told = capsys.readouterr().out.splitlines()
    assert sum(": reproduced (score" in line for line in told) == 4
    assert "1 reported, 4 reproduced, 0 findings" in told[-2] and "honest" in told[-2]
    assert "run in a container alone" in told[-1] and "--network none" in told[-1] and f"-v {true}:/in:ro" in told[-1]
    (own,) = [line for line in told if "is a file of its own" in line]
    assert "smallest_keys" in own and "smallest_keys" not in {*sys.modules}
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert sorted(one["verdict"] for one in verdicts["runs"].values()) == ["reported", *["reproduced"] * 4]


def test_a_methods_own_file_is_answered_again_where_it_is_let(
    true: Path, registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the container that the command above is for."""
    assert verify.main([str(true), "--registry", str(registry), "--again", "1", "--foreign"]) == 0
    told = capsys.readouterr().out
    assert "5 reproduced, 0 findings" in told and "docker" not in told


# --- what somebody may forge ---


def first(**changes: Any) -> Callable[[list[Row]], None]:
    def change(rows: list[Row]) -> None:
        rows[0] |= changes

    return change


def answer_of_full(forge: Forge) -> None:
    """The words of full attention, which score better, in the place of a method's."""
    full = [json.loads(line) for line in (forge.run("full") / "samples.jsonl").read_text().splitlines()]

    def change(rows: list[Row]) -> None:
        for row, best in zip(rows, full, strict=True):
            row |= {"prediction": best["prediction"] + " really", "score": best["score"]}

    forge.rows("quest", change)


def summaries(key: str, by: float) -> Callable[[list[Row]], None]:
    def change(rows: list[Row]) -> None:
        for row in rows:
            row["ledger"][key] *= by

    return change


def ratio(value: str) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        forge.config("snapkv", lambda config: config.update(ratio=value), ratio_exact=value, ratio=float(value))

    return change


def without(n: int) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: rows[n:]


def lost(rows: list[Row]) -> None:
    rows[0] |= {"status": "oom", "score": None, "error": "out of memory", "ledger": {}, "tpot_s": None}
    rows[0] |= {"prefill_s": None, "decode_s": None, "generated_tokens": 0, "prediction": ""}


def renamed(forge: Forge) -> None:
    forge.config("snapkv", lambda config: config["method"].update(name="h2o"), method="h2o")


def label(forge: Forge) -> None:
    forge.result("quest", method_label="Full")


def hard_link(forge: Forge) -> None:
    os.link(forge.run("quest") / "env.json", forge.root.parent / "elsewhere")


def link_to(target: str, at: str) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        path = forge.root / at
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(target)

    return change


def linked_file(forge: Forge) -> None:
    path = forge.run("quest") / "samples.jsonl"
    outside = forge.root.parent / "samples.jsonl"
    shutil.move(path, outside)
    path.symlink_to(outside)


def pipe(forge: Forge) -> None:
    os.mkfifo(forge.root / "runs" / "pipe")


def archive(forge: Forge) -> None:
    with zipfile.ZipFile(forge.root / "runs.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("samples.jsonl", b"0" * (1 << 24))


def large(forge: Forge) -> None:
    os.truncate(forge.run("quest") / "samples.jsonl", bounds.LARGE + 1)  # of holes alone


def many_runs(forge: Forge) -> None:
    for i in range(bounds.MOST_RUNS + 1):
        (forge.root / "runs" / f"run-{i}").mkdir()


def deep(forge: Forge) -> None:
    (forge.run("quest") / "result.json").write_text("[" * 100_000)


def yaml_bomb(forge: Forge) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'lol'}]" for i in range(30)]
    (forge.run("quest") / "config.yaml").write_text("\n".join(levels))


def unsealed_lines(forge: Forge) -> None:
    path = forge.run("quest") / "samples.jsonl"
    path.write_text("".join("{" + line.split(",", 1)[1] + "\n" for line in path.read_text().splitlines()))


def other_manifest(**changes: Any) -> Callable[[Forge], None]:
    def change(forge: Forge) -> None:
        path = forge.root / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def no_full(forge: Forge) -> None:
    shutil.rmtree(forge.run("full"))


def full_of_others(forge: Forge) -> None:
    """Full attention on two samples of three."""
    forge.config("full", lambda config: config.update(limit=2))
    forge.rows("full", lambda rows: rows[:2])
    forge.ledger("full", lambda columns: cut(columns, 2))


def cut(columns: dict[str, list[Any]], n: int) -> None:
    ids = list(dict.fromkeys(columns["sample_id"]))[:n]
    keep = [i for i, id in enumerate(columns["sample_id"]) if id in ids]
    for name, values in columns.items():
        columns[name] = [values[i] for i in keep]


def no_ledger(forge: Forge) -> None:
    (forge.run("quest") / "ledger.parquet").unlink()


def stolen(forge: Forge) -> None:
    """A run of another method under this one's name."""
    for name in ("samples.jsonl", "ledger.parquet"):
        shutil.copyfile(forge.run("full") / name, forge.run("snapkv") / name)
    old = json.loads((forge.run("full") / "result.json").read_text())
    forge.result("snapkv", samples_crc32=old["samples_crc32"], ledger_crc32=old["ledger_crc32"])
    forge.sums("snapkv")


def of_rows(change: Callable[[list[Row]], Any], method: str = "quest", sums: bool = True) -> Callable[[Forge], None]:
    return lambda forge: forge.rows(method, change, sums)


def of_result(**changes: Any) -> Callable[[Forge], None]:
    return lambda forge: forge.result("quest", **changes)


FORGED: dict[str, tuple[Callable[[Forge], None], str, str]] = {  # what is changed: kind and words of what is found
    "a score": (of_rows(first(score=0.77)), "score", "says 0.77"),
    "every score": (of_rows(lambda rows: [row | {"score": 0.9} for row in rows]), "score", "says 0.9"),
    "a sample left out": (of_rows(without(1)), "samples", "left out"),
    "all samples left out": (of_rows(without(9)), "samples", "left out"),
    "a sample twice": (of_rows(lambda rows: [*rows, rows[0]], sums=False), "damaged", "second time"),
    "a sample that nobody asked": (of_rows(lambda rows: [*rows, rows[0] | {"id": "mine"}]), "samples", "'mine'"),
    "a sample lost for memory": (of_rows(lost), "samples", "no answer"),
    "another prompt": (of_rows(first(prompt_sha256="0" * 16)), "prompts", "another prompt"),
    "a shorter prompt": (of_rows(first(prompt_tokens=40)), "prompts", "40 tokens"),
    "references": (of_rows(lambda rows: [r | {"references": [r["prediction"]], "score": 1.0} for r in rows]), "prompts",
                   "other references"),
    "a column": (of_rows(first(depth=99)), "prompts", "columns"),
    "the metric": (of_rows(first(metric="recall")), "score", "'recall'"),
    "measures": (of_rows(first(measures={"exact": 1.0})), "score", "measures"),
    "no ledger": (no_ledger, "file", "ledger.parquet"),
    "the budget of the result": (of_result(ratio_exact="0.1", ratio=0.1), "budget", "ratio_exact"),
    "comm": (of_result(comm_exact="1/64", comm=1 / 64), "budget", "comm_exact"),
    "within its budget": (of_result(within_budget=None), "budget", "within_budget"),
    "an interval": (of_result(score_ci95=[0.5, 0.51]), "interval", "score_ci95"),
    "the mean": (of_result(score=0.99), "damaged", "another score"),
    "bytes of the result": (of_result(bytes_resident_device=1.0), "result", "bytes_resident_device"),
    "how many": (of_result(n_samples=300), "damaged", "300 samples"),
    "the hash": (of_result(config_hash="0" * 10), "configuration", "its hash is"),
    "the method's name": (renamed, "configuration", "its method is written"),
    "the method's label": (label, "configuration", "method_label"),
    "a parameter": (of_result(params={}), "configuration", "params"),
    "the seed": (of_result(seed=3), "configuration", "seed"),
    "the device": (of_result(device="cuda"), "configuration", "device"),
    "a result nested deeply": (deep, "damaged", "result.json"),
    "a bomb of YAML": (yaml_bomb, "damaged", "lists and objects"),
    "lines without seals": (unsealed_lines, "damaged", "cannot be believed"),
    "no full attention": (no_full, "full attention", "no run of full attention"),
    "full attention on fewer": (full_of_others, "full attention", "has not answered 1"),
    "a run twice": (lambda forge: [forge.add("quest", "copy"), None][1], "twice", "the same run"),
    "no licence": (other_manifest(licence=" "), "manifest", "licence"),
    "a correction of nothing": (other_manifest(supersedes={"runs/x": "0" * 16}), "manifest", "supersedes"),
    "a file that is linked": (linked_file, "link", "symbolic link"),
    "a folder that is linked": (link_to("/etc", "runs/etc"), "link", "symbolic link"),
    "a file with two names": (hard_link, "link", "hard link"),
    "a pipe": (pipe, "file", "no regular file"),
    "a zip bomb": (archive, "file", "no place here"),
    "a huge file": (large, "size", "more than"),
    "a million runs": (many_runs, "size", "more than 5,000 runs"),
}  # fmt: skip
UNSEEN: dict[str, Callable[[Forge], None]] = {  # what follows from itself, so that only answering again shows it
    "answers and scores": answer_of_full,
    "bytes": of_rows(summaries("bytes_resident_device", 0.5)),
    "moved bytes": of_rows(summaries("bytes_moved_kv_per_step", 0.1)),
    "a smaller budget": ratio("0.1"),
    "a larger budget": ratio("0.6"),
    "another method's run": stolen,
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_submission_is_named(forge: Forge, registry: Path, name: str) -> None:
    change, kind, words = FORGED[name]
    change(forge)
    found = found_in(forge, registry)
    told = [str(finding) for finding in found.every]
    assert any(finding.kind == kind and words in finding.words for finding in found.every), told
    assert all(one.level == 0 for one in found.runs if one.findings)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_follows_from_itself_is_found_when_it_is_asked_again(forge: Forge, registry: Path, name: str) -> None:
    UNSEEN[name](forge)
    found = found_in(forge, registry)
    assert found.every == [] and {LEVELS[one.level] for one in found.runs} == {"reported", "rescored"}
    found.again(3)
    assert [finding.kind for finding in found.every] == ["answer"] * 3
    assert "when it is asked again" in found.every[0].words
    assert [LEVELS[one.level] for one in found.runs].count("reproduced") == 3


def test_a_benchmark_that_is_not_frozen_leaves_a_run_reported(forge: Forge, tmp_path: Path) -> None:
    found = found_in(forge, tmp_path)
    assert {one.level for one in found.runs} == {0} and "no frozen benchmark" in found.runs[0].why[0]


def test_another_file_than_the_methods_is_not_asked_in_its_place(forge: Forge, registry: Path) -> None:
    path = forge.root / "methods" / "smallest_keys.py"
    path.write_text(path.read_text() + "\n# changed since\n")
    found = verify.Verification(forge.root, registry, foreign=True)
    found.run()
    assert ["no file of methods/ has the digest" in str(finding) for finding in found.every] == [True]


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.zip"
    archive(Forge(tmp_path))
    assert verify.main([str(file)]) == 2 and verify.main([str(tmp_path / "gone")]) == 2
    assert "unpack what it holds yourself" in capsys.readouterr().err


def test_names_and_findings_reach_the_terminal_as_text(
    forge: Forge, registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge.rows("quest", lambda rows: [*rows, rows[0] | {"id": "\x1b[2J\u202emine"}])
    assert verify.report(found_in(forge, registry)) == 1
    told = capsys.readouterr().out
    assert "\x1b" not in told and "\u202e" not in told and "mine" in told


# --- making one ---


def test_what_is_handed_in_is_what_runs_have_and_nothing_else(true: Path) -> None:
    names = {path.name for path in true.rglob("*") if path.is_file()}
    assert names == {MANIFEST, "smallest_keys.py", *("config.yaml", "samples.jsonl", "ledger.parquet"), "env.json",
                     "result.json"}  # fmt: skip


def test_a_submission_is_made_once(true: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(true / "runs"), "--out", str(tmp_path / "new"), "--submitter", "me", "--licence", "CC0-1.0"]
    assert submit_main(words) == 0 and submit_main(words) == 2
    assert submit_main([str(tmp_path / "empty"), *words[1:]]) == 2
    assert "no finished run" in capsys.readouterr().err


def test_a_frozen_benchmark_stays_as_it_is(registry: Path, true: Path) -> None:
    (path,) = registry.glob("*.json")
    assert frozen.registry(registry)[0].to_json() == path.read_text()
    words = ["task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[10,50,90]"]
    words += ["model=any", f"model.id={true.parent / 'model'}", "model.name=tiny", "comm=1/8"]
    words += ["dtype=float32", "device=cpu"]
    assert frozen.write(words, registry) == path
    before = path.read_text()
    path.write_text(before.replace(frozen.registry(registry)[0].lines[0].prompt, "0" * 16))
    with pytest.raises(ConfigError, match="another version"):
        frozen.write(words, registry)
    path.write_text(before)


@known_conversion
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the benchmark's texts are Python 3.11's own")
def test_committed_benchmarks_are_those_of_todays_tasks() -> None:
    found = frozen.registry()
    assert {one.asked["task"]["name"] for one in found} >= {"needle_brief", "longbench_short"}
    one = next(one for one in found if one.asked["task"]["name"] == "needle_brief")
    assert frozen.freeze(["task=needle_brief"]) == one


def test_a_finding_says_where_and_what() -> None:
    assert str(Finding("runs/x", "score", "is another")) == "runs/x: score: is another"
    assert sealed("{}").startswith('{"crc32"')
