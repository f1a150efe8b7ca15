"""What carries the chunks of --tp-comm-overlap: the device's best, or on CPU what is measured to be quicker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device
from megatron.training import autotune
from megatron.training.autotune import choose_tp_overlap
from megatron.training.initialize import make_runtime
from tests.harness.distributed import run_distributed
from tests.unit.training.config.command_lines import MINIMAL

LAYOUT = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--distributed-backend", "gloo")


def choices(times: list[tuple[float, float] | None], flags: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """Return what this rank chooses and says where a measurement finds these times on it; None measures."""
    lines: list[str] = []
    config = resolve_arguments([*MINIMAL, *LAYOUT, "--tp-comm-overlap", *flags], 2).config
    runtime = make_runtime(config, Device("cpu"))
    chosen = []
    for found in times:
        if found is not None:
            mine = found[runtime.state.rank], 1.0
            autotune.measure_overlap = lambda *_, mine=mine: mine  # type: ignore[assignment]
        chosen.append(choose_tp_overlap(config, runtime, lines.append).model.tp_comm_overlap_impl)
    return chosen, lines


def test_the_slowest_rank_decides_whether_chunks_gain() -> None:
    for chosen, lines in run_distributed(2, choices, [None, (0.5, 0.9), (0.5, 1.2)]):
        assert chosen[0] in ("ring", "whole")
        assert chosen[1:] == ["ring", "whole"]
        said = " > tensor-parallel communication beside products: "
        assert lines[1:] == [
            f"{said}in chunks, round a ring (measured: chunks take 90% of the time without)",
            f"{said}whole, in no chunks (measured: chunks take 120% of the time without)",
        ]


@pytest.mark.long
def test_nothing_is_measured_where_the_choice_is_made() -> None:
    for impl in ("ring", "whole"):
        [(chosen, lines), _] = run_distributed(2, choices, [(9.0, 9.0)], ("--tp-comm-overlap-impl", impl))
        assert (chosen, lines) == ([impl], [])
    for flags, why in (
        (("--tp-comm-overlap-impl", "symmetric-memory"), "there is no symmetric memory on CPU"),
        (("--deterministic-mode",), "nothing is measured with --deterministic-mode"),
    ):
        [(chosen, [line]), _] = run_distributed(2, choices, [(9.0, 9.0)], flags)
        assert chosen == ["ring"]
        assert line.endswith(f"({why})")


def choices_after(recorded: str) -> tuple[list[str], list[str]]:
    """Choose as a run that goes on from a checkpoint with this choice in it."""
    autotune.recorded_choice = lambda config, runtime, field: recorded if field == "tp_comm_overlap_impl" else None
    return choices([(9.0, 9.0)])


def test_a_checkpoint_keeps_the_choice() -> None:
    for recorded, chosen, why in (
        ("ring", "ring", "round a ring (as in the checkpoint)"),
        ("whole", "whole", "in no chunks (as in the checkpoint)"),
        ("auto", "whole", "in no chunks (measured: chunks take 900% of the time without)"),
    ):
        for chose, [line] in run_distributed(2, choices_after, recorded):
            assert chose == [chosen]
            assert line.endswith(why)


def test_a_run_without_the_flag_is_left_alone() -> None:
    config = resolve_arguments([*MINIMAL], 1).config
    assert choose_tp_overlap(config, make_runtime(config, Device("cpu")), [].append) is config
    assert not Device("cpu").has_peers()


@pytest.mark.parametrize(
    ("flags", "chosen", "why"),
    [
        ((), "symmetric-memory", "of its devices"),
        (("--inprocess-restart", "--save", "checkpoints"), "ring", "names that groups have again after a restart"),
    ],
)
def test_symmetric_memory_is_not_kept_over_a_restart(
    flags: tuple[str, ...], chosen: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "why_no_symmetric_memory", lambda tp, has_peers: None)
    monkeypatch.setattr(Device, "has_peers", lambda device: True)
    config = resolve_arguments([*MINIMAL, *LAYOUT, "--tp-comm-overlap", *flags], 2).config
    runtime = make_runtime(resolve_arguments([*MINIMAL], 1).config, Device("cpu"))
    lines: list[str] = []
    config = choose_tp_overlap(config, replace(runtime, device=Device("cuda")), lines.append)
    assert config.model.tp_comm_overlap_impl == chosen
    assert why in lines[0]
