"""RULER's thirteen tasks, generated at any size.

A size is a number of units: noise lines, words of an essay, distracting needles, words of a list, coded words,
documents. How many units fill a length is tried out (`tasks/lazy.py`). Prompts come from the data folder's
templates.json, or are our own.

Differs     from the authors' scripts, whose sources are downloads: keys and list words are drawn from our own
            adjectives and nouns (two nouns in one word where a list needs more than there are), and the documents of
            qa_1 and qa_2 are invented records of people and companies instead of SQuAD and HotpotQA: qa_1 asks
            for a fact of one of them, qa_2 for one that takes two. Every row has a generator of its own, so that a row
            does not depend on the others.
"""

import math
import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

from kvbench.tasks.needle.task import CITIES, FIRST_NAMES, LAST_NAMES

ADJECTIVES = (
    "able active amber ancient angry basic bitter blank bold brave bright brisk broad bronze busy calm careful "
    "cheap chief clean clear clever close cloudy coarse cold cool crisp curious damp dark dear deep dense distant "
    "dizzy dry dull eager early easy elegant empty equal exact faint fair famous fast fierce final fine firm flat "
    "fond foreign free fresh full funny gentle glad golden grand grave gray great green happy harsh heavy hidden "
    "hollow honest hot huge humble hungry icy idle jolly keen kind large late lazy light little lonely long loose "
    "loud lovely loyal lucky mellow merry mild modern modest narrow neat new noble noisy odd old open orange pale "
    "plain pleasant polite poor proud public pure purple quick quiet rapid rare raw ready red rich ripe rough round "
    "royal rural rusty sad safe salty sharp shiny short shy silent silver simple sleepy slim slow small smart "
    "smooth soft solid sour spare stable steady steep stiff still strange strict strong sudden sunny sweet swift "
    "tall tame tender thick thin tidy tight tiny tired true urban useful usual vague vast violet vivid warm weak "
    "weary wet white wide wild wise wooden yellow young"
).split()
NOUNS = (
    "acorn actor anchor animal answer apple apron arrow artist attic autumn badge baker balcony ball banner barn "
    "barrel basket beach bean bear beetle bell bench berry bird blanket blossom board boat bottle bowl box branch "
    "bread brick bridge broom brush bucket butter button cabin cactus cake camel camera candle canyon carpet carrot "
    "castle cellar chain chair chalk cherry chest circle clay cliff clock cloud coast coat coin collar comet copper "
    "coral corner cotton cradle crane crow crown cup curtain daisy desert desk dish doctor donkey door dragon "
    "drawer dream drum duck eagle elbow engine envelope falcon farmer feather fence fern ferry field finger flame "
    "flower flute forest fork fountain fox frog garden garlic gate giant ginger glacier glass glove goat grain "
    "grape guitar hammer harbor harp hat hawk hazel helmet hill honey hook horse hotel house insect island ivory "
    "jacket jar jewel judge jungle kettle key kitchen kite knee ladder lake lamp lantern lawn leaf lemon letter "
    "library lily lion lizard lobster lock magnet map maple marble market mask meadow melon metal mill mirror "
    "monkey moon moth mountain mouse museum needle nest net notebook nut oak ocean olive onion orchard oven owl "
    "oyster paddle painter palace paper parrot path peach pearl pebble pencil pepper piano picture pigeon pillow "
    "pilot pine planet plate plow plum pocket pond pony poplar potato prince pumpkin puzzle rabbit radish raft rain "
    "raven reed ribbon river road robin rocket roof root rope rose saddle sailor salad salmon salt sand scarf "
    "school sea seed shadow sheep shell ship shirt shoe shovel silk singer sister sleeve snail snow soap soldier "
    "spark sparrow spider spoon spring squirrel stable star stone storm stove straw stream street sugar summer swan "
    "table tailor teacher temple tent thread throne thunder ticket tiger tile timber tomato tooth tower town train "
    "tree trumpet tulip tunnel turtle uncle valley velvet village violin wagon wall walnut water wave whale wheat "
    "wheel whistle willow window winter wolf wood wool yard zebra"
).split()
SINGLE = tuple(dict.fromkeys([*ADJECTIVES, *NOUNS]))  # words that a list can hold
PAIRS = len(ADJECTIVES) * len(NOUNS)
FIELDS = "biology botany chemistry geology history law mathematics medicine music physics".split()
JOBS = "accountant architect baker builder chemist designer driver editor engineer gardener".split()
PLACES = "Brothers Factory Mill Works Workshop Trading".split()

