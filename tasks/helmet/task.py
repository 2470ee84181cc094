"""HELMET's unjudged parts: many-shot labels, answers from passages, a ranking of passages, values of a JSON object.

Names       HELMET; labels, values and facts that are drawn
Asks        a label by many examples, an answer or a ranking from passages, a value of a key
Lengths     8k to 128k published, any with source=embedded
Answers     20, 200, 100 or 20 tokens
Licence     MIT

Parts       `icl` (drawn), `trec_coarse`, `trec_fine`, `banking77`, `clinic150`, `nlu`; `nq`, `triviaqa`, `popqa`,
            `hotpotqa`; `msmarco`; `json_kv`. Summaries, long answers and citations want a judge or a model and are not
            asked.
Sources     helmet/data/PART.jsonl of the data folder: labels as `text`, `label`; passages as `question`, `answers`,
            `ctxs`; rankings as `query`, `ctxs` with `id`, `text`, `label`; values as `context`, `question`, `answer`.
            Upstream's archive has several files of a part, by length: the one that is meant is put there under its
            part's name. With `source=embedded` icl (classes of invented instances) and json_kv are drawn.
Prompts     wording of our own but for the frame of `icl`; demonstrations of passages and values are other rows of the
            file, without their passages. No chat template by default, as published.
Score       `scores.py`; a finished run's helmet.csv has the mean of each part, in percent.

Not here: scores (`scores.py`), and RULER, which has a task of its own.
"""

import hashlib
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from kvbench.engine.declared import Count, Is, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import Lengths, OfDatasets, OnBadRow, check_lengths
from kvbench.tasks.helmet import scores
from kvbench.tasks.lazy import Drawn
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import BadRow, Something, Text

UPSTREAM = "GitHub princeton-nlp/HELMET (its data archive, and the hub for labels; one file a part)"
LABELS = ("trec_coarse", "trec_fine", "banking77", "clinic150", "nlu")
PASSAGES = ("nq", "triviaqa", "popqa", "hotpotqa")
KINDS = {
    **dict.fromkeys(("icl", *LABELS), "icl"), **dict.fromkeys(PASSAGES, "qa"), "msmarco": "rerank",
    "json_kv": "json_kv",
}  # fmt: skip
PARTS = tuple(KINDS)
DRAWN = ("icl", "json_kv")
LISTS = {"drawn": DRAWN, "labels": LABELS, "passages": PASSAGES, "all": PARTS[1:]}
NEW_TOKENS = {"icl": 20, "qa": 20, "rerank": 200, "json_kv": 100}
PREFIX = {"icl": "label:", "qa": "Answer:", "rerank": "Ranking:", "json_kv": "Corresponding value:"}
Answers = Annotated[list[Text | list[Text]], Something(), Is("a list of texts")]
FIELDS: dict[str, Fields] = {
    "icl": {"text": Text, "label": int | Text}, "qa": {"question": Text, "answers": Answers, "ctxs": list[Any]},
    "rerank": {"query": Text, "ctxs": list[Any]}, "json_kv": {"context": Text, "question": Text, "answer": Text},
}  # fmt: skip
ASKS = {
    "icl": (
        "Use the provided mapping from the text to label to assign a label to the text. Only output "
        '"label: {label}" and nothing else. \n\n'
    ),
    "qa": "Answer the question in a few words from the documents.\n\n",
    "rerank": (
        "Rank the documents by how well they answer the query, the best one first, as 'Ranking: ID3 > ID1 > ID2'.\n\n"
    ),
    "json_kv": "Find the value of the key in the JSON object.\n\n",
}
SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "ki", "lo", "mu", "ne", "pa", "ri", "so", "tu", "va", "zo")
COMMON = (
    "about again around because before between could during every first found great little never often other people "
    "place should small still there these thing think under water where which while world would write"
).split()
N_MARKERS = 3  # words of a class that no other one has


@dataclass(frozen=True)
class Params(OfDatasets):
    lists, drawn = LISTS, DRAWN
    source: Literal["auto", "local", "embedded"]  # auto: the files; embedded: drawn instances and values
    datasets: Annotated[str | tuple[str, ...], Some(PARTS, tuple(LISTS))]
    lengths: Lengths  # of prompt and answer, of drawn ones and of label sets
    classes: Annotated[int, Ge(2), Le(200)]  # of drawn instances
    shots: Annotated[int, Ge(0), Le(20)]  # demonstrations before a question on passages or values
    use_chat: bool
    rows: Count | None  # of each part; None: all, or 20
    max_new_tokens: Count | None
    on_bad_row: OnBadRow

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source != "embedded" and "icl" in self.names:
            raise ConfigError("task.datasets=icl is drawn; ask it with task.source=embedded, or one of the label sets")

    def new_tokens(self, name: str) -> int:
        return self.max_new_tokens or NEW_TOKENS[KINDS[name]]


@dataclass(frozen=True)
class Asked:
    """A prompt in its parts, and what is right."""

    context: str
    question: str
    references: tuple[str, ...]
    fields: Mapping[str, Any]
    evidence: tuple[str, ...] = ()


