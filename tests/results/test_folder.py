import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from kvbench.engine.errors import ConfigError, RunError
from kvbench.results import RunResult, read_runs, read_samples, summarise
from kvbench.results import folder as results
from kvbench.results.files import refuse_closed, sealed
from kvbench.tests.results.made_rows import CONFIG, FACTS, FILES, contents, ok_row, oom_row, open_folder, run


def test_a_finished_run_has_its_files_and_nothing_else(finished: Path) -> None:
    assert sorted(contents(finished)) == sorted(FILES)
    assert yaml.safe_load((finished / "config.yaml").read_text()) == CONFIG
    assert len((finished / "samples.jsonl").read_text().splitlines()) == 4
    assert json.loads((finished / "env.json").read_text()) == {"cpu": "one"}


def test_the_same_command_again_finds_the_result(copied: Path) -> None:
    before = contents(copied)
    result = RunResult.from_json((copied / "result.json").read_text())
    with open_folder(copied) as folder:
        assert folder.finished == result and folder.notes == []
    assert contents(copied) == before


def test_ledgers_are_merged_in_the_order_of_samples(finished: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(finished / "ledger.parquet")
    assert table.column_names == ["sample_id", "step", "moved_bytes"]
    assert table["sample_id"].to_pylist() == [f"needle/{i}" for i in range(4) for _ in range(i + 1)]
    assert table["step"].to_pylist() == [step for i in range(4) for step in range(i + 1)]


def test_ledgers_of_different_types_are_merged(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    with open_folder(tmp_path) as folder:
        for i, column in enumerate(([], [1, 2], [1.5])):
            folder.append(ok_row(i), {"x": column})
        folder.append(oom_row(3))
        folder.finish(summarise(folder.rows, FACTS), {})
        assert folder.notes == []
    assert pq.read_table(tmp_path / "ledger.parquet")["x"].to_pylist() == [1.0, 2.0, 1.5]


def test_ids_of_any_shape_have_ledgers_of_their_own(tmp_path: Path) -> None:
    ids = ["a/b", "a-b", "../../x", "x" * 300, "ü", "A/B"]
    with open_folder(tmp_path / "run") as folder:
        for id in ids:
            folder.append(ok_row(id=id), {"x": [1]})
        assert len(list((tmp_path / "run" / "ledger").iterdir())) == len(ids)
        folder.finish(summarise(folder.rows, FACTS), {})
        assert folder.notes == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_sample_is_not_appended_twice(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        folder.append(ok_row(0))
        with pytest.raises(AssertionError, match="already"):
            folder.append(ok_row(0))


def test_a_line_that_cannot_be_written_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_folder(tmp_path) as folder:
        folder.append(ok_row(0))
        said = r"samples\.jsonl cannot be written \(No space left on device\); free space"
        with monkeypatch.context() as patch, pytest.raises(RunError, match=said):
            patch.setattr(results.os, "fsync", full_disk)
            folder.append(ok_row(1))
        folder.append(ok_row(2))
    assert [row.id for row in read_samples(tmp_path)] == ["needle/0", "needle/2"]


@pytest.mark.parametrize("tail", [b'{"id": "needle/9", "promp', b"\x00\x00\n", b"\xff\xfe", b"\n"])
def test_a_torn_last_line_is_cut_off_and_run_again(tail: bytes, copied: Path, finished: Path) -> None:
    for name in ("result.json", "env.json", "ledger.parquet"):
        (copied / name).unlink()
    samples = copied / "samples.jsonl"
    whole = samples.read_bytes()
    samples.write_bytes(whole + tail)
    with open_folder(copied) as folder:
        assert len(folder.rows) == 4 and "samples.jsonl" in folder.notes[0]
    assert samples.read_bytes() == whole


@pytest.mark.parametrize("missing", [1, 2, 50])
def test_a_finished_run_with_a_torn_line_is_completed_again(missing: int, copied: Path, finished: Path) -> None:
    samples = copied / "samples.jsonl"
    samples.write_bytes(samples.read_bytes()[:-missing])
    with pytest.raises(ValueError, match=r"samples\.jsonl ends within a line"):
        read_runs(copied)
    with open_folder(copied) as folder:
        assert folder.finished is None and len(folder.rows) == 3
        assert [any(name in note for note in folder.notes) for name in FILES[-2:]] == [True, True]
    run(copied)
    (copied / "result.json.corrupt").unlink()
    assert contents(copied) == contents(finished)


@pytest.mark.parametrize("garbage", [b"garbage\n", b"\n", b"\xff\n", b'{"id": 1\n'])
def test_garbage_in_the_middle_is_refused_with_its_line(garbage: bytes, copied: Path) -> None:
    samples = copied / "samples.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join([lines[0], garbage, *lines[1:]]))
    with pytest.raises(ConfigError, match=r"samples\.jsonl line 2 is not JSON"):
        open_folder(copied)
    with pytest.raises(ValueError, match=r"samples\.jsonl line 2"):
        read_runs(copied)


def test_a_line_that_is_no_sample_is_refused_even_at_the_end(copied: Path) -> None:
    with (copied / "samples.jsonl").open("a") as file:
        file.write(sealed('{"id": "needle/9"}') + "\n")
    with pytest.raises(ConfigError, match=r"line 5 is not a sample \(key '\w+' is missing\)"):
        open_folder(copied)


def test_a_repeated_sample_is_refused_with_its_line(copied: Path) -> None:
    samples = copied / "samples.jsonl"
    samples.write_text(samples.read_text() + sealed(ok_row(2).to_json()) + "\n")
    with pytest.raises(ConfigError, match="line 5 has sample 'needle/2' a second time"):
        open_folder(copied)


def test_a_result_of_another_schema_is_refused_unchanged(copied: Path) -> None:
    (copied / "result.json").write_text('{"schema_version": 99, "new": 1}')
    (copied / "samples.jsonl").write_bytes((copied / "samples.jsonl").read_bytes() + b"torn")
    before = contents(copied)
    with pytest.raises(ConfigError, match=r"result\.json: schema_version is 99; only 1, 2 and 3 can be read;"):
        open_folder(copied)
    with pytest.raises(ValueError, match="read it with the code that wrote it"):
        read_runs(copied)
    assert contents(copied) == before


UNREADABLE = ("[" * 3000 + "]" * 3000, "9" * 5000, "1e999", "[" * 400 + "]" * 400)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"schema_version": "x"}', "\x00" * 50),
        *(f'{{"schema_version": 1, "{key}": {value}}}' for key in ("params", "seed") for value in UNREADABLE),
        *(f'{{"schema_version": {value}}}' for value in UNREADABLE),
    ],
)
def test_a_corrupt_result_is_moved_aside_and_made_again(text: str, copied: Path, finished: Path) -> None:
    (copied / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"result\.json is not the result of a run"):
        read_runs(copied)
    with open_folder(copied) as folder:
        assert folder.finished is None and "result.json was damaged" in folder.notes[0]
    run(copied)
    assert (copied / "result.json.corrupt").read_text() == text
    (copied / "result.json.corrupt").unlink()
    assert contents(copied) == contents(finished)


