"""Downloads against a server of our own: pinned paths, checksums, going on after a break, one sentence when offline."""

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.evals.fetch import main
from kvbench.tasks import download
from kvbench.tasks.download import Piece

REVISION, CODE = "a" * 40, "b" * 40
ROWS = b'{"input": "q"}\n' * 3
BIG = bytes(range(256)) * 4096


def zipped(**files: bytes) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/"), content)
    return out.getvalue()


ARCHIVE = zipped(**{"data__qasper.jsonl": ROWS, "data__lcc.jsonl": b"{}\n", "data__README": b"no"})


@dataclass
class Site:
    """What the server has, what it was asked, and after how many bytes it hangs up once."""

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    break_at: int | None = None
    gated: set[str] = field(default_factory=set)  # what it has for accounts alone that accepted terms
    url: str = ""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    """The hub and GitHub at once."""
    made = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(is_head=True)

        def do_GET(self) -> None:
            self.answer(is_head=False)

        def answer(self, is_head: bool) -> None:
            wanted = self.headers.get("Range")
            made.asked.append((self.command, self.path, wanted))
            content = made.files.get(self.path)
            is_gated = self.path in made.gated and self.headers.get("Authorization") != "Bearer mine"
            if content is None or is_gated:
                self.send_response(401 if is_gated else 404)
                self.send_header("X-Error-Code", "GatedRepo" if is_gated else "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
            self.send_response(206 if wanted else 200)
            digest = hashlib.sha256(content).hexdigest()
            self.send_header("ETag", f'"{digest}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content) - start))
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if is_head:
                return
            if made.break_at is not None and start < made.break_at:
                self.wfile.write(content[start : made.break_at])
                self.close_connection = True
                made.break_at = None
                return
            self.wfile.write(content[start:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("KVBENCH_GITHUB", f"{made.url}/raw")
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def hub(path: str) -> str:
    return f"/datasets/o/d/resolve/{REVISION}/{path}"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, site: Site) -> dict[str, tuple[Piece, ...]]:
    """A benchmark with a file of GitHub, an archive and a file of the hub whose checksum nobody pinned."""
    config = b'{"qasper": "{context}"}'
    site.files = {
        f"/raw/o/code/{CODE}/config/prompts.json": config,
        hub("data.zip"): ARCHIVE,
        hub("big.jsonl"): BIG,
    }
    table = {
        "bench": (
            Piece("o/code", CODE, "config/prompts.json", "bench/config/prompts.json", sha256(config), "github"),
            Piece("o/d", REVISION, "data.zip", "bench/data", sha256(ARCHIVE), members="data/*.jsonl"),
            Piece("o/d", REVISION, "big.jsonl", "bench/big.jsonl"),
        )
    }  # fmt: skip
    monkeypatch.setattr(download, "downloads", lambda: table)
    return table


def test_all_files_arrive_where_the_loader_looks(site, sources, tmp_path: Path) -> None:
    files = download.fetch("bench", tmp_path)
    names = [file.relative_to(tmp_path).as_posix() for file in files]
    assert names == [
        "bench/config/prompts.json", "bench/data/lcc.jsonl", "bench/data/qasper.jsonl", "bench/big.jsonl",
    ]  # fmt: skip
    assert (tmp_path / "bench/data/qasper.jsonl").read_bytes() == ROWS
    assert (tmp_path / "bench/big.jsonl").read_bytes() == BIG
    files_asked = [path for _, path, _ in site.asked if not path.startswith("/api/")]
    assert all(REVISION in path or CODE in path for path in files_asked)  # never a branch
    assert not list((tmp_path / "bench").rglob("*.zip"))


def test_what_is_here_is_not_asked_for_again_and_what_was_deleted_is_made_again(
    site, sources, monkeypatch, tmp_path: Path
) -> None:
    download.fetch("bench", tmp_path)
    site.asked.clear()
    download.fetch("bench", tmp_path)
    assert site.asked == []
    (tmp_path / "bench/data/lcc.jsonl").unlink()
    (tmp_path / "bench/big.jsonl").write_bytes(b"another file")
    download.fetch("bench", tmp_path)
    assert (tmp_path / "bench/data/lcc.jsonl").exists() and (tmp_path / "bench/big.jsonl").read_bytes() == BIG
    assert site.asked == []  # the hub's cache has both
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    download.fetch("bench", tmp_path / "other", only=["bench/data/*", "bench/big.jsonl"])
    assert (tmp_path / "other/bench/data/lcc.jsonl").exists() and site.asked == []


def test_a_file_that_was_put_there_is_taken_where_it_is_the_pinned_one(site, sources, monkeypatch, tmp_path) -> None:
    pinned = Piece("o/d", REVISION, "big.jsonl", "bench/big.jsonl", sha256(BIG))
    monkeypatch.setitem(sources, "bench", (pinned,))
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "big.jsonl").write_bytes(BIG)
    assert download.fetch("bench", tmp_path) == [tmp_path / "bench/big.jsonl"] and site.asked == []
    (tmp_path / "bench" / "big.jsonl").write_bytes(BIG[:9])  # an excerpt
    download.fetch("bench", tmp_path)
    assert (tmp_path / "bench" / "big.jsonl").read_bytes() == BIG


def test_only_what_is_wanted_is_fetched(site, sources, tmp_path: Path) -> None:
    download.fetch("bench", tmp_path, only=["bench/config/*"])
    assert len(site.asked) == 1
    files = download.fetch("bench", tmp_path, only=["bench/data/qasper.jsonl"])
    assert tmp_path / "bench/data/qasper.jsonl" in files
    assert not (tmp_path / "bench/big.jsonl").exists()


@pytest.mark.parametrize("path", ["github", "archive", "stated"])
def test_another_content_than_the_pinned_one_is_refused(site, sources, tmp_path, path) -> None:
    address = {"github": f"/raw/o/code/{CODE}/config/prompts.json", "archive": hub("data.zip")}
    if path == "stated":
        piece = sources["bench"][2]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(download, "sha256_of", lambda file: "0" * 64)
            with pytest.raises(ConfigError, match="arrived with the checksum 000000"):
                download.have(piece, tmp_path, lambda line: None)
        assert not (tmp_path / piece.target).exists()
        return
    site.files[address[path]] = b"something else"
    with pytest.raises(ConfigError, match=r"arrived with the checksum .* instead of"):
        download.fetch("bench", tmp_path)
    assert not list(tmp_path.rglob("qasper.jsonl"))
    assert not (tmp_path / "bench/big.jsonl").exists()


def test_a_download_that_broke_off_goes_on_where_it_stopped(site, sources, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    site.break_at = 3 * len(BIG) // 4
    piece = sources["bench"][2]
    try:
        download.have(piece, tmp_path, lambda line: None)
    except ConfigError:  # the client may try again by itself
        download.have(piece, tmp_path, lambda line: None)
    assert (tmp_path / piece.target).read_bytes() == BIG
    ranges = [wanted for method, _, wanted in site.asked if method == "GET" and wanted]
    assert ranges
    assert all(int(one.removeprefix("bytes=").partition("-")[0]) > 0 for one in ranges)


def test_without_a_network_one_sentence_says_what_to_do(sources, monkeypatch, tmp_path, capsys) -> None:  # fmt: skip
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("KVBENCH_GITHUB", "http://127.0.0.1:9")
    for piece in sources["bench"][::2]:
        with pytest.raises(ConfigError, match=rf"cannot be fetched from http.*{piece.target}.*data_dir"):
            download.fetch("bench", tmp_path, only=[piece.target])
    assert main(["bench", "--into", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err


def test_a_file_that_is_gone_upstream_is_named(site, sources, tmp_path: Path) -> None:
    del site.files[hub("big.jsonl")]
    with pytest.raises(ConfigError, match=r"o/d@aaaaaaaa/big\.jsonl is not at http"):
        download.fetch("bench", tmp_path, only=["bench/big.jsonl"])
    site.files.clear()
    with pytest.raises(ConfigError, match=r"prompts\.json cannot be fetched .*404"):
        download.fetch("bench", tmp_path, only=["bench/config/*"])


def test_a_gated_file_is_refused_with_what_opens_it(site, sources, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    site.gated.add(hub("big.jsonl"))
    with pytest.raises(ConfigError) as caught:
        download.fetch("bench", tmp_path, only=["bench/big.jsonl"])
    said = str(caught.value)
    assert "\n" not in said and f"accept the terms at {site.url}/datasets/o/d, set HF_TOKEN" in said
    assert said.endswith("or put the file into the data folder by hand (bench/big.jsonl)")
    monkeypatch.setenv("HF_TOKEN", "mine")
    (path,) = download.fetch("bench", tmp_path, only=["bench/big.jsonl"])
    assert path.read_bytes() == BIG


def test_an_archive_without_the_files_is_refused(site, sources, monkeypatch, tmp_path) -> None:
    other = zipped(readme=b"moved")
    site.files[hub("data.zip")] = other
    moved = Piece("o/d", REVISION, "data.zip", "bench/data", sha256(other), members="data/*.jsonl")
    monkeypatch.setitem(sources, "bench", (moved,))
    with pytest.raises(ConfigError, match="layout has changed upstream"):
        download.fetch("bench", tmp_path)


def test_the_command_line(site, sources, tmp_path, capsys, monkeypatch) -> None:
    assert main(["bench"]) == 0
    assert (download.cache_root() / "bench/data/qasper.jsonl").exists()
    assert "bench: 4 files in" in capsys.readouterr().out
    assert main(["bnch", "--into", str(tmp_path)]) == 2
    assert "did you mean 'bench'" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["bench", "--into", str(blocked)]) == 2
    assert "cannot be kept" in capsys.readouterr().err


def test_every_source_is_pinned_to_a_commit_and_has_its_own_place() -> None:
    for name, pieces in download.downloads().items():
        assert pieces
        assert len({piece.target for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert len(piece.revision) == 40
            assert int(piece.revision, 16)
            assert piece.target.startswith(f"{name}/")
            assert piece.sha256 is None or len(piece.sha256) == 64


def test_what_a_killed_call_has_begun_is_in_nobodys_way(site, sources, tmp_path: Path) -> None:
    rest = tmp_path / "bench" / "data" / ".new-dead"
    rest.mkdir(parents=True)
    (rest / "qasper.jsonl").write_text("half")
    download.fetch("bench", tmp_path)
    assert (tmp_path / "bench/data/qasper.jsonl").read_bytes() == ROWS


def test_a_file_of_parquet_becomes_lines(site, sources, monkeypatch, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out, rows = BytesIO(), [{"a": "\u00e9", "n": 1}, {"a": None, "n": 2}]
    pq.write_table(pa.Table.from_pylist(rows), out)
    site.files[hub("rows.parquet")] = out.getvalue()
    piece = Piece("o/d", REVISION, "rows.parquet", "bench/rows.jsonl")
    monkeypatch.setitem(sources, "bench", (piece,))
    (path,) = download.fetch("bench", tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    site.files[hub("worse.parquet")] = b"no"
    monkeypatch.setitem(sources, "bench", (Piece("o/d", REVISION, "worse.parquet", "bench/worse.jsonl"),))
    with pytest.raises(ConfigError, match=r"worse\.parquet is no Parquet file that can be read"):
        download.fetch("bench", tmp_path)
