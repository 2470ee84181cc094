"""A GPU's attention backends of vLLM in its engine on a CPU: their builders, layers and layouts, around kernels of ours
(`tests/serving/paged.py`). What is proven are the tables, lengths and slots that reach a kernel, not the kernels.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make setup-serving")

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # pyright: ignore[reportMissingImports]

from kvbench.engine.errors import ConfigError
from kvbench.serving.adapter import backends
from kvbench.serving.adapter.front import Engine
from kvbench.serving.order import DROPPING, PAGES, VISIBLE, Order
from kvbench.serving.rehearsal import rehearse
from kvbench.tests.serving import paged
from kvbench.tests.serving.reference import COMPARED, Said, prompts, said
from kvbench.tests.serving.test_vllm import FLAGS, LENGTHS, MODEL, N_NEW, QUEST, SNAPKV

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("ignore")]
BLOCK = 16
VLLM = "vllm.v1.attention.backends"
TOVA, PQCACHE = "method=tova ratio=0.2", "method=pqcache ratio=0.2"
CASES = [  # vLLM's backend, its layout, the rung, a method
    ("FLASH_ATTN", "LBNHC", PAGES, QUEST),
    ("TRITON_ATTN", "BLHNC", PAGES, QUEST),
    ("FLASHINFER", "LBNHC", DROPPING, TOVA),
    ("FLASHINFER", "LBHNC", VISIBLE, PQCACHE),
]


def pretend(patch: pytest.MonkeyPatch, name: str) -> None:
    """vLLM's backend of this name in place of its CPU's, with kernels that need no GPU."""
    if name == "FLASHINFER":
        for module, made in paged.flashinfer().items():
            patch.setitem(sys.modules, module, made)
        patch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", f"{1 << 20}")
    module = import_module(f"{VLLM}.{name.lower()}")
    if name == "FLASH_ATTN":
        for one in ("flash_attn_varlen_func", "reshape_and_cache_flash"):
            patch.setattr(module, one, getattr(paged, one), raising=False)
        patch.setattr(module, "get_flash_attn_version", lambda *_, **__: 2)
    elif name == "TRITON_ATTN":
        patch.setattr(module, "unified_attention", paged.flash_attn_varlen_func)
        patch.setattr(module, "triton_reshape_and_cache_flash", paged.reshape_and_cache_flash)
    else:
        patch.setattr(module, "_copy_page_indices_kernel", paged.CopyIndices())
        patch.setattr(module, "_get_multi_ctas_kv_counter_buffer", lambda *_: None, raising=False)
        ops = SimpleNamespace(_C_cache_ops=SimpleNamespace(reshape_and_cache_flash=paged.reshape_and_cache_flash))
        patch.setattr(module, "torch", Torch(ops))
    patch.setitem(backends.OURS, "CPU", {"CPU_ATTN": backends.OURS["CUDA"][name]})  # type: ignore[arg-type]


class Torch(ModuleType):
    """torch, with operators that vLLM's CPU build has not."""

    def __init__(self, ops: Any) -> None:
        super().__init__("torch")
        self.ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def order(words: str, rung: str) -> Order:
    return rehearse(Order(tuple(words.split()), rung), BLOCK)


def start(patch: pytest.MonkeyPatch, name: str, layout: str, asked: Order) -> Engine:
    pretend(patch, name)
    patch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    engine = Engine.start(asked, MODEL, **FLAGS, block_size=BLOCK, max_num_batched_tokens=256)
    layer = next(iter(engine.core.vllm_config.compilation_config.static_forward_context.values()))
    assert layer.attn_backend.get_name() == name and layer.kv_cache.shape[1:] == (3, BLOCK, 128)
    return engine


def check_tokens(engine: Engine, words: str) -> None:
    """In chunks of 256 tokens that requests share."""
    before, asked = engine.n_free, prompts(LENGTHS)
    for ids in asked:
        said(words, ids, N_NEW)
    COMPARED.agree(words, asked, [Said(ids, None) for ids in engine.answer(asked, N_NEW)])
    assert engine.n_free == before


