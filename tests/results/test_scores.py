"""Scores that are given after the answers: they lie beside them, count whole or not at all, and answers stay."""

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.results import RunResult, SampleRow, read_run, read_samples, summarise
from kvbench.results.scores import PART, SCORES, Score
from kvbench.tests.results.made_rows import (
    FACTS,
    VERSION,
    contents,
    ledger_of,
    ok_row,
    oom_row,
    open_folder,
    run,
    score_of,
)


def scores_of(path: Path, **changes: Any) -> list[Score]:
    with open_folder(path) as folder:
        return [score_of(row, **changes) for row in folder.rows if row.status == "ok"]


def put(path: Path, **changes: Any) -> RunResult:
    scores = scores_of(path, **changes)
    with open_folder(path) as folder:
        return folder.put_scores(scores)


def line_of(path: Path, name: str) -> dict[str, Any]:
    return json.loads((path / name).read_text().splitlines()[0])


def test_answers_stay_when_they_are_scored_again(copied: Path) -> None:
    before = contents(copied)
    old = read_run(copied)[0]
    new = put(copied, value=0.25)
    after = contents(copied)
    assert after.keys() - before.keys() == {SCORES}
    assert {name for name in before if before[name] != after[name]} == {"result.json"}
    assert (new.score, new.score_version, new.task_version) == (0.25, VERSION, 1)
    assert new.score_ci95 is not None and new.score_ci95[0] < 0.25 < new.score_ci95[1], "four that agree prove little"
    assert replace(new, score=old.score, score_ci95=old.score_ci95, score_version=None) == old
    assert read_run(copied) == (new, read_samples(copied))
    assert [row.score for row in read_samples(copied)] == [0.25] * 4
    with open_folder(copied) as folder:
        assert folder.finished == new and folder.notes == [] and contents(copied) == after
    put(copied, value=0.5)
    assert read_run(copied)[0].score == 0.5


def test_a_line_says_what_was_judged_and_by_which_version(copied: Path) -> None:
    put(copied, metric="recall", measures={"helpful": 0.5})
    line = line_of(copied, SCORES)
    assert line.keys() == {"crc32", "id", "answer_crc32", "score", "metric", "task_version", "measures"}
    result, rows = read_run(copied)
    assert (result.metric, result.measures) == ("recall", {"helpful": 0.5})
    assert rows[0].fields == ok_row(0).fields | {"metric": "recall", "measures": {"helpful": 0.5}}


def test_samples_out_of_memory_need_no_score(tmp_path: Path) -> None:
    run(tmp_path, row=lambda i: oom_row(i) if i == 1 else ok_row(i))
    result = put(tmp_path)
    assert (result.n_samples, result.n_oom, result.status) == (3, 1, "oom")
    assert read_run(tmp_path)[0] == result


def test_answers_may_wait_for_their_scores(tmp_path: Path) -> None:
    def waiting(i: int) -> SampleRow:
        return ok_row(i, score=None, fields={"scores_later": True})

    result = run(tmp_path, row=waiting)
    assert (result.score, result.score_ci95, result.n_samples, result.n_oom, result.status) == (None, None, 4, 0, "ok")
    assert result.waits_for_scores and read_run(tmp_path)[0] == result
    done = put(tmp_path, value=1.0)
    assert done.score == 1.0 and not done.waits_for_scores
    assert line_of(tmp_path, "samples.jsonl")["score"] is None
    with pytest.raises(ValueError, match="'score' is None"):
        ok_row(0, score=None)


# Kills and damage


class Killed(BaseException):
    pass


