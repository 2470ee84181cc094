"""InfiniteBench: official scores, generators and what is known of the published files, prompts, cutting, bad rows."""

import json
import re
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import download, sources
from kvbench.tasks.infinitebench import task as infinitebench
from kvbench.tasks.infinitebench.prompts import ground_truth
from kvbench.tasks.infinitebench.scores import checked_score
from kvbench.tasks.infinitebench.synthetic import (
    DEPTHS,
    GENERATORS,
    OWN_STRINGS,
    QUANTITIES,
    STEPS,
    Place,
    body,
    func_call,
    key_position,
    total,
)
from kvbench.tasks.infinitebench.task import DATASETS, NEW_TOKENS, SYNTHETIC, InfiniteBench
from kvbench.tasks.prompt import encode
from kvbench.tests.golden_metrics import TOLERANCE, metrics_folder
from kvbench.tests.tiny_tokenizer import LLAMA_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(LLAMA_TEMPLATE, adds_bos=True)


def shape(window: int = 8192) -> ModelShape:
    return ModelShape("tiny", 2, 4, 2, 8, window, (0, 1))


def task(data_dir: Path | None = None, seed: int = 0, **changes) -> InfiniteBench:
    values = yaml.safe_load((REPO / "conf" / "task" / "infinitebench.yaml").read_text())
    assert values.pop("_target_") == "kvbench.tasks.infinitebench.task.InfiniteBench"
    params = build_params(InfiniteBench, values | changes, "task")
    return InfiniteBench(params, None if data_dir is None else str(data_dir), seed)


def samples(tokenizer, data_dir: Path, window: int = 8192, seed: int = 0, **changes):
    made = task(data_dir, seed, **changes)
    made.check(shape(window))
    return made, made.samples(tokenizer)


def n_tokens(tokenizer, sample) -> int:
    prompt = encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
    return len(prompt) + sample.max_new_tokens


# --- scores ------------------------------------------------------------------------------------


def official_drops(model: str) -> bool:
    """Whose first number the authors drop in math_calc."""
    return model == "gpt4"


def run_tricky(path: Path) -> list[Check]:
    """Each made-up case: score and what is raised."""
    results = []
    for i, case in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        ours = checked_score(
            case["task"],
            case["prediction"],
            case["ground_truth"],
            drop_first_number=official_drops(case["model"]),
        )
        official = case["score"] or 0.0, case.get("error")
        is_same = abs(ours[0] - official[0]) <= TOLERANCE and ours[1] == official[1]
        name = f"tricky[{i}].{case['task']}"
        results.append((name, None if is_same else f"{ours} instead of {official}"))
    return results


@cache  # two files are judged by it
def scored_samples(path: Path) -> dict[tuple[str, str], list[tuple[str, float, float]]]:
    """By model and task the name of each prediction, its score by ours and by the authors' scorer."""
    found = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for line in file:
            case = json.loads(line)
            model, name = case["model"], case["task"]
            ours, error = checked_score(
                name,
                case["prediction"],
                case["ground_truth"],
                drop_first_number=official_drops(model),
            )
            assert error == case.get("error"), case
            row = f"{model}.{name}[{case['index']}]"
            found[model, name].append((row, ours, case["score"] or 0.0))
    return found


def run_samples(path: Path) -> list[Check]:
    """Each stored prediction of the authors' models."""
    return [
        (name, None if abs(ours - official) <= TOLERANCE else f"{ours} instead of {official}")
        for rows in scored_samples(path).values()
        for name, ours, official in rows
    ]


def run_totals(path: Path) -> list[Check]:
    """The means over the predictions that stand in infinitebench_samples.jsonl beside this file."""
    scored = scored_samples(path.with_name("infinitebench_samples.jsonl"))
    results = []
    for model, tasks in json.loads(path.read_text(encoding="utf-8")).items():
        for name, official in tasks.items():
            scores = [ours for _, ours, _ in scored.get((model, name), [])]
            mean = sum(scores) / len(scores) if scores else None
            is_same = (
                mean is not None
                and len(scores) == official["n_stored"]
                and abs(mean - official["mean_stored"]) <= TOLERANCE
            )
            found = f"{mean} over {len(scores)} instead of {official}"
            results.append((f"totals.{model}.{name}", None if is_same else found))
    return results


