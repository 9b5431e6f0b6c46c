"""Attach kvcanary to an SGLang server with one environment variable, and ask the server how its guard stands.

    python examples/attach.py

starts a server with a tiny model on the CPU. With a model of yours it is the same variable:

    KVCANARY=log python -m sglang.launch_server --model-path MODEL
    kvcanary status --url http://127.0.0.1:30000
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from kvcanary_plugin.demo.model import make_model
from kvcanary_plugin.demo.server import Server


def main() -> int:
    """Start, serve one request, ask, audit, stop."""
    with tempfile.TemporaryDirectory(prefix="kvcanary-attach-") as folder:
        model = make_model(Path(folder) / "model")
        print("starting a server with KVCANARY=log ...", flush=True)
        environment = {"KVCANARY": "log", "KVCANARY_LOG": f"{folder}/events.jsonl"}
        with Server(model, ["--max-total-tokens=4096"], Path(folder) / "log", environment=environment) as server:
            answer = server.generate(range(10, 60), 8)
            print(f"answer {answer['output_ids']}", flush=True)
            url = f"http://127.0.0.1:{server.port}"
            for command in ("status", "audit"):
                print(f"\n$ kvcanary {command} --url {url}", flush=True)
                code = subprocess.run([sys.executable, "-m", "kvcanary_plugin.cli", command, "--url", url]).returncode
                print(f"exit code {code}", flush=True)
                if code:
                    return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
