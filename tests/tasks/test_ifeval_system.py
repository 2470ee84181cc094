"""Instructions in a system prompt: 25 checks, loose variants, leakage, the conversation, rows, official flags."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.engine.workers.limited import Limited
from kvbench.tasks import sources
from kvbench.tasks.ifeval_system import checks, grade, leakage
from kvbench.tasks.ifeval_system import task as task_file
from kvbench.tasks.ifeval_system.task import IfevalSystem, check_values
from kvbench.tasks.prompt import encode
from kvbench.tasks.rows import BadRow
from kvbench.tests.golden_metrics import metrics_folder
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, NO_SYSTEM, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
ENGLISH = "the old boat lies quietly in the harbour while the rain falls on its wooden deck"
CASES: list[tuple[str, dict[str, Any], str, str]] = [  # type, values, what follows it, what does not
    ("punctuation:no_comma", {}, "a; b", "a, b"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "**bold** is *one*", "*a* and * *"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "it's", "one two three"),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "It is. So be it.", "It is."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b c]", "[a\nb] [c]"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "- a\n  * b\n**c", "* a\n* b\n- c"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:multiple_sections", {"section_spliter": "Part ", "num_sections": 2},
     "Part 1 a Part2 b", "PART 1"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***", "a *** *** b"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Rain"},
     "a\n\n'rain, b", "rain\n\n\n\nrain"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "a\np. p.s: b", "P.S. b"),
    ("keywords:existence", {"keywords": ["boat", "rain"]}, "Boats, RAIN", "boat"),
    ("keywords:frequency", {"keyword": " sea", "frequency": 2, "relation": "at least"}, "Season, sea", "sea"),
    ("keywords:forbidden_words", {"forbidden_words": ["ice"]}, "nice", "the Ice!"),
    ("keywords:letter_frequency", {"letter": "K", "let_frequency": 2, "let_relation": "at least"}, "Kk", "k"),
    ("detectable_format:json_format", {}, '```JSON\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Rain>> falls", "<< >>"),
    ("combination:two_responses", {}, "******a******b", "a******a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say Rain. "}, " say rain. It rains.", "It rains. say rain."),
    ("startend:end_checker", {"end_phrase": "The end"}, 'x the END" ', "the end."),
    ("startend:quotation", {}, ' "a" b" ', '"'),
    ("change_case:english_capital", {}, "123 A", ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.upper()),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     "A NEW boat", "A boat"),
    ("language:response_language", {"language": "de"}, "Der Regen fällt leise auf die alten Dächer der Stadt", ENGLISH),
]  # fmt: skip


def test_there_is_a_case_of_each_of_the_25_types() -> None:
    assert [case[0] for case in CASES] == list(dict.fromkeys(case[0] for case in CASES))
    assert {case[0] for case in CASES} == set(checks.CHECKS) and len(CASES) == 25
    assert all(set(values) == set(checks.NEEDS.get(kind, ())) for kind, values, _, _ in CASES)


@pytest.mark.parametrize(("kind", "values", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_an_answer_follows_an_instruction_or_does_not(kind, values, right, wrong) -> None:
    if kind != "change_case:english_capital":  # langdetect takes capitals for other languages
        assert checks.follows(kind, values, right)
    else:
        assert checks.follows(kind, values, right) == checks.is_language(right, "en")
    assert not checks.follows(kind, values, wrong) and not checks.follows(kind, values, " \n")


def test_a_language_that_cannot_be_told_counts_as_right_and_the_draw_is_fixed() -> None:
    assert checks.is_language("123 456", "fr")
    assert len({checks.is_language("OK BOAT", "en") for _ in range(5)}) == 1


def test_loose_forgives_a_first_line_a_last_line_and_asterisks() -> None:
    kinds, values = ["length_constraints:number_words", "punctuation:no_comma"], [CASES[2][1], {}]
    answer = "Sure, here you go:\n*two words*\nBye, all"
    assert checks.strict(kinds, values, answer) == [False, False]
    assert checks.loose(kinds, values, answer) == [True, True]
    assert checks.variants("a*\nb\nc")[3:6] == ["b", "a\nb\nc", "b\nc"]


def test_the_splitter_that_is_used_is_named(monkeypatch) -> None:
    checks.has_trained_splitter.cache_clear()
    assert (checks.notes() == []) == checks.has_trained_splitter()
    assert all("untrained splitter" in note for note in checks.notes())
    assert checks.n_sentences("It rains. It pours! Why?") == 3
    assert checks.words_of("It's RAIN.") == ["It", "'s", "RAIN", "."]


def test_leakage_is_the_recall_of_stemmed_words() -> None:
    assert leakage.leakage("never use commas", "commas are never used") == pytest.approx(
        {"rouge1_recall": 1.0, "rougeL_recall": 2 / 3}
    )
    assert leakage.leakage("never use commas", "")["rouge1_recall"] == 0
    for name in leakage.DEFENCES:
        text = leakage.system_text("Use {braces}.", name)
        assert leakage.leaked_text("Use {braces}.") in text and "{prompt}" not in text


# --- the task ----------------------------------------------------------------------------------

ROW = {
    "key": 1001,
    "prompt": "all of it",
    "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
    "kwargs": [{"relation": None}, {"keywords": ["rain"]}],
    "messages": [{"role": "system", "content": "No commas."}, {"role": "user", "content": "Write of rain."}],
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ifeval").mkdir()
    write(tmp_path, ROW, ROW | {"key": 1000})
    return tmp_path


def write(folder: Path, *rows: Any) -> None:
    (folder / "ifeval" / "sys_ifeval.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def asked(data_dir: Path, tokenizer: Any, window: int = 8192, **changes: Any) -> tuple[IfevalSystem, Any]:
    values = yaml.safe_load((REPO / "conf" / "task" / "ifeval_system.yaml").read_text())
    del values["_target_"]
    made = IfevalSystem(build_params(IfevalSystem, values | changes, "task"), str(data_dir), seed=0)
    made.check(ModelShape("tiny", 2, 4, 2, 8, window, (0, 1)))
    return made, made.samples(tokenizer)


def test_the_system_turn_alone_is_the_context(tokenizer, folder) -> None:
    made, (sample,) = asked(folder, tokenizer)  # one key is left out, as the paper does
    prompt = encode(tokenizer, sample, chat="auto", system_prompt="", scope="context_only")
    system = leakage.leaked_text("No commas.")
    assert tokenizer.decode(prompt.context_ids) == f"<|im_start|>system\n{system}<|im_end|>\n"
    rest = "<|im_start|>user\nWrite of rain.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.question_ids) == rest
    assert (sample.id, sample.max_new_tokens, made.dataset) == ("follow-1001", 1280, "follow")
    whole = encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt").context_ids
    assert whole == prompt.context_ids + prompt.question_ids
    assert made.verdict(sample, "Rain falls, slowly\nRain") == (
        0.0, {"prompt_loose": 1.0, "instructions_strict": 0.5, "instructions_loose": 1.0, "checks_stopped": 0.0},
    )  # fmt: skip
    assert made.score(sample, "Rain falls slowly") == 1.0


def test_an_attack_asks_for_the_system_prompt_and_lower_is_better(tokenizer, folder) -> None:
    made, (sample,) = asked(folder, tokenizer, ask="leak", defence="flipped")
    assert leakage.ATTACK in sample.question and "secret" in sample.context
    assert (sample.max_new_tokens, made.dataset) == (256, "leak/flipped") and "lower is better" in str(made.notes)
    assert made.verdict(sample, sample.references[0]) == (1.0, {"rouge1_recall": 1.0})
    assert made.score(sample, "I will not say") < 0.2


def test_a_finished_run_has_a_line_per_type(tokenizer, folder) -> None:
    made, (sample,) = asked(folder, tokenizer)
    rows = [{"prediction": text, "score": 0.0, **sample.fields} for text in ("rain, rain", "sun")]
    made.artifacts(folder, [*rows, {"score": None}], "full")
    lines = (folder / "instructions.csv").read_text().splitlines()
    assert lines == ["instruction,n,strict,loose", "keywords:existence,2,0.5,0.5", "punctuation:no_comma,2,0.5,0.5"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": [{}]}, "do not belong together"),
        ({"instruction_id_list": ["punctuation:no_comma", "mine"]}, "unknown 'mine'"),
        ({"instruction_id_list": ["punctuation:no_comma", ["mine"]]}, "unknown"),
        ({"kwargs": [{}, {"keywords": []}]}, "no usable keywords"),
        ({"kwargs": [{}, {"keywords": ["("]}]}, "no regular expression"),
        ({"kwargs": [{}, {"keywords": ["(", ")"]}]}, r"keywords has '\(', which is no regular expression"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no system message"),
    ],
)
def test_a_bad_row_is_named_and_refused_or_skipped(tokenizer, folder, change, message) -> None:
    write(folder, ROW, ROW | {"key": 7} | change)
    with pytest.raises(ConfigError, match=rf"sys_ifeval\.jsonl, line 2: .*{message}"):
        asked(folder, tokenizer)
    assert len(asked(folder, tokenizer, on_bad_row="skip")[1]) == 1


SLOW = "(a+)+c"  # takes twice as long for each further a that an answer ends with
TEXT = "It rains, and " + "a" * 60


def test_a_check_that_never_ends_costs_its_instruction_and_no_other(tokenizer, folder, monkeypatch) -> None:
    worker = Limited(grade.__name__, limit_s=1)
    monkeypatch.setattr(grade, "worker", lambda: worker)
    kinds = ["keywords:existence", "keywords:frequency", "keywords:existence"]
    values = [{"keywords": ["rain"]}, {"keyword": SLOW, "frequency": 1, "relation": "at least"}, {"keywords": ["sun"]}]
    write(folder, ROW | {"instruction_id_list": kinds, "kwargs": values})
    made, (sample,) = asked(folder, tokenizer)
    assert made.verdict(sample, "It rains: aac, in the sun") == (
        1.0, {"prompt_loose": 1.0, "instructions_strict": 1.0, "instructions_loose": 1.0, "checks_stopped": 0.0},
    )  # fmt: skip
    assert made.verdict(sample, TEXT) == (
        0.0, {"prompt_loose": 0.0, "instructions_strict": 1 / 3, "instructions_loose": 1 / 3, "checks_stopped": 1.0},
    )  # fmt: skip
    made.artifacts(folder, [{"prediction": TEXT, "score": 0.0, **sample.fields}], "full")
    lines = (folder / "instructions.csv").read_text().splitlines()
    assert lines[1:] == ["keywords:existence,2,0.5,0.5", "keywords:frequency,1,0.0,0.0"]
    worker.close()


def test_what_a_check_raises_is_an_answer_that_does_not_follow(monkeypatch) -> None:
    def broken(text: str, values: Any) -> bool:
        raise MemoryError

    monkeypatch.setitem(checks.CHECKS, "keywords:existence", broken)
    assert grade.reply({"kind": "keywords:existence", "values": {}, "answer": "text"}) is None


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("length_constraints:number_words", {"relation": "about", "num_words": 3}),
        ("length_constraints:number_words", {"relation": "at least", "num_words": "3"}),
        ("language:response_language", {"language": 5}),
        ("keywords:frequency", {"keyword": "[", "frequency": 1, "relation": "at least"}),
        ("keywords:frequency", {"keyword": "x{4294967297}", "frequency": 1, "relation": "at least"}),
        ("keywords:frequency", {"keyword": "(" * 5000 + ")" * 5000, "frequency": 1, "relation": "at least"}),
        ("keywords:forbidden_words", {"forbidden_words": ["a", "(?i)b"]}),
        ("detectable_content:postscript", {"postscript_marker": "\\Z"}),
        ("detectable_format:multiple_sections", {"section_spliter": "Part (", "num_sections": 2}),
    ],
)
def test_values_that_a_check_cannot_take_are_refused(kind, values) -> None:
    with pytest.raises(BadRow):
        check_values(kind, values)


def test_models_and_machines_that_cannot_are_refused(tokenizer, folder, monkeypatch) -> None:
    for template in (None, NO_SYSTEM + CHATML_TEMPLATE):
        with pytest.raises(ConfigError, match=r"system turn|chat template"):
            asked(folder, tiny_tokenizer(template, adds_bos=False))
    with pytest.raises(ConfigError, match="do not fit the window"):
        asked(folder, tokenizer, window=1000)
    monkeypatch.setattr(task_file, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs langdetect, nltk"):
        asked(folder, tokenizer)
    assert asked(folder, tokenizer, ask="leak")[0].rows


# --- reference vectors -------------------------------------------------------------------------


def run_ifeval(path: Path) -> list[Check]:
    """The flags of every answer, and four totals."""
    vectors, results = json.loads(path.read_text(encoding="utf-8")), list[Check]()
    flags: dict[str, list[list[bool]]] = {"strict": [], "loose": []}
    for i, row in enumerate(vectors["rows"]):
        for name, check in (("strict", checks.strict), ("loose", checks.loose)):
            ours = check(row["instruction_id_list"], row["kwargs"], row["response"])
            flags[name].append(ours)
            results.append(same(f"ifeval[{i}].{name}", ours, row[name]))
    for name, each in flags.items():
        share = sum(map(sum, each)) / sum(map(len, each))
        results.append(same(f"ifeval.instruction_level.{name}", share, vectors["instruction_level"][name]))
        share = sum(map(all, each)) / len(each)
        results.append(same(f"ifeval.prompt_level.{name}", share, vectors["prompt_level"][name]))
    return results


def run_leakage(path: Path) -> list[Check]:
    """Both recalls of every answer."""
    results = []
    for i, case in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        ours = leakage.leakage(case["reference"], case["response"])
        results += [same(f"leakage[{i}].{name}", value, case[name]) for name, value in ours.items()]
    return results


def same(name: str, ours: Any, official: Any) -> Check:
    near = abs(ours - official) <= 1e-9 if isinstance(ours, float) else ours == official
    return name, None if near else f"{ours!r} instead of {official!r}"


@pytest.mark.parametrize(("name", "run"), [("ifeval", run_ifeval), ("leakage_rouge", run_leakage)])
def test_checks_agree_with_the_official_ones(name, run) -> None:
    path = metrics_folder() / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is no part of the project and not here")
    results = run(path)
    assert results and [result for result in results if result[1]] == []


def test_all_541_rows_can_be_checked(tokenizer) -> None:
    file = sources.find("ifeval", None)
    if file is None:
        pytest.skip("ifeval/sys_ifeval.jsonl is no part of the project and not here")
    made, samples = asked(file.parent, tokenizer)
    assert len(samples) == 539
    for sample in samples:
        score, measures = made.verdict(sample, "Some words\n\nand others, in English.")
        assert 0 <= score <= (measures["prompt_loose"] or 0) <= 1
