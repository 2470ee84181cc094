"""A run's answers scored again from its folder alone: no data, no model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.errors import ConfigError
from kvbench.evals import rescore
from kvbench.evals.screen.table import remarks
from kvbench.plots.read import conditions, read_all, read_one
from kvbench.results import LEDGER_MEANS, SampleRow, read_run, read_samples
from kvbench.results.scores import PART, SCORES
from kvbench.tasks.base import Sample
from kvbench.tasks.gsm8k import Gsm8k
from kvbench.tasks.longbench.task import LongBench
from kvbench.tasks.needle.task import Needle
from kvbench.tests.plots.made_runs import write
from kvbench.tests.tiny_run import run, save_tiny

REPO = Path(__file__).resolve().parents[2]
CODE = {"dataset": "lcc", "all_classes": None}
TYPES = {"dataset": "trec", "all_classes": ["a number", "a place"]}
CASES: dict[str, list[tuple[dict[str, Any], str, list[str], float]]] = {
    "longbench": [
        (CODE, "\n  x = 1", ["x = 1"], 0.83),
        (TYPES, "\na place\na number", ["a place"], 1),
    ],
    "infinitebench": [({"dataset": "math_find", "ground_truth": 88}, "88.5", ["88"], 0)],
    "needle": [({}, " it is 1234567.", ["1234567"], 1)],
    "gsm8k": [({}, "so 5\nQuestion: 9", ["#### 5"], 1)],
    "ruler": [({"dataset": "vt"}, "AB\x07CD", ["ab", "xy"], 0.5)],
}


def test_a_folder_that_holds_no_run_is_one_plain_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rescore.main([str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path / 'none'} is no folder of a run that can be read (")
    assert "Error(" not in said and said.count(str(tmp_path)) == 2


def run_of(folder: Path, task: str, *changes: tuple[str, Any]) -> Path:
    """A folder with config.yaml and samples.jsonl, as a run leaves them."""
    params = yaml.safe_load((REPO / "conf" / "task" / f"{task}.yaml").read_text())
    del params["_target_"]
    config = {"task": {"name": task, "params": params | dict(changes)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    ledger: dict[str, Any] = dict.fromkeys(LEDGER_MEANS.values(), 1.0) | {"within_budget": True}
    lines = [
        SampleRow(
            id=str(i), prompt_sha256="0" * 16, prompt_tokens=9, original_prompt_tokens=9, generated_tokens=3,
            prediction=prediction, references=references, score=score, status="ok", error=None, prefill_s=1.0,
            decode_s=1.0, tpot_s=0.5, batch_rows=1, ledger=ledger, fields=fields,
        ).to_json()
        for i, (fields, prediction, references, score) in enumerate(CASES.get(task, []))
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.mark.parametrize("task", CASES)
def test_a_folder_is_all_that_a_score_needs(tmp_path: Path, monkeypatch, task: str) -> None:
    monkeypatch.setattr("kvbench.tasks.sources.find", None)  # whoever looks for data breaks
    pairs = rescore.new_scores(run_of(tmp_path, task))
    assert len(pairs) == len(CASES[task])
    assert [score.score for _, score in pairs] == [row.score for row, _ in pairs]
    assert rescore.main([str(tmp_path)]) == 0


def test_a_score_that_has_changed_is_named(tmp_path: Path, capsys) -> None:
    assert rescore.main([str(run_of(tmp_path, "longbench", ("strip", True)))]) == 1
    said = capsys.readouterr().out
    assert "0 0.83 is now 1.0" in said and "2, 1 differ" in said


def test_what_cannot_be_scored_again_is_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(ConfigError, match="task=pg19 scores what it saw"):
        rescore.new_scores(run_of(tmp_path, "pg19"))
    (tmp_path / "config.yaml").write_text("[]")
    assert rescore.main([str(tmp_path)]) == 2
    assert "no folder of a run" in capsys.readouterr().err
    assert rescore.main([]) == 2


# Scores that count from then on


def finished_run(root: Path, task: str, score: float = 0.25) -> Path:
    """A finished run with the answers of `CASES`, whose scores are others than today's."""
    rows = [
        {"score": score, "fields": {"dataset": task, "length": 9, "depth": 0.0, **fields}, "prediction": prediction,
         "references": references}
        for fields, prediction, references, _ in CASES[task]
    ]  # fmt: skip
    return write(root, "h2o", task, rows, task_params=params_of(task))[0]


@pytest.mark.parametrize("task", CASES)
def test_new_scores_count_and_answers_stay(tmp_path: Path, task: str, capsys) -> None:
    folder = finished_run(tmp_path, task)
    answers = (folder / "samples.jsonl").read_bytes()
    old, _ = read_run(folder)
    assert rescore.main([str(folder)]) == 1 and read_run(folder)[0] == old
    assert rescore.main(["--write", str(folder)]) == 0
    assert (folder / "samples.jsonl").read_bytes() == answers and not (folder / PART).exists()
    new, rows = read_run(folder)
    assert [row.score for row in rows] == [score for *_, score in CASES[task]]
    assert new.score == pytest.approx(sum(row.score or 0 for row in rows) / len(rows)) and new.score != old.score
    assert new.score_version is not None and new.notes == old.notes
    assert rescore.main([str(folder)]) == 0
    assert "0 differ" in capsys.readouterr().out.splitlines()[-1]
    assert {path.name for path in folder.iterdir()} & {"datasets.csv", "heatmap.csv", "gsm8k.json"}


