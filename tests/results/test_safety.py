"""Whatever `out` points at: nothing of the user's is touched, and nothing damaged is believed."""

import hashlib
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench import run as run_py
from kvbench.engine.errors import ConfigError, RunError
from kvbench.engine.terminal import printable
from kvbench.evals.screen.progress import Progress
from kvbench.evals.studies.accesses import read as read_accesses
from kvbench.results import RunResult, SampleRow, read_ledger, read_runs, read_samples, summarise
from kvbench.results import folder as results
from kvbench.results.files import file_stem, sealed, temporary
from kvbench.tests.results.made_rows import CONFIG, FACTS, contents, ledger_of, ok_row, open_folder, run, score_of
from kvbench.tests.tiny_run import save_tiny

Make = Callable[[Path], Any]


def tree(root: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a folder: kind, mode, time of change, and content or target."""
    found = {}
    for path in [root, *root.rglob("*")]:
        facts = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = str(path.readlink())
        elif stat.S_ISREG(facts.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(root))] = (facts.st_mode, facts.st_mtime_ns, content)
    return found


def put(name: str, content: str = "the user's") -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return make


def link(name: str, target: str = "../elsewhere/precious") -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    return make


def directory(name: str) -> Make:
    return lambda folder: (folder / name / "inner").mkdir(parents=True)


def both(*makes: Make) -> Make:
    return lambda folder: [make(folder) for make in makes]


DEEP = "[" * 3000 + "]" * 3000
# Folders that are not a run's: each is refused and stays as it is.
FOREIGN: dict[str, Make] = {
    "notes": put("notes.txt"),
    "a hidden file": put(".bashrc"),
    "an empty folder in it": directory("photos"),
    "a pipe": lambda folder: os.mkfifo(folder / "pipe"),
    "a link to nothing": link("gone", "nowhere"),
    "shards": both(put("shards/thesis/chapter.tex"), put("shards/0-0-of-3/samples.jsonl")),
    "empty shards": directory("shards"),
    "a ledger": put("ledger/2025.parquet"),
    "a ledger elsewhere": both(link("ledger", "../elsewhere"), put("a")),
    "only a ledger elsewhere": link("ledger", "../elsewhere"),
    "shards elsewhere": link("shards", "../elsewhere"),
    "env.json": put("env.json", '{"PATH": "/usr/bin"}'),
    "samples.jsonl": put("samples.jsonl", '{"text": "mine"}\n'),
    "result.json": put("result.json", '{"accuracy": 1}'),
    "ledger.parquet": put("ledger.parquet"),
    "a picture": put("heatmap.png"),
    "temporary files": both(put("config.yaml.tmp"), put("samples.jsonl.tmp")),
    "a temporary file": put("config.yaml.tmp"),
    "a lock of another kind": put(".lock", "pid 17"),
    "a lock elsewhere": link(".lock"),
    "a folder as lock": directory(".lock"),
    "a holder of another kind": put(".lock.holder", "me"),
    "a holder in JSON": put(".lock.holder", '{"pid": 1}'),
    "a holder elsewhere": link(".lock.holder"),
    "our temporary file elsewhere": link(temporary(Path("config.yaml")).name),
    "our temporary folder": directory(".kvbench-tmp"),
    "a repository": both(put(".git/HEAD", "ref: refs/heads/main\n"), put("README.md")),
    "another program's configuration": put("config.yaml", "model: gpt\nlr: 0.1\nseed: 0\n"),
    "another run's configuration": put("config.yaml", yaml.safe_dump(CONFIG | {"seed": 7})),
    "a configuration with keys that are numbers": put("config.yaml", "1: 2\nmodel: x\n"),
    "ours with a key that is a number": put("config.yaml", yaml.safe_dump(CONFIG) + "1: 2\n"),
    "a list as configuration": put("config.yaml", "- 1\n"),
    "an empty configuration": put("config.yaml", ""),
    "a configuration nested too deeply": put("config.yaml", "[" * 500 + "]" * 500),
    "one nested too deeply under our keys": put(
        "config.yaml", "method: " + "[" * 500 + "]" * 500 + "\ntask: 1\nmodel: 1\n"
    ),
    "a configuration with a wrong date": put("config.yaml", "day: 2020-13-45\n"),
    "a configuration with a wrong tag": put("config.yaml", "a: !!bool perhaps\n"),
    "a configuration with a long number": put("config.yaml", f"a: {'9' * 5000}\n"),
    "a configuration in another encoding": lambda folder: (folder / "config.yaml").write_bytes(
        "größe: 1".encode("latin-1")
    ),
    "a configuration elsewhere": both(link("config.yaml", "../elsewhere/config.yaml")),
    "a folder as configuration": directory("config.yaml"),
    "a huge configuration": put("config.yaml", "a: 1\n" * 300_000),
}


def own(*makes: Make) -> Make:
    """A stopped run with one sample, and what else."""

    def make(folder: Path) -> None:
        with open_folder(folder) as opened:
            opened.append(ok_row(0), ledger_of(0))
        both(*makes)(folder)

    return make


# Folders of a run with something in it that leads elsewhere: refused and unchanged as well.
LEADING_ELSEWHERE: dict[str, Make] = {
    f"{name}, {kind}": own(lambda folder, name=name: remove(folder / name), make)
    for name in ("samples.jsonl", "result.json", "ledger.parquet", "env.json", "config.yaml", ".lock")
    for kind, make in (("a link", link(name)), ("a folder", directory(name)))
} | {
    "ledger, a link": own(lambda folder: remove(folder / "ledger"), link("ledger", "../elsewhere")),
    "shards, a link": own(link("shards", "../elsewhere")),
    "holder, a link": own(lambda folder: remove(folder / ".lock.holder"), link(".lock.holder")),
    "corrupt, a link": own(link("result.json.corrupt")),
    "temporary folder, a link": own(link(".kvbench-tmp", "../elsewhere")),
    "ledger, a file": own(lambda folder: remove(folder / "ledger"), put("ledger")),
}  # fmt: skip


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What else the user has, to which links lead."""
    home = tmp_path / "home"
    put("elsewhere/precious", "do not lose")(home)
    put("elsewhere/x.parquet")(home)
    put("elsewhere/config.yaml", yaml.safe_dump(CONFIG))(home)
    (home / "elsewhere" / "precious").chmod(0o600)
    (home / "data").mkdir()
    return home


def ways(home: Path) -> Iterator[Path]:
    """How a command line can name home/data."""
    (home.parent / "link").symlink_to(home / "data")
    (home.parent / "far").symlink_to(home)
    yield from (home / "data", home.parent / "link", home.parent / "far" / "data")
    yield from (home / "elsewhere" / ".." / "data", Path(os.path.relpath(home / "data")))


@pytest.mark.parametrize("name", [*FOREIGN, *LEADING_ELSEWHERE])
def test_a_folder_that_is_not_the_runs_own_is_refused_and_unchanged(name: str, home: Path) -> None:
    (FOREIGN | LEADING_ELSEWHERE)[name](home / "data")
    before = tree(home)
    for out in ways(home):
        with pytest.raises(ConfigError) as refused:
            run(out)
        said = str(refused.value)
        assert "out=DIR" in said and "\n" not in said and printable(said) == said
        assert tree(home) == before


# What somebody keeps in a run's folder.
KEPT: dict[str, Make] = {
    "notes": put("notes.txt"),
    "temporary files": both(put("samples.jsonl.tmp"), put("x.tmp"), put("ledger/x.parquet.tmp")),
    "a table in ledger": put("ledger/mine.parquet"),
    "a table with a name like ours": put("ledger/f47ac10b-58cc-4372-a567-0e02b2c3d479.parquet"),
    "a link in ledger": link("ledger/f47ac10b-58cc-4372-a567-0e02b2c3d479.parquet", "../../elsewhere/x.parquet"),
    "a folder in ledger": directory("ledger/old"),
    "a folder in shards": both(put("shards/mine/thesis.tex"), put("shards/0-0-of-3/x.txt")),
    "an empty folder in shards": directory("shards/mine"),
    "another run in shards": put("shards/other/config.yaml", yaml.safe_dump(CONFIG | {"seed": 7})),
    "a link in shards": link("shards/x", "../../elsewhere"),
    "a file in shards": put("shards/readme"),
    "a link of another name": link("latest", "../elsewhere"),
    "a link where we write beside": link(temporary(Path("x")).name),
    "a pipe": both(put("notes"), lambda folder: os.mkfifo(folder / "pipe")),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_somebody_keeps_in_a_runs_folder_stays(name: str, home: Path) -> None:
    KEPT[name](home / "theirs")
    theirs = {key: value[::2] for key, value in tree(home / "theirs").items()}
    own(KEPT[name])(home / "data")
    before = tree(home / "elsewhere")
    with open_folder(home / "data") as folder:
        for shard in folder.shards():
            folder.take(shard)
        for i in range(1, 4):
            folder.append(ok_row(i), ledger_of(i))
        with folder.placing() as beside:
            (beside / "heatmap.csv").write_text("ours")
        folder.finish(summarise(folder.rows, FACTS), {})
    assert run(home / "data").n_samples == 4
    after = {key: value[::2] for key, value in tree(home / "data").items()}
    assert theirs.items() <= after.items() and tree(home / "elsewhere") == before
    assert not list((home / "data").glob("ledger/needle-*")) and len(read_samples(home / "data")) == 4


def test_a_link_to_an_empty_folder_or_to_the_runs_own_is_followed(home: Path) -> None:
    (home / "link").symlink_to("data")
    result = run(home / "link")
    assert run(home / "data") == result and (home / "link").is_symlink()


@pytest.mark.parametrize("name", ["heatmap.png", file_stem("x")])
def test_a_file_beside_the_result_replaces_a_link_and_not_what_it_leads_to(name: str, home: Path) -> None:
    before = tree(home / "elsewhere")
    own(link(name))(home / "data")
    with open_folder(home / "data") as folder, folder.placing() as beside:
        (beside / name).write_text("ours")
    assert (home / "data" / name).read_text() == "ours" and tree(home / "elsewhere") == before


def test_an_answered_shard_is_taken_over_and_what_is_not_ours_in_it_stays(tmp_path: Path) -> None:
    shard = tmp_path / "run" / "shards" / "0-0-of-2"
    with open_folder(tmp_path / "run") as folder:
        with open_folder(shard) as worker:
            worker.append(ok_row(0), ledger_of(0))
            for what in ("accesses-{}.npz", "trace-{}.json"):
                with worker.placing() as beside:
                    (beside / what.format(file_stem("needle/0"))).write_text("x")
        put("notes.txt")(shard)
        (taken,) = folder.shards()
        folder.take(taken)
        assert [row.id for row in folder.rows] == ["needle/0"]
    assert {path.name for path in shard.iterdir()} == {"config.yaml", ".lock", ".lock.holder", "notes.txt"}  # fmt: skip
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {f"accesses-{file_stem('needle/0')}.npz", f"trace-{file_stem('needle/0')}.json"} <= names
    (shard / "notes.txt").unlink()
    with open_folder(tmp_path / "run") as folder:
        folder.take(shard)
    assert not shard.parent.exists()


# Through the command line


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return [f"model={model}", "method=full", "dtype=float32", "device=cpu", "task=needle", "task.source=embedded",
            "task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=3"]  # fmt: skip


@pytest.fixture(autouse=True)
def untouched_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run.py"])  # to which run.py appends


@pytest.mark.parametrize("name", ["shards", "only a ledger elsewhere", "another program's configuration"])  # fmt: skip
def test_the_command_ends_with_2_and_one_sentence(
    name: str, home: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    FOREIGN[name](home / "data")
    before = tree(home)
    assert run_py.main([*command, f"out={home / 'data'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "choose another folder with out=DIR" in line
    assert tree(home) == before


def test_a_sweep_touches_nothing_beside_its_own_folders(home: Path, command: list[str]) -> None:
    for name in ("notes.txt", "shards/a/b", "ledger/x.parquet", "config.yaml", "env.json", ".lock"):
        put(name)(home / "data")
    before = tree(home)
    assert run_py.main(["-m", *command, f"out={home / 'data'}"]) == 0
    (ours,) = (home / "data").glob("needle-full-*")
    assert len(read_runs(home / "data" / ours.name)) == 1
    shutil.rmtree(ours)
    after = tree(home)
    assert after.pop("data")[2] == before.pop("data")[2] and after == before


def test_a_full_disk_ends_the_command_with_1_and_one_sentence(
    tmp_path: Path, command: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results.os, "fsync", full_disk(after=4))
    assert run_py.main([*command, f"out={tmp_path / 'run'}"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in line and "free space" in line


# A disk that is full, a folder that is gone


def full_disk(after: int) -> Callable[[int], None]:
    """In place of os.fsync: the disk is full from the call after so many."""
    left = Counter(calls=after)

    def fsync(descriptor: int) -> None:
        left["calls"] -= 1
        if left["calls"] < 0:
            raise OSError(28, "No space left on device")

    return fsync


def test_whenever_the_disk_fills_what_was_done_stays_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole", 2)
    n_calls, kinds = 0, Counter[str]()
    while True:
        path = tmp_path / f"full-{n_calls}"
        with monkeypatch.context() as patch:
            patch.setattr(results.os, "fsync", full_disk(n_calls))
            try:
                run(path, 2)
                break
            except (ConfigError, RunError) as error:
                kinds[type(error).__name__] += 1
                assert str(path) in str(error) and "No space left" in str(error)
                done = contents(path).get("samples.jsonl", b"")
        run(path, 2)
        assert (path / "samples.jsonl").read_bytes().startswith(done)
        assert contents(path) == contents(tmp_path / "whole")
        n_calls += 1
    assert kinds["RunError"] > 10 and 0 < kinds["ConfigError"] < 4


@pytest.mark.parametrize("what", ["", "samples.jsonl", "ledger"])
def test_a_folder_removed_while_its_run_goes_on_is_said(what: str, tmp_path: Path) -> None:
    with open_folder(tmp_path / "run") as folder:
        folder.append(ok_row(0), ledger_of(0))
        remove(tmp_path / "run" / what)
        try:
            folder.append(ok_row(1), ledger_of(1))
            folder.finish(summarise(folder.rows, FACTS), {})
            assert what == "ledger" and "no rows of 1 of 2" in folder.notes[0]
        except RunError as error:
            expected = "somebody else changed it" if what else "was removed or renamed"
            assert expected in str(error) and what != "ledger"


# What is damaged


def finish(path: Path) -> RunResult:
    with open_folder(path) as folder:
        folder.finish(summarise(folder.rows, FACTS), {})
        assert folder.finished is not None
        return folder.finished


@pytest.mark.parametrize("part", [0.5, 0.95])
@pytest.mark.parametrize("is_old", [False, True])
def test_half_a_ledger_is_said_and_not_read(part: float, is_old: bool, tmp_path: Path) -> None:
    run(tmp_path)
    if is_old:
        strip(tmp_path)
    with open_folder(tmp_path) as folder:
        assert folder.finished is not None and folder.notes == []
        result = folder.finished
    assert len(read_ledger(tmp_path, result)["step"]) == 10
    path = tmp_path / "ledger.parquet"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with open_folder(tmp_path) as folder:
        assert folder.finished == result and "ledger.parquet is damaged" in folder.notes[0]
    assert read_ledger(tmp_path, result) == {}


def test_any_byte_of_a_ledger_that_changes_is_noticed(tmp_path: Path) -> None:
    run(tmp_path)
    ((_, result),) = read_runs(tmp_path)
    path = tmp_path / "ledger.parquet"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_ledger(tmp_path, result) == {}


def strip(path: Path) -> None:
    """The folder as code before the seals left it."""
    rows = "".join(row.to_json() + "\n" for row in read_samples(path))
    ((_, result),) = read_runs(path)
    (path / "samples.jsonl").write_text(rows)
    (path / "result.json").write_text(replace(result, ledger_crc32=None, samples_crc32=None).to_json())


def test_a_folder_from_before_the_seals_is_read_and_gone_on_with(tmp_path: Path) -> None:
    run(tmp_path / "whole", 3)
    run(tmp_path / "old", 2)
    strip(tmp_path / "old")
    assert run(tmp_path / "old", 2).n_samples == 2
    (tmp_path / "old" / "result.json").unlink()
    with open_folder(tmp_path / "old") as folder:
        folder.append(ok_row(2), ledger_of(2))
    finish(tmp_path / "old")
    assert read_samples(tmp_path / "old") == read_samples(tmp_path / "whole")
    assert read_runs(tmp_path / "old")[0][1] == read_runs(tmp_path / "whole")[0][1]


def swap_scores(path: Path, but_for: int = 0) -> None:
    """Turn the scores of samples.jsonl round, and take the seals off that would say so, but for the last few lines."""
    lines = (path / "samples.jsonl").read_text().splitlines()
    rows = [SampleRow.from_json(line) for line in lines]
    swapped = [replace(row, score=other.score).to_json() for row, other in zip(rows, rows[::-1], strict=True)]
    n = len(lines) - but_for
    (path / "samples.jsonl").write_text("".join(f"{line}\n" for line in [*swapped[:n], *lines[n:]]))


def without(path: Path, key: str) -> None:
    """result.json as it was before this key was written, with a seal of its own."""
    data = json.loads((path / "result.json").read_text())
    del data["crc32"], data[key]
    (path / "result.json").write_text(sealed(json.dumps(data, indent=2) + "\n"))


@pytest.mark.parametrize("has_crc", [True, False], ids=["now", "before results said the CRC of samples"])
@pytest.mark.parametrize("but_for", [0, 1], ids=["every line", "all lines but one"])
def test_lines_without_a_seal_are_not_believed_in_a_sealed_run(has_crc: bool, but_for: int, tmp_path: Path) -> None:
    """Tables showed swapped scores: a line without its crc32 was taken for one from before there was any."""
    run(tmp_path)
    if not has_crc:
        without(tmp_path, "samples_crc32")
    swap_scores(tmp_path, but_for)
    before = contents(tmp_path)
    for read in (read_samples, read_runs):
        with pytest.raises(ValueError, match=r"samples\.jsonl (cannot be|line 1 is not)") as refused:
            read(tmp_path)
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"crc32|was changed after") as refused:
        open_folder(tmp_path)
    assert "\n" not in str(refused.value) and contents(tmp_path) == before


def test_a_run_that_is_not_finished_believes_no_line_without_a_seal_among_others(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "result.json").unlink()
    swap_scores(tmp_path, but_for=1)
    with pytest.raises(ConfigError, match=r"line 1 is not a sample .it has no crc32, and other lines have one"):
        open_folder(tmp_path)


def test_a_sealed_line_that_was_put_in_later_is_not_believed(tmp_path: Path) -> None:
    """A seal is no secret; the result says which lines it was made of."""
    first = run(tmp_path)
    swap_scores(tmp_path)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    (tmp_path / "samples.jsonl").write_text("".join(f"{sealed(line)}\n" for line in lines))
    with pytest.raises(ValueError, match="it was changed after result"):
        read_runs(tmp_path)
    again = run(tmp_path)
    assert again.score == first.score and (tmp_path / "result.json.corrupt").exists(), "and it is said"


def test_a_result_without_a_seal_above_sealed_lines_is_made_again(tmp_path: Path) -> None:
    first = run(tmp_path)
    result = replace(first, tpot_s=0.001, samples_crc32=None)
    (tmp_path / "result.json").write_text(result.to_json())
    with pytest.raises(ValueError, match="its lines have a crc32, and result"):
        read_runs(tmp_path)
    assert run(tmp_path).tpot_s == first.tpot_s


def test_a_run_from_before_the_seals_that_was_scored_again_is_read(tmp_path: Path) -> None:
    run(tmp_path)
    strip(tmp_path)
    with open_folder(tmp_path) as folder:
        new = folder.put_scores([score_of(row, 0.25) for row in folder.rows])
    assert read_runs(tmp_path)[0][1] == new and new.score == 0.25
    without(tmp_path, "samples_crc32")
    assert read_runs(tmp_path)[0][1] == new, "what scored it may have known no CRC of samples"
    with open_folder(tmp_path) as folder:
        assert folder.finished == new


LINE = ok_row(0).to_json()


@pytest.mark.parametrize(
    "line",
    [
        '{"id": ' + DEEP + "}",
        LINE[:-1] + ', "x": ' + "[" * 400 + "]" * 400 + "}",
        LINE[:-1] + f', "x": {"9" * 5000}' + "}",
        LINE.replace('"prefill_s": 0.0', f'"prefill_s": {"9" * 4000}'),
        LINE.replace('"prefill_s": 0.0', '"prefill_s": 1e308'),
        LINE[:-1] + ', "measures": [1]}',
        sealed(LINE).replace("the answer", "an answer!"),
        sealed(LINE).replace("crc32", "crc33"),
        sealed(LINE).replace('"crc32": "', '"crc32": "G'),
    ],
)
@pytest.mark.parametrize("n_behind", [0, 1])
def test_a_line_that_cannot_be_read_or_believed_is_refused(line: str, n_behind: int, tmp_path: Path) -> None:
    with open_folder(tmp_path):
        pass
    behind = ok_row(1).to_json() + "\n"
    (tmp_path / "samples.jsonl").write_text(line + "\n" + behind * n_behind)
    try:
        with open_folder(tmp_path) as folder:
            assert folder.rows == [] and "ended within a line" in folder.notes[0]
            assert n_behind == 0
    except ConfigError as error:
        assert "samples.jsonl line 1 is not" in str(error)
        with pytest.raises(ValueError, match="line 1"):
            read_samples(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 nonsense PAR1"])
def test_a_damaged_part_of_a_ledger_is_lost_and_said(content: bytes, tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        for i in range(2):
            folder.append(ok_row(i), ledger_of(i))
    (tmp_path / "ledger" / f"{file_stem('needle/0')}.parquet").write_bytes(content)
    with open_folder(tmp_path) as folder:
        folder.finish(summarise(folder.rows, FACTS), {})
        assert "no rows of 1 of 2 samples" in folder.notes[0] and folder.finished is not None
        assert set(read_ledger(tmp_path, folder.finished)["sample_id"]) == {"needle/1"}


def test_a_part_of_another_sample_is_not_believed(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        for i in range(2):
            folder.append(ok_row(i), ledger_of(i))
    parts = [tmp_path / "ledger" / f"{file_stem(f'needle/{i}')}.parquet" for i in range(2)]
    shutil.copy(parts[0], parts[1])
    with open_folder(tmp_path) as folder:
        folder.finish(summarise(folder.rows, FACTS), {})
        assert "no rows of 1 of 2 samples" in folder.notes[0]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"\x93NUMPY"])
def test_a_damaged_file_of_fetches_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "accesses-x.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="is no file of fetches"):
        read_accesses(tmp_path / "accesses-x.npz")


# Ids of samples


def test_different_ids_have_different_files_that_fit() -> None:
    ids = ["a/b", "a_b", "a\nb", "A_B", "x" * 300, "x" * 301, "", "..", "ü" * 200, "\x1b[2J"]
    stems = [file_stem(id) for id in ids]
    assert len({stem.lower() for stem in stems}) == len(ids)
    assert all(stem.isascii() and len(stem) < 60 and "/" not in stem for stem in stems)


def test_no_id_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("needle", 2, 0) as shown:
        shown.sample_done("a\x1b[2J\r\n\u202eb" + "x" * 300, [])
        shown.say("note\x07 of \x9b31m")
    lines = capsys.readouterr().err.split("\n")
    assert len(lines) == 3 and all(line == printable(line) for line in lines)
    assert "\\x1b[2J\\r\\n\\u202eb" in lines[0] and "x" * 81 not in lines[0]


# Damage at random

DAMAGE = ("cut", "flip", "insert", "remove bytes", "delete", "empty", "swap", "add")
counts: Counter[str] = Counter()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, an unfinished one, and one whose answers were scored again."""
    base = tmp_path_factory.mktemp("originals")
    run(base / "finished", 5)
    with open_folder(base / "unfinished") as folder:
        for i in range(3):
            folder.append(ok_row(i), ledger_of(i))
    run(base / "scored", 5)
    with open_folder(base / "scored") as folder:
        scores = [score_of(row) for row in folder.rows]
        folder.put_scores(scores)
        for score in scores[:2]:
            folder.keep_score(score)
    return {name: base / name for name in ("finished", "unfinished", "scored")}


def damage(folder: Path, kind: str, which: int, at: int, bit: int, extra: bytes) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return
    path, other = files[which % len(files)], files[at % len(files)]
    content = bytearray(path.read_bytes())
    place = at % (len(content) + 1)
    if kind == "cut":
        path.write_bytes(content[:place])
    elif kind == "flip" and place < len(content):
        content[place] ^= 1 << bit
        path.write_bytes(content)
    elif kind == "insert":
        path.write_bytes(content[:place] + extra + content[place:])
    elif kind == "remove bytes":
        path.write_bytes(content[:place] + content[place + 1 + bit :])
    elif kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
    elif kind == "add":
        names = ("notes.txt", "ledger/x.parquet", "shards/x/samples.jsonl", "result.json.corrupt")
        put(names[which % len(names)], str(extra))(folder)


def entries(ledger: dict[str, list[Any]]) -> set[tuple[Any, ...]]:
    return set(zip(*ledger.values(), strict=True))


steps = st.tuples(
    st.sampled_from(DAMAGE),
    st.integers(0, 30),
    st.integers(0, 10**5),
    st.integers(0, 7),
    st.binary(min_size=1, max_size=8),
)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(kind=st.sampled_from(("finished", "unfinished", "scored")), damages=st.lists(steps, min_size=1, max_size=2))
def test_whatever_is_damaged_nothing_wrong_is_believed(
    originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, kind: str, damages: list[Any]
) -> None:
    original = originals[kind]
    path = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(original, path)
    for one in damages:
        damage(path, *one)
    true = [(read_samples(originals[name]), read_runs(originals[name])[0][1]) for name in ("finished", "scored")]
    ledger = read_ledger(originals["finished"], true[0][1])

    def check(rows: list[SampleRow], result: RunResult | None) -> None:
        """Each row is one that was written, with the scores of one scorer; a result is that of the whole run."""
        believed = [(all_rows, whole) for all_rows, whole in true if all(row in all_rows for row in rows)]
        assert believed
        if result is not None:
            assert result in [whole for _, whole in believed] and len(rows) == 5
            assert entries(read_ledger(path, result)) <= entries(ledger)  # less where parts were lost

    try:
        for folder, result in read_runs(path):
            check(read_samples(folder), result)
            counts["read"] += 1
    except ValueError:
        counts["not read"] += 1
    try:
        with open_folder(path) as folder:
            check(folder.rows, folder.finished)
            counts["finished" if folder.finished else "to be gone on with"] += 1
            for shard in folder.shards():
                folder.take(shard)
            if folder.finished is None:
                for i in range(5):
                    if not folder.has(f"needle/{i}"):
                        folder.append(ok_row(i), ledger_of(i))
                folder.sort([f"needle/{i}" for i in range(5)])
                folder.finish(summarise(folder.rows, FACTS), {})
                check(folder.rows, folder.finished)
    except (ConfigError, RunError) as error:
        assert "\n" not in str(error)
        counts["refused"] += 1
    shutil.rmtree(path.parent)


def test_the_damage_was_of_every_kind(record_testsuite_property: Any) -> None:
    """Behind the test above: how its examples ended, as numbers in the report of the tests."""
    if not counts:
        pytest.skip("the test of damage was not run")
    record_testsuite_property("damaged folders", dict(counts))
    print("damaged folders:", dict(counts))  # noqa: T201
    kinds = ("read", "not read", "finished", "to be gone on with", "refused")
    assert min(counts[kind] for kind in kinds) > 10
