"""KVBench's methods inside vLLM, with the embedded model: tokens, blocks, and what goes wrong.

Each class starts one engine, and lets methods of one rung take turns in it.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make setup-serving")

from kvbench.engine.checkpoints.load import locate
from kvbench.engine.errors import ConfigError
from kvbench.serving.adapter.cpu import Backend
from kvbench.serving.adapter.front import RESTRICTED, Engine, engine_flags
from kvbench.serving.adapter.worker import check
from kvbench.serving.measure import Request, drive
from kvbench.serving.order import DROPPING, PAGES, VISIBLE, Order
from kvbench.serving.rehearsal import rehearse
from kvbench.tests.serving.reference import COMPARED, FOUND, Said, model, prompts, said, turns_of

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


FOUND_TOKENS: Counter[str] = Counter()  # of prompts, that came from the prefix cache, by method


def answers(engine: Engine, asked: Sequence[Sequence[int]], n_new: int) -> list[Said]:
    """What vLLM says, with the gaps between its two best logits."""
    params = engine.params(n_new)
    params.logprobs = 2
    done = engine.llm.generate([{"prompt_token_ids": [*ids]} for ids in asked], params, use_tqdm=False)
    found = []
    for one in done:
        FOUND_TOKENS[engine.order.chosen.label if engine.order else "vLLM"] += one.num_cached_tokens
        best = [sorted((each.logprob for each in step.values()), reverse=True) for step in one.outputs[0].logprobs]
        found.append(Said([*one.outputs[0].token_ids], [step[0] - step[1] for step in best]))
    return found


def check_batches(engine: Engine, words: str, beside: Sequence[str] = ()) -> None:
    """The same prompts alone, four at once and sixteen at once: tokens and books are KVBench's.

    From the second time on their beginnings come from the prefix cache, as far as the method lets them.
    """
    own = [said(words, ids, N_NEW, beside) for ids in prompts(LENGTHS)]
    if words != FULL:
        full = [said(FULL, ids, N_NEW, beside) for ids in prompts(LENGTHS)]
        assert any(a.ids != b.ids for a, b in zip(own, full, strict=True)), "equality would say nothing"
    assert engine.order is not None
    engine.switch(order(words, engine.order.rung))
    FOUND_TOKENS.clear()
    for batch in (1, 4, 16):
        asked = (prompts(LENGTHS) * 4)[:batch]
        COMPARED.agree(words, asked, answers(engine, asked, N_NEW))
    found, free = FOUND_TOKENS[engine.order.chosen.label], engine.order.most_shared(min(LENGTHS))
    assert (found > 0) == (free > 0)
    FOUND.append(f"{words} on {engine.order.rung}: {found} of {21 * sum(LENGTHS) // 4} tokens were in the prefix cache")
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
        told = engine.params(4)
        told.extra_args = {"kvbench": {"s_prompt": 1}}
        with pytest.raises(ConfigError, match="what the scheduler tells workers"):
            engine.core.add_request("told", {"prompt_token_ids": prompts([337])[0]}, told)
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
        engine.scheduler.reset_prefix_cache()
        before, used = engine.n_free, list[int]()
        engine.core.add_request("one", {"prompt_token_ids": prompts([440])[0]}, engine.params(8))
        while engine.core.has_unfinished_requests():
            engine.core.step()
            used.append(before - engine.n_free)
        FOUND.append(f"blocks of a request of 440 tokens, step by step: {used}")
        own, *held = [-(-given.most_slots(440, n) // 32) for n in range(440, 447)]
        assert used == [8, 14 + own, *held, 0]  # two chunks of the prompt, six steps, and the last one, which ends it

    @pytest.mark.parametrize("words", ON_DROPPING)
    def test_prompts_with_one_beginning_do_not_touch_each_other(self, engine: Engine, words: str) -> None:
        engine.switch(order(words, DROPPING))
        first, *_ = prompts([400])
        asked = [first, first[:350], [*first, *first[:60]], first]
        for ids in asked:
            said(words, ids, N_NEW, ON_DROPPING)
        for _ in range(2):  # the second time their pages lie where others have been
            COMPARED.agree(words, asked, answers(engine, asked, N_NEW))

    def test_what_is_shared_is_held_once(self, engine: Engine) -> None:
        """Eight requests with one beginning: blocks that all of them have at the moment when they have read it."""
        engine.switch(order(SNAPKV, DROPPING))
        begin = prompts([330])[0]
        asked = [[*begin, *prompts([40 + i])[0]] for i in range(8)]
        answers(engine, [begin], 1)
        most, free = 0, engine.n_free
        for i, ids in enumerate(asked):
            engine.core.add_request(f"shared {i}", {"prompt_token_ids": ids}, engine.params(4))
        while engine.core.has_unfinished_requests():
            engine.core.step()
            most = max(most, free - engine.n_free)
        apart = sum(-(-len(ids) // 32) for ids in asked)
        own = sum(-(-engine.order.most_slots(len(ids), len(ids)) // 32) for ids in asked)  # type: ignore[union-attr]
        FOUND.append(f"eight prompts that share 330 tokens of 370 to 377: {most} blocks at most, {apart} if held apart")
        assert most <= 10 + sum(-(-len(ids) // 32) - 10 for ids in asked) + own < apart
        assert engine.n_free == free

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
    """A pool of 28 blocks without prefix cache, in which full attention has room for three requests."""

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Engine]:
        flags = FLAGS | {"max_model_len": 512, "enable_prefix_caching": False, "num_gpu_blocks_override": 29}
        engine = Engine.start(order(FULL, DROPPING), MODEL, **flags)
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


def keep_async(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's CPU build schedule ahead: it can, and its platform switches that off."""
    from vllm.platforms.cpu import CpuPlatform  # pyright: ignore[reportMissingImports]

    usual = CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        usual(config)
        config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check))