@pytest.mark.parametrize(
    ("name", "run", "fewest"),
    [
        ("infinitebench_tricky.json", run_tricky, 50),
        ("infinitebench_samples.jsonl", run_samples, 5000),
        ("infinitebench_totals.json", run_totals, 40),
    ],
)
def test_scorers_agree_with_the_official_ones(name: str, run, fewest: int) -> None:
    path = metrics_folder() / name
    if not path.exists():
        pytest.skip(f"{path} is no part of the project and not here")
    results = run(path)
    assert len(results) >= fewest
    assert [result for result in results if result[1] is not None] == []


@pytest.mark.parametrize(
    ("dataset", "prediction", "truth", "expected"),
    [
        ("passkey", "It is 07123, not 5", "07123", 1),
        ("passkey", "It is 1,234", ["1234"], 0),
        ("kv_retrieval", 'value: "ab-1".', "ab-1", 1),
        ("kv_retrieval", "(ab-1)", "ab-1", 0),
        ("longdialogue_qa_eng", "jane, I think", ["JANE"], 1),
        ("longdialogue_qa_eng", "Jane", ["Jane"], 0),
        ("longbook_choice_eng", "Because of C", ["the end", "B"], 1),  # by its first letter
        ("longbook_choice_eng", "A man did", ["the end", "B"], 0),
        ("longbook_choice_eng", "The answer is: B", ["the end", "B"], 1),
        ("longbook_choice_eng", "maybe BC or B", ["the end", "B"], 0),
        ("longbook_qa_eng", "the red car", ["car", "a red car!"], 1),
        ("longbook_qa_chn", "红车。", ["红 车"], 1),
        ("math_find", "about 12.5", 12.5, 1),
        ("math_calc", "1, 2, 3", [1, 2, 4], 2 / 3),
        ("code_run", "it returns -4", [-4], 1),
        ("code_run", "4.0", 4, 0),
        ("code_debug", "B", ["f", "B"], 0),
        ("code_debug", "B.", ["f", "B"], 1),
        ("code_debug", "The correct answer is: f()", ["f", "B"], 1),
    ],
)
def test_the_authors_quirks_are_kept(dataset, prediction, truth, expected) -> None:
    assert checked_score(dataset, prediction, truth) == (expected, None)


def test_what_makes_the_authors_scorer_raise_is_0_and_named() -> None:
    assert checked_score("math_find", "88.5", 88) == (0, "ValueError")
    assert checked_score("math_find", "88", "88") == (0, "TypeError")
    assert checked_score("math_calc", "1, 2", "1") == (0, "AssertionError")
    assert checked_score("math_calc", "1, 2", []) == (0, "IndexError")
    assert checked_score("longdialogue_qa_eng", "Jane", []) == (0, "IndexError")
    assert checked_score("longbook_qa_eng", "red", []) == (0, None)  # which raises nothing


# --- generators --------------------------------------------------------------------------------


def row(dataset: str, i: int, n_rows: int | None = None, units: int | None = None):
    made = GENERATORS[dataset]
    place = Place(i, n_rows or made.n_rows, f"0 {dataset}")
    return made.make(OWN_STRINGS, place, units or made.n_units)


def test_published_sizes_are_the_defaults() -> None:
    sizes = {name: (made.n_units, made.n_rows) for name, made in GENERATORS.items()}
    assert sizes == {
        "passkey": (5220, 590),
        "number_string": (5220, 590),
        "kv_retrieval": (2500, 500),
        "math_find": (60_000, 350),
        "math_calc": (30_000, 50),
        "code_run": (550, 400),
    }


@pytest.mark.parametrize("dataset", ["passkey", "number_string"])
def test_590_rows_hide_ten_keys_at_each_of_59_positions(dataset: str) -> None:
    positions = Counter(key_position(Place(i, 590, "0"), 5220) for i in range(590))
    assert positions == dict.fromkeys(range(0, 5221, 90), 10)
    words = OWN_STRINGS[dataset]
    first, other = row(dataset, 0), row(dataset, 590 - 1)
    assert (first["position"], other["position"]) == (0, 5220)
    for made in (first, other, row(dataset, 300)):
        lines = made["context"].splitlines(keepends=True)
        assert len(lines) == 5221 and lines.count(words["noise"]) == 5220
        assert lines[made["position"]] == words["ans"].replace("{key}", made["answer"])
    for n_noise, step in STEPS.items():
        assert key_position(Place(10, len(range(0, n_noise + 1, step)) * 10, "0"), n_noise) == step


