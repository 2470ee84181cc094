"""Damaged data files of every task: they become samples that can be scored, or one sentence; nothing else comes out."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.settings import choice, load_class
from kvbench.tasks import prompt
from kvbench.tasks.reasoning import grade
from kvbench.tasks.reasoning.judge import Graded, Judge
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
SHAPE = ModelShape("tiny", 2, 4, 2, 8, 4096, (0, 1))
TEXT = "It was the best of times, it was the worst of times. " * 3
LONG = {"input": "Which one?", "context": TEXT, "answers": ["a", "b"], "length": 100, "dataset": "d",
        "language": "en", "all_classes": ["a", "b"], "_id": "id"}  # fmt: skip
INFINITE = {
    "id": 0,
    "context": TEXT,
    "input": "Which one?",
    "answer": ["best"],
    "options": ["best", "worst", "x", "y"],
}
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # by name: task's file, a good row, what is asked
    "longbench/data/qasper": ("longbench", LONG, {"datasets": "qasper"}),
    "longbench/data/trec": ("longbench", LONG, {"datasets": "trec"}),
    "infinitebench/data/passkey": ("infinitebench", INFINITE, {"datasets": "passkey"}),
    "infinitebench/data/code_debug": ("infinitebench", INFINITE | {"answer": "best"}, {"datasets": "code_debug"}),
    "infinitebench/data/math_find": ("infinitebench", INFINITE | {"input": "The largest number of it", "answer": 3},
                                     {"datasets": "math_find"}),
    "infinitebench/data/math_calc": ("infinitebench", INFINITE | {"answer": [1, 2]},
                                     {"datasets": "math_calc", "max_new_tokens": 20}),
    "infinitebench/data/code_run": ("infinitebench", INFINITE | {"input": "What is func_1(2)?", "answer": -3},
                                    {"datasets": "code_run"}),
    "infinitebench/data/kv_retrieval": ("infinitebench", INFINITE | {"answer": "best"}, {"datasets": "kv_retrieval"}),
    "infinitebench/data/longdialogue_qa_eng": ("infinitebench", INFINITE, {"datasets": "longdialogue_qa_eng"}),
    "ruler/512/niah_single_1": ("ruler", {"index": 0, "input": f"{TEXT}\nWhat is the special magic number for it? "
                                          "The special magic number for it is", "outputs": ["12"], "length": 500},
                                {"datasets": "niah_single_1", "length": 512}),
    "gsm8k/test": ("gsm8k", {"question": "How many?", "answer": "It is 3 and 4.\n#### 7"},
                   {"prompts": "own", "max_new_tokens": 8}),
    "math500/test": ("math500", {"problem": "What is half of 3?", "answer": "\\frac{3}{2}", "solution": "best"},
                     {"grader": "kvpress", "max_new_tokens": 8}),
    "aime/aime24": ("aime", {"problem": "How many?", "answer": "007"}, {"grader": "kvpress", "max_new_tokens": 8}),
    "hmmt/hmmt_feb_2025": ("hmmt", {"problem": "How many?", "answer": "\\frac{3}{2}", "problem_type": ["Algebra"]},
                           {"grader": "kvpress", "max_new_tokens": 8}),
    "gpqa_diamond/gpqa_diamond": ("gpqa_diamond", {"Record ID": "rec", "Question": "Which one?", "Correct Answer": "1",
                                  **{f"Incorrect Answer {i}": f"{i}1" for i in (1, 2, 3)}, "High-level domain": "x"},
                                  {"template": "plain", "max_new_tokens": 8}),
    "babilong/1k/qa1": ("babilong", {"input": TEXT, "question": "Where is Mary?", "target": "office"},
                        {"datasets": ["qa1"], "lengths": ["1k"]}),
    "mrcr/2needle": ("mrcr", {"prompt": json.dumps([{"role": "user", "content": "write a song"},
                     {"role": "assistant", "content": TEXT}, {"role": "user", "content": "Prepend ab to it."}]),
                     "answer": f"ab{TEXT}", "random_string_to_prepend": "ab", "desired_msg_index": 0},
                     {"template": "plain"}),
    "graphwalks/short": ("graphwalks", {"prompt": "The graph has the following edges:\nbest -> worst\n\nOperation:\n"
                         "Find the parents of node worst.", "problem_type": "parents", "answer_nodes": ["best"]},
                         {"max_new_tokens": 8}),
    "oolong/synth": ("oolong", {"id": 0, "context_window_id": 0, "context_window_text": TEXT, "question": "Which?",
                     "answer": "['best']", "answer_type": "ANSWER_TYPE.LABEL", "task_group": "counting"},
                     {"mode": "query_aware"}),
    "agent_traces/airline": ("agent_traces", {"id": 0, "messages": [
                             {"role": "user", "content": "I am mia_17."}, {"role": "assistant", "tool_calls": [
                                 {"function": {"name": "look", "arguments": '{"id": "mia_17"}'}}]},
                             {"role": "tool", "name": "look", "content": TEXT}]},
                             {"mode": "query_aware"}),
    "bfcl/BFCL_v4_simple_python.json": ("bfcl", {"id": 0, "question": [[{"role": "user", "content": TEXT}]],
                                        "function": [{"name": "look", "description": "best", "parameters": {
                                            "type": "dict", "required": ["at"], "properties": {
                                                "at": {"type": "array", "items": {"type": "string"}}}}}]},
                                        {"datasets": ["simple_python"]}),
    "helmet/data/nq": ("helmet", {"question": "Which?", "answers": ["best"], "ctxs": [{"title": "x", "text": TEXT}]},
                       {"datasets": "nq", "lengths": (2000,)}),
    "helmet/data/msmarco": ("helmet", {"query": "Which one?", "ctxs": [{"id": "7", "text": TEXT, "label": 1}]},
                            {"datasets": "msmarco", "lengths": (2000,)}),
    "longmemeval/longmemeval_s_cleaned": ("longmemeval", {
        "question_id": "q", "question_type": "single-session-user", "question": "Which times?", "answer": "best",
        "question_date": "2023/05/30", "haystack_session_ids": ["a", "b"], "answer_session_ids": ["b"],
        "haystack_dates": ["2023/05/20", "2023/05/22"], "haystack_sessions": [
            [{"role": "user", "content": "Hello."}], [{"role": "user", "content": TEXT, "has_answer": True}]]},
        {"mode": "query_aware"}),
    "pg19/book": ("pg19", {"text": TEXT * 9, "id": 1}, {"lengths": (32,), "targets": 4, "offsets": 1, "books": 3}),
    "mine": ("fidelity", {"prompt": TEXT * 9, "continuation": "And so on and so on.", "id": 1}, {"steps": 3}),
}  # fmt: skip
WILD = (
    *(None, True, -1, 0.5, 10**300, "", " ", "x", "\0", "\x1b[31m[/b]", "=1+1", "\N{RIGHT-TO-LEFT OVERRIDE}"),
    *([], {}, [[]], [None], ["a", 1], {"a": [1]}, [[["a"]]], "9" * 400, "The" * 2000, "{context}{input}", "\ud83d"),
)  # fmt: skip
RAW = (
    *(
        b'"',
        b"{",
        b"}",
        b"\n",
        b"\r",
        b"\0",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        rb"\ud800",
        b"1e999",
        b"NaN",
        b"7" * 5000,
    ),
    *(b"[" * 2000, b"[" * 80 + b"]" * 80, b'"a":', b"\xef\xbb\xbf", b"\x1f\x8b\x08"),
)
TOKENS = (  # what stands in a row's place of a value, and no writer writes
    *(
        b"7" * 5000,
        b"-" + b"7" * 400,
        b"1e999",
        b"NaN",
        b"[" * 2000 + b"]" * 2000,
        b"[" * 300 + b"]" * 300,
    ),
    *(
        b"[" * 120 + rb'"\ud800"' + b"]" * 120,
        rb'{"\ud800": 1}',
        b'{"a": 1, "a": 2}',
        b'{"a": ' * 300 + b"1" + b"}" * 300,
    ),
)
PLACE = "a token's place"
N = 60


@st.composite
def damaged(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """A file of three rows, of which some have other values, and whose bytes are cut, flipped, deleted or put in."""
    rows = []
    for i in range(3):
        row = (
            good
            | {key: i for key in ("id", "index") if key in good}
            | {key: f"id{i}" for key in ("_id", "Record ID", "question_id") if key in good}
        )
        for _ in range(draw(st.integers(0, 2))):
            key = draw(st.sampled_from(sorted(good)))
            match draw(st.sampled_from(["replace", "drop", "wrap", "swap", "token"])):
                case "replace":
                    row[key] = draw(st.sampled_from(WILD))
                case "drop":
                    row.pop(key, None)
                case "wrap":
                    row[key] = [row.get(key)]
                case "token":
                    row[draw(st.sampled_from([key, "more"]))] = PLACE
                case "swap":
                    row[key] = row.get(draw(st.sampled_from(sorted(good))))
        text = json.dumps(row, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
        rows.append(text.replace(json.dumps(PLACE).encode(), draw(st.sampled_from(TOKENS))))
    content = bytearray(b"\n".join(rows) + b"\n")
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["cut", "flip", "delete", "insert", "encode"])):
            case "cut":
                del content[at:]
            case "flip" if at < len(content):
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "delete":
                del content[at : at + draw(st.integers(1, 40))]
            case "insert":
                content[at:at] = draw(st.sampled_from(RAW))
            case "encode":
                encoding = draw(st.sampled_from(["utf-16", "utf-32", "utf-7", "utf-16-be"]))
                content[:] = content.decode("utf-8", "replace").encode(encoding)
    return bytes(content)


def place(folder: Path, file: str) -> Path:
    """A task's file, whose name ends in .jsonl where it has no other end."""
    return folder / (file if file.endswith(".json") else f"{file}.jsonl")