class Helmet(RowsTask):
    """The rows of each part, in turns."""

    params: Params
    name = "helmet"
    version = 1
    Params = Params
    data = Data(
        tuple(f"helmet/data/{name}.jsonl" for name in PARTS[1:]), "without them drawn labels and values "
        "(task.source=embedded)", by_hand=UPSTREAM,
    )  # fmt: skip
    place, upstream, instead = "helmet/data/{name}.jsonl", UPSTREAM, "drawn labels and values"
    means: ClassVar[Mapping[str, str]] = {"dataset": "dataset"}

    def title(self) -> str:
        return f"{'+'.join(map(str, self.params.lengths))}-tokens/{self.params.listed}"

    def prepare(self, shape: ModelShape) -> None:
        check_lengths(self.params.lengths, shape)
        drawn = "drawn labels and values, not comparable with HELMET"
        files = "prompts: own, but for icl's frame; demonstrations without passages"
        self.notes += [
            f"chat template: {'yes' if self.params.use_chat else 'no, as published'}",
            drawn if self.is_embedded else files,
        ]

    def fields_of(self, name: str) -> Fields:
        return FIELDS[KINDS[name]]

    def check_row(self, name: str, row: Row) -> None:
        kind = KINDS[name]
        if kind in ("qa", "rerank"):
            wanted = ("text",) if kind == "qa" else ("text", "id", "label")
            for one in row["ctxs"]:
                if (
                    not isinstance(one, dict)
                    or any(key not in one for key in wanted)
                    or not isinstance(one["text"], str)
                ):
                    raise BadRow(f"field 'ctxs' is no list of objects with {', '.join(wanted)}")
            if not row["ctxs"]:
                raise BadRow("field 'ctxs' is empty")
        if kind == "rerank" and not all(is_judged(one) for one in row["ctxs"]):
            raise BadRow("field 'ctxs' has a document whose label is no number from 0, or whose id is none")

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        drawn = dict.fromkeys(self.names, self.most or 20)
        n = drawn if self.is_embedded else {name: len(rows[: self.most]) for name, rows in self.rows.items()}
        cells = {(name, length): n[name] for length in self.params.lengths for name in self.names}
        return Filled(self, tokenizer, cells)

    def asked(self, name: str, length: int, number: int, units: int) -> Asked:
        """A row, or a drawn one, with so many documents or demonstrations."""
        params, kind = self.params, KINDS[name]
        rng = random.Random(f"helmet {self.seed} {name} {length} {number}")
        if self.is_embedded and kind == "json_kv":
            return drawn_object(rng, max(units, params.shots + 1), params.shots)
        if self.is_embedded:
            pool = drawn_pool(rng, params.classes, 1 + units // params.classes + 1)
            label = rng.choice(sorted(pool))
            return many_shot({key: texts[1:] for key, texts in pool.items()}, Instance(pool[label][0], label), units)
        row, others = self.rows[name][number][1], [one for i, (_, one) in enumerate(self.rows[name]) if i != number]
        shots = rng.sample(others, min(params.shots, len(others)))
        if kind == "icl":
            pool = {}
            for one in others:
                pool.setdefault(str(one["label"]), []).append(one["text"])
            pool.setdefault(str(row["label"]), [row["text"]])  # a class of one instance: itself, as nothing else is
            return many_shot(pool, Instance(row["text"], str(row["label"])), units)
        if kind == "qa":
            return from_passages(row, shots, units)
        return ranked(row, units) if kind == "rerank" else of_key(row, shots)

    def units(self, name: str, number: int) -> int | None:
        """Passages that a row has; an object of a file is taken as it is. None: as many units as fit."""
        kind = KINDS[name]
        if self.is_embedded or kind == "icl":
            return None
        return len(self.rows[name][number][1]["ctxs"]) if kind in ("qa", "rerank") else 1

    def made(self, name: str, length: int, id: str, asked: Asked) -> Sample:
        kind = KINDS[name]
        return Sample(
            id=id,
            context=asked.context,
            question=asked.question,
            answer_prefix=PREFIX[kind] if kind != "icl" else "",
            references=asked.references,
            max_new_tokens=self.params.new_tokens(name),
            stop_at_newline=kind in ("icl", "rerank"),
            use_chat=self.params.use_chat,
            evidence=asked.evidence,
            fields={"dataset": name, "length": length, **asked.fields},
        )

    def score(self, sample: Sample, prediction: str) -> float:
        kind = KINDS[sample.fields["dataset"]]
        if kind == "rerank":
            return scores.ndcg(scores.rankings(scores.read(prediction, PREFIX[kind])), sample.fields["judged"])
        return scores.score(kind, prediction, PREFIX[kind], sample.references)


# --- many-shot labels --------------------------------------------------------------------------


@dataclass(frozen=True)
class Instance:
    text: str
    label: str  # the name of its class


def rounds(pool: Mapping[str, Sequence[str]], rng: random.Random, n: int) -> list[Instance]:
    """The first `n` instances in rounds, each of which has every class once, in an order of its own."""
    found = list[Instance]()
    turn = 0
    while len(found) < n:
        labels = rng.sample(sorted(pool), len(pool))
        found += [Instance(pool[label][turn % len(pool[label])], label) for label in labels]
        turn += 1
    return found[:n]


def many_shot(pool: Mapping[str, Sequence[str]], query: Instance, n: int) -> Asked:
    """The query after n demonstrations; labels are numbers that are shuffled anew for each query."""
    rng = random.Random(int(hashlib.sha256(query.text.encode()).hexdigest(), 16))
    labels = sorted(pool)
    numbers = dict(zip(labels, map(str, rng.sample(range(len(labels)), len(labels))), strict=True))
    shown = rounds(pool, rng, n)
    lines = [f"{one.text}\nlabel: {numbers[one.label]}" for one in shown]
    alike = tuple(line for one, line in zip(shown, lines, strict=True) if one.label == query.label)
    return Asked(
        ASKS["icl"] + "\n\n".join(lines) + "\n\n", f"{query.text}\nlabel:", (numbers[query.label],),
        {"classes": len(labels), "demonstrations": n, "of_its_class": len(alike)}, alike[:3],
    )  # fmt: skip


def word(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=3))


