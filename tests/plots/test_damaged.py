"""Run folders that were damaged, or are none: named in one line and left out, and the rest is drawn."""

import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.plots import costs, table, turns
from kvbench.plots.figures import command as figures
from kvbench.plots.read import load, read_all
from kvbench.plots.site import report
from kvbench.plots.tables import command as tables
from kvbench.plots.tables.words import samples_below
from kvbench.results.files import sealed, unsealed
from kvbench.results.sheet import pipes, tex
from kvbench.tests.plots import made_runs, report_runs

DEEP = "[" * 5000


def tree(root: Path) -> Path:
    """Two good runs and, beside them, one that is to be damaged."""
    report_runs.write_run(root, "full", [1.0, 0.5, 1.0], ratio="1")
    report_runs.write_run(root, "quest", [1.0, 0.0, 1.0])
    folder, _ = report_runs.write_run(root, "snapkv", [0.0, 0.5, 1.0])
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_sample(folder: Path, **changes: Any) -> None:
    path = folder / "samples.jsonl"
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | changes)
    path.write_text("\n".join(lines) + "\n")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut result": lambda f: half(f / "result.json"),
    "deep notes": lambda f: edit(f / "result.json", params={"a": json.loads("[" * 300 + "]" * 300)}),
    "other schema": lambda f: edit(f / "result.json", schema_version=99),
    "a share of nothing": lambda f: edit(f / "result.json", ratio_exact="1/0"),
    "a pipe": lambda f: pipe(f / "result.json"),
    "a folder": lambda f: ((f / "samples.jsonl").unlink(), (f / "samples.jsonl").mkdir())[0],
    "no samples": lambda f: (f / "samples.jsonl").unlink(),
    "another report": lambda f: edit_sample(f, method_report=[1]),
    "deep configuration": lambda f: (f / "config.yaml").write_text(DEEP),
    "a date": lambda f: (f / "config.yaml").write_text("limit: 2020-01-01"),
    "a tree of a billion": lambda f: (f / "config.yaml").write_text(
        "a0: &a0 [[], []]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_run_is_named_in_one_line_and_left_out(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tree(tmp_path)
    DAMAGE[kind](folder)
    assert sorted(run.method for run in load(tmp_path)) == ["full", "quest"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("left out: ")
    assert folder.name in line


def seal_anew(folder: Path, column: tuple[str, Any] | None = None, **changes: Any) -> None:
    """A column of all lines, or keys of the result, as somebody else's code could have written them, seals and all."""
    samples, result = folder / "samples.jsonl", folder / "result.json"
    rows = [json.loads(unsealed(line)) for line in samples.read_text().splitlines()]
    for row in rows if column else ():
        row |= dict([column]) if column else {}
    text = "".join(sealed(json.dumps(row)) + "\n" for row in rows)
    samples.write_text(text)
    found = json.loads(unsealed(result.read_text())) | {"samples_crc32": f"{zlib.crc32(text.encode()):08x}"} | changes
    result.write_text(sealed(json.dumps(found, indent=2) + "\n"))


FORGED: dict[str, Callable[[Path], Any]] = {
    "a turn of none": lambda f: seal_anew(f, ("turn", None)),
    "a turn of lists": lambda f: seal_anew(f, ("turn", [1])),
    "a turn in words": lambda f: seal_anew(f, ("turn", "first")),
    "a turn that no axis has": lambda f: seal_anew(f, ("turn", 10**400)),
    "another metric": lambda f: seal_anew(f, ("metric", "ours")),
    "a metric of the result alone": lambda f: seal_anew(f, metric="perplexity"),
    "tokens without an end": lambda f: seal_anew(f, ("prompt_tokens", 10**400)),
    "answers without an end": lambda f: seal_anew(f, ("generated_tokens", 10**400)),
    "a memory of nothing": lambda f: seal_anew(f, memory_exact="1/0"),
    "a memory in words": lambda f: seal_anew(f, memory_exact="<b>"),
    "a memory of no bytes": lambda f: seal_anew(f, memory_exact="0GB"),
    "bytes as nobody spells them": lambda f: seal_anew(f, memory_exact="4000MB"),
    "a result without its seal": lambda f: (f / "result.json").write_text(
        unsealed((f / "result.json").read_text()).replace("Snapkv", "Best")
    ),
    "another run's files": lambda f: [
        shutil.copy(next(f.parent.glob("*quest*")) / name, f) for name in ("result.json", "samples.jsonl")
    ],
    "another run's configuration": lambda f: shutil.copy(next(f.parent.glob("*quest*")) / "config.yaml", f),
}


@pytest.mark.parametrize("kind", FORGED)
def test_what_no_run_writes_is_left_out_whatever_its_seals_say(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tree(tmp_path / "runs")
    FORGED[kind](folder)
    assert sorted(run.method for run in load(tmp_path / "runs")) == ["full", "quest"]
    assert [line for line in capsys.readouterr().err.splitlines() if folder.name in line]
    assert table.main([str(tmp_path / "runs")]) == 0
    assert turns.main([str(tmp_path / "runs"), "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize("name", [["docs"], {"docs": 1}, None, 10**99])
def test_a_dataset_may_be_called_anything(name: Any, tmp_path: Path) -> None:
    tree(tmp_path)
    for folder in tmp_path.iterdir():
        seal_anew(folder, ("dataset", name))
    assert table.main([str(tmp_path)]) == 0
    assert len(load(tmp_path)) == 3


@pytest.mark.parametrize("task", ["ours", "a/b\n<i>", "x" * 999, "\0"])
def test_a_task_that_is_not_here_has_runs_all_the_same(task: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    tree(runs)
    for folder in runs.iterdir():
        seal_anew(folder, task=task)
    assert table.main([str(runs)]) == 0
    assert report.main([str(runs), "--out", str(tmp_path / "page.html")]) == 0


def test_links_that_lead_back_and_folders_of_others_are_passed_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path)
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "notes\n\x1b[31m.txt").write_text("mine")
    closed = tmp_path / "closed\x1b[31m"
    closed.mkdir()
    scan = os.scandir

    def refusing(path: Any) -> Any:
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)  # root may read everything
    runs, damaged = read_all(tmp_path)
    assert len(runs) == 3
    assert len(damaged) == 1
    assert damaged[0].endswith(r"closed\x1b[31m cannot be read (Permission denied)")
    capsys.readouterr()
    assert table.main([str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"left out: {damaged[0]}\n"


def test_every_tool_says_so_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    made_runs.timings(runs)
    for method in ("full", "quest"):
        made_runs.write(runs, method, "needle", grid(), ratio="1/10")
    made_runs.write(runs, "full", "longbench", made_runs.answers(["docs_qa"], 0.5))
    folder = next(runs.glob("latency-pqcache-*"))
    half(folder / "result.json")
    half(next(runs.glob("longbench-full-*")) / "samples.jsonl")
    for call in (
        lambda: report.main([str(runs), "--out", str(out / "page.html")]),
        lambda: costs.main([str(runs), "--out", str(out)]),
        lambda: figures.main([str(runs), "--out", str(out), "--only", "needle_heatmaps"]),
        lambda: tables.main([str(runs), "--out", str(out)]),
    ):
        assert call() in (0, 2)
        lines = capsys.readouterr().err.splitlines()
        assert sum(line.startswith("left out: ") for line in lines) == 2
        assert "Traceback" not in "".join(lines)
    assert (out / "page.html").exists()
    assert (out / "costs.md").exists()
    assert (out / "needle_heatmaps.pdf").exists()


def test_a_folder_without_a_whole_run_ends_with_code_2(tmp_path: Path) -> None:
    folder, _ = report_runs.write_run(tmp_path, "full", [1.0])
    half(folder / "result.json")
    for main in (report.main, costs.main, figures.main, tables.main):
        assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2


def test_a_cut_ledger_is_said_and_as_good_as_none(tmp_path: Path, capsys) -> None:
    folder = tree(tmp_path)
    half(folder / "ledger.parquet")
    ledgers = {run.method: run.ledger() for run in load(tmp_path)}
    assert ledgers["snapkv"] == {}
    assert ledgers["quest"]["step"]
    assert "ledger.parquet is damaged" in capsys.readouterr().err


def test_names_of_others_are_words_wherever_they_stand(tmp_path: Path) -> None:
    name = "a|b`[c](d)<i>\n\n## =x $\\frac$ [/b] \x1b[31m"
    (row,) = pipes(["h"], [[name]])[2:]
    assert "\n" not in row
    assert "<i>" not in row
    assert row.count("|") - row.count("\\|") == 2
    assert "\n" not in tex(name)
    made_runs.write(tmp_path, "full", "needle", grid(), label=name, ratio="1/10")
    made_runs.write(tmp_path, "quest", "needle", grid(), label=f"=1+{name}", ratio="1/10")
    out = tmp_path / "out"
    assert figures.main([str(tmp_path), "--out", str(out), "--only", "needle_heatmaps", "pareto"]) == 0
    assert report.main([str(tmp_path), "--out", str(out / "page.html")]) == 0
    assert "<i>" not in (out / "page.html").read_text().partition("<body")[2].partition("<script")[0]


def grid() -> list[dict[str, Any]]:
    return [{"score": 1.0, "fields": {"length": n, "depth": d}} for n in (500, 1000) for d in (0.0, 50.0)]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    tree(root)
    made_runs.write(
        root,
        "full",
        "latency",
        [{"score": 1.0, "fields": {"metric": "tpot_ratio", "length": 9, "batch": 1, "timing": made_runs.timing(9, 1)}}],
        metric="tpot_ratio",
    )
    return root


@st.composite
def broken(draw: st.DrawFn, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found)))
        match draw(st.sampled_from(["cut", "flip", "delete", "insert"])):
            case "cut":
                del found[at:]
            case "flip" if at < len(found):
                found[at] ^= 1 << draw(st.integers(0, 7))
            case "delete":
                del found[at : at + draw(st.integers(1, 99))]
            case "insert":
                found[at:at] = draw(st.sampled_from([b"\n", b"\0", b"[" * 3000, b"1e999", b'"', b"&a *a", b"9" * 5000]))
    return bytes(found)


def test_whatever_happens_to_a_file_of_a_run_there_is_a_page_and_a_table(good: Path, tmp_path: Path, capsys) -> None:
    files = sorted(path.relative_to(good) for path in good.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml"))
    root = tmp_path / "runs"
    shutil.copytree(good, root)
    counts: Counter[str] = Counter()

    @settings(max_examples=40)
    @given(st.data())
    def reads(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(files))
        whole = (good / name).read_bytes()
        (root / name).write_bytes(data.draw(broken(whole)))
        try:
            runs, damaged = read_all(root)
            assert len(runs) + len(damaged) == 4
            assert all(sentence.isprintable() for sentence in damaged)
            report.page(runs, root)
            samples = samples_below(root)
            tables.build_all(samples)
            costs.sheets(samples)
            list(costs.records(samples))
            assert {str(run.folder) for run in runs} == set(samples["run"] if len(samples) else ())
            counts["left out" if damaged else "read"] += 1
        finally:
            (root / name).write_bytes(whole)

    reads()
    assert counts["left out"] and counts["read"], counts
