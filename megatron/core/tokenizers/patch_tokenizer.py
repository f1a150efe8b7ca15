"""The tokenizers that Pai-Megatron-Patch's --patch-tokenizer-type names, and the rows that it gives a model for them.

Each is the Hugging Face tokenizer in the folder of ``--load``. Sizes as in Pai-Megatron-Patch 0.8 to 0.12.
"""

from __future__ import annotations

from megatron.core.errors import TokenizerError

_FIXED_ROWS = {
    "BloomTokenizerFromHF": 250880,
    "StarcoderTokenizerFromHF": 49152,
    "VicunaTokenizerFromHF": 32000,
}
_ALL_BUT_TWO = ("DeepSeekV2Tokenizer",)
PATCH_TOKENIZER_TYPES = (
    "LLamaTokenizer",
    "LLama2Tokenizer",
    "LLama3Tokenizer",
    "MistralTokenizer",
    "MixtralTokenizer",
    "Qwen2Tokenizer",
    "Qwen3Tokenizer",
    "Qwen2VLTokenizer",
    "YiTokenizer",
    "FalconTokenizer",
    "OPTTokenizer",
    *_ALL_BUT_TWO,
    *_FIXED_ROWS,
)
"""Kinds whose tokenizer can be read from files of a folder."""
CODE_TOKENIZER_TYPES = (
    "BaichuanTokenizer",
    "BloomTokenizerFromCustom",
    "ChatGLMTokenizerFromHF",
    "GLM10BZHTokenizerFromHF",
    "IcetkGLM130BTokenizer",
    "JiebaBPETokenizer",
    "QwenTokenizer",
    "QwenVLTokenizer",
)
"""Kinds that are made by Python code of their own, which is never run."""


def patched_vocab_size(patch_tokenizer_type: str, base_size: int, own_size: int, extra_vocab_size: int) -> int:
    """Return the size of the vocabulary that Pai-Megatron-Patch gives a model.

    Most kinds count the base vocabulary, without added tokens, and ``--extra-vocab-size`` makes room for those.

    Raises:
        TokenizerError: added tokens have ids that the vocabulary does not reach.
    """
    if patch_tokenizer_type in _FIXED_ROWS:
        size = _FIXED_ROWS[patch_tokenizer_type]
    elif patch_tokenizer_type in _ALL_BUT_TWO:
        size = own_size - 2 + extra_vocab_size
    else:
        size = base_size + extra_vocab_size
    if size < own_size:
        raise TokenizerError(
            f"--extra-vocab-size {extra_vocab_size}: --patch-tokenizer-type {patch_tokenizer_type} makes a vocabulary "
            f"of {size}, but the tokenizer has ids up to {own_size - 1}; give --extra-vocab-size "
            f"{extra_vocab_size + own_size - size} or more, or --padded-vocab-size"
        )
    return size
