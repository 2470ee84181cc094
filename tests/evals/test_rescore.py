"""A run's answers scored again from its folder alone: no data, no model."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.errors import ConfigError
from evals import rescore
from evals.results import LEDGER_MEANS, SampleRow

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
    monkeypatch.setattr("evals.tasks.sources.find", None)  # whoever looks for data breaks
    pairs = rescore.rescored(run_of(tmp_path, task))
    assert len(pairs) == len(CASES[task])
    assert [score for _, score in pairs] == [row.score for row, _ in pairs]
    assert rescore.main([str(tmp_path)]) == 0


def test_a_score_that_has_changed_is_named(tmp_path: Path, capsys) -> None:
    assert rescore.main([str(run_of(tmp_path, "longbench", ("strip", True)))]) == 1
    said = capsys.readouterr().out
    assert "0 0.83 is now 1.0" in said and "2, 1 differ" in said


def test_what_cannot_be_scored_again_is_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(ConfigError, match="task=pg19 scores what it saw"):
        rescore.rescored(run_of(tmp_path, "pg19"))
    (tmp_path / "config.yaml").write_text("[]")
    assert rescore.main([str(tmp_path)]) == 2
    assert "no folder of a run" in capsys.readouterr().err
    assert rescore.main([]) == 2
