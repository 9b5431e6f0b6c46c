"""The modes of a GPU server that are soaked: arguments for SGLang, the load, and the faults that each has to find."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapes import Work
from soak_shapes import GPT_OSS_LAYERS

STAND_IN = Path(__file__).with_name("stand_in")
# Found by every check in turn; none is of the kind whose consequences go on for long.
BASE = (
    *("flip_running", "flip_cached", "overwrite_slot", "swap_entries", "foreign_entry"),
    *("free_running", "free_twice", "alloc_taken", "skip_store", "other_salt"),
)
SPECULATION = ("flip_running", "leave_rejected", "move_wrong_draft", "skip_draft_store")
# Which page comes back is up to the load, so there are several of each, and one that comes back will do. The first one
# needs a host pool that is not full.
ON_HOST = (*("flip_host",) * 6, *("swap_host_pages",) * 4)
HOST = ("early_backup", "flip_running", *ON_HOST, "skip_layer_wait")
FINAL_NORM = "model.norm.weight"
INTERPRETED = {"TRITON_INTERPRET": "1"}


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run a server.

    Attributes:
        about: for the list.
        model: of ``soak_shapes``; on a CPU it is the tiny Llama.
        arguments: for SGLang's engine.
        environment: variables for it.
        faults: that are injected, in this order.
        pool_tokens: slots on a GPU, and on a CPU.
        draft: model of ``soak_shapes`` that proposes tokens.
        returns: rounds after which the same prompts come again; 0 for never.
        gives_back: the memory of the KV is given back and taken again in between.
        norm: a weight of one dimension, the hidden size, for updates.
        on_cpu: a CPU can do this; with these variables.
    """

    about: str
    model: str = "llama"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = BASE
    pool_tokens: tuple[int, int] = (65536, 8192)
    draft: str | None = None
    returns: int = 0
    gives_back: bool = False
    norm: str = FINAL_NORM
    on_cpu: Mapping[str, str] | None = None


def _speculate(about: str, algorithm: str, draft: str | None, **more: Any) -> Mode:
    arguments = {"speculative_algorithm": algorithm, "max_running_requests": 32, **more}
    return Mode(about, arguments=arguments, faults=SPECULATION, draft=draft)


def _hierarchy(about: str, page_size: int, io_backend: str, layout: str, policy: str, faults: tuple[str, ...]) -> Mode:
    arguments = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 6.0,
        "hicache_io_backend": io_backend,
        "hicache_mem_layout": layout,
        "hicache_write_policy": policy,
        "page_size": page_size,
    }
    # Four rounds are more than the device has room for, and less than the host has.
    return Mode(about, arguments=arguments, faults=faults, pool_tokens=(8192, 900), returns=4)


def has_memory_saver() -> bool:
    """Whether memory can really be given back; without it SGLang keeps the memory, and all else happens."""
    return importlib.util.find_spec("torch_memory_saver") is not None


TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}

MODES: dict[str, Mode] = {
    "page1": Mode("pages of 1, overlap", on_cpu={}),
    "page16": Mode("pages of 16", arguments={"page_size": 16}, on_cpu=INTERPRETED),
    "page64": Mode("pages of 64, no overlap", arguments={"page_size": 64, "disable_overlap_schedule": True}),
    "no-overlap": Mode("overlap scheduling off", arguments={"disable_overlap_schedule": True}, on_cpu={}),
    "chunks": Mode(
        "chunks of 64, mixed with decode", arguments={"chunked_prefill_size": 64, "enable_mixed_chunk": True}, on_cpu={}
    ),
    "fp8": Mode("KV in fp8_e5m2", arguments={"kv_cache_dtype": "fp8_e5m2"}),
    "retract": Mode(
        "small pool with retraction",
        arguments={"schedule_conservativeness": 0.05, "chunked_prefill_size": 128},
        pool_tokens=(4096, 900),
        on_cpu={},
    ),
    "memory": Mode("memory given back and taken again", gives_back=True),
    "breakable": Mode("breakable prefill graphs", arguments={"cuda_graph_backend_prefill": "breakable"}),
    "piecewise": Mode("piecewise prefill graphs", arguments={"cuda_graph_backend_prefill": "tc_piecewise"}),
    "compile": Mode("torch.compile", arguments={"enable_torch_compile": True, "torch_compile_max_bs": 8}),
    "host": _hierarchy("host memory, kernel, page first", 64, "kernel", "page_first", "write_through", HOST),
    "host-direct": _hierarchy(
        "host memory, direct, layer first, written back",
        *(1, "direct", "layer_first", "write_back"),
        ("flip_running", *ON_HOST),
    ),
    "ngram": _speculate("NGRAM", "NGRAM", None, speculative_num_draft_tokens=8),
    "standalone": _speculate("STANDALONE, draft equal to the target, trees", "STANDALONE", "llama", **TREE),
    "eagle": _speculate("EAGLE, draft of random weights, trees", "EAGLE", "eagle", **TREE),
    "eagle-chain": _speculate("EAGLE, no trees", "EAGLE", "eagle", **CHAIN),
    "mla": Mode(
        "MLA, DeepSeek-V2 shape",
        "mla",
        environment={"PYTHONPATH": str(STAND_IN)},
        faults=("flip_running", "flip_cached", "overwrite_slot", "swap_entries", "free_running", "skip_store"),
    ),
    "swa": Mode(
        f"full and window pools, GPT-OSS shape of {GPT_OSS_LAYERS} layers",
        "swa",
        {"moe_runner_backend": "triton"},
        faults=("flip_running", "free_in_window", "overwrite_slot"),
    ),
    "hybrid": Mode(
        "full pool and state, Falcon-H1 shape",
        "hybrid",
        # SGLang would give the states half of the memory that is free.
        {"max_mamba_cache_size": 256, "max_running_requests": 32},
        faults=("flip_running", "drop_state"),
        norm="model.final_layernorm.weight",
    ),
}
GROUPS = {
    "plain": ("page1", "page16", "page64", "no-overlap", "chunks", "fp8", "retract", "memory"),
    "special": ("breakable", "compile", "host", "ngram", "standalone", "eagle", "mla", "swa", "hybrid"),
    "all": tuple(MODES),
}
LOADS = {"cuda": Work(24, 200, 120), "cpu": Work(4, 40, 24)}


def expand_modes(text: str, device: str) -> list[str]:
    """The modes that a comma-separated list names, groups included, each once.

    Raises:
        ValueError: there is no such mode, or this device cannot do one that is named itself.
    """
    chosen: list[str] = []
    for name in text.split(","):
        if name not in MODES and name not in GROUPS:
            raise ValueError(f"no mode {name!r}; there are {', '.join((*GROUPS, *MODES))}")
        if name in MODES and device == "cpu" and MODES[name].on_cpu is None:
            raise ValueError(f"mode {name} needs a GPU")
        members = [each for each in GROUPS.get(name, (name,)) if device != "cpu" or MODES[each].on_cpu is not None]
        chosen += [each for each in members if each not in chosen]
    return chosen


def render_list() -> list[str]:
    """A line for each mode."""
    rows = [
        f"{name:12} {mode.about}{'' if mode.on_cpu is None else ' (a CPU can do it)'}" for name, mode in MODES.items()
    ]
    return rows + [f"{name:12} = {','.join(members)}" for name, members in GROUPS.items()]