@pytest.mark.parametrize(("name", "layout", "rung", "words"), CASES)
def test_tokens_are_kvbench_s(name: str, layout: str, rung: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(monkeypatch, name, layout, order(words, rung))
    check_tokens(engine, words)
    engine.close()


class TestDropping:
    """FlashAttention's."""

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Engine]:
        with pytest.MonkeyPatch.context() as patch:
            engine = start(patch, "FLASH_ATTN", "LBNHC", order(SNAPKV, DROPPING))
            yield engine
            engine.close()

    @pytest.mark.parametrize("words", [SNAPKV, TOVA])
    def test_tokens_are_kvbench_s(self, engine: Engine, words: str) -> None:
        engine.switch(order(words, DROPPING))
        check_tokens(engine, words)

    def test_requests_that_were_compacted_are_preempted_and_go_on(self, engine: Engine) -> None:
        engine.switch(order(SNAPKV, DROPPING))
        before, asked = engine.n_free, prompts(LENGTHS)[:2]
        for i, ids in enumerate(asked):
            engine.core.add_request(f"{i}", {"prompt_token_ids": ids}, engine.params(N_NEW))
        for _ in range(8):
            engine.core.step()
        assert all(one.num_computed_tokens > one.num_prompt_tokens for one in engine.scheduler.running)
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        done: dict[str, list[int]] = {}
        while engine.core.has_unfinished_requests():
            done |= {one.request_id: [*one.outputs[0].token_ids] for one in engine.core.step()}
        COMPARED.agree(SNAPKV, asked, [Said(done[f"{i}"], None) for i in range(2)])
        assert engine.told()["replays"] and engine.n_free == before


class TestChoice:
    """By vLLM's own code for CUDA, on GPUs that are not there."""

    @pytest.mark.parametrize(
        ("capability", "dtype", "asked", "found"),
        [
            ((9, 0), torch.bfloat16, None, "gpu.FlashBackend"),
            ((9, 0), torch.float32, None, "gpu.TritonBackend"),
            ((10, 0), torch.bfloat16, None, "infer.Backend"),
            ((9, 0), torch.bfloat16, "FLASHINFER", "infer.Backend"),
        ],
    )
    def test_whichever_vllm_chooses_is_ours_short(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, asked: str | None,
        found: str,
    ) -> None:  # fmt: skip
        from vllm import platforms  # pyright: ignore[reportMissingImports]
        from vllm.platforms.interface import DeviceCapability  # pyright: ignore[reportMissingImports]
        from vllm.v1.attention.selector import AttentionSelectorConfig  # pyright: ignore[reportMissingImports]

        for module, made in (paged.flashinfer() | {"vllm._C_stable_libtorch": ModuleType("none")}).items():
            monkeypatch.setitem(sys.modules, module, made)
        cuda = import_module("vllm.platforms.cuda")

        class Gpu(cuda.CudaPlatformBase):
            device_name = "none"

            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> Any:
                return DeviceCapability(*capability)

        monkeypatch.setattr(platforms, "current_platform", Gpu())
        monkeypatch.delenv(backends.ON_GPU, raising=False)
        monkeypatch.setenv(backends.RUNNER, "0")
        with pytest.raises(ConfigError, match="nobody has run this adapter on a GPU"):
            backends.put()
        monkeypatch.setenv(backends.ON_GPU, "1")
        backends.put()
        try:
            chosen = None if asked is None else AttentionBackendEnum[asked]
            config = AttentionSelectorConfig(64, dtype, "auto", BLOCK)
            assert Gpu.get_attn_backend_cls(chosen, config) == f"kvbench.serving.adapter.{found}"
        finally:
            backends.take_back()

    def test_other_platforms_are_named_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm import platforms  # pyright: ignore[reportMissingImports]

        other = SimpleNamespace(_enum=SimpleNamespace(name="ROCM"))
        monkeypatch.setattr(platforms, "current_platform", other)
        with pytest.raises(ConfigError, match="vLLM runs on ROCM here"):
            backends.put()
