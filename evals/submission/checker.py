"""The worker that looks at one run at a time: `engine/workers/limited.py` asks, and ends it at a limit.

Not here: the checks (`check.py`).
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.engine.workers.serve import serve
from kvbench.evals.submission.check import Check, is_full, read_safely, same_key
from kvbench.results.ledger import pyarrow

LIMIT_S = 60.0  # of a processor, for a run; one of 5,000 answers takes two


def reply(question: Mapping[str, Any]) -> Any:
    root, run = Path(question["root"]), question["run"]
    if question["what"] == "key":
        try:
            config = read_safely(root / run)
            return {"key": same_key(config), "full": is_full(config)}
        except (ValueError, TypeError, RecursionError) as error:
            return {"damage": " ".join(str(error).split())[:300]}
    return asdict(Check(root, run, question["full"], Path(question["registry"])).all())


def warm_up() -> None:
    pyarrow()


if __name__ == "__main__":
    serve(reply, warm_up)