def drawn_pool(rng: random.Random, classes: int, n_each: int) -> dict[str, list[str]]:
    """Classes of invented instances: common words with one of the class's own."""
    markers: set[str] = set()
    while len(markers) < N_MARKERS * classes:
        markers.add(word(rng))
    known = sorted(markers)
    rng.shuffle(known)
    return {
        f"class{c:03}": [instance(rng, known[N_MARKERS * c : N_MARKERS * (c + 1)]) for _ in range(n_each)]
        for c in range(classes)
    }


def instance(rng: random.Random, markers: Sequence[str]) -> str:
    words = [*rng.choices(COMMON, k=7), *rng.sample(markers, 2)]
    rng.shuffle(words)
    return " ".join(words)


# --- the other parts ---------------------------------------------------------------------------


def from_passages(row: Row, shots: Sequence[Mapping[str, Any]], n: int) -> Asked:
    shown = "".join(f"Question: {one['question']}\nAnswer: {next(scores.names(one['answers']))}\n\n" for one in shots)
    documents = "\n\n".join(f"Document (Title: {one.get('title', '')}): {one['text']}" for one in row["ctxs"][:n])
    return Asked(
        f"{ASKS['qa']}{shown}{documents}\n\n", f"Question: {row['question']}\n", tuple(scores.names(row["answers"])),
        {"documents": min(n, len(row["ctxs"]))},
    )  # fmt: skip


def ranked(row: Row, n: int) -> Asked:
    documents = "\n\n".join(f"[ID: {one['id']}] Document: {one['text']}" for one in row["ctxs"][:n])
    judged = {str(one["id"]): int(one["label"]) for one in row["ctxs"]}
    order = sorted(judged, key=lambda one: -judged[one])
    return Asked(
        f"{ASKS['rerank']}{documents}\n\n", f"Query: {row['query']}\n", (" > ".join(order),),
        {"documents": min(n, len(row["ctxs"])), "judged": judged},
    )  # fmt: skip


def of_key(row: Row, shots: Sequence[Mapping[str, Any]]) -> Asked:
    shown = "".join(f"Key: {one['question']}\n{PREFIX['json_kv']} {one['answer']}\n\n" for one in shots)
    return Asked(f"{ASKS['json_kv']}{row['context']}\n\n{shown}", f"Key: {row['question']}\n", (row["answer"],), {})


def drawn_object(rng: random.Random, n: int, shots: int) -> Asked:
    """A key of n of a drawn object, and others as demonstrations."""
    pairs = [tuple(str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2)) for _ in range(n)]
    picked = rng.sample(pairs, min(n, shots + 1))
    body = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
    rows = [{"context": f"{{{body}}}", "question": key, "answer": value} for key, value in picked]
    asked = of_key(rows[0], rows[1:])
    return Asked(asked.context, asked.question, asked.references, {"keys": n}, (f'"{picked[0][0]}": "{picked[0][1]}"',))


class Filled(Drawn):
    """Rows, each as full as its length allows."""

    def sample(self, i: int) -> Sample:
        name, length, number = self.places[i]
        most = self.task.units(name, number)
        if most is not None and self.size(whole := self.draw(name, length, number, most)) <= length:
            return whole
        units = self.filling(length, lambda n: self.size(self.draw(name, length, number, n)), 1, (name, length))
        if units is None:
            raise ConfigError(f"task.lengths={length} is too short for {name}; give more tokens")
        return self.draw(name, length, number, units)

    def draw(self, name: str, length: int, number: int, units: int) -> Sample:
        asked = self.task.asked(name, length, number, units)
        return self.task.made(name, length, f"{name}-{length}-{number}", asked)


def is_judged(document: Mapping[str, Any]) -> bool:
    label = document["label"]
    return type(label) is int and 0 <= label <= 100 and isinstance(document["id"], int | str)
