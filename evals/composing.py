"""Configurations that Hydra composes of the files of conf/, of which it parses each once.

Hydra itself parses twenty files for every configuration, and hundreds are composed where a sweep has many cells or
every method is looked at.

Not here: whether the words of a command line are right (`evals/overrides.py`), what the values mean
(`evals/settings.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra import compose, version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig


class FilesReadOnce(CachingConfigRepository):
    """Keeps the files of conf/ and of Hydra. A user's file (`outside.store`) may say something else next time."""

    def __init__(self, files: IConfigRepository) -> None:
        super().__init__(files)
        self.delegate = files  # itself, as a copy would not see what is stored later

    def __deepcopy__(self, memo: dict[int, object]) -> "FilesReadOnce":
        return self  # Hydra copies its repository for each configuration

    def load_config(self, config_path: str) -> ConfigResult | None:
        """A copy: Hydra makes a configuration of it."""
        found = super().load_config(config_path)
        if found is None or found.provider == "schema":
            del self.cache[f"config_path={config_path}"]
        return deepcopy(found)


@cache
def hydra_of(conf: Path) -> Hydra:
    """Hydra with this folder."""
    version.setbase("1.3")
    loader = ConfigLoaderImpl(create_config_search_path(str(conf)))
    loader.repository = FilesReadOnce(loader.repository)  # pyright: ignore[reportAttributeAccessIssue]
    return Hydra("run", loader)


@contextmanager
def composing(conf: Path) -> Iterator[None]:
    """Hydra's `compose` reads this folder; within a run, too, which has its own Hydra back afterwards."""
    ours, whole = hydra_of(conf), GlobalHydra.instance()
    own, whole.hydra = whole.hydra, ours
    try:
        yield
    finally:
        whole.hydra = own


@cache
def composition(conf: Path, words: tuple[str, ...]) -> DictConfig:
    """A composed configuration, to be read only: keys of several groups are looked up in the same one."""
    with composing(conf):
        return compose("config", [*words], return_hydra_config=True)
