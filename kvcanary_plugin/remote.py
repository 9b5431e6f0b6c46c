"""Commands ``status``, ``set`` and ``audit``: look at a running server and change what its guard does.

They use SGLang's own HTTP server: ``/server_info`` and ``/set_internal_state``, with its keys.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .config import CHECKS, MODES, OPTIONS
from .errors import ConfigError
from .runtime.control import STATE_SCHEMA, Change

KEY_VARIABLE = "KVCANARY_API_KEY"
POLL_SECONDS = 0.2
MAX_ANSWER_BYTES = 16 << 20
_PARSERS = {option.field: option.parse for option in OPTIONS}


class RemoteError(Exception):
    """The server cannot be reached, refuses, or runs without a guard. ``str()`` is one sentence for people."""


class _Direct(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another server, and a POST would become a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_Direct)


class Server:
    """SGLang's HTTP server at ``url``."""

    def __init__(self, url: str, key: str | None = None, timeout_seconds: float = 30.0) -> None:
        """``key``: the one SGLang asks for: its ``--admin-api-key`` if it has one, else its ``--api-key``."""
        if not url.startswith(("http://", "https://")):
            raise RemoteError(f"kvcanary: --url {url!r} is no address; it looks like http://127.0.0.1:30000")
        if key and not (key.isascii() and key.isprintable()):
            raise RemoteError(f"kvcanary: the key in {KEY_VARIABLE} has characters that HTTP cannot send; a line end?")
        self._url = url.rstrip("/")
        self._key = key
        self._timeout_seconds = timeout_seconds

    def states(self) -> list[dict[str, Any]]:
        """The state of the guard of each data-parallel replica, by its first rank.

        Raises:
            RemoteError: see there.
        """
        answer = self._call("/server_info")
        replicas = answer.get("internal_states") if isinstance(answer, dict) else None
        if not isinstance(replicas, list):
            raise RemoteError(
                f"kvcanary: {self._url} does not answer like SGLang: {str(answer)[:200]!a}; is --url right?"
            )
        states: list[Any] = [each.get("kvcanary") if isinstance(each, dict) else None for each in replicas]
        if not states or not all(isinstance(state, dict) and state.get("schema") == STATE_SCHEMA for state in states):
            raise RemoteError(
                f"kvcanary: the server at {self._url} runs without kvcanary, or with another version of it; "
                "start it with --kvcanary log"
            )
        return states

    def change(self, change: Change) -> None:
        """Have every rank take over ``change``.

        Raises:
            RemoteError: it was refused, and why.
        """
        self.states()
        accepted = self._call("/set_internal_state", {"server_args": {change.to_key(): 1}})
        if isinstance(accepted, list) and accepted and all(accepted):
            return
        outcomes = [
            last for state in self.states() for last in state.get("last_changes", []) if last["id"] == change.id
        ]
        reasons = {last["why"] for last in outcomes if not last["accepted"]}
        why = "; ".join(sorted(reasons)) or "kvcanary: the server refused, and does not say why"
        if isinstance(accepted, list) and any(accepted):
            why += f"; {sum(map(bool, accepted))} of {len(accepted)} replicas have taken it over"
        raise RemoteError(why)

    def flush(self) -> None:
        """Drop every cached prefix, which SGLang does only while nothing runs.

        Raises:
            RemoteError: it did not.
        """
        self._call("/flush_cache", {})

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data=data, headers=headers)
            with _OPENER.open(request, timeout=self._timeout_seconds) as response:
                text = response.read(MAX_ANSWER_BYTES).decode(errors="replace")
        except urllib.error.HTTPError as error:
            said = ""
            if error.code in (401, 403):
                raise RemoteError(
                    f"kvcanary: {self._url}{path} asks for a key (HTTP {error.code}); put the server's admin key, or "
                    f"its API key where it has no admin key, into {KEY_VARIABLE}"
                ) from error
            with contextlib.suppress(OSError, http.client.HTTPException):
                said = error.read(300).decode(errors="replace").strip()
            raise RemoteError(f"kvcanary: {self._url}{path} answered HTTP {error.code}: {said!r}") from error
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
        ) as error:  # ValueError: a URL or key that cannot be sent
            reason = getattr(error, "reason", None) or error
            raise RemoteError(f"kvcanary: cannot reach {self._url}: {reason}; is the server up?") from error
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


def add_commands(commands: Any) -> None:
    """Add ``status``, ``set`` and ``audit`` to the subparsers of the command line."""
    at = argparse.ArgumentParser(add_help=False)
    at.add_argument(
        "--url", default="http://127.0.0.1:30000", help="The address of the SGLang server. Default: %(default)s."
    )
    at.add_argument("--json", action="store_true", help="Print JSON, one object for each replica. Default: a table.")
    at.epilog = f"The key of a server that asks for one is taken from {KEY_VARIABLE}."
    commands.add_parser(
        "status",
        parents=[at],
        epilog=at.epilog,
        help="Show what the guard of a running server does and has found. "
        "Exit code 0 if it guards and has found nothing, 1 if not, 2 if there is no guard to ask.",
    )
    change = commands.add_parser(
        "set",
        parents=[at],
        epilog=at.epilog,
        help="Change mode, checks or budget of a running server until its next start. "
        "Exit code 0 if it was done, 2 if it was refused.",
    )
    change.add_argument(
        "--mode",
        choices=MODES,
        help="What damage leads to; quarantine only in a server that was started in it. After off, another mode takes "
        "effect with the next flush of the cache. Default: as it is.",
    )
    change.add_argument(
        "--checks",
        metavar="CHECK[,CHECK]",
        help=f"The checks to run, of {', '.join(CHECKS)}, among those the server was started with. Default: as it is.",
    )
    change.add_argument(
        "--scrub-budget",
        metavar="SHARE",
        help="The share of the time of a forward that the content pass may add, above 0 and at most 1, from its next "
        "pass on. Default: as it is.",
    )
    change.add_argument("--flush", action="store_true", help="Flush the cache afterwards; nothing may be running.")
    audit = commands.add_parser(
        "audit",
        parents=[at],
        epilog=at.epilog,
        help="Have a running server look at its whole KV pool now, as fast as serving allows. "
        "Exit code 0 if nothing was found, 1 if something was, 2 if it cannot be done.",
    )
    audit.add_argument(
        "--timeout",
        type=_read_seconds,
        default=600.0,
        metavar="SECONDS",
        help="Wait that many seconds for its end; it goes on in the server. Default: %(default)g.",
    )


