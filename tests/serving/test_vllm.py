"""KVBench's methods inside vLLM, with the embedded model: tokens, blocks, and what goes wrong.

Each class starts one engine, and lets methods of one rung take turns in it.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make setup-serving")

from kvbench.engine.checkpoints.load import locate
from kvbench.engine.errors import ConfigError
from kvbench.serving.adapter import known
from kvbench.serving.adapter.cpu import Backend
from kvbench.serving.adapter.front import RESTRICTED, Engine, engine_flags
from kvbench.serving.adapter.worker import check
from kvbench.serving.measure import Request, drive
from kvbench.serving.order import DROPPING, PAGES, VISIBLE, Order
from kvbench.serving.rehearsal import rehearse
from kvbench.tests.serving.reference import COMPARED, FOUND, Said, model, prompts, said

pytestmark = [
    pytest.mark.serving,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
N_NEW = 16
LENGTHS = (200, 233, 271, 320)
QUEST = (
    "method=quest method.comm_mode=native method.page_len=32 method.page_generated=true "
    "method.agg=group_mean comm=1/8 ratio=0.2"
)
ON_VISIBLE = (
    "method=oracle ratio=0.1", "method=pqcache ratio=0.2", "method=quest comm=1/8 ratio=0.2",
    "method=sparq comm=1/8 ratio=0.2", "method=clusterkv ratio=0.2", "method=adakv ratio=0.2",
)  # fmt: skip
ON_DROPPING = (
    "method=streamingllm ratio=0.2", "method=snapkv ratio=0.2", "method=keydiff ratio=0.2",
    "method=tova ratio=0.2", "method=knorm method.full_layers=0 ratio=0.3",
)  # fmt: skip
FULL, SNAPKV = "method=full", "method=snapkv ratio=0.2"
ROLLING = "method=streamingllm ratio=0.2"
LENGTH = 240  # of prompts under pressure
BOOKS = ("steps", "tokens_attended_mean", "tokens_budget", "within_budget")
ROOT = Path(__file__).resolve().parents[2]
MODEL = locate("embedded", None, False)[0]
FLAGS: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16}


def order(words: str, rung: str) -> Order:
    return rehearse(Order(tuple(words.split()), rung))


def answers(engine: Engine, asked: Sequence[Sequence[int]], n_new: int) -> list[Said]:
    """What vLLM says, with the gaps between its two best logits."""
    params = engine.params(n_new)
    params.logprobs = 2
    done = engine.llm.generate([{"prompt_token_ids": [*ids]} for ids in asked], params, use_tqdm=False)
    found = []
    for one in done:
        best = [sorted((each.logprob for each in step.values()), reverse=True) for step in one.outputs[0].logprobs]
        found.append(Said([*one.outputs[0].token_ids], [step[0] - step[1] for step in best]))
    return found


def check_batches(engine: Engine, words: str, beside: Sequence[str] = ()) -> None:
    """The same prompts alone, four at once and sixteen at once: tokens and books are KVBench's."""
    own = [said(words, ids, N_NEW, beside) for ids in prompts(LENGTHS)]
    if words != FULL:
        full = [said(FULL, ids, N_NEW, beside) for ids in prompts(LENGTHS)]
        assert any(a.ids != b.ids for a, b in zip(own, full, strict=True)), "equality would say nothing"
    assert engine.order is not None
    engine.switch(order(words, engine.order.rung))
    for batch in (1, 4, 16):
        asked = (prompts(LENGTHS) * 4)[:batch]
        COMPARED.agree(words, asked, answers(engine, asked, N_NEW))
    books = [*engine.told()["books"].values()]
    assert len(books) == 21
    assert all(books[0][key] == own[0].ledger[key] for key in BOOKS)


class TestStock:
    def test_full_attention_says_what_kvbench_says(self) -> None:
        """vLLM without an order: the plugin is installed, and changes nothing."""
        asked = prompts(range(60, 440, 19))
        assert len(asked) == 20
        engine = Engine.start(None, MODEL, enforce_eager=True, **FLAGS)
        COMPARED.agree(FULL, asked, answers(engine, asked, N_NEW))
        engine.close()


class TestVisible:
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Engine]:
        engine = Engine.start(order(FULL, VISIBLE), MODEL, **FLAGS)
        yield engine
        engine.close()

    def test_full_attention_is_still_full_attention_short(self, engine: Engine) -> None:
        asked = prompts(LENGTHS)
        COMPARED.agree(FULL, asked, answers(engine, asked, N_NEW))

    @pytest.mark.parametrize("words", ON_VISIBLE)
    def test_tokens_are_kvbench_s(self, engine: Engine, words: str) -> None:
        check_batches(engine, words, (*ON_VISIBLE, FULL))

    def test_a_request_whose_budget_is_too_small_is_refused_alone(self, engine: Engine) -> None:
        engine.switch(order("method=quest comm=1/8 ratio=0.2", VISIBLE))
        with pytest.raises(ConfigError, match="no room for a page"):
            engine.answer([prompts([40])[0]], 4)
        assert len(engine.answer(prompts([337]), 4)[0]) == 4


