"""`kvbench view [RUNS]`: the report of finished runs, opened in a browser.

    kvbench view [RUNS] [--port N] [--no-browser]

The page is made when it is asked for, so a reload shows runs that have ended since, and nothing is written. It is
served on 127.0.0.1 alone, and answers no other path than its own.

Not here: the page (`report.py`), a page to keep or send (`kvbench report`).
"""

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvbench.engine.foreign import one_line
from kvbench.engine.terminal import say
from kvbench.plots.read import default_root, load
from kvbench.plots.site.report import page

HOST = "127.0.0.1"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench view", description="Open the report of finished runs in a browser.")
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1; a free one where not given")
    parser.add_argument("--no-browser", action="store_true", help="only say where the page is")
    given = parser.parse_args(argv)
    if not load(given.runs):
        return refuse(f"{given.runs} holds no finished run; name another folder")
    try:
        server = serving(given.runs, given.port)
    except (OSError, OverflowError) as error:
        return refuse(
            f"port {given.port} cannot be used ({getattr(error, 'strerror', None) or error}); leave out --port"
        )
    with server:
        address = f"http://{HOST}:{server.server_address[1]}/"
        say(f"{one_line(str(given.runs))}: {address} (Ctrl-C ends it)")
        if not given.no_browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def serving(root: Path, port: int) -> ThreadingHTTPServer:
    """A server of one page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if self.path.partition("?")[0] != "/" or host not in (HOST, "localhost"):  # of a page of somebody else's
                return self.send_error(404)
            content = page(load(root), root).encode("utf-8", errors="replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are nobody's business."""

    return ThreadingHTTPServer((HOST, port), Page)


def refuse(sentence: str) -> int:
    say("kvbench view:", one_line(sentence), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
