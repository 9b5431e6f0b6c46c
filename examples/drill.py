"""A drill for a staging server: damage its KV on purpose, and see the report, the metric and the alert that follow.

    python examples/drill.py [PAGE.html]

starts a server with a tiny model on the CPU. On a staging server of yours it is two variables and one flag more:

    KVCANARY_ALLOW_INJECT=1 KVCANARY_INJECT=flip_running@500 \\
        python -m sglang.launch_server --model-path MODEL --kvcanary log --kvcanary-log events.jsonl --enable-metrics
    kvcanary report events.jsonl --html page.html

Never set KVCANARY_ALLOW_INJECT where people are served: a drill damages real answers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from kvcanary_plugin.demo.model import make_model
from kvcanary_plugin.demo.server import Server
from kvcanary_plugin.demo.traffic import Traffic
from kvcanary_plugin.report.jsonl import read_events

RULES = Path(__file__).parent / "prometheus" / "alerts.yml"
METRIC = "kvcanary_violations_total"
PATIENCE_SECONDS = 120


def find_damage(server: Server, events: Path) -> bool:
    """Keep the server busy until the injected fault was reported."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    with Traffic(server, clients=4, seed=0, abort_share=0):
        while time.monotonic() < give_up:
            if any(event["event"] == "violation" for event in read_events(events)):
                return True
            time.sleep(0.2)
    return False


def read_metric(server: Server) -> list[str]:
    """The lines of the metric that are not zero."""
    lines = [line for line in server.get("/metrics/").decode().splitlines() if line.startswith(METRIC)]
    return [line for line in lines if float(line.rsplit(" ", 1)[1]) > 0]


def find_alerts() -> list[str]:
    """Alerts that look at the metric."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return [f"{rule['alert']}: {rule['expr']}" for rule in rules if METRIC in rule["expr"]]


def main() -> int:
    """Start, inject, wait, show."""
    page = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="kvcanary-page-") + "/drill.html")
    with tempfile.TemporaryDirectory(prefix="kvcanary-drill-") as folder:
        model, events = make_model(Path(folder) / "model"), Path(folder) / "events.jsonl"
        flags = ["--max-total-tokens=4096", "--enable-metrics", "--kvcanary=log", f"--kvcanary-log={events}"]
        fault = {"KVCANARY_ALLOW_INJECT": "1", "KVCANARY_INJECT": "flip_running@300"}
        print("starting a server in which one bit is going to flip ...", flush=True)
        with Server(model, flags, Path(folder) / "log", environment=fault) as server:
            if not find_damage(server, events):
                print(f"nothing was found within {PATIENCE_SECONDS} s:\n{server.tail()}")
                return 1
            metric = read_metric(server)
        print("\nthe metric, from /metrics:", *metric, sep="\n    ")
        print("\nthe alert that fires, from examples/prometheus/alerts.yml:", *find_alerts(), sep="\n    ")
        print("\nthe page:", flush=True)
        command = [sys.executable, "-m", "kvcanary_plugin.cli", "report", str(events), "--html", str(page)]
        code = subprocess.run(command).returncode
    return 0 if metric and code == 1 else 1  # 1: damage is recorded


if __name__ == "__main__":
    raise SystemExit(main())
