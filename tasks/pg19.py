"""PG19 perplexity: how well the model predicts the next token of a book through the compressed cache.

Names       PG19; embedded prose
Asks        the next token of a book
Lengths     any
Answers     none: a text is fed
Licence     Apache-2.0; books have terms of their own

Any text will do. The dataset's name says how it was measured: `chunked-256` (losses per sample) or `reprefill-500`
(the stride).

chunked     (the default) a prefix is prefilled and compressed once; then the tokens after it are fed one at a time,
            each with its own K and V appended, and the loss of each next token counts
reprefill   (as ClusterKV does it) every counted token has a prefill of its own and one step through the cache; with a
            stride, since a prefill per token is quadratic

Losses are natural logarithms in float32, summed in float64. Lengths include the tokens that the tokenizer puts before
every text.

A sample's score is its perplexity, exp of the mean loss; that of a run is exp of the mean over all of its losses.
`perplexity.json` has the losses by position, for running curves and for merging.

The prefill predicts the first token after a prefix without any compression, so its loss is left out.

Not here: the pass of Quest's authors, whose cache grows from nothing up to a budget. Our budgets are shares of a whole
prompt.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.declared import Count, Once, PathText
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import SelectiveAttention
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OnBadRow
from kvbench.tasks.forced import ForcedContinuation, ForcedTask, ForcedWatch, Outcome, distinct
from kvbench.tasks.texts import Tokens, embedded, given_file, read_files, tokens

FOLDER = "pg19"
UPSTREAM = "the hub (emozilla/pg19-test: save the field text of each row as pg19/NAME.txt)"
SHORTEST = 1024  # of the lengths 1024, 2048, 4096, …
LARGEST_LOSS = 700.0  # above it exp overflows; no model is that sure of itself


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "local", "embedded"]
    path: PathText | None
    books: Count
    protocol: Literal["chunked", "reprefill"]
    lengths: Annotated[tuple[Annotated[int, Ge(2)], ...], Once()] | None
    max_length: Count | None
    targets: Count
    stride: Count
    offsets: Count
    bin: Count
    on_bad_row: OnBadRow

    def __post_init__(self) -> None:
        if self.path is not None and self.source != "auto":
            raise ConfigError(
                f"task.path={self.path} and task.source={self.source} are both given; give one of the two"
            )

    @property
    def n_targets(self) -> int:
        """Losses of a sample."""
        return self.targets if self.protocol == "chunked" else 1

    def grid(self, longest: int) -> tuple[int, ...]:
        """The prefixes, none of them longer than `longest`."""
        if self.lengths is not None:
            return self.lengths
        longest = min(longest, self.max_length or longest)
        if self.protocol == "reprefill":
            return tuple(range(max(2, self.stride), longest + 1, self.stride))
        doublings = max(0, longest // SHORTEST).bit_length()
        return tuple(SHORTEST << i for i in range(doublings))


class PG19(ForcedTask):
    name = "pg19"
    version = 1
    data = Data(
        (FOLDER,), "without them only Python's own text (task.source=embedded)", what="folders", by_hand=UPSTREAM
    )
    metric = "perplexity"
    Params = Params
    longest: int  # prefix that the model's window holds, known from `check` on

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir = params, data_dir
        files = self._files()
        self.corpus = read_files(files, params.on_bad_row, params.books) if files else embedded()
        if len(self.corpus.texts) < params.books:
            raise ConfigError(
                f"task.books={params.books} asks for more than the {len(self.corpus.texts)} text(s) that are there"
            )
        self.data_source, self.data_digest = self.corpus.data_source, self.corpus.digest
        step = params.targets if params.protocol == "chunked" else params.stride
        how = params.protocol if params.lengths and not params.n_targets > 1 else f"{params.protocol}-{step}"
        self.dataset = f"{how}/{self.corpus.name}"
        self.notes = self.corpus.notes

    def _files(self) -> tuple[Path, ...]:
        if self.params.path is not None:
            return (given_file(self.params.path),)
        if self.params.source == "embedded":
            return ()
        files = sources.find_all(FOLDER, self.data_dir, "*.txt", "*.jsonl")
        if not files:
            sources.require(f"{FOLDER}/*.txt", self.data_dir, UPSTREAM, instead="the prose of Python's help topics")
        return tuple(files)

    def check(self, shape: ModelShape) -> None:
        self.longest = shape.window - self.params.n_targets - 1
        grid = self.params.grid(self.longest)
        if not grid:
            raise ConfigError(
                f"task.{'stride' if self.params.protocol == 'reprefill' else 'max_length'} leaves no prefix within "
                f"the window of {shape.name}, {shape.window} tokens; give task.lengths"
            )
        if max(grid) > self.longest:
            raise ConfigError(
                f"task.lengths={list(grid)} asks for {max(grid)} tokens, more than the window of {shape.name} holds "
                f"with {self.params.n_targets + 1} behind them; the longest that fits is {self.longest}"
            )

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        by_text = (self._samples_of(tokens(tokenizer, name, text)) for name, text in self.corpus.texts)
        return distinct([sample for samples in by_text for sample in samples])

    def _samples_of(self, text: Tokens) -> list[Sample]:
        params, behind = self.params, self.params.n_targets + 1
        offsets = params.offsets if params.protocol == "chunked" else 1
        samples = []
        for length in params.grid(min(self.longest, len(text) - behind)):
            starts = text.starts(length + behind, offsets)
            if starts is None:
                raise ConfigError(
                    f"the text {text.name!r} has {len(text)} tokens, too few for {offsets} window(s) of {length} "
                    f"and {behind} behind them; give shorter task.lengths or a longer text"
                )
            for start in starts:
                window = text.window(start, length + behind)
                samples.append(
                    Sample(
                        id=f"{text.name}-{length}-{start}",
                        context="",
                        question="",
                        max_new_tokens=behind,
                        ids=window[:length],
                        forced=window[length:],
                        fields={"text": text.name, "length": length, "start": start},
                    )
                )
        if not samples:
            raise ConfigError(
                f"the text {text.name!r} has {len(text)} tokens, too few for a prefix and {behind} behind it; "
                "give task.lengths or a longer text"
            )
        return samples

    def watch(
        self, sample: Sample, continuation: ForcedContinuation, rows: Sequence[SelectiveAttention]
    ) -> ForcedWatch:
        assert continuation.ids is not None
        return Losses(continuation.ids, len(rows), self.params.bin, int(sample.fields["length"]))

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        curves = {"title": title, "protocol": self.params.protocol, "unit": "nats"}
        text = json.dumps(curves | curve(rows), indent=1)
        (folder / "perplexity.json").write_text(text + "\n", encoding="utf-8")


class Losses:
    """The loss of every next token, for all rows."""

    def __init__(self, forced: Sequence[int], n_rows: int, bin_len: int, s_prompt: int) -> None:
        self.targets = list(forced[1:])
        self.losses = torch.zeros(n_rows, len(self.targets), dtype=torch.float64)
        self.step, self.bin_len, self.s_prompt = 0, bin_len, s_prompt

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Take nothing of a layer: only what comes out at the top counts."""

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        losses = logits.logsumexp(-1) - logits[:, self.targets[self.step]]
        self.losses[list(order), self.step] = losses.double().cpu()
        self.step += 1

    def outcomes(self) -> list[Outcome]:
        assert self.step == len(self.targets), f"{self.step} steps for {len(self.targets)} targets"
        return [self._outcome(losses) for losses in self.losses]

    def _outcome(self, losses: Tensor) -> Outcome:
        bins = [part.sum().item() for part in losses.split(self.bin_len)]
        fields = {
            "n_targets": len(losses),
            "nll_sum": losses.sum().item(),
            # The first target comes two after the last token of the prefix.
            "first_target": self.s_prompt + 1,
            "bin_len": self.bin_len,
            "nll_bins": [round(total, 6) for total in bins],
        }
        return Outcome(perplexity(fields["nll_sum"], len(losses)), fields)


