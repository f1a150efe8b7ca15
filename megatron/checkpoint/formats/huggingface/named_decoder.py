"""Base of decoder architectures without rotary positions: a table of settings, and a table of module names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.checkpoint.formats.huggingface.decoder_layers import named_layer_links, norm_links
from megatron.checkpoint.formats.huggingface.family import TensorLink, dtype_fields, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.config_base import field_value, from_fields
from megatron.core.models.gpt import GPTConfig


@dataclass(frozen=True)
class SettingField:
    """Setting ``name`` that is the field ``field`` of a GPTConfig, both of the type of ``default``.

    ``alias`` is another name that configurations use for the setting.
    """

    name: str
    field: str
    default: int | float | bool
    alias: str | None = None

    def read(self, settings: Settings) -> int | float | bool:
        """Return the setting's value."""
        name = self.name if self.alias is None else settings.name_of(self.name, self.alias)
        if isinstance(self.default, bool):
            return settings.switch(name, self.default)
        if isinstance(self.default, int):
            return settings.integer(name, self.default)
        return settings.number(name, self.default)


_TIED = "tie_word_embeddings"


class NamedDecoderFamily:
    """Base of the architectures with a word embedding, decoder layers and a final norm.

    ``setting_fields`` are settings with a field of their own, ``fixed_fields`` the fields that no setting changes, and
    ``fixed_settings`` the settings that are always written. ``embeddings`` pairs our names of the modules of the
    embedding with the names in the files, and ``layer_names`` the names of a layer's modules (`named_layer_links`).
    """

    model_type: str
    architecture: str
    base_prefix = "transformer."
    other_names: tuple[tuple[str, str], ...] = ()
    is_tied_by_default = True
    setting_fields: tuple[SettingField, ...]
    fixed_fields: ClassVar[Mapping[str, Any]] = {}
    fixed_settings: ClassVar[Mapping[str, Any]] = {}
    embeddings: tuple[tuple[str, str], ...]
    layers: str
    layer_names: tuple[tuple[str, str], ...]
    final_norm: str

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration that the settings describe."""
        values = {each.field: each.read(settings) for each in self.setting_fields}
        width, heads = values["hidden_size"], values["num_attention_heads"]
        if width % heads:
            settings.refuse(f"hidden size {width} is not divisible by {heads} attention heads")
        return from_fields(
            GPTConfig,
            **values,
            **self.fixed_fields,
            **self.own_fields(settings),
            untie_embeddings_and_output_weights=not settings.switch(_TIED, self.is_tied_by_default),
            **dtype_fields(settings),
        )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields that no table determines; reject unsupported settings."""
        return {}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            _TIED: not config.untie_embeddings_and_output_weights,
            **{each.name: field_value(config, each.field) for each in self.setting_fields},
            **self.fixed_settings,
        }

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Yield every link, in the order of the tensors in their model."""
        width, prefix = config.hidden_size, self.base_prefix
        vocabulary = (config.vocab_size, width)
        rows = {"word_embeddings": vocabulary, "position_embeddings": (config.num_position_embeddings, width)}
        for native, foreign in self.embeddings:
            if native in rows:
                yield whole(f"model.embedding.{native}.weight", f"{prefix}{foreign}.weight", rows[native])
            else:
                yield from norm_links(config, f"model.embedding.{native}", f"{prefix}{foreign}")
        for layer in range(config.num_layers):
            ours, theirs = f"model.decoder.layers.{layer}.", f"{prefix}{self.layers}.{layer}."
            yield from named_layer_links(config, ours, theirs, self.layer_names)
        yield from norm_links(config, "model.decoder.final_layernorm", f"{prefix}{self.final_norm}")
        if config.untie_embeddings_and_output_weights:
            yield whole("model.output_layer.weight", "lm_head.weight", vocabulary)

    def is_buffer(self, name: str, config: GPTConfig) -> bool:
        return False
