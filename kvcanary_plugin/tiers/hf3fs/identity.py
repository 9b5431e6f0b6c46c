"""What a stored page is a page *of*: the fields that must be equal before its bytes may be used; and its key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from .geometry import Geometry

_POOL_FIELDS = (
    *("layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_lora_rank"),
    *("qk_rope_head_dim", "kv_cache_dim", "index_head_dim", "item_bytes", "state_page_bytes", "num_mamba_layers"),
)
_SERVER_FIELDS = (
    *("model_path", "revision", "weight_version", "kv_cache_dtype", "quantization", "quantization_param_path"),
    *("rope_scaling", "json_model_override_args", "load_format"),
)


def describe_identity(config: Any, pool: Any, pool_name: str, order: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Every field that tells the pages of one host pool of one rank from all others.

    Args:
        config: SGLang's ``HiCacheStorageConfig``.
        pool: the host pool; of a group, its anchor.
        pool_name: ``kv`` or the name of a side pool.
        order: of the bytes, see :class:`~kvcanary_plugin.tiers.host_pages.HostPages`.
        extra: what the operator adds.

    An MLA model keeps the same bytes on all tensor-parallel ranks, so its pages carry no rank of that kind.
    """
    anchor = getattr(pool, "anchor_entry", None)
    pool = pool if anchor is None else anchor.host_pool
    fields = {
        "model": str(config.model_name),
        "pool": pool_name,
        "class": type(pool).__name__,
        "dtype": str(pool.dtype),
        "layout": str(pool.layout),
        "order": order,
        "page_tokens": str(pool.page_size),
        "tp": "replicated" if config.is_mla_model else f"{config.tp_rank}/{config.tp_size}",
        "pp": f"{config.pp_rank}/{config.pp_size}",
        "attn_cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        "format": str(getattr(pool, "storage_format_tag", None)),
    }
    fields |= {name: str(getattr(pool, name)) for name in _POOL_FIELDS if getattr(pool, name, None) is not None}
    fields |= {f"server.{name}": value for name, value in _describe_server().items()}
    return fields | {f"extra.{name}": str(value) for name, value in extra.items()}


def _describe_server() -> dict[str, str]:
    """Settings of the server that change what KV of the same tokens looks like, as far as they can be had."""
    try:
        from sglang.srt.server_args import get_global_server_args

        arguments = get_global_server_args()
    except (ImportError, ValueError, AttributeError, LookupError, RuntimeError):
        return {}
    found = {name: getattr(arguments, name, None) for name in _SERVER_FIELDS}
    return {name: str(value) for name, value in found.items() if value is not None}


def make_geometry(fields: dict[str, str], payload_bytes: int, records_bytes: int = 0) -> Geometry:
    """The geometry of a page file for that identity. Long values are replaced by their hash, so that they fit."""
    pairs = tuple((name, value if len(value) <= 96 else _shorten(value)) for name, value in sorted(fields.items()))
    return Geometry(pairs, payload_bytes, records_bytes)


def _shorten(value: str) -> str:
    return f"{value[:40]}...blake2b:{hashlib.blake2b(value.encode(), digest_size=16).hexdigest()}"


def make_page_key(geometry_digest: bytes, scope: str, page_key: str) -> bytes:
    """16 bytes that name a page among all models, ranks, pools, adapters and tenants.

    Cryptographic, because ``scope`` holds strings that clients choose. The parts are framed by their length, so that
    no two different triples give the same input.
    """
    digest = hashlib.blake2b(geometry_digest, digest_size=16)
    for part in (scope.encode(), page_key.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
