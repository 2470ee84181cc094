"""The prose that needs no data."""

import pytest

from kvbench.methods.calibration import prose


def test_embedded_prose_is_long_and_free_of_markup() -> None:
    text = prose.embedded_prose()
    assert len(text) > 100_000
    for markup in ("::=", ">>>", "****", "====", '"'):
        assert markup not in text
    paragraphs = text.strip().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert all(p.endswith(".") and "\n" not in p for p in paragraphs)


def test_embedded_prose_is_the_same_every_time() -> None:
    assert prose.embedded_prose.__wrapped__() == prose.embedded_prose()


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("Loops\n*****", None),
        ("   while True:\n       suite()", None),
        ('loop ::= "while" expression ":" suite that is long enough to be a paragraph here.', None),
        ("New in version 3.5.", None),
        (
            '* The *first* word of\n  this "list item" is kept with all of its\n  well-\n  known words.',
            "The first word of this list item is kept with all of its well-known words.",
        ),
    ],
)
def test_blocks_become_paragraphs_or_nothing(block: str, expected: str | None) -> None:
    assert prose.as_prose(block) == expected
