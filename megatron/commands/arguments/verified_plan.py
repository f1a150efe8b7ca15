"""The dry run that --verify asks for: what is planned of a configuration's stages, tried on a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron.config.run_config import RunConfig
from megatron.core.console import waiting
from megatron.core.errors import ConfigurationError, MegatronError
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import OURS, Implementation
from megatron.planner.prediction import HOPPER_MACHINES, usable_bytes
from megatron.planner.simulation.pretended_cuda import load_pretended_cuda

if TYPE_CHECKING:
    from megatron.planner.verified_stage import VerifiedStage

HELP = "try the plan's stages on a simulated GPU, and compare (5 to 60 s each)"
_MIB = 2**20

# Torch is imported by the function that needs it: the library that replaces the CUDA driver must be loaded before.


def prepare_to_verify(implementation: Implementation) -> None:
    """Let this process pretend to have CUDA; torch must not be imported yet.

    Raises:
        ConfigurationError: the implementation is another program, or this machine cannot pretend to have CUDA.
    """
    if implementation.name != OURS.name:
        raise ConfigurationError(
            f"--verify runs this program, and --implementation is {implementation.name}; use --implementation "
            f"{OURS.name}, or leave out --verify"
        )
    load_pretended_cuda()


def verify_plan(config: RunConfig, gpu: Gpu) -> Sequence[VerifiedStage]:
    """Run the first, the last and the fullest stage dry; `prepare_to_verify` must have been called.

    Raises:
        ConfigurationError: the dry run refuses the configuration.
    """
    from megatron.planner.verified_stage import stages_to_verify, verify_stage
    from megatron.training.gpt import forward_step, provide_model

    made_of = provide_model, forward_step
    stages, verified = stages_to_verify(config, gpu), []
    with waiting("trying the plan's stages") as tried:
        for stage in stages:
            verified.append(verify_stage(config, stage, gpu, *made_of))
            tried(len(verified), len(stages))
    return verified


def verify_fitting_plan(config: RunConfig, gpu: Gpu) -> Sequence[VerifiedStage]:
    """Do what `verify_plan` does for a plan that is to fit.

    Raises:
        ConfigurationError: the dry run refuses the configuration, or needs more memory than the GPU gives away.
    """
    verified = verify_plan(config, gpu)
    fullest = max(verified, key=lambda each: each.peak_bytes)
    needed, usable = fullest.peak_bytes + HOPPER_MACHINES.held_bytes, usable_bytes(gpu)
    if needed > usable:
        raise ConfigurationError(
            f"stage {fullest.stage} needs {needed // _MIB} of {usable // _MIB} MiB in the dry run, planned were "
            f"{(fullest.planned.total + HOPPER_MACHINES.held_bytes) // _MIB}; leave out --verify to see its command"
        )
    return verified


def describe_verified(verified: Sequence[VerifiedStage]) -> Iterator[str]:
    """Yield what was compared of each stage."""
    yield "verified by a dry run on a simulated GPU:"
    for each in verified:
        yield from each.lines()


def check_agreement(verified: Sequence[VerifiedStage]) -> None:
    """Fail where a dry run was not as planned.

    Raises:
        MegatronError: it was not, for some stage.
    """
    unlike = [str(each.stage) for each in verified if not each.agrees]
    if unlike:
        raise MegatronError(f"the dry run is not as planned on stage {', '.join(unlike)}: trust the dry run, see above")
