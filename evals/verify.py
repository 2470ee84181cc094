"""`kvbench verify FOLDER [--again K] [--out FILE]`: what of a submission holds, whoever wrote it.

Every file is counted and bounded before any is read. Per run it says one of

    reported     what the folder says; nothing of it was given again
    rescored     prompts are those of a frozen benchmark; scores, means and intervals follow from the answers
    reproduced   K samples, drawn when it was asked, were answered again here, words and ledgers alike (--again)

and a line for each thing that does not hold. Who made answers up makes up what follows from them, too: only answering
again shows that.

A method's own file is a stranger's code, and no process of this Python can hold it. It is run with `--foreign` alone,
for a container without a network, whose command is printed.

exit code: 0 all of it holds, 1 something does not, 2 the folder cannot be read

Not here: making a submission (`evals/submit.py`), the site that shows it (`plots/site/`).
"""

import argparse
import hashlib
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.evals.rescore import DAMAGE
from kvbench.evals.submission import frozen
from kvbench.evals.submission.check import LEVELS, Check, Checked, is_full, read_safely, same_key
from kvbench.evals.submission.folder import Finding, Folder, look
from kvbench.results.files import sealed

HONEST = "only what was answered again shows that whoever made it was honest"
CONTAINER = (
    "docker run --rm --network none --read-only --tmpfs /tmp:exec --memory 16g --pids-limit 512 -e XDG_CACHE_HOME=/tmp "
    "-v {folder}:/in:ro kvbench .venv/bin/kvbench verify /in --again {n} --foreign"
)


@dataclass
class Verification:
    """A submission, and what was found of it so far."""

    root: Path
    registry: Path = frozen.FOLDER
    foreign: bool = False  # methods' own files may be run
    runs: list[Checked] = field(default_factory=list[Checked])

    def __post_init__(self) -> None:
        self.folder: Folder = look(self.root)
        self.root = self.root.resolve()
        self.methods = [self.root / path for path in self.folder.methods] if self.foreign else []

    def run(self) -> None:
        if self.folder.findings:
            return
        keys: dict[str, str] = {}
        fulls: dict[str, str] = {}  # runs of full attention, by what a run must share with them
        for run in self.folder.runs:
            try:
                config = read_safely(self.root / run)
            except (*DAMAGE, ConfigError) as error:
                self.folder.findings.append(Finding(run, "damaged", " ".join(str(error).split())[:300]))
                continue
            keys[run] = same_key(config)
            if is_full(config):
                fulls.setdefault(keys[run], run)
        seen: dict[str, str] = {}
        for run, key in keys.items():
            one = Check(self.root, run, fulls.get(key), self.registry, self.methods).all()
            if one.result is not None and (former := seen.setdefault(one.result.config_hash, run)) != run:
                one.findings.append(Finding(run, "twice", f"{former} is the same run"))
                one.level = 0
            self.runs.append(one)

    def again(self, n: int) -> None:
        """Answer samples of each run again, where its scores follow from its answers."""
        from kvbench.evals.submission.again import reproduce

        for one in self.runs:
            if one.level:
                reproduce(self.root, one, n, self.methods)
                if one.findings:
                    one.level = 0

    @property
    def every(self) -> list[Finding]:
        return [*self.folder.findings, *(finding for one in self.runs for finding in one.findings)]

    def to_json(self) -> str:
        """Verdicts by the digest of each run's result.json, for the site."""
        assert self.folder.manifest is not None
        runs: Mapping[str, object] = {
            hashlib.sha256((self.root / one.run / "result.json").read_bytes()).hexdigest()[:16]: {
                "run": one.run, "verdict": LEVELS[one.level], "why": one.why,
                "findings": [str(finding) for finding in one.findings], "again": one.n_again,
            }
            for one in self.runs
        }  # fmt: skip
        return sealed(json.dumps({"manifest": asdict(self.folder.manifest), "runs": runs}, indent=1)) + "\n"


def report(found: Verification, out: Path | None = None) -> int:
    """Print verdicts and findings; the exit code."""
    for finding in found.every:
        say(finding)
    for one in found.runs:
        told = ""
        if one.result is not None and one.result.score is not None:
            told = f" (score {one.result.score:.4f} over {one.result.n_samples})"
        say(f"{one.run}: {'; '.join([LEVELS[one.level] + told, *one.why])}")
    counts = Counter(LEVELS[one.level] for one in found.runs)
    verdicts = ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level]) or "no run was judged"
    say(f"{found.root}: {len(found.runs)} runs, {verdicts}, {len(found.every)} findings; {HONEST}")
    if out is not None and found.folder.manifest is not None:
        out.write_text(found.to_json(), encoding="utf-8")
    return int(bool(found.every))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench verify", description="Judge a submission.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--again", type=int, default=0, metavar="K", help="answer K samples of each run a second time")
    parser.add_argument("--foreign", action="store_true", help="run methods' own files, in a container alone")
    parser.add_argument("--out", type=Path, help="write the verdicts for the site")
    parser.add_argument("--registry", type=Path, default=frozen.FOLDER, help="folder of frozen benchmarks")
    given = parser.parse_args(arguments)
    try:
        found = Verification(given.folder, given.registry.resolve(), given.foreign)
        found.run()
        if given.again > 0:
            found.again(given.again)
        code = report(found, given.out)
    except (ConfigError, OSError) as error:
        say("verify:", error, file=sys.stderr)
        return 2
    if found.folder.methods and not given.foreign:
        command = CONTAINER.format(folder=shlex.quote(str(found.root)), n=given.again or 1)
        say(f"methods/ holds code of others, which is run in a container alone (docker build -t kvbench .): {command}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
