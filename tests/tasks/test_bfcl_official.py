"""BFCL's official checkers and ours on answers that are right, or were changed: one verdict on each.

The package's checker of single calls imports the clients of all vendors through its table of models; a table of one
model stands in for it.

Not here: what each rule is (test_bfcl.py).
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.tasks.bfcl.checker import are_right, signature
from kvbench.tasks.bfcl.task import LIVE, ONE, TURNS
from kvbench.tasks.bfcl.world import turn_is_right
from kvbench.tests.tasks.bfcl_answers import changed_calls, right_calls
from kvbench.tests.tasks.test_bfcl import needs_package, task

pytestmark = needs_package
MODEL = "stand/in"
SINGLE = [name for name in (*ONE, *LIVE) if "relevance" not in name]
N = 300  # answers to each dataset
Calls = list[dict[str, Any]]


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, Calls, Any, str], bool | None]]:
    """The checker's verdict on calls; None where it raises."""
    table = SimpleNamespace(MODEL_CONFIG_MAPPING={MODEL: SimpleNamespace(underscore_to_dot=False)})
    place, checker = "bfcl_eval.constants.model_config", "bfcl_eval.eval_checker.ast_eval.ast_checker"
    monkeypatch.setitem(sys.modules, place, table)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    def verdict(functions: Any, calls: Calls, wanted: Any, name: str) -> bool | None:
        given = [{call["name"]: call["arguments"]} for call in calls]
        try:
            return ast_checker(functions, given, wanted, Language.PYTHON, name, MODEL)["valid"]
        except (AttributeError, KeyError, OverflowError, TypeError):
            return None

    yield verdict
    del sys.modules[checker]


@pytest.mark.parametrize("name", SINGLE)
def test_single_calls_have_the_official_verdict(name: str, official: Any) -> None:
    one, counts = task(datasets=[name]), Counter[bool | None]()
    rows = [row for _, row in one.rows[name]]
    for i in range(N):
        row, rng = rows[i * 7 % len(rows)], random.Random(f"{name} {i}")
        wanted = one.wanted(name, row) or ()
        calls = changed_calls(rng, right_calls(rng, wanted), row["function"])
        theirs = official(row["function"], calls, wanted, name)
        ours = are_right(calls, wanted, [signature(function) for function in row["function"]])
        assert ours == bool(theirs), (row["id"], calls, wanted)
        counts[theirs] += 1
    assert min(counts[True], counts[False]) > N // 5 and counts[None] < N // 50, counts


@pytest.mark.parametrize(
    ("declared", "right", "value"),
    [
        ({"type": "float"}, [1.0], 10**400),
        ({"type": "array", "items": {"type": "dict"}}, [[{"a": [1]}], ""], [5]),
        ({"type": "array", "items": {"type": "integer"}}, [[1], 2], [3]),
        ({"type": "dict"}, [{"a": 1}], {"a": 1}),
        ({"type": "dict"}, [{"a": {"b": [1]}}], {"a": {"b": 1}}),
    ],
)
def test_where_the_official_checker_raises_an_answer_is_wrong(
    declared: Any, right: Any, value: Any, official: Any
) -> None:
    tool = {"name": "x", "parameters": {"properties": {"a": declared}, "required": []}}
    calls, wanted = [{"name": "x", "arguments": {"a": value}}], [{"x": {"a": right}}]
    assert official([tool], calls, wanted, "simple_python") is None
    assert not are_right(calls, wanted, [signature(tool)])


# --- turns -------------------------------------------------------------------------------------


def line(call: dict[str, Any]) -> str:
    """A call as the official runner hands it to its checker."""
    return f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in call['arguments'].items())})"


def official_turn(row: Any, recorded: Sequence[Sequence[str]], calls: Calls, model: str) -> bool:
    """The verdict on the last turn's calls behind recorded ones; objects stay in the module by the model's name."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (
        multi_turn_checker,
        multi_turn_irrelevance_checker,
    )

    given = [[[*turn]] if turn else [] for turn in recorded[:-1]] + [[[line(call) for call in calls]] if calls else []]
    before = {*vars(multi_turn_utils)}
    try:
        is_valid = multi_turn_checker(given, [[*turn] for turn in recorded], row, "", model)["valid"]
        return is_valid and multi_turn_irrelevance_checker(given[-1:], [[*recorded[-1]]])["valid"]
    finally:
        for name in {*vars(multi_turn_utils)} - before:
            delattr(multi_turn_utils, name)


@pytest.mark.parametrize("name", TURNS)
def test_turns_have_the_official_verdict(name: str) -> None:
    one, counts = task(datasets=[name]), Counter[bool]()
    places = [(row, at) for _, row in one.rows[name] for at in range(len(row["question"]))]
    for i in range(N):
        (row, at), rng = places[i * 101 % len(places)], random.Random(f"{name} {i}")
        texts, fields = one.wanted(name, row) or (), one.plan(name, row).fields
        tools = [function for each in row["involved_classes"] for function in one.functions[each]]
        calls = changed_calls(rng, fields["recorded"][at], tools)
        before = [call for turn in fields["recorded"][:at] for call in turn]
        theirs = official_turn(row, texts[: at + 1], calls, f"m{i}")
        ours = turn_is_right(
            fields["classes"], fields["scenario"], fields["is_long"], before, fields["recorded"][at], calls
        )
        assert ours == theirs, (row["id"], at, calls, texts[at])
        counts[theirs] += 1
    assert min(counts.values()) > N // 5, counts


def test_texts_stay_where_upstream_writes_names_of_objects_into_them() -> None:
    row = {
        "id": "multi_turn_base_x", "involved_classes": ["TwitterAPI"],
        "initial_config": {"TwitterAPI": {"username": "ilse", "password": "p", "authenticated": True}},
    }  # fmt: skip
    call = {"name": "post_tweet", "arguments": {"content": "I retweet (twice) and comment(once)."}}
    assert turn_is_right(row["involved_classes"], row["initial_config"], False, [], [call], [call])
    assert not official_turn(row, [[line(call)]], [call], "texts")
