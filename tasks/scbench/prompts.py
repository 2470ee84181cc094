"""From a row of SCBench to the texts of a conversation: the first piece and one per question.

Templates come from upstream's prompt_templates.json, or are `OWN_TEMPLATES`; contexts hold braces, so fields are
filled by plain substitution. `golden` puts the previous reference at the head of each later piece, `dialogue` leaves
it out, `independent` has the context first and then every question on its own.

With a chat template, the first piece is a user's turn; later pieces end the open assistant's turn and open the next.
`independent` cuts the user's turn after the context, and its end goes after each question. Two oddities of the
authors' code stay there: mf names the last question in front of every later one, and summary begins the answer.

Not here: tokens and lengths (the task), scores (`scores.py`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.engine.errors import ConfigError, first_line
from kvbench.tasks.prompt import SENTINEL, answering

MODES = ("independent", "golden", "dialogue")
FIELD = re.compile(r"\{(\w+)\}")
WITH_QUESTIONS = ("scbench_choice_eng", "scbench_qa_eng", "scbench_qa_chn", "scbench_mf")  # others ask the bare input
ANSWER_BEGINS = {"scbench_summary": "This paper"}
NAMES = (
    *("scbench_kv", "scbench_prefix_suffix", "scbench_vt", "scbench_repoqa", "scbench_qa_eng", "scbench_qa_chn"),
    *("scbench_choice_eng", "scbench_many_shot", "scbench_mf", "scbench_summary", "scbench_summary_with_needles"),
    "scbench_repoqa_and_kv",
)
PLAIN = {"first_turn": "{context}\n\n{input}", "follow_up": "{pre_ans}\n\n{input}"}
PLAIN |= {"follow_up_no_reference": "{input}", "multi_request_context": "{context}"}
OPTIONS = "\n".join(f"{letter}) {{OPTION_{letter}}}" for letter in "ABCD")
OWN: dict[str, tuple[str, str]] = {  # by task: what opens the prompt, and how a question is put
    "scbench_kv": ("Below is a JSON object. Give the value of the key that is asked for.\n\n", "{input}"),
    "scbench_repoqa": ("Below is code. Repeat the function that is described, in a block between ```.\n\n", "{input}"),
    "scbench_qa_eng": ("Answer questions on this book in a few words.\n\n", "Q: {question}\nA:"),
    "scbench_qa_chn": ("请根据这本书简短地回答问题。\n\n", "问：{question}\n答："),  # noqa: RUF001 - Chinese
    "scbench_choice_eng": (
        "Choose the right answer to questions on this book.\n\n",
        f"Q: {{question}}\n{OPTIONS}\n\nThe right letter is",
    ),
    "scbench_mf": ("Below is a list of numbers.\n\n", "{prefix}\n\n{input}"),
}
Templates = Mapping[str, Mapping[str, str]]  # kind of piece, task, template


def own_templates() -> Templates:
    """Templates in our own words, for data without upstream's."""
    opening = {name: OWN.get(name, ("", "{input}"))[0] for name in NAMES}
    asking = {name: OWN.get(name, ("", "{input}"))[1] for name in NAMES}
    return {
        "first_turn": {name: f"{opening[name]}{{context}}\n\n{asking[name]}" for name in NAMES},
        "follow_up": {name: f"{{pre_ans}}\n\n{asking[name]}" for name in NAMES},
        "follow_up_no_reference": asking,
        "multi_request_context": {name: f"{opening[name]}{{context}}" for name in NAMES},
    }


def filled(template: str, fields: Mapping[str, Any]) -> str:
    """A template with its fields replaced once; what a value holds is not looked at."""
    return FIELD.sub(lambda field: str(fields[field[1]]), template)


