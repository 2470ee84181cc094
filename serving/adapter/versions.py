"""Which vLLM this is: `need_vllm`, the one place where a version is refused.

`VERSIONS` has what differs for the adapter between the versions that methods are served in, and `NEEDS` what it takes
from all of them besides its imports: attributes, and functions with their parameters, which vLLM moves as it likes.
They are looked up in vLLM's source, which is read and not imported, so that the same look can be taken at one that
only lies somewhere.

Not here: whether tokens are equal in a version, which `make test-serving` finds out.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvbench.engine.errors import ConfigError


@dataclass(frozen=True)
class Version:
    """What differs between versions."""

    arguments: str  # the module of the server's command line


# 0.33 was run over the kernels of 0.32's CPU build (`make setup-serving VLLM=0.33.0`): PyPI has none of it.
VERSIONS: Mapping[str, Version] = {
    "0.32": Version(arguments="vllm.entrypoints.launchers.cli_args"),
    "0.33": Version(arguments="vllm.entrypoints.common.cli_args"),
}
BACKENDS = "vllm.v1.attention.backends"
OF_BACKEND = ("customize_spec(cls, spec)", "get_builder_cls()", "get_impl_cls()", "get_name()")
OF_BUILDER = ("build(self, common_prefix_len, common_attn_metadata, fast_build)",)
OF_LAYER = (
    "do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping)",
    "forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)",
    "alibi_slopes", "kv_cache_dtype", "kv_sharing_target_layer_name", "logits_soft_cap", "num_heads", "num_kv_heads",
    "scale", "sinks", "sliding_window",
)  # fmt: skip
NEEDS: Mapping[str, Sequence[str]] = {
    "vllm._custom_ops": (
        "cpu_attn_get_scheduler_metadata(num_reqs, num_heads, num_kv_heads, head_dim, seq_lens, dtype, "
        "query_start_loc, causal, sliding_window_size, isa, enable_kv_split, dynamic_causal, kv_cache_dtype)",
    ),
    "vllm.config.compilation:CompilationConfig": ("static_forward_context",),
    "vllm.engine.arg_utils:EngineArgs": (
        "async_scheduling", "block_size", "data_parallel_size", "decode_context_parallel_size",
        "enable_prefix_caching", "enforce_eager", "kv_cache_dtype", "kv_offloading_size", "kv_transfer_config",
        "num_gpu_blocks_override", "pipeline_parallel_size", "prefill_context_parallel_size", "speculative_config",
        "tensor_parallel_size", "worker_extension_cls",
    ),
    "vllm.entrypoints.llm:LLM": (
        "collective_rpc", "generate", "get_tokenizer", "llm_engine", "reset_prefix_cache",
    ),
    "vllm.forward_context:ForwardContext": ("attn_metadata",),
    "vllm.model_executor.layers.attention.attention:Attention": ("attn_backend", "impl", "kv_cache", "kv_cache_dtype"),
    "vllm.outputs:RequestOutput": ("finished", "num_cached_tokens", "outputs", "request_id"),
    "vllm.platforms.interface:Platform": ("_enum",),
    "vllm.sampling_params:SamplingParams": ("extra_args", "max_tokens", "prompt_logprobs"),
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "block_table_tensor", "max_seq_len", "num_reqs", "query_start_loc_cpu", "seq_lens",
        "seq_lens_cpu_upper_bound", "slot_mapping",
    ),
    f"{BACKENDS}.cpu_attn:CPUAttentionBackend": OF_BACKEND,
    f"{BACKENDS}.cpu_attn:CPUAttentionBackendImpl": OF_LAYER,
    f"{BACKENDS}.cpu_attn:CPUAttentionMetadata": ("slot_mapping",),
    f"{BACKENDS}.cpu_attn:CPUAttentionMetadataBuilder": OF_BUILDER,
    f"{BACKENDS}.flash_attn:FlashAttentionBackend": OF_BACKEND,
    f"{BACKENDS}.flash_attn:FlashAttentionImpl": OF_LAYER,
    f"{BACKENDS}.flash_attn:FlashAttentionMetadataBuilder": (*OF_BUILDER, "supports_update_block_table"),
    f"{BACKENDS}.flashinfer:FlashInferBackend": OF_BACKEND,
    f"{BACKENDS}.flashinfer:FlashInferImpl": OF_LAYER,
    f"{BACKENDS}.flashinfer:FlashInferMetadataBuilder": OF_BUILDER,
    f"{BACKENDS}.registry": ("register_backend(backend, class_path, ...)",),
    f"{BACKENDS}.registry:AttentionBackendEnum": (
        "CPU_ATTN", "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "clear_override(self)",
    ),
    f"{BACKENDS}.triton_attn:TritonAttentionBackend": OF_BACKEND,
    f"{BACKENDS}.triton_attn:TritonAttentionImpl": OF_LAYER,
    f"{BACKENDS}.triton_attn:TritonAttentionMetadataBuilder": OF_BUILDER,
    "vllm.v1.core.block_pool:BlockPool": (
        "free_blocks(self, ordered_blocks, ...)", "get_new_blocks(self, num_blocks)", "get_num_free_blocks(self)",
        "num_gpu_blocks",
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": ("single_type_managers",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "allocate_slots(self, request, ...)", "create_kv_cache_blocks(self, blocks)", "free(self, request)",
        "get_computed_blocks(self, request, ...)", "reset_prefix_cache(self)", "block_pool", "coordinator",
    ),
    "vllm.v1.core.sched.scheduler": ("KVCacheManager",),
    "vllm.v1.core.sched.scheduler:Scheduler": ("kv_cache_manager", "requests", "running"),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": (
        "add_local_computed_blocks(self, request_id, new_computed_blocks, ...)",
        "allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model)",
        "cache_blocks(self, request, num_tokens, ...)",
        "free(self, request_id)",
        "get_num_blocks_to_allocate(self, request_id, num_tokens, new_computed_blocks, ...)",
        "pop_blocks_for_free(self, request_id)",
        "remove_skipped_blocks(self, request_id, processed_computed_tokens, num_prompt_tokens)",
        "block_pool", "block_size", "enable_caching", "new_block_ids", "num_cached_block", "records_new_block_ids",
        "req_to_blocks",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM": ("collective_rpc", "errored", "input_processor"),
    "vllm.v1.engine.core:EngineCore": ("scheduler", "shutdown"),
    "vllm.v1.engine.core_client:InprocClient": ("engine_core",),
    "vllm.v1.engine.input_processor:InputProcessor": ("process_inputs", "process_inputs_async"),
    "vllm.v1.engine.llm_engine:LLMEngine": (
        "add_request(self, request_id, prompt, params, ...)", "collective_rpc", "engine_core",
        "has_unfinished_requests", "input_processor", "step",
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (
        "max_memory_usage_bytes(self, vllm_config)", "max_num_blocks_per_req", "page_size_bytes",
    ),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": (
        "_ensure_registered(cls, ...)", "register(cls, kvcache_spec_cls, manager_class, uniform_type_base_spec)",
    ),
    "vllm.v1.request:Request": (
        "all_token_ids", "cache_salt", "lora_request", "num_computed_tokens", "num_preemptions", "num_prompt_tokens",
        "request_id", "sampling_params", "status",
    ),
    "vllm.v1.request:RequestStatus": ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "WAITING"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("prompt_token_ids", "sampling_params"),
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("req_ids",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("attn_groups", "input_batch", "max_model_len", "requests"),
    "vllm.v1.worker.utils:AttentionGroup": ("metadata_builders",),
}  # fmt: skip


@cache
def need_vllm() -> Version:
    """What differs in the vLLM that is installed; `ConfigError` where there is none that methods are served in."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("vLLM is not in this environment; run make setup-serving, then .venv-serving/bin/python")
    return check(Path(spec.submodule_search_locations[0]))


