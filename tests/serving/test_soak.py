"""Requests that come, go on, are cancelled and are refused, in a pool that is too small: no token is wrong, and in the
end every block is nobody's. `KVBENCH_SOAK_S` says for how many seconds each method is drawn.
"""

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make setup-serving")

from vllm.exceptions import VLLMValidationError  # pyright: ignore[reportMissingImports]

from kvbench.serving.adapter.front import Engine
from kvbench.serving.order import DROPPING, VISIBLE, Order
from kvbench.serving.rehearsal import rehearse
from kvbench.tests.serving.reference import FOUND, prompts, said, turns_of
from kvbench.tests.serving.test_vllm import FLAGS, MODEL

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("ignore")]
SECONDS = float(os.environ.get("KVBENCH_SOAK_S", "15"))
N_NEW, LONGEST, BLOCKS = 40, 480, 25
QUEST = "method=quest comm=1/8 ratio=0.2"
SNAPKV, ROLLING = "method=snapkv ratio=0.2", "method=streamingllm ratio=0.2"


@dataclass
class Living:
    """A request under way."""

    ids: list[int]
    wanted: list[list[int]]  # answers that are right: as a new prompt, or as a turn that goes on
    n_new: int
    said: list[int] = field(default_factory=list)


class Soak:
    """One method's hours, in small."""

    def __init__(self, engine: Engine, words: str, seed: int, more: Sequence[str]) -> None:
        self.engine, self.words, self.drawn, self.count = engine, words, random.Random(seed), Counter[str]()
        self.living: dict[str, Living] = {}
        begin = prompts([260])[0]
        self.asked = [*prompts([230, 301, 177]), [*begin, *prompts([60])[0]], [*begin, *prompts([90])[0][1:]]]
        self.text = prompts([31])[0]
        for ids in self.asked:
            said(words, ids, N_NEW, more)
        self.turns = [turns_of(words, ids, [self.text], N_NEW) for ids in self.asked[:2]]

    def ask(self) -> None:
        which, n_new = self.drawn.randrange(len(self.asked) + 2), self.drawn.randrange(1, N_NEW + 1)
        name = f"{self.words} {self.count['asked']}"
        if which < len(self.asked):
            ids, wanted = self.asked[which], [said(self.words, self.asked[which], N_NEW).ids]
        else:  # a second turn, whether or not the first one is still there
            answer, second = self.turns[which - len(self.asked)]
            ids = [*self.asked[which - len(self.asked)], *answer, *self.text]
            wanted = [second, said(self.words, ids, N_NEW).ids]
        self.engine.core.add_request(name, {"prompt_token_ids": ids}, self.engine.params(n_new))
        self.living[name] = Living(ids, wanted, n_new)
        self.count["asked"] += 1

    def ask_wrongly(self) -> None:
        n = self.drawn.choice([1, 3, LONGEST + 1, 5 * LONGEST])
        with pytest.raises(VLLMValidationError) as refused:  # so the server answers with status 400
            self.engine.core.add_request("wrong", {"prompt_token_ids": self.text[:1] * n}, self.engine.params(4))
        assert len(f"{refused.value}") > 20
        self.count["refused"] += 1

    def cancel(self) -> None:
        name = self.drawn.choice([*self.living])
        self.engine.core.abort_request([name])
        del self.living[name]
        self.count["cancelled"] += 1

    def step(self) -> None:
        for output in self.engine.core.step():
            if output.request_id not in self.living:
                continue  # cancelled while its step was made
            one, ids = self.living[output.request_id], [*output.outputs[0].token_ids]
            assert any(ids == wanted[: len(ids)] for wanted in one.wanted), (output.request_id, ids, one.wanted)
            self.count["tokens"] += len(ids) - len(one.said)
            one.said = ids
            if output.finished:
                assert len(ids) == one.n_new
                self.count["answered"] += 1
                self.count["found"] += output.num_cached_tokens or 0
                self.count["turns"] += (output.num_cached_tokens or 0) > len(one.ids) - len(self.text) - 2
                del self.living[output.request_id]

    def run(self, seconds: float) -> None:
        end = monotonic() + seconds
        while monotonic() < end:
            luck = self.drawn.random()
            if luck < 0.5 and len(self.living) < 14:
                self.ask()
            elif luck < 0.53 and self.living:
                self.cancel()
            elif luck < 0.55:
                self.ask_wrongly()
            elif luck < 0.552:
                self.engine.scheduler.reset_prefix_cache()
            if self.living:
                self.step()
        while self.living:
            self.step()


@pytest.mark.parametrize(
    ("rung", "several"), [(DROPPING, (SNAPKV, ROLLING, "method=tova ratio=0.2")), (VISIBLE, (QUEST,))]
)
def test_nothing_is_lost_and_nothing_is_wrong_under_load(rung: str, several: Sequence[str]) -> None:
    def ordered(words: str) -> Order:
        return rehearse(Order(tuple(words.split()), rung, chains=3))

    flags: dict[str, Any] = FLAGS | {"max_model_len": LONGEST, "num_gpu_blocks_override": BLOCKS}
    engine = Engine.start(ordered(several[0]), MODEL, **flags, max_num_batched_tokens=320)
    free = engine.n_free
    for seed, words in enumerate(several):
        engine.switch(ordered(words))
        soak = Soak(engine, words, seed, several)
        preempted: Any = engine.scheduler.requests
        soak.run(SECONDS)
        blocks = engine.scheduler.kv_cache_manager
        held = len({block.block_id for chain in blocks.chains for block in chain.blocks})
        assert not preempted and free - engine.n_free == held and len(blocks.chains) <= 3
        blocks.reset_prefix_cache()
        assert engine.n_free == free and not blocks.manager.held and not blocks.manager.req_to_blocks
        told = engine.told()
        count = soak.count
        FOUND.append(
            f"{words} on {rung}, {SECONDS:.0f} s: {count['asked']} requests asked, {count['answered']} answered with "
            f"{count['tokens']} tokens, {count['cancelled']} cancelled, {count['refused']} refused, {told['replays']} "
            f"read again with their answers, {count['turns']} went on from a chain, {count['found']} tokens found"
        )
        assert count["answered"] > 0 and count["cancelled"] + count["refused"] > 0
    engine.close()
