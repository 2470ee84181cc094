"""LongProc: a procedure that is to be written out step by step, on prompts of 2k to 16k characters.

Names       LongProc
Asks        a procedure written out in full
Lengths     2k to 16k characters
Answers     1,024 to 9,216 tokens
Licence     not stated

Parts       `countdown` (a search for an equation, logged), `path_traversal` (a route through cities) and `tom_tracking`
            (who believes what, step by step), each in three lengths of the answer: 0.5k, 2k, 8k tokens.
Rows        longproc/<part>/<part>_<length>.json and prompts.yaml next to it, from the data folder; put there by hand
            from GitHub princeton-pli/LongProc.
Answers     up to 1,024, 3,072 or 9,216 tokens by length; the repository sets no limit. They are to be drawn greedily.
Scores      accuracy is a run's score; `partial` and `extracted` stand next to it. `raises` counts answers on which the
            official scorer raises, which are worth 0.
Order       the first row of every part, then the second of every one.

Not here: the scores (`scores.py`), the reference of countdown (`countdown.py`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Le

from kvbench.engine.declared import Count, Is, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import LARGEST_FILE, read_text
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OfDatasets, OnBadRow
from kvbench.tasks.longproc import scores
from kvbench.tasks.longproc.countdown import Search, examples
from kvbench.tasks.published import Row
from kvbench.tasks.reasoning.task import LongAnswers
from kvbench.tasks.rows import BadRow, Fields, Text

PARTS = ("countdown", "path_traversal", "tom_tracking")
LISTS = {"all": PARTS}
USUAL_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 9216}
UPSTREAM = "GitHub princeton-pli/LongProc (folder data)"
FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
Number = Annotated[int, Ge(0), Le(100_000)]  # of countdown; published ones are below 100
FIELDS: dict[str, Fields] = {
    "countdown": {
        "nums": Annotated[tuple[Number, Number, Number, Number], Is("a list of four numbers from 0 on")],
        "target": Number,
    },
    "path_traversal": {
        "context_nl": Text,
        "answer_nl": Text,
        "question_repr": Annotated[tuple[str, str], Is("a list of two texts")],
    },
    "tom_tracking": {"story": Text, "question": Text, "solution": Text},
}


@dataclass(frozen=True)
class Params(OfDatasets):
    lists = LISTS
    source: Literal["auto", "local"]
    datasets: Annotated[str | tuple[str, ...], Some(PARTS, tuple(LISTS))]
    length: Literal["0.5k", "2k", "8k"]  # of the answer that is asked for
    max_new_tokens: Count | None  # None: by length, or what the window leaves
    on_bad_row: OnBadRow


class LongProc(LongAnswers):
    """The rows of each chosen part, in turns."""

    params: Params
    name = "longproc"
    version = 1
    Params = Params
    data = Data(
        tuple(f"longproc/{name}/{name}_{length}.json" for name in PARTS for length in USUAL_TOKENS),
        "the others cannot be asked", by_hand=UPSTREAM,
    )  # fmt: skip
    place, upstream = "longproc/{name}/{name}_{length}.json", UPSTREAM

    @property
    def usual_tokens(self) -> int:
        return USUAL_TOKENS[self.params.length]

    def title(self) -> str:
        return f"{self.params.listed}/{self.params.length}"

    def prepare(self, shape: ModelShape) -> None:
        files = [f"longproc/{name}/prompts.yaml" for name in self.names]
        self.prompts = [sources.require(file, self.data_dir, UPSTREAM) for file in files]
        self.templates = dict(zip(self.names, map(template_of, self.prompts), strict=True))

    def digested(self, files: Sequence[Path]) -> Sequence[Path]:
        return [file for pair in zip(files, self.prompts, strict=True) for file in pair]

    def fields_of(self, name: str) -> Fields:
        return FIELDS[name]

    def check_row(self, name: str, row: Row) -> None:
        if name == "countdown" and not Search(row["nums"], row["target"]).is_found:
            raise BadRow(f"no equation makes {row['target']} of {row['nums']}")
        if name == "tom_tracking" and not scores.beliefs(row["solution"]):
            raise BadRow("field 'solution' has no step")

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        return Sample(
            id=f"{name}-{self.params.length}-{number}",
            context=filled(self.templates[name], values_of(name, row)),
            question="",
            references=(reference_of(name, row),),
            fields={"dataset": name}
            | ({"numbers": list(row["nums"]), "target": row["target"]} if name == "countdown" else {}),
        )

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        found = judged(sample.fields["dataset"], prediction, sample.references[0], sample.fields)
        return found.accuracy, {
            "partial": max(0.0, found.partial),  # the official figure is negative for a log of one line
            "extracted": found.extracted,
            "raises": float(found.raises),
        }


def judged(name: str, prediction: str, reference: str, fields: Mapping[str, Any]) -> scores.Procedure:
    """What an answer of one part is worth."""
    if name == "countdown":
        return scores.countdown(prediction, fields["numbers"], fields["target"])
    return (scores.path_traversal if name == "path_traversal" else scores.tom_tracking)(prediction, reference)


# --- rows --------------------------------------------------------------------------------------


def values_of(name: str, row: Row) -> dict[str, Any]:
    """Values that a part's prompt asks for."""
    if name == "countdown":
        return {"demonstration": examples(), "nums": list(row["nums"]), "target": row["target"]}
    if name == "tom_tracking":
        return row | {}  # type: ignore[operator]
    return {"city_context": row["context_nl"], "src_city": row["question_repr"][0], "dst_city": row["question_repr"][1]}


def reference_of(name: str, row: Row) -> str:
    if name == "countdown":
        return Search(row["nums"], row["target"]).text()
    return row["solution" if name == "tom_tracking" else "answer_nl"]


# --- prompts -----------------------------------------------------------------------------------


def template_of(path: Path) -> str:
    """`USER_PROMPT` of a prompts.yaml."""
    text = read_text(path)
    assert len(text) <= LARGEST_FILE
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{path} is no YAML ({' '.join(str(error).split())[:120]}); get it again from {UPSTREAM}"
        ) from None
    template = content.get("USER_PROMPT") if isinstance(content, dict) else None
    if not isinstance(template, str):
        raise ConfigError(f"{path} has no text USER_PROMPT; get it again from {UPSTREAM}")
    return template


def filled(template: str, values: Mapping[str, Any]) -> str:
    """A template with its fields filled in once, and doubled braces as single ones."""

    def one(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        if found[1] not in values:
            raise ConfigError(f"a prompt of LongProc has the unknown field {found[0]}; get it again from {UPSTREAM}")
        return str(values[found[1]])

    return FIELD.sub(one, template)
