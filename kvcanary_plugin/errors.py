"""Everything kvcanary raises.

KvcanaryError
├── ConfigError        a flag, variable or combination of settings that cannot be honoured
├── SeamError          SGLang does not look as a declared patch expects
├── UncoveredError     a pool, allocator or server mode whose KV this version cannot follow
├── GuardError         the guard met a state it cannot reason about: it detaches (log) or stops the server (raise)
└── CorruptionError    damaged KV was found and the mode is ``raise``
"""

from __future__ import annotations


class KvcanaryError(Exception):
    """Base of all errors of this package."""


class ConfigError(KvcanaryError, ValueError):
    """A setting has a value that cannot be used; the message names the value, the limit and the next step."""


class SeamError(KvcanaryError):
    """A patch target is missing or has drifted; the message names the seam and the versions."""


class UncoveredError(KvcanaryError):
    """KV would appear or live where this version does not look; starting would be a silent gap."""


class GuardError(KvcanaryError):
    """An internal assumption of the guard does not hold; nothing it would say afterwards could be trusted."""


class CorruptionError(KvcanaryError):
    """Damaged KV was found and the mode asks for the server to stop."""
