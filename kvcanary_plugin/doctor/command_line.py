"""What a server with a given command line would have checked, and what would be refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config import BYTE_CHECKS, CHECKS
from ..display import mask_secrets
from ..patches.command_line import ServerPlan
from .checkup import Fact, Problem, Section

PROGRAM = "kvcanary_plugin.patches.command_line"
TIMEOUT_SECONDS = 120.0
WAIVER = "--kvcanary-allow-uncovered"


def split_command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Variables set in front of a server command, and the arguments behind its name.

    ``A=1 sglang serve --x`` and ``python -m sglang.launch_server --x`` give ``--x``, as does ``--x`` alone.
    """
    rest = list(words)
    variables: dict[str, str] = {}
    while rest and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", rest[0], re.DOTALL)):
        variables[found[1]] = found[2]
        rest.pop(0)
    if rest[:1] and Path(rest[0]).name == "sglang" and rest[1:2] == ["serve"]:
        del rest[:2]
        for chosen in ("auto", "llm"):  # of sglang serve itself, which does not hand it on
            rest = _without(rest, "--model-type", chosen)
    elif rest[:1] and re.fullmatch(r"python[\d.]*", Path(rest[0]).name) and "sglang.launch_server" in rest:
        del rest[: rest.index("sglang.launch_server") + 1]
    return variables, rest


def ask_plan(arguments: Sequence[str], environment: Mapping[str, str]) -> ServerPlan:
    """The plan of a server, made in a process of its own: see :mod:`kvcanary_plugin.patches.command_line`."""
    environment = dict(environment)
    if sys.path[0] not in ("", os.getcwd()):  # modules that lie about where doctor is run are not to be imported
        environment["PYTHONSAFEPATH"] = "1"
    try:
        answer = subprocess.run(
            [sys.executable, "-m", PROGRAM],
            input=json.dumps(list(arguments)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ServerPlan(refused=f"SGLang did not settle its arguments within {TIMEOUT_SECONDS:.0f} seconds")
    try:
        return ServerPlan.from_json(answer.stdout)
    except (ValueError, KeyError, TypeError):
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return ServerPlan(refused=f"SGLang ended with exit code {answer.returncode}: {last}")


def judge(plan: ServerPlan) -> Section:
    """What the plan means: facts, and one problem for each thing that would keep the server from starting guarded."""
    if plan.refused is not None:
        problem = Problem(
            "error",
            f"SGLang does not take the command line: {mask_secrets(plan.refused)}",
            "correct that argument; python -m sglang.launch_server --help lists all of them",
        )
        return Section("command line", (Fact("taken", "no", "error"),), problems=(problem,))
    config = plan.config
    is_unguarded = bool(plan.gaps) and config.allow_uncovered
    problems = [
        Problem(
            "error", mask_secrets(text.removeprefix("kvcanary: ")), "correct that setting: no server starts with it"
        )
        for text in plan.wrong
    ]
    problems += _judge_gaps(plan) if config.is_on else []
    if not config.is_on and not plan.wrong and not config.hf3fs:
        problems.append(Problem("warning", "the mode is off, so nothing is checked", "add --kvcanary log"))
    if plan.unsettled is not None:
        problems.append(
            Problem(
                "warning",
                f"SGLang would not start with it on this machine, so it is judged as written: {plan.unsettled}",
                "run doctor on the server's machine, with the model in a local folder or cache, to be sure",
            )
        )
    if config.inject:
        problems.append(
            Problem("warning", f"faults would be injected: {config.inject}", "drop --kvcanary-inject outside of drills")
        )
    reasons = {check: _reason_against(check, plan) for check in CHECKS}
    in_force = [check for check in CHECKS if reasons[check] is None]
    unknown = not config.is_on and bool(plan.wrong)
    facts = [
        Fact("mode", "not valid, see below" if unknown else config.mode, "warning" if unknown else "ok"),
        Fact("checks in force", "none" if is_unguarded or not in_force else tuple(in_force)),
        *(Fact(f"not {check}", reason) for check, reason in reasons.items() if reason and config.is_on),
        Fact("KV pool", "known once the model is loaded; see coverage above"),
        Fact("settled by SGLang", plan.unsettled is None, "ok" if plan.unsettled is None else "warning"),
        _look_at_metrics(plan, problems),
        _look_at_log(config.log, problems),
    ]
    return Section("command line", tuple(facts), problems=tuple(problems))


def _judge_gaps(plan: ServerPlan) -> list[Problem]:
    problems = []
    if plan.in_tree is not None:
        text = f"--kvcanary {plan.config.mode} and SGLang's own --kv-canary {plan.in_tree} exclude each other"
        problems.append(Problem("error", text, "drop one of them"))
    for gap in plan.gaps:
        setting = gap.partition(" is not covered")[0]
        if plan.config.allow_uncovered:
            text, advice = f"without any guard, as {WAIVER} allows: {gap}", f"drop {setting} to be guarded"
            problems.append(Problem("warning", text, advice))
        else:
            text, advice = f"refused: {gap}", f"drop {setting}, or pass {WAIVER} to start without a guard"
            problems.append(Problem("error", text, advice))
    return problems


def _reason_against(check: str, plan: ServerPlan) -> str | None:
    config = plan.config
    if not config.is_on:
        return "the mode is off"
    if plan.gaps and config.allow_uncovered:
        return f"the server would run without a guard ({WAIVER})"
    if check not in config.checks:
        return "--kvcanary-content none" if check in BYTE_CHECKS and config.content == "none" else "--kvcanary-checks"
    if check == "ownership" and plan.sessions:
        return "--enable-streaming-session: the turns of a session hand slots on to each other"
    if check == "order" and plan.device == "cpu":
        return "nothing can be out of order on a CPU"
    return None


def _look_at_metrics(plan: ServerPlan, problems: list[Problem]) -> Fact:
    if not plan.config.is_on or not plan.metrics:
        return Fact("/metrics", f"without kvcanary's: {'add --enable-metrics' if plan.config.is_on else 'mode off'}")
    if importlib.util.find_spec("prometheus_client") is None:
        advice = "pip install prometheus_client"
        problems.append(Problem("warning", "--enable-metrics, but prometheus_client is not installed", advice))
        return Fact("/metrics", "without kvcanary's: prometheus_client is not installed", "warning")
    return Fact("/metrics", "with kvcanary's")


def _look_at_log(log: str | None, problems: list[Problem]) -> Fact:
    if log is None:
        return Fact("event log", "none; --kvcanary-log FILE keeps events")
    path = Path(log)
    # A file that is not there yet is made by the server; doctor leaves nothing behind.
    usable = os.access(path, os.R_OK | os.W_OK) and not path.is_dir() if path.exists() else path.parent.is_dir()
    usable = usable and (path.exists() or os.access(path.parent, os.W_OK | os.X_OK))
    if not usable:
        problems.append(
            Problem("error", f"the event log {log} cannot be written", f"make {path.parent} a folder it may write to")
        )
    return Fact(
        "event log", f"{log}, {'can be written' if usable else 'cannot be written'}", "ok" if usable else "error"
    )


def _without(words: list[str], flag: str, value: str) -> list[str]:
    joined = [word for word in words if word != f"{flag}={value}"]
    for index in range(len(joined) - 1):
        if joined[index : index + 2] == [flag, value]:
            return joined[:index] + joined[index + 2 :]
    return joined
