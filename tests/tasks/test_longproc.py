"""LongProc: the search of countdown, three scores, prompts, rows, and the official scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.longproc import countdown, scores
from kvbench.tasks.longproc.task import LongProc, filled, judged
from kvbench.tasks.prompt import encode
from kvbench.tests.golden_metrics import metrics_folder
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
ROWS: dict[str, dict[str, Any]] = {
    "countdown": {"nums": [2, 3, 4, 5], "target": 14},
    "path_traversal": {"context_nl": "From A a bus goes to B.", "answer_nl": "A to B.\nB to C.\n",
                       "question_repr": ["A", "C"]},
    "tom_tracking": {"story": "Ann leaves.", "question": "Where is the hat?",
                     "solution": "Ann:\n- Step 0: here\n- gone"},
}  # fmt: skip
PROMPTS = {
    "countdown": "Do as here.\n{demonstration}\nNumbers: {nums}\nTarget: {target}",
    "path_traversal": "{city_context}\nFrom {src_city} to {dst_city}?",
    "tom_tracking": "Use {{braces}}.\n{story}\n{question}",
}


# --- scores ------------------------------------------------------------------------------------


def test_the_search_is_depth_first_in_the_order_of_the_list() -> None:
    found = countdown.Search([2, 3, 4, 5], 14)
    assert found.is_found and found.way == ["3 + 2 = 5", "5 + 4 = 9", "9 + 5 = 14"]
    assert found.log[0].startswith(
        "Initial number set: [2, 3, 4, 5], target: 14. Options for choosing two numbers: [(2,"
    )
    assert found.log[1] == " |- Pick two numbers (2, 3) (numbers left: [4, 5]). Try possible operations."
    assert found.log[-1] == "     |- Try 9 + 5 = 14. Evaluate 14 == 14, target found!"
    assert found.text().endswith("<Solution>\n3 + 2 = 5\n5 + 4 = 9\n9 + 5 = 14\n</Solution>\n")
    log = "\n".join(countdown.Search([1999, 2, 0, 7], 1).log)
    for words in (
        "exceeds the maximum intermediate result, drop",
        ".5 is a decimal, drop",
        "/ 0 (invalid operation). drop",
    ):
        assert words in log
    assert not countdown.Search([1, 1, 1, 1], 99).is_found


@pytest.mark.parametrize(
    ("lines", "accuracy", "raises"),
    [
        ("3 + 2 = 5\n5 + 4 = 9\n9 + 5 = 14", 1.0, False),
        ("2+3=5\n 5 + 4=9 \n5 + 9 = 14", 1.0, False),
        ("3 + 2 = 5\n5 + 4 = 9\n9 + 5 = 15", 0.0, False),
        ("3 + 2 = 5\n5 + 5 = 10\n10 + 4 = 14", 1.0, False),
        ("3 + 3 = 6\n6 + 5 = 11\n11 + 3 = 14", 0.0, False),
        ("3 + 2 = 5\n5 + 4 = 9", 0.0, False),
        ("3 + 2 = 5 = 5\n5 + 4 = 9\n9 + 5 = 14", 0.0, False),
        ("First: 3 + 2 = 5\n5 + 4 = 9\n9 + 5 = 14", 0.0, True),
        ("print(3) + 2 = 5\n5 + 4 = 9\n9 + 5 = 14", 0.0, True),
        ("9**9**9**9 = 5\n5 + 4 = 9\n9 + 5 = 14", 0.0, False),
        ("5 / 0 = 0\n1 + 4 = 5\n9 + 5 = 14", 0.0, True),
        ("03 + 2 = 5\n5 + 4 = 9\n9 + 5 = 14", 0.0, True),
    ],
)
def test_a_solution_uses_each_number_once_and_is_never_run(lines: str, accuracy: float, raises: bool) -> None:
    found = scores.countdown(f"<Solution>\n{lines}\n</Solution>", [2, 3, 4, 5], 14)
    assert (found.accuracy, found.extracted, found.raises) == (accuracy, 1.0, raises)


def test_a_log_counts_up_to_its_first_mistake() -> None:
    reference = countdown.Search([2, 3, 4, 5], 14).text()
    log = reference.split(countdown.FOUND)[0]
    n = len(log.strip().split("\n")) - 2  # without the heading and the first line
    assert scores.countdown(log, [2, 3, 4, 5], 14).partial == (n - 1) / n
    assert scores.countdown(log.replace("numbers left", "left"), [2, 3, 4, 5], 14).partial == 0
    assert scores.countdown(log.replace("Initial", "First"), [2, 3, 4, 5], 14).partial == 0
    assert scores.countdown(log.replace("= 14.", "= 14!"), [2, 3, 4, 5], 14).partial == (n - 1) / n
    assert scores.countdown("14", [2, 3, 4, 5], 14).partial == 0


@pytest.mark.parametrize(
    ("answer", "accuracy", "partial", "extracted"),
    [
        ("<Route>\n a\nb\nc\n</Route>", 1, 1, 1),
        ("<Route>a\nx\nc</Route>", 0, 2 / 3, 1),
        ("<Route>a</Route>", 0, 1 / 3, 1),
        ("<Route>a\nb\nc\nd</Route>", 0, 1, 1),
        ("a\nb\nc", 0, 0, 0),
        ("<Route>a\nb\nc", 0, 0, 0),
    ],
)
def test_a_route_is_compared_line_by_line(answer, accuracy, partial, extracted) -> None:
    assert scores.path_traversal(answer, "a\nb\nc\n") == scores.Procedure(accuracy, partial, extracted)


def test_beliefs_are_compared_without_small_words_case_and_punctuation() -> None:
    reference = "Ann's belief:\n- Step 0: the hat is in the hall.\n- Step 1: Ann thinks: attic!\n-  \n - indented"
    assert scores.beliefs(reference) == ["0 hat hall", "1 ann attic"]
    assert scores.tom_tracking("- 0 Hat hall\n-1: ann ATTIC", reference).accuracy == 1
    assert scores.tom_tracking("- 0 hat hall\n- 1 ann cellar", reference).partial == 0.5
    assert scores.tom_tracking("- 0 hat hall", reference) == scores.Procedure(0.0, 0.5, 1.0)
    assert scores.tom_tracking("", reference).partial == 0


# --- the task ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, row in ROWS.items():
        write(tmp_path, name, [row])
        prompts = tmp_path / "longproc" / name / "prompts.yaml"
        prompts.write_text(yaml.safe_dump({"USER_PROMPT": PROMPTS[name]}))
    return tmp_path


def write(folder: Path, name: str, content: Any) -> None:
    file = folder / "longproc" / name / f"{name}_0.5k.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def task(data_dir: Path, **changes: Any) -> LongProc:
    values = yaml.safe_load((REPO / "conf" / "task" / "longproc.yaml").read_text())
    del values["_target_"]
    return LongProc(build_params(LongProc, values | changes, "task"), str(data_dir), seed=0)


def asked(data_dir: Path, tokenizer: Any, window: int = 50_000, **changes: Any) -> tuple[LongProc, Any]:
    made = task(data_dir, **changes)
    made.check(ModelShape("tiny", 2, 4, 2, 8, window, (0, 1)))
    return made, made.samples(tokenizer)


def test_each_part_is_asked_in_its_prompt_and_right_answers_count(tokenizer, folder) -> None:
    made, samples = asked(folder, tokenizer)
    assert [sample.fields["dataset"] for sample in samples] == list(ROWS)
    search, route, beliefs = (sample.context for sample in samples)
    assert search.startswith("Do as here.\n# Example\nNumbers: [40, 19, 23, 7]\nTarget: 29\n\n# Search Procedure\n")
    assert search.endswith("Numbers: [2, 3, 4, 5]\nTarget: 14")
    assert route == "From A a bus goes to B.\nFrom A to C?" and beliefs.startswith("Use {braces}.\nAnn leaves.")
    prompt = encode(tokenizer, samples[1], chat="auto", system_prompt="", scope="full_prompt")
    assert tokenizer.decode(prompt.context_ids).startswith("<|im_start|>user\nFrom A")
    rights = ["<Solution>\n3 + 2 = 5\n5 + 4 = 9\n9 + 5 = 14\n</Solution>", "<Route>A to B.\nB to C.</Route>"]
    for sample, right in zip(samples, [*rights, ROWS["tom_tracking"]["solution"]], strict=True):
        assert made.verdict(sample, right) == (1.0, {"partial": 1.0, "extracted": 1.0, "raises": 0.0})
        assert made.score(sample, "no") == 0.0
    assert {sample.max_new_tokens for sample in samples} == {1024}
    with pytest.raises(ConfigError, match=r"task\.max_new_tokens=1000 does not fit behind countdown-0\.5k-0"):
        asked(folder, tokenizer, window=2000, max_new_tokens=1000)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("countdown", {"nums": [1, 1, 1, 1], "target": 99}, "no equation makes 99"),
        ("countdown", {"nums": [1, 2, 3], "target": 6}, "'nums' is not a list of four numbers"),
        ("countdown", {"nums": [1, 2, 3, True], "target": 6}, "'nums' is not a list of four numbers"),
        ("path_traversal", {"context_nl": "x", "answer_nl": "x", "question_repr": ["A"]}, "'question_repr'"),
        ("tom_tracking", {"story": "x", "question": "x", "solution": "no steps"}, "has no step"),
        ("tom_tracking", {"story": 5}, "'story' is not a text: 5"),
        ("tom_tracking", 7, "no JSON object"),
    ],
)
def test_a_bad_row_is_named_and_refused_or_skipped(tokenizer, folder, name, content, message) -> None:
    write(folder, name, [content, ROWS[name]])
    with pytest.raises(ConfigError, match=rf"{name}_0\.5k\.json, row 0: .*{message}"):
        asked(folder, tokenizer)
    made, samples = asked(folder, tokenizer, on_bad_row="skip", datasets=name)
    assert [sample.id for sample in samples] == [f"{name}-0.5k-1"] and "row 0" in str(made.notes)
    write(folder, name, [content])
    with pytest.raises(ConfigError, match="no row can be used"):
        asked(folder, tokenizer, on_bad_row="skip")
    write(folder, name, {"rows": []})
    with pytest.raises(ConfigError, match="no list of rows"):
        asked(folder, tokenizer)


def test_damaged_prompts_and_wrong_values_are_sentences(tokenizer, folder) -> None:
    prompts = folder / "longproc" / "countdown" / "prompts.yaml"
    for text, message in (
        ("a: [", "is no YAML"),
        ("b: 5", "no text USER_PROMPT"),
        ("USER_PROMPT: '{other}'", "unknown"),
    ):
        prompts.write_text(text)
        with pytest.raises(ConfigError, match=message):
            asked(folder, tokenizer)
    with pytest.raises(ConfigError, match="princeton-pli/LongProc"):
        asked(folder, tokenizer, length="2k", datasets="countdown")
    for changes in ({"length": "1k"}, {"datasets": "html_to_tsv"}, {"source": "hub"}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError):
            task(folder, **changes)
    assert filled("{{{nums}}}", {"nums": "{target}"}) == "{{target}}"


# --- reference vectors -------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """The three figures of each answer; rows that are not here are left out."""
    found: dict[str, Any] = {}
    results: list[Check] = []
    for i, case in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        name = case["dataset"].rpartition("_")[0]
        if case["dataset"] not in found:
            file = sources.find(f"longproc/{name}/{case['dataset']}.json", None)
            found[case["dataset"]] = [] if file is None else json.loads(file.read_text(encoding="utf-8"))
        if case["index"] >= len(found[case["dataset"]]):
            continue
        row = found[case["dataset"]][case["index"]]
        reference = row.get("solution" if name == "tom_tracking" else "answer_nl", "")
        ours = judged(name, case["output"], reference, {"numbers": row.get("nums"), "target": row.get("target")})
        results.append((f"longproc[{i}] {case['kind']}", differs(ours, case)))
    return results


def differs(ours: scores.Procedure, case: dict[str, Any]) -> str | None:
    if case.get("error"):
        return None if ours.raises and not ours.accuracy else f"{ours}, and the official scorer raises"
    official = [case["metrics"][key] for key in ("accuracy", "partial_accuracy", "extraction_rate")]
    near = all(abs(a - b) <= 1e-9 for a, b in zip((ours.accuracy, ours.partial, ours.extracted), official, strict=True))
    return None if near else f"{ours} instead of {official}"


def test_scorers_agree_with_the_official_ones() -> None:
    path = metrics_folder() / "longproc_scores.json"
    if not path.exists() or sources.find("longproc", None) is None:
        pytest.skip(f"{path} or the rows are no part of the project and not here")
    results = run_vectors(path)
    assert results and [result for result in results if result[1]] == []
