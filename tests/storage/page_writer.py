"""A process that writes pages until it is killed, and says what it has committed.

Run as a script it writes for ever: random slots, in random batches, and for each batch a line on stdout, a pipe:
``slot number generation`` for every page that ``write`` said was stored. Neither torch nor SGLang is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class Writer:
    """The process, seen from a test."""

    def __init__(self, path: Path, seed: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(path), str(seed)], stdout=subprocess.PIPE, env=environment
        )
        self.pid = self._process.pid
        self.lines: list[bytes] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def wait_for_commits(self, count: int) -> None:
        """Wait until so many batches are committed."""
        while len(self.lines) < count:
            line = self._process.stdout.readline()
            assert line, "the writer ended by itself"
            self.lines.append(line)

    def kill(self) -> None:
        """kill -9, and read what it had said until then."""
        if self._process.returncode is None:
            self._process.kill()
            rest = self._process.stdout.read()
            self._process.wait(30)
            self._process.stdout.close()
            self.lines += [line for line in rest.splitlines(keepends=True) if line.endswith(b"\n")]

    def committed(self) -> list[list[tuple[int, int, int]]]:
        """Batches of (slot, number of the page, generation)."""
        batches = []
        for line in self.lines:
            numbers = list(map(int, line.split()))
            batches.append(list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)))
        return batches


def main(path: str, seed: int) -> None:
    """Write for ever."""
    import random

    sys.path.insert(0, str(Path(__file__).parent))
    from page_files import CAPACITY, GEOMETRY, halves, key_of, payload_of, records_of

    from kvcanary_plugin.tiers.hf3fs.page import PageWrite
    from kvcanary_plugin.tiers.hf3fs.page_file import PageFile

    assert "torch" not in sys.modules
    rng = random.Random(seed)
    file = PageFile.open(path, GEOMETRY, capacity_bytes=CAPACITY)
    number = seed * 1_000_000
    while True:
        slots = rng.sample(range(file.slot_count), rng.randint(1, 12))
        if rng.random() < 0.1:
            file.discard(slots[:2])
        batch = []
        for slot in slots:
            number += 1
            batch.append(PageWrite(key_of(number), slot, halves(payload_of(number)), records_of(number)))
        generations = file.write(batch)
        words = [
            f"{page.slot} {int.from_bytes(page.key, 'little')} {generation}"
            for page, generation in zip(batch, generations, strict=True)
            if generation is not None
        ]
        os.write(1, (" ".join(words) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