OWN_TEMPLATES: Mapping[str, Any] = {  # the keys of templates.json
    "tasks": {
        "niah": {
            "template": "Some secret {type_needle_v} are kept somewhere in this text. You will be asked for the "
            "{type_needle_v} later.\n{context}\nWhat are all the secret {type_needle_v} of {query} in this text?",
            "answer_prefix": " The secret {type_needle_v} of {query} in this text are",
        },
        "variable_tracking": {
            "template": "Follow the variables that are set somewhere in this text.\n\n{context}\n"
            "Question: Which variables hold the value {query} in the end?",
            "answer_prefix": " Answer: The {num_v} variables that hold the value {query} are: ",
        },
        "common_words_extraction": {
            "template": "Some words of this numbered list come up far more often than the others.\n{context}\n"
            "Question: Which 10 words come up most often?",
            "answer_prefix": " Answer: The 10 words that come up most often are:",
        },
        "freq_words_extraction": {
            "template": "Count the made-up words of this text. {context}\n"
            "Question: Leaving the dots aside, which three words come up most often?",
            "answer_prefix": " Answer: The three words that come up most often are:",
        },
        "qa": {
            "template": "Read these documents. One question about them follows; reply with the answer alone.\n\n"
            "{context}\n\nReply with the answer alone.\n\nQuestion: {query}",
            "answer_prefix": " Answer:",
        },
    },
    "needle": "One of the secret {type_needle_v} of {key} is: {value}.",
    "noise": "The river runs slowly. The boats wait. The wind turns. Nothing else moves. So the day goes by.",
    "document": "Document {i}:\n{document}",
}


@dataclass(frozen=True)
class Material:
    """Texts and settings that rows are made of."""

    templates: Mapping[str, Any]
    essays: tuple[str, ...]  # the words of the essays
    length: int  # tokens that a row should have


@dataclass(frozen=True)
class Row:
    """One prompt in three parts and what counts as its answer."""

    context: str  # from the template's first character to the end of its context
    question: str
    answer_prefix: str
    outputs: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.context + self.question + self.answer_prefix


Make = Callable[[Material, random.Random, int], Row]


