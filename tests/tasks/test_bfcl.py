"""BFCL: single calls, calls over turns, prompts, files, long forms; made rows, and the published ones where they are.

Not here: the official checkers (test_bfcl_official.py), reading and damage of calls (test_calls.py).
"""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Sample
from kvbench.tasks.bfcl import package
from kvbench.tasks.bfcl.checker import are_right, signature
from kvbench.tasks.bfcl.plans import Asked
from kvbench.tasks.bfcl.task import LIVE, ONE, TURNS, Bfcl
from kvbench.tasks.calls.damage import KINDS
from kvbench.tasks.turns.encode import prompt_of
from kvbench.tests.task_conformance import PROPERTIES, subject
from kvbench.tests.tasks.test_agent_traces import TOOLS_TEMPLATE
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
needs_package = pytest.mark.skipif(find_spec("bfcl_eval") is None, reason=f"bfcl-eval is not here: {package.INSTALL}")
IMPOSSIBLE = (  # the official checker says no to every answer (docs/tasks.md)
    *("live_simple_106-63-0", "live_simple_112-68-0", "live_multiple_862-181-3", "live_multiple_964-207-0"),
)
FERRY = {
    "name": "ferry.book",
    "description": "Book a ferry.",
    "parameters": {
        "type": "dict",
        "required": ["to", "seats"],
        "properties": {
            "to": {"type": "string", "description": "The island."},
            "seats": {"type": "integer"},
            "price": {"type": "float"},
            "days": {"type": "array", "items": {"type": "string"}},
            "corner": {"type": "tuple", "items": {"type": "float"}},
            "who": {"type": "dict", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
            "dogs": {"type": "array", "items": {"type": "dict", "properties": {"name": {"type": "string"}}}},
            "note": {"type": "any"},
        },
    },
}
WANTED = {
    "ferry.book": {
        "to": ["Juist", "the island of Juist"], "seats": [2], "price": [10.0, ""], "days": [["Mon", "Tue"], ""],
        "corner": [[1.0, 2.0], ""], "who": [{"name": ["Ilse"], "age": [30, ""]}, ""], "dogs": [[{"name": ["Rex"]}], ""],
        "note": ["", "none", 3],
    }
}  # fmt: skip
CALL = {"name": "ferry.book", "arguments": {"to": "Juist", "seats": 2}}
QUESTION = {"id": "one", "question": [[{"role": "user", "content": "Book two seats to Juist."}]], "function": [FERRY]}
ANSWER = {"id": "one", "ground_truth": [WANTED]}


def with_arguments(**arguments: Any) -> dict[str, Any]:
    return {"name": "ferry.book", "arguments": CALL["arguments"] | arguments}


def said(*calls: Any) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def write(folder: Path, name: str, rows: list[Any], answers: list[Any] | None) -> None:
    (folder / "bfcl" / "possible_answer").mkdir(parents=True, exist_ok=True)
    for place, lines in ((name, rows), (f"possible_answer/{name}", answers)):
        if lines is not None:
            file = Path(place).with_name(f"BFCL_v4_{Path(place).name}.json")
            (folder / "bfcl" / file).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def task(folder: Path | None = None, window: int = 1 << 20, **given: Any) -> Bfcl:
    values = yaml.safe_load((REPO / "conf" / "task" / "bfcl.yaml").read_text())
    del values["_target_"]
    made = Bfcl(build_params(Bfcl, values | given, "task"), None if folder is None else str(folder), 0)
    made.check(ModelShape("tiny", 2, 4, 2, 8, window, (0, 1)))
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "simple_python", [QUESTION], [ANSWER])
    return tmp_path


def own(folder: Path, **given: Any) -> Bfcl:
    return task(folder, source="local", datasets=["simple_python"], **given)