def check(folder: Path) -> Version:
    """What differs in the vLLM whose package is this folder; `ConfigError` where it is not known, or has changed."""
    name = name_of(folder)
    version = VERSIONS.get(line_of(name))
    if version is None:
        raise ConfigError(
            f"vLLM {name} is not known: methods are served in {' and '.join(VERSIONS)}; install one of them (make "
            f"setup-serving), or give this one a line in {__name__} and run make test-serving"
        )
    if gone := moved(folder, version):
        more = f" (and {len(gone) - 1} more)" if len(gone) > 1 else ""
        raise ConfigError(
            f"vLLM {name} is not what methods were served in: {gone[0]}{more}; install a version as it was released "
            "(make setup-serving)"
        )
    return version


def name_of(folder: Path) -> str:
    file = folder / "_version.py"
    found = re.search(r"^__version__ = .*'(.+)'", file.read_text() if file.is_file() else "", re.MULTILINE)
    return found[1] if found else "without a version"


def line_of(name: str) -> str:
    """The line of `VERSIONS` that a version such as 0.32.1 belongs to."""
    return ".".join(name.split(".")[:2])


def moved(folder: Path, version: Version) -> list[str]:
    """What the adapter takes from vLLM and does not find in this folder, each in a few words."""
    source = Source(folder)
    own = {version.arguments: ("make_arg_parser(parser)", "validate_parsed_serve_args(args)")}
    found = [f"{name} is gone" for name in imported() if not source.has(name)]
    for owner, needs in {**NEEDS, **own}.items():
        names = source.names(owner)
        for need in needs:
            name, is_call, _ = need.partition("(")
            if name not in names:
                found.append(f"{owner}.{name} is gone")
            elif is_call and not (is_now := signature(name, names[name])).startswith(need.removesuffix(", ...)")):
                found.append(f"{owner}.{name} is now {is_now}")
    return found


