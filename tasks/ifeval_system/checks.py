"""IFEval's 25 checks of an instruction, strict and loose, as Google's checkers decide them.

`strict` looks at the answer as it is. `loose` takes any of eight variants: without the first line, the last one, both,
and all of that without asterisks. A blank answer follows nothing.

Words and sentences in capitals are counted with NLTK. Its trained sentence splitter (`punkt_tab`) is a download; where
it is missing the untrained one splits, which knows no abbreviations, and `notes` says so. Languages are langdetect's,
with a fixed seed.

Not here: rows and prompts (`task.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

AFFIRMATIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
SPLITTER = "tokenizers/punkt_tab/english/"
FENCES = ("```json", "```Json", "```JSON", "```")
WORD_ENDS = frozenset(".,?!'\"")
Values = Mapping[str, Any]


def compares(count: int, relation: str, threshold: int) -> bool:
    """`at least` or `less than`."""
    return count < threshold if relation == "less than" else count >= threshold


# --- words, sentences, languages ---------------------------------------------------------------


@lru_cache(1)
def has_trained_splitter() -> bool:
    import nltk

    try:
        nltk.data.find(SPLITTER)
    except LookupError:
        return False
    return True


def notes() -> list[str]:
    """What a result must say about how sentences were split."""
    return [] if has_trained_splitter() else ["sentences: NLTK's untrained splitter, since punkt_tab is not here"]


@lru_cache(1)
def splitter() -> Any:
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTokenizer

    return PunktTokenizer("english") if has_trained_splitter() else PunktSentenceTokenizer()


def n_sentences(text: str) -> int:
    return len(splitter().tokenize(text))


def words_of(text: str) -> list[str]:
    """Words and signs by Treebank's rules, sentence by sentence."""
    from nltk.tokenize import NLTKWordTokenizer

    tokenizer = NLTKWordTokenizer()
    return [word for sentence in splitter().tokenize(text) for word in tokenizer.tokenize(sentence)]


def is_language(text: str, language: str) -> bool:
    """Whether langdetect finds the language; a text in which it finds none counts as right."""
    import langdetect

    langdetect.DetectorFactory.seed = 0  # it draws, and would decide otherwise the next time
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:
        return True


# --- one function per type that takes more than a line ------------------------------------------


def n_highlights(text: str) -> int:
    """Spans between asterisks with something in them; bold ones count in both forms."""
    single = [span for span in re.findall(r"\*[^\n\*]*\*", text) if span.strip("*").strip()]
    double = [span for span in re.findall(r"\*\*[^\n\*]*\*\*", text) if span[2:-2].strip()]
    return len(single) + len(double)


def n_bullets(text: str) -> int:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE))


