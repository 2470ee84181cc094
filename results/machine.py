"""The machine and the code that a run was made with: what env.json and `versions` in result.json say.

Not here: the times of a run, which the runner adds.
"""

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.checkout import VERSION


@cache
def environment() -> dict[str, Any]:
    """What env.json says of the machine and the code; the runner adds its timestamps.

    Asked once per process: what runs is what was imported, whatever the checkout becomes meanwhile.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "n_cores": os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions(),
        "git_sha": git_sha(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of KVBench, and of the installed packages that can change a number."""
    packages = "torch transformers tokenizers numpy triton datasets gguf hydra-core pyarrow"
    by_name = {"python": platform.python_version(), "kvbench": VERSION}
    for name in packages.split():
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_name


def git_sha() -> str | None:
    """Commit of this checkout, "-dirty" where code or conf/ differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        top, sha = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        # Only what can change a number: a run with out=DIR in the checkout is no change of it.
        changed = git("status", "--porcelain", "--", "*.py", "conf")
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if Path(top).resolve() != root:
        return None  # another project's checkout around an installed copy
    return sha + ("-dirty" if changed else "")


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