def test_keys_have_5_digits_and_number_strings_10_with_repeats() -> None:
    keys = [row("passkey", i, units=1)["answer"] for i in range(590)]
    assert all(re.fullmatch(r"\d{5}", key) for key in keys)
    assert any(key.startswith("0") for key in keys) and len(set(keys)) > 560
    numbers = [row("number_string", i, units=1)["answer"] for i in range(590)]
    assert all(re.fullmatch(r"\d{10}", number) for number in numbers)
    # Five copies, each beside what it copies: at most five digits change from one to the next.
    changes = [sum(a != b for a, b in pairwise(number)) for number in numbers]
    assert max(changes) <= 4 and all(len(set(number)) <= 5 for number in numbers)


def test_records_are_json_and_the_asked_one_sweeps_through_the_file() -> None:
    seen = set()
    for i in (0, 250, 499):
        made = row("kv_retrieval", i)
        _, brace, body_ = made["context"].partition("{")
        records = json.loads(brace + body_)
        assert len(records) == 2500 and "\n" not in body_
        key = re.findall(r'Key: "([^"]+)"', made["input"])[0]
        assert list(records).index(key) == made["position"] == i * 2500 // 500
        assert records[key] == made["answer"]
        seen |= set(records)
    assert 2900 < len(seen) <= 3000  # rows show 2,500 of the same 3,000 records


def test_math_find_has_50_rows_of_each_quantity_with_bounds_that_move() -> None:
    rows = [row("math_find", i, units=400) for i in range(350)]
    assert Counter(made["quantity"] for made in rows) == dict.fromkeys(QUANTITIES, 50)
    answers = defaultdict(set)
    for made in rows:
        numbers = json.loads(made["context"])
        assert len(numbers) == 400 and 0 <= min(numbers) <= max(numbers) <= 99
        rank = sorted(set(numbers))
        expected = {
            "largest number": rank[-1],
            "second largest number": rank[-2],
            "third largest number": rank[-3],
            "smallest number": rank[0],
            "second smallest number": rank[1],
            "third smallest number": rank[2],
            "median": (sorted(numbers)[199] + sorted(numbers)[200]) / 2,
        }[made["quantity"]]
        assert made["answer"] == expected and type(made["answer"]) is type(expected)
        answers[made["quantity"]].add(made["answer"])
    assert min(answers["largest number"]) < 85 and max(answers["smallest number"]) > 14
    assert all(len(values) > 8 for values in answers.values())


def test_running_values_stay_within_0_and_99_and_start_at_the_second_number() -> None:
    made = row("math_calc", 7)
    value, *rest = re.findall(r"(?:[+-] )?\d+", made["context"])
    value, values = int(value), []
    for term in rest:
        value += int(term.replace(" ", ""))
        values.append(value)
    assert len(values) == 30_000 - 1 and values == made["answer"]
    assert min(values) >= 0 and max(values) <= 99


