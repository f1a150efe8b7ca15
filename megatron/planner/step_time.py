"""How long a training step takes, by part: the slowest stage's micro-batches, the bubble, and what comes at the end."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulator import Durations, simulate
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.layer_kinds import LayerKind, layer_kinds, layer_numbers
from megatron.planner.layer_time import LayerTime, end_times, layer_time
from megatron.planner.links import Links
from megatron.planner.piece_memory import ModelPieces, recomputed_groups
from megatron.planner.piece_time import MEMORY_SHARE
from megatron.planner.plan import Plan
from megatron.planner.replica_time import exposed_replica_seconds, exposed_seconds
from megatron.planner.stage_memory import StageState

_UPDATE_BYTES = 30
"""Bytes that an update reads and writes of a parameter: gradient, main parameter, two moments, weight."""
SIMULATED_ROUNDS = 2
"""Rounds of micro-batches after which one more takes every stage as long as the slowest."""


@dataclass(frozen=True)
class StepTime:
    """Hold the seconds of a step by part; ``slowest_stage`` is one micro-batch there.

    ``layer`` is in fp8 where any layers are; the first and the last ones that are not take their own time.
    ``exposed_data_parallel`` is what gradients and parameters travel while nothing is computed. ``host`` is what the
    host takes to launch the layers of the slowest stage. It overlaps with ``busy``, which is longer if the host is
    slower than the GPU (``is_host_bound``).
    """

    layer: LayerTime
    output_layer: float
    slowest_stage: float
    busy: float
    bubble: float
    neighbours: float
    exposed_data_parallel: float
    update: float
    host: float
    is_host_bound: bool

    @property
    def total(self) -> float:
        """Return all parts together."""
        return self.busy + self.bubble + self.neighbours + self.exposed_data_parallel + self.update


def step_time(
    plan: Plan, gpu: Gpu, implementation: Implementation, stages: Sequence[StageState], pieces: ModelPieces
) -> StepTime:
    """Return the time of a training step.

    ``stages`` are what every stage holds between steps, and ``pieces`` what `model_pieces` returned.
    """
    kinds = layer_kinds(plan.model, plan.seq_length)
    # The last layer of a kind: after a frozen embedding the first one computes less.
    layers = {
        kind: layer_time(plan, gpu, implementation, pieces.layers[number], kind, number)
        for kind, number in dict(zip(kinds, range(plan.model.num_layers))).items()
    }
    embedding, output = end_times(plan, gpu, implementation)
    chunks_of = [plan.stage_layout.chunks(stage) for stage in range(plan.parallel_sizes.pp)]
    seconds, own = [], []
    for chunks in chunks_of:
        own.append([each for chunk in chunks for each in _layers(plan, kinds, layers, chunk)])
        ends = sum(output * chunk.has_loss + embedding * chunk.has_embedding for chunk in chunks)
        seconds.append(sum(count * layer.total for count, layer in own[-1]) + ends)
    slowest, pp = max(seconds), len(seconds)
    of_slowest = own[seconds.index(slowest)]
    host = sum(count * (layer.host + layer.host_again) for count, layer in of_slowest)
    device = sum(count * layer.device for count, layer in of_slowest)
    num_layers = {len(layer_numbers(plan.model, chunk)) for chunks in chunks_of for chunk in chunks}
    if plan.pipeline_schedule == "zero-bubble" or (plan.pipeline_schedule == "1f1b" and len(num_layers) > 1):
        bubble = _simulated_bubble(plan, kinds, layers, seconds, output)
    else:
        bubble = (pp - 1) / plan.stage_layout.num_chunks * sum(seconds) / pp
    links = Links(gpu, plan.parallel_sizes)
    return StepTime(
        layer=layers[max(kind for kind in layers if not kind.is_further)],
        output_layer=output,
        slowest_stage=slowest,
        busy=plan.num_microbatches * slowest,
        bubble=bubble,
        neighbours=neighbours_seconds(plan, gpu, implementation),
        exposed_data_parallel=max(exposed_replica_seconds(plan, links, stage, slowest) for stage in stages),
        update=update_seconds(gpu, stages),
        host=plan.num_microbatches * host,
        is_host_bound=host > device,
    )


def neighbours_seconds(plan: Plan, gpu: Gpu, implementation: Implementation) -> float:
    """Return the time of exchanges between stages in a step, as far as computation does not hide them."""
    message = plan.num_rows * plan.model.hidden_size * ELEMENT_BYTES[plan.model.params_dtype]
    num_chunks = plan.stage_layout.num_chunks
    is_exposed = implementation.waits_for_neighbours and num_chunks == 1
    sent = Links(gpu, plan.parallel_sizes).pipeline_seconds(message)
    shown = sent if is_exposed else num_chunks * exposed_seconds(gpu, sent, sent)
    return plan.num_microbatches * shown


def update_seconds(gpu: Gpu, stages: Sequence[StageState]) -> float:
    """Return the time of the optimizer's update on the stage with most of its state."""
    return max(stage.optimizer for stage in stages) / 12 * _UPDATE_BYTES / (gpu.memory_bandwidth * MEMORY_SHARE)


def _simulated_bubble(
    plan: Plan,
    kinds: Sequence[LayerKind],
    layers: Mapping[LayerKind, LayerTime],
    seconds: Sequence[float],
    output: float,
) -> float:
    """Return what a step with one chunk a rank takes beyond the slowest stage's passes, by its list of actions.

    ``seconds`` are of one micro-batch on each stage. The output layer's passes are taken to be equally long.
    """
    durations = []
    for stage, total in enumerate(seconds):
        (chunk,) = plan.stage_layout.chunks(stage)
        own = [layers[kinds[number]] for number in chunk.layer_numbers]
        at_end = output / 3 * chunk.has_loss
        forward = sum(layer.forward for layer in own) + at_end
        weight = sum(layer.weight_gradients for layer in own) + at_end * (not plan.model.lora_rank)
        inputs = max(0.0, total - forward - weight)
        durations.append(
            Durations(forward=forward, backward=inputs + weight, backward_input=inputs, backward_weight=weight)
        )
    some = min(plan.num_microbatches, SIMULATED_ROUNDS * len(seconds))
    return _makespan(plan.pipeline_schedule, some, tuple(durations)) - some * max(seconds)


# A search asks again for layouts that differ in what their ranks share alone: context parallelism and micro-batches.
@functools.lru_cache(maxsize=1024)
def _makespan(schedule: str, num_microbatches: int, durations: tuple[Durations, ...]) -> float:
    return simulate(build_schedule(schedule, len(durations), num_microbatches), 1, durations).makespan


def _layers(
    plan: Plan,
    kinds: Sequence[LayerKind],
    layers: Mapping[LayerKind, LayerTime],
    chunk: StageContents,
) -> Iterator[tuple[int, LayerTime]]:
    """Yield how many layers of a chunk take which time: block recompute and offload take the first layers only."""
    model, numbers = plan.model, chunk.layer_numbers
    _, again = recomputed_groups(model, len(numbers))
    offloaded = min(len(numbers), model.num_offloaded_layers) if model.cpu_offloading else 0
    for kind, layer in layers.items():
        places = [place for place, number in enumerate(numbers) if kinds[number] == kind]
        for (is_again, is_offloaded), count in Counter((place < again, place < offloaded) for place in places).items():
            own = layer if is_again else layer.once
            yield count, own if is_offloaded else dataclasses.replace(own, offload=0.0)
