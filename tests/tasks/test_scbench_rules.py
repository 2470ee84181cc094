"""SCBench's rules: scores, function match, prompts of three modes, KVzip's checks, and the official figures."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kvbench.tasks import sources
from kvbench.tasks.scbench import functions, kvzip, prompts, scores
from kvbench.tasks.scbench.scores import TurnScore
from kvbench.tests.golden_metrics import metrics_folder
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, LLAMA_TEMPLATE, NO_SYSTEM, tiny_tokenizer
from kvbench.tests.vectors import Check

MODES = {"golden": "golden", "no_golden": "dialogue", "scdq": "independent"}  # by their names in the vectors


# --- scores ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "prediction", "truth", "score", "raised"),
    [
        ("scbench_kv", "it is a1-b2, I think", "a1-b2", 1.0, None),
        ("scbench_kv", "A1-B2", "a1-b2", 0.0, None),
        ("scbench_vt", "abc XYZ", ["ABC", "XYZ", "LMN"], 0.67, None),
        ("scbench_qa_eng", " the OAK tree", ["elm", "oak"], 1.0, None),
        ("scbench_qa_eng", "tin", "nut", 1.0, None),  # letter by letter
        ("scbench_many_shot", "(b)", ["(B)"], 1.0, None),
        ("scbench_choice_eng", "answer is: oak", ["oak", "C"], 1.0, None),
        ("scbench_mf", "-3.9", 3, 1.0, None),
        ("scbench_mf", "2.50", [2.5], 1.0, None),
        ("scbench_mf", "5", "5", 0.0, "TypeError"),
        ("scbench_passkey", "No. 0123", ["0123"], 1.0, None),
        ("scbench_summary", "one two", "one two", 1.0, None),
        ("scbench_other", "x", "x", 0.0, "KeyError"),
    ],
)
def test_turns_are_scored_with_every_quirk(task, prediction, truth, score, raised) -> None:
    assert scores.turn_score(task, prediction, truth) == (pytest.approx(score), raised)


def test_turns_are_averaged_by_their_index_first() -> None:
    rows = [TurnScore("a", 0, 1.0), TurnScore("b", 0, 0.0), TurnScore("a", 1, 1.0)]
    assert scores.turn_means(rows) == {0: 0.5, 1: 1.0}
    assert scores.official_by_turn(rows) == "50.000,100.000" and scores.official_at_once(rows) == "66.667"
    mixed = [TurnScore("a", 0, 1.0, "x"), TurnScore("a", 1, 0.5, "y")]
    assert scores.official_by_turn(mixed, ("x", "y")) == "100.000,0.000,0.000,50.000"
    assert scores.turn_means(mixed, "x") == {0: 1.0}  # a turn without this subtask is left out
    assert scores.official_at_once(mixed, ("x", "y", "z")) == "100.000,50.000,0.000"


# --- functions ---------------------------------------------------------------------------------

CODE = {
    "python": ("def twice(x):\n    y = x + x\n    return y", "z = 1\n"),
    "java": ("static int twice(int x) {\n  if (x > 0) { return x; }\n  return x + x;\n}", "class A {\n"),
    "typescript": ("function twice(x: number): number {\n  return x + x;\n}", "const z = 1;\n"),
    "rust": ("fn twice(x: i32) -> i32 {\n    x + x\n}", "struct A;\n"),
    "cpp": ("int twice(int x) {\n  return x + x;\n}", "int z = 1;\n"),
    "go": ("func twice(x int) int {\n\treturn x + x\n}", "package main\n"),
}


@pytest.mark.parametrize("language", CODE)
@pytest.mark.parametrize("has_grammars", [True, False])
def test_the_first_function_of_the_first_block_is_compared(language, has_grammars, monkeypatch) -> None:
    if not has_grammars:
        monkeypatch.setattr(functions, "find_spec", lambda name: None)
    elif functions.missing_grammars():
        pytest.skip(f"{functions.missing_grammars()} are not here")
    assert functions.finder() == ("tree-sitter" if has_grammars else "regular expressions")
    function, before = CODE[language]
    other = function.replace("twice", "thrice").replace("x + x", "x + x + x")
    answer = f"Here:\n```\nno code\n```\n```{language}\n{before}{function}\n\n{other}\n```\n"
    found = functions.match(answer, language, "twice", [("thrice", other), ("twice", function)])
    assert (found.code, found.name, found.similarity) == (function, "twice", 1.0)
    assert found.is_right() and not functions.match(answer, language, "thrice", [("twice", function)]).is_right()


def test_answers_without_a_function_are_compared_as_they_are() -> None:
    assert functions.match("", "python", "f", [("f", "def f(): pass")]).name is None
    assert functions.code_of(" def f(): pass ", "python") == "def f(): pass"  # no block: all of it
    assert functions.code_of("```\nplain words\n```", "python") == "plain words\n"
    method = "struct A { int get() { return 1; } };\nint A::put() { return 2; }\nint own() { return 3; }"
    assert functions.code_of(f"```\n{method}\n```", "cpp") in ("int own() { return 3; }", "int get() { return 1; }")


# --- prompts -----------------------------------------------------------------------------------

ROW = {
    "context": "The {x} of $5.",
    "multi_turns": [{"input": "First?", "answer": ["one", 1]}, {"input": "Second?", "answer": "two"}],
}


def test_a_conversation_without_a_chat_template() -> None:
    templates = prompts.own_templates()
    golden = prompts.pieces_of("scbench_vt", ROW, "golden", templates)
    assert golden == ["The {x} of $5.\n\nFirst?", "['one', 1]\n\nSecond?"]
    assert prompts.pieces_of("scbench_vt", ROW, "dialogue", templates)[1] == "Second?"
    assert prompts.pieces_of("scbench_vt", ROW, "independent", templates) == ["The {x} of $5.", "First?", "Second?"]


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, LLAMA_TEMPLATE, NO_SYSTEM + CHATML_TEMPLATE])
def test_the_pieces_of_a_chat_are_the_whole_conversation(template) -> None:
    tokenizer = tiny_tokenizer(template, adds_bos=False)
    pieces = prompts.pieces_of("scbench_kv", ROW, "golden", prompts.own_templates(), tokenizer)
    turns = [
        {"role": "user", "content": prompts.pieces_of("scbench_kv", ROW, "golden", prompts.own_templates())[0]},
        {"role": "assistant", "content": "['one', 1]"},
        {"role": "user", "content": "Second?"},
    ]
    assert "".join(pieces) == tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    context, first, _ = prompts.pieces_of("scbench_kv", ROW, "independent", prompts.own_templates(), tokenizer)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "JSON"}], tokenize=False, add_generation_prompt=True
    )
    assert context.endswith("The {x} of $5.") and first == "First?" + whole.partition("JSON")[2]


def test_two_oddities_of_the_authors_stay() -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    numbers = [{"input": f"The {word} number is", "answer": 1} for word in ("largest", "Median", "smallest")]
    row = {"context": "1 2 3", "multi_turns": numbers}
    plain = prompts.pieces_of("scbench_mf", row, "dialogue", prompts.own_templates())
    chat = prompts.pieces_of("scbench_mf", row, "dialogue", prompts.own_templates(), tokenizer)
    assert "What is the median number?" in plain[1] and "What is the smallest number?" in chat[1]
    summary = prompts.pieces_of("scbench_summary", ROW, "golden", prompts.own_templates(), tokenizer)
    assert [piece.endswith("This paper") for piece in summary] == [False, True]


def test_every_task_has_our_own_templates_and_a_reference() -> None:
    templates = prompts.own_templates()
    for kind, fields in (
        ("first_turn", "{context}"),
        ("follow_up", "{pre_ans}"),
        ("multi_request_context", "{context}"),
    ):
        assert set(templates[kind]) == set(prompts.NAMES)
        assert all(fields in template for template in templates[kind].values())
    turn = {"input": "?", "answer": "b", "options": ["a", "b", "c", "d"]}
    assert prompts.reference_of("scbench_choice_eng", turn) == ["b", "B"]
    assert prompts.reference_of("scbench_qa_eng", turn) == ["b"] and prompts.reference_of("scbench_kv", turn) == "b"
    row = {"context": "c", "multi_turns": [turn]}
    assert "B) b" in prompts.pieces_of("scbench_choice_eng", row, "golden", templates)[0]


# --- KVzip -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "subtask", "prediction", "reference", "score"),
    [
        ("squad", None, "The  Seven oaks!", "7 oaks", 1.0),
        ("squad", None, " </s>", "", 0.0),
        ("scbench_vt_short", None, "AB cd", "AB, CD", 0.5),
        ("scbench_many_shot", None, "(A)", "(B) yes", 0.0),
        ("scbench_many_shot", None, "yes!", "(B) yes", 1.0),
        ("gsm", None, "the answer is 3. THE ANSWER IS 42", "so #### 42", 1.0),
        ("scbench_choice_eng", None, "oak\nelm", "elm", 0.0),
        ("mixed", "scbench_mf", "5 ", "5", 0.0),
        ("scbench_qa_eng", None, "oak tree", "old oak", 0.5),
        ("scbench_summary", None, "...", "oak", 0.0),
    ],
)
def test_kvzips_check_has_rules_of_its_own(dataset, subtask, prediction, reference, score) -> None:
    assert kvzip.kvzip_score(dataset, prediction, reference, subtask) == pytest.approx(score)


# --- reference vectors -------------------------------------------------------------------------


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def same(name: str, ours: Any, official: Any) -> Check:
    near = abs(ours - official) <= 1e-9 if isinstance(ours, float) else ours == official
    return name, None if near else f"{ours!r} instead of {official!r}"


def run_samples(path: Path) -> list[Check]:
    """Each turn's score, or what the official scorer raises."""
    results = []
    for i, case in enumerate(load(path)):
        score, raised = scores.turn_score(case["task"], case["prediction"], case["ground_truth"])
        results += [
            same(f"scbench_samples[{i}].score", score, case["score"] or 0.0),
            same(f"scbench_samples[{i}].error", raised, case["error"]),
        ]
    return results


