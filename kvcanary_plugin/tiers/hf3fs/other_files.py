"""Page files of other hosts that a shared index names: opened read-only when first needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from .errors import PageFileError
from .index import Location, PageIndex
from .page_file import PageFile

logger = logging.getLogger("kvcanary")

RETRY_AFTER_S = 30.0


class OtherFiles:
    """Safe to call from several threads.

    Args:
        index: knows where the files are.
        open_file: opens one by path; None if there is none any more. Raises ``PageFileError`` or ``OSError`` if it
            cannot be opened now.
    """

    def __init__(self, index: PageIndex, open_file: Callable[[str], PageFile | None]) -> None:
        self._index = index
        self._open_file = open_file
        self._files: dict[str, PageFile] = {}
        self._retry_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def find(self, places: Sequence[Location]) -> PageFile | None:
        """The file of some places, all in the same; None if it cannot be had. If it is gone, they are withdrawn.

        Raises:
            IndexUnavailableError: the index cannot be reached.
        """
        name = places[0].file
        with self._lock:
            file = self._files.get(name)
            if file is not None or time.monotonic() < self._retry_at.get(name, 0.0):
                return file
            path = self._index.path_of(name)
            try:
                file = None if path is None else self._open_file(path)
            except (PageFileError, OSError) as error:
                self._retry_at[name] = time.monotonic() + RETRY_AFTER_S
                logger.warning("kvcanary: cannot read another host's pages: %s", error)
                return None
            if file is not None and file.uuid.hex() != name:
                file.close()
                file = None
            if file is None:
                self._index.withdraw(places, retire=False)
            else:
                self._files[name] = file
            return file

    def close(self) -> None:
        """Close what was opened."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()
