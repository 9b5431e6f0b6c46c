"""Every KV pool class of the supported SGLang releases: what is covered of it, or why it is not.

The adapters decide by what a pool is made of; this says in advance what they decide. ``docs/coverage.md`` is written
from it, and tests hold it against the classes and the real pools of the installed SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One pool class.

    Attributes:
        pool: its name.
        since, until: the first and the last supported SGLang release that has it, post-releases of the last included;
            ``until`` is None if the newest has it.
        halves: what is read of every layer, by space; empty where nothing is.
        tested: on which releases every byte of the real pool is flipped, or what is tested instead.
        limits: what is not covered of it, in words.
        refused: why it is not covered at all; empty if it is.
        part_of: pools that it only occurs in; it is covered as a part of them.
    """

    pool: str
    since: str
    until: str | None = None
    halves: tuple[tuple[str, tuple[str, ...]], ...] = ()
    tested: str = "0.5.15, 0.5.23"
    limits: str = ""
    refused: str = ""
    part_of: tuple[str, ...] = ()


_KV = (("full", ("K", "V")),)
_LATENT = (("full", ("KV",)),)
_INDEXED = (("full", ("KV", "index", "index scale")),)
_HISPARSE = (
    "a slot is kept wherever a table of device slots says, and moves to host memory and back while its request runs; "
    "start without `--enable-hisparse`"
)
_GATHERED = (
    "each rank keeps every n-th page; attention reads a copy gathered from the other ranks; start without "
    "`--enable-kv-cache-sharding`"
)
_SHARED = (
    "slots are virtual, and their pages are given to other slots and moved while the forward still runs whose checks "
    "would fold them; start without `--enable-unified-memory`"
)
_DRAFT = (
    "the draft model's part of the pages of unified memory, which is refused with it; start without "
    "`--enable-unified-memory`"
)

