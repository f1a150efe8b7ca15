"""Text generation as a library and over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.serving.generation_service import run_service
    from megatron.serving.generation_setup import Checkpoint, ModelRequest, load_engine, open_checkpoint
    from megatron.serving.job_queue import GenerationFailed, Job, JobQueue, QueueFull, ServiceEnding
    from megatron.serving.put_client import PutClient, server_address
    from megatron.serving.text_generation_server import ApiTranslator, GenerationServer, PutApi

__getattr__ = lazy_exports(
    __name__,
    {
        "generation_service": "run_service",
        "generation_setup": "Checkpoint ModelRequest load_engine open_checkpoint",
        "job_queue": "GenerationFailed Job JobQueue QueueFull ServiceEnding",
        "put_client": "PutClient server_address",
        "text_generation_server": "ApiTranslator GenerationServer PutApi",
    },
)
