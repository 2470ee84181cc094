"""Drawn samples of the newer tasks through the door of run.py: beside other methods each answers as it does alone."""

import json
from pathlib import Path

import pytest

from kvbench.tests.tiny_run import save_tiny, sweep

TASKS = {
    "babilong": ["task.datasets=[qa1]", "task.lengths=[1k]", "task.max_new_tokens=4"],
    "mrcr": ["task.lengths=[2500]", "task.template=plain"],
    "mrcr_forced": ["task.lengths=[2500]", "task.template=plain", "task.words=[10,20]", "task.questions=2"],
    "graphwalks": ["task.lengths=[2200]", "task.problems=[parents]", "task.max_new_tokens=4"],
    "graphwalks_forced": ["task.lengths=[2200]", "task.problems=[parents]"],
    "agent_traces": [
        "task.lengths=[5000]",
        "task.turns=2",
        "task.output_tokens=40",
        "task.max_new_tokens=4",
        "task.budget_base=context",
    ],
    "agent_forced": ["task.lengths=[4000]", "task.turns=2", "task.output_tokens=40"],
    "longmemeval": [
        "task.lengths=[6000]",
        "task.sessions=6",
        "task.types=[knowledge-update]",
        "task.max_new_tokens=4",
        "task.budget_base=context",
    ],
    "oolong": ["task.lengths=[2000]", "task.questions=2", "task.max_new_tokens=4"],
    "helmet": ["task.datasets=[icl]", "task.lengths=[1500]", "task.classes=3", "task.max_new_tokens=4"],
}
VARIANTS = [
    ["method=full"],
    ["method=snapkv", "ratio=0.2"],
    ["method=quest", "ratio=0.2"],
    ["method=snapkv", "ratio=1"],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return f"model.id={folder}"


@pytest.mark.parametrize("name", TASKS)
def test_fused_is_alone_and_all_tokens_are_full_attention(model: str, tmp_path: Path, name: str) -> None:
    words = ["model=any", model, f"task={name}", "task.source=embedded", "task.rows=1", *TASKS[name]]
    together = sweep(words, VARIANTS, tmp_path / "together")
    said = [[row.prediction for row in rows] for _, rows in together]
    for i in (1, 2):
        ((result, rows),) = sweep(words, [VARIANTS[i]], tmp_path / f"alone-{i}")
        assert [row.prediction for row in rows] == said[i]
        assert [row.score for row in rows] == [row.score for row in together[i][1]]
        assert result.score == together[i][0].score
    assert said[3] == said[0], "ratio 1"
    assert [row.score for row in together[3][1]] == [row.score for row in together[0][1]]
    assert all(row.status == "ok" and row.score is not None for _, rows in together for row in rows)
