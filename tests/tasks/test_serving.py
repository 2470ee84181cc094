"""A trace of requests: the same for every method, drawn or from a file, and prompts that share text."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.evals.settings import from_words
from kvbench.tasks.base import Sample
from kvbench.tasks.serving.task import Serving
from kvbench.tasks.serving.traces import OURS, SHORTEST
from kvbench.tests.task_conformance import SHAPE
from kvbench.tests.tiny_tokenizer import tiny_tokenizer


def task(*words: str, seed: int = 0) -> Serving:
    params: Any = build_params(Serving, from_words(["task=serving", *words]).task.params, "task")
    return Serving(params, None, seed)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(None, adds_bos=True)


def test_a_trace_is_drawn_from_the_seed() -> None:
    drawn = task("task.rate=4", "task.requests=50").arrivals
    assert drawn == task("task.rate=4", "task.requests=50").arrivals
    assert drawn != task("task.rate=4", "task.requests=50", seed=1).arrivals
    times = [one.at_s for one in drawn]
    assert times == sorted(times) and times[0] == 0 and 5 < times[-1] < 30  # 50 requests at 4 per second
    assert {500 <= one.n_prompt <= 1000 for one in drawn} == {True} and len({one.n_prompt for one in drawn}) > 30


def test_drawn_traces_are_those_of_version_1() -> None:
    found = task("task.rate=4", "task.requests=3").arrivals
    times = (0.0, 0.6504472081202213, 0.9156753920805596)
    assert [(one.at_s, one.n_prompt, one.blocks) for one in found] == [
        *zip(times, (967, 661, 521), [()] * 3, strict=True)
    ]


def test_without_a_rate_all_are_there_at_once() -> None:
    assert {one.at_s for one in task().arrivals} == {0.0}


def gaps(burstiness: str) -> list[float]:
    found = task("task.rate=4", "task.requests=2000", f"task.burstiness={burstiness}").arrivals
    return [after.at_s - before.at_s for before, after in pairwise(found)]


def test_gaps_are_as_even_as_burstiness_says() -> None:
    """A gamma distribution's standard deviation is its mean divided by the root of its shape."""
    for burstiness in (0.25, 1, 4):
        drawn = gaps(f"{burstiness}")
        assert fmean(drawn) == pytest.approx(0.25, rel=0.1)
        assert stdev(drawn) / fmean(drawn) == pytest.approx(burstiness**-0.5, rel=0.1)
    assert {round(gap, 9) for gap in gaps("constant")} == {0.25}


def written(folder: Path, rows: list[Any], header: str | None = None) -> str:
    path = folder / ("trace.jsonl" if header is None else "trace.csv")
    lines = [json.dumps(row) for row in rows] if header is None else [header, *rows]
    path.write_text("\n".join(lines) + "\n")
    return f"task.trace={path}"


def read(*words: str) -> list[tuple[float, int, int]]:
    return [(one.at_s, one.n_prompt, one.n_new) for one in task(*words).arrivals]


def test_a_trace_is_read_from_a_file_by_arrival(tmp_path: Path) -> None:
    rows = [(2.5, 400, 8), (0.5, 300, 16)]
    trace = written(tmp_path, [dict(zip(OURS, row, strict=True)) for row in rows])
    assert read(trace) == [(0.5, 300, 16), (2.5, 400, 8)]


def timed(at: float, n: int, hashes: list[int] | None = None) -> dict[str, Any]:
    own = {} if hashes is None else {"hash_ids": hashes}
    return {"timestamp": at, "input_length": n, "output_length": 20} | own


def test_mooncake_s_times_are_ms_and_its_hashes_blocks_of_512_tokens(tmp_path: Path) -> None:
    trace = written(tmp_path, [timed(3000, 1100, [0, 1, 2]), timed(4500, 1024, [0, 1])])
    first, second = task(trace).arrivals
    assert (first.at_s, second.at_s, first.n_new) == (0.0, 1.5, 20)
    assert first.blocks == (("hash 0", 512), ("hash 1", 512), ("hash 2", 76))
    assert second.blocks == first.blocks[:2]


