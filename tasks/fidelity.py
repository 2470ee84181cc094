"""Fidelity: how close a compressed cache stays to full attention, on any text, without any label.

Names       fidelity
Asks        how close attention and next tokens stay to full attention's
Lengths     any, on any text
Answers     none: a text is fed
Licence     the text's own

A prompt is prefilled and compressed; what follows it is fed to all variants alike, one token at a time. At every step
and compressed layer each variant's attention is compared with exact attention of *its own* query over all tokens: the
prompt's K and V as an ordinary pass left them, and the variant's own K and V of every token fed so far.

    recall        |I_T ∩ I_true| / |I_T| per query head, prompt tokens only. I_T are the tokens that the variant attends
                  to, I_true as many tokens with the largest q·k (ClusterKV's Figure 11, as its code has it). With
                  `task.k`, I_true and the denominator have k tokens: a variant that attends to fewer cannot reach 1.
                  Ties count for the variant
    mass          share of the exact softmax weights that lies on attended tokens, prompt and fed ones, mean over heads
    output_error  |out - exact| / |exact| over all heads of the layer
    kl            KL(full || variant) of the next token in nats; full attention reads the same tokens in the same batch
    agreement     share of steps where both find the same token the likeliest
    acceptance    share of a drafter's tokens that full attention would take, and what follows from it by length of the
                  draft: `tasks/acceptance.py`. The variant lives on its own K and V of all fed tokens, while a drafter
                  gets full attention's at each verification: a lower reading of long feeds
    by_head       output_error of each head alone, mean over the steps

A sample's score is its recall: the mean over query heads, layers and steps. The first three figures are means over the
layers that the method compresses; a layer that it leaves whole on purpose would be perfect without any merit. To
compare methods that leave different layers whole, give all of them the same `task.skip_layers`. A line in samples.jsonl
also has the figures of every layer, skipped ones included.

A variant's keys and values of fed tokens come from its own hidden states, so an error in a lower layer does not count
again as an error of the attention above it; `kl` holds all errors together.

Lines   of a .jsonl file have a `text`, which is cut into prompt and continuation, or a `prompt`, which is asked as it
        is, perhaps with its `continuation`; either may have an `id`
Feed    the text's own continuation; full attention's greedy answer where there is none, or with
        `task.continuation=greedy`
Cost    the time of a step includes exact attention of every row and layer, so `s/token` is no figure of speed here

Not here: full attention's K and V for tokens that a draft's verification read; ranks of single tokens
(`benchmarks/needle_ranks.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from kvbench.engine.declared import Count, Once, PathText
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import write_csv
from kvbench.engine.passes.trace import Trace
from kvbench.engine.sampling.spec import Sampling, Temperature, TopP
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.base import SelectiveAttention
from kvbench.results.intervals import interval
from kvbench.tasks.acceptance import alphas, chances, drafts, expected_length
from kvbench.tasks.base import Sample
from kvbench.tasks.checks import OnBadRow
from kvbench.tasks.forced import ForcedContinuation, ForcedTask, ForcedWatch, Outcome, distinct
from kvbench.tasks.rows import Rows, read_rows
from kvbench.tasks.texts import (
    check_text,
    digest,
    embedded,
    given_file,
    new_row,
    read_files,
    tokens,
)

BY_LAYER = ("recall", "mass", "output_error")
BY_STEP = ("kl", "agreement", "alpha")
DIGITS = 6  # of the figures in a line
FORCED = (
    "forced: greedy_length, rate and per_position of a text that full attention did not write itself are no engine's; "
    "task.continuation=greedy makes them so"
)


@dataclass(frozen=True)
class Params:
    path: PathText | None
    prompt_tokens: Count
    windows: Count
    steps: Count
    continuation: Literal["auto", "text", "greedy"]
    k: Count | None
    skip_layers: tuple[int, ...] | None
    draft: Annotated[tuple[Count, ...], Once()]
    temperature: Temperature
    top_k: Count | None
    top_p: TopP
    on_bad_row: OnBadRow


class Fidelity(ForcedTask):
    name = "fidelity"
    version = 2
    metric = "recall"
    wants_full = True
    Params = Params

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params = params
        self.sampling = Sampling(params.temperature, params.top_p, params.top_k)
        file = None if params.path is None else given_file(params.path)
        self.file = file if file is not None and file.suffix == ".jsonl" else None
        self.rows, self.corpus = None, None
        if self.file is not None:
            self.rows = read_prompts(self.file, params.on_bad_row)
            self.dataset, self.data_source = self.file.stem, "local"
            self.data_digest, self.notes = digest([self.file]), self.rows.notes
        else:
            self.corpus = embedded() if file is None else read_files([file])
            self.dataset, self.data_source = self.corpus.name, self.corpus.data_source
            self.data_digest = self.corpus.digest
        if self.sampling.is_greedy and params.continuation != "greedy":
            self.notes = [*self.notes, FORCED]

    def check(self, shape: ModelShape) -> None:
        n = self.params.prompt_tokens + self.params.steps + 1
        if n > shape.window and self.corpus is not None:
            raise ConfigError(
                f"task.prompt_tokens={self.params.prompt_tokens} and task.steps={self.params.steps} are more than the "
                f"{shape.window} tokens of {shape.name}; give {shape.window - self.params.steps - 1} or fewer"
            )
        skipped = self.params.skip_layers
        if skipped is None:
            return
        if not set(skipped) < set(shape.attention_layers):
            raise ConfigError(
                f"task.skip_layers={list(skipped)} must leave some of the compressed layers of {shape.name}, which are "
                f"{list(shape.attention_layers)}, and name no others"
            )

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if self.rows is None:
            return self._windows(tokenizer)
        return distinct([self._of_row(tokenizer, number, row) for number, row in self.rows.rows])

    def _windows(self, tokenizer: Any) -> list[Sample]:
        params = self.params
        assert self.corpus is not None, "a .jsonl file has rows"
        ((name, text),) = self.corpus.texts
        ids = tokens(tokenizer, name, text)
        n = params.prompt_tokens + params.steps + 1
        starts = ids.starts(n, params.windows)
        if starts is None or n <= len(ids.opening):
            raise ConfigError(
                f"the text {name!r} has {len(ids)} tokens, too few for {params.windows} window(s) of {n}; give "
                "smaller task.prompt_tokens or task.windows"
            )
        return [self._cut(f"{name}-{start}", ids.window(start, n)) for start in starts]

    def _of_row(self, tokenizer: Any, number: int, row: Mapping[str, Any]) -> Sample:
        """A line's sample: a `text` is cut into prompt and continuation, a `prompt` is asked as it is."""
        id = f"line-{number}" if row.get("id") is None else str(row["id"])
        n_fed = self.params.steps + 1
        if "text" in row:
            ids = tokens(tokenizer, id, row["text"])
            n = min(len(ids), self.params.prompt_tokens + n_fed)
            if n <= n_fed + len(ids.opening):
                raise ConfigError(
                    f"{self.file}, line {number}: the text has {len(ids)} tokens, too few for a prompt and "
                    f"task.steps={self.params.steps} behind it; give fewer steps"
                )
            return self._cut(id, ids.window(0, n))
        given = row.get("continuation")
        if given is None and self.params.continuation == "text":
            raise ConfigError(
                f"{self.file}, line {number}: field 'continuation' is missing, which task.continuation=text wants; "
                "use auto or greedy"
            )
        forced = None
        if given is not None and self.params.continuation != "greedy":
            forced = tuple(tokenizer.encode(given, add_special_tokens=False)[:n_fed])
            if len(forced) < 2:
                raise ConfigError(
                    f"{self.file}, line {number}: the continuation has {len(forced)} token(s); give 2 or more, or none"
                )
        return Sample(id, row["prompt"], "", max_new_tokens=n_fed, forced=forced)

    def _cut(self, id: str, window: tuple[int, ...]) -> Sample:
        n = len(window) - self.params.steps - 1
        forced = None if self.params.continuation == "greedy" else window[n:]
        n_fed = self.params.steps + 1
        return Sample(id, "", "", max_new_tokens=n_fed, ids=window[:n], forced=forced)

    def watch(
        self, sample: Sample, continuation: ForcedContinuation, rows: Sequence[SelectiveAttention]
    ) -> ForcedWatch:
        is_own = sample.forced is None
        return Comparison(continuation.truth(), rows, len(continuation.feed), self.params, self.sampling, is_own)

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """`layers.csv`: the figures of each layer, means over the samples; `heads.csv`: the error of each head.

        Heads have 95 % intervals over the samples, of errors and so without an upper bound.
        """
        ok = [row for row in rows if row["status"] == "ok"]
        if not ok:
            return
        means = (
            [fsum(row["by_layer"][name][i] for row in ok) / len(ok) for name in BY_LAYER]
            for i in range(len(ok[0]["layers"]))
        )
        lines = (
            [layer, *(round(mean, DIGITS) for mean in each)] for layer, each in zip(ok[0]["layers"], means, strict=True)
        )
        write_csv(folder / "layers.csv", ["layer", *BY_LAYER], lines)
        write_csv(folder / "heads.csv", ["layer", "head", "output_error", "low", "high", "n"], by_head(ok))


