"""Commands under limits, each in a process group of its own, and what became of them.

A kernel that reads where nothing is spoils the CUDA context of its process and no other, so whatever may do that is a
job by itself. A job that outlasts its limit is sent SIGABRT, at which Python prints its stack (PYTHONFAULTHANDLER),
then its whole group is killed. Summary and logs are written as soon as a job ends: whoever stops this loses the jobs
that run, and nothing else.

Standard library alone: it has to run where nothing else does.

Not here: which jobs there are (`parts.py`).
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

GRACE = 4.0  # seconds between SIGABRT and SIGKILL
LEAST = 5.0  # seconds of the whole limit under which no job is started
TAIL = 1500  # characters of a failed job's log that are shown
OK = "ok"


@dataclass
class Job:
    """A command, how long it may take, and its end."""

    part: str
    name: str
    words: Sequence[str]
    seconds: float
    env: Mapping[str, str] = field(default_factory=dict)
    rows: Path | None = None  # CSV that it writes
    verdict: str = ""
    took: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.part} {self.name}"


@dataclass
class Running:
    job: Job
    process: "subprocess.Popen[bytes]"
    began: float
    until: float
    is_cut: bool  # by the limit of all jobs, not by its own
    told_at: float | None = None  # when SIGABRT was sent

    def signal(self, number: int) -> None:
        """To the whole group: compilers and workers too."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def poll(self, now: float) -> str | None:
        """Its verdict once it has ended; what takes too long is ended here."""
        code = self.process.poll()
        if code is None:
            if self.told_at is None and now > self.until:
                self.told_at = now
                self.signal(signal.SIGABRT)
            elif self.told_at is not None and now > self.told_at + GRACE:
                self.signal(signal.SIGKILL)
            return None
        self.signal(signal.SIGKILL)  # what it left running
        if self.told_at is not None:
            return "cut off by --limit" if self.is_cut else f"timed out after {self.job.seconds:.0f} s"
        if code < 0:
            return f"crashed: {signal.Signals(-code).name}"
        return OK if code == 0 else f"failed: exit code {code}"


class Jobs:
    """Runs jobs, and keeps `summary.txt` and a log of each in the folder `out`."""

    def __init__(self, out: Path, limit: float, say: Callable[[str], None], on_end: Callable[[Job], None]) -> None:
        self.out, self.say, self.on_end = out, say, on_end
        self.began = time.monotonic()
        self.deadline = self.began + limit
        self.done: list[Job] = []
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def log_of(self, job: Job) -> Path:
        return self.out / "logs" / f"{job.part}-{job.name}.log"

    def run(self, jobs: Sequence[Job], at_once: int) -> None:
        """All of them, so many at a time; returns when each has a verdict."""
        waiting, running = [*jobs], list[Running]()
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    if started := self.start(waiting.pop(0)):
                        running.append(started)
                now = time.monotonic()
                for one in [*running]:
                    if verdict := one.poll(now):
                        running.remove(one)
                        self.end(one.job, verdict, now - one.began)
                time.sleep(0.05)
        except BaseException:  # Ctrl-C, or Slurm's end
            for one in running:
                one.signal(signal.SIGKILL)
                self.end(one.job, "stopped", time.monotonic() - one.began)
            for job in waiting:
                self.end(job, "not started", 0)
            raise

    def start(self, job: Job) -> Running | None:
        now = time.monotonic()
        left = self.deadline - now
        if left < LEAST:
            self.end(job, "not started: no time is left of --limit", 0)
            return None
        with self.log_of(job).open("wb") as log:
            try:
                process = subprocess.Popen(
                    job.words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=os.environ | job.env, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                log.write(str(error).encode())
                self.end(job, f"failed: {error.strerror}", 0)
                return None
        return Running(job, process, now, now + min(job.seconds, left), left < job.seconds)

    def end(self, job: Job, verdict: str, took: float) -> None:
        job.verdict, job.took = verdict, took
        self.done.append(job)
        try:
            self.on_end(job)
        except (OSError, ValueError) as error:
            self.say(f"the rows of {job.title} are not kept: {error}")
        self.say(f"[{time.monotonic() - self.began:5.0f} s] {job.title}: {verdict}, {took:.1f} s")
        if verdict != OK and (tail := self.tail(job)):
            self.say("\n".join(f"    {line}" for line in tail.splitlines()))
        (self.out / "summary.txt").write_text(self.summary())

    def tail(self, job: Job) -> str:
        with suppress(OSError):
            return self.log_of(job).read_text(errors="replace")[-TAIL:].strip()
        return ""

    def summary(self) -> str:
        """A line a part: how many of its jobs are well, and what became of the others."""
        lines = []
        for part in dict.fromkeys(job.part for job in self.done):
            jobs = [job for job in self.done if job.part == part]
            well = [job for job in jobs if job.verdict == OK]
            took = max(job.took for job in jobs)
            lines.append(f"{part:14} {len(well)} of {len(jobs)} ok, the longest {took:.0f} s")
            lines += [f"{'':14} {job.name}: {job.verdict}" for job in jobs if job.verdict != OK]
        return "\n".join(lines) + "\n"
