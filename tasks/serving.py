"""Requests to a serving engine: prompts of drawn lengths that come when they come, each with a needle to find.

Names       serving
Asks        what a server of many requests gains by a compressed cache
Lengths     any
Answers     as many as are timed
Licence     none needed

A trace of requests is drawn from the seed, or read from a file, so that every method meets the same one. What is
measured is the engine's (`serving/measure.py`); a request's score is the needle's.

Not here: vLLM (`serving/adapter`).
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from kvbench.engine.declared import Count
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_text
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.needle.task import Needle
from kvbench.tasks.needle.task import Params as NeedleParams

KEYS = ("arrival_s", "prompt_tokens", "new_tokens")
DEPTHS = (10.0, 30.0, 50.0, 70.0, 90.0)


@dataclass(frozen=True)
class Params:
    engine: Literal["vllm"]
    rung: Literal["auto", "visible", "pages", "dropping"]
    requests: Count
    lengths: tuple[Annotated[int, Ge(300)], Annotated[int, Ge(300)]]
    n_new: Count
    rate: Annotated[float, Gt(0)] | None
    trace: str | None
    blocks: Count | None
    at_once: Count

    def __post_init__(self) -> None:
        if self.lengths[0] > self.lengths[1]:
            raise ConfigError(f"task.lengths={[*self.lengths]} must be the least and the most tokens of a prompt")


@dataclass(frozen=True)
class Arrival:
    """A request before it is written."""

    at_s: float
    n_prompt: int
    n_new: int


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
        longest = max(one.n_prompt + one.n_new for one in self.arrivals())
        if longest > shape.window:
            raise ConfigError(f"a request of {longest} tokens is more than the {shape.window} of model {shape.name!r}")

    def arrivals(self) -> list[Arrival]:
        """The trace, by arrival."""
        params, drawn = self.params, random.Random(f"serving {self.seed}")
        if params.trace is not None:
            return read_trace(Path(params.trace).expanduser())
        found, now = [], 0.0
        for _ in range(params.requests):
            found.append(Arrival(now, drawn.randint(*params.lengths), params.n_new))
            now += 0.0 if params.rate is None else drawn.expovariate(params.rate)
        return found

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        drawn = random.Random(f"serving's needles {self.seed}")
        made = []
        for i, one in enumerate(self.arrivals()):
            sample = needle(one.n_prompt, drawn.choice(DEPTHS), self.seed + i).samples(tokenizer)[0]
            fields = {"length": one.n_prompt, "arrival_s": one.at_s}
            made.append(replace(sample, id=f"request-{i:04}", max_new_tokens=one.n_new, fields=fields))
        return made

    def score(self, sample: Sample, prediction: str) -> float:
        return needle(1000, 50.0, 0).score(sample, prediction)


def needle(length: int, depth: float, seed: int) -> Needle:
    """A needle's task of one prompt."""
    usual: dict[str, Any] = {
        **{"source": "embedded", "style": "own", "grid": "default", "depth_spacing": "linear", "scorer": "auto"},
        **{"snap": "period", "buffer": 40, "seeds": 1, "needles": 1, "max_new_tokens": None},
        **{"questions": 1, "mode": None, "feed": "compressed", "budget_base": "context"},
    }
    return Needle(NeedleParams(lengths=(length,), depths=(depth,), **usual), None, seed)


def read_trace(path: Path) -> list[Arrival]:
    """Requests from a file of JSON lines."""
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            one = Arrival(float(values[KEYS[0]]), int(values[KEYS[1]]), int(values[KEYS[2]]))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"task.trace={path}, line {number} is no JSON object with {', '.join(KEYS)}") from None
        if one.at_s < 0 or one.n_prompt < 300 or one.n_new < 1:
            raise ConfigError(f"task.trace={path}, line {number} asks for less than 300 tokens, none, or too early")
        found.append(one)
    if not found:
        raise ConfigError(f"task.trace={path} holds no request")
    return sorted(found, key=lambda one: one.at_s)
