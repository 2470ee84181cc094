"""The samples of a report: what was asked, once, and what each run answered, in columns and in pieces.

A page of thousands of runs would be larger than a browser likes, so texts and details are cut to what fits, the same
for all runs, and the page says so. Runs of one piece are unpacked together, when the reader first looks at one of them.

Not here: scores over samples (`plots/site/overview.py`).
"""

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from kvbench.plots.read import Run
from kvbench.results import METRICS, SampleRow

LARGEST = 17_000_000  # bytes that the samples may take on a page of 20 MB
PIECE = 1_500_000  # characters of JSON that are unpacked at a time
PROBED = 40  # runs that the size of all is judged by
OWN = (
    "dataset",
    "metric",
    "variant",
    "method_report",
    "prompt_end",
    "attended_bins",
)  # columns with a place of their own
FEWEST = 120  # characters of a line of evidence
LEVELS = 63  # of a strip's brightness


@dataclass(frozen=True)
class Detail:
    """How much of a sample the page holds."""

    characters: int  # of each text
    more: bool = True  # ledger, the task's columns, the method's report
    bins: int = 100  # of a picture of kept positions
    rows: int | None = None  # of a run; None: all

    @property
    def sentence(self) -> str:
        """What a reader misses; "" where it is what the longest texts would be cut to in any case."""
        if self == DETAILS[0]:
            return ""
        left_out = [
            f"texts are cut after {self.characters} characters",
            *([] if self.more else ["ledgers, columns and reports of samples are left out"]),
            *([] if self.bins else ["pictures of kept positions are left out"]),
            *([] if self.rows is None else [f"each run shows its first {self.rows} samples"]),
        ]
        return f"So many runs would make a page of more than 20 MB: {'; '.join(left_out)}. The runs' folders hold all."


DETAILS = (
    Detail(2_000),
    Detail(600),
    Detail(250),
    Detail(250, bins=50),
    Detail(250, more=False, bins=50),
    Detail(120, more=False, bins=25),
    Detail(60, more=False, bins=0, rows=20),
    Detail(60, more=False, bins=0, rows=4),
)


@dataclass(frozen=True)
class Packed:
    """The samples as they stand in the page."""

    pieces: list[str]  # packed JSON: a list of runs each
    starts: list[int]  # the first run of each piece
    asked: str  # packed JSON: what was asked
    cut: str  # what was left out, as a sentence

    @property
    def size(self) -> int:
        return len(self.asked) + sum(map(len, self.pieces))


