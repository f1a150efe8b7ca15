"""Data preparation before training: cleaning, tokenization, merging and inspection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.data.cleaner import Cleaner, CleaningPlan, OutputFile
    from megatron.data.dataset_inspection import (
        LengthStatistics,
        TokenStatistics,
        count_tokens,
        describe_ends,
        describe_lengths,
        document_lengths,
        faults_in_vocabulary,
        intact_dataset,
        verify_dataset,
        without_suffix,
    )
    from megatron.data.document_reader import find_inputs, is_read
    from megatron.data.input_chunks import CHUNK_BYTES, cut_input, first_keys, take_sample
    from megatron.data.input_files import KINDS, STDIN, InputFile, find_input
    from megatron.data.json_lines import find_compiled_reader
    from megatron.data.leader import Leader, Progress
    from megatron.data.text_filters import TextRules, UrlBlacklist
    from megatron.data.token_shards import TokenShard, find_token_shards
    from megatron.data.tokenized_chunk import Recipe, load_splitter
    from megatron.data.url_filter import UrlFilter
    from megatron.data.work_folder import FORMAT, WorkFolder, differences, record_path, unfinished_path
    from megatron.data.worker_pool import WorkerPool, num_slots, work

__getattr__ = lazy_exports(
    __name__,
    {
        "cleaner": "Cleaner CleaningPlan OutputFile",
        "dataset_inspection": (
            "LengthStatistics TokenStatistics count_tokens describe_ends describe_lengths document_lengths "
            "faults_in_vocabulary intact_dataset verify_dataset without_suffix"
        ),
        "document_reader": "find_inputs is_read",
        "input_chunks": "CHUNK_BYTES cut_input first_keys take_sample",
        "input_files": "InputFile KINDS STDIN find_input",
        "json_lines": "find_compiled_reader",
        "leader": "Leader Progress",
        "text_filters": "TextRules UrlBlacklist",
        "token_shards": "TokenShard find_token_shards",
        "tokenized_chunk": "Recipe load_splitter",
        "url_filter": "UrlFilter",
        "work_folder": "FORMAT WorkFolder differences record_path unfinished_path",
        "worker_pool": "WorkerPool num_slots work",
    },
)
