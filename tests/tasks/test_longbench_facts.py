"""docs_facts: answers and words that the text does not have, several questions on a context, and its score."""

import re

import pytest

from kvbench.tasks.longbench import embedded, prompts
from kvbench.tasks.longbench.facts import FORMS, N_FACTS, N_SOLVED, pattern, questions
from kvbench.tasks.longbench.scores import named, row_score, spoken
from kvbench.tasks.longbench.shared import by_context, history_of

ROWS = embedded.rows_of("docs_facts", 300)
LITTLE = {"the", "of", "in", "from", "to", "a", "has", "was", "is"}  # words that any sentence has


def statement(row: embedded.Row) -> tuple[str, str, str]:
    """The person that a row asks about, what the text tells of them, and the whole statement."""
    asked = row["input"].rpartition("Question: ")[2]
    (form,) = (one for one in FORMS if re.search(pattern(one), row["context"], re.MULTILINE))
    told = re.finditer(pattern(form), row["context"], re.MULTILINE)
    (match,) = (one for one in told if one[1] in asked)
    return match[1], match[2], match[0]


def test_no_answer_stands_in_its_context_or_before_its_question() -> None:
    for row in ROWS:
        assert named(row["answers"], row["context"]) == set(), row["_id"]
        assert named(row["answers"], row["input"]) == set(), row["_id"]


def test_a_question_has_the_statements_name_and_no_other_word_of_meaning() -> None:
    for row in ROWS:
        name, _, said = statement(row)
        asked = row["input"].rpartition("Question: ")[2]
        assert said.count(name) == asked.count(name) == row["context"].count(name) == 1
        both = set(spoken(said.replace(name, ""))) & set(spoken(asked.replace(name, "")))
        assert both <= LITTLE, (row["_id"], both)


def test_what_the_text_tells_is_never_a_right_answer_nor_is_the_statement() -> None:
    for row in ROWS:
        for copied in statement(row):
            assert row_score("fact", copied, row["answers"], all_classes=row["all_classes"]) == 0


def test_all_statements_of_a_context_are_alike_and_have_different_answers() -> None:
    assert {statement(row)[2].replace(statement(row)[0], "").split()[0] for row in ROWS[: len(FORMS)]} > {"owns", "won"}
    for row in ROWS:
        found = questions(row["context"])
        assert len(found) == N_FACTS - N_SOLVED
        assert len({one["answers"][0] for one in found}) == len(found)
        assert sum(one["input"] == row["input"] for one in found) == 1
        guesses = [one["answers"][0] for one in found]
        scores = [row_score("fact", one, row["answers"], all_classes=row["all_classes"]) for one in guesses]
        assert sum(scores) == 1  # guessing among the context's facts: once in fourteen


def test_right_answers_count_in_every_accepted_spelling() -> None:
    for row in ROWS:
        for one in row["answers"]:
            for said in (one, f" {one.upper()}.", f"The {one}", f"It is {one}, I think."):
                assert row_score("fact", said, row["answers"], all_classes=row["all_classes"]) == 1, said


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.asks.format(name="N"))
def test_no_facts_answer_is_part_of_another_facts(form) -> None:
    assert len(form.facts) >= N_FACTS + 10  # some are left out, where the paragraphs name them
    for told, answers in form.facts.items():
        others = [one for other, spellings in form.facts.items() if other != told for one in spellings]
        assert not any(named(others, answer) for answer in answers)


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("42", 1), (" 42.", 1), ("42 goats", 1), ("**42**", 1), ("42, so 42", 1),
        ("43", 0), ("42 or 43", 0), ("42-43", 0), ("42.5", 0), ("421", 0), ("4 2", 0), ("42s", 0), ("not 42", 0),
        ("42 of 7", 0), ("forty-two", 0), ("", 0),
    ],
)  # fmt: skip
def test_a_number_is_right_alone(said, score) -> None:
    assert row_score("fact", said, ["42"], all_classes=["43", "44"]) == score


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Buenos Aires", 1), ("the BUENOS AIRES!", 1), ("Buenos-Aires, founded in 1536", 1), ("It is Buenos Aires", 1),
        ("Buenos", 0), ("Aires Buenos", 0), ("Buenos Aires or Lima", 0), ("Lima", 0), ("not Buenos Aires", 0),
    ],
)  # fmt: skip
def test_a_name_is_right_without_another_facts(said, score) -> None:
    assert row_score("fact", said, ["Buenos Aires"], all_classes=["Lima", "Oslo"]) == score


def test_several_questions_on_a_context_have_answers_and_wrong_answers_of_their_own() -> None:
    for group in by_context("docs_facts", ROWS[:40], 8):
        assert len(group) == len({row["input"] for row in group}) == len({row["_id"] for row in group}) == 8
        assert len({row["context"] for row in group}) == 1
        for row in group:
            assert not set(row["answers"]) & set(row["all_classes"])
            assert row_score("fact", row["answers"][0], row["answers"], all_classes=row["all_classes"]) == 1
            others = [other["answers"][0] for other in group if other is not row]
            assert named(others, " / ".join(row["all_classes"])) == set(others)
    assert history_of("docs_facts", "Oslo") == " Oslo"


def test_the_question_can_stand_before_the_context() -> None:
    row, template = ROWS[0], embedded.DATASETS["docs_facts"].template
    context, question = prompts.parts_of("docs_facts", template, row, "after")
    assert question == f"\n\n{row['input']}\nAnswer:"
    before, cue = prompts.parts_of("docs_facts", template, row, "before")
    assert before == f"{row['input']}\n\n{context}"
    assert cue == "\n\nAnswer:"
