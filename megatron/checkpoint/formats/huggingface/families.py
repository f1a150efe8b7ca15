"""List the supported model architectures, and select a model's architecture."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats.huggingface.apertus import ApertusFamily
from megatron.checkpoint.formats.huggingface.arcee import ArceeFamily
from megatron.checkpoint.formats.huggingface.bamba import BambaFamily
from megatron.checkpoint.formats.huggingface.bloom import BloomFamily
from megatron.checkpoint.formats.huggingface.cohere import Cohere2Family, CohereFamily
from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.deepseek_v2 import DeepseekV2Family
from megatron.checkpoint.formats.huggingface.deepseek_v3 import DeepseekV3Family
from megatron.checkpoint.formats.huggingface.deepseek_v32 import DeepseekV32Family
from megatron.checkpoint.formats.huggingface.dots1 import Dots1Family
from megatron.checkpoint.formats.huggingface.ernie4_5 import Ernie4_5Family, Ernie4_5MoeFamily
from megatron.checkpoint.formats.huggingface.exaone4 import Exaone4Family, ExaoneMoeFamily
from megatron.checkpoint.formats.huggingface.falcon import FalconFamily
from megatron.checkpoint.formats.huggingface.falcon_h1 import FalconH1Family
from megatron.checkpoint.formats.huggingface.family import Family, model_features
from megatron.checkpoint.formats.huggingface.gemma import Gemma2Family, Gemma3Family, GemmaFamily
from megatron.checkpoint.formats.huggingface.gemma4 import Gemma4Family
from megatron.checkpoint.formats.huggingface.glm4 import Glm4Family
from megatron.checkpoint.formats.huggingface.glm4_moe import Glm4MoeFamily, Glm4MoeLiteFamily, SolarOpenFamily
from megatron.checkpoint.formats.huggingface.glm_moe_dsa import GlmMoeDsaFamily
from megatron.checkpoint.formats.huggingface.gpt import GPT2Family, GPTNeoFamily, GPTNeoXFamily
from megatron.checkpoint.formats.huggingface.gpt_bigcode import GPTBigCodeFamily
from megatron.checkpoint.formats.huggingface.gpt_oss import GptOssFamily
from megatron.checkpoint.formats.huggingface.gptj import CodeGenFamily, GPTJFamily
from megatron.checkpoint.formats.huggingface.granite import GraniteFamily, GraniteMoeFamily
from megatron.checkpoint.formats.huggingface.granite_hybrid import GraniteMoeHybridFamily
from megatron.checkpoint.formats.huggingface.helium import HeliumFamily
from megatron.checkpoint.formats.huggingface.hunyuan import HunYuanDenseV1Family, HunYuanMoEV1Family
from megatron.checkpoint.formats.huggingface.kimi_linear import KimiLinearFamily
from megatron.checkpoint.formats.huggingface.llama import LlamaFamily
from megatron.checkpoint.formats.huggingface.minimax_m2 import MiniMaxM2Family
from megatron.checkpoint.formats.huggingface.mistral import (
    Ministral3Family,
    MinistralFamily,
    MistralFamily,
    MixtralFamily,
)
from megatron.checkpoint.formats.huggingface.mpt import MptFamily
from megatron.checkpoint.formats.huggingface.nanochat import NanoChatFamily
from megatron.checkpoint.formats.huggingface.nemotron import NemotronFamily
from megatron.checkpoint.formats.huggingface.nemotron_h import NemotronHFamily
from megatron.checkpoint.formats.huggingface.olmo import (
    FlexOlmoFamily,
    Olmo2Family,
    Olmo3Family,
    OlmoeFamily,
    OlmoFamily,
)
from megatron.checkpoint.formats.huggingface.opt import OptFamily
from megatron.checkpoint.formats.huggingface.persimmon import PersimmonFamily
from megatron.checkpoint.formats.huggingface.phi import PhiFamily
from megatron.checkpoint.formats.huggingface.phi3 import Phi3Family
from megatron.checkpoint.formats.huggingface.phimoe import PhimoeFamily
from megatron.checkpoint.formats.huggingface.qwen import Qwen2Family, Qwen2MoEFamily, Qwen3Family, Qwen3MoEFamily
from megatron.checkpoint.formats.huggingface.qwen3_5 import Qwen3_5Family, Qwen3_5MoEFamily
from megatron.checkpoint.formats.huggingface.qwen3_next import Qwen3NextFamily
from megatron.checkpoint.formats.huggingface.seed_oss import SeedOssFamily
from megatron.checkpoint.formats.huggingface.settings import Settings, read_quantization, read_settings
from megatron.checkpoint.formats.huggingface.smollm3 import SmolLM3Family
from megatron.checkpoint.formats.huggingface.stablelm import StableLmFamily
from megatron.checkpoint.formats.huggingface.starcoder2 import Starcoder2Family
from megatron.checkpoint.formats.huggingface.tokenizer_files import tokenizer_settings
from megatron.checkpoint.formats.huggingface.xglm import XglmFamily
from megatron.core.config_base import config_to_dict, excesses
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt import GPTConfig

FAMILIES: tuple[Family, ...] = (
    GPT2Family(),
    LlamaFamily(),
    Qwen2Family(),
    Qwen3Family(),
    Qwen3MoEFamily(),
    MistralFamily(),
    MinistralFamily(),
    Ministral3Family(),
    MixtralFamily(),
    GPTNeoFamily(),
    GPTNeoXFamily(),
    GPTJFamily(),
    CodeGenFamily(),
    GPTBigCodeFamily(),
    PersimmonFamily(),
    DeepseekV3Family(),
    GptOssFamily(),
    Olmo2Family(),
    Olmo3Family(),
    SmolLM3Family(),
    OlmoeFamily(),
    Phi3Family(),
    Gemma2Family(),
    Gemma3Family(),
    GemmaFamily(),
    Qwen2MoEFamily(),
    SeedOssFamily(),
    Glm4Family(),
    ArceeFamily(),
    Starcoder2Family(),
    Exaone4Family(),
    HeliumFamily(),
    Ernie4_5Family(),
    Ernie4_5MoeFamily(),
    StableLmFamily(),
    SolarOpenFamily(),
    Glm4MoeFamily(),
    Glm4MoeLiteFamily(),
    ExaoneMoeFamily(),
    FlexOlmoFamily(),
    GraniteFamily(),
    GraniteMoeFamily(),
    CohereFamily(),
    OlmoFamily(),
    PhiFamily(),
    FalconFamily(),
    Cohere2Family(),
    NanoChatFamily(),
    DeepseekV2Family(),
    DeepseekV32Family(),
    GlmMoeDsaFamily(),
    Qwen3NextFamily(),
    BambaFamily(),
    GraniteMoeHybridFamily(),
    NemotronHFamily(),
    FalconH1Family(),
    BloomFamily(),
    MptFamily(),
    OptFamily(),
    XglmFamily(),
    ApertusFamily(),
    HunYuanDenseV1Family(),
    HunYuanMoEV1Family(),
    MiniMaxM2Family(),
    PhimoeFamily(),
    Dots1Family(),
    NemotronFamily(),
    Qwen3_5Family(),
    Qwen3_5MoEFamily(),
    KimiLinearFamily(),
    Gemma4Family(),
)

HOW_TO_ADD = "docs/how_to_add.md#a-family-of-hugging-face-models"
_LANGUAGE_MODEL = "ForCausalLM"
_PUBLISHED_WITH_CODE = ("deepseek_v2", "deepseek_v3", "kimi_linear", "minimax_m2", "mpt")
"""Architectures whose folders refer to custom code, which transformers ignores since it has built-in code."""


_OF_BOTH = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Settings of a whole model that apply to its language model."""


