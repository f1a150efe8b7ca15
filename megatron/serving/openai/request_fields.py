"""The fields and errors of OpenAI's /v1/completions and /v1/chat/completions requests."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from megatron.core.inference import MAX_PENALTY, MAX_REPETITION_PENALTY, MIN_TEMPERATURE

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """Error response to a request: an HTTP status, and one line for the client."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def content(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_value(name: str, wanted: str, value: object) -> ApiError:
    """Build the error for a field with an invalid value."""
    shown = repr(value)
    return ApiError(400, f"{name} must be {wanted}, but is {shown[:60]}{'…' if len(shown) > 60 else ''}", param=name)


MAX_CHOICES = 128
"""Maximum of prompts x choices per request."""
_MOST_ALTERNATIVES = 20
_MOST_BIASES = 1024
_MOST_STOPS = 16
_LONGEST_STOP = 1000
_LARGEST = 2**31 - 1
_HOTTEST = 100.0

Prompt = str | tuple[int, ...]
Message = Mapping[str, str]


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= _LARGEST


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or _is_int(value)


Check = tuple[Callable[[Any], bool], str]
_FLAG: Check = (lambda value: isinstance(value, bool), "true or false")


def _whole(low: int, high: int) -> Check:
    return (lambda value: _is_int(value) and low <= value <= high), f"an integer between {low} and {high}"


def _number(low: float, high: float) -> Check:
    return (lambda value: _is_number(value) and low <= value <= high), f"a number between {low:g} and {high:g}"


def _field(default: Any, check: Check) -> Any:
    return dataclasses.field(default=default, metadata={"check": check})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestFields:
    """Fields of a request; either ``prompts`` or ``messages`` is empty.

    ``num_alternatives`` is None if no log-probabilities are requested. If ``max_tokens`` is None, the server chooses a
    length that fits the context.
    """

    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Message, ...] = ()
    model: str | None = _field(None, (lambda value: isinstance(value, str), "a string"))
    max_tokens: int | None = _field(None, _whole(0, _LARGEST))
    n: int = _field(1, _whole(1, MAX_CHOICES))
    best_of: int | None = _field(None, _whole(1, MAX_CHOICES))
    temperature: float = _field(1.0, _number(0.0, _HOTTEST))
    top_p: float = _field(1.0, _number(0.0, 1.0))
    top_k: int = _field(0, _whole(-1, _LARGEST))
    seed: int | None = _field(None, (lambda value: type(value) is int and abs(value) < 2**63, "a 64-bit integer"))
    stop: tuple[str, ...] = ()
    stream: bool = _field(False, _FLAG)
    include_usage: bool = False
    echo: bool = _field(False, _FLAG)
    num_alternatives: int | None = None
    presence_penalty: float = _field(0.0, _number(-MAX_PENALTY, MAX_PENALTY))
    frequency_penalty: float = _field(0.0, _number(-MAX_PENALTY, MAX_PENALTY))
    repetition_penalty: float = _field(
        1.0,
        (
            lambda value: _is_number(value) and 0.0 < value <= MAX_REPETITION_PENALTY,
            f"a number above 0 and at most {MAX_REPETITION_PENALTY:g}",
        ),
    )
    no_repeat_ngram_size: int = _field(0, _whole(0, _LARGEST))
    bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = _field(False, _FLAG)
    num_beams: int = _field(1, _whole(1, MAX_CHOICES))
    length_penalty: float = _field(1.0, _number(-32.0, 32.0))
    early_stopping: bool | Literal["never"] = _field(
        False, (lambda value: isinstance(value, bool) or value == "never", 'true, false or "never"')
    )

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


_CHECKS: Mapping[str, Check] = {
    field.name: field.metadata["check"] for field in dataclasses.fields(RequestFields) if "check" in field.metadata
}
"""Fields whose value is used as given."""
_IDLE = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
"""OpenAI fields that are accepted and ignored, because they do not affect the text."""
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "suffix": lambda value: value == "",
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
}
"""OpenAI fields that are not supported, with a test for the values that request nothing."""


_NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
_SPECIAL = ("stop", "stream_options", "logit_bias", "logprobs")


def read_completion(body: bytes, defaults: Mapping[str, Any] = _NO_DEFAULTS) -> RequestFields:
    """Parse the body of a /v1/completions request; ``defaults`` replace OpenAI's defaults of its fields.

    Raises:
        ApiError: the body is not JSON, a field is unknown, or a value is invalid.
    """
    values = _read_object(body, ("prompt",))
    given = {**defaults, **_common(values), "prompts": _prompts(values.get("prompt"))}
    if (logprobs := values.get("logprobs")) is not None:
        given["num_alternatives"] = _checked("logprobs", logprobs, _whole(0, _MOST_ALTERNATIVES))
    return _consistent(RequestFields(**given), values)


def read_chat(body: bytes, defaults: Mapping[str, Any] = _NO_DEFAULTS) -> RequestFields:
    """Parse the body of a /v1/chat/completions request; ``defaults`` replace OpenAI's defaults of its fields.

    Raises:
        ApiError: the body is not JSON, a field is unknown, or a value is invalid.
    """
    values = _read_object(body, ("messages", "top_logprobs", "max_completion_tokens"))
    if "max_completion_tokens" in values:
        values["max_tokens"] = values.pop("max_completion_tokens")
    given = {**defaults, **_common(values), "messages": _messages(values.get("messages"))}
    wants = _checked("logprobs", values.get("logprobs", False), _FLAG)
    number = _checked("top_logprobs", values.get("top_logprobs", 0), _whole(0, _MOST_ALTERNATIVES))
    if number and not wants:
        raise ApiError(400, "top_logprobs requires logprobs: true", param="top_logprobs")
    given["num_alternatives"] = number if wants else None
    if given.get("echo"):
        raise ApiError(400, "echo is supported only in /v1/completions; omit it", param="echo")
    return _consistent(RequestFields(**given), values)


