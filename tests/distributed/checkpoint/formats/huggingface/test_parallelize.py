"""A Hugging Face model, cut over ranks or spread over spawned processes, computes what transformers computes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.parallelize import SpawnedModel, load_hugging_face_model, parallelize
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.native import NativeSource
from megatron.checkpoint.inference_model import load_model_from
from megatron.core.collectives import all_gather_last_dim
from megatron.core.device import Device
from megatron.core.dist_checkpointing.planner import model_tensors
from megatron.core.errors import CheckpointError, ConfigurationError, MegatronError
from megatron.core.inference.engine import generate
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state, describe_parallel_state
from megatron.core.sharding import spec_of
from tests.harness.distributed import run_distributed
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY, launch_prefix
from tests.unit.checkpoint.formats.huggingface.tiny_models import (
    KINDS,
    folder_bytes,
    import_transformers,
    make_model,
    save_model,
    their_greedy_tokens,
    their_logits,
    tokens_of,
)
from tests.unit.core.dist_checkpointing.toy import save_tensors

TOLERANCE = 1e-5
"""How far logits may be off, relative to the largest."""
# Of so many tokens at least so many are different.
GREEDY_TOKENS, LEAST_DISTINCT = 16, 6
LONG_GREEDY_TOKENS, LEAST_DISTINCT_OF_LONG = 64, 10
# Of two key-value heads four ranks share each.
SIZES = {kind: (1, 2, 4) if kind in ("llama_tied", "qwen_tied", "gpt2_untied") else (1, 2) for kind in KINDS}
LENGTHS = {
    "gpt2": 300,
    "neo": 300,
    "ernie4_5": 200,
    "granite_hybrid_dense": 200,
    "falcon_h1": 200,
    "jais2": 150,
} | dict.fromkeys(("gpt2_untied", "llama_tied", "qwen_tied"), 80)
"""Where other than 400, which is long enough for the slow rotary frequencies to turn far. At 400 positions the
logits of transformers' ERNIE differ by 2.2e-5 from those in float64, and ours by 4e-6: it computes angles in float32.
Those of Jais 2 differ by 1.9e-5, and ours by 2.1e-6.
"""


def prompt_of(kind: str) -> list[int]:
    return tokens_of(kind, 1, 9)[0].tolist()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor, list[int]]]:
    """Return of every kind of model its folder, and what transformers computes and writes with it."""
    results = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("models") / kind
        model = save_model(kind, folder)
        logits = their_logits(model, tokens_of(kind, 2, LENGTHS.get(kind, 400)))
        tokens = their_greedy_tokens(model, prompt_of(kind), GREEDY_TOKENS)
        assert len(set(tokens)) >= LEAST_DISTINCT, f"{kind} repeats itself: agreeing with it would mean little"
        results[kind] = (folder, logits, tokens)
    return results


def parallelize_cached(cache: str) -> tuple[int, int]:
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = cache
    return parallelize("org/name").tp.size, parallelize("org/name@main").tp.size


def test_ranks_load_a_model_of_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    repository = tmp_path / "models--org--name"
    save_model("llama31", repository / "snapshots" / ("a" * 40))
    (repository / "snapshots" / ("a" * 40) / "vocab.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert run_distributed(2, parallelize_cached, str(tmp_path)) == [(2, 2), (2, 2)]


def compute(kind: str, folder: Path, num_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Return our logits ``[b, s, v]`` and greedy tokens, on as many ranks as there are."""
    model = parallelize(folder)
    tokens = tokens_of(kind, 2, LENGTHS.get(kind, 400))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        logits = all_gather_last_dim(model(tokens, positions), model.tp)[..., : model.config.vocab_size]
    state = create_parallel_state(ParallelSizes(tp=model.tp.size))
    (written,) = generate(model, [prompt_of(kind)], num_tokens, SamplingConfig(greedy=True), None, state)
    return logits.transpose(0, 1), written


def compute_all(folders: dict[str, Path], counts: dict[str, int]) -> dict[str, tuple[torch.Tensor, list[int]]]:
    return {kind: compute(kind, folder, counts[kind]) for kind, folder in folders.items()}


