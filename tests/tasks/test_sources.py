"""Where data are looked for."""

from importlib import import_module
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.results.names import STAND_INS
from kvbench.tasks import download, sources


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without data: an empty cache, no variable set."""
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_an_explicit_folder_is_searched_alone(no_home: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVBENCH_DATA", str(no_home / "elsewhere"))
    assert sources.data_roots(str(no_home)) == [no_home]


def test_an_explicit_folder_must_exist() -> None:
    with pytest.raises(ConfigError, match="data_dir=/nowhere/at/all is no folder"):
        sources.data_roots("/nowhere/at/all")


def test_the_variable_wins_over_the_sibling_folder_and_the_cache_comes_last(no_home: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVBENCH_DATA", str(no_home / "mine"))
    mine, sibling, cache = sources.data_roots(None)
    assert mine == no_home / "mine"
    assert sibling.parts[-2:] == ("shared", "data")
    assert sibling.parents[1] == Path(sources.__file__).resolve().parents[2]
    assert cache == no_home / "cache" / "kvbench" / "data"


def test_the_first_folder_that_has_the_file_wins(no_home: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVBENCH_DATA", str(no_home / "mine"))
    cached = no_home / "cache" / "kvbench" / "data" / "some" / "file.txt"
    mine = no_home / "mine" / "some" / "file.txt"
    assert sources.find("some/file.txt", None) is None
    for path in (cached, mine):  # the later one is in the better folder
        path.parent.mkdir(parents=True)
        path.touch()
        assert sources.find("some/file.txt", None) == path


def test_a_missing_file_is_reported_with_folders_and_source(no_home: Path) -> None:
    with pytest.raises(ConfigError) as error:
        sources.require("some/file.txt", str(no_home), "the hub dataset some/data")
    for part in ("some/file.txt", str(no_home), "the hub dataset some/data"):
        assert part in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"a":' * 100_000])
def test_a_damaged_file_of_words_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"words\.json .*; get it again from upstream"):
        sources.read_json(tmp_path / "words.json", "upstream")


@pytest.mark.parametrize(
    ("source", "named", "asked"),
    [
        ("local", False, None),
        ("local", True, None),
        ("auto", True, None),
        ("auto", False, ["some/b.txt"]),
        ("hub", False, ["some/a.txt", "some/b.txt"]),
        ("hub", True, ["some/a.txt", "some/b.txt"]),
    ],
)
def test_what_is_missing_is_downloaded_where_the_user_allows_that(
    no_home: Path, monkeypatch, source: str, named: bool, asked: list[str] | None
) -> None:
    names, mine = ["some/a.txt", "some/b.txt"], no_home / "mine"
    data_dir = str(mine) if named else None
    monkeypatch.setenv("KVBENCH_DATA", str(mine))
    (mine / "some").mkdir(parents=True)
    (mine / "some" / "a.txt").write_text("")

    def fetch(benchmark: str, root: Path, *, only: list[str]) -> list[Path]:
        assert (benchmark, root, only) == ("some", mine, asked)
        for name in only:
            (root / name).write_text("")
        return [root / name for name in reversed(only)]

    monkeypatch.setattr(download, "fetch", fetch)
    if asked is None:
        with pytest.raises(ConfigError, match=r"some/b\.txt is missing .* get it from upstream"):
            sources.obtain(names, source, data_dir, "upstream")
    else:
        assert sources.obtain(names, source, data_dir, "upstream") == [mine / name for name in names]


def test_a_file_that_upstream_has_no_more_is_named(no_home: Path, monkeypatch) -> None:
    monkeypatch.setattr(download, "fetch", lambda benchmark, root, *, only: [])
    with pytest.raises(ConfigError, match=r"some/a\.txt is missing \(looked in .*get it from upstream"):
        sources.obtain(["some/a.txt"], "hub", str(no_home), "upstream")


# --- a set of our own in place of a benchmark ----------------------------------------------------

REPO = Path(__file__).resolve().parents[2]
SHAPE = ModelShape("tiny", n_layers=2, h=4, h_kv=2, d_h=16, window=8192, attention_layers=(0, 1))
OURS = tuple(name for name in STAND_INS if name != "helmet")  # which draws some of its parts only


@pytest.fixture
def offline(no_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data anywhere, and nothing may be fetched."""
    monkeypatch.setattr(sources, "data_roots", lambda data_dir: [no_home])

    def fetch(benchmark: str, root: Path, *, only: list[str]) -> list[Path]:
        raise AssertionError(f"{benchmark} is fetched")

    monkeypatch.setattr(download, "fetch", fetch)


def checked(name: str, data_dir: str | None = None, **changes: object) -> str:
    """Where a task takes its samples from, once all is checked that can be without a model."""
    values = yaml.safe_load((REPO / "conf" / "task" / f"{name}.yaml").read_text())
    module, _, kind_name = values.pop("_target_").rpartition(".")
    kind = getattr(import_module(module), kind_name)
    made = kind(build_params(kind, values | changes, "task"), data_dir, 0)
    made.check(SHAPE)
    return made.data_source


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_benchmark_without_its_data_is_refused_and_both_ways_are_named(
    offline: None, no_home: Path, name: str, is_named: bool
) -> None:
    with pytest.raises(ConfigError, match=r"is missing .*; get it from .*, or ask .+ with task\.source=embedded"):
        checked(name, str(no_home) if is_named else None)


@pytest.mark.parametrize("name", OURS)
def test_what_stands_in_for_a_benchmark_is_asked_by_its_source(offline: None, name: str) -> None:
    assert checked(name, source="embedded") == "embedded"


@pytest.mark.parametrize("style", ["kamradt", "data_engineering", "magic_number"])
def test_a_published_needle_lies_in_published_text(offline: None, no_home: Path, style: str) -> None:
    with pytest.raises(ConfigError, match=r"PaulGrahamEssays.* or ask .+ with task\.source=embedded"):
        checked("needle", style=style)
    assert checked("needle") == "embedded"  # a needle of our own is no benchmark's
