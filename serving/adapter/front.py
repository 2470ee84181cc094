"""vLLM's front end: an engine that a method serves in, with what the method needs of it (`Engine`).

Not here: the server (`serving/serve.py`), what is measured (`serving/measure.py`).
"""
# pyright: reportMissingImports=false

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.serving.adapter.backends import take_back
from kvbench.serving.order import Note, Order
from kvbench.serving.plugin import register
from kvbench.serving.rehearsal import check_prompt

EXTENSION = "kvbench.serving.adapter.worker.Extension"
BLOCK = 32  # tokens: the least that vLLM's CPU kernel takes
USUAL = {  # of the environment, where nothing else is said
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
RESTRICTED: Mapping[str, Any] = {  # what a method needs, with or without one
    "enforce_eager": True,
    "block_size": BLOCK,
}
CONNECTORS = "a KV connector finds a token's block by its position, and what survives stands elsewhere"
REFUSED: Mapping[str, tuple[Collection[Any], str]] = {  # what a flag may be with a method, and why it is nothing else
    "enforce_eager": ((True,), "a captured graph would make each step with what one step has selected"),
    "speculative_config": (
        (None,),
        "tokens that are rejected are taken back by a smaller count of those computed, and a method's index, scores "
        "and evictions have no such way back",
    ),
    "kv_transfer_config": ((None,), CONNECTORS),
    "kv_offloading_size": ((None,), CONNECTORS),
    "kv_cache_dtype": (("auto", "float32", None), "pages hold codes then, which a method would read as numbers"),
    "pipeline_parallel_size": ((1,), "each worker has some layers, and a method plans all of them"),
    "decode_context_parallel_size": ((1,), "a block's tokens lie with several workers"),
    "prefill_context_parallel_size": ((1,), "a prompt's queries are those of several workers"),
}
WITH_CHAINS: Mapping[str, tuple[Collection[Any], str]] = {
    "async_scheduling": (
        (False, None),
        "a request that stops by itself has been given a step too many by then, and a chain goes on from what it held",
    ),
    "data_parallel_size": ((1,), "the next turn may come to an engine that does not have the chain"),
}


def refuse_flags(order: Order, flags: Mapping[str, Any]) -> None:
    """`ConfigError` where an engine is asked for what a method cannot be served with."""
    for table, what in ((REFUSED, "a method"), (WITH_CHAINS if order.chains else {}, "chains")):
        for key, (allowed, why) in table.items():
            if key in flags and flags[key] not in allowed:
                raise ConfigError(f"{key}={flags[key]} cannot be combined with {what}: {why}; leave it out")


def engine_flags(order: Order | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments for an order. Without one they are as they were given."""
    for key, value in USUAL.items():
        os.environ.setdefault(key, value)
    if order is None:
        Order.take_back()
        take_back()
        return dict(flags)
    refuse_flags(order, flags)
    order.give()
    register()  # where this process has loaded its plugins already
    alone = {"async_scheduling": False} if order.chains else {}
    return dict(RESTRICTED) | dict(flags) | alone | {"worker_extension_cls": EXTENSION}


def guard(engine: Any, order: Order) -> None:
    """Refuse a request at the front end, alone: in a worker the same refusal would end the engine with all others."""
    from vllm.exceptions import VLLMValidationError

    class Refused(ConfigError, VLLMValidationError):
        """vLLM's server answers it with status 400."""

    inputs = engine.input_processor

    def check(made: Any) -> Any:
        try:
            if made.sampling_params is not None and made.sampling_params.prompt_logprobs is not None:
                raise ConfigError("prompt_logprobs are those of full attention, whatever the method; leave them out")
            if Note.KEY in ((made.sampling_params and made.sampling_params.extra_args) or {}):
                raise ConfigError(f"extra_args[{Note.KEY!r}] is what the scheduler tells workers; leave it out")
            check_prompt(order, len(made.prompt_token_ids))
        except ConfigError as error:
            raise Refused(f"{error}") from None
        return made

    def process(*args: Any, **kwargs: Any) -> Any:
        return check(given(*args, **kwargs))

    async def process_async(*args: Any, **kwargs: Any) -> Any:
        return check(await given_async(*args, **kwargs))

    if not hasattr(inputs, "kvbench_given"):  # a method that takes over from another has its own guard alone
        inputs.kvbench_given = inputs.process_inputs, inputs.process_inputs_async
    given, given_async = inputs.kvbench_given
    inputs.process_inputs, inputs.process_inputs_async = process, process_async


@dataclass
class Engine:
    """An engine in this process."""

    order: Order | None
    llm: Any

    @classmethod
    def start(cls, order: Order | None, model: str, **flags: Any) -> "Engine":
        flags = {"dtype": "float32", "disable_log_stats": False} | flags
        made = engine_flags(order, flags)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        llm = LLM(model, **made)
        if order is not None:
            llm.collective_rpc("kvbench_open")
            guard(llm.llm_engine, order)
        return cls(order, llm)

    def params(self, n_new: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True)

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> list[list[int]]:
        """Greedy answers of `n_new` tokens, all prompts at once."""
        from vllm.inputs import TokensPrompt

        asked = [TokensPrompt(prompt_token_ids=[*ids]) for ids in prompts]
        done = self.llm.generate(asked, self.params(n_new), use_tqdm=False)
        return [[*one.outputs[0].token_ids] for one in done]

    @property
    def core(self) -> Any:
        """vLLM's step loop."""
        return self.llm.llm_engine

    @property
    def scheduler(self) -> Any:
        return self.core.engine_core.engine_core.scheduler

    @property
    def n_free(self) -> int:
        """Blocks of the pool that are nobody's."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def switch(self, order: Order) -> None:
        """Let another method of the same rung serve from now on. No request may be under way."""
        assert self.order is not None and order.rung == self.order.rung, (self.order, order)
        assert not self.core.has_unfinished_requests(), "a method cannot be changed under a request"
        self.order = order
        order.give()
        guard(self.core, order)
        blocks = self.scheduler.kv_cache_manager
        blocks.manager.order = order
        blocks.drop_chains()
        self.llm.collective_rpc("kvbench_open")

    def told(self) -> dict[str, Any]:
        """The first worker's account of its requests; those that are over have books."""
        return self.llm.collective_rpc("kvbench_told")[0] if self.order is not None else {}

    def close(self) -> None:
        """End it, so that another may start in this process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        core = self.core.engine_core
        del self.llm
        core.shutdown()
        Order.take_back()
        cleanup_dist_env_and_memory()
