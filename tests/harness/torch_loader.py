"""What torch.distributed.checkpoint itself reads from a folder of Megatron's torch_dist format."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from megatron.checkpoint.formats.megatron.torch_dist_source import TorchDistSource

UNREAD = -7


def read_with_torch(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder."""
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    values = {
        key: torch.full(entry.size, UNREAD, dtype=entry.properties.dtype)
        for key, entry in described.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(values, checkpoint_id=folder, no_dist=True)
    return values


def assert_torch_reads(folder: Path, state_names: dict[str, str] | None = None) -> None:
    """Assert that torch reads what a source reads of every parameter, and zeros where the vocabulary is padded.

    ``state_names`` are those that kinds of optimizer state have in the folder, where they differ from the native ones.
    """
    source = TorchDistSource(folder)
    values = read_with_torch(folder)
    for name in source.tensors:
        kind, parameter = "model", name.removeprefix("model.")
        if name.startswith("optimizer."):
            _, kind, parameter = name.split(".", 2)
        parameter = parameter.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        parameter = parameter.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        before, is_layer, after = parameter.partition("layers.")
        layer, _, rest = after.partition(".")
        key = before + (f"layers.{rest}" if is_layer else "")
        prefix = "" if kind == "model" else f"optimizer.state.{(state_names or {}).get(kind, kind)}."
        theirs = values[prefix + key]
        theirs = theirs[int(layer)] if is_layer else theirs
        ours = source.read(name)
        assert torch.equal(theirs[: ours.shape[0]], ours), name
        assert not theirs[ours.shape[0] :].any(), name
    source.close()