# --- one call ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({}, True),
        ({"to": "the_island of JUIST."}, True),
        ({"to": "Norderney"}, False),
        ({"seats": 2.0}, False),
        ({"seats": "2"}, False),
        ({"seats": True}, False),
        ({"price": 10}, True),
        ({"price": 10**400}, False),
        ({"price": "10.0"}, False),
        ({"days": ["mon", "tue."]}, True),
        ({"days": ["Tue", "Mon"]}, False),
        ({"days": []}, True),  # where it may be left out
        ({"days": "Mon, Tue"}, False),
        ({"days": [["Mon", "Tue"]]}, False),
        ({"corner": [1.0, 2.0]}, True),
        ({"corner": [1, 2]}, True),  # where it may be left out, no element's type is looked at
        ({"corner": [1.0, "2.0"]}, False),
        ({"who": {"name": "ilse"}}, True),
        ({"who": {"name": "Ilse", "age": 30}}, True),
        ({"who": {"name": "Ilse", "age": "30"}}, False),
        ({"who": {"age": 30}}, False),
        ({"who": {"name": "Ilse", "hat": 1}}, False),
        ({"who": []}, False),
        ({"dogs": [{"name": "rex"}]}, True),
        ({"dogs": [{"name": "Rex"}, {"name": "Rex"}]}, False),
        ({"dogs": ["Rex"]}, False),
        ({"dogs": [5]}, False),
        ({"note": "None"}, True),
        ({"note": 3}, False),  # the first right value is a text
        ({"note": None}, False),
        ({"hat": 1}, False),
    ],
)
def test_a_call_is_right_by_types_and_values(arguments: dict[str, Any], is_right: bool) -> None:
    assert are_right([with_arguments(**arguments)], [WANTED], [signature(FERRY)]) is is_right


def test_a_number_is_as_good_as_the_first_right_value_is_one() -> None:
    tool, right = {"name": "x", "required": [], "types": {"a": ["float", None], "b": ["string", None]}}, [1, 2]
    for value, is_right in ((1, True), (2.0, True), (3, False), ("1", False)):
        assert are_right([{"name": "x", "arguments": {"a": value}}], [{"x": {"a": right}}], [tool]) is is_right
    for value, is_right in ((1, True), ("1", False), (2.0, False)):  # whatever the declared type says
        assert are_right([{"name": "x", "arguments": {"b": value}}], [{"x": {"b": right}}], [tool]) is is_right


def test_calls_in_any_order_each_once() -> None:
    two = copy.deepcopy(WANTED)
    two["ferry.book"]["to"] = ["Borkum"]
    tools, other = [signature(FERRY)], with_arguments(to="Borkum")
    assert are_right([other, CALL], [WANTED, two], tools) and are_right([CALL, other], [WANTED, two], tools)
    assert not are_right([CALL, CALL], [WANTED, two], tools)
    assert not are_right([CALL], [WANTED, two], tools) and not are_right([CALL, other, CALL], [WANTED, two], tools)
    assert are_right([CALL, CALL], [WANTED, WANTED], tools)


NASTY = (
    ("", "no_call"),
    ("Juist", "no_call"),
    ("\0\ud83d <tool_call", "no_call"),
    ("<tool_call>", "broken_json"),
    ("<tool_call></tool_call>", "broken_json"),
    ("<tool_call>{}</tool_call>", "broken_json"),
    ("<tool_call>\n[]\n</tool_call>", "broken_json"),
    (said(CALL)[:-20], "broken_json"),
    (said(CALL).replace('"', "'"), "broken_json"),
    (said({"name": "ferry.book"}), "broken_json"),
    (said({"name": "ferry.book", "arguments": [2]}), "broken_json"),
    (said({"name": ["ferry.book"], "arguments": {}}), "broken_json"),
    (said({"name": {"a": 1}, "arguments": {}}), "broken_json"),
    ("<tool_call>" + "[" * 5000, "broken_json"),
    (said({"name": "", "arguments": {}}), "unknown_tool"),
    (said({"name": "ferry_book", "arguments": CALL["arguments"]}), "unknown_tool"),
    (said({"name": "__import__", "arguments": {"name": "os"}}), "unknown_tool"),
    (said(CALL, CALL), "other_calls"),
    (said(*[CALL] * 500), "other_calls"),
    (said({"name": "ferry.book", "arguments": {}}), "missing_arguments"),
    (said(with_arguments(to="")), "missing_arguments"),
    (said(with_arguments(seats=None)), "missing_arguments"),
    (said(with_arguments(to={"a": [1]})), "wrong_value"),
    (said(with_arguments(seats=[[[[2]]]])), "wrong_value"),
    (said(with_arguments(seats=10**300)), "wrong_value"),
    (said(with_arguments(price=10**307)), "wrong_value"),
    (said(with_arguments(who={"name": {"name": ["Ilse"]}})), "wrong_value"),
    (said(with_arguments(dogs=[None, {}])), "wrong_value"),
    (said(with_arguments(**{"to ": "Juist"})), "wrong_value"),
    (said(CALL), "right"),
    (said(CALL) + "\n<tool_call>\n{", "right"),  # as upstream, which leaves out what it cannot read
    (f"```json\n{json.dumps([CALL])}\n```", "right"),
    (f"<think>{said(CALL, CALL)}</think>Now: {said(CALL)}", "right"),
)


