"""KV that was made for something else. For one forward, the records of a prefix say that another one made it, which is
what they say when a cache whose keys leave out a field gives a request the prefix of another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..kernels import record as r
from ..kernels.mixing import as_int64, mix
from ..runtime.identity import Identities
from ..runtime.images import list_spans, make_tokens
from .library import Fault, Injected, pick_request

if TYPE_CHECKING:
    from ..runtime.guard import Guard
    from ..runtime.step import Step

OTHER = "drill"  # what the field is in the records


def other_adapter(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Make the prefix of a running request look as if it was made with another LoRA adapter, for one forward."""
    return _replace(guard, step, rng, lambda identities, request: identities.anchor_of(_like(request, lora_id=OTHER)))


def other_salt(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """The same for another cache salt."""
    return _replace(
        guard, step, rng, lambda identities, request: identities.anchor_of(_like(request, cache_salt=OTHER))
    )


def other_weights(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """The same for another version of the weights."""

    def anchor_of(identities: Identities, request: Any) -> int:
        kept = identities.weights
        identities.replace_weights(OTHER)
        try:
            return identities.anchor_of(_like(request))
        finally:
            identities.replace_weights(kept)

    return _replace(guard, step, rng, anchor_of)


def other_dtype(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """The same for another dtype."""
    return _replace(guard, step, rng, lambda identities, request: _made_for(identities, request, "dtype"))


def other_scales(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """The same for other K and V scales, as if they had changed between the store and the read."""
    return _replace(guard, step, rng, lambda identities, request: _made_for(identities, request, "scales"))


def other_image(guard: Guard, step: Step, rng: random.Random, _: dict[str, str]) -> Injected | None:
    """Let an image in a prefix be another one with the same placeholder, as if its digest had been cut short."""
    found = [
        (index, span)
        for index, (request, length) in enumerate(zip(step.requests, step.prefix_lens, strict=True))
        for span in list_spans(request)
        if span[1] <= length
    ]
    if not found:
        return None
    index, (start, stop, digest) = rng.choice(found)
    slots = guard.pool.req_to_token[step.rows[index], start : step.prefix_lens[index]].long()
    hot = guard.records.hot
    kept = hot[slots]
    # Its low bits are the ones that a placeholder is made of.
    tokens = torch.tensor(make_tokens(digest ^ (1 << 63), 0, stop - start), device=hot.device)
    words = kept[:, r.IDENTITY].clone()
    words[: stop - start] = words[: stop - start] & ~r.TOKEN_MASK | tokens
    shifts = mix(words & r.MIX_INPUT_MASK) - mix(kept[:, r.IDENTITY] & r.MIX_INPUT_MASK)
    hot[slots, r.IDENTITY] = words
    hot[slots, r.CHAIN] = kept[:, r.CHAIN] + shifts.cumsum(0)

    def restore() -> None:
        hot[slots, r.IDENTITY] = kept[:, r.IDENTITY]
        hot[slots, r.CHAIN] = kept[:, r.CHAIN]

    fields = {"request": step.requests[index].rid, "image": [start, stop]}
    return Injected("chain", (int(slots[0]),), (start,), fields, restore)


IDENTITY_FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (other_adapter, other_salt, other_weights, other_dtype, other_scales, other_image)
}


def _like(request: Any, **different: str) -> Any:
    fields = {name: getattr(request, name, None) for name in ("extra_key", "lora_id", "cache_salt")}
    return SimpleNamespace(**fields | different)


def _made_for(identities: Identities, request: Any, tag: str) -> int:
    """The anchor of ``request`` in a server one field of whose fingerprint differs. It is remembered, to be named."""
    kept, weights = identities._fingerprint, identities.weights
    identities._fingerprint = tuple((name, OTHER if name == tag else value) for name, value in kept)
    identities.replace_weights(weights)  # forgets the anchors at hand, and not what they stand for
    try:
        return identities.anchor_of(_like(request))
    finally:
        identities._fingerprint = kept
        identities.replace_weights(weights)


def _replace(
    guard: Guard, step: Step, rng: random.Random, anchor_of: Callable[[Identities, Any], int]
) -> Injected | None:
    """Let the records of a prefix continue another anchor."""
    index = pick_request(step, rng, at_least=1)
    if index is None:
        return None
    request, truth = step.requests[index], guard.truth
    shift = as_int64(anchor_of(truth.identities, request) - truth.anchor_of(request))
    slots = guard.pool.req_to_token[step.rows[index], : step.prefix_lens[index]].long()
    chains = guard.records.hot[:, r.CHAIN]
    chains[slots] += shift

    def restore() -> None:
        chains[slots] -= shift

    return Injected("identity", (int(slots[0]),), (0,), {"request": request.rid}, restore)