def test_code_rows_are_calls_of_every_depth_whose_value_is_the_answer() -> None:
    depths = Counter()
    for i in range(0, 400, 20):
        made = row("code_run", i)
        depths[made["call_depth"]] += 1
        ids = [int(one) for one in re.findall(r"def func_(\d+)", made["context"])]
        n = made["call_depth"] * (550 // made["call_depth"])
        assert len(ids) == n and ids == sorted(set(ids)) and max(ids) <= 1100
        scope: dict = {}
        exec(made["context"].partition("def ")[1] + made["context"].partition("def ")[2], scope)
        call = func_call(made["input"])
        assert eval(call, scope) == made["answer"]
    assert depths == dict.fromkeys(DEPTHS, 4)


def test_a_function_adds_its_constant_to_the_next_ones() -> None:
    assert [body(None, 0), body(None, 3), body(7, -12)] == ["x", "x + 3", "func_7(x) - 12"]
    assert total({1: (2, 5), 2: (None, -7)}, 1) == -2


# --- generated rows in their prompts -----------------------------------------------------------


@pytest.mark.parametrize("length", [1024, 2048])
def test_generated_rows_fill_the_length_and_no_more(tokenizer, tmp_path, length: int) -> None:
    made, found = samples(tokenizer, tmp_path, source="embedded", datasets="synthetic", length=length, rows=3)
    assert len(found) == 3 * len(SYNTHETIC) and len({sample.id for sample in found}) == len(found)
    for sample in found:
        used = n_tokens(tokenizer, sample)
        # A row of code has as many functions in every layer, so up to nine fewer than would fit.
        assert 0.7 * length < used <= length, (sample.id, used)
        assert sample.fields["synthetic"] is True and sample.fields["prompts"] == "own"
        assert made.score(sample, f" {sample.fields['ground_truth']}") == 1
        assert made.score(sample, "") == 0
    assert made.data_source == "embedded" and made.data_digest is None
    assert made.notes == [
        "prompts: own",
        "length_table: official",
        f"synthetic: true ({length} tokens)",
        "math_calc: drop_first_number=false",
    ]


def test_rows_depend_on_the_seed_and_on_nothing_else(tokenizer, tmp_path) -> None:
    def first(seed: int, names: list[str]) -> str:
        _, found = samples(tokenizer, tmp_path, source="embedded", seed=seed, datasets=names, length=1024, rows=2)
        return next(s for s in found if s.id == "passkey-1").context

    assert first(0, ["passkey"]) == first(0, ["number_string", "passkey"]) != first(1, ["passkey"])


def test_a_length_without_room_for_a_row_is_refused(tokenizer, tmp_path) -> None:
    _, found = samples(tokenizer, tmp_path, source="embedded", length=100)
    with pytest.raises(ConfigError, match=r"task\.length=100 is too short for passkey"):
        found[0]
    with pytest.raises(ConfigError, match=r"task\.length=9000 is more than the 8192"):
        samples(tokenizer, tmp_path, source="embedded", length=9000)


# --- published rows ----------------------------------------------------------------------------

OPTIONS = ["one", "two {context}", "three", "four"]
ROWS = {
    "passkey": {"context": "noise 12345", "input": "Which?", "answer": ["12345"]},
    "number_string": {"context": "noise 1122334455", "input": "Which?", "answer": "1122334455"},
    "kv_retrieval": {"context": '{"a": "b-1"}', "input": '\nKey: "a"\nValue: ', "answer": ["b-1"]},
    "longbook_sum_eng": {"context": "A book.", "input": "", "answer": ["short book"]},
    "longbook_qa_eng": {"context": "A red car.", "input": "Colour?", "answer": "red"},
    "longbook_choice_eng": {"context": "Two.", "input": "Which?", "answer": ["three"]},
    "longdialogue_qa_eng": {"context": "$$MASK$$: hi", "input": "", "answer": ["JANE", "JANE D."]},
    "longbook_qa_chn": {"context": "红车", "input": "颜色?", "answer": ["红"]},
    "code_debug": {"context": "def f(): pass", "input": "", "answer": ["four", "D"]},
    "code_run": {"context": "def func_3(x)", "input": "Value of func_3(-4)?", "answer": -4},
    "math_calc": {"context": "1 + 2 - 3", "input": "", "answer": [3, 0]},
    "math_find": {
        "context": "[1, 2]",
        "input": "One word. The second largest number of the list is: ",
        "answer": 1,
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "infinitebench" / "data").mkdir(parents=True)
    for name in ROWS:
        write(tmp_path, name, json.dumps(published(name)))
    return tmp_path


def published(name: str, id: int = 0) -> dict:
    has_options = name in ("code_debug", "longbook_choice_eng")
    return {"id": id, "options": OPTIONS if has_options else []} | ROWS[name]


def write(folder: Path, name: str, *lines: str) -> None:
    text = "".join(f"{line}\n" for line in lines)
    (folder / f"infinitebench/data/{name}.jsonl").write_text(text, encoding="utf-8")


def test_all_twelve_are_read_asked_and_judged_by_the_table(tokenizer, folder: Path) -> None:
    made, found = samples(tokenizer, folder, datasets="all", max_new_tokens=50)
    by_name = {sample.fields["dataset"]: sample for sample in found}
    assert tuple(by_name) == DATASETS and set(DATASETS) == set(NEW_TOKENS["official"]) == set(ROWS)
    right = {
        "passkey": "12345", "number_string": "1122334455", "kv_retrieval": "b-1",
        "longbook_sum_eng": "short book", "longbook_qa_eng": "Red.", "longbook_choice_eng": "C",
        "longdialogue_qa_eng": "Jane", "longbook_qa_chn": "红", "code_debug": "D.",
        "code_run": "-4", "math_calc": "3, 0", "math_find": "1",
    }  # fmt: skip
    for name, answer in right.items():
        assert made.score(by_name[name], answer) == pytest.approx(1), name
        assert made.score(by_name[name], "") == 0
        assert ROWS[name]["context"] in by_name[name].context
    assert made.data_source == "local" and made.data_digest is not None
    assert {sample.max_new_tokens for sample in found} == {50}
    assert by_name["code_run"].question.count("func_3(-4)") == 2
    assert "second largest number" in by_name["math_find"].context
    assert "B. two {context}\n" in by_name["code_debug"].question  # filled once
    assert by_name["longbook_choice_eng"].fields["ground_truth"] == ["three", "C"]


def test_answers_may_be_as_long_as_the_chosen_table_says(tokenizer, folder: Path) -> None:
    names = [name for name in DATASETS if name != "math_calc"]
    for table in ("official", "chat"):
        _, found = samples(tokenizer, folder, datasets=names, length_table=table)
        for sample in found:
            assert sample.max_new_tokens == NEW_TOKENS[table][sample.fields["dataset"]]
    with pytest.raises(ConfigError, match="math_calc answers with up to 30000 tokens"):
        samples(tokenizer, folder, datasets=["math_calc"])


def test_the_middle_is_cut_and_the_question_stays(tokenizer, folder: Path) -> None:
    long = published("longbook_qa_eng") | {"context": "start " + "word " * 3000 + "end"}
    write(folder, "longbook_qa_eng", json.dumps(long))
    chosen: dict[str, Any] = {"datasets": ["longbook_qa_eng"]}
    _, (sample,) = samples(tokenizer, folder, max_prompt_tokens=600, **chosen)
    prompt = encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
    assert 590 <= len(prompt) <= 602
    assert sample.fields["was_cut"] and sample.fields["original_prompt_tokens"] > 3000
    assert "start word" in sample.context and "word end" in sample.context
    assert sample.question.endswith("Colour?\nShort answer:")
    _, (sample,) = samples(tokenizer, folder, window=2048, **chosen)
    assert n_tokens(tokenizer, sample) <= 2048
    with pytest.raises(ConfigError, match="longer than half of the 20 tokens"):
        samples(tokenizer, folder, max_prompt_tokens=20, **chosen)[1][0]


def test_templates_of_the_data_folder_are_used_and_named(tokenizer, folder: Path) -> None:
    words = dict.fromkeys(DATASETS, "Q: {context}|{input}|{question}")
    (folder / infinitebench.TEMPLATES).write_text(
        json.dumps({"yarn_mistral": words, "gpt4": {**words, "passkey": "4: {context} {input}"}})
    )
    (folder / infinitebench.STRINGS).write_text(json.dumps(OWN_STRINGS))
    made, (sample,) = samples(tokenizer, folder, datasets=["passkey"])
    assert sample.context + sample.question == "Q: noise 12345|Which?|Which?"
    assert made.notes[0] == "prompts: yarn_mistral" and not sample.use_chat
    made, (sample,) = samples(tokenizer, folder, datasets=["passkey"], template_family="gpt4")
    assert sample.context + sample.question == "4: noise 12345 Which?" and sample.use_chat
    for damaged, message in (
        ("{", r"prompt_templates\.json is no JSON"),
        ('{"yarn_mistral": {"passkey": 3}}', "has no template of yarn_mistral for passkey"),
    ):
        (folder / infinitebench.TEMPLATES).write_text(damaged)
        with pytest.raises(ConfigError, match=message):
            samples(tokenizer, folder, datasets=["passkey"])
    (folder / infinitebench.STRINGS).unlink()
    with pytest.raises(ConfigError, match="OpenBMB/InfiniteBench"):
        task(folder, template_family="gpt4").check(shape())


def test_options_of_scorers_reach_them(tokenizer, folder: Path) -> None:
    made, found = samples(
        tokenizer, folder, datasets=["math_calc", "longdialogue_qa_eng"], max_new_tokens=50,
        drop_first_number=True, lenient_dialogue=True,
    )  # fmt: skip
    assert made.score(found[0], "1, 3, 0") == 1
    assert made.score(found[1], "it is Jane D. here") == 1


def test_a_finished_run_says_each_tasks_mean_and_where_the_official_scorer_raises(
    tmp_path: Path,
) -> None:
    rows = [
        {"dataset": "math_find", "prediction": "88", "ground_truth": 88, "score": 1.0},
        {"dataset": "math_find", "prediction": "8.5", "ground_truth": 88, "score": 0.0},
        {"dataset": "passkey", "prediction": "", "ground_truth": "1", "score": None},
        {"dataset": "code_run", "prediction": "4", "ground_truth": 4, "score": 1.0},
    ]
    task(tmp_path).artifacts(tmp_path, rows, "full")
    assert (tmp_path / "datasets.csv").read_text().splitlines() == [
        "dataset,rows,score_percent,official_scorer_raises",
        "math_find,2,50.0,1",
        "code_run,1,100.0,0",
    ]


# --- sources and refusals ----------------------------------------------------------------------


def test_files_are_fetched_where_none_is_there_and_none_was_named(monkeypatch, tokenizer, folder: Path) -> None:
    asked = []

    def fetch(name: str, root: Path | None, *, only):
        asked.append((name, root, *only))
        return [folder / only[0]]

    monkeypatch.setattr(download, "fetch", fetch)
    monkeypatch.setattr(sources, "data_roots", lambda data_dir: [])
    cache = download.cache_root()
    rows = ("infinitebench", cache, "infinitebench/data/code_debug.jsonl")
    prompts = ("infinitebench", cache, "infinitebench/prompt.py")
    for source, expected in (("hub", [prompts, rows]), ("auto", [rows])):
        made = task(None, source=source, datasets=["code_debug"])
        made.check(shape())
        assert asked == expected
        asked.clear()
        assert len(made.samples(tokenizer)) == 1 and not asked
    made = task(None, source="local", datasets=["code_debug"])
    with pytest.raises(ConfigError, match=r"kvbench fetch infinitebench"):
        made.check(shape())


def test_the_authors_own_file_of_templates_is_read_and_not_run(tokenizer, folder: Path) -> None:
    words = dict.fromkeys(DATASETS, "Q: {prefix} {context}|{input}")
    path = folder / infinitebench.UPSTREAM_TEMPLATES
    path.write_text(f"raise SystemExit\ngpt4_templates = {{}}\nyarn_mistral_templates = {words}\n")
    made, (sample,) = samples(tokenizer, folder, datasets=["passkey"])
    assert sample.context + sample.question == "Q: {prefix} noise 12345|Which?"
    assert made.notes[0] == "prompts: yarn_mistral"
    made, (sample,) = samples(tokenizer, folder, datasets=["math_find"])
    assert sample.context.startswith("Q: Look for the second largest number of this list. [1, 2]")
    assert "math_find: own first line" in made.notes
    with pytest.raises(ConfigError, match=r"prompt\.py holds no templates of gpt4"):
        task(folder, datasets=["passkey"], template_family="gpt4").check(shape())
    made = task(folder, source="embedded")
    made.check(shape())
    assert made.family == "own"  # generated rows need sentences too, which the file lacks


def test_published_and_generated_rows_never_share_a_run(folder: Path) -> None:
    (folder / "infinitebench/data/number_string.jsonl").unlink()
    made = task(folder, datasets=["passkey", "number_string"])
    with pytest.raises(ConfigError, match=r"number_string\.jsonl is missing"):
        made.check(shape())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "net"}, r"task\.source"),
        ({"datasets": ["passkeys"]}, "did you mean 'passkey'"),
        ({"datasets": ["passkey", "passkey"]}, "has something twice"),
        ({"datasets": []}, "is empty"),
        ({"template_family": "kimi"}, r"task\.template_family"),
        ({"rows": 0}, r"task\.rows=0"),
        ({"source": "embedded", "datasets": "all"}, "not longbook_sum_eng"),
        ({"length_table": "long"}, r"task\.length_table"),
    ],
)
def test_wrong_values_are_refused_by_key(folder: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(folder, **changes)


def test_references_keep_their_types() -> None:
    assert ground_truth("math_find", {"answer": 2.0}) == 2.0
    assert ground_truth("kv_retrieval", {"answer": ["x"]}) == "x"
    assert ground_truth("longbook_qa_eng", {"answer": "red"}) == ["red"]
    assert ground_truth("code_debug", {"answer": ["f", "C"], "options": []}) == ["f", "C"]
