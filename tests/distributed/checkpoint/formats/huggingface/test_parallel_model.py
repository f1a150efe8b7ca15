"""`parallelize` changes a model of transformers in place: same tokens, same loss, and the plain model afterwards."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron import parallelize
from megatron.checkpoint.formats.huggingface import worker_pool
from megatron.core.errors import CheckpointError, ConfigurationError, MegatronError
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY
from tests.unit.checkpoint.formats.huggingface.tiny_models import (
    import_transformers,
    make_model,
    save_model,
    tokens_of,
)

README = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("EleutherAI/gpt-neo-2.7B")
tokenizer = AutoTokenizer.from_pretrained("EleutherAI/gpt-neo-2.7B")

from megatron import parallelize

parallelize(model, num_gpus=2, fp16=True, verbose='detail')

inputs = tokenizer("Parallelformers is", return_tensors="pt")

outputs = model.generate(
    **inputs,
    num_beams=5,
    no_repeat_ngram_size=4,
    max_length=15,
)

print(f"Output: {tokenizer.batch_decode(outputs)[0]}")

print(model.memory_allocated())
print(model.memory_reserved())
print(model.memory_chached())
model.cuda()
"""
"""Code of Parallelformers' README in its order; the import is the only change."""
BEAMS = {"num_beams": 5, "no_repeat_ngram_size": 4, "max_length": 15, "pad_token_id": 0}
WORDS = ("Parallelformers", "is", "a", "library", "for", "parallel", "programming", "[UNK]")


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return kept | {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(REPOSITORY)}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def all_end(pids: list[int], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are words, as the folder's tokenizer."""
    import tokenizers

    vocabulary = {word: number for number, word in enumerate(WORDS)} | {f"w{n}": n for n in range(len(WORDS), 101)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    import_transformers().PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)


@pytest.mark.long
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "huggingface.md").read_text()
    code = page.partition("## From Python")[2].split("```python\n")[1].partition("```")[0]
    assert "parallelize(model, num_gpus=2" in code
    folder = tmp_path / "EleutherAI" / "gpt-neo-2.7B"
    save_model("neo", folder, eos_token_id=0, bos_token_id=0)
    save_tokenizer(folder)
    command = [sys.executable, "-c", f"{code}\nprint(outputs.shape, loss.item() > 1)"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("torch.Size([1, 15]) True\n")


@pytest.mark.full
def test_the_code_of_the_readme_of_parallelformers_runs(tmp_path: Path) -> None:
    folder = tmp_path / "EleutherAI" / "gpt-neo-2.7B"
    save_model("neo", folder, eos_token_id=0, bos_token_id=0)
    save_tokenizer(folder)
    (tmp_path / "readme.py").write_text(README)
    result = subprocess.run(
        [sys.executable, "readme.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for rank in (0, 1):
        assert any(line.startswith(f"CPU:{rank} => 0.") and line.endswith("GB") for line in lines), result.stdout
    assert len([line for line in lines if line.startswith("peak resident memory: ")]) == 2
    (written,) = (line for line in lines if line.startswith("Output: "))
    assert written.startswith("Output: Parallelformers is ")
    assert len(written.split()) == 1 + 15
    assert len([line for line in lines if line.startswith("{'cpu:0': ") and "'cpu:1': " in line]) == 3
    assert "no CUDA device: the model is on the CPU" in result.stderr


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """Return a model of transformers, and an equal one that is parallel over two processes."""
    theirs, ours = make_model("neo"), make_model("neo")
    assert parallelize(ours, num_gpus=2) is ours
    yield theirs, ours
    ours.deparallelize()


def prompts(batch: int = 2, length: int = 9, padding: int = 0, side: str = "left") -> dict[str, torch.Tensor]:
    """Return prompts, of which the second has padding."""
    ids = tokens_of("neo", batch, length)
    mask = torch.ones_like(ids)
    if padding:
        mask[1, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask if side == "left" else mask.flip(1)}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    "how",
    [
        BEAMS,
        {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.3, "pad_token_id": 0},
        {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 3, "early_stopping": True, "pad_token_id": 0},
        {"max_new_tokens": 6, "do_sample": True, "top_k": 8, "pad_token_id": 0},
    ],
    ids=["beams", "greedy", "sequences", "sampling"],
)
def test_tokens_are_those_of_the_plain_model(pair: tuple[Any, Any], how: dict[str, Any], padding: int) -> None:
    found = []
    for model in pair:
        torch.manual_seed(3)
        found.append(model.generate(**prompts(padding=padding), **how))
    assert torch.equal(*found)
    assert found[0].shape[1] > 9
    assert len(found[0].unique()) > 8


def test_scores_and_stopping_rules_of_transformers_work(pair: tuple[Any, Any]) -> None:
    """They are arguments of ``generate`` that no other implementation has."""
    stop = int(pair[0].generate(**prompts(1), max_new_tokens=4, pad_token_id=0)[0, 11])
    found = []
    for model in pair:
        seen: list[int] = []

        def watch(ids: torch.Tensor, scores: torch.Tensor, seen: list[int] = seen, **_: Any) -> torch.Tensor:
            seen.append(ids.shape[1])
            return torch.full((len(ids),), int(ids[0, -1]) == stop)

        found.append(
            model.generate(
                **prompts(1),
                max_new_tokens=6,
                pad_token_id=0,
                stopping_criteria=[watch],
                return_dict_in_generate=True,
                output_scores=True,
            )
        )
        assert seen == [10, 11, 12]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert torch.allclose(torch.stack(found[0].scores), torch.stack(found[1].scores), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("padding", "side"), [(0, "left"), (4, "right")])
def test_loss_and_logits_are_those_of_the_plain_model(pair: tuple[Any, Any], padding: int, side: str) -> None:
    inputs = prompts(padding=padding, side=side)
    theirs, ours = (model(**inputs, labels=inputs["input_ids"]) for model in pair)
    assert abs(theirs.loss.item() - ours.loss.item()) < 1e-5
    assert torch.allclose(theirs.logits, ours.logits, rtol=0, atol=1e-4)
    assert ours.logits.dtype == torch.float32
    loss, logits = pair[1](**inputs, labels=inputs["input_ids"], return_dict=False)
    assert (loss, logits.shape) == (ours.loss, ours.logits.shape)
    for kept in (1, 3, torch.tensor([2, 5])):
        theirs, ours = (model(**inputs, logits_to_keep=kept).logits for model in pair)
        assert torch.allclose(theirs, ours, rtol=0, atol=1e-4)


@pytest.mark.full
def test_left_padding_gives_the_loss_of_the_fused_kernels_of_transformers() -> None:
    """The first token after the padding is predicted from a padded position, which attends to nothing."""
    for kind in ("gpt2", "llama31", "gpt_oss"):  # GPT-Neo has no fused kernel in transformers
        theirs, ours = make_model(kind), make_model(kind)
        assert kind == "gpt_oss" or theirs.config._attn_implementation == "sdpa"
        parallelize(ours, num_gpus=1)
        ids = tokens_of(kind, 2, 9)
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        for labels in (ids, ids.masked_fill(mask == 0, -100)):
            with torch.no_grad():
                expected, found = (model(ids, attention_mask=mask, labels=labels) for model in (theirs, ours))
            assert abs(expected.loss.item() - found.loss.item()) < 1e-5, kind
            assert torch.allclose(expected.logits, found.logits, rtol=0, atol=1e-4)
        ours.deparallelize()


def test_eager_attention_of_transformers_predicts_padding_otherwise(pair: tuple[Any, Any]) -> None:
    inputs = prompts(padding=3)
    first = inputs["attention_mask"].bool().clone()
    first[1, 3] = False  # predicted from padding
    labels = inputs["input_ids"].masked_fill(~first, -100)
    theirs, ours = (model(**inputs, labels=labels) for model in pair)
    assert abs(theirs.loss.item() - ours.loss.item()) < 1e-5
    real = inputs["attention_mask"].bool()
    assert torch.allclose(theirs.logits[real], ours.logits[real], rtol=0, atol=1e-4)


def test_positions_are_the_given_ones(pair: tuple[Any, Any]) -> None:
    inputs = prompts() | {"position_ids": torch.arange(20, 29)[None]}
    theirs, ours = (model(**inputs).logits for model in pair)
    assert torch.allclose(theirs, ours, rtol=0, atol=1e-4)
    plain = pair[1](**prompts()).logits
    assert not torch.allclose(plain, ours, rtol=0, atol=1e-2)


def test_what_cannot_be_followed_is_refused_in_one_line(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    ids = prompts()["input_ids"]
    for arguments, said in (
        ({"output_attentions": True}, r"^output_attentions: a parallel model computes logits and loss, .* omit it, or"),
        ({"use_cache": True, "inputs_embeds": ids}, r"^inputs_embeds, use_cache: .* omit them, or"),
        ({"attention_mask": torch.ones(2, 3)}, r"^attention_mask of shape \[2, 3\] with input_ids of \[2, 9\]; "),
        ({"position_ids": torch.arange(3)}, r"^position_ids of shape \[3\] with input_ids of \[2, 9\]; "),
        ({"position_ids": torch.arange(320, 329)}, r"^position 328 is beyond the model's 320 learned positions; "),
    ):
        with pytest.raises(ConfigurationError, match=said):
            ours(ids, **arguments)
    ours.config.output_hidden_states = True
    with pytest.raises(ConfigurationError, match=r"^output_hidden_states: a parallel model computes logits and loss"):
        ours(ids)
    ours.config.output_hidden_states = False
    with pytest.raises(ConfigurationError, match=r"^input_ids of shape \[9\]; a tensor of shape \[b, s\] is required$"):
        ours(ids[0])
    with pytest.raises(ConfigurationError, match=r"^token 1000012 is outside the vocabulary; the model knows"):
        ours(ids * 0 + 1000012)
    with pytest.raises(ConfigurationError, match=r"^past_key_values: the processes keep the KV cache; omit it"):
        ours.generate(ids, past_key_values=object())
    with pytest.raises(ConfigurationError, match=r"^the model is in training mode; .* call model.eval\(\)$"):
        ours.train()(ids)
    assert ours.eval()(ids).logits.shape == (2, 9, 101)
    with pytest.raises(ConfigurationError, match=r"^the model is parallel already; call model\.deparallelize"):
        parallelize(ours, num_gpus=2)


def test_threads_take_turns(pair: tuple[Any, Any]) -> None:
    """As in a web server."""
    theirs, ours = pair
    expected = theirs.generate(**prompts(), **BEAMS)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(ours.generate(**prompts(), **BEAMS))) for _ in range(3)]
    for thread in threads:
        thread.start()
    ours(**prompts())
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    assert all(torch.equal(each, expected) for each in found)


def test_after_an_interrupt_the_model_goes_on(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair
    plain_select = select.select

    def interrupt(*arguments: Any) -> Any:
        monkeypatch.setattr(select, "select", plain_select)
        raise KeyboardInterrupt

    monkeypatch.setattr(select, "select", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ours.generate(**prompts(), **BEAMS)
    assert torch.equal(ours.generate(**prompts(1, 7), **BEAMS), theirs.generate(**prompts(1, 7), **BEAMS))


def workers_of(model: Any) -> list[int]:
    """Return the process ids of the model's processes."""
    release = model.deparallelize.__closure__[0].cell_contents
    return [worker.pid for worker in release.__self__.pool._workers]


def test_the_plain_model_comes_back(pair: tuple[Any, Any]) -> None:
    """The processes end; a later call of ``parallelize`` starts others."""
    theirs, ours = pair
    pids = workers_of(ours)
    assert all(map(is_running, pids))
    assert set(vars(ours)) > set(vars(theirs))
    ours.deparallelize()
    assert all_end(pids)
    assert set(vars(ours)) == {*vars(theirs), "deparallelize"}
    ours.deparallelize()  # nothing more to do
    assert set(vars(ours)) == {*vars(theirs), "deparallelize"}
    assert ours.forward.__func__ is type(theirs).forward
    assert torch.equal(ours.generate(**prompts(), **BEAMS), theirs.generate(**prompts(), **BEAMS))
    ours(**prompts(), labels=prompts()["input_ids"]).loss.backward()


def test_a_failed_process_is_reported_in_one_line() -> None:
    ours = make_model("gpt2")
    ours.train()
    parallelize(ours, num_gpus=1, verbose=None)
    pool = ours.deparallelize.__closure__[0].cell_contents.__self__.pool
    with pytest.raises(MegatronError, match=r"^process 0 of 1 failed: KeyError: 'tokens'; call parallelize again$"):
        pool.ask({"kind": "logits"})
    assert all_end(workers_of(ours))
    with pytest.raises(ConfigurationError, match=r"^the model's processes have ended; call parallelize again$"):
        ours(tokens_of("gpt2", 1, 4))
    assert ours.half() is ours
    assert "forward" not in vars(ours)
    assert ours.dtype == torch.float16
    assert ours.training


def test_the_processes_end_with_the_last_reference() -> None:
    ours = parallelize(make_model("gpt2"), num_gpus=1)
    pids = workers_of(ours)
    del ours
    gc.collect()
    assert all_end(pids)


@pytest.mark.full
def test_a_port_in_use_is_named_and_its_user_is_not_disturbed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"^master_port={port}: the processes cannot meet at 127"):
            parallelize(make_model("gpt2"), num_gpus=2, master_port=port)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    before = store.num_keys()
    with pytest.raises(ConfigurationError, match=rf"^master_port={store.port}: "):
        parallelize(make_model("gpt2"), num_gpus=2, master_port=store.port)
    assert store.num_keys() - before <= 1, "the other program's keys are its own"


def test_waiting_for_a_process_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(worker_pool, "SIGN_OF_LIFE_S", 0.3)
    ours = parallelize(make_model("gpt2"), num_gpus=1)
    pid = workers_of(ours)[0]
    said = capsys.readouterr().err
    assert f"parallelize: waiting for process 0 of 1 (pid {pid}) to import torch; 0s\n" in said
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.6, os.kill, (pid, signal.SIGCONT)).start()
    ours(tokens_of("gpt2", 1, 4))
    assert f"parallelize: waiting for process 0 of 1 (pid {pid}) to compute; 0s\n" in capsys.readouterr().err
    ours.deparallelize()


WAITS = """
import os, sys, time
from transformers import AutoModelForCausalLM
from megatron import parallelize
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
parallelize(model, num_gpus=2)
pool = model.deparallelize.__closure__[0].cell_contents.__self__.pool
helper = os.fork()  # it holds the pipes to the processes open, as a data loader of the program does
if helper:
    print(*(worker.pid for worker in pool._workers), helper, flush=True)
time.sleep(60)
"""


@pytest.mark.full
def test_the_processes_end_with_a_killed_program(tmp_path: Path) -> None:
    save_model("gpt2", tmp_path / "model")
    command = [sys.executable, "-c", WAITS, str(tmp_path / "model")]
    program = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    *pids, helper = map(int, program.stdout.readline().split())
    assert len(pids) == 2
    assert all(map(is_running, pids))
    program.kill()
    program.wait()
    try:
        assert all_end(pids, 10.0)
    finally:
        os.kill(helper, signal.SIGKILL)
        program.stdout.close()


def test_a_wrong_call_is_refused_before_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_model("gpt2")
    with pytest.raises(ConfigurationError, match=r'^verbose=\'all\' is not "simple", "detail", True or None$'):
        parallelize(ours, num_gpus=2, verbose="all")
    with pytest.raises(ConfigurationError, match=r"6 attention heads are not divisible by tensor-parallel size 4"):
        parallelize(ours, num_gpus=4)
    monkeypatch.setattr("megatron.checkpoint.formats.huggingface.parallelize.num_cuda_devices", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"^num_gpus=2, but this program sees 1 CUDA devices; use at most 1, "):
        parallelize(ours, num_gpus=2)
    monkeypatch.undo()
    transformers = import_transformers()
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(CheckpointError, match=r"^BertForMaskedLM is not supported"):
        parallelize(transformers.BertForMaskedLM(config), num_gpus=2)
    assert "forward" not in vars(ours)


# Positions that are learned, rotary and in ALiBi, and count padding or not; the long tests have more families.
@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        *("gpt2", "mistral", "bloomz"),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("mpt_1b", "opt_125m", "xglm_7b", "llama31", "qwen3")),
    ],
)
def test_other_families_give_the_same_tokens_and_loss(kind: str) -> None:
    theirs, ours = make_model(kind), make_model(kind)
    parallelize(ours, num_gpus=2, master_port=29517, verbose=True)
    ids = tokens_of(kind, 2, 40)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    how = BEAMS | {"max_length": 50}
    expected = theirs.generate(ids, attention_mask=mask, **how)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **how), expected)
    losses = [model(ids, attention_mask=mask.flip(1), labels=ids).loss.item() for model in (theirs, ours)]
    assert abs(losses[0] - losses[1]) < 1e-5
    if kind == "bloomz":
        mask[0, 8] = 0
        with pytest.raises(ConfigurationError, match="attention_mask has padding between tokens"):
            ours(ids, attention_mask=mask)
    ours.deparallelize()