def test_a_missing_result_is_made_again(copied: Path, finished: Path) -> None:
    (copied / "result.json").unlink()
    assert read_runs(copied) == []
    run(copied)
    assert contents(copied) == contents(finished)


@pytest.mark.parametrize("lines", [0, 3])
def test_a_result_that_counts_lost_lines_is_made_again(lines: int, copied: Path, finished: Path) -> None:
    samples = copied / "samples.jsonl"
    kept = samples.read_text().splitlines(keepends=True)[:lines]
    samples.write_text("".join(kept))
    with pytest.raises(ValueError, match="4 samples, 0 oom and 0 failed"):
        read_runs(copied)
    run(copied)
    (copied / "result.json.corrupt").unlink()
    assert contents(copied) == contents(finished)


def test_a_result_with_another_score_than_its_samples_is_made_again(copied: Path) -> None:
    result = RunResult.from_json((copied / "result.json").read_text())
    (copied / "result.json").write_text(replace(result, score=0.99).to_json())
    with pytest.raises(ValueError, match="another score"):
        read_runs(copied)
    with open_folder(copied) as folder:
        assert folder.finished is None


def test_a_lost_ledger_is_noted_and_the_result_stands(copied: Path) -> None:
    (copied / "ledger.parquet").unlink()
    with open_folder(copied) as folder:
        assert folder.finished is not None and "ledger.parquet" in folder.notes[0]


