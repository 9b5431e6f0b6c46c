"""``docs/coverage.md``: which KV pools of which SGLang releases are covered, written from the adapters' catalogue."""

from __future__ import annotations

from collections.abc import Iterable

from .pool_patcher.adapters.allocators import COVERED_ALLOCATORS
from .pool_patcher.adapters.catalogue import CATALOGUE, Entry
from .pool_patcher.spaces import FOLLOWED

_HEAD = """# Coverage

Written by `scripts/coverage`; a test keeps it current.

A pool is known by its buffers, not by its class: a subclass with the same buffers is covered, and a pool that has a
buffer which no adapter reads is refused by the name of that buffer. What is not covered stops the server at its start,
unless `--kvcanary-allow-uncovered` is given.

A *space* is one numbering of slots. Every pool has a main one, whose slots `req_to_token` names; others hold a part of
what belongs to a slot (those within a sliding window, say), or the state of a request. A slot may stand for a group of
positions, as in *c4* and *c128* of DeepSeek V4 and *groups* of QSA: its record must be that of the last slot of its
group in the main space, and it is live while they are. Of every layer, a slot's bytes are read whole, scales included;
where K or V of a slot lies in pieces, as in the HND layout, all pieces are read.

*Tested* names the releases whose real pools are built small and on a CPU by `tests/pools`, which flips each byte and
wants exactly its slot, layer and half reported, stores through the pool's own setters and wants nothing else to change,
and flips the bytes that pad pages and wants silence. Some setters are kernels for a GPU and cannot run there. Rows of
DeepSeek V4 are stored by SGLang's plain twin of theirs. Layout vectorized_5d, native NVFP4 scales and the scales of
MXFP8 are stored by SGLang's kernels in Triton's interpreter; whose a word of the latter is, is what the pool's plain
reader says. Whose a byte of the index of DSA and DeepSeek V4 is, and where a page-major row lies, was written out by
hand, from the layout that SGLang documents; page-major rows are held against the pool's own move as well. That every
class of every release is listed here is tested against the published wheels.
"""

_IN_SERVERS = """
## In servers

What has run in a live server; everything else was tested on SGLang's own pools, allocators, trees and workers without
one. The H200 had SGLang 0.5.15 and models of random weights.
"""
_SERVERS = (
    (
        "CPU, 0.5.15 and 0.5.23, `tests/live`",
        "MHA; pages of 1 and 16, overlap on and off, chunks, mixed chunks, aborts, retraction, flush, weight updates, "
        "LoRA, memory given back",
        "every fault that such a server can have, at its place; nothing on the clean twin",
    ),
    ("CPU, every release, `make test-releases`", "MHA, pages of 16", "by hand, the faults that there were that day"),
    (
        "CPU, 0.5.15, over gloo",
        "two tensor-parallel ranks, two replicas, two pipeline stages: `docs/ranks.md`",
        "faults on one rank, found there alone; in mode quarantine both tensor-parallel ranks end the request",
    ),
    (
        "CPU, 0.5.15, by hand",
        "prefill and decode servers with mooncake over TCP: `docs/disaggregation.md`",
        "the tokens of one server, nothing reported; pages that are lost or exchanged are found",
    ),
    ("CPU, 0.5.15 and 0.5.23", "hierarchical cache, with a stand-in for SGLang's copy kernels", "`docs/hf3fs.md`"),
    (
        "H200",
        "MHA; pages of 1, 16, 64; fp8; full decode graphs, breakable and piecewise prefill graphs; overlap on and off",
        "`docs/performance.md`",
    ),
    (
        "H200",
        "full and window pools (GPT-OSS and Gemma 4 shapes)",
        "a flip and `free_in_window` found, nothing else reported, 888 requests",
    ),
    (
        "H200",
        "full pool and state (Falcon-H1 shape)",
        "a flip and `drop_state` found, nothing else reported, 792 requests",
    ),
    (
        "H200",
        "memory saver, KV given back and resumed three times",
        "the memory goes and comes; nothing reported, 2,592 requests",
    ),
    ("H200", "hierarchical cache, MHA", "`docs/hf3fs.md`"),
    ("H200", "NGRAM and STANDALONE", "`docs/speculation.md`"),
)
_NOT_IN_SERVERS = """
Not in a server on a GPU yet: MLA, sparse attention, QSA, DeepSeek V4, FP4, torch.compile, EAGLE, several GPUs, and
every release but 0.5.15.
"""


def render_coverage() -> str:
    """The page as Markdown."""
    covered = [entry for entry in CATALOGUE if not entry.refused and not entry.part_of]
    parts = [entry for entry in CATALOGUE if not entry.refused and entry.part_of]
    refused = [entry for entry in CATALOGUE if entry.refused]
    sections = [
        _HEAD,
        "## Covered\n",
        _table(("pool", "SGLang", "read of every layer", "tested", "not covered of it"), map(_row_of_covered, covered)),
        f"\n{_say_followed()}\n",
        "\n## Covered as a part of another pool\n",
        _table(
            ("pool", "SGLang", "part of", "not covered of it"),
            ((_code(e.pool), _releases(e), ", ".join(map(_code, e.part_of)), e.limits or "-") for e in parts),
        ),
        "\n## Refused\n",
        _table(("pool", "SGLang", "why"), ((_code(e.pool), _releases(e), e.refused) for e in refused)),
        "\nPools of other devices (NPU and platforms outside SGLang's tree) are covered where their buffers are those "
        "of a pool above, and refused otherwise.\n",
        _IN_SERVERS,
        _table(("where", "model, mode", "seen"), _SERVERS),
        _NOT_IN_SERVERS,
        "\n## Allocators\n",
        f"Followed: {', '.join(map(_code, COVERED_ALLOCATORS))}, their subclasses that inherit `free` and `clear`, and "
        "allocators that consist of them, such as `SWATokenToKVPoolAllocator`. An allocator with more slots than its "
        "pool is refused: somewhere on the way slots are translated.\n",
    ]
    return "\n".join(sections)


def _row_of_covered(entry: Entry) -> tuple[str, ...]:
    spaces = "; ".join(f"{space}: {', '.join(halves)}" for space, halves in entry.halves)
    return _code(entry.pool), _releases(entry), spaces or "nothing", entry.tested, entry.limits or "-"


def _say_followed() -> str:
    missing = [
        words
        for need, words in (
            ("mapping", "a space with a numbering of its own"),
            ("ratio", "a slot that stands for several positions"),
            ("window", "a main space whose slots are freed while their request runs"),
            ("state", "a state of the request"),
        )
        if need not in FOLLOWED
    ]
    if not missing:
        return "The guard follows all of these spaces."
    return f"Described but not followed by the guard yet, and therefore refused at the start: {', '.join(missing)}."


def _releases(entry: Entry) -> str:
    return f"{entry.since} to {entry.until}" if entry.until else f"from {entry.since}"


def _code(name: str) -> str:
    return f"`{name}`"


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [" | ".join(headings), " | ".join("---" for _ in headings), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    print(render_coverage(), end="")