def test_vllm_s_timed_traces_have_seconds_and_blocks_of_16_or_none(tmp_path: Path) -> None:
    first, second = task(written(tmp_path, [timed(1.5, 330, [*range(21)]), timed(2, 480, [*range(30)])])).arrivals
    assert (first.at_s, second.at_s) == (0.0, 0.5) and sum(n for _, n in first.blocks) == 330
    assert first.blocks[:20] == second.blocks[:20] and first.blocks[20] == ("hash 20", 10)
    trace = written(tmp_path, [timed(1, 330), timed(3, 480)])
    assert read(trace) == [(0.0, 330, 20), (2.0, 480, 20)]
    assert read(trace, "task.sec_multiplier=0.25")[1] == (0.5, 480, 20)


def test_what_hashes_do_not_cover_is_a_prompt_s_own(tmp_path: Path) -> None:
    first, second = task(written(tmp_path, [timed(0, 1100, [0, 1]), timed(0, 1100, [0, 1])])).arrivals
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert first.blocks[2][1] == 76


def test_azure_s_dates_begin_with_the_first_request(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:05.4799600,3180,8"]
    assert read(written(tmp_path, rows, "TIMESTAMP,ContextTokens,GeneratedTokens")) == [(0, 4808, 10), (1.5, 3180, 8)]
    rows = ["2024-05-10 00:00:00.5+00:00,1452,3", "2024-05-10 00:00:01+00:00,505,9"]
    assert read(written(tmp_path, rows, "TIMESTAMP,ContextTokens,GeneratedTokens")) == [(0, 1452, 3), (0.5, 505, 9)]


def test_of_burstgpt_answered_rows_of_gpt_4_are_read_as_vllm_does(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = ["5,GPT-4,472,18,490,Conversation log", "45,ChatGPT,1087,230,1317,Conversation log"]
    rows += ["118,GPT-4,417,0,417,Conversation log", "185,GPT-4,1360,77,1437,API log", "190,GPT-4,20,7,27,API log"]
    made = task(written(tmp_path, rows, header))
    made.check(SHAPE)
    assert [(one.at_s, one.n_prompt, one.n_new) for one in made.arrivals] == [(0, 472, 18), (180, 1360, 77)]
    assert made.notes[-1] == (
        "2 requests of the trace; left out: 2 of another model than GPT-4, or without an answer, "
        f"1 of less than {SHORTEST} tokens, or without an answer"
    )


def test_long_requests_are_left_out_and_counted_or_refused_never_cut(tmp_path: Path) -> None:
    trace = written(tmp_path, [timed(0, 1000, [0, 1]), timed(10, 2_000_000, [*range(3907)])])
    with pytest.raises(
        ConfigError, match=r"a request of 2000020 tokens .* task.longest=1048576 leaves such requests out"
    ):
        task(trace).check(SHAPE)
    made = task(trace, "task.longest=1020")
    made.check(SHAPE)
    assert len(made.arrivals) == 1 and "1 of more than 1020 tokens" in made.notes[-1] and made.data_digest
    with pytest.raises(ConfigError, match=r"task.longest=1019 leaves no request"):
        task(trace, "task.longest=1019").check(SHAPE)


MOONCAKE = '{"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"arrival_s": 0}', "line 1 is no JSON object with arrival_s, prompt_tokens, new_tokens, or with timestamp"),
        ('{"arrival_s": 0, "prompt_tokens": 20, "new_tokens": 4}', "line 1 asks for less than 300 tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 400, "new_tokens": 4}\n\n{"arrival_s": "no"}', "line 3 is no JSON object"),
        ('{"prompt": "Why?", "output_tokens": 10}', "line 1 is no JSON object"),
        ("\n", "holds no request"),
        (MOONCAKE + "{", "line 2 is no JSON object with timestamp, input_length, output_length"),
        (MOONCAKE.replace("1024", "3000"), "line 1 has 2 hash_ids for 3000 tokens; a hash is of 512 or 16 tokens"),
        (MOONCAKE + MOONCAKE.replace("1024", "32"), "line 2 has 2 hash_ids for 32 tokens"),
        (MOONCAKE.replace('"timestamp": 0', '"timestamp": NaN'), "line 1 is no JSON object"),
        (MOONCAKE.replace("1024", "100").replace("[1, 2]", "[1]"), "holds no request that can be served"),
        ("when,how much\n", "line 1 is no header of columns with TIMESTAMP, ContextTokens, GeneratedTokens, or with"),
        (AZURE + "2023-11-16 18:17:03,4808,10\n2023-11-16,many,1\n", "line 3 is no row with TIMESTAMP, ContextTokens"),
        (AZURE + "2023-11-16 18:17:03,4808\n", "line 2 is no row"),
        (AZURE + "\ufffd\0", "line 2 is no line of text in UTF-8"),
    ],
)
def test_a_damaged_trace_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        task(f"task.trace={path}").check(SHAPE)