def run_repoqa(path: Path) -> list[Check]:
    """The code of each answer, the function that it is most like, and the share of right ones."""
    vectors, asked, results, matches = load(path), dict[str, list[tuple[str, str]]](), list[Check](), []
    for row in vectors["rows"]:
        asked.setdefault(row["repo"], []).append((row["func_name"], row["ground_truth"]))
    for i, row in enumerate(vectors["rows"]):
        found = functions.match(row["prediction"], row["lang"], row["func_name"], asked[row["repo"]])
        matches.append(found)
        ours = (found.code, found.name, found.is_right())
        results.append(same(f"repoqa[{i}]", ours, (row["sanitized"], row["best_target"], row["correct_at_0p8"])))
        results.append(same(f"repoqa[{i}].similarity", found.similarity, float(row["best_similarity"])))
    for threshold, value in vectors["pass_at_1"].items():
        share = fmean(one.is_right(float(threshold)) for one in matches)
        results.append(same(f"repoqa.{threshold}", share, value))
    return results


def run_aggregate(path: Path) -> list[Check]:
    """The official lines of a task's file."""
    results = []
    for case in load(path):
        tasks = scores.SUBTASKS.get(case["task"], ("",))
        rows = [
            TurnScore(
                str(row["id"]), row["turn_idx"], task=row.get("task", ""),
                score=scores.turn_score(row.get("task", case["task"]), row["prediction"], row["ground_truth"])[0],
            )
            for row in case["rows"]
        ]  # fmt: skip
        results += [
            same(f"{case['task']}.by_turn", scores.official_by_turn(rows, tasks), case["multi_turn_by_turn"]),
            same(f"{case['task']}.at_once", scores.official_at_once(rows, tasks), case["multi_request"]),
        ]
    return results


