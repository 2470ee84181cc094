"""What is measured of an engine: the terms of `vllm bench serve`, by its formulas, and how requests are sent."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.serving.measure import Load, Reply, Request, bench, drive, percentiles
from kvbench.tasks.serving.traces import read_trace
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

REPLIES = [
    Reply(Request("a", range(10), 3, 0.0), [1, 2, 3], [0.5, 0.75, 1.25]),
    Reply(Request("b", range(20), 2, 1.0), [1, 2], [1.0, 1.5], queued_s=0.5),
    Reply(Request("c", range(30), 1, 2.25), [1], [0.25]),
]


def test_percentiles_of_one_and_of_many() -> None:
    assert percentiles([2.0]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0} and percentiles([]) == {}
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_figures_are_those_of_a_hand() -> None:
    """Three requests within 4 s: tokens come at 0.5, 0.75, 1.25; 2.5, 3.0; 2.5."""
    found = bench(REPLIES, 4.0, Load(goodput={"ttft": 500, "tpot": 375}))
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (3, 60, 6)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (
        0.75,
        1.5,
        16.5,
    )
    assert found["request_goodput"] == 0.5  # a is just within both, b's first token is late, c has no tpot
    assert found["max_output_tokens_per_s"] == 2 and found["max_concurrent_requests"] == 2
    assert (found["mean_ttft_ms"], found["median_ttft_ms"]) == (pytest.approx(1750 / 3), 500)
    assert (found["mean_tpot_ms"], found["std_tpot_ms"]) == (437.5, 62.5)
    assert (found["mean_itl_ms"], found["median_itl_ms"]) == (pytest.approx(1250 / 3), 500)
    assert (found["median_e2el_ms"], found["p99_e2el_ms"]) == (1250, pytest.approx(1495))
    assert "median_client_queue_time_ms" not in found


def test_without_a_limit_there_is_no_goodput_and_each_limit_counts() -> None:
    assert bench(REPLIES, 4.0, Load())["request_goodput"] is None
    for limits, n in (({"e2el": 300}, 1), ({"e2el": 1250}, 2), ({"tpot": 400}, 2), ({"ttft": 999, "e2el": 1000}, 1)):
        assert bench(REPLIES, 4.0, Load(goodput=limits))["request_goodput"] == n / 4


def test_where_clients_wait_their_queue_is_told_apart() -> None:
    found = bench(REPLIES, 4.0, Load(max_concurrency=2))
    assert found["mean_client_queue_time_ms"] == pytest.approx(500 / 3)
    assert found["p99_e2el_including_client_queue_ms"] == pytest.approx(1985)


NO_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is in an environment of its own: make setup-serving"
)


@NO_VLLM
@pytest.mark.serving
@pytest.mark.filterwarnings("ignore")
def test_figures_are_those_of_vllm_s_own_function_short() -> None:
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput  # pyright: ignore[reportMissingImports]
    from vllm.benchmarks.serve import calculate_metrics  # pyright: ignore[reportMissingImports]

    drawn, some = random.Random(0), [*REPLIES]
    for i in range(200):
        gaps = [drawn.expovariate(4) for _ in range(drawn.randint(1, 40))]
        times = [sum(gaps[: k + 1]) for k in range(len(gaps))]
        one = Request(f"{i}", range(drawn.randint(1, 900)), len(gaps), drawn.uniform(0, 30))
        some.append(Reply(one, [0] * len(gaps), times, queued_s=drawn.choice([0.0, drawn.random()])))
    limits = {"ttft": 300.0, "tpot": 260.0, "e2el": 6000.0}
    outputs = [
        RequestFuncOutput(
            success=True, latency=one.e2el_s, output_tokens=len(one.ids), ttft=one.ttft_s, start_time=one.sent_s,
            itl=[after - before for before, after in zip(one.times, one.times[1:], strict=False)],
            prompt_len=len(one.request.ids),
        )
        for one in some
    ]  # fmt: skip
    theirs, _ = calculate_metrics([], outputs, 50.0, None, [90.0, 99.0], limits)
    ours = bench(some, 50.0, Load(goodput=limits))
    assert 0 < ours["request_goodput"] < ours["request_throughput"]
    same = ("completed", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
    for name in (*same, "max_output_tokens_per_s", "max_concurrent_requests"):
        assert ours[name] == pytest.approx(getattr(theirs, name)), name
    assert (ours["total_input_tokens"], ours["total_output_tokens"]) == (theirs.total_input, theirs.total_output)
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std"):
            assert ours[f"{kind}_{name}_ms"] == pytest.approx(getattr(theirs, f"{kind}_{name}_ms")), (kind, name)
        for p, value in getattr(theirs, f"percentiles_{name}_ms"):
            assert ours[f"p{p:.0f}_{name}_ms"] == pytest.approx(value), (p, name)


@NO_VLLM
@pytest.mark.serving
@pytest.mark.filterwarnings("ignore")
def test_traces_are_read_as_vllm_reads_them_short(tmp_path: Path) -> None:
    """Times and lengths; its text is of drawn tokens, and of BurstGPT it has no times."""
    from vllm.benchmarks.datasets.datasets import (  # pyright: ignore[reportMissingImports]
        BurstGPTDataset,
        TimedTrace,
    )

    path = tmp_path / "mooncake.jsonl"
    keys = "timestamp", "input_length", "output_length", "hash_ids"
    rows = [(0, 1100, 8, [0, 1, 2]), (250, 2048, 4, [0, 1, 3, 4]), (1750, 700, 90, [5, 6])]
    path.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    words = {f"timed_trace_label_{name}": name for name in keys}
    trace = TimedTrace(
        dataset_path=f"{path}",
        random_seed=0,
        timed_trace_chunk_hash_size=512,
        timed_trace_sec_multiplier=0.001,
        **words,
    )
    theirs = trace.sample(tiny_tokenizer(None, adds_bos=True), 3)
    ours = read_trace(path).arrivals
    assert [(one.at_s, one.n_prompt, one.n_new) for one in ours] == [
        (one.timestamp, one.prompt_len, one.expected_output_len) for one in theirs
    ]
    for i, j in combinations(range(3), 2):
        n = sum(size for _, size in set(ours[i].blocks) & set(ours[j].blocks))
        assert theirs[i].prompt[:n] == theirs[j].prompt[:n] and theirs[i].prompt[n] != theirs[j].prompt[n]
    path = tmp_path / "burst.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path.write_text(
        f"{header}\n1,GPT-4,472,18,490,x\n2,ChatGPT,1087,230,1317,x\n3,GPT-4,417,0,417,x\n4,GPT-4,360,7,367,x\n"
    )
    rows = BurstGPTDataset(dataset_path=f"{path}", random_seed=0).data.values.tolist()
    assert [(row[2], row[3]) for row in rows] == [(one.n_prompt, one.n_new) for one in read_trace(path).arrivals]


@dataclass
class Running:
    request_id: str
    n_new: int
    num_preemptions: int = 0
    n_said: int = 0


@dataclass
class Line:
    """An engine whose steps take a second and say a token of each request that runs."""

    now: float = 0.0
    asked: list[tuple[str, float]] = field(default_factory=list)  # names, and when they were sent
    running: list[Running] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)  # requests that had been asked before the cache was emptied

    def add_request(self, name: str, prompt: Any, n_new: int) -> None:
        self.asked.append((name, self.now))
        self.running.append(Running(name, n_new))

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.now += 1
        said = list[Any]()
        for one in self.running:
            one.n_said += 1
            outputs = [SimpleNamespace(token_ids=[0] * one.n_said)]
            said.append(SimpleNamespace(request_id=one.request_id, outputs=outputs, num_cached_tokens=16))
            said[-1].finished = one.n_said == one.n_new
        self.running = [one for one in self.running if one.n_said < one.n_new]
        return said

    def pause(self, seconds: float) -> None:
        self.now += seconds

    @property
    def engine(self) -> Any:
        pool = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=11))
        scheduler = SimpleNamespace(kv_cache_manager=pool, requests={}, running=self.running)
        llm = SimpleNamespace(reset_prefix_cache=lambda: self.resets.append(len(self.asked)))
        return SimpleNamespace(core=self, scheduler=scheduler, n_free=10, params=lambda n_new: n_new, llm=llm)


def driven(monkeypatch: pytest.MonkeyPatch, load: Load, requests: Sequence[Request]) -> tuple[Line, list[Reply], Any]:
    made = Line()
    monkeypatch.setattr("kvbench.serving.measure.perf_counter", lambda: made.now)
    monkeypatch.setattr("kvbench.serving.measure.sleep", made.pause)
    replies, figures = drive(made.engine, requests, load)
    return made, replies, figures


def test_requests_are_sent_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [Request("a", range(40), 3, 0.0), Request("b", range(40), 2, 0.5), Request("c", range(40), 2, 9.0)]
    made, replies, figures = driven(monkeypatch, Load(), some)
    assert made.asked == [("a", 0.0), ("b", 1.0), ("c", 9.0)]
    assert [reply.times for reply in replies] == [[1, 2, 3], [1.5, 2.5], [1, 2]]  # b came within a step
    assert [reply.queued_s for reply in replies] == [0, 0, 0]
    assert (figures.prompt_tokens_cached, figures.prompt_tokens_computed, figures.steps) == (48, 72, 5)
    assert figures.bench["duration"] == 11 and figures.bench["max_concurrent_requests"] == 2


def test_a_closed_loop_has_so_many_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [Request(name, range(4), n, at) for name, n, at in (("a", 2, 0), ("b", 4, 0), ("c", 3, 0), ("d", 1, 4.5))]
    made, replies, figures = driven(monkeypatch, Load(max_concurrency=2), some)
    assert made.asked == [("a", 0.0), ("b", 0.0), ("c", 2.0), ("d", 5.0)]
    assert [reply.queued_s for reply in replies] == [0, 0, 2, 0]  # a place was free as d came
    assert [reply.ttft_s for reply in replies] == [1, 1, 1, 1.5] and replies[2].e2el_s == 3
    assert figures.bench["p99_client_queue_time_ms"] == pytest.approx(1940)


def test_warm_ups_are_not_measured_and_leave_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [Request("a", range(4), 2, 3.0), Request("b", range(4), 2, 3.0)]
    made, replies, figures = driven(monkeypatch, Load(max_concurrency=2, warmups=3), some)
    assert [name for name, _ in made.asked] == ["warmup-0", "warmup-1", "warmup-2", "a", "b"] and made.resets == [3]
    assert figures.requests == 2 and [reply.ttft_s for reply in replies] == [1, 1]
