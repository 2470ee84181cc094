"""Which model a cell runs on: its shape and digest before it is loaded, its tokenizer, its weights.

Not here: how a model is loaded (`engine`).
"""

from dataclasses import replace
from typing import Any

import torch

from kvbench.engine.checkpoints.digests import digest_of
from kvbench.engine.checkpoints.load import (
    Letters,
    drawn_checkpoint,
    image_ids,
    load,
    load_random,
    load_tokenizer,
    locate,
    read_checkpoint,
    read_config,
    read_shape,
    resolve_device,
    resolve_dtype,
    shape_of,
    try_kernels,
)
from kvbench.engine.errors import ConfigError
from kvbench.engine.machine import arithmetic, choose
from kvbench.engine.model import Model
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.evals.settings import ModelSpec, Settings, architecture


def resolve_hardware(settings: Settings) -> Settings:
    """Settings with what `auto` stands for in device and dtype. Workers may have a GPU where this process has none."""
    wanted = settings.device if settings.device_map is None else "cuda"
    if settings.pool is not None and wanted.startswith("cuda"):
        dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
        return replace(settings, device=wanted, dtype=dtype)
    if settings.device_map is not None and not torch.cuda.is_available():
        raise ConfigError(
            f"device_map={settings.device_map} divides a model among GPUs, and torch can use none here; leave it out"
        )
    device = resolve_device(wanted)
    return replace(settings, device=device, dtype=resolve_dtype(settings.dtype, device))


def name_of(settings: Settings) -> str:
    """A short name of a model's contents, before they are loaded; its files are converted if need be."""
    spec = settings.model
    if settings.weights == "random":
        return "random"
    where, _ = locate(spec.id, spec.revision, spec.trust_remote_code)
    return digest_of(where, spec.revision)


def look_up(settings: Settings) -> ModelShape:
    """A model's shape, before its weights are loaded."""
    spec = settings.model
    if settings.weights == "random":
        return shape_of(random_config(spec), spec.name)
    return read_shape(spec.name, spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def look_into(settings: Settings) -> Checkpoint:
    """All else that is known of a model before weights are read; `ConfigError` where its files lack some of them."""
    spec = settings.model
    if settings.weights == "random":
        return drawn_checkpoint(spec.name, random_config(spec))
    return read_checkpoint(spec.name, spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def random_config(spec: ModelSpec) -> Any:
    """The architecture to draw weights for: as conf/architecture has it, else from where the model is."""
    return read_config(spec.id, architecture(spec), revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def made_with(settings: Settings) -> dict[str, Any]:
    """What the order of sums depends on, for env.json; of workers it is not known here."""
    if settings.pool is not None:
        return {}
    choose(settings.kernels)
    return {"arithmetic": arithmetic(settings.dtype, settings.device)}


class Models:
    """The model that was loaded last: groups with the same one that follow each other load it once."""

    def __init__(self) -> None:
        self.key: tuple[Any, ...] | None = None
        self.model: Any = None

    def get(self, settings: Settings) -> Model:
        where = settings.device, settings.device_map, settings.kernels
        key = (settings.model, settings.dtype, settings.weights, *where)
        if key != self.key:
            self.key = self.model = None  # there may be no room for two
            self.model, self.key = load_model(settings), key
        self.model.allows_graphs = settings.graphs
        return self.model


def tokenizer_of(settings: Settings) -> Any:
    """The model's tokenizer, before its weights are loaded."""
    spec = settings.model
    if settings.weights == "random":
        return Letters()
    return load_tokenizer(spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def vocabulary_of(settings: Settings) -> int | None:
    """Tokens that the model has an embedding of, as its configuration says."""
    spec = settings.model
    if settings.weights == "random":
        return None  # its tokens are bytes
    return getattr(config_of(spec).get_text_config(decoder=True), "vocab_size", None)


def config_of(spec: ModelSpec) -> Any:
    """transformers' configuration of the model, from where its weights are."""
    return read_config(spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def image_ids_of(settings: Settings) -> frozenset[int]:
    """Tokens by which the model is shown what is no text."""
    spec = settings.model
    if settings.weights == "random":
        return frozenset()
    return image_ids(spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code)


def load_model(settings: Settings) -> Model:
    """Kernels are tried out before the model fills the memory."""
    spec = settings.model
    choose(settings.kernels)
    try_kernels(look_up(settings), settings.dtype, settings.device, settings.device_map)
    where = {"dtype": settings.dtype, "device": settings.device, "device_map": settings.device_map}
    if settings.weights == "random":
        return load_random(spec.name, random_config(spec), **where)
    return load(
        spec.name, spec.id, revision=spec.revision, trust_remote_code=spec.trust_remote_code,
        check=spec.check == "auto", **where,
    )  # fmt: skip
