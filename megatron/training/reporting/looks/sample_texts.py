"""Texts that the model generates while it is trained, from the same prompts each time."""

from __future__ import annotations

from pathlib import Path

from megatron.core.errors import ConfigurationError, InputError
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest, StopRule, check_request
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.training.config.run_config import RunConfig
from megatron.training.model_setup import TrainingParts
from megatron.training.process.console import print_line
from megatron.training.process.initialize import Runtime
from megatron.training.reporting.metrics import MetricsWriter

_LARGEST_FILE = 1 << 20


class SampleTexts:
    """Continue the prompts of ``--sample-prompts``, taking the most probable token each time: nothing is drawn.

    Every model copy generates the same; the first one's texts are written. All ranks make one together.

    Raises:
        ConfigurationError: the prompts cannot be read.
        InputError: a prompt is empty or too long.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        parts: TrainingParts,
        tokenizer: Tokenizer,
        engine: InferenceEngine,
    ) -> None:
        options = config.logging
        self._runtime = runtime
        self._parts = parts
        self._tokenizer = tokenizer
        self._prompts = read_prompts(options.sample_prompts)
        end = tokenizer.eod_id
        self._request = GenerationRequest(
            prompts=tuple(tuple(tokenizer.tokenize(prompt)) for prompt in self._prompts),
            max_new_tokens=options.sample_tokens,
            sampling=SamplingConfig(greedy=True),
            stop=StopRule(end_tokens=frozenset() if end is None else frozenset((end,))),
        )
        check_request(engine.model.config, self._request)
        self._engine = engine

    def write(self, iteration: int, metrics: MetricsWriter | None) -> None:
        """Generate, and give the texts to the log, the metrics file and the loggers; every rank must call.

        Raises:
            GivenUpError: communication was given up meanwhile; nothing is written.
        """
        for chunk in self._parts.ddp_chunks:
            chunk.finish_param_gather()
        try:
            found = self._engine.generate(self._request, on_token=lambda prompt, token: self._runtime.flight.tick())
        except InputError as error:
            self._runtime.flight.ensure_not_given_up()
            # Every rank learns of logits that are not finite; what is done about them is not decided here.
            if self._runtime.is_reporter:
                print_line(f"WARNING: no sample at iteration {iteration}: {error}")
            return
        self._runtime.flight.ensure_not_given_up()
        if metrics is None:
            return
        texts = [self._tokenizer.detokenize(each.tokens) for each in found]
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(self._prompts, texts)]
        for sample in samples:
            print_line(f" sample at iteration {iteration} | prompt: {sample['prompt']!r} | text: {sample['text']!r} |")
        metrics.write({"iteration": iteration, "split": "samples", "samples": samples})
        shown = "\n\n".join(f"**{sample['prompt']}**{sample['text']}" for sample in samples)
        metrics.text("samples", shown, iteration)


def read_prompts(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the prompts: those given, or the lines of the one file that is named.

    Raises:
        ConfigurationError: the file cannot be read, is too large, or has no line.
    """
    if len(given) != 1 or not Path(given[0]).is_file():
        return given
    path = Path(given[0])
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigurationError(
                f"--sample-prompts {path} is larger than {_LARGEST_FILE} bytes; give a smaller file"
            )
        lines = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--sample-prompts {path} cannot be read as text: {error}") from error
    if not lines:
        raise ConfigurationError(f"--sample-prompts {path} is empty; write a prompt a line")
    return lines
