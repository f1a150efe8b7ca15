"""Loggers: log lines, TensorBoard, metrics files and other experiment loggers, and the run's record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.training.loggers.experiment_loggers import RunLogger, check_packages, check_services
    from megatron.training.loggers.log_lines import (
        DataSetLoss,
        IntervalAverage,
        LogInterval,
        StepReport,
        format_brief_step,
        format_datetime,
        format_evaluation,
        format_memory,
        format_step,
        format_training_finished,
        is_terminal,
        pinned_memory_told,
    )
    from megatron.training.loggers.metrics import MetricsWriter, open_metrics
    from megatron.training.loggers.run_record import (
        CONFIG_FILE,
        CONTINUE_FILE,
        END_FILE,
        ENVIRONMENT_FILE,
        RECORD_FOLDER,
        SESSION_LIMITS,
        STARTS_FILE,
        RunRecord,
    )
    from megatron.training.loggers.startup_lines import (
        describe_batch_and_tokenizer,
        describe_buckets,
        describe_datasets,
        describe_initialized,
        describe_precision,
        describe_samples,
        describe_schedule_values,
        log_arguments,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "experiment_loggers": "RunLogger check_packages check_services",
        "log_lines": (
            "DataSetLoss IntervalAverage LogInterval StepReport format_brief_step format_datetime format_evaluation "
            "format_memory format_step format_training_finished is_terminal pinned_memory_told"
        ),
        "metrics": "MetricsWriter open_metrics",
        "run_record": (
            "CONFIG_FILE CONTINUE_FILE END_FILE ENVIRONMENT_FILE RECORD_FOLDER SESSION_LIMITS STARTS_FILE RunRecord"
        ),
        "startup_lines": (
            "describe_batch_and_tokenizer describe_buckets describe_datasets describe_initialized "
            "describe_precision describe_samples describe_schedule_values log_arguments"
        ),
    },
)
