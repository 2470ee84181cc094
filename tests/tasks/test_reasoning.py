"""Reasoning tasks: the worker that grades, its graders, room for answers, prompts, rows, and the official verdicts."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError, RunError
from kvbench.engine.shapes import ModelShape
from kvbench.engine.workers import limited
from kvbench.results.summary import chance_of_one
from kvbench.tasks.aime.task import Aime
from kvbench.tasks.gsm8k import Gsm8k
from kvbench.tasks.math500.task import Math500
from kvbench.tasks.prompt import encode
from kvbench.tasks.reasoning import answers, grade, judge, rkv_equal, rkv_extract
from kvbench.tasks.reasoning.answers import Grading, Room
from kvbench.tasks.reasoning.judge import Judge
from kvbench.tasks.reasoning.latex import Unreadable, read_expression, read_first_line, read_latex
from kvbench.tests.golden_metrics import metrics_folder
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
TASKS = {"math500": Math500, "aime": Aime, "gsm8k": Gsm8k}
ROWS = {
    "math500/test.jsonl": {"problem": "What is half of three?", "answer": "\\frac{3}{2}", "unique_id": "mine/1"},
    "aime/aime24.jsonl": {"problem": "What is one less than {eight}?", "answer": "007"},
    "gsm8k/test.jsonl": {"question": "What is 600 times 2?", "answer": "600 * 2 = 1200\n#### 1,200"},
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Judge]:
    """One worker for all graders: starting one takes seconds. Its limit is no test of speed."""
    made = Judge(limit_s=60)
    yield made
    made.close()


# --- the graders -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gold", "math_verify", "rkv", "kvpress"),
    [
        ("So it is $\\boxed{\\frac{3}{2}}$.", "\\frac{3}{2}", True, True, False),  # kvpress stops at the first brace
        ("First $\\boxed{4}$, no, $\\boxed{5}$", "5", True, True, False),
        ("First $\\boxed{5}$, no, $\\boxed{4}$", "5", False, False, True),
        ("It must be 1.5", "\\frac{3}{2}", True, True, False),
        ("The result: \\boxed{500}", "5", False, True, False),  # rkv takes the hundredfold
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", True, True, False),
        ("\\boxed{(2,1)}", "(1,2)", False, False, False),
        ("\\boxed{(x-1)(x+1)}", "x^2-1", True, True, False),
        ("$\\boxed{7}$ </s> $\\boxed{8}$", "7", False, True, True),  # rkv cuts at the end token
        ("I do not know", "7", False, False, False),
    ],
)
def test_three_graders_decide_as_their_projects_do(worker, text, gold, math_verify, rkv, kvpress) -> None:
    found = {name: worker.grade(name, text, gold) for name in grade.GRADERS}
    assert all(one.status == "ok" for one in found.values())
    expected = {"math_verify": math_verify, "rkv": rkv, "kvpress": kvpress}
    assert {name: one.correct for name, one in found.items()} == expected


def test_the_reference_of_rkv_is_the_box_of_the_solution(worker) -> None:
    solution = "We get $2 \\cdot 3 = \\boxed{6}$."
    assert worker.grade("rkv", "\\boxed{6}", "7", solution=solution).correct
    assert not worker.grade("rkv", "\\boxed{7}", "7", solution=solution).correct


@pytest.mark.parametrize("name", ["math_verify", "rkv", "kvpress"])
@pytest.mark.parametrize(
    "code",
    [
        "__import__('pathlib').Path('{mark}').touch()",
        "(lambda: open('{mark}', 'w'))()",
        "\\boxed{{__import__('os').system('touch {mark}')}}",
        "\\boxed{{eval(\"open('{mark}','w')\")}}",
        "\\boxed{{().__class__.__bases__[0].__subclasses__()}}",
    ],
)
def test_what_a_model_writes_is_never_run(worker, name, code, tmp_path) -> None:
    mark = tmp_path / "was-run"
    verdict = worker.grade(name, code.format(mark=mark), "5")
    assert not mark.exists() and not verdict.correct


def test_a_grader_that_hangs_costs_one_answer_and_is_shown() -> None:
    grader = Judge(limit_s=2)
    assert grader.grade("rkv", "\\boxed{4}", "4").correct
    first = grader.process
    hung = grader.grade("rkv", "\\boxed{5^{5^{5^{5^5}}}}", "4")
    assert (hung.correct, hung.status) == (False, "timeout")
    assert first is not None and first.poll() is not None  # it is gone, not left alone
    assert grader.grade("rkv", "\\boxed{4}", "4").status == "ok"
    grader.close()


def test_a_worker_that_dies_costs_one_answer(tmp_path, monkeypatch) -> None:
    (tmp_path / "mortal.py").write_text(
        "import json, os, sys\nprint('{}', flush=True)\n"
        "for line in sys.stdin:\n"
        "    if 'die' in json.loads(line)['text']:\n        os.kill(os.getpid(), 9)\n"
        "    print(json.dumps({'correct': True, 'predicted': 'x', 'status': 'ok'}), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    grader = Judge(limit_s=30, module="mortal")
    assert [grader.grade("rkv", text, "").status for text in ("a", "die", "b", "die", "c" * 200_000)] == [
        *("ok", "died", "ok", "died", "ok"),
    ]
    assert grader.process is not None
    os.kill(grader.process.pid, signal.SIGKILL)
    assert grader.grade("rkv", "between two answers", "").status in ("ok", "died")
    grader.close()


def test_a_worker_that_never_starts_is_an_error_of_the_run_and_no_score(tmp_path, monkeypatch) -> None:
    (tmp_path / "stillborn.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunError, match="does not start"):
        Judge(module="stillborn").grade("rkv", "a", "b")


def test_a_worker_ends_with_whoever_started_it() -> None:
    process = limited.start(judge.WORKER, [judge.RUNTIME])
    assert limited.talk(process, b"", limited.START_S) is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0
    assert process.stdout is not None
    process.stdout.close()


def test_what_a_grader_raises_is_a_verdict(monkeypatch) -> None:
    def broken(text: str, gold: str, more: Any) -> grade.Verdict:
        raise MemoryError

    monkeypatch.setitem(grade.GRADERS, "broken", broken)
    assert grade.reply({"grader": "broken", "text": "", "gold": ""})["status"] == "failed"


@pytest.mark.parametrize(
    ("part", "text", "score", "no_answer"),
    [
        ("all", "<think>\\boxed{4}</think> and so on", 1.0, 0.0),
        ("after_think", "<think>\\boxed{4}</think> and so on", 0.0, 1.0),
        ("after_think", "<think>\\boxed{3}</think>\\boxed{4}", 1.0, 0.0),
        ("after_think", "\\boxed{4}", 0.0, 1.0),  # the thought never ended
        ("all", " \n", 0.0, 1.0),
    ],
)
def test_an_answer_inside_the_thought_counts_only_where_all_is_read(worker, part, text, score, no_answer) -> None:
    verdict = Grading("rkv", part, worker).verdict(text, "4")
    assert verdict == (score, {"no_answer": no_answer, "grader_stopped": 0.0})


def test_all_cells_of_a_sweep_share_a_worker() -> None:
    assert Grading("rkv", "all").judge is Grading("math_verify", "all").judge


# --- parts of the rkv grader -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("thirty-four apples", "34"),
        ("two hundred and five", "205"),
        ("three thousand twelve", "3012"),
        ("five point two five", "5.25"),
        ("Anna", "Anna"),
        ("007", "7"),
        ("one thousand two thousand", "one thousand two thousand"),
    ],
)
def test_numbers_in_words_become_digits(text: str, found: str) -> None:
    assert rkv_extract.number_in_words(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\dfrac34", "\\frac{3}{4}"),
        ("3/4", "\\frac{3}{4}"),
        ("x=0.50", "0.50"),
        ("12.00\\text{ cm}", "12"),
        ("\\left(1,\\sqrt2\\right)", "(1,\\sqrt{2})"),
        (".5", "0.5"),
        ("\\frac", "\\frac"),
        ("", ""),
    ],
)
def test_an_answer_is_cleaned(text: str, found: str) -> None:
    assert rkv_extract.clean(text) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2\\cdot3+1", 7),
        ("\\frac{1}{2}\\times4", 2),
        ("2^3^2", 64),
        ("-(5-3)!", -2),
        ("\\sqrt[3]{27}", 3),
        ("|{-4}|+\\lfloor 2.5\\rfloor", 6),
        ("\\log_{2}8", 3),
        ("\\binom{4}{2}", 6),
        ("12,345.5", 12345.5),
        ("3,5,7", 3),  # as far as it is one formula
        ("2x3", 6),  # a cross between numbers
        ("5^", 5),
        ("4+(3,5)", 4),
        ("4-\\frac{1}", 4),
        ("4x_", 4),
        ("10\\,000", 10000),
        ("14)\\", 14),  # nobody looks behind the bracket
        ("\\log_28", 3),  # an argument has to be left
        ("(" * 60 + "7" + ")" * 60, 7),
        ("2" + "(" * 60, 2),
    ],
)
def test_formulas_are_read(text: str, value: float) -> None:
    with pytest.raises(Unreadable):
        read_latex("(1,2")
    found = read_latex(text)
    assert not found.free_symbols and math.isclose(float(found), value)


@pytest.mark.parametrize(
    "text",
    ["14\\", "14\\ ", "1\\4", "3,\\", "3,45#", "4+(3#", "14~", "5\\%", "14;", "1.", "14\\)", "\\to3", ".5", "(3"],
)
def test_where_sympys_reader_gives_up_so_does_ours(text: str) -> None:
    """Its answers, by version 1.13.3: an error for each."""
    with pytest.raises(Unreadable):
        read_latex(text)


@pytest.mark.parametrize(("text", "is_read"), [("14\\\\", True), ("14~", True), ("14&3", True), ("14\\", False)])
def test_the_last_reader_takes_the_first_line_or_cell(text: str, is_read: bool) -> None:
    """As latex2sympy2 1.9.0 answers."""
    if is_read:
        assert read_first_line(text) == 14
    else:
        with pytest.raises(Unreadable):
            read_first_line(text)


def test_only_formulas_are_read_in_pythons_notation() -> None:
    assert read_expression("{1, 2}") == {1, 2} and str(read_expression("sqrt(x)*2**3")) == "8*sqrt(x)"
    for code in ("print(1)", "x.y", "[z for z in y]", "'text'", "True", "f(1)", "1 if x else 2", "(yield)", "x := 3"):
        with pytest.raises(Unreadable):
            read_expression(code)


@pytest.mark.parametrize(
    ("predicted", "reference", "equal"),
    [
        ("14\\", "14", False),  # R-KV's own scripts call it wrong
        ("14\\\\", "14", True),
        ("50", "0.5", True),
        ("0.33333", "\\frac{1}{3}", True),
        ("x+1=2", "x=1", True),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4.0\\end{pmatrix}", True),
        ("(1,2,3)", "(1,2)", False),
        ("b", "B", True),
        ("the answer is B", "B", True),
        ("", "4", False),
        (None, "4", False),
    ],
)
def test_answers_are_equal_as_text_number_part_or_formula(predicted, reference, equal) -> None:
    assert rkv_equal.is_equal(predicted, reference) == equal


# --- the tasks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, row in ROWS.items():
        write(tmp_path / name, row)
    return tmp_path


def write(file: Path, *rows: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def task(name: str, data_dir: Path, **changes: Any) -> Any:
    values = yaml.safe_load((REPO / "conf" / "task" / f"{name}.yaml").read_text())
    del values["_target_"]
    changes = ({"thinking": True} if name == "gsm8k" else {}) | {"grader": "rkv"} | changes
    return TASKS[name](build_params(TASKS[name], values | changes, "task"), str(data_dir), seed=0)


def asked(name: str, data_dir: Path, tokenizer: Any, window: int = 100_000, **changes: Any) -> tuple[Any, Any]:
    made = task(name, data_dir, **changes)
    made.check(ModelShape("tiny", 2, 4, 2, 8, window, (0, 1)))
    return made, made.samples(tokenizer)


@pytest.mark.parametrize(("name", "usual"), [("math500", 16_384), ("aime", 32_768), ("gsm8k", 8192)])
def test_the_plain_prompt_has_no_turns_and_the_chat_prompt_is_one(name, usual, tokenizer, folder) -> None:
    made, (sample,) = asked(name, folder, tokenizer)
    prompt = encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
    text = tokenizer.decode(prompt.context_ids)
    assert text.startswith("You are given a math problem.\n\nProblem: What is ")
    assert text.endswith("?\n\n You need to solve the problem step by step. First, you need to provide the "
                         "chain-of-thought, then provide the final answer.\n\n Provide the final answer in the format: "
                         "Final answer:  \\boxed{}")  # fmt: skip
    assert (sample.max_new_tokens, made.dataset.endswith("plain")) == (usual, True)
    made, (sample,) = asked(name, folder, tokenizer, template="chat")
    text = tokenizer.decode(encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt").context_ids)
    assert text.startswith("<|im_start|>user\nWhat is ") and text.endswith("<|im_start|>assistant\n")
    assert "within \\boxed{}.<|im_end|>" in text and made.dataset.endswith("chat")


def test_right_and_wrong_answers_of_each_task(tokenizer, folder) -> None:
    right = {"math500": "\\boxed{1.5}", "aime": "it is 7", "gsm8k": "#### or \\boxed{1,200}"}
    for name, text in right.items():
        made, (sample,) = asked(name, folder, tokenizer)
        assert made.score(sample, text) == made.score(sample, made.right_answer(sample)) == 1.0
        assert made.score(sample, "\\boxed{11}") == 0.0
        assert made.verdict(sample, "")[1]["no_answer"] == 1.0
        made.grading.judge.close()


def test_a_template_that_can_think_is_told_to(tokenizer, folder) -> None:
    tokenizer = tiny_tokenizer("{{ 'THINKS' if enable_thinking else '' }}" + CHATML_TEMPLATE, adds_bos=False)
    _, (sample,) = asked("math500", folder, tokenizer, template="chat")
    ids = encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt").context_ids
    assert tokenizer.decode(ids).startswith("THINKS")


def test_an_answer_has_the_room_that_a_window_leaves(tokenizer, folder) -> None:
    made, (sample,) = asked("math500", folder, tokenizer, window=1000)
    n_prompt = answers.n_tokens(tokenizer, sample)
    assert sample.max_new_tokens == 1000 - n_prompt
    assert any("at most, not 16384" in note for note in made.notes)
    assert asked("math500", folder, tokenizer, max_new_tokens=12)[1][0].max_new_tokens == 12
    assert asked("math500", folder, tokenizer, max_total_tokens=500)[1][0].max_new_tokens == 500 - n_prompt
    with pytest.raises(ConfigError, match=r"task\.max_new_tokens=990 does not fit behind math500-1"):
        asked("math500", folder, tokenizer, window=1000, max_new_tokens=990)
    with pytest.raises(ConfigError, match=r"task\.max_new_tokens=1000 .*give less"):
        asked("math500", folder, tokenizer, window=1000, max_new_tokens=1000)
    with pytest.raises(ConfigError, match="leaves no room"):
        asked("math500", folder, tokenizer, window=50)
    assert Room(8, None, None, 100).notes([8, 8]) == []


def test_a_chat_prompt_without_a_chat_template_is_refused(folder) -> None:
    with pytest.raises(ConfigError, match=r"task\.template=chat needs a chat template"):
        asked("math500", folder, tiny_tokenizer(None, adds_bos=False), template="chat")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("math500", {"grader": "mine"}, r"task\.grader"),
        ("math500", {"template": "raw"}, r"task\.template"),
        ("math500", {"answer_part": "none"}, r"task\.answer_part"),
        ("math500", {"max_new_tokens": 0}, r"task\.max_new_tokens=0"),
        ("aime", {"year": 23}, r"task\.year=23 .*24 or 25"),
        ("aime", {"year": 25}, r"aime25\.jsonl is missing"),
        ("gsm8k", {"grader": "kvpress"}, r"task\.grader"),
    ],
)
def test_wrong_values_are_refused_by_key(folder, name, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        task(name, folder, **changes).check(ModelShape("tiny", 2, 4, 2, 8, 4096, (0, 1)))


def test_a_grader_without_its_package_is_refused_with_the_command(folder, monkeypatch) -> None:
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"math_verify needs .*pip install -c constraints\.txt"):
        task("math500", folder, grader="math_verify").check(ModelShape("tiny", 2, 4, 2, 8, 4096, (0, 1)))


def test_a_sum_without_a_final_number_is_no_row_of_the_task_with_thinking(tokenizer, folder) -> None:
    write(folder / "gsm8k" / "test.jsonl", {"question": "q", "answer": "7"})
    with pytest.raises(ConfigError, match=r"test\.jsonl, line 1: field 'answer' has no number behind ####: '7'"):
        asked("gsm8k", folder, tokenizer)


# --- reference vectors -------------------------------------------------------------------------


def run_answers(path: Path) -> list[Check]:
    """Every grader's verdict on every answer."""
    worker, results = Judge(limit_s=60), list[Check]()
    for i, case in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        gold, more = case["gold"], {"dataset": "aime"} if case["dataset"].startswith("aime") else {}
        if case["dataset"] == "gsm8k":
            gold = gold.rpartition("####")[2].strip().replace(",", "")
        if case["dataset"] == "math":
            more["solution"] = f"$\\boxed{{{gold}}}$"
        for name in grade.GRADERS:
            if name in case:
                found = worker.grade(name, case["output"], gold, **more)
                wrong = found.status != "ok" or found.correct != case[name]["correct"]
                results.append((f"answers[{i}].{name}", f"{found} instead of {case[name]}" if wrong else None))
    worker.close()
    return results


