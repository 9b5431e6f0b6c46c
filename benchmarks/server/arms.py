"""Arms of a comparison: servers of one model that differ in their canary, kept warm beside each other on one device.

Only one of them works at a time; the others are stopped as processes, because an idle guard folds on at full pace and
an idle SGLang spins.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from shapes import Model, Work

WORKER = Path(__file__).with_name("engine_worker.py")
START_SECONDS = 240.0
STOP_SECONDS = 20.0
WATCHDOG_SECONDS = 86400.0  # an arm that is stopped must not look stuck to itself
ALL_CHECKS = "chain,content,presence,ownership,identity,order"
NO_SCRUB = "1e-9"  # of the time of a forward: one slot after each, once the passes that calibrate it are over


class ArmError(RuntimeError):
    """An arm did not start, did not answer, or refused; carries the end of its log."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How one arm differs from the plain server.

    Attributes:
        environment: variables for it.
        arguments: for SGLang's engine.
        has_guard: kvcanary is on.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    has_guard: bool = False


def make_setting(name: str, scrub_budget: str) -> Setting:
    """The setting of an arm: ``off``, ``content``, ``all`` or ``in-tree``.

    Raises:
        ValueError: there is no such arm.
    """
    guard = {"KVCANARY": "log", "KVCANARY_ALLOW_INJECT": "1", "KVCANARY_BENCH_COMMANDS": "1"}
    settings = {
        "off": Setting(),
        "content": Setting(
            {**guard, "KVCANARY_CHECKS": "chain,content", "KVCANARY_SCRUB_BUDGET": NO_SCRUB}, has_guard=True
        ),
        "all": Setting({**guard, "KVCANARY_CHECKS": ALL_CHECKS, "KVCANARY_SCRUB_BUDGET": scrub_budget}, has_guard=True),
        "in-tree": Setting(arguments={"kv_canary": "log", "kv_canary_real_data": "all"}),
    }
    if name not in settings:
        raise ValueError(f"no arm {name!r}; there are {', '.join(settings)}")
    return settings[name]


def engine_arguments(
    model: Model, folder: Path, device: str, pool_tokens: int, *, radix_cache: bool, **more: Any
) -> dict[str, Any]:
    """Arguments of SGLang's engine, the same for every arm.

    ``mem_fraction_static`` leaves SGLang 3 % of what was free when the arm started: it takes the pool from what is free
    once the weights are there, and arms that start at the same time have taken theirs from it by then. What bounds the
    pool is ``max_total_tokens``.
    """
    arguments = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "warning",
        "random_seed": 1,
        "disable_radix_cache": not radix_cache,
        "chunked_prefill_size": model.chunk,
        "max_total_tokens": pool_tokens,
        "watchdog_timeout": WATCHDOG_SECONDS,
    }
    if device == "cpu":
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.1}
    else:
        arguments |= {"attention_backend": "triton", "mem_fraction_static": 0.97, "cuda_graph_max_bs_decode": 64}
    return arguments | more


class Arm:
    """One warm server.

    Attributes:
        name: of the arm.
        events: file of kvcanary's events.
        log: file that takes its output.
        start_seconds: from the call of the engine until it was ready; the imports before it are not in there.
    """

    def __init__(
        self, name: str, setting: Setting, arguments: Mapping[str, Any], vocabulary: int, folder: Path, device: str
    ) -> None:
        self.name = name
        self.setting = setting
        self.log, self.events = folder / f"{name}.log", folder / f"{name}.jsonl"
        self.start_seconds = 0.0
        self._is_stopped = False
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KVCANARY")}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}
        environment |= {"KVCANARY": "off", "PYTHONUNBUFFERED": "1", **setting.environment}
        environment |= {"KVCANARY_LOG": str(self.events)} if setting.has_guard else {}
        reader, writer = os.pipe()
        with self.log.open("ab") as output:  # appending: the processes of the arm share it
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(WORKER),
                    json.dumps({"arguments": {**arguments, **setting.arguments}, "vocabulary": vocabulary}),
                    str(writer),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                env=environment,
                text=True,
                start_new_session=True,
            )
        os.close(writer)
        self._replies = os.fdopen(reader, "rb", buffering=0)

    def wait_ready(self, deadline: float) -> None:
        """Block until the engine is there.

        Raises:
            ArmError: it ended, or ``deadline`` (of ``time.monotonic``) has passed.
        """
        self.start_seconds = self._reply(deadline)["start_seconds"]

    def ask(self, do: str, timeout_s: float = 120.0, **fields: Any) -> dict[str, Any]:
        """Have the worker do something. Returns its answer.

        Raises:
            ArmError: it failed, or gave no answer in time.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ArmError(f"arm {self.name} is gone:\n{self.tail()}") from error
        answer = self._reply(time.monotonic() + timeout_s)
        if "error" in answer:
            raise ArmError(f"arm {self.name} could not {do}: {answer['error']}\n{self.tail()}")
        return answer

    def serve(self, work: Work, seed: str, **more: Any) -> float:
        """Serve one round; ``more`` is for :func:`engine_worker.make_prompts`. Returns its wall time in seconds."""
        return float(self.ask("generate", **work.to_fields(seed), **more)["seconds"])

    def guard_state(self) -> dict[str, Any]:
        """The state of kvcanary's guard.

        Raises:
            ArmError: it has let go, or is not there.
        """
        state = self.ask("state")["guard"]
        if not isinstance(state, dict) or state.get("state") != "guarding":
            raise ArmError(f"arm {self.name} is not guarded: {state}\n{self.tail()}")
        return state

    def stop(self) -> None:
        """Stop every process of the arm where it is."""
        if not self._is_stopped:
            self._signal(signal.SIGSTOP)
            self._is_stopped = True

    def resume(self) -> None:
        """Let them go on."""
        if self._is_stopped:
            self._signal(signal.SIGCONT)
            self._is_stopped = False

    def end(self) -> None:
        """End every process of the arm."""
        self.resume()
        with contextlib.suppress(ArmError):
            if self.process.poll() is None:
                self.ask("end", timeout_s=STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """End every process of the arm at once; from any thread. Who waits for an answer gets :class:`ArmError`."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def slow_calls(self) -> list[str]:
        """What took the scheduler's thread long, as the hooks printed it."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line.removeprefix("BENCH slow ") for line in lines if line.startswith("BENCH slow ")]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def _reply(self, deadline: float) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            piece = self._replies.read(1 << 16) if ready else b""
            if not piece:
                why = "ended" if ready else "gave no answer in time"
                raise ArmError(f"arm {self.name} {why}:\n{self.tail()}")
            line += piece
        return dict(json.loads(line))
