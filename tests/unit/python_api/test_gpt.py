"""The Python API in one process: equal to pretrain_gpt.py, continued, interrupted, saved and loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron import GPT
from megatron.cli.train import ContinuedRun
from megatron.core import registry
from megatron.core.datasets import IndexedDatasetBuilder
from megatron.core.errors import CheckpointError, ConfigurationError, DataError, InputError
from megatron.data.input_files import cut_text
from megatron.python_api import TrainingHistory
from megatron.training import get_args, register_dataset, register_loss
from megatron.training.callbacks import Callback
from megatron.training.step_position import find_step
from megatron.training.step_samples import StepSamples
from tests.harness.byte_vocabulary import write_vocabulary
from tests.harness.forked_training import fork_training

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "hidden_dropout": 0.1,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 50,
}
TRAINING: dict[str, Any] = {
    "lr": 1e-2,
    "min_lr": 1e-3,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 1,
    "global_batch_size": 4,
    "micro_batch_size": 2,
}
TEXTS = ["the quick brown fox jumps over the lazy dog. " * 8] * 4


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write token files, and return their prefix."""
    prefix = tmp_path_factory.mktemp("data") / "tokens"
    documents = np.random.default_rng(0).integers(0, 50, (30, 40))
    with IndexedDatasetBuilder(prefix, "<u2") as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return prefix


