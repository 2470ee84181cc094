"""Find a checkpoint and load its model, its tokenizer, or only its configuration; choose device and dtype.

Checkpoints are a folder, a `.gguf` file, a name on the hub, or `embedded`.

Not here: the model while it runs (`engine/model.py`), GGUF to safetensors (`engine/checkpoints/conversion.py`), which
checkpoint is which (`engine/checkpoints/digests.py`), a shape without torch (`engine/checkpoints/header.py`).
"""

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.checkpoints.conversion import converted_folder, from_gguf, quiet
from kvbench.engine.checkpoints.digests import cache_home, digests_of, read_own, write_own
from kvbench.engine.checkpoints.gguf import check_gguf
from kvbench.engine.checkpoints.header import check_config, gguf_file, hub_config, not_had
from kvbench.engine.checkpoints.kinds import auto_class, check_compresses, shape_of
from kvbench.engine.checkpoints.packages import out_of_bounds
from kvbench.engine.checkpoints.placement import device_map_of, layer_devices, spread
from kvbench.engine.checkpoints.text import how_to_read, marks, text_part
from kvbench.engine.checkpoints.trial import check_tokenizer
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.machine import cpu_multiplies_bfloat16
from kvbench.engine.model import Model, decoder_layers, register_attention
from kvbench.engine.passes.agreement import check_attention
from kvbench.engine.passes.rotations import rotary_dims
from kvbench.engine.shapes import DRAWN, Checkpoint, ModelShape
from kvbench.kernels import fast
from kvbench.kernels.build import is_plain
from kvbench.kernels.jit import triton

logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")  # that take its place
CHECK_VERSION = 2  # of the comparison of our attention with transformers' own: another one is made anew


def load(
    name: str,
    id: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    check: bool = True,
) -> Model:
    """Load a model; `id` is a folder, a .gguf file, a hub name or `embedded`. A `device_map` divides its layers.

    Before it is given away it answers a short prompt by transformers' own attention and by ours; `check=False` leaves
    that out.
    """
    from transformers import AutoConfig

    where, options = locate(id, revision, trust_remote_code)
    if not Path(where).exists():
        hub_config(where, revision)  # refuses at once what transformers would look for again and again
    digests = digests_of(where, revision)
    on = torch_device(device)
    kind = getattr(torch, resolve_dtype(dtype, device))
    register_attention()
    tokenizer = tokenizer_at(where, options, id)
    with quiet(), _explained(id, where):
        config = AutoConfig.from_pretrained(where, **options)
        model_and_info: Any = auto_class(text_part(config)).from_pretrained(
            where, dtype=kind, output_loading_info=True, ignore_mismatched_sizes=True, **how_to_read(config),
            **options, **({} if device_map is None else {"device_map": divided(config, options, device_map, kind)}),
        )  # fmt: skip
        hf, info = model_and_info
        shape = shape_of(hf.config, name)
    refuse_drawn(id, info)
    hf.eval()
    if device_map is None:
        hf.to(on)
    model = made(hf, tokenizer, shape, kind, *digests)
    if check:
        check_once(model, Path(where).exists())
    return model


