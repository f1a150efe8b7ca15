"""Model evaluation: the tasks of lm-evaluation-harness, and the perplexity of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.evaluation.harness_model import HarnessModel
    from megatron.evaluation.harness_tasks import HarnessTasks, TaskChoice, figures_of, table_of
    from megatron.evaluation.model_ranks import ModelRanks, Show, TextEncoding
    from megatron.evaluation.text_perplexity import in_all, measure_texts, read_documents

__getattr__ = lazy_exports(
    __name__,
    {
        "harness_model": "HarnessModel",
        "harness_tasks": "HarnessTasks TaskChoice figures_of table_of",
        "model_ranks": "ModelRanks Show TextEncoding",
        "text_perplexity": "in_all measure_texts read_documents",
    },
)