def run_prompts(path: Path) -> list[Check]:
    """The texts of a conversation, in each mode, with and without a chat template."""
    file = sources.find("scbench/prompt_templates.json", None)
    if file is None:
        return [("scbench_prompts", "scbench/prompt_templates.json is not in a data folder")]
    templates, tokenizer, results = load(file), tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False), list[Check]()
    for i, case in enumerate(load(path)):
        chat = tokenizer if case["chat_template"] else None
        ours = prompts.pieces_of(case["task"], case["example"], MODES[case["mode"]], templates, chat)
        results.append(same(f"scbench_prompts[{i}]", ours, case["prompts"]))
        if "ground_truth_list" in case:
            truths = [prompts.reference_of(case["task"], turn) for turn in case["example"]["multi_turns"]]
            results.append(same(f"scbench_prompts[{i}].truth", truths, case["ground_truth_list"]))
    return results


def run_kvzip(path: Path) -> list[Check]:
    return [
        same(f"kvzip[{i}]", kvzip.kvzip_score(*(case[key] for key in keys)), float(case["score"]))
        for keys in [("dataset", "prediction", "reference", "subtask")]
        for i, case in enumerate(load(path))
    ]


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("scbench_samples", run_samples), ("scbench_repoqa", run_repoqa), ("scbench_aggregate", run_aggregate),
        ("scbench_prompts", run_prompts), ("kvzip_answers", run_kvzip),
    ],
)  # fmt: skip
def test_rules_agree_with_the_official_ones(name, run) -> None:
    path = metrics_folder() / f"{name}.json"
    if not path.exists() or sources.find("scbench", None) is None:
        pytest.skip(f"{path} is no part of the project and not here")
    results = run(path)
    assert results and [result for result in results if result[1]] == []
