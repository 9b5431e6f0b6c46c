"""What checking every page costs: the page file beside raw preadv/pwritev of the same bytes and SGLang's mock client.

All arms move the same memory to and from files in the page cache, alternately, in one process. ``share`` is the median
of the ratios of neighbouring measurements, which a machine that is shared disturbs least; GB/s are of the best one. The
benchmark refuses to print figures unless a flipped bit is found and every page that was read equals what was written.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash

from kvcanary_plugin.tiers.hf3fs.client import view_bytes
from kvcanary_plugin.tiers.hf3fs.geometry import Geometry
from kvcanary_plugin.tiers.hf3fs.page import PageRead, PageWrite
from kvcanary_plugin.tiers.hf3fs.page_file import PageFile
from kvcanary_plugin.tiers.page_records import encode, room_for

KIB = 1024
SIZES = [128 * KIB, 512 * KIB, 2048 * KIB, 4392 * KIB, 9216 * KIB]
BATCH = 128  # pages that SGLang moves at a time
# threads of raw I/O, threads of the page file, share of raw that must be reached: with as many threads, and with one
# more for the check where a second core is free
ARMS = [(1, 1, 0.75), (2, 2, 0.75), (1, 2, 0.90)]
SCANNED_PAGES = 100_000
SCAN_SECONDS = 10.0


def best_seconds(work: Callable[[], object], repetitions: int) -> float:
    """The shortest of some runs."""
    return min(measure(work) for _ in range(repetitions))


def measure(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def list_checksums() -> dict[str, Callable[[memoryview], object]]:
    """Every candidate that can be imported here."""
    candidates: dict[str, Callable[[memoryview], object]] = {
        "xxh3_64": xxhash.xxh3_64_digest,
        "xxh3_128": xxhash.xxh3_128_digest,
        "xxh64": xxhash.xxh64_digest,
        "zlib.crc32": zlib.crc32,
        "zlib.adler32": zlib.adler32,
        "sha256": hashlib.sha256,
        "blake2b": hashlib.blake2b,
    }
    for module, function in (("google_crc32c", "value"), ("crc32c", "crc32c"), ("blake3", "blake3")):
        try:
            found = getattr(importlib.import_module(module), function)
        except ImportError:
            continue
        candidates[f"{module}.{function}"] = found if module == "blake3" else lambda data, f=found: f(bytes(data))
    return candidates


def compare_checksums(repetitions: int) -> None:
    """Cost a byte, in the cache and from memory."""
    memory = memoryview(torch.randint(0, 256, (64 << 20,), dtype=torch.uint8).numpy())
    piece = 256 * KIB
    pieces = [memory[start : start + piece] for start in range(0, len(memory), piece)]
    print("\n| checksum | in the cache, ns/KiB | from memory, ns/KiB |\n|---|---|---|")
    for name, checksum in list_checksums().items():
        hot = best_seconds(lambda f=checksum: [f(pieces[0]) for _ in range(16)], repetitions) / 16 / (piece / KIB)
        cold = best_seconds(lambda f=checksum: [f(p) for p in pieces], repetitions) / (len(memory) / KIB)
        print(f"| {name} | {hot * 1e9:.0f} | {cold * 1e9:.0f} |", flush=True)


class Bench:
    """Raw I/O and a page file over the same pages."""

    def __init__(self, folder: Path, size: int, total: int, raw_threads: int, threads: int, tokens: int) -> None:
        self.size, self.count, self.threads = size, max(2, total // size), raw_threads
        self.source = torch.randint(0, 256, (self.count, size), dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)
        self._sources = [view_bytes(page) for page in self.source]
        self._targets = [view_bytes(page) for page in self.target]
        self._raw = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(self._raw, self.count * size)
        self._pool = ThreadPoolExecutor(raw_threads)
        self.path = folder / "pages"
        self.path.unlink(missing_ok=True)
        self.file = PageFile.open(
            *(self.path, Geometry((("model", "benchmark"),), size, room_for(tokens) if tokens else 0)),
            capacity_bytes=(self.count + 2) * (size + room_for(tokens))
            + (self.count // 63 + 64) * 16 * KIB
            + (8 << 20),
            threads=threads,
        )
        records = encode(np.arange(1, 1 + 3 * tokens).reshape(tokens, 3), bytes(16)) if tokens else b""
        self._writes = [PageWrite(n.to_bytes(16, "little"), n, (page,), records) for n, page in enumerate(self.source)]
        self._generations: list[int | None] = [None] * self.count
        self._reads: list[PageRead] = []

    def raw_write(self) -> None:
        self._spread(lambda n: os.pwritev(self._raw, [self._sources[n]], n * self.size))

    def raw_read(self) -> None:
        self._spread(lambda n: os.preadv(self._raw, [self._targets[n]], n * self.size))

    def write(self) -> None:
        for first in range(0, self.count, BATCH):
            self._generations[first : first + BATCH] = self.file.write(self._writes[first : first + BATCH])

    def read(self) -> None:
        for first in range(0, self.count, BATCH):
            if not all(verdict.ok for verdict in self.file.read(self._reads[first : first + BATCH])):
                raise SystemExit("a page does not verify")

    def ask(self) -> None:
        """Prepare what the next ``read`` asks for."""
        self._reads = [
            PageRead(page.key, page.slot, generation or 0, (target,))
            for page, generation, target in zip(self._writes, self._generations, self.target, strict=True)
        ]

    def check(self) -> None:
        """Refuse to go on unless reading is right and damage is found."""
        self.target.zero_()
        self.write()
        self.ask()
        self.read()
        if not torch.equal(self.source, self.target):
            raise SystemExit("what was read is not what was written")
        place = self.path.stat().st_size // self.size * self.size // 2
        with open(self.path, "r+b") as file:
            file.seek(place)
            before = file.read(1)[0]
            file.seek(place)
            file.write(bytes([before ^ 1]))
        if all(verdict.ok for verdict in self.file.read(self._reads)):
            with open(self.path, "rb") as file:
                file.seek(place)
                now = file.read(1)[0]
            raise SystemExit(
                f"a flipped bit was not found: byte {place} of the file was {before}, then {before ^ 1}, is {now}"
            )
        self.write()
        self.raw_write()

    def close(self) -> None:
        self.file.close()
        os.close(self._raw)
        self._pool.shutdown()

    def _spread(self, transfer: Callable[[int], object]) -> None:
        remaining = iter(range(self.count))

        def work() -> None:
            for number in remaining:
                transfer(number)

        if self.threads == 1:
            work()
        else:
            for future in [self._pool.submit(work) for _ in range(self.threads)]:
                future.result()


class Stock:
    """SGLang's mock client over the same pages; it checks nothing."""

    def __init__(self, folder: Path, bench: Bench) -> None:
        from sglang.srt.mem_cache.storage.hf3fs.hf3fs_client import Hf3fsMockClient

        self._client = Hf3fsMockClient(str(folder / "stock"), bench.count * bench.size, bench.size, BATCH)
        self._bench = bench
        self._offsets = [number * bench.size for number in range(bench.count)]
        self.write()

    def write(self) -> None:
        self._client.batch_write(self._offsets, list(self._bench.source))

    def read(self) -> None:
        self._client.batch_read(self._offsets, list(self._bench.target))

    def close(self) -> None:
        self._client.close()


