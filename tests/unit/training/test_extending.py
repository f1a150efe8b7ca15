"""Registration from scripts: names, errors, command lines, configurations and formats."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import megatron.training
from megatron.checkpoint.formats.huggingface.family import model_features
from megatron.config import resolve_arguments
from megatron.config.arguments import build_parser
from megatron.core import registry
from megatron.core.config_base import config_from_dict, config_to_dict, with_fields
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTConfig, flags_without_argument
from megatron.core.process_group import single_rank_group
from megatron.core.registry import registered_names, registered_scripts
from megatron.core.tensor_parallel import LossInputs, initialize_parameter
from megatron.core.transformer import FeedForward, Norm, SelfAttention
from megatron.core.transformer.transformer_layer import make_attention
from megatron.training import (
    extending,
    import_script,
    register_activation,
    register_attention,
    register_loss,
    register_norm,
)
from tests.harness.training_run import REPOSITORY

WORDS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
    --micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 31
"""
FLAGS = tuple(WORDS.split())
MODEL = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=32)
MISSING = "pass the script that registers it with --script FILE, or run that script instead of pretrain_gpt.py"
ALONE = single_rank_group()


@pytest.fixture(autouse=True)
def nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start every test without registered names, and forget those that it registers."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_SCRIPTS", [])
    hook = sys.excepthook
    yield
    sys.excepthook = hook