@pytest.mark.full
@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.long), 4])
def test_logits_and_greedy_tokens_are_those_of_transformers(expected: Any, tp: int) -> None:
    kinds = [kind for kind in KINDS if tp in SIZES[kind]]
    folders = {kind: expected[kind][0] for kind in kinds}
    # Each token waits for both processes in every layer. The long tests write longer texts.
    counts = dict.fromkeys(kinds, {2: 4, 4: 8}[tp])
    for results in run_distributed(tp, compute_all, folders, counts, timeout_s=120.0):
        for kind in kinds:
            _, logits, tokens = expected[kind]
            ours, written = results[kind]
            assert ours.dtype == torch.float32
            difference = ((ours - logits).abs().max() / logits.abs().max()).item()
            assert difference <= TOLERANCE, f"{kind}: {difference}"
            assert written == tokens[: counts[kind]], kind


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_of_one_process_is_that_of_transformers(expected: Any, kind: str) -> None:
    folder, logits, _ = expected[kind]
    tokens = their_greedy_tokens(make_model(kind), prompt_of(kind), LONG_GREEDY_TOKENS)
    assert len(set(tokens)) >= LEAST_DISTINCT_OF_LONG
    ours, written = compute(kind, folder, LONG_GREEDY_TOKENS)
    assert (ours - logits).abs().max() <= TOLERANCE * logits.abs().max()
    assert written == tokens


@pytest.mark.full
def test_the_scaling_of_the_rotary_frequencies_matters_here(expected: Any, tmp_path: Path) -> None:
    """Without it the same weights give other logits: the agreement above would not be possible by chance."""
    folder = Path(shutil.copytree(expected["llama31"][0], tmp_path / "model"))
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(values))
    logits, _ = compute("llama31", folder, 1)
    assert (logits - expected["llama31"][1]).abs().max() > 0.05 * expected["llama31"][1].abs().max()


def bytes_and_parameters(folder: Path) -> tuple[int, int]:
    """Return the bytes that this rank read, and those of the real values that it holds."""
    state = create_parallel_state(ParallelSizes(tp=dist.get_world_size()))
    source = HuggingFaceSource(folder)
    model = load_model_from(source, state, Device("cpu"))
    held = sum(
        shard.global_box.num_elements * parameter.element_size()
        for parameter in model.parameters()
        for shard in spec_of(parameter).shards
    )
    return source.files.bytes_read, held


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "llama31"])
def test_a_rank_reads_what_it_holds_and_no_more(expected: Any, kind: str) -> None:
    for read, held in run_distributed(2, bytes_and_parameters, expected[kind][0]):
        assert read == held


def save_cut_model(folder: Path, target: Path) -> tuple[int, int]:
    """Load a model over all ranks, save it as training does, and return the rows of its embedding: all, and padded."""
    model = parallelize(folder)
    state = create_parallel_state(ParallelSizes(tp=model.tp.size))
    source = HuggingFaceSource(folder)
    save_tensors(target, model_tensors([model]), source.common, state)
    return model.config.vocab_size, model.config.padded_vocab_size


@pytest.mark.parametrize("tp", [1, 2])
def test_a_padded_vocabulary_comes_back_with_its_real_rows(tmp_path: Path, tp: int) -> None:
    """Through the weights of a model on its ranks, into a checkpoint and out: 50257 rows again, byte for byte."""
    (tmp_path / "saved").mkdir()
    save_model("gpt2", tmp_path / "model", vocab_size=50257, n_embd=12, n_layer=1)
    sizes = run_distributed(tp, save_cut_model, tmp_path / "model", tmp_path / "saved")
    assert sizes == [(50257, {1: 50304, 2: 50432}[tp])] * tp
    write_hugging_face(NativeSource(tmp_path / "saved"), tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors")["transformer.wte.weight"].shape == (50257, 12)
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "model")


@pytest.mark.parametrize("kind", ["llama_tied", "qwen_tied"])
def test_ranks_that_share_a_key_value_head_give_the_same_bytes_back(expected: Any, tmp_path: Path, kind: str) -> None:
    (tmp_path / "saved").mkdir()
    run_distributed(2, save_cut_model, expected[kind][0], tmp_path / "saved")
    write_hugging_face(NativeSource(tmp_path / "saved"), tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(expected[kind][0])


def compute_loaded(folders: dict[str, Path]) -> dict[str, tuple[list[int], int]]:
    """Return the greedy tokens of models that transformers has loaded, and how many values their layers hold here."""
    transformers = import_transformers()
    results = {}
    for kind, folder in folders.items():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model = parallelize(theirs, num_gpus=2)
        state = create_parallel_state(ParallelSizes(tp=model.tp.size))
        (tokens,) = generate(model, [prompt_of(kind)], GREEDY_TOKENS, SamplingConfig(greedy=True), None, state)
        half = parallelize(theirs, num_gpus=2, fp16=True)
        assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}
        results[kind] = (tokens, sum(parameter.numel() for parameter in model.decoder.parameters()))
    return results