class TestPages:
    def test_quest_reads_its_pages_with_vllm_s_own_kernel(self) -> None:
        engine = Engine.start(order(QUEST, PAGES), MODEL, **FLAGS)
        check_batches(engine, QUEST, [FULL])
        engine.close()


class TestDropping:
    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Engine]:
        engine = Engine.start(order("method=snapkv ratio=0.2", DROPPING), MODEL, **FLAGS, max_num_batched_tokens=256)
        yield engine
        engine.close()

    @pytest.mark.parametrize("words", ON_DROPPING)
    def test_tokens_are_kvbench_s_from_chunks_of_256(self, engine: Engine, words: str) -> None:
        before = engine.n_free
        check_batches(engine, words, (*ON_DROPPING, FULL))
        assert engine.n_free == before

    def test_blocks_come_back_one_step_behind_the_prompt_short(self, engine: Engine) -> None:
        given = order("method=snapkv ratio=0.2", DROPPING)
        engine.switch(given)
        before, used = engine.n_free, list[int]()
        engine.core.add_request("one", {"prompt_token_ids": prompts([440])[0]}, engine.params(8))
        while engine.core.has_unfinished_requests():
            engine.core.step()
            used.append(before - engine.n_free)
        FOUND.append(f"blocks of a request of 440 tokens, step by step: {used}")
        held = [-(-given.most_slots(440, n) // 32) for n in range(441, 447)]
        assert used == [8, 14, *held, 0]  # two chunks of the prompt, six steps, and the last one, which ends it

    def test_prompts_with_one_beginning_do_not_touch_each_other(self, engine: Engine) -> None:
        words = "method=snapkv ratio=0.2"
        engine.switch(order(words, DROPPING))
        first, *_ = prompts([400])
        asked = [first, first[:350], [*first, *first[:60]], first]
        for _ in range(2):  # the second time their pages lie where others have been
            COMPARED.agree(words, asked, answers(engine, asked, N_NEW))

    def test_a_cancelled_request_gives_its_blocks_back(self, engine: Engine) -> None:
        words = "method=snapkv ratio=0.2"
        engine.switch(order(words, DROPPING))
        before, asked = engine.n_free, prompts(LENGTHS)[:2]
        names = ["gone", "stays"]
        for name, ids in zip(names, asked, strict=True):
            engine.core.add_request(name, {"prompt_token_ids": ids}, engine.params(N_NEW))
        for _ in range(8):
            engine.core.step()
        engine.core.abort_request(["gone"])
        last: list[Any] = []
        while engine.core.has_unfinished_requests():
            last = engine.core.step() or last
        assert [one.request_id for one in last] == ["stays"]
        COMPARED.agree(words, asked[1:], [Said([*last[0].outputs[0].token_ids], None)])
        assert engine.n_free == before
        assert len(engine.told()["books"]) == 2 and not engine.scheduler.requests


class TestPressure:
    """A pool of 28 blocks, in which full attention has room for three requests."""

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Engine]:
        engine = Engine.start(
            order(FULL, DROPPING), MODEL, **FLAGS | {"max_model_len": 512}, num_gpu_blocks_override=29
        )
        yield engine
        engine.close()

    def served(self, engine: Engine, words: str, n_new: int, beside: Sequence[str] = ()) -> Any:
        engine.switch(order(words, DROPPING))
        four = prompts([LENGTH] * 4)
        for ids in four:
            said(words, ids, n_new, beside)
        requests = [Request(f"{words} {i}", ids, n_new) for i, ids in enumerate(four * 2)]
        replies, figures = drive(engine, requests)
        COMPARED.agree(words, four * 2, [Said(reply.ids, None) for reply in replies])
        told = engine.told()
        FOUND.append(
            f"{words}, {len(requests)} requests of {LENGTH} + {n_new} tokens: {figures.at_once} at once "
            f"({figures.at_once_unpreempted} before the first preemption), {figures.preemptions} preempted, "
            f"{told['replays']} read again with their answers, {figures.blocks_most} of {figures.blocks} blocks at "
            f"most, {figures.blocks_mean:.1f} in the mean, {figures.steps} steps"
        )
        assert figures.blocks_left == 0
        return figures, told

    def test_more_requests_run_at_once_where_blocks_come_back_short(self, engine: Engine) -> None:
        full, growing = (self.served(engine, words, 20, (FULL, SNAPKV, ROLLING))[0] for words in (FULL, SNAPKV))
        assert full.at_once <= 3 and growing.at_once >= 6 and growing.steps < full.steps

    def test_a_rolling_window_lets_as_many_run(self, engine: Engine) -> None:
        rolling, _ = self.served(engine, ROLLING, 20, (FULL, SNAPKV, ROLLING))
        assert rolling.at_once >= 6

    def test_requests_that_were_compacted_are_preempted_and_go_on(self, engine: Engine) -> None:
        figures, told = self.served(engine, SNAPKV, 90)
        assert figures.preemptions > 0 and told["replays"] > 0


class TestRestart:
    def test_engines_in_one_process_begin_anew(self) -> None:
        """vLLM's own, then two rungs, in a pool of 9 blocks; on `visible` requests are preempted as they decode."""
        quest, four = "method=quest comm=1/8 ratio=0.2", prompts([120] * 4)
        flags = {**RESTRICTED, **FLAGS, "max_model_len": 256, "num_gpu_blocks_override": 10}
        for words, rung in ((FULL, None), (SNAPKV, DROPPING), (quest, VISIBLE)):
            engine = Engine.start(None if rung is None else order(words, rung), MODEL, **flags)
            before = engine.n_free
            for ids in four:
                said(words, ids, 40, (FULL, SNAPKV, quest))
            replies, figures = drive(engine, [Request(f"{i}", ids, 40) for i, ids in enumerate(four)])
            COMPARED.agree(words, four, [Said(reply.ids, None) for reply in replies])
            told = engine.told()
            FOUND.append(f"{words} on {rung}: {figures.preemptions} preempted, {told.get('replays', 0)} read again")
            assert engine.n_free == before == 9 and len(told.get("books", four)) == 4
            assert rung != VISIBLE or (figures.preemptions > 0 and told["replays"] > 0)
            engine.close()


class TestRefusals:
    @pytest.mark.parametrize(
        ("flag", "why"),
        [
            ({"enable_prefix_caching": True}, "prefix caching hands on pages"),
            ({"async_scheduling": True}, "async scheduling counts tokens"),
            ({"speculative_config": {"method": "ngram"}}, "speculative decoding takes tokens back"),
            ({"kv_transfer_config": {"kv_connector": "x"}}, "a KV connector moves pages"),
            ({"pipeline_parallel_size": 2}, "gives each worker some layers"),
        ],
    )
    def test_flags_that_a_method_cannot_have_short(self, flag: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            engine_flags(Order(("method=snapkv",), DROPPING), flag)

    def test_a_layer_that_nobody_knows_is_named_short(self) -> None:
        def layer(**changes: Any) -> Any:
            usual = {"sliding_window": -1, "kv_sharing_target_layer_name": None, "alibi_slopes": None}
            impl = SimpleNamespace(**usual | {"attn_type": "decoder"} | changes)
            return SimpleNamespace(impl=impl, isa=changes.get("isa", "vec"), attn_backend=Backend)

        name = "model.layers.3.self_attn.attn"
        check(name, layer(), VISIBLE)
        cases = {
            "sliding_window": (512, "a sliding window"),
            "isa": ("amx", "pages of amx"),
            "attn_type": ("encoder", "decoder"),
        }
        for key, (value, why) in cases.items():
            with pytest.raises(ValueError, match=f"layer {name} .*{why}"):
                check(name, layer(**{key: value}), VISIBLE)

    def test_another_version_is_not_known_short(self) -> None:
        assert known("0.32.0") and not known("0.33.1")


class TestServer:
    def test_an_openai_client_talks_to_it(self) -> None:
        from openai import BadRequestError, OpenAI  # pyright: ignore[reportMissingImports]

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["method=streamingllm", "ratio=0.2", f"port={port}", "vllm.max_model_len=1024"]
        server = subprocess.Popen([sys.executable, "-m", "kvbench.serving.serve", *words], cwd=ROOT)
        try:
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            name = wait_for(client, server)
            assert name == "smollm2-135m-streamingllm-0.2"
            asked = prompts([300, 337])
            params: dict[str, Any] = {"model": name, "max_tokens": N_NEW, "temperature": 0}
            done = client.completions.create(prompt=asked, extra_body={"ignore_eos": True}, **params)
            for one, ids in zip(done.choices, asked, strict=True):
                own = said("method=streamingllm ratio=0.2", ids, N_NEW).ids
                assert one.text == model().tokenizer.decode(own, skip_special_tokens=True)
            chat = client.chat.completions.create(
                messages=[{"role": "user", "content": "Say hello. " * 30}], stream=True, **params
            )
            assert "".join(part.choices[0].delta.content or "" for part in chat if part.choices)
            with pytest.raises(BadRequestError, match="budget"):
                client.completions.create(prompt=[asked[0][:20]], **params)
            assert client.completions.create(prompt=asked[:1], **params).choices  # the engine lives
        finally:
            server.terminate()
            server.wait(30)


def wait_for(client: Any, server: Any) -> str:
    """The name of the model, once the server is there."""
    for _ in range(240):
        assert server.poll() is None, "the server ended"
        try:
            return client.models.list().data[0].id
        except Exception:
            time.sleep(1)
    raise AssertionError("no server")


class TestWorkers:
    def test_workers_divide_the_heads_and_plan_alike(self) -> None:
        """SmolLM2 has three KV heads, and each of three processes has one."""
        words = "method=snapkv ratio=0.2"
        given = rehearse(Order(tuple(words.split()), DROPPING, ranks=3))
        engine = Engine.start(given, MODEL, **FLAGS, tensor_parallel_size=3)
        before, asked = engine.n_free, prompts([337, 440])
        COMPARED.agree(words, asked, answers(engine, asked, 12))
        assert engine.n_free == before
        engine.close()
