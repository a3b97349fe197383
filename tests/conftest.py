"""What tests share: the devices they run on."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA in the tests marked gpu."""
    return torch.device(request.param)
