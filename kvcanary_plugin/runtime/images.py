"""Images in a prompt: their full digest takes the place of the placeholder tokens that SGLang makes of it.

A placeholder has 30 bits, is the same at every position of its image, and models clamp it. The chain therefore takes,
at position k of an image, 31 bits of a hash of the whole digest and k. Two requests still share what stands before an
image, because nothing before it depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from ..kernels.mixing import mix_array

TOKEN_BITS = 31
Marks = tuple[list[int], list[int]]  # places within the new tokens of a batch, and the tokens that stand there
NO_MARKS: Marks = ([], [])


def list_spans(request: Any) -> Iterator[tuple[int, int, int]]:
    """Start, end and 64-bit digest of every image, video or audio of a request, in positions of its prompt."""
    inputs = getattr(request, "multimodal_inputs", None)
    for item in inputs.mm_items if inputs is not None else ():
        if item.hash is None:
            continue
        digest = xxhash.xxh3_64_intdigest(str(item.hash).encode())
        for first, last in item.offsets or ():
            yield int(first), int(last) + 1, digest


def make_tokens(digest: int, start: int, stop: int) -> list[int]:
    """Tokens that stand for places ``start`` .. ``stop - 1`` within an image."""
    words = np.uint64(digest) + np.arange(start, stop, dtype=np.uint64)
    tokens: list[int] = (mix_array(words) >> np.uint64(64 - TOKEN_BITS)).tolist()
    return tokens


def list_marks(request: Any, start: int, stop: int) -> list[tuple[int, list[int]]]:
    """What takes the place of placeholders at positions ``start`` .. ``stop - 1``: (position, tokens) of each piece."""
    marks = []
    for first, last, digest in list_spans(request):
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            marks.append((begin, make_tokens(digest, begin - first, end - first)))
    return marks


def locate_marks(requests: Sequence[Any], prefix_lens: Sequence[int], write_lens: Sequence[int]) -> Marks:
    """Places within the new tokens of a batch that belong to images, and the tokens that stand for them."""
    places: list[int] = []
    tokens: list[int] = []
    offset = 0
    for request, prefix, written in zip(requests, prefix_lens, write_lens, strict=True):
        if prefix >= len(request.origin_input_ids):  # images are part of the prompt
            offset += written
            continue
        for position, marked in list_marks(request, prefix, prefix + written):
            begin = offset + position - prefix
            places += range(begin, begin + len(marked))
            tokens += marked
        offset += written
    return places, tokens
