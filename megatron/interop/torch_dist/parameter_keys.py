"""The keys that tensors have in this format, and the native names that they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.interop.megatron_torch.key_names import fused_key, local_key

_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[a-z0-9_]+?)\.(?P<key>(?:embedding|decoder|output_layer|mtp)\..+)"
)
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
_GATED_HALF = re.compile(r"(.+\.mlp\..*linear_fc1\.(?:weight|bias))_([wv])")
_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.experts\.(?:(\d+)\.)?(linear_fc[12]\..+)")
"""The experts of a layer: along the axis behind that of the layers, or with a tensor each."""
_MAIN_PARAMS = ("param", "fp32_param")


@dataclass(frozen=True)
class ParameterKey:
    """Say what a stored tensor holds.

    ``kind`` is ``model``, or the kind of the optimizer's state. ``is_stacked`` marks a tensor whose first axis is the
    layer; ``key`` is then that of layer 0. ``half`` is 0 or 1 where the two halves of a gated layer have a tensor each,
    ``expert`` the number of an expert that has one.
    """

    kind: str
    key: str
    is_stacked: bool
    half: int | None = None
    expert: int | None = None

    def name(self, layer: int) -> str:
        """Return the native name of the tensor of one layer; the layer counts for a stacked tensor only."""
        key = self.key.replace("layers.0.", f"layers.{layer}.", 1) if self.is_stacked else self.key
        parameter = local_key(key)
        assert parameter is not None, key
        return f"model.{parameter}" if self.kind == "model" else f"optimizer.{self.kind}.{parameter}"


def parse_key(stored: str) -> ParameterKey | None:
    """Return what a stored tensor of this key holds; None where it is no parameter and no state of one.

    Raises:
        KeyError: no GPT has a parameter of this name.
    """
    state = _STATE.fullmatch(stored)
    kind, key = ("model", stored) if state is None else (state["kind"], state["key"])
    half = _GATED_HALF.fullmatch(key)
    stacked = _STACKED.fullmatch(key if half is None else half[1])
    plain = key if half is None else half[1]
    if stacked is not None:
        plain = f"decoder.layers.0.{stacked[1]}"
    experts = _EXPERTS.fullmatch(plain)
    if experts is not None:
        plain = f"{experts[1]}.{experts[3]}"
    if local_key(plain) is None:
        return None
    return ParameterKey(
        "main_param" if kind in _MAIN_PARAMS else kind,
        plain,
        stacked is not None,
        None if half is None else "wv".index(half[2]),
        None if experts is None or experts[2] is None else int(experts[2]),
    )


def stored_key(
    name: str, *, has_experts: bool = False, is_latent: bool = False, stacks: bool = True
) -> tuple[str, int | None]:
    """Return the key under which Megatron stores a parameter, and its layer where layers are stacked in one tensor.

    ``has_experts`` and ``is_latent`` say what the parameter's layer has; ``stacks`` that layers are alike, and so
    are stacked. Norms have the names of transformer-engine's layers, whichever layers a run has.
    """
    key = name.replace(".mlp.experts.", ".mlp.experts.experts.")
    # A router has no norm in it.
    if not (has_experts and ".pre_mlp_layernorm." in key):
        key = fused_key(key, is_latent)
    words = key.split(".")
    if words[:2] != ["decoder", "layers"] or not stacks:
        return key, None
    return ".".join([*words[:2], *words[3:]]), int(words[2])
