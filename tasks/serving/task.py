"""Requests to a serving engine: prompts of drawn lengths that come when they come, each with a needle to find.

Names       serving
Asks        what a server of many requests gains by a compressed cache
Lengths     any
Answers     as many as are timed
Licence     none needed

A trace of requests is drawn from the seed, or read from a file, so that every method meets the same one. What is
measured is the engine's (`serving/measure.py`); a request's score is the needle's. Words and formulas are those of
`vllm bench serve`, but for its first request, which waits a gap, and its last one, which it moves to requests / rate.

Not here: formats of traces (`traces.py`), prompts that share text (`prompts.py`), vLLM (`serving/adapter`).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from kvbench.engine.declared import Count, Index, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.lazy import LazySamples
from kvbench.tasks.needle.task import Needle, exact
from kvbench.tasks.needle.task import Params as NeedleParams
from kvbench.tasks.serving.prompts import Texts
from kvbench.tasks.serving.traces import SHORTEST, Arrival, Trace, read_trace
from kvbench.tasks.texts import digest

DEPTHS = (10.0, 30.0, 50.0, 70.0, 90.0)
OWN = 100  # tokens that a prompt has besides a shared beginning, at least

Length = Annotated[int, Ge(SHORTEST)]
Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class Params:
    engine: Literal["vllm"]
    rung: Literal["auto", "visible", "pages", "dropping"]
    requests: Count
    lengths: tuple[Length, Length]
    n_new: Count
    rate: Positive | None
    burstiness: Positive | Literal["constant"]
    max_concurrency: Count | None
    trace: str | None
    sec_multiplier: Positive | None
    longest: Count | None
    shared: Tokens | None
    warmups: Index
    ttft_ms: Positive | None
    tpot_ms: Positive | None
    e2el_ms: Positive | None
    blocks: Count | None
    at_once: Count
    prefix_caching: bool | None
    async_scheduling: bool | None

    def __post_init__(self) -> None:
        if self.lengths[0] > self.lengths[1]:
            raise ConfigError(f"task.lengths={[*self.lengths]} must be the least and the most tokens of a prompt")

    @property
    def goodput(self) -> Mapping[str, float]:
        """The limits in ms within which a request is good, as `vllm bench serve --goodput` names them."""
        limits = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2el_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def flags(self) -> Mapping[str, bool]:
        """What is asked of vLLM."""
        flags = {"enable_prefix_caching": self.prefix_caching, "async_scheduling": self.async_scheduling}
        return {name: flag for name, flag in flags.items() if flag is not None}


class Serving(Task):
    name = "serving"
    version = 1
    Params = Params
    dataset = "serving"
    data_source = "embedded"
    notes = ("served by vLLM; on a CPU its times say nothing of a GPU's",)

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params, self.seed = params, seed

    def check(self, shape: ModelShape) -> None:
        longest = max(one.n_prompt + one.n_new for one in self.arrivals)
        if longest > shape.window:
            leave = "" if self.params.trace is None else f"; task.longest={shape.window} leaves such requests out"
            raise ConfigError(
                f"a request of {longest} tokens is more than the {shape.window} of model {shape.name!r}{leave}"
            )
        if self.params.trace is not None:
            self.data_digest = digest([Path(self.params.trace).expanduser()])
        if left_out := [f"{n} {why}" for why, n in self.trace.left_out.items() if n]:
            said = f"{len(self.arrivals)} requests of the trace; left out: {', '.join(left_out)}"
            self.notes = (*Serving.notes, said)

    @property
    def arrivals(self) -> list[Arrival]:
        """Requests by arrival."""
        return self.trace.arrivals

    @cached_property
    def trace(self) -> Trace:
        params = self.params
        if params.trace is None:
            found = Trace(drawn_arrivals(params, self.seed), {})
        else:
            found = shortened(read_trace(Path(params.trace).expanduser(), params.sec_multiplier), params)
        if params.shared is None:
            return found
        if any(one.blocks for one in found.arrivals):
            raise ConfigError(f"task.shared={params.shared} is not what the trace's hash_ids say; leave it out")
        return replace(found, arrivals=[sharing(one, params.shared, i) for i, one in enumerate(found.arrivals)])

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        return Requests(self, tokenizer)

    def score(self, sample: Sample, prediction: str) -> float:
        return max(exact(prediction.strip(), reference) for reference in sample.references)


class Requests(LazySamples):
    """The prompts of a trace, in its order."""

    def __init__(self, task: Serving, tokenizer: Any) -> None:
        self.tokenizer, self.seed, self.places = tokenizer, task.seed, task.arrivals
        drawn = random.Random(f"serving's needles {task.seed}")
        self.depths = [drawn.choice(DEPTHS) for _ in self.places]

    @cached_property
    def texts(self) -> Texts:
        return Texts(self.tokenizer, self.seed)

    def sample(self, i: int) -> Sample:
        one, name = self.places[i], f"request-{i:04}"
        if one.blocks:
            made = self.texts.sample(name, one.blocks, one.n_prompt, one.n_new)
        else:
            made = needle(one.n_prompt, self.depths[i], self.seed + i).samples(self.tokenizer)[0]
        fields = {"length": one.n_prompt, "arrival_s": one.at_s}
        return replace(made, id=name, max_new_tokens=one.n_new, fields=fields)


def drawn_arrivals(params: Params, seed: int) -> list[Arrival]:
    """Gaps are of a gamma distribution whose shape is the burstiness."""
    drawn, found, now = random.Random(f"serving {seed}"), list[Arrival](), 0.0
    for _ in range(params.requests):
        found.append(Arrival(now, drawn.randint(*params.lengths), params.n_new))
        if params.rate is not None:
            shape = params.burstiness
            now += 1 / params.rate if shape == "constant" else drawn.gammavariate(shape, 1.0) / (params.rate * shape)
    return found


def shortened(trace: Trace, params: Params) -> Trace:
    """The requests that are no longer than is asked for."""
    if (longest := params.longest) is None:
        return trace
    kept = [one for one in trace.arrivals if one.n_prompt + one.n_new <= longest]
    if not kept:
        raise ConfigError(f"task.longest={longest} leaves no request of task.trace={params.trace}")
    return Trace(kept, {**trace.left_out, f"of more than {longest} tokens": len(trace.arrivals) - len(kept)})


def sharing(one: Arrival, n: int, i: int) -> Arrival:
    """The request with a beginning that all share, and what is its own behind it."""
    own = one.n_prompt - n
    if own < OWN:
        raise ConfigError(f"task.shared={n} leaves {own} tokens of {one.n_prompt} to a prompt itself, fewer than {OWN}")
    return replace(one, blocks=(("shared", n), (f"request {i}", own)))


def needle(length: int, depth: float, seed: int) -> Needle:
    """A needle's task of one prompt."""
    usual: dict[str, Any] = {
        **{"source": "embedded", "style": "own", "grid": "default", "depth_spacing": "linear", "scorer": "auto"},
        **{"snap": "period", "buffer": 40, "seeds": 1, "needles": 1, "max_new_tokens": None},
        **{"questions": 1, "mode": None, "feed": "compressed", "budget_base": "context"},
    }
    return Needle(NeedleParams(lengths=(length,), depths=(depth,), **usual), None, seed)