def test_a_kill_while_scores_are_written_leaves_the_old_or_the_new_ones(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = read_run(finished)[0]
    new = put(shutil.copytree(finished, tmp_path / "whole"))
    seen = set[str]()
    for n_steps in itertools.count():
        path = shutil.copytree(finished, tmp_path / str(n_steps))
        scores, left = scores_of(path), itertools.count(n_steps, -1)

        def step(*arguments: Any, call: Any, left: Any = left) -> Any:
            if next(left) == 0:
                raise Killed
            return call(*arguments)

        with open_folder(path) as folder, monkeypatch.context() as patch:
            patch.setattr(Path, "replace", lambda *a, real=Path.replace: step(*a, call=real))
            patch.setattr(Path, "unlink", lambda path, **_: step(path, call=remove))
            patch.setattr(os, "fsync", lambda fd, real=os.fsync: step(fd, call=real))
            try:
                folder.put_scores(scores)
                break
            except Killed:
                pass
        result, rows = read_run(path)  # what a reader sees before anybody repairs it
        assert result in (old, new)
        assert [row.score for row in rows] == [
            row.score for row in read_run(finished if result == old else tmp_path / "whole")[1]
        ]
        seen.add("old" if result == old else "new")
        with open_folder(path) as folder:
            assert folder.finished == result
        assert read_run(path)[0] == result
        assert RunResult.from_json((path / "result.json").read_text()) == result
    assert seen == {"old", "new"} and n_steps > 6


def remove(path: Path) -> None:
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108


def test_scores_so_far_are_kept_and_half_a_line_is_not(copied: Path) -> None:
    with open_folder(copied) as folder:
        assert folder.scores_so_far() == {}
        for row in folder.rows[:2]:
            folder.keep_score(score_of(row))
    with (copied / PART).open("a") as file:
        file.write('{"crc32": "')
    with open_folder(copied) as folder:
        assert [*folder.scores_so_far()] == ["needle/0", "needle/1"]
        folder.keep_score(score_of(folder.rows[2]))
        assert [*folder.scores_so_far().values()] == [score_of(row) for row in folder.rows[:3]]
        folder.put_scores([score_of(row) for row in folder.rows])
    assert not (copied / PART).exists()


def test_without_scores_jsonl_the_scores_of_the_answers_count_again(copied: Path) -> None:
    old = read_run(copied)[0]
    put(copied)
    (copied / SCORES).unlink()
    with pytest.raises(ValueError, match=r"scores\.jsonl, which is lost"):
        read_run(copied)
    with open_folder(copied) as folder:
        assert folder.finished == old and "is made again" in folder.notes[0]
    assert read_run(copied)[0] == old


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"score": 0.', '"score": 0.9', 1), "line 1 is not a score"),
        (lambda text: text[:-1], "line 4 is not a score"),
        (lambda text: text + text, "it has a sample twice"),
        (lambda text: "", "it holds scores of 0 metrics"),
        (lambda text: text + '{"id": 1}\n', "line 5 is not a score"),
        (lambda text: text + '{"crc32": "00000000", "id": ' + "[" * 3000 + "\n", "line 5 is not a score"),
    ],
)
def test_damaged_scores_are_refused_with_what_to_do(change: Any, message: str, copied: Path) -> None:
    put(copied)
    text = (copied / SCORES).read_text()
    (copied / SCORES).write_text(change(text))
    with pytest.raises(ValueError, match=rf"scores\.jsonl cannot be believed \({message}.*delete it"):
        read_run(copied)
    before = contents(copied)
    with pytest.raises(ConfigError, match=message):
        open_folder(copied)
    assert contents(copied) == before


def test_scores_that_miss_an_answer_do_not_count(copied: Path) -> None:
    old = read_run(copied)[0]
    put(copied)
    lines = (copied / SCORES).read_text().splitlines(keepends=True)
    (copied / SCORES).write_text("".join(lines[:3]))
    with pytest.raises(ValueError, match="no score for the answer to 'needle/3'"):
        read_run(copied)
    with open_folder(copied) as folder:
        assert folder.finished == old and "does not count any more" in folder.notes[0]
        assert len(folder.scores_so_far()) == 3


def test_a_score_of_another_answer_does_not_count(copied: Path) -> None:
    put(copied, value=1.0)
    lines = (copied / "samples.jsonl").read_text().splitlines(keepends=True)
    (copied / "samples.jsonl").write_text("".join(lines[:3]))  # as the message on a damaged line says
    with open_folder(copied) as folder:
        assert [row.score for row in folder.rows] == [1.0] * 3
        folder.append(ok_row(3, prediction="another answer", score=0.5), ledger_of(3))
        assert [row.score for row in folder.rows] == [1, 1 / 2, 1 / 3, 0.5]
        folder.finish(summarise(folder.rows, FACTS), {})
        assert len(folder.scores_so_far()) == 4
    assert read_run(copied)[0].score_version is None


def test_the_same_answer_given_again_keeps_its_score(copied: Path) -> None:
    new = put(copied)
    lines = (copied / "samples.jsonl").read_text().splitlines(keepends=True)
    (copied / "samples.jsonl").write_text("".join(lines[:3]))
    assert run(copied).score is not None
    assert read_run(copied)[0] == new and contents(copied).keys() >= {SCORES}


def test_scores_of_two_versions_or_out_of_range_are_not_written(copied: Path) -> None:
    before = contents(copied)
    with open_folder(copied) as folder:
        rows = folder.rows
        for scores, message in (
            ([score_of(row, task_version=i) for i, row in enumerate(rows)], "4 metrics or versions"),
            ([score_of(row, 1.5) for row in rows], "not within 0 to 1"),
            ([score_of(row) for row in rows[:3]], "no score for the answer to 'needle/3'"),
        ):
            with pytest.raises(ValueError, match=message):
                folder.put_scores(scores)
    assert contents(copied) == before


def test_a_link_in_place_of_the_scores_is_refused(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("do not lose")
    for name in (SCORES, PART):
        (copied / name).symlink_to(tmp_path / "precious")
        with pytest.raises(ConfigError, match="is a symbolic link"):
            open_folder(copied)
        (copied / name).unlink()
    assert (tmp_path / "precious").read_text() == "do not lose"