@pytest.mark.parametrize(("text", "kind"), NASTY)
def test_nasty_answers_have_a_verdict(text: str, kind: str, folder: Path, tokenizer: Any) -> None:
    score, measures = (one := own(folder)).verdict(one.samples(tokenizer)[0], text)
    assert score == (kind == "right") and measures == {name: float(name == kind) for name in KINDS}


# --- rows and prompts --------------------------------------------------------------------------


def test_a_question_behind_its_tools(folder: Path) -> None:
    (sample,) = own(folder).samples(tiny_tokenizer(TOOLS_TEMPLATE, adds_bos=False))
    assert sample.question.startswith("Book two seats") and sample.context.endswith("user\n")
    tool = json.loads(sample.context.partition("tools\n")[2].partition("<|im_end|>")[0])[0]["function"]
    assert tool["name"] == "ferry.book"  # the dot stays
    types = {key: one.get("type") for key, one in tool["parameters"]["properties"].items()}
    assert types == {
        "to": "string", "seats": "integer", "price": "number", "days": "array", "corner": "array", "who": "object",
        "dogs": "array", "note": "string",
    }  # fmt: skip
    assert tool["parameters"]["type"] == tool["parameters"]["properties"]["dogs"]["items"]["type"] == "object"


def test_a_row_of_ones_own_is_solved(folder: Path, tokenizer: Any) -> None:
    one = own(folder)
    sample = one.samples(tokenizer)[0]
    assert one.verdict(sample, one.right_answer(sample)) == (1.0, {name: float(name == "right") for name in KINDS})
    assert one.data_digest and one.data_source == "local"


