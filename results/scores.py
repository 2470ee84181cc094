"""scores.jsonl: scores given after the answers, by `python -m kvbench.evals.rescore --write`.

What a model answered stands in samples.jsonl and is never written again. A line here holds the score of one answer, the
version of the metric, and the CRC of the answer that was judged: a score counts for that answer only. The file counts
where it has a score for every answer of the run, in one version, so that no result mixes two of them.

While a scorer is at work, its scores stand in scores.jsonl.part, in lines of the same kind.

Not here: who scores (`evals/rescore.py`), who writes (`results/folder.py`).
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Self

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import parse_json, read_bytes
from kvbench.results.files import sealed, unsealed
from kvbench.results.keys import check_keys, check_types
from kvbench.results.schema import SampleRow, bounded

SCORES, PART = "scores.jsonl", "scores.jsonl.part"
LARGEST_SCORES = 1 << 30  # bytes: a million lines of 1 kB
REMAKE = "delete it, and make it again with `python -m kvbench.evals.rescore --write`"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A line of scores.jsonl."""

    id: str
    answer_crc32: str  # see `crc_of_answer`
    score: float
    metric: str | None
    task_version: int  # of the code that scored
    measures: dict[str, float | None] = field(default_factory=dict[str, float | None])

    def __post_init__(self) -> None:
        check_types(self)

    def to_line(self) -> str:
        return sealed(json.dumps(asdict(self), ensure_ascii=True, allow_nan=False)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        """ValueError where the line is no score, or is not the one that was written."""
        text = line.removesuffix("\n")
        if text == line or unsealed(text) is text:
            raise ValueError("it has no crc32, or no end")
        data = check_keys(parse_json(unsealed(text), is_ours=True), KEYS)
        if unknown := sorted(data.keys() - KEYS):
            raise ValueError(f"key {unknown[0]!r} is unknown")
        with bounded():
            return cls(**data)

    def is_of(self, row: SampleRow) -> bool:
        """Whether this is what was judged."""
        return self.id == row.id and self.answer_crc32 == crc_of_answer(row)


KEYS = frozenset(Score.__annotations__)


def crc_of_answer(row: SampleRow) -> str:
    """CRC of the prediction, as 8 hex digits."""
    return f"{zlib.crc32(json.dumps(row.prediction).encode()):08x}"  # as JSON: a text may hold half a character


@dataclass(frozen=True)
class Scores:
    """The scores of a run's answers, of one metric in one version."""

    by_id: Mapping[str, Score]
    crc32: str  # of the file
    metric: str | None
    task_version: int

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Self:
        """ValueError where these cannot be those of one run."""
        by_id = {score.id: score for score in scores}
        if len(by_id) < len(scores):
            raise ValueError("it has a sample twice")
        kinds = {(score.metric, score.task_version) for score in scores}
        if len(kinds) != 1:
            raise ValueError(f"it holds scores of {len(kinds)} metrics or versions, not of one")
        ((metric, version),) = kinds
        return cls(by_id, f"{zlib.crc32(to_text(scores).encode()):08x}", metric, version)

    def lay_over(self, rows: Iterable[SampleRow]) -> list[SampleRow]:
        """The rows with these scores; ValueError where an answer has none."""
        return [self.row_with_score(row) if row.status == "ok" else row for row in rows]

    def row_with_score(self, row: SampleRow) -> SampleRow:
        score = self.by_id.get(row.id)
        if score is None or not score.is_of(row):
            raise ValueError(f"it has no score for the answer to {row.id!r}")
        columns = {key: value for key, value in row.fields.items() if key != "metric"}
        if score.metric is not None:
            columns["metric"] = score.metric
        if score.measures:
            columns["measures"] = columns.get("measures", {}) | score.measures
        return replace(row, score=score.score, fields=columns)


def to_text(scores: Iterable[Score]) -> str:
    return "".join(score.to_line() for score in scores)


def parse_scores(content: bytes) -> tuple[list[Score], int]:
    """The lines before the first that is damaged, and how many bytes they take."""
    scores: list[Score] = []
    n_bytes = 0
    for line in BytesIO(content).readlines():
        try:
            scores.append(Score.from_line(line.decode()))
        except ValueError:
            break
        n_bytes += len(line)
    return scores, n_bytes


def read_scores(folder: Path) -> Scores | None:
    """Scores of scores.jsonl, None without one; ValueError with the file's name where it is damaged."""
    path = folder / SCORES
    if not os.path.lexists(path):
        return None
    try:
        content = read_bytes(path, LARGEST_SCORES)
        scores, n_bytes = parse_scores(content)
        if n_bytes < len(content):
            raise ValueError(f"line {len(scores) + 1} is not a score")
        return Scores.of(scores)
    except (ValueError, ConfigError) as error:
        raise ValueError(f"{path} cannot be believed ({error}); {REMAKE}") from None


def describe(scores: Scores | None) -> dict[str, Any]:
    """What result.json says of the scores that it was made from."""
    return {
        "score_version": None if scores is None else scores.task_version,
        "scores_crc32": None if scores is None else scores.crc32,
    }
