"""`make dashboard`: a workspace on W&B that compares the runs which `logger=wandb` copied there.

    python -m kvbench.plots.dashboard [--entity NAME] [--project NAME] [--out FILE]

What the workspace shows is plain data here. Where there is an account and the package wandb-workspaces, it is made at
W&B; else its specification is written to a file, with what is missing said, and the same command makes it later.

Not here: the copies themselves (`evals/logger.py`), whose keys the panels name.
"""

import argparse
import importlib
import importlib.util
import json
import netrc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from kvbench.engine.terminal import say
from kvbench.plots.read import default_root

# A panel is a class of wandb_workspaces.reports.v2 and its arguments.
Panel = dict[str, Any]


def line(title: str, *keys: str) -> Panel:
    return {"panel": "LinePlot", "title": title, "x": "ledger/step", "y": list(keys)}


def scatter(title: str, cost: str) -> Panel:
    return {"panel": "ScatterPlot", "title": title, "x": cost, "y": "score"}


def bars(title: str, key: str) -> Panel:
    return {"panel": "BarPlot", "title": title, "metrics": [key], "orientation": "h"}


def specification() -> dict[str, Any]:
    """The workspace, as plain data."""
    return {
        "name": "KVBench: methods compared",
        "groupby": ["task.name", "method.name"],
        "sections": [
            {
                "name": "Score and measured cost",
                "panels": [
                    bars("Score", "score"),
                    scatter("Score over bytes on the device", "bytes_resident_device"),
                    scatter("Score over KV bytes moved per step", "bytes_moved_kv_per_step"),
                    scatter("Score over tokens attended", "tokens_attended_mean"),
                ],
            },
            {
                "name": "Budgets",
                "panels": [
                    bars("Tokens attended", "tokens_attended_mean"),
                    bars("Bytes per step in order to find tokens", "bytes_index_read_per_step"),
                    bars("Within budget", "within_budget"),
                    bars("Seconds per token", "tpot_s"),
                ],
            },
            {
                "name": "Per decode step",
                "panels": [
                    line("Tokens attended in a layer, over all heads", "ledger/attended"),
                    line("KV bytes moved", "ledger/moved_kv_bytes"),
                    line("Bytes in order to find tokens", "ledger/moved_meta_bytes"),
                    line("Cache hit rate", "ledger/cache_hit_rate"),
                ],
            },
            {
                "name": "Pictures and configurations",
                "panels": [
                    {
                        "panel": "MediaBrowser",
                        "title": "Needle maps",
                        "media_keys": ["figures/heatmap"],
                    },
                    {"panel": "WeavePanelSummaryTable", "table_name": "samples"},
                    {"panel": "RunComparer", "diff_only": "split"},
                ],
            },
        ],
    }


def workspace(spec: dict[str, Any], entity: str, project: str) -> Any:
    """The specification as an object of wandb-workspaces; nothing is sent."""
    ws = importlib.import_module("wandb_workspaces.workspaces")
    wr = importlib.import_module("wandb_workspaces.reports.v2")

    def panel(i: int, given: Panel) -> Any:
        arguments = {key: value for key, value in given.items() if key != "panel"}
        place = wr.Layout(x=i % 2 * 12, y=i // 2 * 8, w=12, h=8)  # of 24 columns
        return getattr(wr, given["panel"])(**arguments, layout=place)

    return ws.Workspace(
        entity=entity,
        project=project,
        name=spec["name"],
        sections=[
            ws.Section(
                name=one["name"],
                panels=[panel(i, p) for i, p in enumerate(one["panels"])],
                is_open=True,
            )
            for one in spec["sections"]
        ],
        settings=ws.WorkspaceSettings(max_runs=100),
        runset_settings=ws.RunsetSettings(groupby=[ws.Config(key) for key in spec["groupby"]]),
    )


def missing(entity: str | None) -> str | None:
    """What keeps the workspace from being made, or None."""
    if importlib.util.find_spec("wandb_workspaces") is None:
        return "the package wandb-workspaces is not installed: pip install -c constraints.txt wandb-workspaces"
    if not has_account():
        return "there is no W&B account here: wandb login"
    if entity is None:
        return "nobody said whose workspace it is: --entity NAME or WANDB_ENTITY"
    return None


def has_account() -> bool:
    """Whether wandb would find credentials without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.plots.dashboard",
        description="Make the workspace that compares runs on W&B.",
    )
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY"), help="user or team")
    parser.add_argument("--project", default=os.environ.get("WANDB_PROJECT") or "kvbench")
    parser.add_argument(
        "--out",
        type=Path,
        default=default_root() / "dashboard.json",
        help="specification, without account",
    )
    given = parser.parse_args(argv)
    spec = specification()
    if said := missing(given.entity):
        try:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            return refuse(f"{given.out} cannot be written ({error.strerror}); choose another file with --out")
        say(f"{given.out}: the workspace's specification, since {said}")
        return 0
    try:
        say(workspace(spec, given.entity, given.project).save().url)
    except Exception as error:  # of the network or of W&B's server, as many kinds as both have
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return refuse(f"W&B did not take the workspace for {given.entity}/{given.project} ({reason})", 1)
    return 0


def refuse(sentence: str, code: int = 2) -> int:
    say("dashboard:", " ".join(sentence.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