class TestAhead:
    """Async scheduling: the next step is planned before this one's tokens are known, in a pool that is too small."""

    @pytest.mark.parametrize(
        ("rung", "several", "caching"),
        [(DROPPING, (SNAPKV, ROLLING), True), (DROPPING, (SNAPKV,), False), (VISIBLE, (ON_VISIBLE[2],), True)],
    )
    def test_tokens_and_blocks_are_the_same(
        self, monkeypatch: pytest.MonkeyPatch, rung: str, several: Sequence[str], caching: bool
    ) -> None:
        keep_async(monkeypatch)
        flags = FLAGS | {"max_model_len": 512, "enable_prefix_caching": caching, "num_gpu_blocks_override": 26}
        engine = Engine.start(order(several[0], rung), MODEL, **flags, async_scheduling=True)
        assert type(engine.scheduler).__name__ == "AsyncScheduler"
        asked, n_new = prompts([LENGTH] * 4) * (1 if rung == VISIBLE else 2), 20 if rung == VISIBLE else 64
        for words in several:
            engine.switch(order(words, rung))
            for ids in asked:
                said(words, ids, n_new, several)
            replies, figures = drive(engine, [Request(f"{words} {i}", ids, n_new) for i, ids in enumerate(asked)])
            COMPARED.agree(words, asked, [Said(reply.ids, None) for reply in replies])
            FOUND.append(
                f"scheduled ahead, {words} on {rung}, prefix cache {'on' if caching else 'off'}: {figures.at_once} at "
                f"once, {figures.preemptions} preempted, {engine.told()['replays']} read again with their answers"
            )
            assert figures.blocks_left == 0 and (figures.preemptions > 0 or words == ROLLING)
        engine.close()