def pieces_of(
    task: str, row: Mapping[str, Any], mode: str, templates: Templates, tokenizer: Any | None = None
) -> list[str]:
    """The texts that are fed one after the other, of `independent` the context first; without a tokenizer no chat."""
    turns: Sequence[Mapping[str, Any]] = row["multi_turns"]
    if mode == "independent":
        return independent(task, row, turns, templates, tokenizer)
    fields = [fields_of(task, row, turn) for turn in turns]
    first = filled(templates["first_turn"][task], fields[0])
    has_references = mode == "golden"
    if tokenizer is None:
        kind = "follow_up" if has_references else "follow_up_no_reference"
        befores = [{"pre_ans": turn["answer"]} for turn in turns]
        rest = [filled(templates[kind][task], now | before) for before, now in zip(befores, fields[1:], strict=False)]
        return [first, *rest]
    if task == "scbench_mf":
        fields = [one | {"prefix": fields[-1]["prefix"]} for one in fields]
    texts = [filled(templates["follow_up_no_reference"][task], one) for one in fields[1:]]
    cue = ANSWER_BEGINS.get(task, "")
    if has_references:
        rest = [next_turn(tokenizer, str(turn["answer"]), text) for turn, text in zip(turns, texts, strict=False)]
    else:
        rest = [user_turn(tokenizer, text) for text in texts]
    return [user_turn(tokenizer, first), *(text + cue for text in rest)]


def independent(
    task: str, row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], templates: Templates, tokenizer: Any | None
) -> list[str]:
    """The context, and each question as if it were the only one."""
    opening = fields_of(task, row, turns[0]) | ({"prefix": turns[0]["input"]} if task == "scbench_mf" else {})
    context = filled(templates["multi_request_context"][task], opening)
    asking = templates["follow_up_no_reference"][task] if task in WITH_QUESTIONS else "{input}"
    questions = [filled(asking, fields_of(task, row, turn)) for turn in turns]
    if tokenizer is None:
        return [context, *questions]
    head, tail = user_turn(tokenizer, SENTINEL).split(SENTINEL)
    return [head + context, *(question + tail for question in questions)]


def fields_of(task: str, row: Mapping[str, Any], turn: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a template may ask for."""
    fields = {"context": row["context"], "input": turn["input"], "question": turn["input"]}
    if task == "scbench_choice_eng":
        fields |= {f"OPTION_{letter}": option for letter, option in zip("ABCD", turn["options"], strict=True)}
    if task == "scbench_mf":
        fields["prefix"] = f"What is {asked_number(turn['input'])}?"
    return fields


def asked_number(text: str) -> str:
    """`the second largest number` of a question "The second largest number is"."""
    found = re.search(r"The .+ is", text)
    return (found.group() if found else text).lower().removesuffix(" is")


def reference_of(task: str, turn: Mapping[str, Any]) -> Any:
    """A turn's reference as the scorer wants it: of a choice the text and its letter, of an English question a list."""
    answer = turn["answer"]
    if task == "scbench_qa_eng":
        return answer if isinstance(answer, list) else [answer]
    if task != "scbench_choice_eng":
        return answer
    return [answer, "ABCD"[turn["options"].index(answer)]]


# --- chat --------------------------------------------------------------------------------------


def user_turn(tokenizer: Any, text: str) -> str:
    """A user's turn and the opening of the answer."""
    try:
        said = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template raises what it likes
        raise ConfigError(
            f"this model's chat template cannot be rendered ({first_line(error)}); choose another model"
        ) from error
    return answering(tokenizer, said)


def next_turn(tokenizer: Any, answer: str, question: str) -> str:
    """The end of an assistant's turn that is open, with this answer in it, and the user's next turn."""
    talk = [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    for before in ([{"role": "system", "content": ""}], [{"role": "user", "content": SENTINEL}]):
        try:
            texts = [
                answering(tokenizer, tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
                for turns in (before, [*before, *talk])
            ]
        except Exception:
            continue  # this template wants no system turn, or a user's turn first
        if texts[1].startswith(texts[0]):
            return texts[1].removeprefix(texts[0])
    return answer + user_turn(tokenizer, question)
