from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from packaging.version import Version

from kvcanary_plugin.versions import installed_sglang


@pytest.fixture(autouse=True)
def _single_rank() -> Iterator[None]:
    """Says what a server would have said before it makes its pools."""
    context = nullcontext()
    if Version(installed_sglang()) >= Version("0.5.20"):
        from sglang.srt.runtime_context import get_parallel

        context = get_parallel().override(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0)
    with context:
        yield


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """SGLang compiles its FP4 quantisation, which takes longer than all of these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield
