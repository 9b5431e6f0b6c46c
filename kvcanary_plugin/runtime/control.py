"""Changes to a running guard: its mode, its checks, the budget of the rotating pass, and an audit now.

Every rank of a server gets a change between the same two batches, because SGLang hands its control requests on. A
change is taken over as a whole or refused as a whole. Nothing of it survives a restart.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from .. import __version__
from ..config import OPTIONS
from ..errors import ConfigError

if TYPE_CHECKING:
    from .session import Session

logger = logging.getLogger("kvcanary")

PREFIX = "kvcanary?"
STATE_SCHEMA = 1
CHANGEABLE = ("mode", "checks", "scrub_budget")
MAX_ID_LENGTH = 64
MAX_REMEMBERED = 16
_OPTION = {option.field: option for option in OPTIONS if option.field in CHANGEABLE}


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be different. None means as it is.

    Attributes:
        id: chosen by whoever asks, to recognise the outcome.
        audit: go over the whole pool now.
    """

    id: str = ""
    mode: str | None = None
    checks: tuple[str, ...] | None = None
    scrub_budget: float | None = None
    audit: bool = False

    def to_key(self) -> str:
        """As SGLang's ``/set_internal_state`` carries it: a name, since values must be numbers in newer releases."""
        texts = {"id": self.id}
        if self.mode is not None:
            texts["mode"] = self.mode
        if self.checks is not None:
            texts["checks"] = ",".join(self.checks)
        if self.scrub_budget is not None:
            texts["scrub_budget"] = repr(self.scrub_budget)
        if self.audit:
            texts["audit"] = "1"
        return PREFIX + urlencode(texts)


def parse_change(text: str) -> Change:
    """The change that ``NAME=VALUE&...`` asks for, with :data:`PREFIX` or without.

    Raises:
        ConfigError: a name is not known, comes twice, or its value cannot be used.
    """
    values: dict[str, Any] = {}
    for name, value in parse_qsl(text.removeprefix(PREFIX), keep_blank_values=True):
        if name in values:
            raise ConfigError(f"kvcanary: {name} is given twice")
        if name in _OPTION:
            values[name] = _OPTION[name].parse(name, value)
        elif name == "audit" and value == "1":
            values[name] = True
        elif name == "id":
            if not (value.isascii() and value.isprintable() and len(value) <= MAX_ID_LENGTH):
                raise ConfigError(
                    f"kvcanary: id {value[:40]!a} is not at most {MAX_ID_LENGTH} printable ASCII characters"
                )
            values[name] = value
        else:
            raise ConfigError(
                f"kvcanary: {name[:40]!r}={value[:40]!r} cannot be changed in a running server; "
                f"what can is {', '.join(CHANGEABLE)}, and audit=1"
            )
    return Change(**values)


class Control:
    """Takes changes for one session and says how things stand."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lasts: deque[dict[str, Any]] = deque(maxlen=MAX_REMEMBERED)  # several operators may ask at once

    def apply(self, text: str) -> bool:
        """Do what ``text`` asks for, see :func:`parse_change`. Returns whether it was done; why not is in the state."""
        change = Change()
        try:
            change = parse_change(text)
            self._check(change)
        except ConfigError as error:
            logger.warning("%s (refused; nothing was changed)", error)
            self._lasts.append({"id": change.id, "accepted": False, "why": str(error)})
            return False
        self._take_over(change)
        is_done = self._session.guard is not None
        why = (
            ""
            if is_done
            else "kvcanary: the guard met an error of its own meanwhile and let go; look at the server's log"
        )
        self._lasts.append({"id": change.id, "accepted": is_done, "why": why})
        return is_done

    def _check(self, change: Change) -> None:
        session = self._session
        guard, started = session.guard, session.config
        if guard is None:
            raise ConfigError(f"kvcanary: this server is {session.state}; there is no guard to change")
        if change.mode == "off" and session.handover is not None:
            raise ConfigError(
                "kvcanary: in mode off the other server would take KV without records for damaged; stop both, and "
                "start them without --kvcanary"
            )
        if change.mode == "quarantine" and session.policy is None:
            raise ConfigError(
                f"kvcanary: mode quarantine needs seams that a server started in mode {started.mode} has not wrapped; "
                "start it with --kvcanary quarantine, from where it may go to log and back"
            )
        possible = guard.settings.possible
        if change.checks is not None:
            if missing := [check for check in change.checks if check not in possible]:
                raise ConfigError(
                    f"kvcanary: {', '.join(missing)} cannot be switched on in this server, which was started with "
                    f"{', '.join(possible)}"
                )
            if "identity" in change.checks and "chain" not in change.checks:
                raise ConfigError("kvcanary: identity is found by chain; name both or leave identity out")
        if change.audit:
            if "content" not in (change.checks or guard.checks):
                raise ConfigError("kvcanary: an audit goes over the bytes and needs the check content, which is off")
            if session.is_paused or change.mode == "off":
                raise ConfigError("kvcanary: an audit needs a guard at work; this one is in mode off")

    def _take_over(self, change: Change) -> None:
        session = self._session
        session.call(lambda guard: guard.conclude())
        guard = session.guard
        if guard is None:
            return  # it has just detached
        if change.mode is not None:
            session.mode = change.mode
            guard.settings.set_mode(change.mode, session.policy)
            if change.mode == "off":
                session.is_paused = True
                guard.passes.stop_audit("the mode was set to off")
        if change.checks is not None:
            guard.settings.set_checks(change.checks)
        if change.scrub_budget is not None:
            guard.settings.set_scrub_budget(change.scrub_budget)
        if change.audit:
            guard.passes.start_audit()
        logger.info("kvcanary: changed while running: %s; now %s in mode %s", change, session.state, session.mode)
        fields = {"id": change.id, "audit": change.audit, "checks": list(guard.checks), "state": session.state}
        scrub_budget = guard.settings.scrub_budget
        session.reporter.event("changed", {**fields, "mode": session.mode, "scrub_budget": scrub_budget})

    def describe(self) -> dict[str, Any]:
        """The state of this rank, plain values. No token, request or key is named in it."""
        session = self._session
        guard = session.guard
        state: dict[str, Any] = {
            "schema": STATE_SCHEMA,
            "version": __version__,
            "state": session.state,
            "mode": session.mode,
            "violations": dict(session.reporter.counts),
            "last_change": self._lasts[-1] if self._lasts else None,
            "last_changes": list(self._lasts),
        }
        if guard is not None:
            state |= {
                "rank": guard.rank,
                "pool": guard.pool.name,
                "slots": guard.pool.slot_count,
                "checks": list(guard.checks),
                "possible_checks": list(guard.settings.possible),
                "scrub_budget": guard.settings.scrub_budget,
                **guard.describe(),
            }
        if session.policy is not None:
            state["quarantine"] = session.policy.totals
        return state
