"""Prompt plumbing: one BOS, clean splits, the halves that truncation keeps, and where to stop."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.tasks import prompt
from kvbench.tasks.base import Sample
from kvbench.tasks.ending import Ending
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, LLAMA_TEMPLATE, NO_SYSTEM, tiny_tokenizer

SAMPLE = Sample(
    id="0",
    context="Some text. It was the age of wisdom.",
    question="\n\nWhat is the answer? ",
    answer_prefix="The answer is",
)
TEXT = SAMPLE.context + SAMPLE.question


def encode(tokenizer, sample=SAMPLE, chat="auto", system_prompt="", scope="full_prompt"):
    return prompt.encode(tokenizer, sample, chat=chat, system_prompt=system_prompt, scope=scope)


def edit(sample: Sample, **changes) -> Sample:
    return Sample(**{**vars(sample), **changes})


@pytest.mark.parametrize("scope", prompt.SCOPES)
@pytest.mark.parametrize("chat", prompt.CHATS)
def test_a_llama_prompt_has_exactly_one_bos(chat: str, scope: str) -> None:
    tokenizer = tiny_tokenizer(LLAMA_TEMPLATE, adds_bos=True)
    ids = encode(tokenizer, chat=chat, scope=scope)
    all_ids = ids.context_ids + ids.question_ids
    assert all_ids[0] == tokenizer.bos_token_id
    assert all_ids.count(tokenizer.bos_token_id) == 1


def test_no_bos_is_invented_for_a_tokenizer_without_the_habit() -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    assert tokenizer.bos_token_id not in encode(tokenizer).context_ids
    assert tokenizer.bos_token_id not in encode(tokenizer, chat="none").context_ids


def test_a_text_that_begins_with_the_bos_gets_no_second_one() -> None:
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    ids = encode(tokenizer, edit(SAMPLE, context="<s> A story book.")).context_ids
    assert ids.count(tokenizer.bos_token_id) == 1


def test_the_chat_prompt_is_the_template_around_the_words_and_then_the_prefix() -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    text = tokenizer.decode(encode(tokenizer, system_prompt="Be brief.").context_ids)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\nThe answer is"
    )


@pytest.mark.parametrize("template", [LLAMA_TEMPLATE, CHATML_TEMPLATE, None])
def test_the_split_parts_together_are_the_whole_prompt(template: str | None) -> None:
    tokenizer = tiny_tokenizer(template, adds_bos=template is not CHATML_TEMPLATE)
    split = encode(tokenizer, scope="context_only")
    whole = encode(tokenizer, scope="full_prompt")
    parts = tokenizer.decode(split.context_ids) + tokenizer.decode(split.question_ids)
    assert parts == tokenizer.decode(whole.context_ids)
    assert whole.question_ids == ()
    assert tokenizer.decode(split.context_ids).endswith(SAMPLE.context)
    assert tokenizer.decode(split.question_ids).endswith(SAMPLE.answer_prefix)


@pytest.mark.parametrize("template", [LLAMA_TEMPLATE, CHATML_TEMPLATE, None])
@pytest.mark.parametrize("scope", prompt.SCOPES)
def test_a_prompt_says_which_of_its_tokens_are_the_templates(template: str | None, scope: str) -> None:
    tokenizer = tiny_tokenizer(template, adds_bos=template is not CHATML_TEMPLATE)
    ids = encode(tokenizer, scope=scope)
    frame, context = ids.frame, ids.context_ids
    before, behind = context[: frame.n_prefix], context[len(context) - frame.n_suffix :]
    words = tokenizer.decode(context[frame.n_prefix : len(context) - frame.n_suffix])
    heads = {LLAMA_TEMPLATE: "<s><|start|>user\n\n", CHATML_TEMPLATE: "<|im_start|>user\n", None: "<s>"}
    tails = {LLAMA_TEMPLATE: "<|eot_id|><|start|>assistant\n\n",
             CHATML_TEMPLATE: "<|im_end|>\n<|im_start|>assistant\n", None: ""}  # fmt: skip
    seam = heads[template].removeprefix(tokenizer.decode(before))
    assert seam.strip() == "", "blanks that the words before them share a token with"
    assert tokenizer.decode(frame.postfix_ids) == tails[template]
    if scope == "full_prompt":
        assert tokenizer.decode(behind) == tails[template] + SAMPLE.answer_prefix
        assert words == seam + SAMPLE.context + SAMPLE.question
        assert frame.n_question is not None
        asked = tokenizer.decode(context[len(context) - frame.n_question :])
        assert asked.endswith(SAMPLE.question.lstrip() + tokenizer.decode(behind))
        assert SAMPLE.context[-10:] not in asked
    else:
        assert frame.n_question == 0
        assert frame.n_suffix == 0 and words == seam + SAMPLE.context


def test_a_seam_within_a_token_ends_the_frame() -> None:
    assert [prompt.n_alike(*pair) for pair in (((1, 2), (1, 2, 3)), ((1, 2), (1, 3)), ((), (1,)), ((4,), (1,)))] == [
        *(2, 1, 0, 0)
    ]


def test_blanks_at_the_end_of_a_question_survive_a_template_that_trims() -> None:
    tokenizer = tiny_tokenizer(LLAMA_TEMPLATE, adds_bos=True)
    assert "What is the answer? <|eot_id|>" in tokenizer.decode(encode(tokenizer).context_ids)


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, None])
def test_brackets_by_hand_stand_around_the_words_without_blanks(template: str | None) -> None:
    tokenizer = tiny_tokenizer(template, adds_bos=True)
    assert prompt.uses_chat(tokenizer, SAMPLE, "inst")
    for scope in prompt.SCOPES:
        ids = encode(tokenizer, chat="inst", scope=scope)
        text = tokenizer.decode(ids.context_ids + ids.question_ids)
        assert text == f"<s>[INST]{TEXT}[/INST]The answer is"
    raw = edit(SAMPLE, use_chat=False)
    assert encode(tokenizer, raw, chat="inst") == encode(tokenizer, raw, chat="none")
    system = encode(tokenizer, edit(SAMPLE, system_prompt="Be brief."), chat="inst")
    assert tokenizer.decode(system.context_ids).startswith("<s>[INST]Be brief.\n\nSome text.")
    with pytest.raises(ConfigError, match=r"chat=inst has no system turn"):
        encode(tokenizer, chat="inst", system_prompt="Be brief.")


def test_a_sample_may_refuse_the_chat_wrapper() -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    raw = encode(tokenizer, edit(SAMPLE, use_chat=False))
    assert raw == encode(tokenizer, chat="none")
    assert tokenizer.decode(raw.context_ids) == TEXT + SAMPLE.answer_prefix


def test_a_template_without_system_turn_refuses_a_system_prompt() -> None:
    tokenizer = tiny_tokenizer(NO_SYSTEM + CHATML_TEMPLATE, adds_bos=False)
    encode(tokenizer)
    with pytest.raises(ConfigError, match=r"system_prompt='Be brief\."):
        encode(tokenizer, system_prompt="Be brief.")


@pytest.mark.parametrize(("key", "value"), [("chat", "atuo"), ("scope", "context")])
def test_a_misspelt_choice_is_refused(key: str, value: str) -> None:
    choice: dict[str, Any] = {key: value}
    with pytest.raises(ConfigError, match=value):
        encode(tiny_tokenizer(None, adds_bos=False), **choice)


def test_a_short_text_is_not_touched_by_truncation() -> None:
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    n = len(tokenizer.encode(TEXT))
    assert prompt.middle_truncate(tokenizer, TEXT, n) == (TEXT, n, n)


@pytest.mark.parametrize("limit", [10, 11])
def test_truncation_keeps_exactly_the_two_halves(limit: int) -> None:
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    ids = tokenizer.encode(TEXT)
    text, n_before, n_after = prompt.middle_truncate(tokenizer, TEXT, limit)
    head = tokenizer.decode(ids[1:5])  # five ids with the BOS, which is no part of the text
    assert text == head + tokenizer.decode(ids[-5:])
    assert n_before == len(ids)
    assert n_after == len(tokenizer.encode(text))


def test_stop_ids_join_the_models_list_the_tokenizers_eos_and_the_end_of_turn() -> None:
    tokenizer = tiny_tokenizer(LLAMA_TEMPLATE, adds_bos=True)
    config = SimpleNamespace(eos_token_id=[7, 8])
    eos = tokenizer.eos_token_id
    turn_ends = {tokenizer.convert_tokens_to_ids(t) for t in ("<|eot_id|>", "<|im_end|>")}
    assert Ending(tokenizer, config).stop_ids(SAMPLE, False) == {7, 8, eos}
    assert Ending(tokenizer, config).stop_ids(SAMPLE, True) == {7, 8, eos} | turn_ends


CHANNEL_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def channel_tokenizer() -> Any:
    """One with channels, as gpt-oss has them."""
    tokenizer = tiny_tokenizer(CHANNEL_TEMPLATE, adds_bos=False)
    marks = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


def test_a_model_with_channels_answers_at_once_where_it_is_not_to_think() -> None:
    tokenizer, end = channel_tokenizer(), "<|end|>"
    plain, thinking = (encode(tokenizer, edit(SAMPLE, thinks=thinks, answer_prefix="")) for thinks in (False, True))
    assert tokenizer.decode(plain.context_ids).endswith("<|start|>assistant<|channel|>final<|message|>")
    assert tokenizer.decode(thinking.context_ids).endswith("<|start|>assistant")
    config = SimpleNamespace(eos_token_id=tokenizer.convert_tokens_to_ids("<|return|>"))
    stops = [Ending(tokenizer, config).stop_ids(edit(SAMPLE, thinks=thinks), True) for thinks in (False, True)]
    assert [tokenizer.convert_tokens_to_ids(end) in each for each in stops] == [True, False]


def test_behind_the_thought_of_a_model_with_channels_stands_its_answer() -> None:
    tokenizer, sample = channel_tokenizer(), edit(SAMPLE, thinks=True)
    thought = "<|channel|>analysis<|message|>It was the best.<|end|><|start|>assistant"
    ids = tokenizer.encode(f"{thought}<|channel|>final<|message|>The answer is 12345.<|return|>")
    said = Ending(tokenizer, None).text(sample, ids)
    assert said.rpartition("</think>")[2] == "The answer is 12345."
    assert "</think>" not in Ending(tokenizer, None).text(sample, tokenizer.encode(thought)), "it never answered"
    letters = tiny_tokenizer(None, adds_bos=False)  # to which the marks are letters
    ids = letters.encode("a<|channel|>final<|message|>b")
    assert Ending(letters, None).text(sample, ids) == "a<|channel|>final<|message|>b"


@pytest.mark.parametrize("eos", [None, 7])
def test_a_generation_config_may_have_one_eos_or_none(eos: int | None) -> None:
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    config = SimpleNamespace(eos_token_id=eos)
    expected = {tokenizer.eos_token_id} | ({eos} if eos else set())
    assert Ending(tokenizer, config).stop_ids(SAMPLE, False) == expected


def test_every_id_with_a_newline_in_it_ends_a_one_line_answer() -> None:
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    tokenizer.add_tokens([".\n"])
    sample = edit(SAMPLE, stop_at_newline=True)
    stops = Ending(tokenizer, SimpleNamespace(eos_token_id=None)).stop_ids(sample, False)
    texts = {tokenizer.decode([i]) for i in stops}
    assert {"\n", "\n\n", ".\n"} <= texts
    assert all("\n" in text for text in texts - {tokenizer.eos_token})


def test_a_one_line_answer_is_cut_at_its_newline_and_others_are_not() -> None:
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    ending, ids = Ending(tokenizer, None), tokenizer.encode(" 12345.\nThe", add_special_tokens=False)
    assert ending.text(edit(SAMPLE, stop_at_newline=True), ids) == " 12345."
    assert ending.text(SAMPLE, ids) == " 12345.\nThe"


def test_a_template_that_prints_the_date_prints_the_same_one_each_day() -> None:
    tokenizer = tiny_tokenizer(
        "{{ strftime_now('%Y-%m-%d') }} {{ date_string }}{{ messages[-1].content }}", adds_bos=False
    )
    assert prompt.render(tokenizer, [{"role": "user", "content": "?"}], True) == "2024-07-26 26 Jul 2024?"
