"""Where a model's answer ends, and the text that it is.

Not here: the text in front of it (`tasks/prompt.py`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvbench.tasks.base import Sample

# What ends a turn in the chat families; a model's generation config does not always list it.
TURN_ENDS = (
    "<|eot_id|>",  # Llama 3
    "<|eot|>",  # Llama 4
    "<|im_end|>",  # ChatML: Qwen, SmolLM, Yi
    "<end_of_turn>",  # Gemma
    "<turn|>",  # Gemma 4
    "<|end|>",  # Phi, gpt-oss
    "<|user|>",  # GLM writes the next turn's header instead
)
THOUGHT = "</think>"  # ends a thought, and is what stands in an answer for the marks of other families:
FINAL = "<|channel|>final<|message|>"  # gpt-oss: after it is the answer, and other channels are thoughts
THOUGHT_ENDS = (FINAL, "<channel|>")  # Gemma 4
CHANNEL_END = "<|end|>"  # of a thought in a channel, too


class Ending:
    """How answers of one model end."""

    def __init__(self, tokenizer: Any, generation_config: Any = None) -> None:
        """Read how answers end; a model's own ends are known from `generation_config`, which comes with weights."""
        self.tokenizer = tokenizer
        eos = getattr(generation_config, "eos_token_id", None)
        every = [*(eos if isinstance(eos, list | tuple) else [eos]), tokenizer.eos_token_id]
        self.eos = frozenset(i for i in every if i is not None)  # ends every answer
        self.known: dict[tuple[Any, ...], frozenset[int]] = {}  # samples that end alike share their ids

    @cached_property
    def newlines(self) -> frozenset[int]:
        """Every id whose text holds a newline, such as those of "\\n\\n" or ".\\n"; scans the vocabulary, in 0.2 s."""
        texts = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        return frozenset(i for i, text in enumerate(texts) if "\n" in text)

    def stop_ids(self, sample: Sample, by_chat: bool) -> frozenset[int]:
        """The ids that end an answer; `by_chat`: the prompt is a turn of the chat template, or holds one."""
        key = (by_chat, sample.thinks, tuple(sample.stop_texts), sample.stop_at_newline)
        if key not in self.known:
            ids: set[int | None] = {*self.eos}
            if by_chat:
                goes_on = CHANNEL_END if sample.thinks and has_channels(self.tokenizer) else None
                ids |= {known_id(self.tokenizer, token) for token in TURN_ENDS if token != goes_on}
            for text in sample.stop_texts:
                ids |= {*self.tokenizer.encode(text, add_special_tokens=False)[-1:]}
            if sample.stop_at_newline:
                ids |= self.newlines
            self.known[key] = frozenset(i for i in ids if i is not None)
        return self.known[key]

    def text(self, sample: Sample, ids: Sequence[int]) -> str:
        """The prediction: all that was answered, or what precedes its first newline.

        Pass the token that stopped the answer too: an id such as that of ".\\n" carries its last word. After a thought
        stands `</think>`, whichever marks the model's family has.
        """
        text = self.decoded(sample, ids) if ids else ""
        return text.partition("\n")[0] if sample.stop_at_newline else text

    def decoded(self, sample: Sample, ids: Sequence[int]) -> str:
        tokenizer = self.tokenizer
        for mark in THOUGHT_ENDS if sample.thinks else ():
            end = tuple(tokenizer.encode(mark, add_special_tokens=False))
            if known_id(tokenizer, mark[: mark.index(">") + 1]) != end[0]:  # no mark to this tokenizer, but letters
                continue
            places = [i for i in range(len(ids) - len(end) + 1) if tuple(ids[i : i + len(end)]) == end]
            if places:
                parts = ids[: places[-1]], ids[places[-1] + len(end) :]
                thought, answer = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
                return f"{thought}{THOUGHT}{answer}"
        return tokenizer.decode(ids, skip_special_tokens=True)


def has_channels(tokenizer: Any) -> bool:
    """Whether a model says in which channel it speaks, as gpt-oss does."""
    return None not in (known_id(tokenizer, "<|channel|>"), known_id(tokenizer, "<|message|>"))


def known_id(tokenizer: Any, token: str) -> int | None:
    """The id of a special token, None where the vocabulary lacks it."""
    i = tokenizer.convert_tokens_to_ids(token)
    is_known = i is not None and tokenizer.convert_ids_to_tokens(i) == token
    return i if is_known else None
