"""Time the kernels on this machine's GPU beside its own copy bandwidth. Equality with the reference is checked first.

Prints markdown tables, and where SGLang can be imported one more with its own in-tree kernels beside ours.
Usage: ``python benchmarks/kernels/run.py``.
"""

from __future__ import annotations

import datetime
import platform

import torch
import triton
from cases import DEVICE, TRITON, Row, bench_folds, bench_gather, bench_verify, bench_write, check, measure
from compare import print_comparison
from host_step import DecodeLoop
from timing import Clock

from kvcanary_plugin.kernels.violations import ViolationBuffer

NEEDED_SHARE = 0.95


def measure_copy() -> float:
    """Bytes read plus bytes written a second of a large copy on the device, the best of several."""
    source = torch.randint(-(2**62), 2**62, (1 << 28,), device=DEVICE)
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), warmup=20, rep=150, return_mode="median")
    return 2 * source.numel() * 8 / milliseconds * 1000


def print_table(rows: list[Row], copy: float) -> None:
    print("| work | in a stream, us | in a graph, us | goal | met | TB/s | share of copy | bound by |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        rate = row.moved / row.stream * 1e6
        share = rate / copy
        if row.goal is None:
            goal, met = f"{NEEDED_SHARE:.0%} of copy", "yes" if share >= NEEDED_SHARE else "no"
        elif row.goal < 0:
            goal, met = "", ""
        else:
            goal, met = f"{row.goal:g}", "yes" if row.stream <= row.goal else "no"
        bytes_columns = f"{rate / 1e12:.2f} | {share:.0%}" if row.moved else " | "
        print(f"| {row.work} | {row.stream:.1f} | {row.graph:.1f} | {goal} | {met} | {bytes_columns} | {row.bound} |")


def print_host_steps() -> None:
    columns = []
    for captured in (False, True):
        loop = DecodeLoop(64, 1024, DEVICE, captured=captured)
        columns.append(loop.run())
        check(loop.violations == 0, "decode steps")
    print("\nHost time of a decode step of 64 requests x 1024 positions, median microseconds:\n")
    print("| part | launched one by one | in device graphs |\n|---|---|---|")
    for part in columns[0]:
        print(f"| {part} | {columns[0][part]:.1f} | {columns[1][part]:.1f} |")


def main() -> None:
    clock = Clock(DEVICE)
    copy = measure_copy()
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}, ", end=""
    )
    print(f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}; copy {copy / 1e12:.2f} TB/s, read plus written\n")
    nothing = ViolationBuffer(8, DEVICE)
    lengths = torch.full((2, 64), 1024, device=DEVICE)
    offsets = torch.zeros((2, 65), dtype=torch.int64, device=DEVICE)
    rows = [
        measure(clock, "nothing: one 8-byte memset", nothing.reset, -1, "launch"),
        measure(
            clock,
            "plan, 64 requests",
            lambda: TRITON.plan_offsets(*lengths, verify_offsets=offsets[0], write_offsets=offsets[1]),
            -1,
            "launch",
        ),
        bench_write(clock, [8192], "write, 1 x 8192 tokens", 15, "sums of earlier tokens"),
        bench_write(clock, [1] * 64, "write, 64 x 1", 5, "launch"),
        bench_write(clock, [1] * 4096, "write, 4096 x 1", -1, "latency"),
        bench_write(clock, [100_000], "write, 1 x 100,000", -1, "sums of earlier tokens"),
        bench_verify(clock, [8192] * 64, "verify, 64 x 8192, L2 flushed"),
        bench_verify(clock, [2048] * 256, "verify, 256 x 2048, L2 flushed"),
        bench_gather(clock, 64 * 8192, "bare gather of 64 x 8192 records, L2 flushed"),
        *bench_folds(clock),
    ]
    print_table(rows, copy)
    print_host_steps()
    print_comparison(clock)


if __name__ == "__main__":
    main()
