"""Which SGLang releases this version knows, as data.

A new release is one more line in ``CHECKED_SGLANG``: ``tests/compat`` then compares every seam of ``patches/`` with its
published wheel and names what has moved.
"""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from .errors import SeamError

CHECKED_SGLANG = (
    "0.5.11",
    "0.5.12",
    "0.5.12.post1",
    "0.5.13",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
# Of these, the ones on which the tests with real servers run.
TESTED_SGLANG = ("0.5.15", "0.5.23")


def installed_sglang() -> str:
    """Version of the SGLang in this environment.

    Raises:
        SeamError: there is none, or it is older than anything this version knows.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise SeamError("kvcanary: sglang is not installed in this environment; kvcanary is a plugin of it") from error
    oldest = CHECKED_SGLANG[0]
    if Version(version) < Version(oldest):
        raise SeamError(f"kvcanary: SGLang {version} is older than {oldest}, the oldest release kvcanary supports")
    return version


def warn_of_unknown(version: str) -> str | None:
    """What to say before the seams of a release that was never looked at are checked; None for a known one."""
    if Version(version).public in CHECKED_SGLANG:  # a local build of a release counts as that release
        return None
    return (
        f"kvcanary: SGLang {version} is not among the releases kvcanary was checked against "
        f"({CHECKED_SGLANG[0]} to {CHECKED_SGLANG[-1]}); it starts only if every seam looks as in those"
    )