def by_head(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Layer, head, mean error and its interval; of the samples of version 1, which have none, nothing."""
    rows = [row for row in rows if "by_head" in row]
    for i, layer in enumerate(rows[0]["layers"] if rows else ()):
        for head in range(len(rows[0]["by_head"]["output_error"][i])):
            errors = [row["by_head"]["output_error"][i][head] for row in rows]
            spread = interval(errors, (0.0, inf))
            ends = [None, None] if spread is None else [round(end, DIGITS) for end in (spread.low, spread.high)]
            yield [layer, head, round(fsum(errors) / len(errors), DIGITS), *ends, len(errors)]


def read_prompts(file: Path, on_bad_row: str) -> Rows:
    """The lines of a JSONL file, each with a `text` or a `prompt`; those with an `id` have different ones."""
    is_new = new_row(["text", "prompt"])

    def check(row: Mapping[str, Any]) -> None:
        if row.get("continuation") is not None:
            check_text(row, "continuation")
        is_new(row)

    return read_rows(file, {}, on_bad_row, check=check)


class Comparison:
    """Compares each variant with exact attention of its own queries, and with full attention's next tokens."""

    def __init__(
        self, truth: Trace, rows: Sequence[SelectiveAttention], n_steps: int, params: Params,
        sampling: Sampling | None = None, is_own: bool = False,
    ) -> None:  # fmt: skip
        """`sampling` is what drafts are drawn by; `is_own` says whether full attention wrote what is fed."""
        self.truth, self.rows, self.params = truth, rows, params
        self.sampling, self.is_own = sampling or Sampling(), is_own
        self.layers = list(truth.shape.attention_layers)
        shape, n = truth.shape, len(rows)
        self.by_layer = {name: torch.zeros(len(self.layers), n_steps, n, dtype=torch.float64) for name in BY_LAYER}
        self.by_head = torch.zeros(len(self.layers), n, shape.h, dtype=torch.float64)  # sums over the steps
        self.by_step = {name: torch.zeros(n_steps, n, dtype=torch.float64) for name in BY_STEP}
        self.step = 0
        # Every variant's own K and V of the fed tokens: a method may drop them, exact attention needs them.
        self.fed = {
            layer: [truth.keys(layer).new_empty(n, shape.h_kv, n_steps, shape.d_h) for _ in "kv"]
            for layer in self.layers
        }

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        places, rows = variants(order, len(self.rows))
        keys, values = self.fed[layer]
        keys[rows, :, self.step] = k[places, :, 0]
        values[rows, :, self.step] = v[places, :, 0]
        now = slice(self.step + 1)
        logits, exact = exact_attention(
            q[places], self.truth.keys(layer), self.truth.values(layer), keys[rows][:, :, now], values[rows][:, :, now],
            self.truth.softmax[layer],
        )  # fmt: skip
        seen = torch.stack([self.rows[row].store.attended(layer) for row in rows]).to(q.device)
        i, s = self.layers.index(layer), self.truth.s_prompt
        mass = (logits.softmax(-1) * seen).sum(-1).mean(-1)
        figures = {
            "recall": torch.stack(
                [recall(x[:, :s], y[:, :s], self.params.k) for x, y in zip(logits, seen, strict=True)]
            ),
            "mass": mass,
            "output_error": relative_error(out[places].flatten(1), exact.flatten(1)),
        }
        for name, each in figures.items():
            self.by_layer[name][i, self.step, rows] = each.double().cpu()
        self.by_head[i, rows] += relative_error(out[places, :, 0], exact).double().cpu()

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        assert len(self.rows) in order, "there is no row of full attention: the task has to say wants_full"
        places, rows = variants(order, len(self.rows))
        guesses = logits.log_softmax(-1)
        full, own = guesses[list(order).index(len(self.rows))], guesses[places]
        # A probability that underflows to 0 has the log -inf, and adds nothing.
        kl = torch.where(full.exp() > 0, full.exp() * (full - own), 0.0).sum(-1).clamp(min=0)
        self.by_step["kl"][self.step, rows] = kl.double().cpu()
        self.by_step["agreement"][self.step, rows] = (own.argmax(-1) == full.argmax(-1)).double().cpu()
        p, q = chances(full, self.sampling), chances(own, self.sampling)
        self.by_step["alpha"][self.step, rows] = alphas(p, q).double().cpu()
        self.step += 1

    def outcomes(self) -> list[Outcome]:
        return [self._outcome(i, row) for i, row in enumerate(self.rows)]

    def _outcome(self, i: int, row: SelectiveAttention) -> Outcome:
        lost = self.by_step["kl"][:, i].isnan().nonzero()
        if len(lost):
            return Outcome(0.0, {}, lost_at=int(lost[0]) + 1)
        skipped = self.params.skip_layers
        left_out = set(row.skipped if skipped is None else skipped)
        # A method that leaves every layer whole is judged on all of them.
        counted = [j for j, layer in enumerate(self.layers) if layer not in left_out]
        counted = counted or list(range(len(self.layers)))
        by_layer = {name: each[:, :, i].mean(1) for name, each in self.by_layer.items()}
        by_step = {name: each[:, i] for name, each in self.by_step.items()}
        measures: dict[str, float | None] = {name: each[counted].mean().item() for name, each in by_layer.items()}
        score = min(1.0, measures["recall"] or 0.0)
        measures |= {name: by_step[name].mean().item() for name in ("kl", "agreement")}
        taken, more = self._taken(by_step["alpha"], by_step["agreement"].bool().tolist())
        fields = {
            "steps": self.step,
            "measures": {
                name: None if value is None else round(value, DIGITS) for name, value in (measures | taken).items()
            },
            "layers": self.layers,
            "layers_skipped": sorted(left_out & set(self.layers)),
            "by_layer": {name: rounded(each) for name, each in by_layer.items()},
            "by_head": {"output_error": [rounded(each) for each in self.by_head[:, i] / self.step]},
            "by_step": {
                "recall": rounded(self.by_layer["recall"][counted, :, i].mean(0)),
                **{name: rounded(each) for name, each in by_step.items()},
            },
        }
        return Outcome(round(score, DIGITS), fields | more)

    def _taken(self, alpha: Tensor, agrees: Sequence[bool]) -> tuple[dict[str, float | None], dict[str, Any]]:
        """Measures and columns of what full attention would take of drafts; None where the feed has no whole draft."""
        lengths = self.params.draft
        measures: dict[str, float | None] = {"acceptance": alpha.mean().item()}
        measures |= {f"expected_length_{gamma}": expected_length(alpha, gamma) for gamma in lengths}
        if not self.sampling.is_greedy:
            return measures, {}
        counts = {gamma: drafts(agrees, gamma) for gamma in lengths}
        measures |= {f"rate_{gamma}": each.rate for gamma, each in counts.items()}
        measures |= {f"greedy_length_{gamma}": each.length for gamma, each in counts.items()}
        by_position = {str(gamma): each.per_position for gamma, each in counts.items()}
        return measures, {"forced": not self.is_own, "per_position": by_position}


def variants(order: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    """Places in the batch that hold one of the first `n` rows, and which row each of them is."""
    places = [place for place, row in enumerate(order) if row < n]
    return places, [order[place] for place in places]


def rounded(values: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]


def exact_attention(
    q: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Attention of every row over one prompt and its own later tokens, in float32.

    q (n, h, 1, d_h); keys, values (1, h_kv, s, d_h), the same for all rows; own_k, own_v (n, h_kv, t, d_h).
    Logits (n, h, s + t), and the output (n, h, d_h), of which a sink takes its share.
    """
    n, _, _, d_h = q.shape
    h_kv, s = keys.shape[1], keys.shape[2]
    grouped = q.float().reshape(n, h_kv, -1, d_h)  # (n, h_kv, g, d_h)
    by_head = grouped.transpose(0, 1).flatten(1, 2)  # (h_kv, n * g, d_h): the prompt is read once for all rows
    on_prompt = (by_head @ keys[0].float().mT).unflatten(1, (n, -1)).transpose(0, 1)
    logits = softmax.bent(torch.cat([on_prompt, grouped @ own_k.float().mT], -1))  # (n, h_kv, g, s + t)
    weights = softmax.weights(logits, (h_kv, -1))
    on_prompt = weights[..., :s].transpose(0, 1).flatten(1, 2) @ values[0].float()
    out = on_prompt.unflatten(1, (n, -1)).transpose(0, 1) + weights[..., s:] @ own_v.float()
    return logits.flatten(1, 2), out.flatten(1, 2)


def recall(logits: Tensor, seen: Tensor, k: int | None) -> Tensor:
    """The share of the k tokens with the largest logits (h, s) that a head has `seen` (h, s), as a mean over heads.

    Without k, a head is compared with as many tokens as it has seen. Among equal logits at the border, seen ones win.
    """
    h, s = logits.shape
    counts = seen.sum(-1).clamp(1, s) if k is None else torch.full((h,), min(k, s), device=seen.device)
    largest, smallest = int(counts.max()), int(counts.min())
    if smallest == s:
        return seen.float().mean()
    top = logits.topk(largest, sorted=smallest < largest).values
    if smallest < largest:
        border = top.gather(-1, counts.unsqueeze(-1) - 1)
    else:
        border = top.amin(-1, keepdim=True)
    above = logits > border
    certain = (above & seen).sum(-1)
    tied = ((logits == border) & seen).sum(-1)
    hits = certain + torch.minimum(tied, counts - above.sum(-1))
    return (hits / counts).mean()


def relative_error(out: Tensor, exact: Tensor) -> Tensor:
    """|out - exact| / |exact| over the last dimension."""
    norm = exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (out.float() - exact).norm(dim=-1) / norm