def read(folder: Path, file: str, on_bad_row: str) -> Iterator[Any]:
    """Every sample of the task, as a run makes it before and behind the model."""
    name, _, given = TASKS[file]
    if name == "agent_traces":  # they stand beside what is damaged
        for beside, content in {"airline_policy.md": "Be kind.\n", "airline_tools.json": "[]"}.items():
            path = folder / "agent_traces" / beside
            if not path.exists():
                path.write_text(content)
    if name == "bfcl":
        path = place(folder, file).parent / "possible_answer" / Path(file).name
        path.parent.mkdir(exist_ok=True)
        answers = [{"id": i, "ground_truth": [{"look": {"at": [["best"], ""]}}]} for i in range(3)]
        path.write_text("".join(f"{json.dumps(answer)}\n" for answer in answers))
    tree = yaml.safe_load((REPO / "conf" / "task" / f"{name}.yaml").read_text())
    if name == "fidelity":
        given = given | {"path": str(folder / "mine.jsonl")}
    elif "source" in tree:
        given = given | {"source": "local"}
    kind: Any = load_class(choice("task", name, tree))
    values = {key: value for key, value in tree.items() if key != "_target_"}
    task = kind(build_params(kind, values | given | {"on_bad_row": on_bad_row}, "task"), str(folder), 0)
    task.check(SHAPE)
    for sample in task.samples(TOKENIZER):
        if sample.ids is None:
            prompt.encode(TOKENIZER, sample, chat="auto", system_prompt="", scope="context_only")
        json.dumps({"id": sample.id, "references": sample.references, **sample.fields})
        if not task.is_forced:
            score = task.score(sample, "The answer is best, or 7 times.")
            assert 0 <= score <= 1
        yield sample