class Scale(nn.Module):
    """A norm with a parameter that starts from 2."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def problems_of(*more: str) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*FLAGS, *more], 1)
    return caught.value.problems


def test_a_registered_name_is_accepted_and_shown() -> None:
    shown = "--activation-func {swiglu,geglu,quick_geglu,squared_relu,xielu,gelu,gelu_tanh,relu"
    assert f"{shown}}}" in build_parser().format_help()
    assert problems_of("--activation-func", "mish") == (
        "--activation-func mish: possible values are swiglu, geglu, quick_geglu, squared_relu, xielu, gelu, "
        "gelu_tanh, relu; a script that registers mish adds it (--script FILE)",
    )
    register_activation("mish", torch.nn.functional.mish)
    assert f"{shown},mish}}" in build_parser().format_help()
    config = resolve_arguments([*FLAGS, "--activation-func", "mish"], 1).config
    assert config.model.activation == "mish"
    assert not config.model.is_gated


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("swiglu", len, "activation swiglu is built in; register yours under another name"),
        ("mish", len, "activation mish is already registered; register yours under another name"),
        ("my act", len, "activation 'my act': a name of letters, digits, '_', '-' and '.' is expected"),
        ("--mish", len, "activation '--mish': a name of letters, digits, '_', '-' and '.' is expected"),
        ("tanh", "tanh", "activation tanh: a function or class is expected, not 'tanh'"),
    ],
)
def test_an_invalid_registration_is_rejected(name: str, value: object, problem: str) -> None:
    register_activation("mish", torch.nn.functional.mish)
    with pytest.raises(ConfigurationError) as caught:
        register_activation(name, value)  # type: ignore[arg-type]
    assert caught.value.problems == (problem,)


def test_a_script_with_an_invalid_registration_ends_with_one_line_without_importing_torch(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(
        "import sys\nfrom megatron.training import register_loss\nassert 'torch' not in sys.modules\n"
        "register_loss('cross_entropy', len)\n"
    )
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(REPOSITORY)}
    )
    problem = "error: loss cross_entropy is built in; register yours under another name\n"
    assert (found.returncode, found.stderr) == (2, problem)


def test_a_stored_configuration_needs_the_parts_of_the_model_only() -> None:
    register_activation("mish", len)
    register_loss("focal", len)
    values = config_to_dict(with_fields(MODEL, activation_func="mish", loss="focal"))
    assert config_from_dict(GPTConfig, values).activation == "mish"
    registry._REGISTERED.clear()
    with pytest.raises(ConfigurationError) as caught:
        config_from_dict(GPTConfig, values)
    assert caught.value.problems == (f"activation mish is not registered; {MISSING}",)
    register_activation("silu", len)
    with pytest.raises(ConfigurationError, match=re.escape("activation mish is not registered (registered: silu); ")):
        config_from_dict(GPTConfig, values)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "quick_geglu", "squared_relu", "xielu", "gelu", "gelu_tanh"])
def test_a_built_in_activation_is_recorded_as_its_flag(name: str) -> None:
    config = with_fields(MODEL, activation_func=name, ffn_hidden_size=0)
    assert (config.activation, config.activation_func) == (name, None)
    flags = {"gelu": ["--no-bias-gelu-fusion"], "gelu_tanh": ["--openai-gelu"]}
    words = flags.get(name, ["--" + name.replace("_", "-")])
    models = [resolve_arguments([*FLAGS, *more], 1).config.model for more in (words, ["--activation-func", name])]
    assert models[0] == models[1]
    assert not flags_without_argument(with_fields(config, geglu=False, xielu=False))


def test_an_activation_excludes_the_flags_of_others() -> None:
    register_activation("mish", len)
    for name in ("mish", "gelu"):
        expected = (f"--activation-func {name} and --swiglu exclude each other; omit one of them",)
        assert problems_of("--activation-func", name, "--swiglu") == expected


def test_a_gated_activation_is_counted_and_computed_like_swiglu() -> None:
    register_activation("silu_glu", torch.nn.functional.silu, gated=True)
    configs = [with_fields(MODEL, ffn_hidden_size=0, activation_func=name) for name in ("swiglu", "silu_glu")]
    assert configs[0].ffn_hidden_size == configs[1].ffn_hidden_size
    assert configs[0].forward_flops_per_sequence(8) == configs[1].forward_flops_per_sequence(8)
    x = torch.randn(4, 2, 32)
    results = []
    for config in configs:
        mlp = FeedForward(config, ALONE, "cpu")
        for parameter in mlp.parameters():
            initialize_parameter(parameter, seed=3)
        results.append(mlp(x).hidden)
    torch.testing.assert_close(*results)


def test_formats_reject_registered_parts_by_name() -> None:
    register_activation("mish", len)
    register_norm("scale", Scale)
    register_attention("gated", SelfAttention)
    register_loss("focal", len)
    own = with_fields(MODEL, activation_func="mish", normalization="scale", attention="gated", loss="focal")
    flags = {"--activation-func mish", "--normalization scale", "--attention gated", "--loss focal"}
    assert set(flags_without_argument(own)) == flags
    mine, plain = (model_features(config) for config in (own, MODEL))
    assert {name for name in plain if plain[name] != mine[name]} == {
        *("activation", "normalization", "norm_parameter_names", "attention")
    }
    saved = ("--save", "x", "--ckpt-format", "torch", "--normalization", "scale")
    assert problems_of(*saved) == (
        "--ckpt-format torch cannot store a model with --normalization scale, for which Megatron has no arguments; use "
        "--ckpt-format safetensors",
    )


def test_the_parameters_of_a_registered_norm_start_from_their_own_values() -> None:
    register_norm("scale", Scale)
    norm = Norm(
        "scale", 4, 1e-5, ALONE, partial_gradient=False, centered_weight=False, dtype=torch.bfloat16, device="cpu"
    )
    (weight,) = norm.parameters()
    initialize_parameter(weight, seed=1)
    assert weight.dtype == torch.bfloat16
    assert weight.tolist() == [2.0] * 4
    assert norm(torch.ones(4, dtype=torch.bfloat16)).tolist() == [2.0] * 4
    assert problems_of("--normalization", "scale", "--apply-layernorm-1p") == (
        "--apply-layernorm-1p is not supported with --normalization scale, which a script registered; omit it",
    )


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (
            torch.tensor(1.0),
            "the initial values of parameter weight are not one number; give it at least one dimension",
        ),
        (torch.arange(4.0), "the initial values of parameter weight are not one number"),
        (None, "it has a buffer, weight; only parameters are supported"),
    ],
)
def test_a_norm_that_cannot_be_initialized_is_rejected(start: torch.Tensor | None, problem: str) -> None:
    def make(width: int, epsilon: float) -> nn.Module:
        module = nn.Module()
        if start is None:
            module.register_buffer("weight", torch.ones(width))
        else:
            module.weight = nn.Parameter(start)
        return module

    register_norm("bad", make)
    with pytest.raises(ConfigurationError, match=f"normalization bad: {problem}"):
        Norm("bad", 4, 1e-5, ALONE, partial_gradient=False, centered_weight=False, dtype=torch.float32, device="cpu")


def test_an_attention_with_a_plain_parameter_or_of_another_kind_is_rejected() -> None:
    class Plain(SelfAttention):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            self.gate = nn.Parameter(torch.zeros(2))

    register_attention("plain", Plain)
    register_attention("same", SelfAttention)
    with pytest.raises(ConfigurationError, match="--attention plain: parameter gate has no ParamSpec; create it with"):
        make_attention(with_fields(MODEL, attention="plain"), 0, ALONE, "cpu", None)
    latent = with_fields(MODEL, attention="same", multi_latent_attention=True)
    with pytest.raises(
        ConfigurationError, match="--attention same must be a subclass of LatentAttention with --multi-"
    ):
        make_attention(latent, 0, ALONE, "cpu", None)


def test_the_flops_of_an_attention_are_counted() -> None:
    register_attention("wide", SelfAttention, multiply_adds=lambda config: config.hidden_size * 3.0)
    own = with_fields(MODEL, attention="wide").forward_flops_per_sequence(8)
    assert own - MODEL.forward_flops_per_sequence(8) == 2 * 8 * (32 * 3) * 2


def test_loss_inputs_give_label_smoothing_and_keep_the_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    leaf = torch.randn(5, 2, 8, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(7, (5, 2), generator=generator)
    inputs = LossInputs(leaf * 1, labels, 7, ALONE)
    assert inputs.logits.shape == (5, 2, 7)
    mean = inputs.sum_over_vocabulary(inputs.logits) / 7
    squares = inputs.sum_over_vocabulary(inputs.logits.square())
    mine = 0.9 * inputs.cross_entropy() + 0.1 * (inputs.log_normalizers() - mean) + 0.01 * squares
    flat = leaf[..., :7].reshape(-1, 7)
    theirs = torch.nn.functional.cross_entropy(flat, labels.flatten(), label_smoothing=0.1, reduction="none")
    theirs = theirs + 0.01 * flat.square().sum(-1)
    torch.testing.assert_close(mine.flatten(), theirs)
    (wanted,) = torch.autograd.grad(theirs.sum(), leaf, retain_graph=True)
    (found,) = torch.autograd.grad(mine.sum(), leaf)
    torch.testing.assert_close(found, wanted)


def test_a_script_is_imported_for_its_registrations_only(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    (tmp_path / "parts_of_own.py").write_text(
        "from megatron.training import register_activation\nregister_activation('mish', len)\n"
    )
    script.write_text("import parts_of_own\nif __name__ == '__main__':\n    raise AssertionError\n")
    import_script(str(script))
    assert registered_names("activation") == ("mish",)
    assert registered_scripts() == (str(script.resolve()),)
    script.write_text("from megatron.training import pretrain\npretrain()\n")
    with pytest.raises(ConfigurationError) as caught:
        import_script(str(script))
    assert str(caught.value) == (
        f'--script {script} calls pretrain() when it is imported; call it under if __name__ == "__main__":'
    )
    with pytest.raises(ConfigurationError, match=f"--script {tmp_path} does not exist; pass a Python training script"):
        import_script(str(tmp_path))


def test_an_unknown_argument_is_reported_with_the_command_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extending._Run, "arguments", {"lr": 1.0})
    assert extending.get_args().lr == 1.0
    assert getattr(extending.get_args(), "exponent", None) is None
    with pytest.raises(AttributeError, match="there is no argument exponent; if extra_args adds it, only the script"):
        extending.get_args().exponent  # noqa: B018


def test_the_public_api_is_what_the_page_lists() -> None:
    page = (REPOSITORY / "docs/extending.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"version 1 of the public API: (.*?) of `megatron\.training`", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(extending.__all__)
    for name in extending.__all__:
        assert getattr(megatron.training, name) is getattr(extending, name)
    table = {row[0]: row for row in re.findall(r"^\| `(register_\w+)\((.*?)\)` \| `(--[\w-]+)` \|", page, re.MULTILINE)}
    assert table.keys() == {name for name in extending.__all__ if name.startswith("register_")}
    for name, arguments, flag in table.values():
        signature = inspect.signature(getattr(extending, name))
        assert [word.split("=")[0] for word in arguments.split(", ")] == list(signature.parameters)
        assert flag in build_parser().format_help()
