"""Text of unknown origin, as it may be shown: no control characters, no secrets."""

from __future__ import annotations

import re

MASK = "***"
# A password in a URL ends at the last @, since one that was not encoded may hold any character; also within a URL that
# was encoded to be a value of another.
_USER_INFO = (re.compile(r"://[^\s'\"]*@"), re.compile(r"%3A%2F%2F[^\s'\"]*%40", re.IGNORECASE))
_SECRETS = re.compile(
    r"((?:password|passwd|token|secret|api[_-]?key)[\"']?\s*[=:]\s*[\"']?)[^&\s;,\"']+", re.IGNORECASE
)


def mask_secrets(text: str) -> str:
    """``text`` without user names and passwords of URLs, and without values that are named like a secret."""
    for pattern, mask in zip(_USER_INFO, (f"://{MASK}@", f"%3A%2F%2F{MASK}%40"), strict=True):
        text = pattern.sub(mask, text)
    return _SECRETS.sub(rf"\1{MASK}", text)


def escape_controls(text: str) -> str:
    """``text`` on one line, with what would steer a terminal written as an escape sequence."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