def compare(folder: Path, size: int, options: argparse.Namespace, arm: tuple[int, int, float]) -> bool:
    """Measure one page size with one set of threads. Returns whether the bound holds for both directions."""
    raw_threads, threads, bound = arm
    bench = Bench(folder, size, options.megabytes << 20, raw_threads, threads, options.tokens)
    stock = Stock(folder, bench) if options.stock and threads == 1 else None
    held = True
    try:
        bench.check()
        for name in ("write", "read"):
            raw, ours, shares, other = [], [], [], []
            for _ in range(options.repetitions):
                bench.ask()
                raw.append(measure(getattr(bench, f"raw_{name}")))
                ours.append(measure(getattr(bench, name)))
                shares.append(raw[-1] / ours[-1])
                if stock:
                    other.append(measure(getattr(stock, name)))
            share, rate = statistics.median(shares), bench.count * size / 1e9
            extra = (min(ours) - min(raw)) / (bench.count * size) * KIB * 1e9
            held &= share >= bound
            print(
                f"| {size // KIB:,} KiB | {name} | {raw_threads} | {threads} | {rate / min(raw):.2f} | "
                f"{rate / min(ours):.2f} | {f'{rate / min(other):.2f}' if other else ''} | {share:.0%} | {bound:.0%} | "
                f"{'yes' if share >= bound else 'no'} | {extra:.0f} |",
                flush=True,
            )
    finally:
        bench.close()
        if stock:
            stock.close()
    return held


def measure_scan(folder: Path) -> bool:
    """Rebuild what is known about a file of 100,000 pages by scan alone."""
    path, geometry = folder / "scanned", Geometry((("model", "benchmark"),), 64)
    page, capacity = torch.zeros(64, dtype=torch.uint8), (SCANNED_PAGES + 1000) * 4096 * 66 // 63
    with PageFile.open(path, geometry, capacity_bytes=capacity) as file:
        for first in range(0, SCANNED_PAGES, 1000):
            file.write([PageWrite(n.to_bytes(16, "little"), n, (page,)) for n in range(first, first + 1000)])

    def scan() -> None:
        with PageFile.open(path, geometry, capacity_bytes=capacity) as file:
            if len(list(file.scan())) != SCANNED_PAGES:
                raise SystemExit("the scan did not find every page")

    seconds = best_seconds(scan, 3)
    path.unlink()
    print(
        f"\nrebuild by scan of {SCANNED_PAGES:,} pages, file opened and closed: {seconds:.2f} s, bound {SCAN_SECONDS} s"
    )
    return seconds < SCAN_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the files are made (default: the temporary folder)")
    parser.add_argument("--megabytes", type=int, default=256, help="of pages in each measurement")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=64, help="of a page, whose records lie beside it; 0: none do")
    parser.add_argument("--sizes", type=int, nargs="*", help="of a page, in KiB")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="leave SGLang's mock client out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        compare_checksums(options.repetitions)
        headings = ("page", "", "threads raw", "checked", "raw, GB/s", "checked, GB/s", "mock, GB/s")
        headings += ("share of raw", "bound", "met", "ns/KiB")
        print(f"\n| {' | '.join(headings)} |\n{'|---' * len(headings)}|")
        held = True
        for size in [size * KIB for size in options.sizes] if options.sizes else SIZES:
            for arm in ARMS:
                held &= compare(folder, size, options, arm)
        held &= measure_scan(folder)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