def fill(text: str, **fields: str) -> str:
    """Placeholders replaced by their fields in one pass: braces in a field stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), text)


def in_prompt(prompt: Mapping[str, str], context: str, outputs: Sequence[str], before: str = "", **fields: str) -> Row:
    """A context in its template, after a worked example."""
    head, placeholder, tail = prompt["template"].partition("{context}")
    assert placeholder, prompt
    return Row(
        context=before + fill(head, **fields) + context,
        question=fill(tail, **fields),
        answer_prefix=fill(prompt["answer_prefix"], **fields),
        outputs=tuple(outputs),
    )


# --- needles -----------------------------------------------------------------------------------


def words(rng: random.Random, count: int) -> list[str]:
    """Distinct `adjective-noun` pairs; with a second noun where there are not enough of them."""
    population = PAIRS if 2 * count <= PAIRS else PAIRS * len(NOUNS)

    def pair(i: int) -> str:
        third, i = divmod(i, PAIRS)
        adjective, noun = divmod(i, len(NOUNS))
        more = f"-{NOUNS[third]}" if population > PAIRS else ""
        return f"{ADJECTIVES[adjective]}-{NOUNS[noun]}{more}"

    return [pair(i) for i in rng.sample(range(population), count)]


def numbers(rng: random.Random, count: int) -> list[str]:
    return [str(number) for number in rng.sample(range(1_000_000, 10_000_000), count)]


def uuids(rng: random.Random, count: int) -> list[str]:
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


DRAW = {"words": words, "numbers": numbers, "uuids": uuids}
DEPTHS = tuple(100 * i / 39 for i in range(40))  # percent, of needles in essays


@dataclass(frozen=True)
class Niah:
    """One kind of needles in one kind of haystack."""

    haystack: str  # noise, essay or needle
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1  # per key
    n_queries: int = 1


def niah(spec: Niah, material: Material, rng: random.Random, n_units: int) -> Row:
    """Values are hidden under their keys; all values of some keys are asked for."""
    prompt = material.templates["tasks"]["niah"]
    n_keys = max(spec.n_keys, spec.n_queries)
    n_others = n_units if spec.haystack == "needle" else 0
    keys = DRAW[spec.keys](rng, n_keys + n_others)
    values = DRAW[spec.values](rng, n_keys * spec.n_values + n_others)
    kind = spec.values

    def needle(key: str, value: str) -> str:
        return fill(material.templates["needle"], type_needle_v=kind, key=key, value=value)

    own = {key: values[i * spec.n_values : (i + 1) * spec.n_values] for i, key in enumerate(keys[:n_keys])}
    needles = [needle(key, value) for key in own for value in own[key]]
    rng.shuffle(needles)
    if spec.haystack == "essay":
        context = in_essay(material.essays, n_units, needles, rng)
    else:
        lines = [material.templates["noise"]] * n_units
        if spec.haystack == "needle":
            others = zip(keys[n_keys:], values[n_keys * spec.n_values :], strict=True)
            lines = [needle(key, value) for key, value in others]
        context = "\n".join(among(lines, needles, rng))
    asked = rng.sample(list(own), spec.n_queries)
    outputs = [value for key in asked for value in own[key]]
    if len(outputs) == 1:
        prompt, kind = {name: singular(prompt[name]) for name in PARTS}, kind[:-1]
    return in_prompt(prompt, context, outputs, type_needle_v=kind, query=listed(asked))


PARTS = ("template", "answer_prefix")


def singular(text: str) -> str:
    """A template that speaks of several values, for one of them."""
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


def listed(names: Sequence[str]) -> str:
    """a; a, and b; a, b, and c."""
    return ", and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def in_essay(essays: Sequence[str], n_words: int, needles: Sequence[str], rng: random.Random) -> str:
    """The first words of the essays, over and over if they are short, with needles between sentences."""
    text = " ".join(islice(cycle(essays), n_words))
    sentences = re.split(r"(?<=[.!?]) ", text)
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    positions = [math.floor(len(sentences) * depth / 100) for depth in depths]
    return " ".join(inserted(sentences, positions, needles))


def among(lines: Sequence[str], others: Sequence[str], rng: random.Random) -> list[str]:
    """`lines` with `others` at random positions, in their order."""
    return inserted(lines, sorted(rng.choices(range(len(lines) + 1), k=len(others))), others)


def inserted(lines: Sequence[str], positions: Sequence[int], others: Sequence[str]) -> list[str]:
    """`lines` with each of `others` before the line of its position; positions ascend."""
    result, start = [], 0
    for position, other in zip(positions, others, strict=True):
        result += [*lines[start:position], other]
        start = position
    return result + list(lines[start:])


# --- the other tasks ---------------------------------------------------------------------------


def variable_tracking(material: Material, rng: random.Random, n_lines: int) -> Row:
    """A chain of assignments among noise lines, after a worked example with shorter names."""
    example = chain(material, rng, n_lines=min(n_lines, 8), n_letters=3)
    shown = f"{example.text}{' '.join(example.outputs)}\n\n"
    return chain(material, rng, n_lines, n_letters=5, before=shown)


HOPS = 4


def chain(material: Material, rng: random.Random, n_lines: int, n_letters: int, before: str = "") -> Row:
    """One value that is handed on from variable to variable."""
    names = letters(rng, string.ascii_uppercase, n_letters, HOPS + 1)
    value = str(rng.randrange(10_000, 100_000))
    steps = [f"VAR {names[0]} = {value}"]
    steps += [f"VAR {name} = VAR {earlier}" for earlier, name in pairwise(names)]
    context = "\n".join(among([material.templates["noise"]] * n_lines, steps, rng))
    prompt = material.templates["tasks"]["variable_tracking"]
    return in_prompt(prompt, context, names, before, query=value, num_v=str(len(names)))


def letters(rng: random.Random, alphabet: str, size: int, count: int) -> list[str]:
    """Distinct random words of so many letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault("".join(rng.choice(alphabet) for _ in range(size)))
    return list(found)


