"""A hub that cannot be reached is given up at once; one that is slow, or has not what is asked, is listened to."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFIG = b'{"model_type": "llama"}'
CODE = """
import sys, time
from kvbench.engine.checkpoints import header
from kvbench.engine.errors import ConfigError
header.CONNECT_S = 0.2  # a tenth of what the slow hub takes
import huggingface_hub, huggingface_hub.errors  # which takes a while to import
start = time.monotonic()
try:
    print(header.hub_config(sys.argv[1], None).read_text())
except ConfigError as error:
    print(error)
print(time.monotonic() - start)
"""


class SlowHub(BaseHTTPRequestHandler):
    """Has one file of one model, and takes two seconds to say so."""

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(CONFIG)

    def answer(self, body: bytes) -> None:
        time.sleep(2.0)
        found = self.path == "/org/name/resolve/main/config.json"
        self.send_response(200 if found else 404)
        told = {"ETag": '"abc"', "X-Repo-Commit": "0" * 40} if found else {"X-Error-Code": "RepoNotFound"}
        for key, value in (told | {"Content-Length": str(len(CONFIG) if found else 0)}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body if found else b"")

    def log_message(self, *_: object) -> None:
        """Nothing: standard error is the test's."""


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowHub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def look_for(model: str, endpoint: str, tmp_path: Path) -> tuple[str, float]:
    """What the look-up says, and how many seconds it took."""
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", CODE, model]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, seconds = done.stdout.strip().splitlines()
    return said, float(seconds)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no.such.host.invalid"])
def test_a_hub_that_is_not_there_is_given_up_within_seconds(endpoint: str, tmp_path: Path) -> None:
    said, seconds = look_for("org/name", endpoint, tmp_path)
    assert "could not be had from the hub (which does not answer: " in said and "hf download org/name" in said
    assert seconds < 5


def test_a_slow_hub_is_waited_for(hub: str, tmp_path: Path) -> None:
    said, _ = look_for("org/name", hub, tmp_path)
    assert said == CONFIG.decode()
    said, seconds = look_for("org/name", "http://127.0.0.1:9", tmp_path)  # whose answer is kept
    assert said == CONFIG.decode() and seconds < 5


def test_what_a_slow_hub_does_not_have_is_said(hub: str, tmp_path: Path) -> None:
    said, _ = look_for("org/other", hub, tmp_path)
    assert "'org/other' is no folder" in said and "does not answer" not in said
