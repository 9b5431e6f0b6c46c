"""Whether the Redis of an index answers, and is set up to keep what it is given."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from ..display import escape_controls, mask_secrets
from ..tiers.hf3fs.options import redis_password
from .checkup import Fact, Problem

TIMEOUT_SECONDS = 2.0
OLDEST = "5"


def examine_redis(url: str, problems: list[Problem]) -> Fact:
    """Ask it for its version and its memory policy. What it answers is shown, and not believed beyond that."""
    address = mask_secrets(url)
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        problems.append(
            Problem("error", "an index at redis:// needs the Python package redis", "pip install 'redis>=5'")
        )
        return Fact("index", f"{address}, package redis is not installed", "error")
    try:
        with redis.Redis.from_url(
            url,
            password=redis_password(),
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),
        ) as client:
            client.ping()
            server = dict(client.info())
    except (redis.RedisError, OSError, ValueError) as error:
        # Only the kind: the message may quote the URL.
        problems.append(
            Problem(
                "error",
                f"no Redis answers at {address} ({type(error).__name__})",
                "start it, correct ?index=, or leave index out: a single host needs none",
            )
        )
        return Fact("index", f"{address}, does not answer", "error")
    version, policy = (escape_controls(str(server.get(name)))[:40] for name in ("redis_version", "maxmemory_policy"))
    if _is_older(version):
        problems.append(Problem("error", f"Redis {version} is too old", f"use Redis {OLDEST} or newer"))
    if policy not in ("noeviction", "None"):
        problems.append(
            Problem(
                "warning",
                f"the Redis evicts by {policy}, and may drop parts of the index",
                "set its maxmemory-policy to noeviction",
            )
        )
    return Fact("index", f"{address}, answers, version {version}")


def _is_older(version: str) -> bool:
    try:
        return Version(version) < Version(OLDEST)
    except InvalidVersion:  # a compatible server that numbers itself in another way
        return False
