"""Calls read out of answers, and the kinds of their damage.

Not here: what is right in each task (test_agent_traces.py, test_bfcl.py, test_tool_calls.py).
"""

import json

import pytest

from kvbench.tasks.calls.damage import KINDS, Wanted, damage, shares
from kvbench.tasks.calls.read import read_calls

PAY = {"name": "pay", "arguments": {"number": "A-1", "amount": 0}}
LOOK = {"name": "look", "arguments": {}}
WANTED = [Wanted.of(PAY)]
TOOLS = ("pay", "look")


def framed(*calls: object) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def pay(**arguments: object) -> str:
    return framed({"name": "pay", "arguments": arguments})


@pytest.mark.parametrize(
    ("text", "n", "is_broken"),
    [
        (framed(PAY), 1, False),
        (framed(PAY, LOOK), 2, False),
        (f"I pay it now. {framed(PAY)} Done.", 1, False),
        (f"<think>{framed(LOOK)}</think>{framed(PAY)}", 1, False),
        (json.dumps(PAY), 1, False),
        (json.dumps([PAY, LOOK]), 2, False),
        (f"{json.dumps(PAY)}\n{json.dumps(LOOK)}", 2, False),
        (f"```json\n{json.dumps(PAY)}\n```", 1, False),
        (f"<|python_tag|>{json.dumps(PAY)}", 1, False),
        ('{"name": "pay", "parameters": {"amount": 1}}', 1, False),
        ('{"name": "pay", "arguments": "{\\"amount\\": 1}"}', 1, False),
        ("", 0, False),
        ("I cannot pay.", 0, False),
        ("[]", 0, False),
        ("3", 0, False),
        ('{"answer": 3}', 0, False),
        ('{"name": "pay", "arguments": {"amount": 1}', 0, True),
        ('{"name": "pay"}', 0, True),
        ('{"name": "pay", "arguments": [1]}', 0, True),
        ('[{"name": "pay", "arguments": {}}, 3]', 0, True),
        ('```json\n{"name": "pay", "argu', 0, True),
        ("<tool_call>", 0, True),
        ("<tool_call>\npay(1)\n</tool_call>", 0, True),
        (framed(PAY) + "\n<tool_call>\n{", 1, True),
        (framed(PAY).removesuffix("</tool_call>"), 1, False),
        ("[" * 100_000, 0, False),
        ('{"name": "pay", "arguments": {"amount": ' + "9" * 5000 + "}}", 0, True),
    ],
)
def test_calls_are_read_out_of_every_frame_and_a_begun_one_is_broken(text: str, n: int, is_broken: bool) -> None:
    found = read_calls(text)
    assert (len(found.calls), found.is_broken) == (n, is_broken)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("It is paid.", "no_call"),
        ("", "no_call"),
        (pay(number="A-1", amount=0)[:-20], "broken_json"),
        (framed({"name": "transfer", "arguments": {}}), "unknown_tool"),
        (framed({"name": "transfer", "arguments": {}}, PAY), "unknown_tool"),
        (framed(LOOK), "other_calls"),
        (framed(PAY, PAY), "other_calls"),
        (pay(), "missing_arguments"),
        (pay(number="", amount=0), "missing_arguments"),
        (pay(number=None, amount=0), "missing_arguments"),
        (pay(number="A-1"), "missing_arguments"),
        (pay(number="A-2", amount=0), "wrong_value"),
        (pay(number="A-1", amount=0, day="Monday"), "wrong_value"),
    ],
)
def test_a_wrong_answer_has_the_first_kind_of_damage_that_is_true_of_it(text: str, kind: str) -> None:
    assert damage(read_calls(text), WANTED, TOOLS, is_right=False) == kind
    assert damage(read_calls(text), WANTED, TOOLS, is_right=True) == "right"


def test_where_no_call_is_wanted_any_is_one_too_many() -> None:
    assert damage(read_calls(framed(PAY)), [], TOOLS, is_right=False) == "other_calls"
    assert Wanted.of({"name": "pay", "arguments": {"a": "", "b": [], "c": 0, "d": False}}).needs == ["c", "d"]


def test_shares_sum_to_one_and_are_nothing_where_no_call_was_wanted() -> None:
    assert all(sum(share for share in shares(kind).values() if share) == 1 for kind in KINDS)
    assert shares(None) == {}
