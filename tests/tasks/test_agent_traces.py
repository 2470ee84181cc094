"""Agent traces: actions, what they need, replays of traces as turns, drawn work, rows of files, and the cases."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.agent_traces import made
from kvbench.tasks.agent_traces.actions import action_of, agree, agreement, points_of
from kvbench.tasks.agent_traces.task import AgentTraces, age_bin
from kvbench.tasks.calls.damage import KINDS, shares
from kvbench.tasks.turns.encode import prompt_of
from kvbench.tasks.turns.questions import one_question
from kvbench.tests.golden_metrics import metrics_3
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def output(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "look", "content": text}


FIRST = [user("I am mia_17."), call("look", id="mia_17"), output('{"cards": ["card_9"]}'), call("pay", card="card_9")]
SECOND = [user("I am tom_42."), call("look", id="tom_42"), output('{"cards": ["card_5"]}'),
          {"role": "assistant", "content": "Shall I?"}, user("Yes."), call("pay", card="card_5"),
          output("done"), call("book", seat="window")]  # fmt: skip


def write(folder: Path, *rows: object) -> None:
    (folder / "agent_traces").mkdir(exist_ok=True)
    (folder / "agent_traces" / "airline.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "agent_traces" / "airline_policy.md").write_text("Be kind.\n")
    (folder / "agent_traces" / "airline_tools.json").write_text('[{"type": "function", "function": {"name": "look"}}]')


def task(folder: Path, **given) -> AgentTraces:
    values = yaml.safe_load((REPO / "conf" / "task" / "agent_traces.yaml").read_text())
    del values["_target_"]
    made_task = AgentTraces(build_params(AgentTraces, values | given, "task"), str(folder), 0)
    made_task.check(ModelShape("tiny", 2, 4, 2, 8, 8192, (0, 1)))
    return made_task


@pytest.fixture
def two(tmp_path: Path) -> Path:
    write(tmp_path, {"id": "a", "messages": FIRST}, {"id": "b", "messages": SECOND})
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>{"name": "x", "arguments": {}}', "x"),
        ('I think.</think>{"name": "x", "parameters": "{}"}', "x"),
        ('```json\n{"name": "x", "arguments": {}}\n```', "x"),
        ('Well, {"name": "x", "arguments": {}}', None),
        ('{"name": "x", "arguments": [1]}', None),
        ('<tool_call>{"name": "x"}</tool_call>', None),
    ],
)
def test_a_call_is_read_out_of_its_frame_and_never_out_of_prose(text: str, name: str | None) -> None:
    assert action_of(text).get("name") == name
    assert action_of(" \n") == {"kind": "invalid"}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('<tool_call>\n{"name": "x", "arguments": {"a": 1}\n</tool_call>', "invalid"),
        ('<tool_call>{"name": "x", "arguments": {"a": ', "invalid"),
        ('Let me look.\n<tool_call>{"name": "x"}</tool_call>', "invalid"),
        ('<tool_call>{"name": "x", "arguments": "{"}</tool_call>', "invalid"),
        ('<tool_call>[{"name": "x", "arguments": {}}]</tool_call>', "invalid"),
        ("<tool_call>", "invalid"),
        ('<tool_call>{</tool_call><tool_call>{"name": "x", "arguments": {}}</tool_call>', "invalid"),
        ("I try <tool_call>{</think>Which card?", "text"),
        ('{"name": "x", "arguments": {"a": ', "text"),
        ('{"name": "x", "arguments": {"a": "<tool_call>"}}', "call"),
    ],
)
def test_a_frame_without_a_call_that_can_be_read_is_no_text(text: str, kind: str) -> None:
    assert action_of(text)["kind"] == kind
    assert agreement(action_of(text), {"kind": "text"}).action == float(kind == "text")


def test_answers_that_are_no_action_are_counted(two: Path) -> None:
    made_task = task(two, ask="all")
    texts = [turn for turn in made_task.samples(tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)) if turn.conversation]
    calls, says = one_question(texts[0], 0), one_question(texts[1], 1)
    broken, right = '<tool_call>{"name": "look", "arguments": {"id": ', calls.references[0]
    assert [made_task.verdict(calls, text)[1]["invalid"] for text in (right, "Which?", broken, "")] == [0, 0, 1, 1]
    kinds = [{name: made_task.verdict(calls, text)[1][name] for name in KINDS} for text in (right, "Which?", broken)]
    assert kinds == [shares("right"), shares("no_call"), shares("broken_json")]
    assert made_task.verdict(says, "Which?") == (1.0, {"name": 1.0, "arguments": None, "invalid": 0.0})
    assert made_task.verdict(says, broken) == (0.0, {"name": 0.0, "arguments": None, "invalid": 1.0})


def test_they_are_counted_among_values_that_drawn_work_asks_for_too(tmp_path: Path) -> None:
    drawn = task(tmp_path, source="embedded", lengths=[7000], output_tokens=60, turns=3, rows=1)
    sample = drawn.samples(tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False))[0]
    turn = next(turn for turn in (one_question(sample, i) for i in range(3)) if "value" in turn.fields)
    for text, count in ((turn.references[0], 0.0), ('<tool_call>{"id": ', 1.0)):
        score, measures = drawn.verdict(turn, text)
        assert measures == {turn.fields["group"]: score, "invalid": count} and score == 1 - count


def test_values_agree_by_what_they_mean() -> None:
    assert agree(1, 1.0) and agree(" a", "a") and agree({"a": [1]}, {"a": [1.0]})
    assert not agree(True, 1) and not agree("1", 1) and not agree([1, 2], [2, 1]) and not agree(None, 0)
    found = action_of('{"name": "x", "arguments": {"a": 1, "b": 2}}')
    assert agreement(found, {"kind": "call", "name": "x", "arguments": {"a": 1, "c": 3}}).arguments == 1 / 3


def test_a_call_is_grounded_where_all_its_values_stand_earlier() -> None:
    points = {point.index: point for point in points_of(SECOND)}
    assert (points[1].is_grounded, points[1].oldest) == (True, 0)
    assert (points[5].is_grounded, points[5].oldest) == (True, 2)
    assert not points[7].is_grounded and points[3].action == {"kind": "text"}


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, TOOLS_TEMPLATE, None])
def test_each_decision_sees_the_recorded_past_and_not_its_own_answer(two: Path, template: str | None) -> None:
    tokenizer = tiny_tokenizer(template, adds_bos=False)
    made_task = task(two, sessions=2)
    samples = made_task.samples(tokenizer)
    assert [sample.id for sample in samples] == ["a", "b"]
    sample = samples[1]
    assert sample.conversation is not None and "card_9" in sample.context and "tom_42" not in sample.context
    look, pay = sample.conversation.turns
    assert "tom_42" in look.question and "Shall I?" in pay.question and "card_5" in pay.question
    assert look.references[0] in pay.question and pay.references[0] not in look.question + pay.question
    prompt: Any = prompt_of(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
    text = tokenizer.decode([*prompt.context_ids, *prompt.feeds[1]])
    assert text == sample.context + look.question + pay.question
    again = one_question(sample, 1)
    measures = {"name": 1.0, "arguments": 1.0, "invalid": 0.0, **shares("right")}
    assert made_task.verdict(again, pay.references[0]) == (1.0, measures)
    assert made_task.verdict(again, look.references[0])[0] == 0.0
    assert 20 < again.fields["age"] < 400 and again.fields["distance"] == 3


@pytest.mark.parametrize("mode", ["independent", "query_aware"])
def test_other_modes_ask_the_same_decision_behind_the_same_words(two: Path, mode: str) -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    whole = task(two, mode=mode).samples(tokenizer)
    golden = task(two).samples(tokenizer)[1]
    assert golden.conversation is not None
    text = golden.context + "".join(turn.question for turn in golden.conversation.turns)
    if mode == "query_aware":
        assert whole[-1].context + whole[-1].question == text and whole[-1].conversation is None
    else:
        assert whole[1].conversation is not None
        assert whole[1].context + whole[1].conversation.turns[-1].question == text


def test_what_is_asked_can_be_all_calls_or_all_decisions_of_all_sessions(two: Path) -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)

    def n_turns(**given: Any) -> list[int]:
        return [len(one.conversation.turns) for one in task(two, **given).samples(tokenizer) if one.conversation]

    assert [n_turns(ask=ask) for ask in ("grounded", "calls", "all")] == [[2, 2], [2, 3], [2, 4]]
    assert n_turns(ask="all", sessions=2, points="all") == [6, 6]


def test_sessions_are_no_more_than_there_are_traces(two: Path) -> None:
    with pytest.raises(ConfigError, match="more than the 2 traces"):
        task(two, sessions=3)


def test_ages_fall_into_four_bins() -> None:
    ages = (1, 500, 501, 8000, 8001, None)
    assert [age_bin(n) for n in ages] == ["0-500", "0-500", "500-2000", "2000-8000", "above 8000", "unknown"]


def test_questions_on_drawn_work_are_those_to_which_an_outdated_value_is_wrong() -> None:
    for kind in made.KINDS:
        rng = random.Random(kind)
        events = made.draw_events(rng, 200, 5)
        question = made.draw_question(rng, events, kind)
        assert question is not None, kind
        right = made.answer(events, question)
        if kind in ("first", "before_last", "last_read"):
            assert right != made.answer(events, {**question, "kind": "current"})
        if kind == "current":
            outdated = made.superseded(events, question)
            assert outdated and made.score(f"it was {outdated[0]}, now {json.dumps(right)}", right, outdated) == 0.0


# --- cases -------------------------------------------------------------------------------------------------------


def run_scores(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        action = action_of(row["prediction"])
        ours = agreement(action, row["reference"])
        same = action == row["parsed"]
        same = same and (ours.action, ours.name, ours.arguments) == (row["action"], row["name"], row["arguments"])
        found.append((f"scores[{i}]", None if same else f"{action}, {ours}"))
    return found


def run_points(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        ours = [
            {
                "index": point.index, "kind": point.action["kind"], "name": point.action.get("name"),
                "arguments": point.action.get("arguments"), "n_values": point.n_values,
                "n_grounded": point.n_grounded, "oldest": point.oldest, "grounded": point.is_grounded,
            }
            for point in points_of(row["messages"])
        ]  # fmt: skip
        found.append((f"points[{i}]", None if ours == row["points"] else "other points"))
    return found


def run_made(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        ours = made.answer(row["events"], row["question"])
        found.append((f"made[{i}]", None if ours == row["answer"] else f"{ours} instead of {row['answer']}"))
    return found


def run_answers(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        ours = made.score(row["prediction"], row["value"], row["superseded"])
        found.append((f"answers[{i}]", None if ours == row["score"] else f"{ours} instead of {row['score']}"))
    return found


RUNNERS = {
    "agent_scores": run_scores, "agent_scores_2": run_scores, "agent_points": run_points, "agent_made": run_made,
    "agent_answers": run_answers,
}  # fmt: skip


@pytest.mark.parametrize("name", RUNNERS)
def test_the_cases_agree(name: str) -> None:
    assert [case for case in RUNNERS[name](metrics_3(name)) if case[1]] == []
