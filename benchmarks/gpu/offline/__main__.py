"""A GPU's first hour, on a machine without network: `python3 -m kvbench.benchmarks.gpu.offline [PART…]`, from the
checkout.

Packages that this Python lacks come from the folder that `make gpu-kit` packed; torch, Triton and transformers must be
there. Parts run one after the other, `a+b` beside each other, each job in a process of its own under a limit, so that
whatever fails, hangs or crashes ends itself alone. In the folder `--out` are then

    summary.txt   a line a part, and each job that is not well
    logs/         what every job printed
    gpu.csv       the rows so far, of benchmarks/gpu.csv's columns

`--rehearse` runs all of it small, on a CPU and in Triton's interpreter; its times mean nothing. The interpreter of
Triton 3.6 takes numpy before 2.4 alone.

Not here: what a part runs (`parts.py`), how a job is ended (`jobs.py`), packing (`pack.py`).
"""

import argparse
import csv
import os
import signal
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvbench.benchmarks.gpu.offline.jobs import OK, Job, Jobs
from kvbench.benchmarks.gpu.offline.parts import FOUR, PARTS, ROOT, USUAL, Plan

KIT = ROOT / "gpu-kit"
MOST_AT_ONCE = 14  # processes, each of which holds torch and a CUDA context
NEEDED = ("torch", "triton", "transformers", "numpy")


def unpack(wheels: Sequence[Path], into: Path) -> list[str]:
    """Wheels of packages that this Python lacks; none has scripts that are used, so unpacking them installs them."""
    brought = []
    for wheel in wheels:
        name, number, python, *_ = wheel.name.split("-")
        if python.startswith("cp") and python != f"cp{sys.version_info.major}{sys.version_info.minor}":
            print(f"{wheel.name} is for another Python: make gpu-kit ARGS='--python X.Y'", file=sys.stderr)
            continue
        try:
            version(name)
        except PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            brought.append(f"{name} {number}")
    return brought


def missing() -> list[str]:
    found = []
    for name in NEEDED:
        try:
            version(name)
        except PackageNotFoundError:
            found.append(name)
    return found


def method_names() -> list[str]:
    """Of every method, the four that the first parts time in front."""
    from kvbench.results.names import own_methods

    return [*FOUR, *(name for name in own_methods() if name not in FOUR)]


def merge(job: Job, path: Path) -> None:
    """A job's rows into the file of all; a row that was there under the same name and shape goes."""
    if job.rows is None or not job.rows.is_file():
        return
    with job.rows.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    if not rows:
        return
    if path.is_file():
        own = {(row["what"], row["shape"]) for row in rows}
        with path.open(newline="") as file:
            rows = [*(row for row in csv.DictReader(file) if (row["what"], row["shape"]) not in own), *rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[-1]], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def environment(kit: Path, out: Path) -> dict[str, str]:
    """What every job is started with."""
    site = out / "site"
    brought = unpack(sorted(kit.glob("wheels/*.whl")), site)
    sys.path.append(str(site))
    print(f"brought by {kit.name}: {', '.join(brought) or 'nothing'}", flush=True)
    paths = [str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(out / "triton")),
    }
    if (kit / "commit").is_file() and not (ROOT / ".git").exists():
        env["KVBENCH_COMMIT"] = (kit / "commit").read_text().strip()
    return env


def stopped(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(words: Sequence[str] | None = None) -> int:
    listed = "\n".join(f"  {name:17} {part.question}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python3 -m kvbench.benchmarks.gpu.offline",
        description=f"{__doc__}\nparts, in the order of a first hour\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", default=USUAL, help=f"without: {' '.join(USUAL)}")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all of it")
    parser.add_argument("--kit", type=Path, default=KIT, help="what make gpu-kit packed")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args(words)
    groups = [group.split("+") for group in asked.parts]
    if unknown := sorted({name for group in groups for name in group} - PARTS.keys()):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if lacking := missing():
        parser.error(f"this Python ({sys.executable}) lacks {', '.join(lacking)}, which no kit brings")
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= environment(asked.kit.resolve(), out)
    if asked.rehearse:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    (out / "rows").mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, stopped)
    plan = Plan(out, asked.rehearse, method_names())
    jobs = Jobs(out, asked.limit, lambda text: print(text, flush=True), lambda job: merge(job, out / "gpu.csv"))
    cores = os.cpu_count() or 2
    try:
        for group in groups:
            is_alone = any(PARTS[name].is_alone for name in group)
            at_once = 1 if is_alone else max(1, min(MOST_AT_ONCE, cores - 2))
            jobs.run([job for name in group for job in PARTS[name].jobs(plan)], at_once)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    files = [name for name in ("summary.txt", "gpu.csv", "logs") if (out / name).exists()]
    print(f"\n{jobs.summary()}\nin {out}: {', '.join(files)}", flush=True)
    return int(not jobs.done or any(job.verdict != OK for job in jobs.done))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