class TestChains:
    """Five turns, each of which goes on from what the one before it left."""

    @pytest.mark.parametrize(("rung", "several"), [(VISIBLE, ON_VISIBLE), (DROPPING, (*ON_DROPPING, FULL))])
    def test_tokens_are_those_of_kvbench_s_own_turns(self, rung: str, several: Sequence[str]) -> None:
        def ordered(words: str) -> Order:
            return rehearse(Order(tuple(words.split()), rung, chains=4))

        engine = Engine.start(ordered(several[0]), MODEL, **FLAGS)
        free, (first, other), texts = engine.n_free, prompts([300, 301]), prompts([20, 31, 9, 40])
        for words in several:
            engine.switch(ordered(words))
            wants, so_far = turns_of(words, first, texts, 8), first
            for turn, want in enumerate(wants):
                answers(engine, [other[: 250 + turn]], 3)  # a conversation of somebody else, in between
                params = engine.params(8)
                (one,) = engine.llm.generate([{"prompt_token_ids": so_far}], params, use_tqdm=False)
                assert [*one.outputs[0].token_ids] == want, (words, turn)
                if turn:
                    assert one.num_cached_tokens == len(so_far) - len(texts[turn - 1]) - 1, (words, turn)
                so_far = so_far + want + (texts[turn] if turn < len(texts) else [])
            blocks = engine.scheduler.kv_cache_manager
            held = [len(chain.blocks) for chain in blocks.chains]
            FOUND.append(f"chains, {words} on {rung}: five turns, {len(so_far)} tokens in {held[-1]} blocks")
            assert len(held) == 4 and free - engine.n_free == len(
                {block.block_id for chain in blocks.chains for block in chain.blocks}
            )
            blocks.reset_prefix_cache()
            assert engine.n_free == free
        engine.close()

    def test_chains_give_way_where_the_pool_is_full(self) -> None:
        """The oldest goes first; a conversation that lost its chain is read as a new one."""
        flags = FLAGS | {"max_model_len": 512, "num_gpu_blocks_override": 29}
        engine = Engine.start(rehearse(Order(tuple(SNAPKV.split()), DROPPING, chains=16)), MODEL, **flags)
        free, asked = engine.n_free, prompts([LENGTH + i for i in range(12)])
        COMPARED.agree(SNAPKV, asked, answers(engine, asked, N_NEW))
        kept = engine.scheduler.kv_cache_manager.chains
        assert 0 < len(kept) < 12 and free - engine.n_free == sum(len(chain.blocks) for chain in kept)
        last = kept[-1]
        (one,) = engine.llm.generate(
            [{"prompt_token_ids": [*last.tokens, *asked[0][:20]]}], engine.params(4), use_tqdm=False
        )
        assert one.num_cached_tokens == len(last.tokens)
        lost = next(ids for ids in asked if all(chain.tokens[: len(ids)] != ids for chain in kept))
        COMPARED.agree(SNAPKV, [lost], answers(engine, [lost], N_NEW))
        engine.close()