N_COMMON = 10


def common_words(material: Material, rng: random.Random, n_words: int) -> Row:
    """A shuffled list in which ten words stand more often, after a worked example."""
    is_long = material.length >= 4096
    n_shown = 40 if is_long else 20
    pool = list_words(rng, n_shown + n_words)
    example = word_list(material, rng, pool[:n_shown], (10, 3) if is_long else (3, 1))
    ranked = " ".join(f"{i}. {word}" for i, word in enumerate(example.outputs, start=1))
    shown = f"{example.text} {ranked}\n\n"
    return word_list(material, rng, pool[n_shown:], (30, 3) if is_long else (6, 1), shown)


def list_words(rng: random.Random, count: int) -> list[str]:
    """Distinct words: single ones, or all of two nouns where there are too few of those."""
    if count <= len(SINGLE):
        return rng.sample(SINGLE, count)
    n = len(NOUNS)
    return [f"{NOUNS[i // n]}{NOUNS[i % n]}" for i in rng.sample(range(n * n), count)]


def word_list(
    material: Material,
    rng: random.Random,
    chosen: Sequence[str],
    repeats: tuple[int, int],
    before: str = "",
) -> Row:
    """A numbered list of the words; `repeats` of the first ten and of the others."""
    common = chosen[:N_COMMON]
    entries = [*common] * repeats[0] + [*chosen[N_COMMON:]] * repeats[1]
    rng.shuffle(entries)
    context = " ".join(f"{i}. {word}" for i, word in enumerate(entries, start=1))
    prompt = material.templates["tasks"]["common_words_extraction"]
    return in_prompt(prompt, context, common, before)


EXPONENT = 2.0
ZETA = math.pi**2 / 6  # of the exponent
DOTS = "." * 6