def run_passk(path: Path) -> list[Check]:
    """pass@1 and pass@k, of numbers and of matrices of prompts and draws."""
    vectors, results = json.loads(path.read_text(encoding="utf-8")), list[Check]()

    def compare(name: str, ours: float, official: float) -> None:
        near = math.isclose(ours, official, rel_tol=0, abs_tol=1e-12)
        results.append((name, None if near else f"{ours} instead of {official}"))

    for i, case in enumerate(vectors["pass_at_k"]):
        compare(f"pass_at_k[{i}]", chance_of_one(case["n"], case["c"], case["k"]), case["value"])
    for i, case in enumerate(vectors["matrix"]):
        counts = [(len(row), sum(row)) for row in case["correct"]]
        for k, value in (("1", case["pass_at_1"]), *case["majority_free_pass_at"].items()):
            mean = math.fsum(chance_of_one(*pair, int(k)) for pair in counts) / len(counts)
            compare(f"matrix[{i}].pass_at_{k}", mean, value)
    return results


@pytest.mark.skipif(not judge.RUNTIME.is_dir(), reason=f"{judge.RUNTIME} is made by `make setup`")
@pytest.mark.parametrize(("name", "run"), [("reasoning_answers", run_answers), ("reasoning_passk", run_passk)])
def test_graders_agree_with_the_official_ones(name, run) -> None:
    path = metrics_folder() / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is no part of the project and not here")
    results = run(path)
    assert results and [result for result in results if result[1]] == []


def test_the_worker_imports_neither_torch_nor_transformers() -> None:

    code = (
        f"import sys, {grade.__name__} as g; g.warm_up(); assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