class TestRestart:
    def test_engines_in_one_process_begin_anew(self) -> None:
        """vLLM's own, then two rungs, in a pool of 9 blocks; on `visible` requests are preempted as they decode."""
        quest, four = "method=quest comm=1/8 ratio=0.2", prompts([120] * 4)
        flags = {**RESTRICTED, **FLAGS, "max_model_len": 200, "num_gpu_blocks_override": 10}
        with pytest.raises(ValueError, match="To serve at least one request"):  # 8 blocks, and 2 of what survives
            Engine.start(order(SNAPKV, DROPPING), MODEL, **flags | {"max_model_len": 256})
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
            ({"enforce_eager": False}, "captured graph"),
            ({"speculative_config": {"method": "ngram"}}, "tokens that are rejected"),
            ({"kv_transfer_config": {"kv_connector": "x"}}, "a KV connector finds a token's block"),
            ({"kv_offloading_size": 4.0}, "a KV connector finds a token's block"),
            ({"kv_cache_dtype": "fp8"}, "pages hold codes"),
            ({"pipeline_parallel_size": 2}, "each worker has some layers"),
            ({"decode_context_parallel_size": 2}, "lie with several workers"),
            ({"prefill_context_parallel_size": 2}, "those of several workers"),
        ],
    )
    def test_flags_that_a_method_cannot_have_short(self, flag: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            engine_flags(Order(("method=snapkv",), DROPPING), flag)

    @pytest.mark.parametrize("flag", [{"async_scheduling": True}, {"data_parallel_size": 2}])
    def test_flags_that_chains_cannot_have_short(self, flag: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="cannot be combined with chains"):
            engine_flags(Order(("method=snapkv",), DROPPING, chains=4), flag)

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


@dataclass
class Served:
    """A server of its own process, and a client of it."""

    process: subprocess.Popen[bytes]
    client: Any
    url: str
    words: list[str]
    errors: Path

    def in_use(self) -> tuple[float, float]:
        """Requests that run or wait, and the share of the pool that is in use."""
        text = urlopen(f"{self.url}/metrics").read().decode()
        names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
        running, waiting, used = (
            float(re.findall(rf"^vllm:{name}{{.*}} (.*)$", text, re.MULTILINE)[0]) for name in names
        )
        return running + waiting, used


class TestServer:
    @pytest.fixture(scope="class")
    def served(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        from openai import OpenAI  # pyright: ignore[reportMissingImports]

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        words = [
            "method=streamingllm",
            "ratio=0.2",
            f"port={url.rpartition(':')[2]}",
            "vllm.max_model_len=1024",
            "chains=2",
        ]
        errors = tmp_path_factory.mktemp("server") / "errors"
        with errors.open("w") as file:
            command = [sys.executable, "-m", "kvbench.serving.serve", *words]
            # Engines of this process have switched off that a server's worker has a process of its own.
            alone = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
            process = subprocess.Popen(command, cwd=ROOT, stderr=file, env=alone)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        try:
            assert wait_for(client, process) == "smollm2-135m-streamingllm-0.2"
            yield Served(process, client, url, words, errors)
        finally:
            process.terminate()
            process.wait(30)

    PARAMS: ClassVar[dict[str, Any]] = {
        "model": "smollm2-135m-streamingllm-0.2", "max_tokens": N_NEW, "temperature": 0
    }  # fmt: skip

    def test_an_openai_client_talks_to_it(self, served: Served) -> None:
        from openai import BadRequestError  # pyright: ignore[reportMissingImports]

        client, asked = served.client, prompts([300, 337])
        done = client.completions.create(prompt=asked, extra_body={"ignore_eos": True}, **self.PARAMS)
        for one, ids in zip(done.choices, asked, strict=True):
            own = said("method=streamingllm ratio=0.2", ids, N_NEW).ids
            assert one.text == model().tokenizer.decode(own, skip_special_tokens=True)
        chat = client.chat.completions.create(
            messages=[{"role": "user", "content": "Say hello. " * 30}], stream=True, **self.PARAMS
        )
        assert "".join(part.choices[0].delta.content or "" for part in chat if part.choices)
        for prompt, why in ((asked[0][:20], "budget"), (asked[0] * 4, "maximum context length is 1024")):
            with pytest.raises(BadRequestError, match=why):
                client.completions.create(prompt=[prompt], **self.PARAMS)
        assert client.completions.create(prompt=asked[:1], **self.PARAMS).choices  # the engine lives

    def test_a_second_turn_goes_on_from_the_first(self, served: Served) -> None:
        """What the scheduler writes down for workers reaches other processes."""
        first, text, params = prompts([280])[0], prompts([40])[0], self.PARAMS | {"extra_body": {"ignore_eos": True}}
        one, two = turns_of(ROLLING, first, [text], N_NEW)
        for ids, answer in ((first, one), ([*first, *one, *text], two)):
            done = served.client.completions.create(prompt=[ids], **params)
            assert done.choices[0].text == model().tokenizer.decode(answer, skip_special_tokens=True)
        assert said(ROLLING, [*first, *one, *text], N_NEW).ids != two, "a new prompt would have said the same"

    def test_clients_that_go_away_leave_nothing(self, served: Served) -> None:
        used = served.in_use()
        assert used[0] == 0 and used[1] > 0  # by chains alone
        wanted = self.PARAMS | {"max_tokens": 600, "extra_body": {"ignore_eos": True}}
        streams = [served.client.completions.create(prompt=[ids], stream=True, **wanted) for ids in prompts([300, 310])]
        for stream in streams:
            next(iter(stream))
        assert served.in_use()[0] == 2
        for stream in streams:
            stream.close()
        for _ in range(60):
            if served.in_use() == used:
                break
            time.sleep(0.5)
        assert served.in_use() == used

    def test_a_second_server_on_its_port_says_so(self, served: Served) -> None:
        command = [sys.executable, "-m", "kvbench.serving.serve", *served.words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"port {served.url.rpartition(':')[2]} of 127.0.0.1 cannot be had" in done.stderr

    def test_a_server_whose_engine_was_killed_ends_and_says_so(self, served: Served) -> None:
        import psutil
        from openai import APIError  # pyright: ignore[reportMissingImports]

        children = psutil.Process(served.process.pid).children(recursive=True)
        (worker,) = [child for child in children if child.name().startswith("VLLM::Worker")]
        worker.kill()
        with pytest.raises(APIError):
            served.client.completions.create(prompt=prompts([300]), **self.PARAMS)
        assert served.process.wait(60) == 1
        assert "the engine died, and requests under way got status 500" in served.errors.read_text()


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
