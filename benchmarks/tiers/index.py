"""Keys a second that an index reserves and commits, one batch at a time, empty file and full (every reserve evicts).

python benchmarks/tiers/index.py                        # SQLite
python benchmarks/tiers/index.py --redis redis://127.0.0.1:6379/0
"""

import argparse
import os
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from kvcanary_plugin.tiers.hf3fs.index import Entry
from kvcanary_plugin.tiers.hf3fs.redis_index import RedisIndex
from kvcanary_plugin.tiers.hf3fs.sqlite_index import SqliteIndex

SLOTS = 20_000
KEYS = 40_000
BOUND_KEYS_S = 10_000


def measure(index, batch):
    """Keys a second of reserve + commit while free slots last, then while each evicts one, then of lookup + release."""
    index.rebuild([], SLOTS, 1)
    keys = [os.urandom(16) for _ in range(KEYS)]
    rates = []
    for phase in (keys[:SLOTS], keys[SLOTS:]):
        start = time.perf_counter()
        for begin in range(0, len(phase), batch):
            held = index.reserve(phase[begin : begin + batch])
            assert all(index.commit([(r, begin + i + 1) for i, r in enumerate(held)]))
        rates.append(len(phase) / (time.perf_counter() - start))
    start = time.perf_counter()
    for begin in range(SLOTS, KEYS, batch):
        places = index.lookup(keys[begin : begin + batch])
        assert None not in places
        index.release(places)
    rates.append(SLOTS / (time.perf_counter() - start))
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", metavar="URL", help="also measure this server")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{SLOTS} slots, {KEYS} keys, median of {options.rounds} rounds; bound {BOUND_KEYS_S} keys/s")
    print(f"{'index':8}{'batch':>6}{'reserve+commit/s':>20}{'evicting/s':>14}{'lookup+release/s':>20}")
    with tempfile.TemporaryDirectory() as folder:
        indices = {"sqlite": lambda: SqliteIndex(Path(folder) / f"{uuid.uuid4().hex}.sqlite", uuid.uuid4().hex)}
        if options.redis:
            indices["redis"] = lambda: RedisIndex(
                options.redis, uuid.uuid4().hex, path=uuid.uuid4().hex, namespace=uuid.uuid4().hex
            )
        for name, make in indices.items():
            for batch in (1, 16, 128):
                rounds = []
                for _ in range(options.rounds):
                    index = make()
                    rounds.append(measure(index, batch))
                    index.close()
                store, evict, read = (statistics.median(column) for column in zip(*rounds, strict=True))
                print(f"{name:8}{batch:>6}{store:>20,.0f}{evict:>14,.0f}{read:>20,.0f}")
        index = indices["sqlite"]()
        entries = [Entry(os.urandom(16), slot, slot + 1) for slot in range(100_000)]
        start = time.perf_counter()
        index.rebuild(entries, 100_000, 1)
        print(f"sqlite rebuild of 100,000 pages: {time.perf_counter() - start:.2f} s")
        index.close()


if __name__ == "__main__":
    main()
