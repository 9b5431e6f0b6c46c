"""Settings of the storage tier, from SGLang's extra config or from ``--kvcanary-hf3fs PATH[?name=value&...]``."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl

from ...errors import ConfigError

MODULE_PATH, CLASS_NAME = "kvcanary_plugin.tiers.hf3fs.backend", "VerifiedHF3FS"
CLIENTS = ("local", "usrbio")
# SGLang logs its settings and shows them over HTTP. A password that is given here is in neither.
REDIS_PASSWORD_VARIABLE = "KVCANARY_REDIS_PASSWORD"
# What SGLang and its launcher put beside our settings in the extra config.
_FOREIGN = ("backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """What an operator can set.

    Attributes:
        path: folder of the page files; on a 3FS mount for ``usrbio``. Made if missing.
        capacity_bytes: size of the page file of the KV pool of a rank; a side pool's is in proportion to its pages.
        client: ``local`` (any file system) or ``usrbio`` (3FS).
        index: ``redis://...`` for several hosts on one namespace; a folder for SQLite databases; None: beside the page
            files for ``local``, in the user's cache for ``usrbio``.
        namespace: within Redis.
        threads: that transfer the pages of a batch.
        check_threads: that check them; 0: the transferring ones do.
        o_direct: bypass the page cache.
        host: part of file names where several hosts share the folder; must stay the same over restarts.
        takeover: write files whose last writer, on another host, is known to be dead.
        identity: pairs that the pages must share beyond what is known by itself, such as ``{"weights": "2026-05"}``.
    """

    path: str
    capacity_bytes: int = 64 * 2**30
    client: str = "local"
    index: str | None = None
    namespace: str = "default"
    threads: int = 4
    check_threads: int = 0
    o_direct: bool = False
    host: str = field(default_factory=socket.gethostname)
    takeover: bool = False
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may have page files in the same folder."""
        return self.client == "usrbio" or self.uses_redis

    @property
    def uses_redis(self) -> bool:
        """Whether the index is a Redis."""
        return bool(self.index) and str(self.index).startswith(("redis://", "rediss://", "unix://"))


def parse_options(extra_config: Mapping[str, Any] | None) -> StorageOptions:
    """Settings out of SGLang's extra config; ``capacity`` may be ``"200GiB"``, ``"1T"`` or a number of bytes.

    Raises:
        ConfigError: a name is unknown, a value cannot be used, or there is no path.
    """
    given = {name: value for name, value in (extra_config or {}).items() if name not in _FOREIGN}
    if "capacity" in given:
        given["capacity_bytes"] = _parse_bytes(given.pop("capacity"))
    known = {item.name for item in fields(StorageOptions)}
    unknown = sorted(set(given) - known)
    if unknown:
        names = ", ".join(sorted((known - {"capacity_bytes"}) | {"capacity"}))
        raise ConfigError(f"kvcanary: the storage tier has no setting {', '.join(unknown)}; it has {names}")
    if not given.get("path"):
        raise ConfigError('kvcanary: the storage tier needs "path", the folder for its page files')
    parsed: dict[str, Any] = {
        name: _PARSERS.get(name, _parse_text)(name, value) for name, value in given.items() if value is not None
    }
    return StorageOptions(**parsed)


def to_extra_config(text: str) -> str:
    """The JSON that makes SGLang load this backend, from ``PATH[?name=value&...]``.

    Raises:
        ConfigError: like :func:`parse_options`.
    """
    path, _, query = text.partition("?")
    given: dict[str, Any] = {"path": path, **dict(parse_qsl(query, keep_blank_values=True))}
    extra = {
        name.removeprefix("identity."): given.pop(name) for name in [n for n in given if n.startswith("identity.")]
    }
    if extra:
        given["identity"] = extra
    parse_options(given)
    shell = {"backend_name": "kvcanary_hf3fs", "module_path": MODULE_PATH, "class_name": CLASS_NAME, "interface_v1": 1}
    return json.dumps(shell | given)


def redis_password() -> str | None:
    """The password for a Redis whose URL has none."""
    return os.environ.get(REDIS_PASSWORD_VARIABLE) or None


def _parse_bytes(value: Any) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", str(value), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ConfigError(f'kvcanary: capacity={value!r} is no size; give bytes, or something like "200GiB"')
    return size


def _parse_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"kvcanary: {name}={value!r} must be a text that is not empty")
    return value


def _parse_client(name: str, value: Any) -> str:
    if value not in CLIENTS:
        raise ConfigError(f"kvcanary: {name}={value!r} is not one of {', '.join(CLIENTS)}")
    return str(value)


def _parse_count(name: str, value: Any) -> int:
    least = 0 if name == "check_threads" else 1
    if isinstance(value, bool) or not str(value).isdecimal() or not least <= int(value) <= 256:
        raise ConfigError(f"kvcanary: {name}={value!r} must be a whole number from {least} to 256")
    return int(value)


def _parse_switch(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in ("1", "0", "true", "false"):
        raise ConfigError(f"kvcanary: {name}={value!r} is neither true nor false")
    return text in ("1", "true")


def _parse_size(name: str, value: Any) -> int:
    return _parse_bytes(value)


def _parse_pairs(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"kvcanary: {name}={value!r} must be an object of names and values")
    return {str(key): str(item) for key, item in value.items()}


def _parse_host(name: str, value: Any) -> str:
    if not re.fullmatch(r"[\w.-]+", str(value)):
        raise ConfigError(f"kvcanary: {name}={value!r} becomes part of a file name: letters, digits, '.', '-' and '_'")
    return str(value)


_PARSERS = {
    "capacity_bytes": _parse_size,
    "client": _parse_client,
    "threads": _parse_count,
    "check_threads": _parse_count,
    "o_direct": _parse_switch,
    "takeover": _parse_switch,
    "identity": _parse_pairs,
    "host": _parse_host,
    "namespace": _parse_host,
}