@pytest.mark.full
def test_a_loaded_model_is_cut_as_its_folder_is(expected: Any) -> None:
    folders = {kind: expected[kind][0] for kind in ("neo", "neox", "llama31")}
    for results in run_distributed(2, compute_loaded, folders, timeout_s=120.0):
        for kind, (tokens, num_values) in results.items():
            assert tokens == expected[kind][2], kind
            whole = parallelize(folders[kind])
            assert num_values < 0.6 * sum(parameter.numel() for parameter in whole.decoder.parameters())


@pytest.mark.default(16)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_memory_is_read_as_its_folder_is(expected: Any, kind: str) -> None:
    loaded = load_hugging_face_model(make_model(kind), describe_parallel_state(0, 1), Device("cpu"))
    for ours, read in zip(loaded.parameters(), parallelize(expected[kind][0]).parameters(), strict=True):
        assert torch.equal(ours, read)


def test_what_cannot_be_parallelized_is_refused_in_one_line(expected: Any) -> None:
    folder = expected["neo"][0]
    state = describe_parallel_state(0, 1)
    with pytest.raises(
        ConfigurationError, match=r"^num_gpus=4, but the number of processes is 1; start one .* or omit num_gpus$"
    ):
        parallelize(folder, state, num_gpus=4)
    with pytest.raises(ConfigurationError, match=r"^num_gpus=0 is not positive; use 1 or more, or omit it$"):
        parallelize(folder, num_gpus=0)
    with pytest.raises(ConfigurationError, match=r"attention heads are not divisible by tensor-parallel size 5; .*"):
        parallelize(folder, num_gpus=5)
    with pytest.raises(ConfigurationError, match=r'^fp16=True and params_dtype="bfloat16" contradict each other'):
        parallelize(folder, fp16=True, params_dtype="bfloat16")
    with pytest.raises(
        ConfigurationError,
        match=r"^a int is neither the path of a model folder nor a transformers model; pass one of these$",
    ):
        parallelize(3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"has no values \(it is on the meta device\); load the model's weights$"):
        parallelize(make_model("gpt2").to("meta"))


TWO_LINES = """
import sys
from megatron.checkpoint.formats.huggingface.parallelize import parallelize
model = parallelize(sys.argv[1])
import torch, torch.distributed as dist
rows = model.embedding.word_embeddings.weight.shape[0]
line = f"rank {model.tp.rank} of {model.tp.size}: {rows} rows, world {dist.get_world_size()}"
# One write: without a buffer print makes two of it, and the other rank's line comes between.
sys.stdout.write(line + "\\n")
dist.destroy_process_group()
"""


@pytest.mark.long
def test_two_lines_of_python_under_torchrun(expected: Any, tmp_path: Path) -> None:
    """The processes meet by themselves."""
    (tmp_path / "two_lines.py").write_text(TWO_LINES)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [*launch_prefix(2), str(tmp_path / "two_lines.py"), str(expected["gpt2"][0])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")) == [
        "",
        "rank 0 of 2: 128 rows, world 2",
        "rank 1 of 2: 128 rows, world 2",
    ]