def test_other_outputs_fill_the_length_and_the_question_stays(folder: Path, tokenizer: Any) -> None:
    short = own(folder).samples(tokenizer)[0]
    for length in (8000, 12000):
        sample = own(folder, lengths=[length]).samples(tokenizer)[0]
        prompt = prompt_of(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
        assert length - 1000 < len(prompt) + sample.max_new_tokens <= length
        assert sample.question == short.question and sample.context.count("<tool_response>") > 5
        assert '"name": "get_record"' in sample.context.split("<|im_end|>")[0]
    with pytest.raises(ConfigError, match="no row of"):
        own(folder, lengths=[500]).samples(tokenizer)


def test_rows_that_do_not_fit_the_window_are_left_out(folder: Path, tokenizer: Any) -> None:
    write(folder, "simple_python", [QUESTION, QUESTION | {"id": "two", "function": [FERRY] * 9}],
          [ANSWER, ANSWER | {"id": "two"}])  # fmt: skip
    one = own(folder, window=3000)
    assert [sample.id for sample in one.samples(tokenizer)] == ["simple_python-one"]
    assert "1 rows left out that do not fit 3000 tokens" in one.notes


def test_where_neither_files_nor_package_are_one_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps bfcl-eval==") as caught:
        task(tmp_path)
    assert "\n" not in str(caught.value)
    write(tmp_path, "simple_python", [QUESTION], None)
    with pytest.raises(ConfigError, match="possible_answer"):
        task(tmp_path, datasets=["simple_python"])


def test_turns_are_asked_apart_from_questions() -> None:
    with pytest.raises(ConfigError, match="ask multi_turn_base"):
        task(datasets=["multiple", "multi_turn_base"])


# --- turns -------------------------------------------------------------------------------------

DESK = {
    "id": "desk_1",
    "question": [
        [{"role": "user", "content": "Make a folder called maps."}],
        [{"role": "user", "content": "Sort the harbour's list."}],
        [],
        [{"role": "user", "content": "What is the root of 2, to 5 digits?"}],
    ],
    "initial_config": {"GorillaFileSystem": {"root": {"desk": {"type": "directory", "contents": {
        "harbour.txt": {"type": "file", "content": "b\na"}}}}}},
    "involved_classes": ["GorillaFileSystem", "MathAPI"],
    "missed_function": {"2": ["sort"]},
}  # fmt: skip
DESK_ANSWER = {
    "id": "desk_1",
    "ground_truth": [["mkdir('maps')", "ls()"], [], ["sort('harbour.txt')"], ["square_root(2, precision=5)"]],
}


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    write(tmp_path, "multi_turn_miss_func", [DESK], [DESK_ANSWER])
    return tmp_path


@needs_package
def test_turns_stand_behind_recorded_calls_and_their_outputs(desk: Path, tokenizer: Any) -> None:
    (sample,) = task(desk, datasets=["multi_turn_miss_func"]).samples(tokenizer)
    assert sample.conversation is not None
    first, second, third, last = sample.conversation.turns
    assert '"name": "ls"' in sample.context and '"name": "sort"' not in sample.context
    assert first.references and not second.references
    assert '"current_directory_content": ["harbour.txt", "maps"]' in second.question
    assert '{"type": "function", "function": {"name": "sort"' in third.question
    assert "1.4142" not in last.question and '"sorted_content": "a\\nb"' in last.question


@needs_package
@pytest.mark.parametrize(
    ("at", "calls", "kind"),
    [
        (0, [{"name": "mkdir", "arguments": {"dir_name": "maps"}}, {"name": "ls", "arguments": {}}], "right"),
        (0, [{"name": "mkdir", "arguments": {"dir_name": "maps"}}, {"name": "ls", "arguments": {"a": False}}], "right"),
        (0, [{"name": "mkdir", "arguments": {"dir_name": "maps"}}], "other_calls"),  # an output is missing
        (0, [{"name": "mkdir", "arguments": {"dir_name": "Maps"}}, {"name": "ls", "arguments": {}}], "wrong_value"),
        (0, [{"name": "mkdir", "arguments": {}}, {"name": "ls", "arguments": {}}], "missing_arguments"),
        (0, [{"name": "_load_scenario", "arguments": {"scenario": {}}}], "unknown_tool"),
        (0, [{"name": "eval", "arguments": {"text": "1"}}], "unknown_tool"),
        (1, [], "right"),
        (1, [{"name": "sort", "arguments": {"file_name": "harbour.txt"}}], "unknown_tool"),  # it comes later
        (2, [{"name": "sort", "arguments": {"file_name": "harbour.txt"}}], "right"),
        (2, [], "no_call"),
        (3, [{"name": "square_root", "arguments": {"number": 2, "precision": 5}}], "right"),
        (3, [{"name": "square_root", "arguments": {"number": 2, "precision": 10**9}}], "wrong_value"),
        (3, [{"name": "power", "arguments": {"base": 10**300, "exponent": 10**9}}], "other_calls"),
        (3, [{"name": "multiply", "arguments": {"a": "x", "b": 10**12}}], "other_calls"),
        (3, [{"name": "round_number", "arguments": {"number": 5, "decimal_places": -(10**9)}}], "other_calls"),
        (3, [{"name": "mkdir", "arguments": {"dir_name": "a"}}, {"name": "cp", "arguments": {
            "source": "a", "destination": "a"}}, {"name": "find", "arguments": {}}], "other_calls"),
        (3, [{"name": "ls", "arguments": {"a": [[]], "b": {"c": None}}}] * 200, "other_calls"),
    ],
)  # fmt: skip
def test_a_turn_is_right_by_what_its_calls_do(at: int, calls: Any, kind: str, desk: Path, tokenizer: Any) -> None:
    one = task(desk, datasets=["multi_turn_miss_func"], mode="query_aware")
    turns = one.samples(tokenizer)
    for _ in range(2):  # the same again: a verdict leaves nothing behind
        score, measures = one.verdict(turns[at], said(*calls))
        assert score == (kind == "right") and measures[kind] == 1.0


@needs_package
def test_turns_stand_behind_other_outputs_and_stay(desk: Path, tokenizer: Any) -> None:
    (short,) = task(desk, datasets=["multi_turn_miss_func"]).samples(tokenizer)
    one = task(desk, datasets=["multi_turn_miss_func"], lengths=[40_000])
    (sample,) = one.samples(tokenizer)
    assert sample.conversation is not None and short.conversation is not None
    assert sample.conversation.turns == short.conversation.turns and len(sample.context) > 2 * len(short.context)
    turns = task(desk, datasets=["multi_turn_miss_func"], lengths=[40_000], mode="query_aware").samples(tokenizer)
    other = said({"name": "get_record", "arguments": {"id": "A1"}})
    assert one.verdict(turns[1], other)[1]["other_calls"] == 1.0  # a tool that there is


@needs_package
def test_a_turn_whose_value_nobody_can_know_yet_is_not_asked(tmp_path: Path, tokenizer: Any) -> None:
    row = DESK | {"question": DESK["question"][:2], "missed_function": {}}
    calls = [["cat('harbour.txt')"], ["pwd()", "touch('desk.txt')", "grep('harbour.txt', '/desk')"]]
    write(tmp_path, "multi_turn_base", [row], [{"id": "desk_1", "ground_truth": calls}])
    one = task(tmp_path, datasets=["multi_turn_base"])
    (sample,) = one.samples(tokenizer)
    assert sample.conversation is not None and len(sample.conversation.turns) == 1
    assert "1 turns not asked, whose calls need an output of the same turn" in one.notes


@needs_package
@pytest.mark.parametrize(
    ("change", "turns", "says"),
    [
        ({"question": [[]]}, [[]], "turn 0 of field 'question' says nothing"),
        ({}, [[]], "has 4 turns, and the right answers 1"),
        ({"missed_function": {"2": "sort"}}, None, "no list of names for each turn"),
        ({"involved_classes": ["Oven"]}, None, "names 'Oven'"),
        ({"initial_config": {"GorillaFileSystem": {"root": {"desk": 3}}}}, None, "cannot be set up"),
        ({"initial_config": {"GorillaFileSystem": {"root": []}}}, None, "cannot be set up"),
        ({}, [[3], [], [], []], "no list of calls"),
        ({}, [["mkdir"], [], [], []], "is no call of its tools"),
        ({}, [["_load_scenario({})"], [], [], []], "is no call of its tools"),
        ({}, [["mkdir(open('x'))"], [], [], []], "is no call of its tools"),
        ({}, [["mkdir(('x', 'y').z())"], [], [], []], "is no call of its tools"),
        ({}, [["mkdir('a', 'b')"], [], [], []], "is no call of its tools"),
        ({}, [["(" * 500 + ")" * 500], [], [], []], "is no call of its tools"),
    ],
)
def test_turns_that_cannot_be_asked_are_named(change: Any, turns: Any, says: str, tmp_path: Path) -> None:
    answer = DESK_ANSWER if turns is None else DESK_ANSWER | {"ground_truth": turns}
    write(tmp_path, "multi_turn_miss_func", [DESK | change], [answer])
    with pytest.raises(ConfigError, match=r"line 1: ") as caught:
        task(tmp_path, datasets=["multi_turn_miss_func"])
    assert says in str(caught.value) and "\n" not in str(caught.value)


# --- the published rows ------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("settings", [
    ["task.rows=4", "task.datasets=[simple_python,parallel_multiple,irrelevance,live_relevance]"],
    ["task.rows=2", "task.datasets=[multiple,live_parallel]", "task.lengths=[20000]"],
    ["task.rows=4", "task.datasets=multi_turn"],
])  # fmt: skip
def test_it_holds_what_every_task_must(settings: list[str]) -> None:
    one = subject("bfcl", settings, 6)
    for check in PROPERTIES.values():
        check(one)