@pytest.fixture(scope="module")
def reference(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of pretrain_gpt.py."""
    return command_line_losses(tokens, tmp_path_factory.mktemp("reference") / "metrics.jsonl")


def command_line_losses(tokens: Path, metrics: Path, *words: str) -> list[float]:
    flags = [word for name, value in {**MODEL, **TRAINING}.items() for word in (f"--{name.replace('_', '-')}", value)]
    data = ["--data-path", tokens, "--split", "1,0,0", "--eval-iters", "0", "--train-iters", "6"]
    return fork_training([*map(str, flags), *map(str, data), "--metrics-jsonl", str(metrics), *words]).check().losses()


def byte_model(folder: Path, **flags: Any) -> GPT:
    vocabulary, merges = write_vocabulary(folder)
    settings = {name: value for name, value in MODEL.items() if name not in ("tokenizer_type", "vocab_size")}
    return GPT.build({**settings, "vocab_file": vocabulary, "merge_file": merges, "seq_length": 32}, **flags)


def test_fit_has_the_losses_of_the_command_line_also_in_several_calls(tokens: Path, reference: list[float]) -> None:
    assert GPT.build(**MODEL).fit(tokens, 6, **TRAINING).losses == reference

    model = GPT.build(**MODEL)
    # The model is built again with the optimizer's flags, with the same weights and random numbers.
    model.generate([1, 2, 3], 4)
    first = model.fit(tokens, 2, train_iters=6, **TRAINING)
    model.generate([1, 2, 3], 4)
    model.evaluate(tokens)
    second, third = model.fit(steps=1), model.fit()
    assert first.losses + second.losses + third.losses == reference == model.history.losses
    assert (first.iterations, second.iterations, third.iterations) == ([1, 2], [3], [4, 5, 6])
    assert first.learning_rates == model.history.learning_rates[:2] != [first.learning_rates[0]] * 2
    with pytest.raises(ConfigurationError, match="all 6 iterations of train_iters are done; pass steps"):
        model.fit()
    assert model.fit(steps=2).iterations == [7, 8]


def test_a_saved_model_continues_on_the_command_line_and_in_python(
    tokens: Path, reference: list[float], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    model = GPT.build(**MODEL)
    model.fit(tokens, 3, train_iters=6, **TRAINING)
    model.save(folder)
    assert command_line_losses(tokens, tmp_path / "metrics.jsonl", "--load", str(folder)) == reference[3:]

    loaded = GPT.load(folder, ckpt_step=3)
    assert loaded.iteration == 3
    assert str(GPT.build(loaded.config)) == str(GPT.build(**MODEL))
    assert torch.equal(loaded.logits([1, 2, 3]), model.logits([1, 2, 3]))
    assert loaded.fit(tokens).losses == reference[3:]

    # The first loss does not depend on the optimizer, whose state is kept if it fits.
    changed = GPT.load(folder)
    losses = changed.fit(tokens, 3, clip_grad=0.01, lr=0.02).losses
    assert losses[0] == reference[3]
    assert losses != reference[3:]
    assert GPT.load(folder).fit(tokens, 3, optimizer="sgd").losses[0] == reference[3]

    words = [*ContinuedRun.read(str(folder)).words, "--metrics-jsonl", str(tmp_path / "continued.jsonl")]
    assert fork_training(words).check().losses() == reference[3:]
    assert GPT.load(folder).iteration == 6


def test_fit_saves_checkpoints_that_the_command_line_continues(
    tokens: Path, reference: list[float], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    model = GPT.build(**MODEL)
    model.fit(tokens, 2, train_iters=6, save=str(folder), **TRAINING)
    model.fit(steps=2)
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    assert command_line_losses(tokens, tmp_path / "metrics.jsonl", "--load", str(folder)) == reference[4:]


def test_texts_are_learned_and_a_hugging_face_model_has_the_same_logits(tmp_path: Path) -> None:
    model = byte_model(tmp_path, hidden_dropout=0.0)
    before = model.evaluate(TEXTS)
    history = model.fit(TEXTS, steps=20, lr=1e-2, global_batch_size=4)
    after = model.evaluate(TEXTS)
    assert after < before - 1.0
    assert history.losses[-1] < history.losses[0] - 1.0
    assert model.fit(steps=1).iterations == [21]

    text = "the quick"
    logits, loss = model.logits(text), model.loss(text)
    rows = torch.tensor([list(model.tokenizer.tokenize(text))])
    assert logits.shape == (1, rows.shape[1], 257)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1].float(), rows[0, 1:])
    torch.testing.assert_close(loss, expected)

    greedy = model.generate(text, 4, temperature=0)
    assert greedy.startswith(text)
    assert model.generate([text, "lazy"], 4, greedy=True)[0] == greedy
    assert model.generate(rows[0].tolist(), 4, temperature=0)[: rows.shape[1]] == rows[0].tolist()
    assert model.generate(text, 4, seed=1) == model.generate(text, 4, seed=1)
    assert model.generate(text, 4, num_beams=2).startswith(text)

    model.to_hf(tmp_path / "hf")
    assert not list(tmp_path.glob(".hf*"))
    assert torch.equal(GPT.load(tmp_path / "hf").logits(text), logits)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows).logits, logits, rtol=1e-4, atol=1e-4)
    # A converted checkpoint has no optimizer state.
    assert GPT.load(tmp_path / "hf").fit(TEXTS, steps=1, lr=1e-3).iterations == [1]


def test_every_kind_of_data_is_the_same_data(tokens: Path, tmp_path: Path) -> None:
    documents = np.random.default_rng(0).integers(0, 50, (30, 40))
    kinds: list[object] = [tokens, str(tokens), tokens.parent, documents, torch.tensor(documents), list(documents)]
    losses = [GPT.build(**MODEL).fit(data, 2, **TRAINING).losses for data in kinds]
    assert losses == [losses[0]] * len(kinds)
    kept = GPT.build(**MODEL)
    kept.fit(documents, 1, data_cache_path=str(tmp_path / "cache"), **{**TRAINING, "lr_warmup_iters": 0})
    assert list((tmp_path / "cache").glob("tokens-*.bin"))


def test_text_files_are_the_same_data_as_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    texts = list(cut_text(TEXTS[0]))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    kinds: list[object] = [texts, tmp_path / "a.txt", tmp_path / "a.jsonl"]
    losses = [byte_model(tmp_path).fit(data, 1, lr=1e-3).losses for data in kinds]
    assert losses == [losses[0]] * 3
    evaluated = [byte_model(tmp_path).evaluate(data) for data in kinds]
    assert evaluated == [evaluated[0]] * 3


def test_conversations_are_read_from_their_file(tmp_path: Path) -> None:
    roles = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the quick brown fox"}]
    (tmp_path / "talk.jsonl").write_text(f"{json.dumps({'messages': roles})}\n" * 20)
    model = byte_model(tmp_path, sft=True, seq_length=128)
    before = model.evaluate(tmp_path / "talk.jsonl")
    assert before > 1.0
    model.fit(tmp_path / "talk.jsonl", 4, lr=1e-2)
    assert model.evaluate(tmp_path / "talk.jsonl") < before
    assert model.fit(steps=1, split="9,1,0").iterations == [5]
    with pytest.raises(ConfigurationError, match="texts and tokens are no conversations, which sft needs"):
        model.fit(TEXTS, 1)
    with pytest.raises(ConfigurationError, match="texts and tokens are no conversations"):
        model.evaluate(np.zeros(200, np.int64))


class Rows:
    """A data set of a caller."""

    def __init__(self, as_dict: bool) -> None:
        self._rows = np.random.default_rng(0).integers(0, 50, (6, 17))
        self._as_dict = as_dict

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        return {"tokens": row[:-1], "labels": torch.tensor(row[1:])} if self._as_dict else torch.tensor(row)


def test_a_data_set_is_read_in_epochs() -> None:
    losses = []
    for as_dict in (False, True):
        model = GPT.build(**{**MODEL, "hidden_dropout": 0.0})
        rows = Rows(as_dict)
        alone = float(np.mean([float(model.loss(rows._rows[index])) for index in range(6)]))
        assert model.evaluate(rows) == pytest.approx(alone, abs=1e-5)
        losses.append(model.fit(rows, 4, **TRAINING).losses)
        assert model.config.data.dataloader_type == "cyclic"
        model.fit([[1, 2, 3] * 20], 1)
        assert model.config.data.dataloader_type == "single"
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_texts_continue_after_a_data_set_with_their_next_sample(tokens: Path, tmp_path: Path) -> None:
    training = {**TRAINING, "lr_warmup_iters": 0, "iterations_to_skip": [0]}
    model = GPT.build(**MODEL)
    model.fit(tokens, 2, **training)
    model.fit(Rows(as_dict=True), 1)
    model.fit(tokens, 1)
    model.save(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "iter_0000004" / "index.json").read_text())["common"]["progress"]
    data = record["train_data"]
    assert [(phase["start"], phase["data_sets"]) for phase in data["phases"]] == [(0, [0]), (8, []), (12, [0])]
    assert data["phases"][-1]["offsets"] == [8]
    assert [each["consumed_samples"] for each in data["data_sets"]] == [12]
    assert [(each["start"], each["end"]) for each in data["left_out"]] == [(0, 4)]
    with pytest.raises(
        DataError, match="step 3 did not read files, so its samples cannot be shown; the run read other"
    ):
        StepSamples(find_step(tmp_path / "run", 3, None, None), model.tokenizer, print)
    assert GPT.load(tmp_path / "run").fit(tokens, 1).iterations == [5]


def test_the_label_of_cross_entropy_is_excluded_from_the_loss() -> None:
    class Ignoring(Rows):
        def __getitem__(self, index: int) -> Any:
            item = super().__getitem__(index)
            return {**item, "labels": torch.where(torch.arange(16) < 12, -100, item["labels"])}

    class Masking(Rows):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "loss_mask": (np.arange(16) >= 12).astype(np.float32)}

    model = GPT.build(**{**MODEL, "hidden_dropout": 0.0})
    assert model.evaluate(Ignoring(as_dict=True)) == model.evaluate(Masking(as_dict=True))


def test_a_script_s_parts_train_from_python_with_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_SCRIPTS", [])
    register_loss("scaled", lambda inputs: inputs.cross_entropy() * get_args().global_batch_size)
    register_dataset("rows", lambda config, tokenizer: Rows(as_dict=True))
    training = {**TRAINING, "lr_warmup_iters": 0}
    flags = {**training, "dataset": "rows", "split": "1,0,0"}
    first = GPT.build(**MODEL)
    plain = first.fit(None, 1, **flags).losses
    first.fit([[1, 2, 3] * 20], 1)
    assert first.config.data.dataset is None
    model = GPT.build(**MODEL)
    model.fit([[1, 2, 3] * 20], 1, **training)
    with pytest.raises(ConfigurationError, match="data and dataset both name data; omit one"):
        model.fit([[1, 2, 3] * 20], 1, dataset="rows")
    model.fit(None, 1, dataset="rows", split="1,0,0")
    assert model.config.data.dataset == "rows"
    assert model.config.data.data_path == ()
    evaluated = model.evaluate([[1, 2, 3] * 20])
    model.save(tmp_path / "run")
    assert GPT.load(tmp_path / "run", dataset=None).evaluate([[1, 2, 3] * 20]) == evaluated
    (scaled,) = GPT.build(**MODEL).fit(None, 1, **flags, loss="scaled").losses
    assert scaled == pytest.approx(4 * plain[0])


class Interrupt(Callback):
    """Press Ctrl-C in the second iteration."""

    def before_step(self, run: Any) -> None:
        if run.train_state.iteration == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_step_and_the_model_continues(tokens: Path, reference: list[float]) -> None:
    model = GPT.build(**MODEL)
    # A test in the background starts with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.fit(tokens, 6, callbacks=[Interrupt()], **TRAINING)
        assert model.iteration == 2
        assert model.history.losses == reference[:2]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert model.fit(steps=4).losses == reference[2:]


class Fail(Callback):
    """Raise an error of the caller after the first iteration."""

    def after_step(self, run: Any, report: Any) -> None:
        raise ZeroDivisionError


def test_an_exception_leaves_a_usable_model(tokens: Path, reference: list[float]) -> None:
    model = GPT.build(**MODEL)
    with pytest.raises(ZeroDivisionError):
        model.fit(tokens, 6, callbacks=[Fail()], train_iters=6, **TRAINING)
    assert model.iteration == 1
    assert model.fit().losses == reference[1:]


def test_a_rollback_removes_iterations_and_evaluations_from_the_history() -> None:
    history = TrainingHistory([1, 2, 3], [3.0, 2.0, 1.0], [0.1] * 3, [1.0, None, 1.0], [(2, "a", 2.5), (3, "a", 1.5)])
    history.cut(2)
    kept = TrainingHistory([1, 2], [3.0, 2.0], [0.1] * 2, [1.0, None], [(2, "a", 2.5)])
    assert vars(history) == vars(kept)


def test_two_models_are_independent(tokens: Path, reference: list[float]) -> None:
    first, second = GPT.build(**MODEL), GPT.build(**MODEL)
    assert first.fit(tokens, 2, train_iters=6, **TRAINING).losses == reference[:2]
    assert second.fit(tokens, 6, **TRAINING).losses == reference
    assert first.fit().losses == reference[2:]


def test_a_model_is_built_from_each_kind_of_configuration(tmp_path: Path) -> None:
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in MODEL.items())
    file = tmp_path / "model.toml"
    file.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in MODEL.items()))
    models = [GPT.build(words), GPT.build(file), GPT.build(MODEL), GPT.build(**MODEL)]
    models.append(GPT.build(models[0].config))
    models.append(GPT.build(models[0].config.model, tokenizer_type="NullTokenizer", vocab_size=50))
    assert len({str(model) for model in models}) == 1
    assert str(models[0]) == "GPT(num_layers=2, hidden_size=16, vocab_size=51, iteration=0)"
    for model in models[1:]:
        assert torch.equal(model.logits([1, 2, 3]), models[0].logits([1, 2, 3]))
    overridden = GPT.build(f"{words} --swiglu", num_layers=1, swiglu=False)
    assert (overridden.config.model.num_layers, overridden.config.model.swiglu) == (1, False)
    names = [name for name, _ in models[0].named_parameters()]
    assert len(names) == len(set(names)) == len(list(models[0].parameters()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layer": 2}, "GPT.build: unknown key num_layer; did you mean num_layers?"),
        ({"config": "gpt2-345"}, "'gpt2-345' is neither a preset, a .toml or .yaml file, nor flags; did you mean"),
        ({"config": 3}, "GPT.build: config has the type int; pass a preset name"),
        ({"hidden_size": "wide"}, "--hidden-size wide: an integer is expected"),
        ({"swiglu": 1}, "GPT.build: swiglu = 1: true or false is expected"),
        ({"explain": True}, "GPT.build: explain belongs on the command line; omit it"),
        ({"load": "x"}, "GPT.build: load belongs elsewhere: GPT.load(folder) loads a checkpoint"),
        ({"config": "--load x"}, "GPT.build: load belongs elsewhere: GPT.load(folder) loads a checkpoint"),
        ({"finetune": True}, "GPT.build: finetune belongs elsewhere: it is a flag of GPT.load(folder, finetune=...)"),
        ({"config": "--inprocess-restart"}, "GPT.build: inprocess_restart belongs elsewhere: only pretrain_gpt.py"),
        ({"tokenizer": "nothing"}, "tokenizer='nothing' is neither a folder with tokenizer.json"),
    ],
)
def test_a_wrong_model_is_one_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        GPT.build(**{**MODEL, **arguments})
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.fixture(scope="module")
def untrained() -> GPT:
    return GPT.build(**MODEL)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": 3, "steps": 1}, ConfigurationError, "GPT.fit: data has the type int; pass a prefix of token files"),
        ({"data": "missing", "steps": 1}, ConfigurationError, "GPT.fit: there is no data missing; pass a prefix"),
        ({"data": "a text " * 1000, "steps": 1}, ConfigurationError, f"there is no data {'a text ' * 28}a te…; pass"),
        ({"data": [1, "a"], "steps": 1}, ConfigurationError, "GPT.fit: the list of data contains int, str; pass"),
        ({"data": np.zeros((2, 2)), "steps": 1}, ConfigurationError, "the dtype float64; pass integers of the shape"),
        ({"data": [[1, 2, 77] * 40], "steps": 1}, DataError, "contains token id 77, but the vocabulary has 51 ids"),
        ({"data": [["a"]], "steps": 1}, ConfigurationError, "dtype <U1; pass integers"),
        ({"callbacks": [print]}, ConfigurationError, "GPT.fit: callbacks is [<built-in function print>]; pass a list"),
        ({"callbacks": Callback()}, ConfigurationError, "pass a list of objects of subclasses of"),
        ({"steps": 0}, ConfigurationError, "GPT.fit: steps is 0; pass a whole number of 1 or more"),
        ({"data": [[1] * 40]}, ConfigurationError, "GPT.fit: the number of iterations is missing; pass steps"),
        ({"steps": 1}, ConfigurationError, "--data-path"),
        ({"steps": 1, "load": "x"}, ConfigurationError, "GPT.load(folder) loads a checkpoint"),
        ({"data": [[1] * 40], "steps": 1, "lrr": 1}, ConfigurationError, "GPT.fit: unknown key lrr; did you mean lr?"),
        ({"data": [[1] * 40], "steps": 1, "mock_data": True}, ConfigurationError, "data and mock_data both name data"),
        ({"data": [[1] * 40], "steps": 1, "num_layers": 3}, ConfigurationError, "num_layers is 2 in this model and"),
        ({"data": [[1] * 40], "steps": 1, "vocab_size": 60}, ConfigurationError, "vocab_size is 50 in this model and"),
        ({"data": [[1] * 40], "steps": 1, "seed": 3}, ConfigurationError, "seed is 1234 in this model and cannot"),
        ({"data": [[1] * 40], "steps": 2, "train_samples": 1}, ConfigurationError, "pass 1 steps or fewer, or more"),
    ],
)
def test_a_wrong_training_changes_nothing(
    untrained: GPT, arguments: dict[str, Any], error: type[InputError], message: str
) -> None:
    settings = untrained._settings
    with pytest.raises(error) as caught:
        untrained.fit(**{"lr": 1e-3, **arguments})
    assert message in str(caught.value)
    assert (untrained.iteration, untrained._settings) == (0, settings)


def test_wrong_prompts_and_tokens_are_errors(untrained: GPT) -> None:
    with pytest.raises(ConfigurationError, match="unknown argument topk; did you mean top_k"):
        untrained.generate([1], topk=3)
    with pytest.raises(ConfigurationError, match="unknown argument max_tokens; did you mean max_new_tokens"):
        untrained.generate([1], max_tokens=3)
    with pytest.raises(ConfigurationError, match=r"top_k is 1.5; pass a whole number"):
        untrained.generate([1], top_k=1.5)
    with pytest.raises(ConfigurationError, match="num_beams is 0; pass a whole number of 1 or more"):
        untrained.generate([1], num_beams=0)
    with pytest.raises(ConfigurationError, match="length_penalty and early_stopping are for beam search; pass"):
        untrained.generate([1], length_penalty=2.0)
    with pytest.raises(ConfigurationError, match="length_penalty is 'long'; pass a number"):
        untrained.generate([1], num_beams=2, length_penalty="long")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="temperature is 'hot'; pass a number"):
        untrained.generate([1], temperature="hot")
    with pytest.raises(ConfigurationError, match="pass a whole number of 1 or more"):
        untrained.generate([1], 1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the prompt is neither a text nor token ids"):
        untrained.generate([1, "a"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="outside the model's vocabulary"):
        untrained.logits([99])
    with pytest.raises(InputError, match="pass integers"):
        untrained.loss(torch.tensor([0.5, 1.5]))
    with pytest.raises(InputError, match="a last token is outside the model's vocabulary"):
        untrained.loss([1, 99])
    with pytest.raises(InputError, match="1 tokens have no next token"):
        untrained.loss([1])


def test_a_folder_without_a_checkpoint_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"GPT.load: missing does not exist; pass the folder that a run saved to"):
        GPT.load("missing")
    with pytest.raises(CheckpointError, match=f"GPT.load: {tmp_path} contains no checkpoint; pass the folder"):
        GPT.load(tmp_path, **MODEL)
    with pytest.raises(ConfigurationError, match=r"GPT.load: load belongs elsewhere"):
        GPT.load(tmp_path, load="x")
    with pytest.raises(ConfigurationError, match=r"GPT.load: skip_train belongs elsewhere: evaluate"):
        GPT.load(tmp_path, skip_train=True)


def test_flags_that_skip_the_training_are_rejected_by_fit() -> None:
    model = GPT.build("--skip-train", **MODEL)
    with pytest.raises(ConfigurationError, match=r"GPT.fit: skip_train belongs elsewhere"):
        model.fit([[1] * 40], 1, lr=1e-3)


def test_a_list_of_texts_and_an_empty_text_have_no_loss(tmp_path: Path) -> None:
    model = byte_model(tmp_path)
    with pytest.raises(InputError, match="the tokens are a list of texts; pass one text at a time"):
        model.loss(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the text has no tokens"):
        model.logits("")


def test_without_a_length_the_continuation_fills_the_context(untrained: GPT) -> None:
    first, second = untrained.generate([[1, 2, 3], [4]], stops_at_end=False)
    assert (len(first), len(second)) == (16, 14)
    beams = untrained.generate([1], num_beams=2, stops_at_end=False)
    assert len(beams) == 16


def test_adapters_are_not_written_as_a_hugging_face_model(tmp_path: Path) -> None:
    model = GPT.build(**MODEL, lora_rank=2)
    with pytest.raises(ConfigurationError, match="the model has LoRA adapters; save it, and merge them with"):
        model.to_hf(tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_wrong_sample_of_a_data_set_is_an_error() -> None:
    class Short(Rows):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[:16]

    message = "sample 0 of Short has 15 tokens with a label, but seq_length is 16; return 17 tokens, or a dict with 16"
    with pytest.raises(DataError, match=message):
        GPT.build(**MODEL).evaluate(Short(as_dict=False))
    with pytest.raises(DataError, match="sample 0 of Rows has no document_ids, which reset_attention_mask needs"):
        GPT.build(**MODEL, sft=True).evaluate(Rows(as_dict=True))


def test_importing_the_class_name_waits_for_torch() -> None:
    code = "import sys, megatron; assert 'torch' not in sys.modules; megatron.GPT; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
