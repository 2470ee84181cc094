"""Drives an engine with a trace of requests (`drive`), and measures it (`Figures`).

The engine is in this process, and is asked step by step: after each step its pool and its queues are looked at.

Not here: requests (`tasks/serving.py`), folders and results (`serving/run.py`).
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter, sleep
from typing import Any

from kvbench.serving.adapter.front import Engine


@dataclass(frozen=True)
class Request:
    """A prompt to answer, and when it arrives."""

    name: str
    ids: Sequence[int]
    n_new: int
    at_s: float = 0.0


@dataclass
class Reply:
    """An engine's answer to a request, and when its tokens came."""

    request: Request
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each token, in seconds after the request's arrival

    @property
    def ttft_s(self) -> float:
        return self.times[0]

    @property
    def tpot_s(self) -> float | None:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None


@dataclass(frozen=True)
class Figures:
    """Figures of one trace in one engine. Times are wall times of this machine."""

    requests: int
    steps: int
    at_once: int  # requests that ran at once, most
    at_once_unpreempted: int  # the same before the first preemption
    preemptions: int
    blocks: int  # of the pool
    blocks_most: int  # in use at once
    blocks_mean: float  # over steps
    blocks_left: int  # in use once all are answered: 0, or something leaks
    blocks_over_time: list[int]  # step by step
    seconds: float
    tokens: int
    tokens_per_s: float
    ttft_s: dict[str, float]  # p50, p90, p99
    tpot_s: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    several = [*values] * 2 if len(values) == 1 else values
    if not several:
        return {}
    cuts = statistics.quantiles(several, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def drive(engine: Engine, requests: Sequence[Request]) -> tuple[list[Reply], Figures]:
    """Let requests arrive as they say, until all are answered."""
    core, scheduler = engine.core, engine.scheduler
    replies = {one.name: Reply(one) for one in requests}
    coming = sorted(requests, key=lambda one: one.at_s)
    n_blocks, free = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1, engine.n_free  # one is the null block
    used: list[int] = []
    at_once, unpreempted, preempted = 0, 0, dict[str, int]()
    begin = perf_counter()
    while coming or core.has_unfinished_requests():
        now = perf_counter() - begin
        while coming and coming[0].at_s <= now:
            one = coming.pop(0)
            core.add_request(one.name, {"prompt_token_ids": [*one.ids]}, engine.params(one.n_new))
        if not core.has_unfinished_requests():
            sleep(max(0.0, coming[0].at_s - now))
            continue
        outputs = core.step()
        now = perf_counter() - begin
        for request in scheduler.requests.values():
            preempted[request.request_id] = request.num_preemptions
        running = len(scheduler.running)
        at_once = max(at_once, running)
        if not any(preempted.values()):
            unpreempted = max(unpreempted, running)
        used.append(n_blocks - engine.n_free)
        for output in outputs:
            reply = replies[output.request_id]
            ids = [*output.outputs[0].token_ids]
            reply.times += [now - reply.request.at_s] * (len(ids) - len(reply.ids))
            reply.ids = ids
    seconds = perf_counter() - begin
    done = [*replies.values()]
    n = sum(len(reply.ids) for reply in done)
    return done, Figures(
        len(done), len(used), at_once, unpreempted, sum(preempted.values()), n_blocks, max(used),
        statistics.fmean(used), free - engine.n_free, used, seconds, n, n / seconds,
        percentiles([reply.ttft_s for reply in done]),
        percentiles([reply.tpot_s for reply in done if reply.tpot_s is not None]),
    )  # fmt: skip
