"""Tokenizers: one protocol, and one file per tokenizer type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.tokenizers.build_tokenizer import (
        TOKENIZER_TYPES,
        reject_unused_flags,
        unused_tokenizer_flags,
    )
    from megatron.core.tokenizers.byte_tokenizer import ByteTokenizer
    from megatron.core.tokenizers.gpt2_bpe_tokenizer import END_OF_TEXT
    from megatron.core.tokenizers.huggingface_tokenizer import (
        CODE_TOKENIZER_TYPES,
        PATCH_TOKENIZER_TYPES,
        HuggingFaceTokenizer,
    )
    from megatron.core.tokenizers.sentencepiece_tokenizer import SENTENCE_PIECE_TYPES
    from megatron.core.tokenizers.text_encoder import (
        ENGINES,
        ReferenceEncoder,
        TextEncoder,
        choose_encoder,
        missing_engine,
    )
    from megatron.core.tokenizers.tiktoken_tokenizer import DEFAULT_NUM_SPECIAL_TOKENS
    from megatron.core.tokenizers.tokenizer import (
        MODEL_FOLDER_FILES,
        NullTokenizer,
        Tokenizer,
        load_package,
        read_json_object,
        read_text,
        require_unicode,
    )
    from megatron.core.tokenizers.tokenizer_record import (
        PATH_ARGUMENTS,
        RECORD_FILE,
        TOKENIZER_FOLDER,
        describe_tokenizer,
        load_recorded_tokenizer,
        rebuild_tokenizer,
        record_tokenizer,
        recorded_arguments,
    )
    from megatron.core.tokenizers.tokenizers_engine import EngineTokenizer

__getattr__ = lazy_exports(
    __name__,
    {
        "build_tokenizer": "TOKENIZER_TYPES reject_unused_flags unused_tokenizer_flags",
        "byte_tokenizer": "ByteTokenizer",
        "gpt2_bpe_tokenizer": "END_OF_TEXT",
        "huggingface_tokenizer": "CODE_TOKENIZER_TYPES HuggingFaceTokenizer PATCH_TOKENIZER_TYPES",
        "sentencepiece_tokenizer": "SENTENCE_PIECE_TYPES",
        "text_encoder": "ENGINES ReferenceEncoder TextEncoder choose_encoder missing_engine",
        "tiktoken_tokenizer": "DEFAULT_NUM_SPECIAL_TOKENS",
        "tokenizer": (
            "MODEL_FOLDER_FILES NullTokenizer Tokenizer load_package read_json_object read_text require_unicode"
        ),
        "tokenizer_record": (
            "PATH_ARGUMENTS RECORD_FILE TOKENIZER_FOLDER describe_tokenizer load_recorded_tokenizer "
            "rebuild_tokenizer record_tokenizer recorded_arguments"
        ),
        "tokenizers_engine": "EngineTokenizer",
    },
)