def frequent_words(material: Material, rng: random.Random, n_words: int) -> Row:
    """Made-up words by Zipf's law; the first rank is dots, the next three are asked for."""
    n_kinds = max(5, material.length // 50)
    kinds = [DOTS, *letters(rng, string.ascii_lowercase, len(DOTS), n_kinds - 1)]
    entries = [
        word for rank, word in enumerate(kinds, start=1) for _ in range(math.floor(n_words * rank**-EXPONENT / ZETA))
    ]
    rng.shuffle(entries)
    prompt = material.templates["tasks"]["freq_words_extraction"]
    return in_prompt(prompt, " ".join(entries), kinds[1:4])


# --- questions on documents --------------------------------------------------------------------


def people(rng: random.Random, count: int) -> list[str]:
    """Distinct names."""
    initials = string.ascii_uppercase
    sizes = len(FIRST_NAMES), len(LAST_NAMES)
    return [
        f"{FIRST_NAMES[i // sizes[1] % sizes[0]]} {initials[i // (sizes[0] * sizes[1])]}. {LAST_NAMES[i % sizes[1]]}"
        for i in rng.sample(range(sizes[0] * sizes[1] * len(initials)), count)
    ]


def companies(rng: random.Random, count: int) -> list[str]:
    """Distinct names."""
    sizes = len(LAST_NAMES), len(NOUNS)
    return [
        f"{LAST_NAMES[i // sizes[1]]} {NOUNS[i % sizes[1]].capitalize()} {rng.choice(PLACES)}"
        for i in rng.sample(range(sizes[0] * sizes[1]), count)
    ]


def about_person(rng: random.Random, name: str, company: str) -> tuple[str, str]:
    """What a document says about a person, and the city of birth."""
    city, first = rng.choice(CITIES), name.split()[0]
    return (
        f"{name} was born in {city} in {rng.randrange(1930, 2000)}. {first} studied {rng.choice(FIELDS)} for "
        f"{rng.randrange(3, 8)} years. Today {first} is employed by {company}. The first job was one as "
        f"{rng.choice(JOBS)}."
    ), city


def about_company(rng: random.Random, name: str) -> tuple[str, str]:
    """What a document says about a company, and the city of its head office."""
    city = rng.choice(CITIES)
    return (
        f"{name} was founded in {rng.randrange(1850, 1990)} and has {rng.randrange(20, 5000)} employees. Its head "
        f"office is in {city}. It is known for the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} on its sign."
    ), city


def documents(n_hops: int, material: Material, rng: random.Random, n_documents: int) -> Row:
    """One question on shuffled documents: a person's city of birth, or that of the employer's head office."""
    n_people = n_documents if n_hops == 1 else n_documents // 2
    names, employers = people(rng, n_people), companies(rng, n_people)
    told = [about_person(rng, name, company) for name, company in zip(names, employers, strict=True)]
    question, answer = f"In which city was {names[0]} born?", told[0][1]
    if n_hops == 2:
        told += [about_company(rng, company) for company in employers]
        question = f"In which city is the head office of the company that employs {names[0]}?"
        answer = told[n_people][1]
    texts = [text for text, _ in told]
    rng.shuffle(texts)
    numbered = (fill(material.templates["document"], i=str(i), document=text) for i, text in enumerate(texts, start=1))
    prompt = material.templates["tasks"]["qa"]
    return in_prompt(prompt, "\n\n".join(numbered), [answer], query=question)


# --- all of them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How a task is made, asked and split."""

    make: Make
    new_tokens: int
    fewest: int  # units that a row needs
    question: str  # how the question begins in a file whose rows are one text
    cue: str  # how the answer prefix begins after it
    needs_essays: bool = False


def niah_kind(spec: Niah) -> Kind:
    is_essay = spec.haystack == "essay"
    return Kind(partial(niah, spec), 128, 100 if is_essay else 1, "\nWhat ", " The ", is_essay)


KINDS: dict[str, Kind] = {
    "niah_single_1": niah_kind(Niah("noise")),
    "niah_single_2": niah_kind(Niah("essay")),
    "niah_single_3": niah_kind(Niah("essay", values="uuids")),
    "niah_multikey_1": niah_kind(Niah("essay", n_keys=4)),
    "niah_multikey_2": niah_kind(Niah("needle")),
    "niah_multikey_3": niah_kind(Niah("needle", keys="uuids", values="uuids")),
    "niah_multivalue": niah_kind(Niah("essay", n_values=4)),
    "niah_multiquery": niah_kind(Niah("essay", n_queries=4)),
    "vt": Kind(variable_tracking, 30, HOPS + 1, "\nQuestion: ", " Answer:"),
    "cwe": Kind(common_words, 120, 2 * N_COMMON, "\nQuestion: ", " Answer:"),
    # From 73 words on the fourth rank stands more often than the fifth.
    "fwe": Kind(frequent_words, 50, 73, "\nQuestion: ", " Answer:"),
    "qa_1": Kind(partial(documents, 1), 32, 2, "\n\nAnswer the question ", " Answer:"),
    "qa_2": Kind(partial(documents, 2), 32, 4, "\n\nAnswer the question ", " Answer:"),
}