def _read_object(body: bytes, own: tuple[str, ...]) -> dict[str, Any]:
    """Parse a JSON object, check its field names, and return the fields that are not null."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object")
    known = (*own, *_CHECKS, *_SPECIAL, *_IDLE, *_REFUSED)
    for name, value in values.items():
        if name not in known:
            # Truncate the name: the comparison of a very long one would take minutes.
            nearest = difflib.get_close_matches(name[:80], known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known fields are {', '.join(known)}"
            raise ApiError(400, f"{name[:80]} is not a known field; {hint}", param=name[:80])
        if name in _REFUSED and value is not None and not _REFUSED[name](value):
            raise ApiError(400, f"{name} is not supported here; omit it", param=name)
    return {name: value for name, value in values.items() if value is not None and name not in (*_IDLE, *_REFUSED)}


def _checked(name: str, value: Any, check: Check) -> Any:
    is_right, wanted = check
    if not is_right(value):
        raise bad_value(name, wanted, value)
    return value


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the fields that both kinds of request share."""
    given = {name: _checked(name, values[name], check) for name, check in _CHECKS.items() if name in values}
    best_of = given.get("best_of")
    if best_of not in (None, given.get("n", 1)):
        raise ApiError(
            400,
            (f"best_of {best_of} must equal n {given.get('n', 1)}, because choices are not ranked"),
            param="best_of",
        )
    if 0.0 < given.get("temperature", 1.0) < MIN_TEMPERATURE:
        raise bad_value("temperature", f"0, or at least {MIN_TEMPERATURE:g}", given["temperature"])
    given["stop"] = _stops(values.get("stop", ()))
    given["bias"] = _bias(values.get("logit_bias", {}))
    options = values.get("stream_options", {})
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise bad_value("stream_options", '{"include_usage": true or false}', options)
    given["include_usage"] = options.get("include_usage", False)
    return given


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    is_list = isinstance(stops, (list, tuple)) and len(stops) <= _MOST_STOPS
    if not is_list or not all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops):
        wanted = f"a string or a list of at most {_MOST_STOPS} strings of 1 to {_LONGEST_STOP} characters each"
        raise bad_value("stop", wanted, value)
    return tuple(stops)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    is_map = isinstance(value, dict) and len(value) <= _MOST_BIASES
    if not is_map or not all(
        key.isascii() and key.isdecimal() and len(key) < 10 and _is_number(addend) and abs(addend) <= 100.0
        for key, addend in value.items()
    ):
        wanted = f"an object of at most {_MOST_BIASES} token ids, each with a number between -100 and 100"
        raise bad_value("logit_bias", wanted, value)
    return tuple((int(key), float(addend)) for key, addend in value.items())


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if value is None:
        raise ApiError(400, "prompt is missing; pass a string, token ids, or a list of either", param="prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_int, value))):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad_value("prompt", "a string, token ids, or a list of either", value)
    if len(value) > MAX_CHOICES:
        raise ApiError(400, f"prompt contains {len(value)} prompts; 1 to {MAX_CHOICES} are accepted", param="prompt")
    return tuple(_prompt(item) for item in value)


def _prompt(item: Any) -> Prompt:
    if isinstance(item, str):
        return _unicode("prompt", item)
    if isinstance(item, list) and all(map(_is_int, item)):
        return tuple(item)
    raise bad_value("prompt", "a string, token ids, or a list of either", item)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise bad_value("messages", "a list of one or more objects with role and content", value)
    return tuple(_message(item) for item in value)


def _message(item: Any) -> Message:
    role = item.get("role") if isinstance(item, dict) else None
    if not isinstance(role, str) or not 0 < len(role) <= 80:
        raise bad_value("messages", "objects with role and content", item)
    content = item.get("content")
    if isinstance(content, list):
        are_texts = [isinstance(part, dict) and part.get("type") == "text" for part in content]
        texts = [part.get("text") for part, is_text in zip(content, are_texts, strict=True) if is_text]
        is_all_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(texts) if is_all_text else None
    if not isinstance(content, str):
        raise bad_value("messages", "objects whose content is a string, or parts of type text", item)
    return {"role": _unicode("messages", role), "content": _unicode("messages", content)}


def _unicode(name: str, text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ApiError(400, f"{name} contains half of a surrogate pair, which is not a character", param=name)
    return text


def _consistent(fields: RequestFields, given: Mapping[str, Any]) -> RequestFields:
    """Reject combinations of fields that are inconsistent."""
    choices = max(len(fields.prompts), 1) * max(fields.n, fields.num_beams)
    problems = {
        f"prompts x choices is {choices}; at most {MAX_CHOICES} is accepted": choices > MAX_CHOICES,
        "max_tokens 0 requires echo and logprobs": (
            fields.max_tokens == 0 and not (fields.echo and fields.num_alternatives is not None)
        ),
        "stream_options requires stream: true": "stream_options" in given and not fields.stream,
        "length_penalty and early_stopping require num_beams of 2 or more": (
            fields.num_beams == 1 and ("length_penalty" in given or "early_stopping" in given)
        ),
    }
    if fields.num_beams > 1:
        idle = ("stream", "echo", "stop", "logit_bias", "presence_penalty", "frequency_penalty", "top_k", "seed")
        names = [name for name in (*idle, "top_p", "temperature") if given.get(name) not in (None, False, 0, [])]
        problems |= {
            f"num_beams does not sample and does not stream; omit {', '.join(names)}": bool(names),
            "num_beams does not support log probabilities; omit logprobs": fields.num_alternatives is not None,
            f"n {fields.n} is more than num_beams {fields.num_beams}": fields.n > fields.num_beams,
        }
    for problem, is_so in problems.items():
        if is_so:
            raise ApiError(400, problem)
    return fields
