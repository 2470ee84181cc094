"""Expected Attention (Devoto et al., 2025): keep what the queries to come are expected to look at.

Queries before rotary embedding are taken as Gaussian. Their mean and covariance are measured over the prompt, turned
by the average rotation of the next positions, and give each token's expected exp(q·k) in closed form. Softmax over the
prompt makes it a probability, the norm of the token's value weighs it. The question at the prompt's end has no special
part, so the method can compress a text before it is asked about.

Paper     arXiv:2510.00636, 2025; Devoto, Alessio; Expected Attention: KV Cache Compression by Estimating Attention
          from Future Queries Distribution
Symbols   paper or code mu, Sigma, Rbar, F, epsilon = mean, covariance, `average_rotation`, `n_future`, `eps`; ns, N =
          `plan.n_sink`, `plan.cap`; alpha_safeguard = `alpha`.
Budget    `cap` tokens per KV head, mean over a layer: the best `alpha * cap` are each head's own, the others the
          layer's best, whatever their head. `alpha: 1` gives all heads the same.
Per step  moved: nothing; resident: h_kv * (cap + t) tokens at step t, the current one included, and 4 * (h_kv + 1)
          bytes of offsets. While the prompt is read: h * (d_h + d_h²) float32 per layer.
Differs   - float32 from the statistics on; the authors work in the model's dtype, and many scores become equal.
          - queries are turned back from where the model turned them, by the model's own rotation; the authors project
            the hidden states once more. A model that scales its rotary embedding has scaled the queries, and the
            average rotation does not scale them again.
          - the number of kept tokens is an exact floor.
          - `stats: file` is of one model, by the digest of its weights. The authors' files do not say of which.
          - the paper weighs by the value's part in the residual stream, the code and this by the value's norm.
          - no compression while decoding, which the authors' code also has.
Fails     where one query to come decides, such as a question about one line of the text: an average over all queries
          hardly sees it. `eps` stands against probabilities of 1 / s on average: the larger it is, the more the value
          norms alone decide.

A file of statistics: python -m kvbench.methods.dropping.expected_attention MODEL TEXTS FILE, MODEL a folder, hub name
or `embedded`, TEXTS a text of which the first 100 pieces of 1,000 characters are read.
Figures   drop for any question: #E2451A, right, --
"""

import hashlib
import json
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Count, Is, Share, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.observe import Observation, QueryStatistics
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.terminal import say
from kvbench.kernels.scratch import at_once, finer, finest
from kvbench.methods.allocator import Allocator
from kvbench.methods.rules import refuse_cap
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

TENSORS = ("query_mean", "query_cov")  # of a file of statistics: (layers, h, d_h) and (layers, h, d_h, d_h)
LONGEST_HEADER = 1 << 20  # bytes
MAKE = "python -m kvbench.methods.dropping.expected_attention MODEL TEXTS FILE makes one"

Turn = Callable[[Tensor, int | Tensor], Tensor]

CHUNK_BYTES = 1 << 20  # of keys times covariance at a time, while they are in the cache

ROTATIONS = 64  # positions whose rotations are made at a time

N_TEXTS, TEXT_CHARACTERS = 100, 1000  # of a file of statistics, as the authors'


def average_rotation(turn: Turn | None, d_h: int, start: int, n: int, device: torch.device) -> Tensor:
    """Mean over positions `start` to `start + n - 1` of the maps that turn a query there: (d_h, d_h) float32, M q.

    Whatever the model's own rotation is, unit vectors show its map. Without one, queries stay as they are.
    """
    unit = torch.eye(d_h, device=device)
    if turn is None:
        return unit
    total = torch.zeros(d_h, d_h, dtype=finest(device), device=device)
    for positions in torch.arange(start, start + n, device=device).split(ROTATIONS):
        turned = turn(unit[None, :, None].expand(-1, -1, len(positions), -1), positions[None])  # (1, d_h, n, d_h)
        total += turned[0].sum(1, dtype=total.dtype)
    return (total / n).float().T  # a unit vector's image is a column


def refuse_unturned(rotary: str, shape: ModelShape, can_turn: bool) -> None:
    """ConfigError where `method.rotary=model` asks for a rotation that the model does not have."""
    if rotary == "model" and not can_turn:
        raise ConfigError(
            f"the model {shape.name!r} has no rotary positions of the known kind, by which "
            "method.rotary=model could turn its queries; use method.rotary=none"
        )


def rotation_ahead(trace: Trace, layer: int, n: int, rotary: str) -> Tensor:
    """The average over the next positions, the same for all layers that turn alike."""
    refuse_unturned(rotary, trace.shape, trace.turn is not None)
    turn = None if trace.turn is None or rotary != "model" else trace.turn[layer]
    device = trace.device_of(layer)
    return trace.once(
        ("average rotation", n, turn, device),
        lambda: average_rotation(turn, trace.shape.d_h, trace.s_prompt, n, device),
    )


