"""Files of the newer tasks that somebody damaged: each is refused in one sentence with the file and the line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine import foreign
from kvbench.engine.errors import ConfigError
from kvbench.tasks import rows
from kvbench.tests.tasks import test_fuzz_data as fuzz

TEXT = fuzz.TEXT
ROWS: dict[str, dict[str, Any]] = {name: row for name, (_, row, _) in fuzz.TASKS.items()}
MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # as in TASKS: task, a good row, what is asked
    "graphwalks/long": ("graphwalks", ROWS["graphwalks/short"], {"parts": ["long"], "max_new_tokens": 8}),
    "oolong/real": ("oolong", ROWS["oolong/synth"] | {"answer": "best, worst"},
                    {"form": "real", "mode": "query_aware"}),
    "helmet/data/trec_coarse": ("helmet", {"text": TEXT, "label": 3},
                                {"datasets": ["trec_coarse"], "lengths": (2000,)}),
    "helmet/data/json_kv": ("helmet", {"context": '{"a": "b"}', "question": "a", "answer": "b"},
                            {"datasets": ["json_kv"], "lengths": (2000,)}),
}  # fmt: skip
MEMORY = "longmemeval/longmemeval_s_cleaned"
NEEDED = {
    "babilong/1k/qa1": ("input", "question", "target"),
    "mrcr/2needle": ("prompt", "answer", "random_string_to_prepend"),
    "graphwalks/short": ("prompt", "problem_type"),
    "graphwalks/long": ("prompt", "problem_type"),
    "oolong/synth": ("id", "context_window_id", "context_window_text", "question", "answer"),
    "oolong/real": ("id", "context_window_id", "context_window_text", "question", "answer"),
    "agent_traces/airline": ("id", "messages"),
    MEMORY: (
        *("question_id", "question_type", "question", "answer", "question_date", "haystack_session_ids"),
        *("haystack_dates", "haystack_sessions", "answer_session_ids"),
    ),
    "bfcl/BFCL_v4_simple_python.json": ("id", "question", "function"),
    "hmmt/hmmt_feb_2025": ("problem", "answer"),
    "gpqa_diamond/gpqa_diamond": ("Record ID", "Question", "Correct Answer", "Incorrect Answer 3"),
    "helmet/data/nq": ("question", "answers", "ctxs"),
    "helmet/data/msmarco": ("query", "ctxs"),
    "helmet/data/trec_coarse": ("text", "label"),
    "helmet/data/json_kv": ("context", "question", "answer"),
}
BFCL = "bfcl/BFCL_v4_simple_python.json"
Damage = Callable[[bytes, bytes], tuple[bytes, str]]  # two good lines -> the file, and what must be said
DAMAGES: dict[str, Damage] = {
    "half a row": lambda one, two: (one + two[:-3] + b"\n", "line 2: the line is no whole JSON object"),
    "no object": lambda one, two: (one + b"[1, 2]\n", "line 2: the line is no JSON object"),
    "a blank line": lambda one, two: (one + b"\n" + two, "line 2: the line is empty"),
    "an empty file": lambda one, two: (b"", "the file is empty"),
    "a huge line": lambda one, two: (one + b'"' + b"x" * (2 << 20) + b'"\n' + two, "line 2: the line is longer than"),
    "another encoding": lambda one, two: (one + b'{"\xe9": 1}\n', "line 2: byte 2 is no UTF-8"),
    "utf-16": lambda one, two: ((one + two).decode().encode("utf-16"), "line 1: "),
    "an archive": lambda one, two: (b"\x1f\x8b\x08" + one, "line 1: the file is "),
    "a key twice": lambda one, two: (one + b'{"id": 1, "id": 2}\n', "line 2: the line is no whole JSON object (it has"),
    "a number without end": lambda one, two: (one + b'{"id": ' + b"9" * 5000 + b"}\n", "line 2: the line is no whole"),
    "a nest": lambda one, two: (one + b"[" * 9000 + b"]" * 9000 + b"\n", "line 2: the line is no whole JSON object"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (foreign, rows):
        monkeypatch.setattr(module, "LONGEST_LINE", 1 << 20)
    for name, one in MORE.items():
        monkeypatch.setitem(fuzz.TASKS, name, one)


def lines(file: str) -> tuple[bytes, bytes]:
    _, good, _ = fuzz.TASKS[file]
    names = [key for key in ("id", "_id", "Record ID", "question_id") if key in good]
    own = [{key: i if key == "id" else f"id{i}" for key in names} for i in range(2)]
    both = [json.dumps(good | one).encode() + b"\n" for one in own]
    return both[0], both[1]


def refusal(folder: Path, file: str, content: bytes) -> str:
    path = fuzz.place(folder, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(fuzz.read(folder, file, "refuse"))
    said = str(caught.value)
    assert said.startswith(f"{path}") and "\n" not in said
    return said


@pytest.mark.parametrize("file", NEEDED)
def test_a_damaged_file_is_refused_with_its_name_and_the_line(file: str, tmp_path: Path) -> None:
    for name, damage in DAMAGES.items():
        content, says = damage(*lines(file))
        assert says in refusal(tmp_path, file, content), name
    fuzz.place(tmp_path, file).write_bytes(b"".join(lines(file)))
    assert len(list(fuzz.read(tmp_path, file, "refuse"))) == 2


@pytest.mark.parametrize("file", NEEDED)
def test_a_row_without_a_field_or_with_another_type_is_refused_by_its_name(file: str, tmp_path: Path) -> None:
    first, second = lines(file)
    for key in NEEDED[file]:
        row = json.loads(second)
        for bad in ({k: v for k, v in row.items() if k != key}, *(row | {key: x} for x in ({"x": 1}, None, True, 0.5))):
            said = refusal(tmp_path, file, first + json.dumps(bad).encode() + b"\n")
            assert "line 2: " in said and f"'{key}'" in said, (key, said)


def tool(properties: dict[str, Any]) -> dict[str, Any]:
    return {"name": "look", "parameters": {"required": [], "properties": properties}}


def called(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("agent_traces/airline", {"messages": []}, "field 'messages' is empty"),
        ("agent_traces/airline", {"messages": [{"role": "robot", "content": "x"}]}, "message 0 has no role"),
        ("agent_traces/airline", {"messages": [{"role": "assistant", "content": None}]}, "message 0 has no content"),
        ("agent_traces/airline", {"messages": [called("{}") | {"tool_calls": [1]}]}, "other than one call"),
        ("agent_traces/airline", {"messages": [called("{}") | {"role": "user", "content": "x"}]}, "of an assistant"),
        ("agent_traces/airline", {"messages": [called("[")]}, "are no JSON"),
        ("agent_traces/airline", {"messages": [called("[]")]}, "are no object"),
        (BFCL, {"question": []}, "has 0 turns, not one"),
        (BFCL, {"question": [[{"role": "robot", "content": "x"}]]}, "without a role of"),
        (BFCL, {"question": [[{"role": "assistant", "content": "x"}]]}, "does not end with the user's words"),
        (BFCL, {"function": []}, "field 'function' is empty"),
        (BFCL, {"function": [{"name": " "}]}, "a tool without a name"),
        (BFCL, {"function": [{"name": "look"}]}, "has no description or no parameters"),
        (BFCL, {"function": [{"name": "look", "parameters": {"properties": {}}}]}, "no list of required arguments"),
        (BFCL, {"function": [{"name": "look", "parameters": {"required": []}}]}, "has no properties"),
        (BFCL, {"function": [tool({"at": {"type": "text"}})]}, "argument 'at' of tool 'look' has no type of"),
        (BFCL, {"function": [tool({"at": {"type": "array"}})]}, "argument 'at' of tool 'look' has no type of"),
        (BFCL, {"function": [tool({}) | {"name": "x"}]}, "no object with the name of one of the row's tools"),
        (BFCL, {"id": 7}, "its id stands nowhere in the file of right answers"),
        ("babilong/1k/qa1", {"target": "moon"}, "field 'target' is 'moon', no answer to qa1"),
        ("babilong/1k/qa1", {"question": " "}, "field 'question' is empty"),
        ("aime/aime24", {"problem": ""}, "field 'problem' is missing or empty"),
        ("aime/aime24", {"answer": "7.5"}, "field 'answer' is no whole number: '7.5'"),
        ("gpqa_diamond/gpqa_diamond", {"Record ID": "id0"}, "Record ID='id0' stands in line 1 already"),
        ("gpqa_diamond/gpqa_diamond", {"Incorrect Answer 1": "\n"}, "field 'Incorrect Answer 1' is empty"),
        ("hmmt/hmmt_feb_2025", {"answer": " "}, "field 'answer' is empty"),
        ("hmmt/hmmt_feb_2025", {"problem": "q" * 100_001}, "has 100001 characters"),
        ("graphwalks/short", {"problem_type": "dfs"}, "field 'problem_type' is 'dfs'"),
        ("graphwalks/short", {"problem_type": "bfs"}, "asks for no operation of this problem_type"),
        ("graphwalks/short", {"answer_nodes": "a1"}, "no list of texts"),
        ("graphwalks/short", {"prompt": "Operation:\nFind the parents of node b1."}, "has no edges"),
        ("gsm8k/test", {"question": 3}, "field 'question' is not a text: 3"),
        ("gsm8k/test", {"answer": "none"}, "field 'answer' holds no number: 'none'"),
        ("infinitebench/data/passkey", {"answer": []}, "field 'answer' is empty"),
        ("infinitebench/data/passkey", {"id": 0}, "id=0 stands in line 1 already"),
        ("infinitebench/data/code_run", {"input": "?"}, "field 'input' names no call"),
        ("infinitebench/data/math_find", {"input": "?"}, "which number"),
        ("infinitebench/data/code_debug", {"answer": "five"}, "'five' is none"),
        ("longbench/data/qasper", {"answers": []}, "field 'answers' is empty"),
        ("longbench/data/qasper", {"answers": [3]}, "field 'answers' is not a list of texts"),
        ("longbench/data/qasper", {"context": ""}, "field 'context' is empty"),
        ("longbench/data/qasper", {"_id": "id0"}, "_id='id0' stands in line 1 already"),
        ("longbench/data/qasper", {"length": None}, "field 'length' is not a whole number: None"),
        ("longbench/data/trec", {"all_classes": None}, "field 'all_classes' is empty"),
        (MEMORY, {"question_id": "id0"}, "question_id='id0' stands in line 1 already"),
        (MEMORY, {"question_type": "small-talk"}, "field 'question_type' is 'small-talk', no type"),
        (MEMORY, {"answer": "?"}, "field 'answer' holds no word"),
        (MEMORY, {"haystack_dates": ["2023/05/20"]}, "has not as many elements as its ids and dates"),
        (MEMORY, {"haystack_sessions": []}, "'haystack_sessions' is empty"),
        (MEMORY, {"haystack_sessions": [[], ["x"]]}, "session 1 of field 'haystack_sessions' is no list of messages"),
        (MEMORY, {"haystack_sessions": [[], [{"role": "user"}]]}, "session 1 of field 'haystack_sessions' is no list"),
        (MEMORY, {"haystack_sessions": [[{"role": "tool", "content": "x"}], []]}, "with role and content"),
        (MEMORY, {"answer_session_ids": ["c"]}, "field 'answer_session_ids' names no session of the row"),
        ("math500/test", {"problem": ""}, "field 'problem' is empty"),
        ("math500/test", {"answer": " "}, "field 'answer' is empty"),
        ("math500/test", {"problem": "q" * 100_001}, "has 100001 characters"),
        ("mrcr/2needle", {"prompt": "[{"}, "field 'prompt' is no JSON"),
        ("mrcr/2needle", {"prompt": "[]"}, "no list of messages"),
        ("mrcr/2needle", {"prompt": '[{"role": "robot", "content": "x"}]'}, "no role or no text"),
        ("mrcr/2needle", {"prompt": '[{"role": "assistant", "content": "x"}]'}, "no question of the user"),
        ("mrcr/2needle", {"answer": "Rain"}, "does not begin with random_string_to_prepend"),
        ("oolong/synth", {"question": " "}, "field 'question' is no text"),
        ("oolong/synth", {"context_window_text": 7}, "field 'context_window_text' is not a text"),
        ("oolong/synth", {"answer": ""}, "field 'answer' is empty"),
        ("oolong/synth", {"context_window_id": "x" * 2000}, "more than 1000 characters"),
    ],
)
def test_a_row_that_cannot_be_asked_is_named(file: str, change: dict[str, Any], says: str, tmp_path: Path) -> None:
    first, second = lines(file)
    said = refusal(tmp_path, file, first + json.dumps(json.loads(second) | change).encode() + b"\n")
    assert "line 2: " in said and says in said
    kept = list(fuzz.read(tmp_path, file, "skip"))
    assert len(kept) == 1, "the result goes on with the row that is good"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[{", "is no JSON"), (b"{}", "holds no list of rows"), (b"[]", "the file is empty"),
        (b"\xff[]", "is no JSON"), (b"[7]", "row 0: the line is no JSON object"),
        (b"[" * 9000 + b"]" * 9000, "is no JSON"),
    ],
)  # fmt: skip
def test_a_list_of_rows_is_refused_by_its_row(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "babilong" / "1k" / "qa1.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(fuzz.read(tmp_path, "babilong/1k/qa1", "refuse"))
    assert says in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "beside", "content"),
    [
        ("agent_traces/airline", "agent_traces/airline_tools.json", b"{"),
        ("agent_traces/airline", "agent_traces/airline_tools.json", b'{"a": 1}'),
        ("agent_traces/airline", "agent_traces/airline_tools.json", b"[1]"),
        ("agent_traces/airline", "agent_traces/airline_policy.md", b"caf\xe9"),
        ("babilong/1k/qa1", "babilong/prompts.json", b'{"qa1": {"instruction": 1}}'),
        ("babilong/1k/qa1", "babilong/prompts.json", b"{"),
        ("babilong/1k/qa1", "babilong/prompts.py", b"DEFAULT_PROMPTS = open('x')\n"),
        ("babilong/1k/qa1", "babilong/prompts.py", b"DEFAULT_PROMPTS = {'qa2': {}}\n"),
    ],
)
def test_a_damaged_file_beside_the_rows_is_named(file: str, beside: str, content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / Path(file).parent
    folder.mkdir(parents=True)
    fuzz.place(tmp_path, file).write_bytes(lines(file)[0])
    (tmp_path / beside).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(fuzz.read(tmp_path, file, "refuse"))
    assert Path(beside).name in str(caught.value) and "\n" not in str(caught.value)
