"""Starts a real SGLang server on loopback and ends it. Used by the demonstration, the tests and the benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--mem-fraction-static=0.1",
)
START_TIMEOUT_S = 240.0
DERIVED_PORT = 10000  # what SGLang adds to its port for gRPC


class ServerError(RuntimeError):
    """The server did not start, or died; carries the end of its log."""


def free_port() -> int:
    """A TCP port that was free a moment ago on loopback, and so was the one that SGLang derives from it.

    Below those that Linux gives to outgoing connections (from 32768): seconds pass until the server binds it, and
    its own processes connect to each other in the meantime.
    """
    while True:
        port = random.randrange(11000, 22000)
        with socket.socket() as probe, socket.socket() as derived, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            derived.bind(("127.0.0.1", port + DERIVED_PORT))
            return port


class Server:
    """One SGLang server process on 127.0.0.1; a context manager.

    Args:
        model: folder of the model; without a tokenizer the server takes token ids only.
        flags: more flags for SGLang, ours among them.
        log: file that takes its output.
        environment: more variables.
        launcher: Python module that starts it.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        launcher: str = "sglang.launch_server",
    ) -> None:
        self.port = free_port()
        self.log = log
        base = {name: value for name, value in os.environ.items() if not name.startswith("KVCANARY")}
        own = () if (model / "tokenizer.json").exists() else ("--skip-tokenizer-init",)
        command = [sys.executable, "-m", launcher, f"--model-path={model}", "--host=127.0.0.1", f"--port={self.port}"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *CPU_FLAGS, *own, *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                # Threads of one operation that wait for each other on two busy cores cost more than they bring.
                env={"OMP_NUM_THREADS": "1", **base, "SGLANG_USE_CPU_ENGINE": "1", **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(self) -> None:
        """Block until the server answers requests.

        Raises:
            ServerError: it ended, or took longer than ``START_TIMEOUT_S``.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"server ended with exit code {self.process.returncode}:\n{self.tail()}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self.get("/health", timeout_s=5)
                return
            time.sleep(0.25)
        raise ServerError(f"server not ready after {START_TIMEOUT_S:.0f} s:\n{self.tail()}")

    def get(self, path: str, *, timeout_s: float = 60) -> bytes:
        """Body of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout_s) as response:
            return bytes(response.read())

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = 600) -> Any:
        """JSON answer of a POST; None if it is empty or plain text."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read()
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text)
        return None

    def generate(self, tokens: Sequence[int], new_tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy completion of a prompt of token ids; keys ``output_ids`` and ``meta_info``."""
        params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return dict(self.post("/generate", {"input_ids": list(tokens), "sampling_params": params, **more}))

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the server and everything it started."""
        for name, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, name)  # its own session: nothing else is in that group
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
