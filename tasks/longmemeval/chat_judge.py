"""`ChatJudge`: a model behind an OpenAI-compatible address that says yes or no to an answer.

Scores of a judge come later (`scores_later` in `tasks/base.py`): a run writes its answers, and `python -m
kvbench.evals.rescore --write RUN` asks the judge for one after the other and keeps each verdict at once. A judge that
cannot be reached ends it with one sentence, and the same command goes on after the last verdict.

The key is the environment's KVBENCH_JUDGE_KEY, where the address wants one. It stands in no result and in no message.

Not here: what a task asks its judge, and which answers.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvbench.engine.errors import ConfigError, one_line

KEY = "KVBENCH_JUDGE_KEY"
PATIENCE = 120  # seconds for one verdict
PAUSES = (1, 5, 20)  # seconds before the same question is asked again
MOST_TOKENS = 1024  # of a reply, so that a judge may think
LARGEST = 1 << 20  # bytes of a reply
BROKEN = (  # no server, half a reply, other JSON
    OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException,
)  # fmt: skip
AGAIN = (408, 409, 425, 429)  # codes after which waiting may help, besides those of a server's own trouble


def check_address(address: str) -> None:
    """Raise `ConfigError` for what is no plain address of a server, or holds a password."""
    try:
        parts = urlsplit(address)
        is_plain = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        raise ConfigError(f"{shown(address)}; give one like http://localhost:8000/v1") from None
    if not is_plain or parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{shown('' if parts.username is not None or parts.query else address)}; give one like "
            f"http://localhost:8000/v1, and a key by the environment's {KEY}"
        )


def shown(address: str) -> str:
    return f"task.judge={address or '…'} is no plain address of a server"


@dataclass(frozen=True)
class ChatJudge:
    address: str  # up to /v1
    model: str

    def says_yes(self, question: str) -> bool | None:
        """The judge's verdict; None where its reply has neither word."""
        reply = self.reply(question).rpartition("</think>")[2].casefold()
        words = "".join(one if one.isalpha() else " " for one in reply).split()
        return next((word == "yes" for word in words if word in ("yes", "no")), None)

    def reply(self, question: str) -> str:
        """What the judge says to a question; asked again where its server is busy or breaks off."""
        reason = ""
        for pause in (*PAUSES, None):
            try:
                return self.ask(question)
            except urllib.error.HTTPError as error:
                with error:
                    reason = f"{error.code}: {words_of(error)}"
                if error.code < 500 and error.code not in AGAIN:
                    raise ConfigError(
                        f"task.judge={self.address} refuses to judge ({reason}); check the address, task.judge_model="
                        f"{self.model} and {KEY}"
                    ) from None
            except BROKEN as error:
                reason = without_key(one_line(error))
            if pause is not None:
                time.sleep(pause)
        raise ConfigError(
            f"task.judge={self.address} gave no verdict in {len(PAUSES) + 1} tries ({reason}); see that it runs, "
            "and give the same command again: it goes on after the last verdict"
        )

    def ask(self, question: str) -> str:
        content = {
            "model": self.model, "messages": [{"role": "user", "content": question}], "temperature": 0,
            "max_tokens": MOST_TOKENS,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        if key := key_of():
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self.address.rstrip('/')}/chat/completions", json.dumps(content).encode(), headers
        )
        with urllib.request.build_opener(Stays).open(request, timeout=PATIENCE) as answer:
            found: Any = json.loads(answer.read(LARGEST))
        text = found["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise ValueError("a reply without a text")
        return text


class Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would take the key to another server."""

    def redirect_request(self, *args: Any) -> None:
        return None


def key_of() -> str:
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and (key.isprintable() or not key)):  # what refuses it later would print it
        raise ConfigError(f"the environment's {KEY} holds a character that no key for task.judge can have; set it anew")
    return key


def without_key(text: str) -> str:
    key = key_of()
    return text.replace(key, "…") if key else text


def words_of(error: urllib.error.HTTPError) -> str:
    """The server's own words, without the key, which some servers repeat."""
    try:
        said = error.read(2000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        said = ""
    return without_key(" ".join((said or str(error.reason)).split()))[:200]
