"""`kvbench verify FOLDER [--again K] [--out FILE]`: what of a submission holds, whoever wrote it.

Every file is counted, bounded and compared with manifest.json before any is read; each run is looked at by a worker
with limits of time and memory. Per run it says one of

    self-reported   what the folder says; nothing of it could be given again
    rescored        prompts are those of a frozen benchmark, and scores, result and intervals follow from the answers
    budget proven   each step's ledger stays within the budget that was asked for, as the code of today computes it
    reproduced      K samples, drawn when it was asked, were answered again here, words and ledgers alike (--again)

and a line for each thing that does not hold. Digests show that a file was changed after it was handed in. They do not
show that whoever made it was honest: only answering again does.

exit code: 0 all of it holds, 1 something does not, 2 the folder cannot be read

Not here: making a submission (`evals/submit.py`), the site that shows it (`plots/site/`).
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.checkout import ROOT
from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import printable, say
from kvbench.engine.workers.limited import Limited
from kvbench.evals.submission import frozen, jail
from kvbench.evals.submission.check import LEVELS, Checked
from kvbench.evals.submission.checker import LIMIT_S
from kvbench.evals.submission.folder import Finding, look
from kvbench.evals.submission.manifest import Manifest
from kvbench.results.files import sealed

CHECKER = "kvbench.evals.submission.checker"
JAIL_S = 900.0  # on the clock, of a method's conformance
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")  # of the environment, for a stranger's code
HONEST = "digests show that files are unchanged, not that whoever made them was honest"


class Verification:
    """A submission, and what was found of it so far."""

    def __init__(self, root: Path, registry: Path = frozen.FOLDER, worker: Limited | None = None) -> None:
        self.root, self.registry, self.worker = root.resolve(), registry.resolve(), worker
        self.manifest, self.findings = look(root)
        self.runs: list[Checked] = []

    def run(self) -> None:
        if self.manifest is None or self.findings:
            return
        worker = self.worker or Limited(CHECKER, LIMIT_S)
        try:
            fulls = self.check_keys(worker, self.manifest)
            for run in self.manifest.runs:
                self.check_run(worker, run, fulls)
        finally:
            if self.worker is None:
                worker.close()
        self.pair(fulls)
        self.check_methods(self.manifest)

    def ask(self, worker: Limited, run: str, what: str, full: str | None = None) -> Any:
        question = {"root": str(self.root), "run": run, "what": what, "full": full, "registry": str(self.registry)}
        said, found = worker.ask(question)
        if said != "ok":
            limit = f"{LIMIT_S:.0f} seconds" if said == "timeout" else "the memory of a worker"
            self.findings.append(Finding(run, "size", f"it takes more than {limit} to look at"))
        return found

    def check_keys(self, worker: Limited, manifest: Manifest) -> dict[str, str]:
        """The run of full attention by what a run must share with it, and each run's own key in `self.keys`."""
        self.keys: dict[str, str] = {}
        fulls: dict[str, str] = {}
        for run in manifest.runs:
            found = self.ask(worker, run, "key")
            if found is None:
                continue
            if "damage" in found:
                self.findings.append(Finding(run, "damaged", found["damage"]))
                continue
            self.keys[run] = found["key"]
            if found["full"]:
                fulls.setdefault(found["key"], run)
        return fulls

    def check_run(self, worker: Limited, run: str, fulls: dict[str, str]) -> None:
        if run not in self.keys:
            return
        found = self.ask(worker, run, "run", fulls.get(self.keys[run]))
        if found is not None:
            findings = [Finding(**one) for one in found["findings"]]
            self.runs.append(Checked(**{**found, "findings": findings}))

    def pair(self, fulls: dict[str, str]) -> None:
        """Pair each run once with full attention on the same samples."""
        by_run = {one.run: one for one in self.runs}
        seen: dict[str, str] = {}
        for one in self.runs:
            if "config_hash" not in one.facts:
                continue  # it could not be read, which was found
            hashed = str(one.facts["config_hash"])
            if hashed in seen:
                one.findings.append(Finding(one.run, "twice", f"{seen[hashed]} is the same run"))
            seen.setdefault(hashed, one.run)
            full = by_run.get(fulls.get(self.keys[one.run], ""))
            if full is None:
                one.findings.append(Finding(one.run, "full attention", "no run of full attention was asked the same"))
                continue
            there = {tuple(pair) for pair in full.facts.get("samples", [])}
            lacking = [id for id, sha in one.facts.get("samples", []) if (id, sha) not in there]
            if lacking and full.facts.get("samples"):
                words = f"full attention has not answered {len(lacking)} of its samples, such as {lacking[0]!r:.60}"
                one.findings.append(Finding(one.run, "full attention", words))
        for one in self.runs:
            if one.findings:
                one.level = 0

    # --- methods in files of their own ---

    def check_methods(self, manifest: Manifest) -> None:
        """Check that each method's file is there, is the one that answered, and holds what every method must."""
        digests = {sha[:16]: path for path, sha in manifest.files.items() if path.startswith("methods/")}
        used: set[str] = set()
        for one in self.runs:
            config_path = self.root / one.run / "config.yaml"
            digest = digest_of_method(config_path) if one.facts else None
            if digest is None:
                continue
            if digest not in digests:
                one.findings.append(Finding(one.run, "method", f"no file of methods/ has the digest {digest}"))
                one.level = 0
            else:
                used.add(digests[digest])
        for path in manifest.methods:
            if path not in used:
                if len(self.runs) < len(manifest.runs):
                    continue  # of runs that nobody could look at
                self.findings.append(Finding(path, "method", "no run was made with it"))
                continue
            kind, words = conform((self.root / path).read_bytes(), Path(path).name)
            if kind == "unable":
                for one in self.runs:
                    one.why.append(words)
            elif kind:
                self.findings.append(Finding(path, kind, words))

    def again(self, n: int) -> None:
        """Answer samples of each run again, where nothing was found against it."""
        from kvbench.evals.submission.again import reproduce

        for one in self.runs:
            if not one.findings and one.level:
                reproduce(self.root, one, n)
                if one.findings:
                    one.level = 0

    # --- what is said ---

    @property
    def every(self) -> list[Finding]:
        return [*self.findings, *(finding for one in self.runs for finding in one.findings)]

    def to_json(self) -> str:
        """Verdicts by the digest of each run's result.json, for the site."""
        assert self.manifest is not None
        runs = {
            self.manifest.files[f"{one.run}/result.json"][:16]: {
                "run": one.run, "verdict": LEVELS[one.level], "why": one.why,
                "findings": [str(finding) for finding in one.findings],
                "again": one.facts.get("asked_again", 0),
            }
            for one in self.runs
        }  # fmt: skip
        about = {key: value for key, value in asdict(self.manifest).items() if key != "files"}
        return sealed(json.dumps({"manifest": about, "runs": runs}, indent=1)) + "\n"