CATALOGUE = (
    Entry(
        "MHATokenToKVPool",
        "0.5.11",
        halves=_KV,
        limits="nothing, at a price: V in layout vectorized_5d (ROCm) and native NVFP4 scales of V lie value by value, "
        "and each value of a slot is folded for itself; what that costs was not measured",
    ),
    Entry("MHATokenToKVPoolFP4", "0.5.11", halves=(("full", ("K", "V", "K scale", "V scale")),)),
    Entry(
        "MHATokenToKVPoolMXFP8",
        "0.5.16",
        halves=(("full", ("K", "V", "K scale", "V scale")),),
        tested="0.5.23",
    ),
    Entry(
        "PageMajorMHATokenToKVPool",
        "0.5.15",
        halves=_KV,
        tested="0.5.15",
        limits="SGLang itself refuses to build it since 0.5.19",
    ),
    Entry(
        "NoOpMHATokenToKVPool",
        "0.5.12",
        tested="that it is known",
        limits="stores nothing, so that only the chain of tokens is checked",
    ),
    Entry("MLATokenToKVPool", "0.5.11", halves=_LATENT),
    Entry("MLATokenToKVPoolFP4", "0.5.11", halves=(("full", ("KV", "KV scale")),)),
    Entry("NSATokenToKVPool", "0.5.11", "0.5.12", halves=_INDEXED, tested="under its later name"),
    Entry(
        "DSATokenToKVPool",
        "0.5.13",
        halves=_INDEXED,
        limits="refused with pooled index keys, and with pages on ROCm, where the keys of 16 slots are shuffled",
    ),
    Entry("SWAKVPool", "0.5.11", halves=(("full", ("K", "V")), ("window", ("K", "V")))),
    Entry(
        "HybridLinearKVPool",
        "0.5.11",
        halves=(("full", ("K", "V")), ("state", ("SSM", "conv 0"))),
        limits="a state that only the prefix cache holds is not checked; an int8 checkpoint pool is refused",
    ),
    Entry(
        "QSATokenToKVPool",
        "0.5.20",
        halves=(
            ("full", ("K", "V")),
            ("groups", ("index",)),
            ("ring", ("raw key", "coordinates")),
            ("state", ("SSM", "conv 0")),
        ),
        tested="0.5.23",
        limits="as of `HybridLinearKVPool`; the coordinates that all layers share are reported as the first one's",
    ),
    Entry("MHATokenToKOnlyPool", "0.5.15", part_of=("MiniMaxSparseKVPool",)),
    Entry("MiniMaxSparseKVPool", "0.5.15", halves=(("full", ("K", "V", "index K", "index V")),)),
    Entry(
        "MiniMaxM3Nvfp4KVPool",
        "0.5.23",
        halves=(("full", ("K", "K scale", "V", "V scale", "index K", "index K scale")),),
        tested="0.5.23",
    ),
    Entry("MiniMaxM3Nvfp4MainKVPool", "0.5.23", part_of=("MiniMaxM3Nvfp4KVPool",)),
    Entry("MiniMaxM3Nvfp4IndexKPool", "0.5.23", part_of=("MiniMaxM3Nvfp4KVPool",)),
    Entry(
        "DeepSeekV4TokenToKVPool",
        "0.5.12",
        halves=(
            ("c128", ("KV", "KV scale")),
            ("c4", ("KV", "KV scale", "index", "index scale")),
            ("sums of 128", ("sums",)),
            ("window", ("KV", "KV scale")),
        ),
        tested="0.5.15; on 0.5.23 its spaces",
        limits="sums of groups of 4 that are not full yet are not checked: every token rewrites them in place, in "
        "slots of the window; those of 128 are, because only forwards of their request change them (SGLang resets "
        "them from outside for disaggregation and speculative decoding alone, which are refused with this pool). "
        "Refused where the window is a ring of each request, with entries of 1 or 2 positions, and with the V4.1 "
        "layouts",
    ),
    Entry("DeepSeekV4SingleKVPool", "0.5.12", part_of=("DeepSeekV4TokenToKVPool",)),
    Entry("DeepSeekV4UniformFP8KVPool", "0.5.20", part_of=("DeepSeekV4TokenToKVPool",)),
    Entry("DeepSeekV4IndexerPool", "0.5.12", part_of=("DeepSeekV4TokenToKVPool",)),
    Entry("UnifiedMHATokenToKVPool", "0.5.15", refused=_SHARED),
    Entry("UnifiedMLATokenToKVPool", "0.5.17", refused=_SHARED),
    Entry("UnifiedHybridLinearKVPool", "0.5.18", refused=_SHARED),
    Entry("UnifiedSWAKVPool", "0.5.15", refused=_SHARED),
    Entry("UnifiedDraftKVPool", "0.5.22", refused=_DRAFT),
    Entry("UnifiedDraftSWAKVPool", "0.5.23", refused=_DRAFT),
    Entry("HiSparseNSATokenToKVPool", "0.5.11", "0.5.12", refused=_HISPARSE),
    Entry("HiSparseDSATokenToKVPool", "0.5.13", refused=_HISPARSE),
    Entry("HiSparseC4DevicePool", "0.5.12", refused=_HISPARSE),
    Entry("HiSparseMHAMainPool", "0.5.21", refused=_HISPARSE),
    Entry(
        "LayerSplitDSATokenToKVPool",
        "0.5.16",
        refused="each rank keeps some of the layers; attention reads the others from a copy sent by their owner; start "
        "without `--enable-dsa-cache-layer-split`",
    ),
    Entry("PageInterleaveMHATokenToKVPool", "0.5.21", refused=_GATHERED),
    Entry("PageInterleaveMLATokenToKVPool", "0.5.21", refused=_GATHERED),
    Entry("PageInterleaveDSATokenToKVPool", "0.5.22", refused=_GATHERED),
)

COVERED_POOLS = tuple(entry.pool for entry in CATALOGUE if not entry.refused and not entry.part_of)