def pack_samples(runs: Sequence[Run], largest: int = LARGEST, piece: int = PIECE) -> Packed:
    """Pack samples with as much detail as fits; `piece` is how many characters are unpacked together."""
    probe = runs[:: max(1, len(runs) // PROBED)]
    for i, detail in enumerate(DETAILS):
        is_last = i == len(DETAILS) - 1
        # The size is first judged by some runs: to pack all takes a minute where they are thousands.
        if not is_last and answers_size(probe, detail) * len(runs) / len(probe) > 1.1 * largest:
            continue
        found = pack(runs, detail, piece)
        if is_last or found.size <= largest:
            return found
    raise AssertionError("the last detail is taken whatever its size")


def answers_size(runs: Sequence[Run], detail: Detail) -> int:
    """Size of the answers alone: what was asked stands once for all runs, few of which were asked nearly all."""
    return sum(map(len, pack(runs, detail).pieces))


def pack(runs: Sequence[Run], detail: Detail, piece: int = PIECE) -> Packed:
    asked = Asked(detail)
    pieces: list[str] = []
    starts: list[int] = []
    waiting: list[str] = []

    def flush() -> None:
        if waiting:
            pieces.append(packed("[" + ",".join(waiting) + "]"))
            waiting.clear()

    for i, run in enumerate(runs):
        if not waiting:
            starts.append(i)
        waiting.append(compact(columns(run, asked, detail)))
        if sum(map(len, waiting)) > piece:
            flush()
    flush()
    return Packed(pieces, starts, packed(compact(asked.prompts)), detail.sentence)


class Asked:
    """The prompts, each once, however many runs answered it."""

    def __init__(self, detail: Detail) -> None:
        self.detail = detail
        self.places: dict[tuple[str, str, str], int] = {}
        self.prompts: list[dict[str, Any]] = []

    def place(self, run: Run, row: SampleRow) -> int:
        key = run.result.task, row.id, row.prompt_sha256
        if key not in self.places:
            self.places[key] = len(self.prompts)
            self.prompts.append(self.prompt(run, row))
        prompt = self.prompts[self.places[key]]
        if "end" not in prompt and (end := prompt_end(row, self.detail.characters)):
            prompt["end"] = end  # the first run that answered it may be an older one, without
        return self.places[key]

    def prompt(self, run: Run, row: SampleRow) -> dict[str, Any]:
        return {
            "id": row.id,
            "sha": row.prompt_sha256,
            "dataset": str(row.fields.get("dataset", run.result.dataset)),
            "tokens": row.prompt_tokens,
            "original_tokens": row.original_prompt_tokens,
            "references": [cut(text, self.detail.characters) for text in row.references],
        }


def prompt_end(row: SampleRow, n: int) -> dict[str, str]:
    """The end of what was asked; {} in older runs."""
    end = row.fields.get("prompt_end")
    if not isinstance(end, dict):
        return {}
    cuts = {"evidence": middles}
    return {key: cuts.get(key, last)(text, n) for key, text in end.items() if isinstance(text, str) and text}


def middles(text: str, n: int) -> str:
    """The middle of each line: what was looked for, with less around it."""
    lines = text.split("\n")[: max(1, n // FEWEST)]
    most = max(FEWEST, n // len(lines))
    return "\n".join(
        line if len(line) <= most else f"… {line[(start := (len(line) - most) // 2) : start + most]} …"
        for line in lines
    )


def of_100(row: SampleRow) -> float | None:
    """A sample's score as the page shows it: 0 to 100, where it is a share."""
    scale = METRICS[str(row.fields.get("metric", "score"))].scale
    return None if row.score is None else scale * row.score


def columns(run: Run, asked: Asked, detail: Detail) -> dict[str, Any]:
    """The samples of a run, a list per column; a column that is null everywhere is left out."""
    rows = run.rows[: detail.rows]
    found: dict[str, list[Any]] = {
        "at": [asked.place(run, row) for row in rows],
        "score": [rounded(of_100(row)) for row in rows],
        "prediction": [cut(row.prediction, detail.characters) for row in rows],
        "generated": [row.generated_tokens for row in rows],
        "error": [row.error for row in rows],
    }
    if detail.bins:
        found["strip"] = [strip(row.fields.get("attended_bins"), detail.bins) for row in rows]
    if detail.more:
        ledgers = dict.fromkeys(key for row in rows for key in row.ledger)
        found |= {f"ledger.{key}": [rounded(row.ledger.get(key)) for row in rows] for key in ledgers}
        own = [{key: v for key, v in row.fields.items() if key not in OWN} for row in rows]
        found["fields"] = [bounded(fields, detail.characters) or None for fields in own]
        found["report"] = [bounded(row.fields.get("method_report"), detail.characters) for row in rows]
    return {key: values for key, values in found.items() if any(value is not None for value in values)}


def strip(bins: Any, n: int) -> str | None:
    """Shares of 0 to 1 as a character each, from `0` on, at most `n` of them; None where they are no shares."""
    if not isinstance(bins, list) or not bins or len(bins) > 1000:
        return None
    if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in bins):
        return None
    step = -(-len(bins) // n)
    means = [fsum(part) / len(part) for i in range(0, len(bins), step) if (part := bins[i : i + step])]
    # What is attended to at all must not look like what is not.
    return "".join(chr(48 + max(round(LEVELS * share), share > 0)) for share in means)


def cut(text: str, n: int) -> str:
    """A text as long as the page shows it."""
    more = len(text) - n
    return text if more <= 0 else f"{text[:n]} … ({more} more characters)"


def last(text: str, n: int) -> str:
    return text if len(text) <= n else f"… {text[-n:]}"


def rounded(number: Any) -> Any:
    """Four significant digits, and whole numbers up to a million: nobody reads more, and they do not compress."""
    if not isinstance(number, float):
        return number
    return float(round(number) if 1e3 <= abs(number) < 1e6 else f"{number:.4g}")


def bounded(tree: Any, n: int) -> Any:
    """A task's or method's own data, numbers rounded; where it is longer than a text may be, its beginning as text."""
    if not tree:
        return tree
    tree = short(tree)
    text = json.dumps(tree, ensure_ascii=False)
    return tree if len(text) <= n else cut(text, n)


def short(node: Any) -> Any:
    """A tree with all of its numbers rounded."""
    if isinstance(node, dict):
        return {key: short(v) for key, v in node.items()}
    return [short(v) for v in node] if isinstance(node, list) else rounded(node)


def in_columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Objects of the same keys as a list per key: a third of the text, which a browser reads sooner.

    Where a key's values are such objects themselves, they are columns in turn.
    """
    found: dict[str, Any] = {}
    for key in rows[0] if rows else ():
        values = [row[key] for row in rows]
        alike = all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values)
        found[key] = in_columns(values) if alike else values
    return found


def compact(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def packed(text: str) -> str:
    """gzip and base64; the same text gives the same page."""
    data = text.encode("utf-8", "surrogatepass")
    return base64.b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode()


def unpacked(data: str) -> Any:
    """The data that `packed` packed, for tests and for who reads a page by a script."""
    return json.loads(gzip.decompress(base64.b64decode(data)).decode("utf-8", "surrogatepass"))


def iter_pieces(found: Packed) -> Iterator[tuple[str, str]]:
    """Name and content of each of the page's elements that hold samples."""
    yield "data-asked", found.asked
    for start, piece in zip(found.starts, found.pieces, strict=True):
        yield f"data-samples-{start}", piece
