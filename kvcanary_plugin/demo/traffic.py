"""Mixed traffic: several clients, prompts that share prefixes, now and then an aborted request."""

from __future__ import annotations

import contextlib
import random
import threading
import urllib.error
from collections import Counter
from types import TracebackType

from .model import VOCABULARY
from .server import Server

SHARED_PREFIXES = 4
SHARED_LENGTH = 96


class Traffic:
    """Clients that keep a server busy until they are told to stop; a context manager.

    Attributes:
        counts: ``sent``, ``answered``, ``hit`` (with cached tokens), ``aborted`` and ``failed`` requests.
    """

    def __init__(self, server: Server, *, clients: int = 6, seed: int = 0, abort_share: float = 0.05) -> None:
        self.counts: Counter[str] = Counter()
        self._server = server
        self._abort_share = abort_share
        self._stop = threading.Event()
        self._limit: int | None = None
        rng = random.Random(seed)
        self._prefixes = [[rng.randrange(3, VOCABULARY) for _ in range(SHARED_LENGTH)] for _ in range(SHARED_PREFIXES)]
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{client}"),), daemon=True)
            for client in range(clients)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self.join()

    def join(self) -> None:
        """Wait until every client has had its last answer."""
        for thread in self._threads:
            thread.join()

    def stop_after(self, requests: int) -> None:
        """Let the clients end by themselves once that many requests were sent."""
        self._limit = requests

    def _run(self, rng: random.Random) -> None:
        while not self._stop.is_set() and (self._limit is None or self.counts["sent"] < self._limit):
            prompt = list(rng.choice(self._prefixes)) if rng.random() < 0.7 else []
            prompt += [rng.randrange(3, VOCABULARY) for _ in range(rng.choice((1, 15, 16, 17, 40, 90)))]
            self.counts["sent"] += 1
            rid = f"demo-{rng.getrandbits(64):016x}"
            timer = None
            if rng.random() < self._abort_share:
                timer = threading.Timer(rng.uniform(0.02, 0.3), self._abort, args=(rid,))
                timer.start()
            try:
                answer = self._server.generate(prompt, rng.choice((4, 16, 48)), rid=rid)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                self.counts["failed"] += 1
            else:
                aborted = answer["meta_info"]["finish_reason"]["type"] == "abort"
                self.counts["aborted" if aborted else "answered"] += 1
                self.counts["hit"] += bool(answer["meta_info"].get("cached_tokens"))
            if timer is not None:
                timer.join()

    def _abort(self, rid: str) -> None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            self._server.post("/abort_request", {"rid": rid}, timeout_s=30)
