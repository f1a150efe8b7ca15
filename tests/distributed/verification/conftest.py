"""What the tests of layouts share: processes that compute, held against one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pretrain_gpt
from megatron.verification.verifier import Verifier
from megatron.verification.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    """Return a verifier with processes of its own, as many as the largest layouts of these files have ranks."""
    with WorkerPool(8, timeout_s=120) as pool:
        yield Verifier(pool, pretrain_gpt.provide_model, pretrain_gpt.forward_step)
