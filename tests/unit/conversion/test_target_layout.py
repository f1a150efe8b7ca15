"""What a conversion changes in the shared state, and what it refuses."""

from __future__ import annotations

import pytest

from megatron.checkpoint.conversion import retarget
from megatron.checkpoint.conversion_request import Target
from megatron.config.run_config import RunConfig
from megatron.core.errors import ConfigurationError
from tests.unit.conversion.small_checkpoint import small_common


def test_sizes_that_are_not_given_stay() -> None:
    common = small_common()
    common["config"]["model"]["tensor_model_parallel_size"] = 2
    common["config"]["model"]["sequence_parallel"] = True
    changed = retarget(common, Target(pipeline_parallel_size=2, num_layers_per_virtual_pipeline_stage=1))
    model = RunConfig.from_dict(changed["config"]).model
    assert (model.tensor_model_parallel_size, model.pipeline_model_parallel_size) == (2, 2)
    assert model.num_layers_per_virtual_pipeline_stage == 1
    assert model.sequence_parallel
    assert changed["layout"] == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 4,
    }
    for key in ("progress", "optimizer", "scheduler"):
        assert changed[key] == common[key]


def test_a_split_for_other_stages_goes_and_one_for_the_same_stages_stays() -> None:
    common = small_common()
    common["config"]["model"] |= {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}
    same = RunConfig.from_dict(retarget(common, Target(tensor_parallel_size=4))["config"]).model
    assert same.decoder_first_pipeline_num_layers == 1
    other = RunConfig.from_dict(retarget(common, Target(pipeline_parallel_size=4))["config"]).model
    assert other.decoder_first_pipeline_num_layers is None


def test_weights_alone_have_no_optimizer_and_may_change_type() -> None:
    changed = retarget(small_common(), Target(keeps_optimizer=False, params_dtype="bfloat16"))
    assert (changed["optimizer"], changed["scheduler"]) == (None, None)
    config = RunConfig.from_dict(changed["config"])
    assert (config.model.params_dtype, config.model.bf16) == ("bfloat16", True)
    assert config.optimizer.params_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(tensor_parallel_size=3), "--num-attention-heads 4 is not divisible by --target-tensor-parallel-size 3"),
        (Target(pipeline_parallel_size=3), "--target-pipeline-parallel-size"),
        (Target(tensor_parallel_size=0), "--target-tensor-parallel-size 0 is not positive"),
        (Target(make_vocab_size_divisible_by=0), "--make-vocab-size-divisible-by 0 is not positive"),
        (Target(make_vocab_size_divisible_by=-4), "--make-vocab-size-divisible-by -4 is not positive"),
        (Target(num_layers_per_virtual_pipeline_stage=2), "--target-pipeline-parallel-size is 1"),
        (
            Target(pipeline_parallel_size=2, num_layers_per_virtual_pipeline_stage=0),
            "--target-num-layers-per-virtual-pipeline-stage 0 is not positive",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_flags_of_the_converter(target: Target, expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        retarget(small_common(), target)
    assert expected in str(refused.value)
    assert "--tensor-model-parallel-size" not in str(refused.value)