def hugging_face_config(folder: str | Path) -> GPTConfig:
    """Read the model configuration from a folder's config.json, without importing torch.

    Raises:
        CheckpointError: the folder has no readable config.json.
        ConfigurationError: the model is not supported; the message lists every reason.
    """
    return read_model(read_settings(Path(folder)))[1]


def read_model(settings: Settings) -> tuple[Family, GPTConfig]:
    """Return a model's architecture and its configuration.

    Raises:
        CheckpointError: the architecture is not supported.
        ConfigurationError: a setting is not supported.
    """
    settings = language_part(settings)
    family = _family_of(settings)
    config = read_as(family, settings)
    settings.raise_problems()
    return family, config


def read_as(family: Family, settings: Settings) -> GPTConfig:
    """Return the configuration that a family reads from the settings; record unsupported settings in ``settings``."""
    read_quantization(settings)
    if settings.values.get("auto_map") is not None and family.model_type not in _PUBLISHED_WITH_CODE:
        settings.refuse("auto_map is set; only weights of the built-in architectures are supported")
    config = family.read_config(settings)
    for problem in excesses(config):
        settings.refuse(problem)
    return config


def language_part(settings: Settings) -> Settings:
    """Return the settings of the language model of a model with a vision part, or the settings of any other model."""
    for family in FAMILIES:
        multimodal = family.multimodal_architecture if isinstance(family, RotaryDecoderFamily) else None
        if multimodal is None or settings.values.get("architectures") != [multimodal]:
            continue
        text = settings.inner("text_config")
        if text is None:
            settings.refuse(f"text_config is missing; {multimodal} needs it")
            settings.raise_problems()
        common = {name: value for name, value in settings.values.items() if name in _OF_BOTH and value is not None}
        values = {**text.values, **common, "architectures": [family.architecture]} if text else {}
        return Settings(values, settings.place, settings.problems, settings.tensor_names)
    return settings