def imported() -> Iterator[str]:
    """All that `serving/` imports from vLLM."""
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm."):
                yield from (f"{node.module}:{alias.name}" for alias in node.names)


class Source:
    """A vLLM's source."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = cache(self.read)

    def file(self, module: str) -> Path | None:
        path = self.folder.joinpath(*module.split(".")[1:])
        return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

    def read(self, module: str) -> Mapping[str, ast.stmt]:
        """What a module binds."""
        file = self.file(module)
        return {} if file is None else dict(bound(ast.parse(file.read_text(encoding="utf-8")).body))

    def has(self, name: str) -> bool:
        module, _, rest = name.partition(":")
        return rest in self.module(module) or self.file(f"{module}.{rest}") is not None

    def names(self, owner: str) -> Mapping[str, ast.stmt]:
        """What a module binds; or a class and its bases, with the attributes that they give to `self`."""
        module, _, name = owner.partition(":")
        if not name:
            return self.module(module)
        node = self.module(module).get(name)
        if isinstance(node, ast.ImportFrom):
            return self.names(f"{node.module}:{name}")
        if not isinstance(node, ast.ClassDef):
            return {}
        found: dict[str, ast.stmt] = {}
        for base in reversed(node.bases):
            base = base.value if isinstance(base, ast.Subscript) else base
            found |= self.names(f"{module}:{base.id}") if isinstance(base, ast.Name) else {}
        given = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
        found |= {one.attr: node for one in given if isinstance(one.value, ast.Name) and one.value.id == "self"}
        return found | dict(bound(node.body))


def signature(name: str, node: ast.stmt) -> str:
    """A function as `NEEDS` has it."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return name
    given = node.args
    return f"{name}({', '.join(one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))})"


def bound(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that statements bind, each with the statement."""
    for node in statements:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name, node) for alias in node.names)
            case ast.Assign():
                yield from ((one.id, node) for one in node.targets if isinstance(one, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If() | ast.Try():
                yield from bound([*node.body, *node.orelse])
            case _:
                pass
