"""Which vLLM is served in, in every vLLM that lies here: it is read, and need not be importable.

Looked at are the one of this environment, those of `make setup-serving`, and folders that hold a `vllm` each, as a
wheel unpacks to, in KVBENCH_VLLM_SOURCES (joined as PATH is).
"""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.serving import plugin
from kvbench.serving.adapter import versions
from kvbench.serving.adapter.versions import VERSIONS, check, line_of, moved, name_of, need_vllm
from kvbench.serving.order import DROPPING, Order
from kvbench.serving.serve import main

ROOT = Path(__file__).resolve().parents[2]
MANAGER = "v1/core/single_type_kv_cache_manager.py"


def sources() -> dict[str, Path]:
    """The packages of vLLM that lie here, by their line of `VERSIONS`."""
    spec = find_spec("vllm")
    named = filter(None, os.environ.get("KVBENCH_VLLM_SOURCES", "").split(os.pathsep))
    folders = [
        *([] if spec is None else map(Path, spec.submodule_search_locations or ())),
        *ROOT.glob(".venv-serving*/lib/python3*/site-packages/vllm"),
        *(Path(name) / "vllm" for name in named),
    ]
    return {line_of(name_of(folder)): folder for folder in folders}


@pytest.fixture(params=VERSIONS)
def package(request: pytest.FixtureRequest) -> Path:
    found = sources().get(request.param)
    if found is None:
        pytest.skip(f"no vLLM {request.param} lies here: make setup-serving, or KVBENCH_VLLM_SOURCES=FOLDER")
    return found


@pytest.fixture
def changed(package: Path, tmp_path: Path) -> Callable[[str, str, str], Path]:
    """A vLLM in which one file says something else, and all others are links."""

    def change(file: str, old: str, new: str) -> Path:
        text = (package / file).read_text()
        assert old in text
        for folder, child in zip(reversed(Path(file).parents), Path(file).parts, strict=True):
            (tmp_path / folder).mkdir(exist_ok=True)
            for one in (package / folder).iterdir():
                if one.name != child:
                    (tmp_path / folder / one.name).symlink_to(one)
        (tmp_path / file).write_text(text.replace(old, new))
        return tmp_path

    return change


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Puts another vLLM in place of this environment's."""

    def install(folder: Path) -> None:
        monkeypatch.setattr(
            versions, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[f"{folder}"])
        )
        need_vllm.cache_clear()

    yield install
    need_vllm.cache_clear()


def test_a_version_has_all_that_the_adapter_takes_from_it(package: Path) -> None:
    own = VERSIONS[line_of(name_of(package))]
    assert moved(package, own) == []
    assert check(package) is own
    assert all(moved(package, other) for other in VERSIONS.values() if other != own)


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        (MANAGER, "def pop_blocks_for_free(self,", "def take_blocks(self,", "Manager.pop_blocks_for_free is gone"),
        (MANAGER, "self.req_to_blocks", "self.blocks_of", "Manager.req_to_blocks is gone"),
        (
            MANAGER, "request_id: str, num_tokens: int, num_tokens_main_model: int\n", "request_id: str, more: int\n",
            "Manager.allocate_new_blocks is now allocate_new_blocks(self, request_id, more);",
        ),
        ("v1/attention/selector.py", "_cached_get_attn_backend", "_get", "selector:_cached_get_attn_backend is gone"),
    ],
    ids=("method", "attribute", "parameters", "import"),
)  # fmt: skip
def test_what_moved_is_named(changed: Callable[[str, str, str], Path], file: str, old: str, new: str, why: str) -> None:
    with pytest.raises(ConfigError, match="is not what methods were served in") as error:
        check(changed(file, old, new))
    assert why in f"{error.value}"


def test_an_unknown_version_is_refused_by_one_sentence_wherever_it_is_asked_for(
    tmp_path: Path, installed: Callable[[Path], None], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "_version.py").write_text("__version__ = version = '0.34.0'\n")
    installed(tmp_path)
    monkeypatch.setenv("KVBENCH_SERVING", "")
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.34\.0 is not known: methods are served in 0\.32 and 0\.33"
    ) as error:
        check(tmp_path)
    plugin.register()  # without an order it is nobody's business
    Order(("method=snapkv", "ratio=0.2"), DROPPING).give()
    with pytest.raises(ConfigError) as again:
        plugin.register()
    assert f"{again.value}" == f"{error.value}"
    assert main(["method=snapkv", "ratio=0.2"]) == 2
    assert capsys.readouterr().err == f"kvbench.serving.serve: {error.value}\n"
