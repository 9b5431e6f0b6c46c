"""The Triton kernels run here twice: interpreted on CPU tensors (``TRITON_INTERPRET=1``) and, with ``-m gpu``, on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from kvcanary_plugin.kernels.backend import Backend, load_triton

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
