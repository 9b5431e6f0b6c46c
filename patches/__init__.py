"""Everything kvcanary touches in an SGLang server: one file per area, nothing wrapped anywhere else.

Each file declares :class:`~kvcanary_plugin.pool_patcher.patch.Patch` records. A wrapper translates a call into the
engine's terms and holds no logic. ``PatchSet`` installs the records and undoes them, from the same list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcanary_plugin.pool_patcher.patch import Patch

from . import (
    allocators,
    control,
    disaggregation,
    forward,
    hf3fs,
    hierarchical,
    idle,
    memory,
    moves,
    ownership,
    pools,
    quarantine,
    scheduler,
    server_args,
    speculation,
    weights,
)
from .fence import Fence

if TYPE_CHECKING:
    from kvcanary_plugin.runtime.session import Session


def declare_parser_patches() -> list[Patch]:
    """What is wrapped in every mode, ``off`` included: the argument parser."""
    return server_args.declare_patches()


def declare_engine_patches(session: Session) -> list[Patch]:
    """What is wrapped in addition when the mode is not ``off``."""
    fence = Fence()
    return [
        *pools.declare_patches(session),
        *(quarantine.declare_patches(session) if session.config.mode == "quarantine" else ()),
        *allocators.declare_patches(session),
        *ownership.declare_patches(session),
        *forward.declare_patches(session, fence),
        *scheduler.declare_patches(session, fence),
        *speculation.declare_patches(session),
        *hf3fs.declare_patches(session),
        *moves.declare_patches(session),
        *memory.declare_patches(session),
        *hierarchical.declare_patches(session),
        *disaggregation.declare_patches(session),
        *weights.declare_patches(session),
        *idle.declare_patches(session),
        *control.declare_patches(session),
    ]