TOKENIZER = tiny_tokenizer(None, adds_bos=False)


@pytest.fixture(autouse=True)
def graded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: starting one takes seconds, and there is a task per example."""
    monkeypatch.setattr(Judge, "grade", lambda self, grader, text, gold, **more: Graded(
        **grade.reply({"grader": grader, "text": text, "gold": gold, **more})
    ))  # fmt: skip


@pytest.mark.parametrize("file", TASKS)
def test_a_damaged_file_becomes_samples_or_one_sentence(file: str, tmp_path: Path) -> None:
    _, good, _ = TASKS[file]
    path = place(tmp_path, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(
            json.dumps(good | {"id": i, "_id": str(i), "Record ID": str(i), "question_id": str(i), "index": i}) + "\n"
            for i in range(3)
        )
    )
    assert len(list(read(tmp_path, file, "refuse"))) == 3, "the rows that are damaged are good ones"

    counts: Counter[str] = Counter()

    @settings(max_examples=N)
    @given(damaged(good), st.sampled_from(["refuse", "skip"]))
    def reads(content: bytes, on_bad_row: str) -> None:
        path.write_bytes(content)
        try:
            n = len(list(read(tmp_path, file, on_bad_row)))
        except ConfigError as error:
            assert "\n" not in str(error) and "\x1b" not in str(error)
            counts["refused"] += 1
        else:
            counts["read"] += 1
            counts["rows"] += n

    reads()
    assert counts["refused"] and counts["read"], counts
