"""NCCL's rules: each is broken alone by a small log, and every verified layout keeps all of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.inference_model import inference_stage
from megatron.cli import verify_parallelism
from megatron.core import collectives
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError, TrainingError
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import Communicators, create_parallel_state
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import PipelineLinks
from megatron.verification import collective_recorder
from megatron.verification.cells import PP_OVERLAP, TP_OVERLAP, Cell, Layout, make_cell
from megatron.verification.collective_recorder import CollectiveRecorder, record_cell, record_run, stand_in
from megatron.verification.communication_replay import (
    INDEPENDENT_PROGRESS,
    Call,
    CallLog,
    Operation,
    communication_problems,
)
from megatron.verification.model_cells import ExpertLayout, make_expert_cell, make_prediction_cell
from megatron.verification.random_cells import fuzz
from megatron.verification.run_cell import resolve_cell
from tests.unit.core.inference.small_models import build, odd_config

INDEPENDENT = f"{INDEPENDENT_PROGRESS}: "
WORLD = (0, 1)


def collective(kind: str = "allreduce", communicator: str = "tp", **fields: object) -> Operation:
    call = Call(kind, communicator, WORLD, num_bytes=8, dtype="float32", detail="sum")
    return (replace(call, **fields),)  # type: ignore[arg-type]


def message(kind: str, peer: int, communicator: str = "link") -> Operation:
    return (Call(kind, communicator, WORLD, 8, "float32", peer=peer),)


def warm_up(rank: int, *communicators: str) -> list[Operation]:
    """Use each direction of each communicator between two ranks, in one order."""
    return [
        message("send" if sender == rank else "recv", 1 - rank, communicator)
        for communicator in communicators
        for sender in WORLD
    ]


def test_logs_that_keep_every_rule() -> None:
    logs = [
        [collective(), *warm_up(0, "link"), message("send", 1), message("recv", 1), collective("broadcast")],
        [collective(), *warm_up(1, "link"), message("recv", 0), message("send", 0), collective("broadcast")],
    ]
    assert communication_problems(logs) == []
    assert communication_problems([[], []]) == []


@pytest.mark.parametrize(
    "other",
    [
        collective("reduce_scatter"),
        collective(num_bytes=4),
        collective(dtype="int32"),
        collective(detail="max"),
    ],
    ids=["kind", "bytes", "dtype", "reduction"],
)
def test_collectives_that_do_not_match(other: Operation) -> None:
    (problem,) = communication_problems([[collective(), collective()], [collective(), other]])
    assert problem.startswith("matching calls differ: rank 0: allreduce of ranks [0, 1] (8 bytes of float32")


def test_a_root_that_differs() -> None:
    logs = [[collective("broadcast", detail=f"root_rank {rank}")] for rank in WORLD]
    (problem,) = communication_problems(logs)
    assert "root_rank 0" in problem
    assert "root_rank 1" in problem


def test_collectives_that_are_exchanged_on_one_rank() -> None:
    first, second = collective(num_bytes=4), collective(num_bytes=8)
    (problem,) = communication_problems([[first, second], [second, first]])
    assert problem.startswith("matching calls differ")


def test_a_message_of_another_size() -> None:
    receive = message("recv", 0)[0]
    (problem,) = communication_problems([[message("send", 1)], [(replace(receive, num_bytes=4),)]])
    assert "rank 0: send with rank 1 (8 bytes of float32); rank 1: recv with rank 0 (4 bytes" in problem


def test_a_call_that_somebody_never_makes() -> None:
    (problem,) = communication_problems([[collective(), collective()], [collective()]])
    assert problem.startswith("ranks [1] never make the call that matches: rank 0: allreduce")


def test_a_dtype_that_nccl_does_not_have() -> None:
    log = [collective(dtype="int16")]
    problems = communication_problems([log, log])
    assert [problem.split(" ")[1] for problem in problems] == ["0:", "1:"]
    assert all("has a dtype that NCCL does not support" in problem for problem in problems)


def test_a_call_of_another_thread() -> None:
    (problem,) = communication_problems([[collective(in_other_thread=True)], [collective()]])
    assert problem.startswith("rank 0: allreduce")
    assert problem.endswith("comes from a different thread than the other calls")


def group(*members: int) -> Operation:
    return (Call("new_group", "world", (0, 1, 2, 3), new_ranks=members),)


def test_groups_are_made_by_all_ranks_in_one_order() -> None:
    pairs = [[group(0, 1)], [group(0, 1)], [group(2, 3)], [group(2, 3)]]
    assert communication_problems(pairs) == []
    crossed = [[group(0, 1), group(0, 2)], [group(0, 1)], [group(0, 2), group(2, 3)], [group(2, 3)]]
    problems = communication_problems(crossed)
    assert problems[0].startswith("ranks create groups in different orders: rank 0: new_group of [0, 1]")
    # The split is of the world: who makes no group there holds up everybody.
    (problem,) = communication_problems([[group(0, 1)], [group(0, 1)], [], []])
    assert problem.startswith("2 of 4 ranks wait forever: rank 0 in call 1 of 1, new_group of [0, 1]")


def test_a_first_use_holds_both_ends() -> None:
    crossed = [
        [message("recv", 1, "up"), message("send", 1, "down"), message("send", 1, "down")],
        [message("recv", 0, "down"), message("send", 0, "up"), message("recv", 0, "down")],
    ]
    (problem,) = communication_problems(crossed)
    assert problem.startswith("2 of 2 ranks wait forever: rank 0 in call 1 of 3, recv with rank 1")
    collectives_first = [[collective(), collective("broadcast", "dp")], [collective("broadcast", "dp"), collective()]]
    (problem,) = communication_problems(collectives_first)
    assert problem.startswith("2 of 2 ranks wait forever")


def test_connected_links_in_different_orders_need_independent_progress() -> None:
    logs = [
        [*warm_up(0, "down", "up"), message("recv", 1, "up"), message("send", 1, "down")],
        [*warm_up(1, "down", "up"), message("recv", 0, "down"), message("send", 0, "up")],
    ]
    (problem,) = communication_problems(logs)
    assert problem.startswith(f"{INDEPENDENT}2 of 2 ranks wait forever: rank 0 in call 5 of 6, recv with rank 1")


def test_two_sends_to_each_other_need_buffers() -> None:
    logs = [[*warm_up(rank, "link"), message("send", 1 - rank), message("recv", 1 - rank)] for rank in WORLD]
    (problem,) = communication_problems(logs)
    assert problem.startswith(f"{INDEPENDENT}2 of 2 ranks wait forever")
    # Called together they progress together, also where they are the first of all.
    together: list[CallLog] = [[(*message("send", 1 - rank), *message("recv", 1 - rank))] for rank in WORLD]
    assert communication_problems(together) == []


# Recorded layouts.


def record(cell: Cell) -> list[list[Operation]]:
    return record_cell(cell, pretrain_gpt.provide_model, pretrain_gpt.forward_step)


def assert_safe(cells: Sequence[Cell]) -> None:
    found = {}
    for cell in cells:
        try:
            found[cell.name] = communication_problems(record(cell))
        except ConfigurationError:
            assert cell.name.startswith("#"), f"{cell.name} is refused"
    assert {name: problems for name, problems in found.items() if problems} == {}


EVERY_CELL = verify_parallelism.choose_cells(verify_parallelism.parse_arguments([]))
PARALLEL = [cell for cell in EVERY_CELL if cell.world_size > 1]
SP = Layout(tp=2, sequence_parallel=True)
CHOSEN = [
    make_cell("gpt2", Layout(pp=4, schedule="zero-bubble")),
    make_cell("gpt2", Layout(pp=4, virtual_stages=2), num_layers=8),
    *(make_cell("gpt2", Layout(pp=2, virtual_stages=2, pp_overlap=flags)) for flags in PP_OVERLAP[:3]),
    make_cell("gpt2", replace(SP, pp=2, tp_overlap=TP_OVERLAP[1], recompute=("full", "uniform", "1"))),
    # Some rank owns no matrix of which it has a part, and sends nothing back.
    make_cell("gpt2", Layout(dp=4, sharding="optim"), extra=("--optimizer", "muon")),
    make_cell("qwen", Layout(pp=2, cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2)), "packed"),
    make_cell(
        *("llama", Layout(tp=2, pp=2, virtual_stages=2, dp=2, sharding="optim", overlap=True)),
        extra=("--spike-policy", "skip", "--rerun-mode", "report_stats"),
    ),
    make_cell("gpt2", Layout(pp=2, cp=2, dp=2, cp_comm_type="a2a", recompute=("full", "uniform", "1")), "uneven"),
]


FURTHER = [
    make_cell("gpt2", replace(SP, tp=4, pp=2, tp_overlap=TP_OVERLAP[1], recompute=("full", "uniform", "1"))),
    make_cell("gpt2", replace(SP, pp=2, dp=2, sharding="optim_grads")),
    make_cell("qwen", Layout(pp=2, cp=2, dp=2, sharding="optim"), "packed"),
    # Ranks send unequal numbers of rows.
    make_expert_cell("dropping", ExpertLayout(dp=2, ep=2), extra=("--moe-token-drop-policy", "position")),
    # Zeros in place of what other ranks send, through many norms.
    make_prediction_cell("gemma3-mtp", SP),
    *random.Random(12).sample(PARALLEL, 1),
]


@pytest.mark.default(2)
@pytest.mark.parametrize(
    "cell",
    [*CHOSEN, *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_a_layout_keeps_the_rules(cell: Cell) -> None:
    assert_safe([cell])


@pytest.mark.long
def test_the_whole_matrix_keeps_the_rules() -> None:
    assert_safe(PARALLEL)


@pytest.mark.long
def test_random_configurations_keep_the_rules() -> None:
    assert_safe([cell for cell in fuzz(0, 300) if cell.world_size > 1])


def test_receives_ahead_hang_without_a_warm_up_and_need_independent_progress_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = make_cell("gpt2", Layout(pp=2))
    monkeypatch.setattr(PipelineLinks, "post_receives_ahead", property(lambda links: True))
    (problem,) = communication_problems(record(cell))
    assert problem.startswith(f"{INDEPENDENT}2 of 2 ranks wait forever")
    monkeypatch.setattr(p2p_communication, "_connect", lambda *link: None)
    (problem,) = communication_problems(record(cell))
    assert problem.startswith("2 of 2 ranks wait forever")
    assert "recv with rank 1" in problem
    assert "recv with rank 0" in problem


@pytest.fixture(scope="module")
def tensor_parallel_logs() -> list[list[Operation]]:
    return record(make_cell("gpt2", SP))


@pytest.mark.parametrize("fault", ["exchange", "dtype", "size", "together", "absent"])
def test_a_fault_in_a_recording_is_found(tensor_parallel_logs: list[list[Operation]], fault: str) -> None:
    logs = [list(log) for log in tensor_parallel_logs]
    log = logs[1]
    at = next(i for i in range(len(log) // 2, len(log)) if log[i][0].signature != log[i + 1][0].signature)
    (call,) = log[at]
    if fault == "exchange":
        log[at : at + 2] = log[at : at + 2][::-1]
    elif fault == "absent":
        del log[at]
    else:
        changed = {"dtype": {"dtype": "int64"}, "size": {"num_bytes": 1}, "together": {"communicator": "another"}}
        log[at] = (replace(call, **changed[fault]),)  # type: ignore[arg-type]
    assert communication_problems(tensor_parallel_logs) == []
    assert communication_problems(logs) != []


def test_a_recording_has_set_up_steps_evaluation_and_objects(tensor_parallel_logs: list[list[Operation]]) -> None:
    kinds = [call.kind for operation in tensor_parallel_logs[0] for call in operation]
    assert {"all_gather_object", "allgather_base", "reduce_scatter_base", "allreduce", "broadcast"} <= set(kinds)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "layout", [SP, Layout(pp=2, virtual_stages=2, dp=2, sharding="optim_grads", overlap=True)], ids=["sp", "overlap"]
)
def test_a_second_step_sends_what_the_first_does(layout: Layout) -> None:
    config = resolve_cell(make_cell("gpt2", layout).flags, layout.world_size, "bfloat16")
    parts = (pretrain_gpt.provide_model, pretrain_gpt.forward_step)
    none, one, two = (record_run(config, 0, *parts, num_steps=number) for number in range(3))
    begin = next(number for number, (ours, theirs) in enumerate(zip(none, one)) if ours != theirs)
    end = begin + len(one) - len(none)
    assert two == [*one[:end], *one[begin:end], *one[end:]]


def test_a_recorder_is_told_of_groups_rings_reductions_and_threads() -> None:
    recorder = CollectiveRecorder()
    with stand_in(1, 4, recorder):
        state = create_parallel_state(ParallelSizes(tp=2), observer=recorder)
        assert state.dp.handle is not None
        collectives.all_reduce(torch.zeros(3), state.tp, "max")
        collectives.start_ring_exchange(torch.zeros(5), state.dp).wait()
        collectives.broadcast_object("anything", state.tp)
        for sent, received in (((2, 1), (3, 0)), ((0, 0), (2, 1))):
            # Each rank has numbers of its own, or nothing to send; what all must agree on is a row.
            rows_of_all, _ = collectives.all_to_all_rows(torch.zeros(sum(sent), 7), sent, received, state.tp)
            assert torch.equal(rows_of_all, torch.zeros(3, 7))
        thread = threading.Thread(target=collectives.all_reduce, args=(torch.zeros(3), state.tp))
        thread.start()
        thread.join()
    tp, dp, reduced, ring, told, rows, no_rows, stray = recorder.operations
    assert [(made.kind, made.new_ranks) for made, *_ in (tp, dp)] == [("new_group", (0, 1)), ("new_group", (1, 3))]
    assert reduced == (Call("allreduce", reduced[0].communicator, (0, 1), 12, "float32", "max"),)
    assert [(call.kind, call.peer, call.num_bytes) for call in ring] == [("send", 3, 20), ("recv", 3, 20)]
    assert [call.kind for call in told] == ["broadcast_object_list"]
    assert rows == no_rows
    assert [(call.kind, call.num_bytes, call.dtype) for call in rows] == [("alltoall_base", 28, "float32")]
    assert [call.in_other_thread for call in stray] == [True]


@pytest.mark.full
def test_the_command_replays_cells_and_refuses_what_cannot_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for others in ("expert", "prediction", "latent", "attention", "sharding", "recipe", "odd", "hybrid"):
        monkeypatch.setattr(verify_parallelism, f"{others}_matrix", list)
    command = ["--communication", "--filter", "pp2 zero-bubble offload", "--shape", "gpt2", "--max-world-size", "2"]
    kept = "gpt2 plain tp1 pp2 zero-bubble cp1 dp1 recompute-selective-core_attn-layernorm-mlp offload-2"
    assert verify_parallelism.main(command) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"passed  {kept}",
        f"passed  {kept} --hidden-dropout 0.2 --attention-dropout 0.15",
        "2 passed, 0 failed, 0 rejected at parse time",
    ]
    broken = replace(make_cell("gpt2", Layout(pp=3)), name="broken")
    monkeypatch.setattr(verify_parallelism, "matrix", lambda: [broken])
    assert verify_parallelism.main(["--communication"]) == 1
    assert capsys.readouterr().out.endswith("0 passed, 0 failed, 1 rejected at parse time\n")
    monkeypatch.setattr(verify_parallelism, "matrix", lambda: [make_cell("gpt2", Layout(pp=2))])
    monkeypatch.setattr(PipelineLinks, "post_receives_ahead", property(lambda links: True))
    assert verify_parallelism.main(["--communication"]) == 1
    assert INDEPENDENT in capsys.readouterr().out


def test_a_cell_that_cannot_be_recorded_does_not_end_the_replay_of_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise TrainingError("no parameter was changed\na gradient is not finite")

    cells = [make_cell("gpt2", Layout(dp=2)), make_cell("gpt2", Layout(tp=2))]
    monkeypatch.setattr(verify_parallelism, "choose_cells", lambda arguments: cells)
    monkeypatch.setattr(collective_recorder, "record_cell", fail)
    assert verify_parallelism.main(["--communication"]) == 1
    reasons = ["        no parameter was changed", "        a gradient is not finite"]
    assert capsys.readouterr().out.splitlines() == [
        *(line for cell in cells for line in (f"failed  {cell.name}", *reasons)),
        "0 passed, 2 failed, 0 rejected at parse time",
    ]


def record_generation(rank: int, tp: int, pp: int) -> list[Operation]:
    recorder = CollectiveRecorder()
    with stand_in(rank, tp * pp, recorder):
        state = create_parallel_state(ParallelSizes(tp=tp, pp=pp), observer=recorder)
        config = odd_config()
        model = build(config, state.tp, contents=inference_stage(config.num_layers, pp, state.pp.rank))
        links = p2p_communication.create_pipeline_links(state.pp) if pp > 1 else None
        engine = InferenceEngine(model, state, links, max_batch_size=2)
        sampling = SamplingConfig(greedy=True)
        request = GenerationRequest(prompts=((3, 1, 4), (9,), (2, 2)), max_new_tokens=3, sampling=sampling)
        engine.generate(request, is_cancelled=lambda: False)
    return recorder.operations


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 2)])
def test_generation_keeps_the_rules(tp: int, pp: int) -> None:
    logs = [record_generation(rank, tp, pp) for rank in range(tp * pp)]
    assert communication_problems(logs) == []
    assert min(map(len, logs)) > 3


@pytest.mark.parametrize("pp", [3, 4])
def test_stages_without_a_part_in_the_embedding_group_must_make_one_too(
    monkeypatch: pytest.MonkeyPatch, pp: int
) -> None:
    def set_up() -> list[list[Operation]]:
        logs = []
        for rank in range(pp):
            recorder = CollectiveRecorder()
            with stand_in(rank, pp, recorder):
                state = create_parallel_state(ParallelSizes(pp=pp), observer=recorder)
                p2p_communication.create_pipeline_links(state.pp, device=Device("cpu").torch_device)
            logs.append(recorder.operations)
        return logs

    assert communication_problems(set_up()) == []
    make = Communicators.make
    monkeypatch.setattr(
        Communicators, "make", lambda self, ranks, *options: make(self, ranks) if len(ranks) > 1 else None
    )
    assert communication_problems(set_up()) != []
