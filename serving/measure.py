"""Drives an engine with a trace of requests (`drive`), and measures it (`Figures`, `bench`).

The engine is in this process, and is asked step by step: after each step its pool and its queues are looked at. What
clients see is measured in the terms of `vllm bench serve`, by its formulas.

Not here: requests (`tasks/serving/`), folders and results (`serving/run.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter, sleep
from typing import Any

import numpy as np

from kvbench.serving.adapter.front import Engine

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Request:
    """A prompt to answer, and when it arrives."""

    name: str
    ids: Sequence[int]
    n_new: int
    at_s: float = 0.0


@dataclass(frozen=True)
class Load:
    """How clients send requests, and what they call good."""

    max_concurrency: int | None = None  # requests that they have under way at once
    warmups: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict[str, float])  # limits in ms of ttft, tpot and e2el


@dataclass
class Reply:
    """An engine's answer to a request, and when its tokens came."""

    request: Request
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each token, in seconds after the request was sent
    queued_s: float = 0.0  # between arrival and being sent, while clients had as many under way as they may
    n_cached: int = 0  # tokens of the prompt that the prefix cache had

    @property
    def ttft_s(self) -> float:
        return self.times[0]

    @property
    def tpot_s(self) -> float | None:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def e2el_s(self) -> float:
        return self.times[-1]

    @property
    def sent_s(self) -> float:
        return self.request.at_s + self.queued_s

    def is_good(self, limits: Mapping[str, float]) -> bool:
        """Whether it keeps all limits; an answer of one token has a tpot of 0."""
        found = {"ttft": self.ttft_s, "tpot": self.tpot_s or 0.0, "e2el": self.e2el_s}
        return all(found[name] <= limit / 1000 for name, limit in limits.items())


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
    prompt_tokens_cached: int  # that the prefix cache had
    prompt_tokens_computed: int  # all others; those of a preempted request once
    bench: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} if values else {}


def bench(replies: Sequence[Reply], seconds: float, load: Load) -> dict[str, Any]:
    """What `vllm bench serve --save-result` calls by these names."""
    n_in, n_out = (sum(map(len, each)) for each in ([one.request.ids for one in replies], [one.ids for one in replies]))
    start = min(one.sent_s for one in replies)
    said = Counter(int(one.sent_s + at - start) for one in replies for at in one.times)
    spans = [(int(one.sent_s - start), int(one.sent_s + one.e2el_s - start)) for one in replies]
    open_ = Counter(second for first, last in spans for second in range(first, last + 1))
    good = sum(one.is_good(load.goodput) for one in replies)
    series = {
        "ttft": [one.ttft_s for one in replies],
        "tpot": [one.tpot_s for one in replies if one.tpot_s is not None],
        "itl": [gap for one in replies for gap in np.diff(one.times)],
        "e2el": [one.e2el_s for one in replies],
    }
    if load.max_concurrency is not None:
        series["client_queue_time"] = [one.queued_s for one in replies]
        series["e2el_including_client_queue"] = [one.queued_s + one.e2el_s for one in replies]
    return {
        "duration": seconds,
        "completed": len(replies),
        "total_input_tokens": n_in,
        "total_output_tokens": n_out,
        "request_throughput": len(replies) / seconds,
        "request_goodput": good / seconds if load.goodput else None,
        "goodput": dict(load.goodput),
        "output_throughput": n_out / seconds,
        "total_token_throughput": (n_in + n_out) / seconds,
        "max_output_tokens_per_s": float(max(said.values())),
        "max_concurrent_requests": max(open_.values()),
        "max_concurrency": load.max_concurrency,
    } | {key: value for name, values in series.items() for key, value in spread(name, values).items()}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in ms."""
    some = np.array([*values] or [0.0]) * 1000
    found = {"mean": np.mean(some), "median": np.median(some), "std": np.std(some)}
    found |= {f"p{p}": np.percentile(some, p) for p in PERCENTILES[1:]}
    return {f"{kind}_{name}_ms": float(value) for kind, value in found.items()}


def drive(engine: Engine, requests: Sequence[Request], load: Load | None = None) -> tuple[list[Reply], Figures]:
    """Let requests arrive as they say, until all are answered."""
    load = load or Load()
    core, scheduler = engine.core, engine.scheduler
    if load.warmups:
        first = [replace(requests[0], name=f"warmup-{i}", at_s=0.0) for i in range(load.warmups)]
        drive(engine, first, Load(load.max_concurrency))
        engine.llm.reset_prefix_cache()
    replies = {one.name: Reply(one) for one in requests}
    coming = sorted(requests, key=lambda one: one.at_s)
    most = load.max_concurrency or len(coming)
    n_open, full_until = 0, 0.0  # requests that are under way, and when there last were as many as may be
    n_blocks, free = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1, engine.n_free  # one is the null block
    used: list[int] = []
    at_once, unpreempted, preempted = 0, 0, dict[str, int]()
    begin = perf_counter()
    while coming or core.has_unfinished_requests():
        now = perf_counter() - begin
        while coming and coming[0].at_s <= now and n_open < most:
            one = coming.pop(0)
            replies[one.name].queued_s = max(0.0, full_until - one.at_s)
            core.add_request(one.name, {"prompt_token_ids": [*one.ids]}, engine.params(one.n_new))
            n_open += 1
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
        if n_open == most and load.max_concurrency:
            full_until = now
        for output in outputs:
            reply = replies[output.request_id]
            ids = [*output.outputs[0].token_ids]
            reply.times += [now - reply.sent_s] * (len(ids) - len(reply.ids))
            reply.ids, reply.n_cached = ids, output.num_cached_tokens or 0
            n_open -= output.finished
    seconds = perf_counter() - begin
    done = [*replies.values()]
    n = sum(len(reply.ids) for reply in done)
    cached = sum(reply.n_cached for reply in done)
    return done, Figures(
        len(done), len(used), at_once, unpreempted, sum(preempted.values()), n_blocks, max(used),
        float(np.mean(used)), free - engine.n_free, used, seconds, n, n / seconds,
        percentiles([reply.ttft_s for reply in done]),
        percentiles([reply.tpot_s for reply in done if reply.tpot_s is not None]),
        cached, sum(len(reply.request.ids) for reply in done) - cached, bench(done, seconds, load),
    )  # fmt: skip
