"""torchtitan's folders, written by torch.distributed.checkpoint, compute here what torchtitan's Llama computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron.checkpoint.checkpoint_folder import detect_format
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.llama import LlamaFamily
from megatron.checkpoint.formats.torchtitan import TorchtitanSource
from megatron.checkpoint.inference_model import streamed_logits
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.sharding import Box
from tests.harness.distributed import run_distributed
from tests.harness.titan_llama import TOLD, make_weights, reference_logits, save_run, save_weights

TOKENS = torch.randint(83, (2, 21), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("run"), make_weights())


def assert_same_logits(source: TorchtitanSource, weights: dict[str, torch.Tensor]) -> None:
    expected = reference_logits(weights, TOKENS)
    difference = (streamed_logits(source, TOKENS) - expected).abs().max() / expected.abs().max()
    assert difference < 1e-5
    source.close()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_logits_of_a_folder_with_a_model_alone(is_tied: bool, prefix: str, tmp_path: Path) -> None:
    weights = make_weights(is_tied=is_tied)
    source = TorchtitanSource(save_weights(tmp_path, weights, prefix), TOLD)
    assert source.config.untie_embeddings_and_output_weights != is_tied
    assert_same_logits(source, weights)


def test_the_logits_of_a_folder_with_all_of_a_run(folder: Path) -> None:
    assert detect_format(folder) == "torchtitan"
    source = TorchtitanSource(folder, TOLD)
    source.check_storages()
    assert all(name.startswith("model.") for name in source.tensors)
    assert source.common["progress"]["iteration"] == 0
    assert_same_logits(source, make_weights())


def test_interleaved_channels_stay_as_they_are(folder: Path) -> None:
    weights = make_weights()
    source = TorchtitanSource(folder, {**TOLD, "rotary_interleaved": True})
    rows = source.read("model.decoder.layers.1.self_attention.linear_qkv.weight")
    assert torch.equal(rows[:24], weights["layers.1.attention.wq.weight"][:24])
    assert_same_logits(source, weights)


def test_any_box_is_that_part_of_the_whole(folder: Path) -> None:
    source = TorchtitanSource(folder, TOLD)
    for name, info in source.tensors.items():
        box = Box(tuple(n // 3 for n in info.global_shape), tuple((n + 1) // 2 for n in info.global_shape))
        part = source.read(name, box)
        assert torch.equal(part, source.read(name)[box.slices]), name
        assert part.is_contiguous()
    source.close()


def save_sharded(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weights = {
        name: distribute_tensor(values, mesh, [Replicate() if name.startswith("norm") else Shard(0)])
        for name, values in make_weights().items()
    }
    dcp.save(weights, checkpoint_id=folder)


@pytest.mark.long
def test_shards_of_several_ranks_are_put_together(folder: Path, tmp_path: Path) -> None:
    run_distributed(2, save_sharded, tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    ours, theirs = TorchtitanSource(tmp_path, TOLD), TorchtitanSource(folder, TOLD)
    assert ours.tensors == theirs.tensors
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.tensors)
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rotary_base": None, "norm_epsilon": None},
            "which does not record --rotary-base, --norm-epsilon; pass the values",
        ),
        (
            {"num_attention_heads": 7},
            "wq has 48 rows and wk has 16 rows, which do not match 7 heads; change --num-att",
        ),
        ({"num_attention_heads": 48}, "do not match 48 heads"),
        ({"num_attention_heads": 2}, "wk has 16 rows, which do not match 2 heads"),
        ({"rotary_base": -1}, "--rotary-base -1: a number above 0"),
    ],
)
def test_what_is_not_told_or_told_wrongly_is_named(folder: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TorchtitanSource(folder, TOLD | change)


def test_another_kind_of_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nor a torchtitan checkpoint of Llama .* \(it names encoder.weight\); save the model"
    ):
        TorchtitanSource(save_weights(tmp_path / "other", {"encoder.weight": torch.ones(2)}), TOLD)
    weights = make_weights()
    del weights["layers.2.ffn_norm.weight"]
    weights["layers.0.moe.router.gate.weight"] = torch.ones(2, 3)
    weights["layers.1.attention.wo.weight"] = torch.ones(5, 7)
    with pytest.raises(CheckpointError) as caught:
        TorchtitanSource(save_weights(tmp_path / "changed", weights), TOLD)
    for problem in (
        "missing: layers.2.ffn_norm.weight",
        "unexpected: layers.0.moe.router.gate.weight",
        "layers.1.attention.wo.weight: shape [5, 7] in the files, but [48, 48] according",
    ):
        assert problem in str(caught.value)


def test_a_tensor_of_a_family_that_the_format_does_not_have_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = LlamaFamily.links

    def with_gate(self: LlamaFamily, config: GPTConfig) -> Iterator[TensorLink]:
        yield from links(self, config)
        yield whole("model.gate.weight", "model.layers.0.self_attn.gate.weight", (3,))

    monkeypatch.setattr(LlamaFamily, "links", with_gate)
    with pytest.raises(CheckpointError, match=r"has no tensor for model\.layers\.0\.self_attn\.gate"):
        TorchtitanSource(folder, TOLD)


def test_damage_is_found(tmp_path: Path) -> None:
    save_run(tmp_path, make_weights())
    (data,) = tmp_path.glob("*.distcp")
    content = bytearray(data.read_bytes())
    place = content.find(make_weights()["norm.weight"].numpy().tobytes())
    content[place] ^= 1
    data.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"the bytes of storage .*; the file contains norm.weight"):
        open_checkpoint(tmp_path, told=TOLD)
    data.unlink()
    with pytest.raises(DamagedCheckpointError, match="No such file"):
        open_checkpoint(tmp_path, told=TOLD)


def test_a_folder_of_megatrons_that_lost_its_shared_file_is_still_its(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes((folder / ".metadata").read_bytes())
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert detect_format(tmp_path) == "torch_dist"