def test_a_model_can_be_loaded_in_another_precision(expected: Any) -> None:
    state = describe_parallel_state(0, 1)
    model = load_hugging_face_model(expected["qwen_tied"][0], state, Device("cpu"), params_dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    exact = load_hugging_face_model(expected["qwen_tied"][0], state, Device("cpu"))
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


def test_a_model_that_cannot_be_cut_is_refused(expected: Any) -> None:
    folder = expected["llama31"][0]
    with pytest.raises(ConfigurationError, match="6 attention heads are not divisible by tensor-parallel size 4"):
        load_hugging_face_model(folder, describe_parallel_state(0, 4, ParallelSizes(tp=4)), Device("cpu"))


BEAMS = {"num_beams": 5, "no_repeat_ngram_size": 4}


@pytest.fixture(scope="module")
def pair(expected: Any) -> Iterator[tuple[Any, SpawnedModel]]:
    """Return a model of transformers, and the same from its folder over two processes."""
    theirs = make_model("neo").eval()
    ours = parallelize(expected["neo"][0], num_gpus=2)
    assert isinstance(ours, SpawnedModel)
    yield theirs, ours
    ours.close()


@pytest.mark.full
@pytest.mark.parametrize("how", [{}, BEAMS], ids=["greedy", "beams"])
def test_texts_are_those_of_transformers(pair: tuple[Any, SpawnedModel], how: dict[str, Any]) -> None:
    theirs, ours = pair
    inputs = {"input_ids": tokens_of("neo", 2, 9)}
    expected = theirs.generate(**inputs, attention_mask=torch.ones(2, 9).long(), max_length=21, pad_token_id=0, **how)
    assert torch.equal(ours.generate(**inputs, max_length=21, pad_token_id=0, **how), expected)
    assert expected.shape == (2, 21)


@pytest.mark.full
def test_an_end_token_is_a_part_of_its_text_and_padding_follows(pair: tuple[Any, SpawnedModel]) -> None:
    _, ours = pair
    ids = tokens_of("neo", 2, 9)
    whole = ours.generate(ids, max_new_tokens=6)
    end = int(whole[0, 10])
    assert end not in whole[1, 9:].tolist()
    cut = ours.generate(ids, max_new_tokens=6, eos_token_id=end, pad_token_id=3)
    assert torch.equal(cut[1], whole[1])
    assert cut[0, 9:].tolist() == [*whole[0, 9:11].tolist(), 3, 3, 3, 3]
    # A prompt that is filled up on the left is continued as it is alone.
    padded = torch.cat([torch.zeros(1, 2, dtype=ids.dtype), ids[1:]], dim=1)
    mask = (torch.arange(11) >= 2).long()[None]
    assert torch.equal(ours.generate(padded, mask, max_new_tokens=6)[:, 2:], whole[1:])


@pytest.mark.parametrize("how", [{}, {"num_beams": 3, "early_stopping": True}], ids=["greedy", "beams"])
def test_of_several_end_tokens_a_text_has_the_one_that_ended_it(
    pair: tuple[Any, SpawnedModel], how: dict[str, Any]
) -> None:
    theirs, ours = pair
    ids = tokens_of("neo", 2, 9)
    mask = torch.ones(2, 9).long()
    whole = theirs.generate(ids, attention_mask=mask, max_new_tokens=6, pad_token_id=3, eos_token_id=[], **how)
    end = int(whole[0, 10])
    absent = next(token for token in range(64) if token not in whole)
    given = {"max_new_tokens": 6, "pad_token_id": 3, "eos_token_id": [absent, end], **how}
    expected = theirs.generate(ids, attention_mask=mask, **given)
    assert end in expected[0, 9:]
    assert torch.equal(ours.generate(ids, **given), expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"eos_token_id": 7', "is not valid JSON"),
        ("[7]", "contains a JSON list; an object is expected"),
        ('{"eos_token_id": "7"}', "eos_token_id is '7'; a token id or a list of token ids is expected"),
    ],
)
def test_settings_without_end_tokens_are_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json:? {said}"):
        SpawnedModel(tmp_path, 2)


def test_draws_follow_the_generator_of_the_program(pair: tuple[Any, SpawnedModel]) -> None:
    _, ours = pair
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(ours.generate(tokens_of("neo", 1, 9), max_new_tokens=12, do_sample=True, top_p=0.9))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_wrong_requests_are_refused_and_others_go_on(pair: tuple[Any, SpawnedModel]) -> None:
    _, ours = pair
    ids = tokens_of("neo", 1, 9)
    with pytest.raises(ConfigurationError, match=r"prompt 1 of 1"):
        ours.generate(ids + 10**6, max_new_tokens=2)
    with pytest.raises(ConfigurationError, match=r"^-1 tokens to generate is not positive"):
        ours.generate(ids, max_length=8)
    with pytest.raises(ConfigurationError, match=r"^do_sample=True and num_beams exclude each other"):
        ours.generate(ids, do_sample=True, num_beams=2)
    with pytest.raises(
        ConfigurationError, match=r"input_ids has shape \[9\] and attention_mask has shape \[9\]; both must be"
    ):
        ours.generate(ids[0])
    assert ours.generate(ids, max_new_tokens=2).shape == (1, 11)


def test_the_death_of_a_process_is_reported_and_ends_all(pair: tuple[Any, SpawnedModel]) -> None:
    """The last test: its model is gone."""
    _, ours = pair
    ids = tokens_of("neo", 1, 9)
    workers = ours.pool._workers
    workers[1].kill()
    with pytest.raises(MegatronError, match=r"^process 1 of 2 was killed by SIGKILL; call parallelize again$"):
        ours.generate(ids, max_new_tokens=2)
    assert all(worker.poll() is not None for worker in workers)
    ours.close()
    with pytest.raises(ConfigurationError, match=r"^the model's processes have ended; call parallelize again$"):
        ours.generate(ids, max_new_tokens=2)