def digest_of_method(path: Path) -> str | None:
    """The digest of the file that a run's method was read from; its configuration was read before by a worker."""
    from kvbench.results import read_config

    method = read_config(path.parent).get("method")
    return str(method["digest"]) if isinstance(method, dict) and "digest" in method else None


def conform(source: bytes, name: str) -> tuple[str, str]:
    """Kind and words of what is wrong with a method's file; ("", "") where the kit holds."""
    word = secrets.token_hex(16)
    environment = {key: os.environ[key] for key in KEPT if key in os.environ}
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    with tempfile.TemporaryDirectory(prefix="kvbench-jail-") as scratch:
        environment |= {"HOME": scratch, "TMPDIR": scratch, "XDG_CACHE_HOME": cache, "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "KVBENCH_CHECK": "1"}
        command = [sys.executable, "-m", jail.__name__, name, scratch]
        try:
            done = subprocess.run(
                command, input=word.encode() + b"\n" + source, capture_output=True, cwd=ROOT, env=environment,
                timeout=JAIL_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "method", f"its conformance takes more than {JAIL_S:.0f} seconds"
    said = [line for line in (done.stdout + b"\n" + done.stderr).decode(errors="replace").splitlines() if line.strip()]
    caught = next((line.removeprefix("jail: ") for line in said if line.startswith("jail: ")), "")
    if done.returncode == jail.NO_ROOM:
        return "unable", caught
    if done.returncode == jail.REACHES or caught:
        return "method", caught
    broken = next((line for line in said if line.startswith("broken")), said[-1] if said else "it says nothing")
    if done.returncode:
        return "method", f"the conformance kit does not hold: {printable(' '.join(broken.split()))[:300]}"
    return ("", "") if word in said else ("method", "it ended the conformance kit before its end")


def report(found: Verification, out: Path | None) -> int:
    """Print verdicts and findings; the exit code."""
    for finding in found.every:
        say(finding)
    counts = Counter(LEVELS[one.level] for one in found.runs)
    for one in found.runs:
        score = one.facts.get("score")
        told = f" (score {score:.4f} over {one.facts['n']})" if isinstance(score, float) else ""
        why = f"; {'; '.join(one.why)}" if one.why else ""
        say(f"{one.run}: {LEVELS[one.level]}{told}{why}")
    verdicts = ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level]) or "no run was judged"
    say(f"{found.root}: {len(found.runs)} runs, {verdicts}, {len(found.every)} findings; {HONEST}")
    if out is not None and found.manifest is not None:
        out.write_text(found.to_json(), encoding="utf-8")
    return int(bool(found.every))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench verify", description="Judge a submission.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--again", type=int, default=0, metavar="K", help="answer K samples of each run a second time")
    parser.add_argument("--out", type=Path, help="write the verdicts for the site")
    parser.add_argument("--registry", type=Path, default=frozen.FOLDER, help="folder of frozen benchmarks")
    given = parser.parse_args(arguments)
    try:
        found = Verification(given.folder, given.registry)
        found.run()
        if given.again > 0:
            found.again(given.again)
        return report(found, given.out)
    except (ConfigError, OSError) as error:
        say("verify:", error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
