"""InfiniteBench's prompts: a row's fields in a template, and templates of our own where upstream's are not there.

Not here: which templates a run takes (`tasks/infinitebench/task.py`).
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_text
from kvbench.tasks.infinitebench.synthetic import func_call
from kvbench.tasks.rows import BadRow

LETTERS = "ABCD"
OPTIONS = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}\n"
OWN_TEMPLATES = {
    "passkey": "One line of this text holds an access code.\n\n{context}\n{input}\nThe access code is",
    "number_string": "One line of this text holds a row of digits.\n\n{context}\n{input}\nThe row of digits is",
    "kv_retrieval": "Look up one key of these records.\n\n{context}\n{input}",
    "longbook_sum_eng": "A book:\n\n{context}\n\nA summary of the book:",
    "longbook_qa_eng": "A book:\n\n{context}\n\nA question about the book: {question}\nShort answer:",
    "longbook_choice_eng": "A book:\n\n{context}\n\nA question about the book: {question}\n"
    + OPTIONS
    + "\nThe right letter is",
    "longbook_qa_chn": "一本书\uff1a\n\n{context}\n\n关于这本书的问题\uff1a{question}\n简短的回答\uff1a",
    "longdialogue_qa_eng": "In this script one name is hidden behind $$MASK$$.\n\n{context}\n\nThe hidden name is",
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": "Sums with the value after every number.\n\nSum: 2 + 5 - 3\nValues: [2, 7, 4]\n\n"
    "Sum: {context}\nValues:",
    "code_run": "Python functions:\n\n{context}\n{input}\n{func_call} returns",
    "code_debug": "One function of this Python code has a bug that makes it crash.\n\n{context}\n\n"
    + OPTIONS
    + "\nThe function with the bug is:",
}


def upstream_templates(path: Path, family: str) -> Mapping[str, str]:
    """One family's templates out of the authors' Python file, which is read and not run."""
    try:
        body = ast.parse(read_text(path)).body
        found = {
            statement.targets[0].id: ast.literal_eval(statement.value)
            for statement in body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and statement.targets[0].id == f"{family}_templates"
        }
        words = found[f"{family}_templates"]
        if lacking := [name for name in OWN_TEMPLATES if "{context}" not in str(words.get(name))]:
            raise ValueError(f"{lacking[0]} is missing")
        return {name: words[name] for name in OWN_TEMPLATES}
    except (
        SyntaxError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ConfigError(f"{path} holds no templates of {family} for all tasks ({error}); fetch it again") from None


def ground_truth(dataset: str, row: Mapping[str, Any]) -> Any:
    """The reference as the scorer takes it: the answer, or [answer, letter] where there are options."""
    answer = row["answer"]
    if dataset == "kv_retrieval":  # its scorer matches no list
        return answer[0] if isinstance(answer, list) and answer else answer
    if dataset not in ("code_debug", "longbook_choice_eng"):
        is_text = isinstance(answer, str)
        return [answer] if is_text and dataset.startswith("longbook_") else answer
    if isinstance(answer, list) and len(answer) == 2 and answer[1] in tuple(LETTERS):
        return answer
    text = answer[0] if isinstance(answer, list) and answer else answer
    options = list(row.get("options") or ())
    if len(options) != len(LETTERS) or text not in options:
        raise BadRow(f"the answer {text!r} is none of 4 'options'")
    return [text, LETTERS[options.index(text)]]


def template_fields(dataset: str, row: Mapping[str, Any], find_prefix: str) -> dict[str, str]:
    """Values of a template's placeholders."""
    text = row["input"]
    fields = {"context": row["context"], "input": text, "question": text}
    options = list(row.get("options") or ())
    fields |= {f"OPTION_{letter}": one for letter, one in zip(LETTERS, options, strict=False)}
    if dataset == "code_run":
        call = func_call(text)
        fields |= {"func_call": call, "func": call.partition("(")[0]}
    if dataset == "math_find":
        quantity = asked_number(text).lower()[: -len(" of")]
        fields["prefix"] = find_prefix.replace("{quantity}", quantity)
    return fields


def asked_number(text: str) -> str:
    """The first match of `The.+of`, in one pass: the expression itself takes hours on a long text of many a `The`."""
    for line in text.split("\n"):
        start, end = line.find("The"), line.rfind("of")
        if 0 <= start and start + len("The") < end:
            return line[start : end + len("of")]
    return ""


def check_row(dataset: str, row: Mapping[str, Any]) -> None:
    """Raise `BadRow` for a row of a dataset that cannot be asked or scored, beyond the types of its fields."""
    options = row.get("options") or []
    if not isinstance(options, list) or not all(isinstance(one, str) for one in options):
        raise BadRow("field 'options' is no list of texts")
    truth = ground_truth(dataset, row)
    if dataset == "code_run" and not func_call(row["input"]):
        raise BadRow("field 'input' names no call such as func_12(3)")
    if dataset == "math_find" and not asked_number(row["input"]):
        raise BadRow("field 'input' does not say which number to find")
    if truth in ([], [[]], ""):
        raise BadRow("field 'answer' is empty")


def fill(template: str, fields: Mapping[str, str]) -> tuple[str, str]:
    """The filled template up to the end of its context, and the rest. Braces in the fields stay as they are."""

    def filled(part: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda m: fields.get(m[1], m[0]), part)

    head, placeholder, tail = template.partition("{context}")
    assert placeholder, template
    return filled(head) + fields["context"], filled(tail)
