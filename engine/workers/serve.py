"""The worker's side of `limited.py`: replies to lines of JSON within a limit of memory and one of processor time.

The kernel ends the process at either limit, even in the middle of one operation and where the parent is gone.

Not here: what is replied, and who asks.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MEMORY_BYTES = 4 << 30


def serve(
    reply: Callable[[Mapping[str, Any]], Any], warm_up: Callable[[], None], memory_bytes: int = MEMORY_BYTES
) -> None:
    """Answer until the input ends; `warm_up` imports and compiles what the first reply needs, before its clock runs.

    Memory is what replies may take in addition to what is reserved by then: some libraries reserve gigabytes that they
    never touch.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no reply
    warm_up()
    if sys.platform == "linux":  # elsewhere the system counts what was never touched
        most = n_reserved() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    out.write('{"ready": true}\n')
    out.flush()
    for line in sys.stdin:
        question = json.loads(line)
        # The default action of this signal ends the process, in the middle of any computation.
        signal.setitimer(signal.ITIMER_PROF, question["limit_s"])
        answer = reply(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(json.dumps(answer) + "\n")
        out.flush()


def n_reserved() -> int:
    """Bytes of this process's addresses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
