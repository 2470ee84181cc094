"""From a `Sample` to token ids: truncation, chat template, the split of a prompt.

Everything here is a pure function of a tokenizer. A prompt is always put together from the same strings, whatever the
scope: the template's head, the context, the question, the template's tail, the answer prefix. `full_prompt` tokenises
them as one string, `context_only` as two.

Not here: what a task writes into these parts, and how long a prompt may be (each task says so), where an answer ends
(`tasks/ending.py`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import chain
from typing import Any

from kvbench.engine.budget import NO_FRAME, Frame
from kvbench.engine.errors import ConfigError, first_line, is_panic, unknown_name
from kvbench.tasks.base import Sample
from kvbench.tasks.ending import FINAL, has_channels

TODAY = date(2024, 7, 26)  # Llama 3's own default: a prompt is the same each day, although some templates print it
PRINTS_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
CHATS = ("auto", "none", "inst")
# Llama 2's and Mistral's turn, as papers write it: by hand and without blanks.
BRACKETS = ("[INST]", "[/INST]")
SCOPES = ("full_prompt", "context_only")
LONG = 8_000_000  # characters; twice the longest prompt of InfiniteBench
PIECE = 1_000_000  # characters
CHARACTERS = 64  # kept from each end for a token of the limit; prose has 5, the longest tokens of blanks 128
SENTINEL = "<<the user's words>>"


@dataclass(frozen=True)
class Prompt:
    context_ids: tuple[int, ...]  # prefilled and compressed
    question_ids: tuple[int, ...]  # run through the compressed cache; empty under `full_prompt`
    frame: Frame = NO_FRAME  # of what is prefilled

    def __len__(self) -> int:
        return len(self.context_ids) + len(self.question_ids)

    def every_id(self, sample: Sample) -> Iterator[int]:
        """All tokens that the model reads for a sample."""
        return chain(self.context_ids, self.question_ids, sample.forced or ())

    def n_behind(self, sample: Sample) -> int:
        """Tokens that may follow the context at once."""
        return len(self.question_ids) + sample.max_new_tokens


def middle_truncate(tokenizer: Any, text: str, limit: int, *, odd_to_end: bool = False) -> tuple[str, int, int]:
    """Cut the middle out of `text`; returns it with its token counts before and after.

    Applied to the filled template, before the chat wrapper. The string that comes back may be a few
    tokens off `limit` when it is tokenised again, as in the reference implementations; the second
    count is that real one. The middle of a text that is far longer than any benchmark's is cut before it is tokenised
    as a whole, which takes 130 bytes a token; its tokens are counted piece by piece, but for those across a seam.
    """
    far = CHARACTERS * limit
    kept, middle = text, ""
    if len(text) > max(LONG, 4 * far):
        kept, middle = text[:far] + text[-far:], text[far:-far]
    ids = tokenizer.encode(kept)
    if middle and len(ids) <= limit:  # longer tokens than any of prose
        middle, ids = "", tokenizer.encode(text)
    if len(ids) <= limit:
        return text, len(ids), len(ids)  # untouched: a round trip could change it
    pieces = (middle[at : at + PIECE] for at in range(0, len(middle), PIECE))
    n_middle = sum(len(tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces)
    half = limit // 2  # an odd limit loses one token, or the end keeps it
    n_tail = limit - half if odd_to_end else half
    head = tokenizer.decode(ids[:half], skip_special_tokens=True)
    tail = tokenizer.decode(ids[len(ids) - n_tail :], skip_special_tokens=True)
    return head + tail, len(ids) + n_middle, len(tokenizer.encode(head + tail))


def uses_chat(tokenizer: Any, sample: Sample, chat: str) -> bool:
    """Whether this prompt is made a user's turn: by the tokenizer's chat template, or by hand."""
    if chat not in CHATS:
        raise unknown_name("chat", chat, CHATS)
    has_wrapper = chat == "inst" or (chat == "auto" and bool(tokenizer.chat_template))
    return has_wrapper and sample.use_chat and not sample.is_rendered


def sample_wrapper(tokenizer: Any, sample: Sample, system_prompt: str, chat: str) -> tuple[str, str]:
    """The text around a sample, as in `chat_wrapper`; without a system turn the user's turn has the task's line."""
    if chat == "inst":
        if system_prompt:
            raise ConfigError(
                f"system_prompt={system_prompt!r} is given, but model.chat=inst has no system turn; leave it empty"
            )
        own = f"{sample.system_prompt}\n\n" if sample.system_prompt else ""
        return BRACKETS[0] + own, BRACKETS[1]
    if system_prompt or not sample.system_prompt:
        return chat_wrapper(tokenizer, system_prompt, sample.thinks)
    try:
        return chat_wrapper(tokenizer, sample.system_prompt, sample.thinks)
    except ConfigError:
        head, tail = chat_wrapper(tokenizer, "", sample.thinks)
        return f"{head}{sample.system_prompt}\n\n", tail


def chat_wrapper(tokenizer: Any, system_prompt: str, thinks: bool = False) -> tuple[str, str]:
    """What the chat template puts before and after the words of a single user turn."""
    turns = [{"role": "user", "content": SENTINEL}]
    if system_prompt:
        turns.insert(0, {"role": "system", "content": system_prompt})
    try:
        text = render(tokenizer, turns, thinks)
    except ConfigError as error:
        if not system_prompt:
            raise
        raise ConfigError(
            f"system_prompt={system_prompt!r} is given, but this model's chat template takes no "
            f"system turn ({first_line(error.__cause__ or error)}); leave it empty"
        ) from error
    return around(text, SENTINEL)


def render(tokenizer: Any, turns: Sequence[Mapping[str, str]], thinks: bool) -> str:
    """A conversation by the chat template, which may raise what it likes, up to where the model is to answer."""
    try:
        text = tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=True,
            date_string=f"{TODAY:%d %b %Y}",
            **dated(tokenizer),
            enable_thinking=thinks,  # most answers are 30 to 500 tokens long; Qwen 3 would think longer
        )
    except Exception as error:
        raise ConfigError(
            f"this model's chat template cannot be rendered ({first_line(error)}); use model.chat=none or another model"
        ) from error
    return text if thinks else answering(tokenizer, text)


def dated(tokenizer: Any) -> dict[str, str]:
    """A chat template that prints the day of the run, with `TODAY` in its place; nothing where there is none."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or "strftime_now(" not in template:
        return {}
    return {"chat_template": PRINTS_TODAY.sub(lambda found: repr(f"{TODAY:{found[2]}}"), template)}


def answering(tokenizer: Any, text: str) -> str:
    """A conversation up to where the model is to answer; one with channels is led past its thoughts."""
    return text + FINAL if has_channels(tokenizer) and not text.endswith(FINAL) else text


def rendered(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> str:
    """A whole conversation by the chat template, in which each turn must stand word for word."""
    if not tokenizer.chat_template:
        raise ConfigError("this model has no chat template; ask with task.template=plain, or use another model")
    text = render(tokenizer, turns, False)
    at = 0
    for turn in turns:
        words = turn["content"].strip()
        found = text.find(words, at)
        if found < 0:
            raise ConfigError(
                f"this model's chat template changes or leaves out a turn ({words[:40]!r}); ask with "
                "task.template=plain, or use another model"
            )
        at = found + len(words)
    return text


def around(text: str, words: str) -> tuple[str, str]:
    """The text before and after somebody's words in a rendered conversation."""
    head, found, tail = text.partition(words)
    if not found or words in tail:
        raise ConfigError(
            "this model's chat template changes a user's words, leaves them out or repeats them; use model.chat=none "
            "or another model"
        )
    return head, tail


def encode(tokenizer: Any, sample: Sample, *, chat: str, system_prompt: str, scope: str) -> Prompt:
    """The ids of one sample, with exactly one BOS where the tokenizer has the habit of one."""
    if scope not in SCOPES:
        raise unknown_name("compression_scope", scope, SCOPES)
    # Without a chat template the task's own system line opens the prompt.
    head, tail = f"{sample.system_prompt}\n\n" if sample.system_prompt else "", ""
    if uses_chat(tokenizer, sample, chat):
        head, tail = sample_wrapper(tokenizer, sample, system_prompt, chat)
    context = head + sample.context
    question = sample.question + tail + sample.answer_prefix
    first, last, postfix = first_ids(tokenizer, head), tail + sample.answer_prefix, token_ids(tokenizer, tail)
    if scope == "full_prompt":
        ids = first_ids(tokenizer, context + question)
        n_prefix, n_suffix = n_alike(first, ids), n_alike(token_ids(tokenizer, last)[::-1], ids[::-1])
        n_question = len(ids) - n_alike(first_ids(tokenizer, context), ids)
        return Prompt(ids, (), Frame(n_prefix, min(n_suffix, len(ids) - n_prefix), postfix, n_question))
    ids = first_ids(tokenizer, context)
    return Prompt(ids, token_ids(tokenizer, question), Frame(n_alike(first, ids), 0, postfix, 0))


def n_alike(some: Sequence[object], others: Sequence[object]) -> int:
    """Number of tokens with which both begin: at a seam, tokens of two texts together are others than those of each."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(some), len(others)))


def token_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a text that follows another."""
    return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()


def first_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a text that opens a prompt: no second BOS where the text already begins with one."""
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return tuple(tokenizer.encode(text, add_special_tokens=not has_bos))


@contextmanager
def tokenizing(model: str) -> Iterator[None]:
    """Say whose tokenizer it is that gives up on a text, as one written in Rust does with no `Exception` of its own."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):
            raise
        raise ConfigError(
            f"the tokenizer of the model {model} gives up on a text of this task ({first_line(error)}); copy or "
            "download its files again, or give another one"
        ) from None


def check_ids(
    ids: Iterable[int], n_vocabulary: int | None, sample: Sample, image_ids: frozenset[int] = frozenset()
) -> None:
    """Raise `ConfigError` for tokens that the model has no embedding of, or that stand for what it is to see."""
    ids = tuple(ids)
    if shown := image_ids.intersection(ids):
        raise ConfigError(
            f"sample {sample.id!r} has the token {min(shown)}, by which this model is shown an image, a video or a "
            "sound, and KVBench asks with text alone; use a task without it"
        )
    if n_vocabulary is not None and (most := max(ids, default=0)) >= n_vocabulary:
        raise ConfigError(
            f"sample {sample.id!r} has the token {most}, and the model's embedding ends with {n_vocabulary - 1}: "
            "tokenizer and weights are not of one model; copy or download its files again"
        )
