"""Import former module names, with a warning, for one release."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

_HUGGING_FACE = "megatron.checkpoint.formats.huggingface"
MOVED: Mapping[str, str] = {
    "megatron.core.datasets.blended_dataset_builder": "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.indexed.indexed_dataset": "megatron.core.datasets.indexed_dataset",
    "megatron.core.datasets.indexed.indexed_dataset_builder": "megatron.core.datasets.indexed_dataset",
    "megatron.core.datasets.samples.batch": "megatron.core.datasets.batch",
    "megatron.core.datasets.samples.gpt_dataset": "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.samples.gpt_dataset_config": "megatron.core.datasets.gpt_dataset_config",
    "megatron.core.distributed.ddp_config": "megatron.core.distributed.distributed_data_parallel_config",
    "megatron.core.flight.recorder": "megatron.core.flight_recorder",
    "megatron.core.inference.request": "megatron.core.inference.inference_request",
    "megatron.core.kernels.attention_pattern": "megatron.core.ops.attention_pattern",
    "megatron.core.kernels.dropout_keys": "megatron.core.ops.dropout",
    "megatron.core.models.data_parallel": "megatron.core.models.model",
    "megatron.core.pipeline_parallel.action": "megatron.core.pipeline_parallel.schedule_actions",
    "megatron.core.transformer.residual_norm": "megatron.core.transformer.norm",
    "megatron.interop.checkpoint_source": "megatron.checkpoint.checkpoint_source",
    "megatron.interop.huggingface.decoder_parts.rotary_decoder": f"{_HUGGING_FACE}.decoder_layers",
    "megatron.interop.huggingface.family": f"{_HUGGING_FACE}.family",
    "megatron.interop.huggingface.model_export": f"{_HUGGING_FACE}.model_export",
    "megatron.interop.huggingface.parallelize": f"{_HUGGING_FACE}.parallelize",
    "megatron.interop.huggingface.settings": f"{_HUGGING_FACE}.settings",
    "megatron.interop.huggingface.source": f"{_HUGGING_FACE}.source",
    "megatron.interop.open_checkpoint": "megatron.checkpoint.stored_checkpoint",
    "megatron.interop.source_view": "megatron.checkpoint.checkpoint_source",
    "megatron.training.config.arguments": "megatron.config.arguments megatron.training.exit_reason",
    "megatron.training.config.run_config": "megatron.config.run_config",
    "megatron.training.data.batch_source": "megatron.training.batch_source",
    "megatron.training.data.data_plan": "megatron.training.data_plan",
    "megatron.training.process.initialize": "megatron.training.initialize",
    "megatron.training.process.preflight": "megatron.training.preflight",
    "megatron.training.process.process_exit": "megatron.training.exit_reason",
    "megatron.training.process.refusal": "megatron.training.exit_reason",
}
"""Current names, separated by spaces, of each former module."""
_FORMER_PACKAGES = {name.rsplit(".", count)[0] for name in MOVED for count in range(1, name.count("."))}


class _MovedModules:
    """Finder and loader of former module names. (No `importlib.abc.Loader`, whose import takes 15 ms.)"""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MOVED or fullname in _FORMER_PACKAGES:
            return ModuleSpec(fullname, cast("Loader", self), is_package=fullname not in MOVED)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Use Python's default module creation."""

    def exec_module(self, module: ModuleType) -> None:
        """Copy the contents of the current modules to the module with the former name."""
        if module.__name__ not in MOVED:
            return
        names = MOVED[module.__name__].split()
        warnings.warn(
            f"{module.__name__} has moved to {' and '.join(names)}; the old name will be removed", FutureWarning, 2
        )
        for name in reversed(names):
            present = vars(importlib.import_module(name))
            vars(module).update({key: value for key, value in present.items() if not key.startswith("__")})


def find_moved_modules() -> None:
    """Make former module names importable."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