def perplexity(nll_sum: float, n: int) -> float:
    return max(1.0, math.exp(min(nll_sum / n, LARGEST_LOSS)))


def curve(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Losses of a run by position, with the perplexity up to there; `lengths` has those of each prefix."""
    ok = [row for row in rows if row["status"] == "ok"]
    bins: dict[tuple[int, int], list[float]] = {}  # first position, tokens: losses of each sample
    lengths: dict[int, list[tuple[float, int]]] = {}
    for row in ok:
        lengths.setdefault(row["length"], []).append((row["nll_sum"], row["n_targets"]))
        for i, total in enumerate(row["nll_bins"]):
            first = i * row["bin_len"]
            n = min(row["bin_len"], row["n_targets"] - first)
            bins.setdefault((row["first_target"] + first, n), []).append(total)
    running, seen, points = 0.0, 0, []
    for (position, n), totals in sorted(bins.items()):
        total, count = math.fsum(totals), n * len(totals)
        running, seen = running + total, seen + count
        points.append(
            {
                "position": position,
                "tokens": n,
                "targets": count,
                "nll_sum": total,
                "running": perplexity(running, seen),
            }
        )
    sums = {
        length: (math.fsum(s for s, _ in parts), sum(n for _, n in parts)) for length, parts in sorted(lengths.items())
    }
    return {
        "lengths": [
            {"length": length, "targets": n, "nll_sum": s, "perplexity": perplexity(s, n)}
            for length, (s, n) in sums.items()
        ],
        "bins": points,
    }