def common(first: Sample, second: Sample) -> int:
    pairs = zip(first.ids or (), second.ids or (), strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), -1)


def test_prompts_share_a_beginning_of_so_many_tokens_and_no_more(tokenizer: Any) -> None:
    words = "task.requests=6", "task.lengths=[700,800]"
    shared = [*task(*words, "task.shared=600").samples(tokenizer)]
    apart = [*task(*words, "task.shared=0").samples(tokenizer)]
    lengths = [one.n_prompt for one in task(*words).arrivals]
    assert [len(one.ids or ()) for one in shared] == [len(one.ids or ()) for one in apart] == lengths
    head = min(common(*pair) for pair in pairwise(apart))
    assert {600 <= common(*pair) - head < 620 for pair in pairwise(shared)} == {True}
    for one in shared + apart:
        text = tokenizer.decode(one.ids)
        assert f"{one.evidence[0].strip()}" in text and one.references[0] in one.evidence[0]
        assert text.endswith("office is") and task().score(one, f" {one.references[-1]}.") == 1
        assert task().score(one, "12") == 0
    assert len({one.evidence for one in shared}) > 1, "the document is asked for, and what is not shared"


def test_prompts_of_a_trace_share_the_text_of_their_hashes(tmp_path: Path, tokenizer: Any) -> None:
    rows = [timed(0, 1700, [0, 1, 2, 3]), timed(1, 2300, [0, 1, 2, 4, 5]), timed(2, 1100, [6, 7, 8])]
    first, second, third = task(written(tmp_path, rows)).samples(tokenizer)
    assert [len(one.ids or ()) for one in (first, second, third)] == [1700, 2300, 1100]
    head = common(first, third)
    assert 1536 <= common(first, second) - head < 1550 and head < 100


def test_small_blocks_share_their_text_up_to_the_first_that_differs(tmp_path: Path, tokenizer: Any) -> None:
    rows = [timed(0, 960, [*range(60)]), timed(1, 1120, [*range(50), *range(100, 120)]), timed(2, 320, [*range(7, 27)])]
    first, second, third = task(written(tmp_path, rows)).samples(tokenizer)
    assert 800 <= common(first, second) - common(first, third) < 830


def test_the_shared_beginning_leaves_a_prompt_something_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.shared=450 leaves"):
        task("task.shared=450").check(SHAPE)
    with pytest.raises(ConfigError, match=r"task.shared=0 is not what the trace's hash_ids say"):
        task(written(tmp_path, [timed(0, 1024, [0, 1])]), "task.shared=0").check(SHAPE)


def test_limits_and_flags_are_those_that_are_given() -> None:
    params = task("task.ttft_ms=500", "task.tpot_ms=50", "task.prefix_caching=false").params
    assert params.goodput == {"ttft": 500, "tpot": 50} and params.flags == {"enable_prefix_caching": False}
    assert task().params.goodput == task().params.flags == {}


@pytest.mark.parametrize(
    "word",
    [
        *("task.lengths=[900,500]", "task.lengths=[100,500]", "task.rate=0", "task.requests=0", "task.rung=up"),
        *("task.burstiness=0", "task.burstiness=poisson", "task.max_concurrency=0", "task.shared=-1", "task.ttft_ms=0"),
    ],
)
def test_wrong_values_are_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        task(word)
