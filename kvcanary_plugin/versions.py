"""Which SGLang releases this version was run against, as data."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from .errors import SeamError

OLDEST_SGLANG = "0.5.14"
TESTED_SGLANG = ("0.5.15",)


def installed_sglang() -> str:
    """Version of the SGLang in this environment.

    Raises:
        SeamError: there is none, or it is older than anything this version knows.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise SeamError("kvcanary: sglang is not installed in this environment; kvcanary is a plugin of it") from error
    if Version(version) < Version(OLDEST_SGLANG):
        raise SeamError(
            f"kvcanary: SGLang {version} is older than {OLDEST_SGLANG}, the oldest release kvcanary supports"
        )
    return version