def turned_statistics(statistics: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (h, d_h) and covariance (h, d_h, d_h) of queries after a linear map, from (h, 1 + d_h, d_h) before it."""
    mean, covariance = statistics[:, 0], statistics[:, 1:]
    return mean @ rotation.T, rotation @ covariance @ rotation.T


def expected_logits(mean: Tensor, covariance: Tensor | None, keys: Tensor, scale: float) -> Tensor:
    """Log of the expected exp(scale * q·k) of Gaussian queries (h, d_h): (h, n) float32, for keys (h_kv, n, d_h).

    Keys meet the covariance in chunks: g * n * d_h values at once would be as many as all queries have.
    """
    h_kv, n, d_h = keys.shape
    g = len(mean) // h_kv
    logits = torch.empty(len(mean), n, device=keys.device)
    n_chunk = max(1, at_once(CHUNK_BYTES, keys.device) // (4 * g * d_h))
    for kv_head in range(h_kv):
        heads = slice(kv_head * g, (kv_head + 1) * g)
        for start in range(0, n, n_chunk):
            some = keys[kv_head, start : start + n_chunk].float()  # (chunk, d_h)
            found = (mean[heads] * scale) @ some.T  # (g, chunk)
            if covariance is not None:
                found += (some @ covariance[heads]).mul_(some).sum(-1).mul_(scale**2 / 2)
            logits[heads, start : start + n_chunk] = found
    return logits


def expected_scores(logits: Tensor, values: Tensor, eps: float, value_norm: bool, softmax: Softmax) -> Tensor:
    """Scores of tokens, (1, h_kv, n): expected attention, the group's mean, times the norm of values
    (h_kv, n, d_h)."""
    attention = softmax.weights(logits, (-1,)).unflatten(0, (len(values), -1)).mean(1)  # (h_kv, n)
    if value_norm:
        attention = (attention + eps) * values.float().norm(dim=-1)
    return attention.unsqueeze(0)


class ExpectedAttention(ScoringMethod):
    title = "Expected Attention"
    no_growth = "expects queries behind the context, and behind a feed they are others"
    comparable = "heads"

    @dataclass(frozen=True)
    class Params:
        n_future: Count
        n_sink: Tokens
        eps: Annotated[float, Ge(0), Is("added to probabilities, and 0 or more")]
        alpha: Share
        covariance: bool
        value_norm: bool
        stats: Literal["prompt", "file"]
        stats_file: Path | None
        rotary: Literal["model", "none"]

        def __post_init__(self) -> None:
            if self.stats == "prompt" and self.stats_file is not None:
                raise ConfigError(
                    f"method.stats_file={self.stats_file} has no effect with method.stats=prompt; leave it out or set "
                    "method.stats=file"
                )
            if self.stats == "file" and self.stats_file is None:
                raise ConfigError(
                    f"method.stats=file needs a file of query statistics; add method.stats_file=…, {MAKE}"
                )

    @dataclass(frozen=True)
    class Plan:
        """How many of the prompt's tokens a layer keeps."""

        cap: int  # tokens per KV head, the sinks included
        n_sink: int

    params: Params
    plan: Plan

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        refuse_cap(shape, "Expected Attention has a closed form for exponentials of products alone", "SnapKV")
        if params.stats_file is None:
            return
        wanted = [len(shape.attention_layers), shape.h, shape.d_h]
        header = header_of(params.stats_file)
        for name, sizes in zip(TENSORS, (wanted, [*wanted, shape.d_h]), strict=True):
            found = header[name].get("shape") if isinstance(header.get(name), dict) else None
            if found != sizes:
                raise ConfigError(
                    f"method.stats_file={params.stats_file} has {name} of shape {found}, and {shape.name} has layers, "
                    f"query heads and dimensions {wanted}; use statistics of this model: {MAKE}"
                )

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        refuse_unturned(params.rotary, model.shape, bool(model.n_rotary))
        if params.stats_file is None:
            return
        made_of = (header_of(params.stats_file).get("__metadata__") or {}).get("model_digest")
        if made_of not in model.digests:
            raise ConfigError(
                f"method.stats_file={params.stats_file} was made with the model {made_of} and this is "
                f"{model.digests[0]}; use statistics of this model: {MAKE}"
            )

    @classmethod
    def data_digest(cls, params: Params) -> str | None:
        if params.stats_file is None:
            return None
        with opened(params.stats_file) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        division = Allocator("head_protect", params.alpha)
        return replace(super().traits_of(params), weighs_values=params.value_norm, allocator=division)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        cap = budget.tokens
        return ExpectedAttention.Plan(cap, params.n_sink if params.n_sink < cap else cap // 4)

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return () if params.stats == "file" else (QueryStatistics(plan.n_sink, params.rotary == "model"),)

    def scorer(self) -> Hashable:
        """Budgets that leave room for the same sinks share their scores, and so do all divisions of them."""
        return "expected attention", replace(self.params, alpha=Fraction(0)), self.plan.n_sink

    def scores(self, layer: int) -> Tensor:
        trace, n_sink = self.trace, self.plan.n_sink
        mean, covariance = turned_statistics(self.statistics(layer), self.rotation(layer))
        if not self.params.covariance:
            covariance = None
        logits = expected_logits(mean, covariance, trace.keys(layer)[0, :, n_sink:], trace.softmax[layer].scale)
        values = trace.values(layer)[0, :, n_sink:]
        return expected_scores(logits, values, self.params.eps, self.params.value_norm, trace.softmax[layer])

    def rotation(self, layer: int) -> Tensor:
        return rotation_ahead(self.trace, layer, self.params.n_future, self.params.rotary)

    def statistics(self, layer: int) -> Tensor:
        """Mean and covariance of the queries before rotary embedding, (h, 1 + d_h, d_h)."""
        trace, path = self.trace, self.params.stats_file
        if path is None:
            return trace.observed(QueryStatistics(self.plan.n_sink, self.params.rotary == "model"), layer)
        found = trace.once(("query statistics", path), lambda: read_statistics(path))
        return found[trace.shape.attention_layers.index(layer)].to(trace.device_of(layer))


def header_of(path: Path) -> dict[str, Any]:
    """A safetensors file's header: its tensors and its `__metadata__`."""
    with opened(path) as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        text = file.read(n_bytes) if n_bytes <= LONGEST_HEADER else b""
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ConfigError(f"method.stats_file={path} is no safetensors file of query statistics; {MAKE}")
    return header


def opened(path: Path) -> Any:
    """The file, to be read."""
    try:
        return path.expanduser().open("rb")
    except OSError as error:
        raise ConfigError(
            f"method.stats_file={path} cannot be read: {error.strerror}; give a file of query statistics, {MAKE}"
        ) from None


def read_statistics(path: Path) -> Tensor:
    """A file's statistics, (layers, h, 1 + d_h, d_h) float32."""
    from safetensors.torch import load_file

    tensors = load_file(path.expanduser())
    mean, covariance = (tensors[name].float() for name in TENSORS)
    return torch.cat([mean.unsqueeze(2), covariance], 2)


def pooled(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Statistics of several texts together, (layers, h, 1 + d_h, d_h): of each its number of queries and its own.

    The covariance is divided by one less than the number of queries.
    """
    n = sum(count for count, _ in parts)
    mean = torch.stack([count * finer(one[..., :1, :]) for count, one in parts]).sum(0) / n
    spread = torch.zeros_like(parts[0][1][..., 1:, :], dtype=mean.dtype)
    for count, one in parts:
        off = finer(one[..., :1, :]) - mean
        spread += count * (finer(one[..., 1:, :]) + off.mT @ off)
    return torch.cat([mean, spread / (n - 1)], -2).float()


def text_statistics(model: Model, texts: Sequence[str], n_sink: int) -> tuple[int, Tensor]:
    """Number and `pooled` statistics of the queries of these texts, without the first `n_sink` of each."""
    what = QueryStatistics(n_sink, model.turn is not None)
    parts = []
    for text in texts:
        ids = model.tokenizer.encode(text)
        if len(ids) <= n_sink:
            continue
        with model.hooked():
            trace = prefill(model, ids, [what])
        found = torch.stack([trace.observed(what, layer) for layer in model.shape.attention_layers])
        parts.append((len(ids) - n_sink, found.cpu()))
    if sum(count for count, _ in parts) < 2:
        raise ConfigError(f"the texts have no 2 tokens behind the first {n_sink} of each; give longer ones")
    return sum(count for count, _ in parts), pooled(parts)


def pieces(text: str) -> Iterator[str]:
    """The first texts of a file, each of so many characters."""
    for i in range(min(N_TEXTS, -(-len(text) // TEXT_CHARACTERS))):
        yield text[i * TEXT_CHARACTERS : (i + 1) * TEXT_CHARACTERS]


def main(arguments: Sequence[str], n_sink: int = 4) -> int:
    """Write a file of query statistics for `method.stats_file`."""
    from safetensors.torch import save_file

    from kvbench.engine.checkpoints.load import load

    if len(arguments) != 3 or not Path(arguments[1]).is_file():
        say(
            "usage: python -m kvbench.methods.dropping.expected_attention MODEL TEXTS FILE, MODEL a folder, hub name "
            "or embedded, TEXTS a text file",
            file=sys.stderr,
        )
        return 2
    name, texts, file = arguments[0], Path(arguments[1]), Path(arguments[2])
    try:
        model = load(name, name, dtype="float32")
        n, found = text_statistics(model, [*pieces(texts.read_text())], n_sink)
    except (ConfigError, UnicodeDecodeError) as error:
        say(" ".join(str(error).split()), file=sys.stderr)
        return 2
    tensors: dict[str, Any] = {TENSORS[0]: found[:, :, 0].contiguous(), TENSORS[1]: found[:, :, 1:].contiguous()}
    save_file(tensors, file, {"model_digest": model.digest, "n_queries": str(n), "n_sink": str(n_sink)})
    say(f"{file}: statistics of {n} queries of {name}, digest {model.digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
