"""Training of models: set-up, the training loop, checkpoints, evaluation and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.training.batch_source import BatchSource, batch_layout
    from megatron.training.checkpointing import RunCheckpoints, open_saver
    from megatron.training.data_plan import DatasetsProvider, SampleTargets, dataset_config, sample_targets
    from megatron.training.evaluation import EvaluationRecord, EvaluationSets, evaluate
    from megatron.training.exit_reason import (
        OWN_RUN_ID,
        launch_environment_or_exit,
        parse_arguments_or_exit,
        reasons_of,
        refuse,
        refuse_in_run,
        run_program,
    )
    from megatron.training.extending import (
        get_args,
        import_script,
        keep_arguments,
        kept_arguments,
        pretrain,
        register_activation,
        register_attention,
        register_callback,
        register_dataset,
        register_logger,
        register_loss,
        register_lr_schedule,
        register_norm,
        register_optimizer,
    )
    from megatron.training.gpt import forward_step, provide_datasets, provide_model, training_script
    from megatron.training.initialize import (
        LaunchEnvironment,
        MeetingPoint,
        Runtime,
        abort_communication,
        connect_store,
        elastic_run_id,
        initialize_device,
        initialize_distributed,
        initialize_lasting_runtime,
        is_first_failure,
        launcher_error_file,
        make_runtime,
        meeting_point,
        read_launch_environment,
        scheduler_job_id,
        shut_down,
    )
    from megatron.training.model_setup import ModelAndOptimizer, ModelProvider, build_model_and_optimizer, schedule_of
    from megatron.training.preflight import prepare_data_or_exit
    from megatron.training.pretraining import (
        HeldModel,
        Program,
        choose_implementations,
        pretrain_from_config,
        train_held,
        with_vocabulary,
    )
    from megatron.training.registered_dataset import IGNORED_LABEL
    from megatron.training.resume import ResumeState
    from megatron.training.step_position import StepPosition, find_step
    from megatron.training.step_samples import StepSamples
    from megatron.training.theoretical_memory_usage import (
        ModelSize,
        describe_theoretical_memory,
        model_size,
        num_parameters,
    )
    from megatron.training.training_step import (
        BegunStep,
        ForwardStep,
        MicrobatchSource,
        StepGuard,
        StepReduction,
        TrainingStep,
        agree,
        read_agreement,
        sum_over_ranks,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "batch_source": "BatchSource batch_layout",
        "checkpointing": "RunCheckpoints open_saver",
        "data_plan": "DatasetsProvider SampleTargets dataset_config sample_targets",
        "evaluation": "EvaluationRecord EvaluationSets evaluate",
        "exit_reason": (
            "OWN_RUN_ID launch_environment_or_exit parse_arguments_or_exit reasons_of refuse refuse_in_run run_program"
        ),
        "extending": (
            "get_args import_script keep_arguments kept_arguments pretrain register_activation register_attention "
            "register_callback register_dataset register_logger register_loss register_lr_schedule register_norm "
            "register_optimizer"
        ),
        "gpt": "forward_step provide_datasets provide_model training_script",
        "initialize": (
            "LaunchEnvironment MeetingPoint Runtime abort_communication connect_store elastic_run_id "
            "initialize_device initialize_distributed initialize_lasting_runtime is_first_failure launcher_error_file "
            "make_runtime meeting_point read_launch_environment scheduler_job_id shut_down"
        ),
        "model_setup": "ModelAndOptimizer ModelProvider build_model_and_optimizer schedule_of",
        "preflight": "prepare_data_or_exit",
        "pretraining": "HeldModel Program choose_implementations pretrain_from_config train_held with_vocabulary",
        "registered_dataset": "IGNORED_LABEL",
        "resume": "ResumeState",
        "step_position": "StepPosition find_step",
        "step_samples": "StepSamples",
        "theoretical_memory_usage": "ModelSize describe_theoretical_memory model_size num_parameters",
        "training_step": (
            "BegunStep ForwardStep MicrobatchSource StepGuard StepReduction TrainingStep agree read_agreement "
            "sum_over_ranks"
        ),
    },
)