@needs_package
@pytest.mark.parametrize("name", [*ONE, *LIVE, *TURNS])
def test_every_published_row_is_solved_and_guessed_to_chance(name: str) -> None:
    one, lines = task(datasets=[name]), list[tuple[Sample, Asked]]()
    for _, row in one.rows[name]:
        plan = one.plan(name, row)
        for asked in plan.asked:
            fields = {"dataset": name, **plan.fields, **asked.fields}
            lines.append((Sample(str(row["id"]), "", "", fields=fields), asked))
    right = [one.verdict(sample, asked.right)[0] for sample, asked in lines]
    impossible = [sample.id for (sample, _), score in zip(lines, right, strict=True) if score < 1]
    assert impossible == [id for id in IMPOSSIBLE if id.startswith(name)]
    never = [one.verdict(sample, "I cannot do that.")[0] for sample, _ in lines]
    assert never == [float(not asked.is_wanted) for _, asked in lines]  # of irrelevance 1.0
    shift = len(lines) // 2  # a row far away
    others = [
        one.verdict(sample, lines[i - shift][1].right)[0] for i, (sample, asked) in enumerate(lines) if asked.is_wanted
    ]
    assert name == "live_relevance" or sum(others) <= max(1, 0.02 * len(others)), sum(others)


@needs_package
def test_files_that_the_package_brings_count_as_here(tmp_path: Path) -> None:
    assert Bfcl.data is not None and len(Bfcl.data.here(lambda file, _: None)) == len(Bfcl.data.files)
    mine = tmp_path / "mine.json"
    assert Bfcl.data.here(lambda file, _: mine)[0] == mine
