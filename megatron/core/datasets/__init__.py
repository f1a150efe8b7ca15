"""Tokenized data sets, their sample indices, and the samples and batches that a run reads from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.datasets.batch import Batch, BatchContents, BatchLayout
    from megatron.core.datasets.blended_dataset import BlendedDataset, LaterPhase, SegmentChain
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedDatasetBuilder,
        DatasetSplits,
        OpenedPart,
        ResumedDataset,
        open_data_set,
    )
    from megatron.core.datasets.chat_template import (
        END_OF_DOCUMENT,
        SFT_TEMPLATE,
        TEMPLATE_FILE,
        ChatTemplate,
        choose_template,
        find_template,
    )
    from megatron.core.datasets.conversation import ASSISTANT, Conversation, array_lines, is_array
    from megatron.core.datasets.conversation_file import (
        MASK_DTYPE,
        ConversationEncoder,
        ConversationFile,
        ConversationOptions,
        EncodedConversation,
        is_raw,
        mask_prefix,
    )
    from megatron.core.datasets.data_history import (
        BlendPart,
        DataHistory,
        DataSetKey,
        LeftOut,
        RunPosition,
        Segment,
        SkippedSamples,
        begin_history,
        continue_history,
        recorded_history,
    )
    from megatron.core.datasets.data_samplers import (
        DataloaderType,
        MicroBatchSampler,
        SampleOrder,
        WholeSetSampler,
        sample_ids_hash,
    )
    from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, special_token_id
    from megatron.core.datasets.gpt_dataset import (
        DataUsage,
        ExternalSamples,
        GPTDataset,
        GPTSample,
        SampleDataset,
        make_sample,
    )
    from megatron.core.datasets.gpt_dataset_config import (
        Blend,
        GPTDatasetConfig,
        ValidationSet,
        parse_blend,
        parse_split,
        split_boundaries,
        suggest_split,
    )
    from megatron.core.datasets.index_builder import (
        SEPARATE_FINAL_EPOCH_BELOW,
        count_samples,
        plan_epochs,
        select_index_builder,
    )
    from megatron.core.datasets.indexed_dataset import (
        CHECKSUM_BLOCK_BYTES,
        PIECE_LENGTH,
        Block,
        Damage,
        IndexedDataset,
        IndexedDatasetBuilder,
        Read,
        bin_path,
        checksum_blocks,
        checksums_path,
        cut,
        idx_path,
        ignore_bytes_read,
        optimal_dtype,
        replace_tokens,
        report_lost_pages,
        verify_checksums,
        write_checksums,
        write_index,
    )
    from megatron.core.datasets.micro_batch_reader import ExternalReader, MicroBatchReader, ReadAhead
    from megatron.core.datasets.sample_keys import (
        ReadCounter,
        SamplePlace,
        blend_names,
        data_set_numbers,
        locate_sample,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "batch": "Batch BatchContents BatchLayout",
        "blended_dataset": "BlendedDataset LaterPhase SegmentChain",
        "blended_megatron_dataset_builder": (
            "BlendedDatasetBuilder DatasetSplits OpenedPart ResumedDataset open_data_set"
        ),
        "chat_template": "ChatTemplate END_OF_DOCUMENT SFT_TEMPLATE TEMPLATE_FILE choose_template find_template",
        "conversation": "ASSISTANT Conversation array_lines is_array",
        "conversation_file": (
            "ConversationEncoder ConversationFile ConversationOptions EncodedConversation MASK_DTYPE is_raw mask_prefix"
        ),
        "data_history": (
            "BlendPart DataHistory DataSetKey LeftOut RunPosition Segment SkippedSamples begin_history "
            "continue_history recorded_history"
        ),
        "data_samplers": "DataloaderType MicroBatchSampler SampleOrder WholeSetSampler sample_ids_hash",
        "fill_in_the_middle": "FillInTheMiddle special_token_id",
        "gpt_dataset": "DataUsage ExternalSamples GPTDataset GPTSample SampleDataset make_sample",
        "gpt_dataset_config": (
            "Blend GPTDatasetConfig ValidationSet parse_blend parse_split split_boundaries suggest_split"
        ),
        "index_builder": "SEPARATE_FINAL_EPOCH_BELOW count_samples plan_epochs select_index_builder",
        "indexed_dataset": (
            "Block CHECKSUM_BLOCK_BYTES Damage IndexedDataset IndexedDatasetBuilder PIECE_LENGTH Read bin_path "
            "checksum_blocks checksums_path cut idx_path ignore_bytes_read optimal_dtype replace_tokens "
            "report_lost_pages verify_checksums write_checksums write_index"
        ),
        "micro_batch_reader": "ExternalReader MicroBatchReader ReadAhead",
        "sample_keys": "ReadCounter SamplePlace blend_names data_set_numbers locate_sample",
    },
)
