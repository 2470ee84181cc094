"""The command that puts a task through what every task must hold: what it says of ours and of wrong ones."""

from pathlib import Path

import pytest

from kvbench.tests.conformance import main
from kvbench.tests.task_conformance import PROPERTIES, subject
from kvbench.tests.tiny_run import example_task

EMBEDDED = {  # every task that asks without data of somebody else, so long that the tokenizer of tests can fill it
    "agent_traces": ["task.lengths=[12000]", "task.turns=4"],
    "agent_forced": ["task.lengths=[12000]", "task.turns=4"],
    "babilong": ["task.lengths=[2k]", "task.datasets=made"],
    "graphwalks": ["task.lengths=[2000]"],
    "graphwalks_forced": ["task.lengths=[2000]"],
    "helmet": ["task.datasets=[icl,json_kv]", "task.lengths=[6000]"],
    "infinitebench": ["task.length=2000", "task.datasets=made"],
    "longbench": [],
    "longmemeval": ["task.lengths=[6000]"],
    "mrcr": ["task.lengths=[6000]"],
    "mrcr_forced": ["task.lengths=[6000]"],
    "needle": ["task.grid=smoke"],
    "oolong": ["task.lengths=[4000]"],
    "ruler": ["task.length=6000", "task.datasets=all"],
    "scbench": ["task.lengths=[4000]"],
    "serving": ["task.requests=4", "task.shared=200"],
    "tool_calls": ["task.lengths=[8000]"],
}
HEAD = """
from collections import Counter
from dataclasses import dataclass
from kvbench.tasks.base import Sample, Task
calls = Counter()

class Mine(Task):
    name, version, dataset, data_source = "mine", 1, "drawn", "embedded"
    @dataclass(frozen=True)
    class Params:
        pass
    def __init__(self, params, data_dir, seed):
        self.params = params
    def check(self, shape):
        pass
    def samples(self, tokenizer):
        return [self.one(i) for i in range(3)]
    def one(self, i):
        return Sample(str(i), f"The number is {i}0.", "Which?", references=(f"{i}0",), fields={"n": i})
    def score(self, sample, prediction):
        return float(sample.references[0] == prediction)
"""


def verdicts(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    code = main([*words])
    lines = capsys.readouterr().out.splitlines()[1:-1]
    return code, {name: line for line in lines for name in PROPERTIES if line[8:].startswith(name)}


@pytest.mark.parametrize("name", EMBEDDED)
def test_our_tasks_hold_every_property(name: str) -> None:
    settings = [word for word in EMBEDDED[name] if not word.endswith("=made")]
    source = [] if name in ("tool_calls", "serving") else ["task.source=embedded"]
    one = subject(name, [*source, *settings], 6)
    for check in PROPERTIES.values():
        check(one)


def test_the_files_of_the_page_hold_every_property(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = example_task(tmp_path)
    for words in ([files["notices.yaml"]], [files["phone_book.py"], "task.entries=20"]):
        code, said = verdicts(capsys, *map(str, words))
        assert code == 0 and [*said] == [*PROPERTIES]
        assert all(line.startswith("held") for line in said.values()), said


ONE = "    def one(self, i):\n        return Sample("
SCORE = "    def score(self, sample, prediction):\n        return "


@pytest.mark.parametrize(
    ("body", "name", "says"),
    [
        ("    metric = 'points'\n", "it says what", "metric=points is none of"),
        (f"{ONE}'x', 'a', 'b')\n", "ids are", "samples 0 and 1 are both called 'x'"),
        (f"{ONE}i, 'a', 'b')\n", "ids are", "sample 0 has the id 0, which is no text"),
        (f"{ONE}str(i), f'a {{calls.update([1]) or calls[1]}}', 'b')\n", "its samples are", "context of sample 2 was"),
        (f"{ONE}str(i), '', 'Which?')\n", "a prompt is cut", "sample '0' has no context"),
        (f"{ONE}str(i), 'Which?', '')\n", "a prompt is cut", "has nothing behind its context"),
        (f"{ONE}str(i), 'a', 'b', evidence=('c',))\n", "evidence", "sample '0' has the evidence 'c' nowhere"),
        (f"{ONE}str(i), 'a', 'b', max_new_tokens=0)\n", "answers have", "sample '0' has max_new_tokens=0"),
        (f"{SCORE}0.5\n", "a reference", "sample '0' scores 0.5 where its reference '00' is the answer"),
        (f"{SCORE}1\n", "an empty answer", "sample '0' scores 1 where the answer is empty"),
        (f"{SCORE}float(len(prediction) > 0) * 100\n", "scores of any", "the answer ' ': the score is 100"),
        (f"{SCORE}len(prediction) and 1 / (len(prediction) - 1)\n", "scores of any", "ZeroDivisionError at line"),
        (f"{SCORE}float(sample.context[-3:-1] == prediction)\n", "a line of", "scores 1, and 0 from its line"),
        (f"{ONE}str(i), 'a', 'b', fields={{'s': {{1}}}})\n", "fields are", "field 's' of sample '0' is no JSON"),
        (f"{ONE}str(i), 'a', 'b', fields={{'score': 1}})\n", "fields are", "the field 'score', which every line has"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, name: str, says: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + body)
    code, said = verdicts(capsys, str(path))
    (line,) = [line for what, line in said.items() if what.startswith(name)]
    assert code == 1 and line.startswith("BROKEN") and says in line


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("nothing.yaml", "task=nothing.yaml cannot be read"),
        ("nothing.py", "nothing.py cannot be read"),
        ("neddle", "no method 'neddle'"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert says in capsys.readouterr().err