def test_a_damaged_ledger_is_noted_when_the_result_is_made_again(copied: Path) -> None:
    (copied / "result.json").unlink()
    (copied / "ledger.parquet").write_bytes(b"PAR1 nonsense")
    with open_folder(copied) as folder:
        folder.finish(summarise(folder.rows, FACTS), {})
        assert "no rows of 4 of 4 samples" in folder.notes[0]


def test_another_configuration_is_refused_with_the_keys_that_differ(copied: Path) -> None:
    other = CONFIG | {"seed": 1, "method": {"name": "snapkv", "params": {"window": 16, "new": None}}}
    with pytest.raises(ConfigError, match=r"another method\.params\.new, method\.params\.window, seed;"):
        open_folder(copied, other)
    run(copied, config=CONFIG | {"out": "elsewhere"})


@pytest.mark.parametrize("text", ["", "just text", "a: [", "\x00"])
def test_a_damaged_configuration_is_refused(text: str, copied: Path) -> None:
    (copied / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml is not the configuration of a run"):
        open_folder(copied)


def test_samples_of_an_unknown_run_are_refused(copied: Path) -> None:
    (copied / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"no folder of a run: it has 'env.json' and 3 more"):
        open_folder(copied)


def test_a_changed_prompt_is_refused(copied: Path) -> None:
    with open_folder(copied) as folder:
        folder.check_prompt("needle/0", ok_row(0).prompt_sha256)
        folder.check_prompt("needle/77", "0" * 16)
        with pytest.raises(ConfigError, match="'needle/0' has another prompt now"):
            folder.check_prompt("needle/0", "0" * 16)


def test_a_place_that_cannot_be_written_is_refused_in_a_sentence_and_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file", Path("/dev/null"), Path("/dev/null/x")):
        for refuses in (open_folder, refuse_closed):
            with pytest.raises(ConfigError, match=r"cannot be used .*; choose another one with out=DIR"):
                refuses(path)
    refuse_closed(tmp_path)
    refuse_closed(tmp_path / "not" / "yet")
    monkeypatch.setattr(os, "access", lambda path, how: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match="Permission denied"):
        refuse_closed(tmp_path / "not" / "yet")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"config\.yaml is no plain file"):
        open_folder(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        open_folder(tmp_path / "run")


def test_a_refusal_lets_go_of_the_folder(copied: Path) -> None:
    with pytest.raises(ConfigError, match="another seed"):
        open_folder(copied, CONFIG | {"seed": 1})
    with open_folder(copied, wait=False) as folder:
        assert folder.finished is not None


def test_samples_out_of_memory_stay_until_they_are_to_be_run_again(tmp_path: Path) -> None:
    first = run(tmp_path, row=lambda i: oom_row(i) if i == 1 else ok_row(i))
    assert (first.status, first.n_oom) == ("oom", 1)
    assert run(tmp_path) == first
    second = run(tmp_path, retry_oom=True)
    assert (second.status, second.n_samples, second.n_oom) == ("ok", 4, 0)
    assert [row.id for row in read_samples(tmp_path)] == [f"needle/{i}" for i in (0, 2, 3, 1)]
    assert second == summarise([ok_row(i) for i in range(4)], FACTS)
    assert run(tmp_path, retry_oom=True) == second
    import pyarrow.parquet as pq

    ids = pq.read_table(tmp_path / "ledger.parquet")["sample_id"].to_pylist()
    assert list(dict.fromkeys(ids)) == [f"needle/{i}" for i in (0, 2, 3, 1)]