def test_runs_that_were_scored_by_two_versions_share_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished_run(tmp_path, "gsm8k")
    monkeypatch.setattr(Gsm8k, "version", read_one(folder).result.task_version)
    before = conditions(read_one(folder))
    assert rescore.main(["--write", str(folder)]) == 0
    assert conditions(read_one(folder)) == before
    monkeypatch.setattr(Gsm8k, "version", 2)
    assert rescore.main(["--write", str(folder)]) == 0
    assert conditions(read_one(folder)) != before and "scored by version 2" in str(conditions(read_one(folder)))


class Slow(Needle):
    """Gives a score and how sure it is; breaks off where `broken` says."""

    scores_later = True
    version = 9

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        if sample.id == broken.at:
            raise KeyboardInterrupt
        broken.seen.append(sample.id)
        return 0.25, {"sure": 0.75}


@dataclass
class Broken:
    at: str
    seen: list[str]


broken = Broken("", [])


def test_a_scorer_that_is_stopped_goes_on_behind_its_last_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, old = write(tmp_path, "h2o", "needle", [{}] * 4, task_params=params_of("needle"))
    monkeypatch.setattr(rescore, "load_class", lambda choice: Slow)
    monkeypatch.setattr(Slow, "artifacts", lambda *_: None)
    broken.at, broken.seen = "sample-2", []
    with pytest.raises(KeyboardInterrupt):
        rescore.main(["--write", str(folder)])
    assert read_run(folder)[0] == old and not (folder / SCORES).exists()
    broken.at = ""
    assert rescore.main(["--write", str(folder)]) == 0
    assert broken.seen == [f"sample-{i}" for i in range(4)]
    result, rows = read_run(folder)
    assert (result.score, result.measures, result.score_version) == (0.25, {"sure": 0.75}, 9)
    assert rows[0].fields["measures"] == {"sure": 0.75}


def test_scores_so_far_of_another_version_are_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = write(tmp_path, "h2o", "needle", [{}] * 3, task_params=params_of("needle"))
    monkeypatch.setattr(rescore, "load_class", lambda choice: Slow)
    monkeypatch.setattr(Slow, "artifacts", lambda *_: None)
    broken.at, broken.seen = "sample-2", []
    with pytest.raises(KeyboardInterrupt):
        rescore.main(["--write", str(folder)])
    monkeypatch.setattr(Slow, "version", 10)
    broken.at = ""
    assert rescore.main(["--write", str(folder)]) == 0
    assert len(broken.seen) == 2 + 3 and read_run(folder)[0].score_version == 10


def params_of(task: str) -> dict[str, Any]:
    params = yaml.safe_load((REPO / "conf" / "task" / f"{task}.yaml").read_text())
    return {key: value for key, value in params.items() if key != "_target_"}


def test_a_task_may_answer_now_and_score_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    model = save_tiny(tmp_path / "tiny")
    words = ["model=any", f"model.id={model}", "method=full", "task=needle", "task.source=embedded",
             "task.lengths=[400]", "task.depths=[0,50]", "task.max_new_tokens=3"]  # fmt: skip
    at_once, rows = run(words, tmp_path / "at-once")
    with monkeypatch.context() as patch:
        patch.setattr(Needle, "scores_later", True)
        later, waiting = run(words, tmp_path / "later")
        assert [row.score for row in waiting] == [None, None] and later.n_samples == 2 and later.score is None
        assert run(words, tmp_path / "later")[0] == later
        assert any("rescore --write" in line for line in remarks([later]))
        found, left_out = read_all(tmp_path)
        assert len(found) == 1 and "answers without scores" in left_out[0]
        assert rescore.main(["--write", str(tmp_path / "later")]) == 0
    scored = read_samples(tmp_path / "later")
    assert [row.score for row in scored] == [row.score for row in rows]
    result = read_run(tmp_path / "later")[0]
    assert (result.score, result.score_ci95) == (at_once.score, at_once.score_ci95)
    assert "none" not in capsys.readouterr().err and len(read_all(tmp_path)[0]) == 2


@pytest.mark.parametrize("wrong", [lambda *_: (2.0, {}), lambda *_: ("high", {}), lambda *_: (float("nan"), {})])
def test_a_scorer_that_gives_no_score_is_told_so(
    wrong: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    folder = finished_run(tmp_path, "longbench")
    before = read_run(folder)
    monkeypatch.setattr(LongBench, "verdict", wrong)
    assert rescore.main(["--write", str(folder)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert read_run(folder) == before and not (folder / PART).exists()


@pytest.mark.parametrize("writes", [(), ("--write",)])
def test_an_answer_that_no_scorer_can_judge_is_named(writes: tuple[str, ...], tmp_path: Path, capsys) -> None:
    folder, _ = write(tmp_path, "full", "needle", [{"score": 1.0, "references": []}])  # a share of no references
    assert rescore.main([*writes, str(folder)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "the answer to 'sample-0' cannot be scored" in said


def test_only_finished_runs_are_scored_again(tmp_path: Path, capsys) -> None:
    folder = finished_run(tmp_path, "gsm8k")
    (folder / "result.json").unlink()
    assert rescore.main(["--write", str(folder)]) == 2
    assert "is not finished" in capsys.readouterr().err
    assert rescore.main(["--write", str(tmp_path / "nowhere")]) == 2 and not (tmp_path / "nowhere").exists()
    assert rescore.main(["--wrote", str(folder)]) == 2 == rescore.main(["--write"])