def refuse_drawn(id: str, info: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where transformers has drawn weights that the files lack."""
    wrong = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if wrong:
        raise ConfigError(
            f"the model {id} has no weights of the right size for {wrong[0]} and {len(wrong) - 1} others that its "
            "config.json asks for; copy or download it again"
        )


def check_once(model: Model, is_local: bool) -> None:
    """Compare our attention with transformers' own, once for each local checkpoint and whatever else it depends on.

    What was held is a file in the cache folder. A name on a hub may stand for other weights tomorrow.
    """
    import transformers

    facts = model.digest, model.dtype, model.device.type, torch.__version__, transformers.__version__, CHECK_VERSION
    held = cache_home() / "checked" / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    if is_local and is_own(held):
        return
    check_attention(model)
    if is_local:
        with suppress(OSError):  # a cache that cannot be written to costs the check once more
            write_own(held, "")


def is_own(file: Path) -> bool:
    """Whether there is such a file that nobody else wrote or can write."""
    try:
        read_own(file, 1)
    except (OSError, ValueError):
        return False
    return True


def read_checkpoint(name: str, id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
    """What is known of a model before its weights are read; `ConfigError` where its files lack some of them.

    Of weights on the hub nothing is asked. Quantised ones are read where they are used: some need a GPU for that.
    """
    config = read_config(id, revision=revision, trust_remote_code=trust_remote_code)
    with _explained(id):
        shape = shape_of(config, name)
    where, options = locate(id, revision, trust_remote_code)
    digests = digests_of(where, revision)
    if not Path(where).is_dir() or getattr(config, "quantization_config", None) is not None:
        with quiet(), _explained(id, where):
            return Checkpoint(shape, digests, rotary_dims(empty_model(config, trust_remote_code)), where=where)
    with quiet(), _explained(id, where):
        model_and_info: Any = auto_class(config).from_pretrained(
            where, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True,
            **how_to_read(whole_config(id, revision=revision, trust_remote_code=trust_remote_code)), **options,
        )  # fmt: skip
    hf, info = model_and_info
    refuse_drawn(id, info)
    return Checkpoint(shape, digests, rotary_dims(hf), where=where)


def drawn_checkpoint(name: str, config: Any) -> Checkpoint:
    """The checkpoint of a model whose weights are drawn."""
    return Checkpoint(shape_of(config, name), (drawn_digest(config),), rotary_dims(empty_model(config)))


def empty_model(config: Any, trust_remote_code: bool = False, dtype: torch.dtype | None = None) -> Any:
    """The model's modules without their weights."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def divided(config: Any, options: Mapping[str, Any], how: str, dtype: torch.dtype) -> dict[str, torch.device]:
    """The GPU of each module of a checkpoint, before any weight is read."""
    return device_map_of(empty_model(text_part(config), options.get("trust_remote_code", False), dtype), how, dtype)


def load_random(
    name: str, config: Any, *, dtype: str = "auto", device: str = "auto", device_map: str | None = None
) -> Model:
    """A model of that architecture whose weights are drawn, the same each time: for times, not for answers.

    With a `device_map` they are drawn in the host's memory.
    """
    on = torch_device(device) if device_map is None else torch.device("cpu")
    kind = getattr(torch, resolve_dtype(dtype, device))
    register_attention()
    with quiet(), torch.random.fork_rng(devices=[on] if on.type == "cuda" else []), torch.device(on):
        torch.manual_seed(0)  # transformers draws from the global generator
        hf: Any = auto_class(config).from_config(config, dtype=kind)
    hf.eval()
    if device_map is not None:
        spread(hf, device_map, kind)
    return made(hf, Letters(), shape_of(hf.config, name), kind, drawn_digest(config))


def drawn_digest(config: Any) -> str:
    """The digest of drawn weights, in place of that of files."""
    return f"{DRAWN}{hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]}"


def made(hf: Any, tokenizer: Any, shape: ModelShape, dtype: torch.dtype, digest: str, *other_digests: str) -> Model:
    """A model whose weights are where they are to be."""
    first, layers = hf.get_input_embeddings().weight.device, layer_devices(decoder_layers(hf))
    apart = layers if {*layers} - {first} else ()
    return Model(hf, tokenizer, shape, dtype, first, digest, layer_devices=apart, other_digests=other_digests)


def load_tokenizer(id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A model's tokenizer without its weights."""
    return tokenizer_at(*locate(id, revision, trust_remote_code), id)


def tokenizer_at(where: str, options: Mapping[str, Any], id: str) -> Any:
    """The tokenizer of a folder or a hub name, tried out before it is believed."""
    from transformers import AutoTokenizer

    check_tokenizer(where, options, id)
    try:
        with quiet(), _explained(id, where):
            tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except ConfigError:
        refuse_no_tokenizer(Path(where), VOCABULARIES, id)
        raise
    # Classes of some models make a tokenizer without a vocabulary where its files are not there.
    refuse_no_tokenizer(Path(where), {*getattr(tokenizer, "vocab_files_names", {}).values()}, id)
    return tokenizer


def refuse_no_tokenizer(folder: Path, names: Collection[str], id: str) -> None:
    """Raise `ConfigError` where a folder has none of the files that its tokenizer would be made of."""
    if not names or not folder.is_dir() or any(folder.glob("tokenizer.*")):
        return
    if not any((folder / name).is_file() for name in names):
        others = ", ".join(sorted({*names} - {TOKENIZER})) or "another file"
        raise ConfigError(
            f"the folder model.id={id} has no {TOKENIZER} (nor {others} in its place), so no text becomes tokens; copy "
            "it from where the weights are from"
        )


class Letters:
    """A tokenizer's stand-in where weights are drawn: a token is a byte, and none ends an answer."""

    chat_template = eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def read_config(
    id: str, given: Mapping[str, Any] | None = None, *,
    revision: str | None = None, trust_remote_code: bool = False,
) -> Any:  # fmt: skip
    """transformers' configuration of a text model, from the values `given` or from where the model is."""
    from transformers import AutoConfig

    if given is not None:
        return AutoConfig.for_model(**given)
    return text_part(whole_config(id, revision=revision, trust_remote_code=trust_remote_code))


def image_ids(id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> frozenset[int]:
    """Tokens by which a model is shown an image, or another thing that is no text."""
    return marks(whole_config(id, revision=revision, trust_remote_code=trust_remote_code))


def whole_config(id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """transformers' configuration of all that a model has, from where it is."""
    from transformers import AutoConfig

    file = gguf_file(id)
    if file is not None and not (converted_folder(file) / "config.json").is_file():
        check_gguf(file)  # whose header says it too, without a conversion
        with quiet(), _explained(id):
            return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    where, options = locate(id, revision, trust_remote_code)
    with quiet(), _explained(id, where):
        return AutoConfig.from_pretrained(where, **options)


def read_shape(name: str, id: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelShape:
    """The model's shape from its configuration alone, before weights are loaded."""
    config = read_config(id, revision=revision, trust_remote_code=trust_remote_code)
    with _explained(id):
        shape = shape_of(config, name)
    check_compresses(shape)
    return shape


def locate(id: str, revision: str | None, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """Arguments of `from_pretrained`: a folder or a hub name, and options."""
    if (file := gguf_file(id)) is not None:
        return str(from_gguf(file)), {"trust_remote_code": False}
    path = Path(id).expanduser()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if path.is_dir():
        check_config(path / "config.json", id)
        return str(path), options
    return id, options | ({} if revision is None else {"revision": revision})


@cache
def warn_of_triton() -> None:
    """Say once that there is no Triton, or one that kernels were not tried with."""
    if triton is None:
        logger.warning(
            "Triton is not installed, and torch does the work of a GPU's kernels, slower: pip install -c "
            "constraints.txt triton"
        )
    elif words := out_of_bounds("triton"):
        logger.warning("%s: no kernel was tried with it, and some may be slow, fail or be wrong", words)


def resolve_device(device: str) -> str:
    """`auto` is the first GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not is_there(device.partition(":")[0]):
        raise ConfigError(
            f"device={device} needs a GPU that torch can use, and there is none; use device=cpu or device=auto"
        )
    if device.startswith("cuda") and not is_plain():
        warn_of_triton()
    return device


def is_there(kind: str) -> bool:
    """Whether torch can use an accelerator of this kind."""
    return torch.backends.mps.is_available() if kind == "mps" else getattr(torch, kind).is_available()


def torch_device(device: str) -> torch.device:
    """The device with its number, as tensors there have it."""
    found = torch.device(resolve_device(device))
    if found.type == "cpu":
        return found
    if found.type == "mps":
        return torch.device("mps", 0)
    of_kind: Any = getattr(torch, found.type)
    n_devices = of_kind.device_count()
    index = of_kind.current_device() if found.index is None else found.index
    if index >= n_devices:
        raise ConfigError(
            f"device={device} is not there: torch can use {n_devices} GPUs, {found.type}:0 to "
            f"{found.type}:{n_devices - 1}; use one of them or device=auto"
        )
    return torch.device(found.type, index)


def try_kernels(shape: ModelShape, dtype: str, device: str, device_map: str | None) -> None:
    """Find out which kernels do here what torch does, in a model's shapes."""
    first = torch_device(device)
    n_devices = 1 if device_map is None else torch.cuda.device_count()
    for on in [first] if n_devices == 1 else [torch.device("cuda", i) for i in range(n_devices)]:
        fast.try_out(fast.shapes_of(shape, getattr(torch, dtype)), on)


def resolve_dtype(dtype: str, device: str) -> str:
    """`auto` is bfloat16 where that is fast: on a GPU, and on CPUs that multiply it."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if resolve_device(device) != "cpu" or cpu_multiplies_bfloat16() else "float32"


@contextmanager
def _explained(id: str, where: str | None = None) -> Iterator[None]:
    """Turn a failed look-up into one sentence that says how to get the model; it is read from `where`."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:  # another version of a package, or none of one that a tokenizer needs
        raise ConfigError(
            f"the model {id} cannot be loaded with transformers {version('transformers')} ({first_line(error)}); "
            "install what is missing, or the version that python run.py --check asks for"
        ) from error
    except Exception as error:  # a damaged checkpoint makes transformers raise whatever it may
        reason = first_line(error)
        if Path(id).expanduser().exists() or id == "embedded":
            is_converted = where is not None and Path(where).parent == cache_home() / "models"
            remedy = f"delete {where}, which is made anew" if is_converted else "copy or download its files again"
            raise ConfigError(f"the model {id} cannot be loaded ({reason}); {remedy}, or give another one") from error
        if not isinstance(error, (OSError, ValueError)):  # what is not found or reached is one
            raise
        raise not_had(id, reason) from None