def has_paragraphs(text: str, n: int) -> bool:
    """Whether there are `n` paragraphs between lines of three asterisks; an empty one is allowed at the ends only."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    if not all(parts[1:-1]):
        return False
    empty_ends = (not parts[0]) + (len(parts) > 1 and not parts[-1])
    return len(parts) - empty_ends == n


def nth_begins(text: str, n: int, nth: int, word: str) -> bool:
    """n paragraphs between blank lines, and the nth of all pieces begins with this word."""
    pieces = text.split("\n\n")
    count = sum(bool(piece.strip()) for piece in pieces)
    if nth > count or not pieces[nth - 1].strip():
        return False
    first = pieces[nth - 1].split()[0].lstrip("'").lstrip('"')
    end = next((at for at, sign in enumerate(first) if sign in WORD_ENDS), len(first))
    return count == n and first[:end].lower() == word.lower()


def has_postscript(text: str, marker: str) -> bool:
    return re.search(postscript(marker), text.lower(), re.MULTILINE) is not None


# --- regular expressions of a row ---------------------------------------------------------------


def postscript(marker: str) -> str:
    return POSTSCRIPTS.get(marker.strip(), rf"\s*{marker.strip().lower()}.*$")


def section(splitter: str) -> str:
    return rf"\s?{splitter.strip()}\s?\d+\s?"


def forbidden(word: str) -> str:
    return rf"\b{word}\b"


# By kind, what a row's value holds, and the expression that its check makes of each word of it.
PATTERNS: dict[str, tuple[str, Callable[[str], str]]] = {
    "detectable_format:multiple_sections": ("section_spliter", section),
    "detectable_content:postscript": ("postscript_marker", postscript),
    "keywords:existence": ("keywords", str),
    "keywords:frequency": ("keyword", str.strip),
    "keywords:forbidden_words": ("forbidden_words", forbidden),
}


def unreadable(kind: str, values: Values) -> str | None:
    """Why a check of this kind would raise whatever an answer says, as the official one does; None: it would not."""
    if kind not in PATTERNS:
        return None
    name, pattern_of = PATTERNS[kind]
    value = values[name]
    for word in value if isinstance(value, list) else [value]:
        try:
            re.compile(pattern_of(word), re.IGNORECASE)
        except (re.error, OverflowError, RecursionError) as error:
            return f"{name} has {word[:60]!r}, which is no regular expression ({error})"
    return None


def is_json(text: str) -> bool:
    """JSON once a fence is taken off."""
    text = text.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def has_two_answers(text: str) -> bool:
    """Two that differ, between six asterisks; empty pieces are allowed at the ends only."""
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def n_found(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


CHECKS: dict[str, Callable[[str, Values], bool]] = {
    "punctuation:no_comma": lambda text, v: "," not in text,
    "detectable_format:number_highlighted_sections": lambda text, v: n_highlights(text) >= v["num_highlights"],
    "length_constraints:number_words": lambda text, v: compares(
        len(re.findall(r"\w+", text)), v["relation"], v["num_words"]
    ),
    "length_constraints:number_sentences": lambda text, v: compares(
        n_sentences(text), v["relation"], v["num_sentences"]
    ),
    "detectable_content:number_placeholders": lambda text, v: (
        len(re.findall(r"\[.*?\]", text)) >= v["num_placeholders"]
    ),
    "detectable_format:number_bullet_lists": lambda text, v: n_bullets(text) == v["num_bullets"],
    "detectable_format:constrained_response": lambda text, v: any(one in text for one in AFFIRMATIONS),
    "detectable_format:multiple_sections": lambda text, v: (
        len(re.split(section(v["section_spliter"]), text)) > v["num_sections"]
    ),
    "length_constraints:number_paragraphs": lambda text, v: has_paragraphs(text, v["num_paragraphs"]),
    "length_constraints:nth_paragraph_first_word": lambda text, v: nth_begins(
        text, v["num_paragraphs"], v["nth_paragraph"], v["first_word"]
    ),
    "detectable_content:postscript": lambda text, v: has_postscript(text, v["postscript_marker"]),
    "keywords:existence": lambda text, v: all(n_found(word, text) for word in v["keywords"]),
    "keywords:frequency": lambda text, v: compares(n_found(v["keyword"].strip(), text), v["relation"], v["frequency"]),
    "keywords:forbidden_words": lambda text, v: not any(n_found(forbidden(one), text) for one in v["forbidden_words"]),
    "keywords:letter_frequency": lambda text, v: compares(
        text.lower().count(v["letter"].strip().lower()), v["let_relation"], v["let_frequency"]
    ),
    "detectable_format:json_format": lambda text, v: is_json(text),
    "detectable_format:title": lambda text, v: has_title(text),
    "combination:two_responses": lambda text, v: has_two_answers(text),
    "combination:repeat_prompt": lambda text, v: text.strip().lower().startswith(v["prompt_to_repeat"].strip().lower()),
    "startend:end_checker": lambda text, v: text.strip().strip('"').lower().endswith(v["end_phrase"].strip().lower()),
    "startend:quotation": lambda text, v: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None,
    "change_case:english_capital": lambda text, v: text.isupper() and is_language(text, "en"),
    "change_case:english_lowercase": lambda text, v: text.islower() and is_language(text, "en"),
    "change_case:capital_word_frequency": lambda text, v: compares(
        sum(word.isupper() for word in words_of(text)), v["capital_relation"], v["capital_frequency"]
    ),
    "language:response_language": lambda text, v: is_language(text, v["language"]),
}
NEEDS: dict[str, tuple[str, ...]] = {  # the values that a check reads
    "detectable_format:number_highlighted_sections": ("num_highlights",),
    "length_constraints:number_words": ("relation", "num_words"),
    "length_constraints:number_sentences": ("relation", "num_sentences"),
    "detectable_content:number_placeholders": ("num_placeholders",),
    "detectable_format:number_bullet_lists": ("num_bullets",),
    "detectable_format:multiple_sections": ("section_spliter", "num_sections"),
    "length_constraints:number_paragraphs": ("num_paragraphs",),
    "length_constraints:nth_paragraph_first_word": ("num_paragraphs", "nth_paragraph", "first_word"),
    "detectable_content:postscript": ("postscript_marker",),
    "keywords:existence": ("keywords",),
    "keywords:frequency": ("relation", "keyword", "frequency"),
    "keywords:forbidden_words": ("forbidden_words",),
    "keywords:letter_frequency": ("let_relation", "letter", "let_frequency"),
    "combination:repeat_prompt": ("prompt_to_repeat",),
    "startend:end_checker": ("end_phrase",),
    "change_case:capital_word_frequency": ("capital_relation", "capital_frequency"),
    "language:response_language": ("language",),
}


# --- an answer ---------------------------------------------------------------------------------


def follows(kind: str, values: Values, answer: str) -> bool:
    """Whether a non-blank answer follows one instruction."""
    return bool(answer.strip()) and bool(CHECKS[kind](answer, values))


def strict(kinds: Sequence[str], values: Sequence[Values], answer: str) -> list[bool]:
    """Per instruction, whether the answer follows it as it is."""
    return [follows(kind, each, answer) for kind, each in zip(kinds, values, strict=True)]


def loose(kinds: Sequence[str], values: Sequence[Values], answer: str) -> list[bool]:
    """Per instruction, whether any variant of the answer follows it."""
    texts = variants(answer)
    return [any(follows(kind, each, text) for text in texts) for kind, each in zip(kinds, values, strict=True)]


def variants(answer: str) -> list[str]:
    """The answer as it is, without its first line, its last, both; and these without asterisks."""
    lines = answer.split("\n")
    texts = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*texts, *(text.replace("*", "") for text in texts)]
