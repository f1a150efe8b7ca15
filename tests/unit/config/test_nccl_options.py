"""The YAML file of --nccl-communicator-config-path: groups, options, and each mistake in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.nccl_options import notes_on_groups, read_nccl_options
from megatron.core.errors import ConfigurationError
from megatron.core.process_group import NcclOptions
from tests.unit.config.command_lines import MINIMAL


def test_file_of_megatron_is_read_under_this_projects_names(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(
        "dp_cp:\n  cga_cluster_size: 2\n  max_ctas: 16\n  min_ctas: 8\n"
        "mp: {is_high_priority_stream: true, net_name: IB}\nep: {max_ctas: 4}\n"
    )
    assert read_nccl_options(str(path)) == {
        "dp_cp": NcclOptions(min_ctas=8, max_ctas=16, cga_cluster_size=2),
        "model_parallel": NcclOptions(net_name="IB"),
        "expert_model": NcclOptions(max_ctas=4),
    }
    assert read_nccl_options(None) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no groups; write lines such as dp_cp: {max_ctas: 8}"),
        ("- dp", "names no groups; write lines such as dp_cp: {max_ctas: 8}"),
        ("dp: [", "cannot be read: while parsing a flow node"),
        (
            "pos_embd: {max_ctas: 8}",
            "pos_embd is no group with a communicator of its own; possible groups are tp, cp, dp, dp_cp, pp, mp, embd, "
            "ep, ep_dp",
        ),
        ("dp: 8", "dp has no options; write a line such as dp: {max_ctas: 8}"),
        (
            "dp: {max_cta: 8}",
            "dp: max_cta is not an option; possible options are min_ctas, max_ctas, ",
        ),
        ("dp: {max_ctas: 0}", "dp: max_ctas is 0; use a whole number from 1 to 64"),
        ("dp: {min_ctas: true}", "dp: min_ctas is True; use a whole number from 1 to 64"),
        ("dp: {cga_cluster_size: 9}", "dp: cga_cluster_size is 9; use a whole number from 0 to 8"),
        ("dp: {min_ctas: 8, max_ctas: 4}", "dp: min_ctas 8 is larger than max_ctas 4; use at most 4"),
        ("dp: {net_name: 3}", "dp: net_name is 3; use the name of a network, such as IB or Socket"),
        ("dp: {is_high_priority_stream: false}", "dp: is_high_priority_stream is False, but every communicator has a "),
    ],
)
def test_mistake_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_nccl_options(str(path))
    (line,) = caught.value.problems
    assert line.startswith(f"--nccl-communicator-config-path {path}")
    assert problem in line
    assert "\n" not in line


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent.yaml cannot be read: No such file or directory$"):
        read_nccl_options(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_user_buffers_with_sharded_gradients_are_told_to_have_no_effect(strategy: str) -> None:
    words = f"--use-nccl-ub --use-distributed-optimizer --data-parallel-sharding-strategy {strategy}"
    resolved = resolve_arguments([*MINIMAL, *words.split()], 2)
    assert "--use-nccl-ub has no effect with ZeRO-2 and FSDP, whose buffers are freed and allocated in each step" in (
        resolved.notes
    )
    assert not resolved.config.ddp.has_user_buffers


def test_options_of_a_group_of_one_rank_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text("tp: {max_ctas: 8}\nmp: {max_ctas: 8}\ndp_cp: {max_ctas: 8}\n", encoding="utf-8")
    sizes = {"tp": 1, "model_parallel": 1, "dp_cp": 4}
    assert list(notes_on_groups(str(path), sizes.__getitem__)) == [
        f"--nccl-communicator-config-path {path}: tp has no effect: the group has one rank",
        f"--nccl-communicator-config-path {path}: mp has no effect: the group has one rank",
    ]
    assert list(notes_on_groups(None, sizes.__getitem__)) == []
