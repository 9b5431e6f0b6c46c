"""The Triton kernels run twice: interpreted on CPU tensors (``TRITON_INTERPRET=1``) and, with ``-m gpu``, on a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from kvcanary_plugin.kernels.backend import Backend, load_triton

sys.path.insert(0, str(Path(__file__).parent))  # for kernel_cases

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("set TRITON_INTERPRET=1 to run the Triton kernels without a GPU")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a GPU and no TRITON_INTERPRET")
    return torch.device(request.param)


@pytest.fixture
def triton_backend(device: torch.device) -> Backend:
    return load_triton()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The interpreter turns one-element arrays into Python numbers in a way that numpy is about to forbid.
    ignored = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings(ignored))