def family_for(config: GPTConfig, preferred: Family | None = None) -> Family:
    """Return an architecture that can express a model completely: the preferred one if it can.

    Raises:
        ConfigurationError: no architecture can; the message lists what the nearest one cannot express.
    """
    wanted = model_features(config)
    # By architecture: whether it lacks experts that the model has, and what else it cannot express.
    missing: dict[str, tuple[bool, list[str]]] = {}
    for family in (*([] if preferred is None else [preferred]), *FAMILIES):
        settings = Settings(family.write_settings(config), family.model_type)
        found = model_features(family.read_config(settings))
        changed = [f"{name} {wanted[name]!r}" for name in wanted if found.get(name, wanted[name]) != wanted[name]]
        changed += settings.problems
        if not changed:
            return family
        missing[family.architecture] = wanted["num_experts"] is not None and found["num_experts"] is None, changed
    nearest = min(missing, key=lambda name: (missing[name][0], len(missing[name][1])))
    raise ConfigurationError(
        f"no supported Hugging Face architecture can represent this model; the most similar, {nearest}, cannot "
        "represent " + ", ".join(missing[nearest][1])
    )


def describe_missing_family(config: GPTConfig) -> str | None:
    """Return one line that explains why a model cannot be exported to Hugging Face, or None if it can."""
    try:
        family_for(config)
    except ConfigurationError as error:
        return f"checkpoints of this run cannot be converted to Hugging Face models: {error}"
    return None


def named_family(settings: Settings) -> tuple[str, Family | None]:
    """Return what names the architecture, ``architectures`` or else ``model_type``, and its family if supported."""
    architectures = settings.values.get("architectures")
    if isinstance(architectures, list) and architectures:
        wanted = [str(name) for name in architectures]
        # MPT's own code spells the name differently from transformers.
        in_lower_case = [name.lower() for name in wanted]
        found = [family for family in FAMILIES if in_lower_case == [family.architecture.lower()]]
        return ", ".join(wanted), found[0] if found else None
    wanted_type = settings.values.get("model_type")
    found = [family for family in FAMILIES if family.model_type == wanted_type]
    return f"model_type {wanted_type!r}", found[0] if found else None


def _family_of(settings: Settings) -> Family:
    names, family = named_family(settings)
    if family is None:
        supported = {family.architecture.removesuffix(_LANGUAGE_MODEL): family.architecture for family in FAMILIES}
        nearest = difflib.get_close_matches(names.removesuffix(_LANGUAGE_MODEL), supported, n=1)
        similar = f" (a similar name is {supported[nearest[0]]})" if nearest else ""
        place = "" if settings.place == names else f"{settings.place}: "
        raise CheckpointError(
            f"{place}{names} is not supported{similar}; docs/huggingface.md lists the supported architectures, "
            f"{HOW_TO_ADD} shows how to add one"
        )
    return family


def recorded_hugging_face_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration that a folder records: the model, and the tokenizer if the folder has one.

    Raises:
        CheckpointError: config.json cannot be read.
        ConfigurationError: the model is not supported.
    """
    config = hugging_face_config(folder)
    tokenizer = tokenizer_settings(folder, config.vocab_size)
    has_tokenizer = tokenizer["tokenizer_type"] != "NullTokenizer"
    return {"model": config_to_dict(config), "data": {}, "tokenizer": tokenizer if has_tokenizer else {}}