def _read_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


def run_remote(options: argparse.Namespace, console: Console) -> int:
    """Run one of the commands and return its exit code."""
    try:
        server = Server(options.url, os.environ.get(KEY_VARIABLE))
        if options.command == "set":
            change_server(server, options)
        elif options.command == "audit":
            return audit_server(server, options, console)
        states = server.states()
    except (RemoteError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvcanary: interrupted; an audit under way goes on in the server", file=sys.stderr)
        return 130
    show(states, options, console)
    if options.command == "set":
        if options.flush:
            print("the cache was flushed", file=sys.stderr)
        if any(state["state"] == "waiting" for state in states):
            print("waiting: it takes effect with the next flush of the cache; --flush asks for one", file=sys.stderr)
        return 0
    return 0 if all(state["state"] == "guarding" and not any(state["violations"].values()) for state in states) else 1


def change_server(server: Server, options: argparse.Namespace) -> None:
    """Carry out ``kvcanary set``."""
    values = {
        field: _PARSERS[field](flag, text)
        for field, flag in (("mode", "--mode"), ("checks", "--checks"), ("scrub_budget", "--scrub-budget"))
        if (text := getattr(options, field)) is not None
    }
    if not values and not options.flush:
        raise ConfigError("kvcanary: nothing to set; name --mode, --checks, --scrub-budget or --flush")
    if values:
        server.change(Change(id=uuid.uuid4().hex, **values))
    if options.flush:
        try:
            server.flush()
        except RemoteError as error:
            raise RemoteError(f"{error}{' (the change itself is in force)' if values else ''}") from error


def audit_server(server: Server, options: argparse.Namespace, console: Console) -> int:
    """Carry out ``kvcanary audit``: start it, wait for its end, and say what it found."""
    server.change(Change(id=uuid.uuid4().hex, audit=True))
    give_up = time.monotonic() + options.timeout
    while True:
        states = server.states()
        audits = [state["audit"] for state in states if state.get("audit")]
        if len(audits) < len(states):
            raise RemoteError("kvcanary: the guard is gone in the middle of the audit; look at the server's log")
        if stopped := {audit["why"] for audit in audits if audit["state"] == "stopped"}:
            raise RemoteError(f"kvcanary: the audit was stopped: {'; '.join(sorted(stopped))}")
        if all(audit["state"] == "done" for audit in audits):
            break
        if time.monotonic() > give_up:
            raise RemoteError(f"kvcanary: the audit is not over after {options.timeout:g} s; it goes on in the server")
        time.sleep(POLL_SECONDS)
    if options.json:
        print(json.dumps(audits))
    for replica, audit in enumerate([] if options.json else audits):
        found = ", ".join(f"{count} {check}" for check, count in audit["violations"].items()) or "nothing"
        console.print(
            f"replica {replica}: went over {audit['slots']} slots in {audit['seconds']:.3f} s, found {found}",
            highlight=False,
        )
    return 1 if any(audit["violations"] for audit in audits) else 0


def show(states: list[dict[str, Any]], options: argparse.Namespace, console: Console) -> None:
    """Print the states, for people or as JSON."""
    if options.json:
        print(json.dumps(states))
        return
    for replica, state in enumerate(states):
        table = Table(title=f"replica {replica}", show_header=False, title_justify="left")
        for name, value in _rows(state):
            table.add_row(name, Text(_escape(value)))
        console.print(table)


def _escape(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _rows(state: dict[str, Any]) -> list[tuple[str, str]]:
    found = ", ".join(f"{count} {check}" for check, count in state["violations"].items() if count)
    found = f"{found} since the start, repeats included" if found else "none"
    rows = [("state", f"{state['state']}, mode {state['mode']}"), ("violations", found)]
    if "pool" in state:
        off = [check for check in state["possible_checks"] if check not in state["checks"]]
        rows += [
            ("pool", f"{state['pool']}, {state['slots']} slots, rank {state['rank']}"),
            ("checks", "+".join(state["checks"]) + (f" (off: {', '.join(off)})" if off else "")),
            ("forwards", f"{state['forwards']}, {state['verified']} slots verified, {state['stored']} stored"),
        ]
    if "passes" in state:
        seconds = state["period_seconds"]
        period = "" if seconds is None else f", {seconds:.1f} s where they follow each other"
        rows += [
            ("content pass", f"{state['passes']} so far, budget {state['scrub_budget']:g}"),
            ("promised period", f"{state['period_forwards']} forwards{period}"),
            ("oldest unverified", f"{state['oldest_unverified_seconds']:.1f} s"),
        ]
    if "quarantine" in state:
        totals = state["quarantine"]
        rows.append(
            (
                "quarantine",
                f"{totals['state']}: {totals['ended_total']} requests ended, {totals['withheld_slots']} slots withheld",
            )
        )
    return rows
