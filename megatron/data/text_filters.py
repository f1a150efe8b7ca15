"""Filter documents by URL, length and language, in several processes and in the order of the input.

Texts are examined independently. The examination also repairs the encoding and computes the keys for deduplication.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import multiprocessing
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from megatron.core.errors import ConfigurationError, DataError, MegatronError, TokenizerError
from megatron.core.tokenizers import load_package
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.data.deduplication import SignatureMaker, shingles
from megatron.data.document_reader import Document


class _Address(NamedTuple):
    host: str
    path: str
    query: str


class UrlBlacklist:
    """URL blacklist from files with one entry per line.

    ``example.com`` matches the host and its subdomains. ``example.com/members`` matches that path and all paths below.
    ``example.com/page?id=3`` matches only that page. Scheme, port, ``www.`` before a path, case of the host, fragment
    and a trailing slash are ignored. Empty lines and lines that start with ``#`` are comments.

    Raises:
        DataError: a list cannot be read, or a line is not a valid entry; the error names the line.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._hosts: set[str] = set()
        self._paths: set[tuple[str, str]] = set()
        self._pages: set[_Address] = set()
        for file in files:
            self._add_file(file)

    def __len__(self) -> int:
        return len(self._hosts) + len(self._paths) + len(self._pages)

    def _add_file(self, file: str) -> None:
        try:
            with open(file, encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, start=1):
                    entry = line.strip()
                    if entry and not entry.startswith("#"):
                        self._add(entry, f"{file}:{number}")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read: {error}; change --url-blacklist") from error

    def _add(self, entry: str, place: str) -> None:
        address = _parse(entry)
        if address is None or ("." not in address.host and address.host != "localhost"):
            raise DataError(f"{place}: {entry!r} is neither a host, such as example.com, nor a URL; fix the line")
        if address.query:
            self._pages.add(address._replace(host=address.host.removeprefix("www.")))
        elif address.path:
            self._paths.add((address.host.removeprefix("www."), address.path))
        else:
            self._hosts.add(address.host)

    def entry_for(self, url: str) -> str | None:
        """Return the entry that matches a URL, or None. A URL without a host matches ``malformed``."""
        address = _parse(url)
        if address is None:
            return "malformed"
        host = address.host
        while host:
            if host in self._hosts:
                return host
            host = host.partition(".")[2]
        bare = address.host.removeprefix("www.")
        if address._replace(host=bare) in self._pages:
            return f"{bare}{address.path}?{address.query}"
        path = address.path
        while path:
            if (bare, path) in self._paths:
                return bare + path
            path = path.rpartition("/")[0]
        return None


def _parse(url: str) -> _Address | None:
    url = url.strip()
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host = (parts.hostname or "").rstrip(".")
    except ValueError:  # such as an unfinished IPv6 address
        return None
    if not host or any(character.isspace() for character in url):
        return None
    try:
        host = host.encode("idna").decode("ascii")
    except UnicodeError:  # a label is too long or empty: compare it unchanged
        host = host.lower()
    return _Address(host, parts.path.rstrip("/"), parts.query)


SAMPLE_CHARACTERS: Final = 4096


class Guess(NamedTuple):
    """ISO 639-1 language code and its probability."""

    language: str
    probability: float


class LanguageDetector:
    """Deterministic language detector for the start of a text, with the model that the package includes.

    Raises:
        ConfigurationError: the package cannot be imported, or does not support a requested language.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        module = load_package("py3langid.langid", "--language", ConfigurationError)
        self._identifier = module.LanguageIdentifier.from_model_file(module.MODEL_FILE, norm_probs=True)
        known = self._identifier.labels
        unknown = [language for language in wanted if language not in known]
        if unknown:
            raise ConfigurationError(f"--language {' '.join(unknown)} is not known; possible values: {' '.join(known)}")

    def guess(self, text: str) -> Guess:
        """Return the most likely language."""
        language, probability = self._identifier.classify(text[:SAMPLE_CHARACTERS])
        return Guess(str(language), float(probability))


NO_TEXT: Final = "no text"
TOO_SHORT: Final = "too short"
OTHER_LANGUAGE: Final = "other language"

# The start of a text is sufficient if it has this multiple of the minimum number of tokens.
_LENGTH_MARGIN: Final = 2
_CHARACTERS_PER_TOKEN: Final = 16


@dataclass(frozen=True)
class TextRules:
    """Rules for texts. A rule that is None, 0 or empty is disabled.

    Attributes:
        tokenizer: keyword arguments of `build_tokenizer`, needed if ``min_tokens`` is not 0.
        min_words: minimum number of words between white space.
        similarity: minimum Jaccard similarity of near duplicates, over n-grams of ``shingle_words`` words.
    """

    fix_encoding: bool
    min_tokens: int
    tokenizer: Mapping[str, object]
    languages: Sequence[str]
    min_language_probability: float
    exact_duplicates: bool
    similarity: float | None
    num_permutations: int
    shingle_words: int
    min_words: int = 0


class Finding(NamedTuple):
    """Result of examining a text.

    Attributes:
        text: text with repaired encoding.
        reason: reason to drop the text, or None. ``detail`` has the values.
        digest: hash of the text without leading and trailing white space.
        keys: LSH keys. Near duplicates are likely to share one.
    """

    text: str
    reason: str | None = None
    detail: str = ""
    digest: bytes = b""
    keys: Sequence[int] = ()


class TextExaminer:
    """Examiner that applies the rules to each text independently, so that any process may examine any text.

    Raises:
        InputError: a package, tokenizer file or language that a rule needs is not available.
    """

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._ftfy = load_package("ftfy", "--fix-encoding", ConfigurationError) if rules.fix_encoding else None
        self._tokenizer = build_tokenizer(**rules.tokenizer) if rules.min_tokens else None  # type: ignore[arg-type]
        self._detector = LanguageDetector(rules.languages) if rules.languages else None
        self._signatures = (
            SignatureMaker(rules.similarity, rules.num_permutations) if rules.similarity is not None else None
        )

    def examine(self, text: str) -> Finding:
        """Repair a text and apply the rules to it.

        Raises:
            TokenizerError: the tokenizer cannot encode the text.
        """
        rules = self._rules
        if self._ftfy is not None:
            text = self._ftfy.fix_text(text)
        stripped = text.strip()
        if not stripped:
            return Finding(text, NO_TEXT)
        if rules.min_words and (num_words := len(stripped.split())) < rules.min_words:
            return Finding(text, TOO_SHORT, f"{num_words} words of {rules.min_words}")
        if self._tokenizer is not None:
            num_tokens = self._count_tokens(stripped)
            if num_tokens < rules.min_tokens:
                return Finding(text, TOO_SHORT, f"{num_tokens} tokens of {rules.min_tokens}")
        if self._detector is not None:
            guess = self._detector.guess(stripped)
            if guess.language not in rules.languages or guess.probability < rules.min_language_probability:
                return Finding(text, OTHER_LANGUAGE, f"{guess.language} with probability {guess.probability:.3f}")
        if not rules.exact_duplicates:
            return Finding(text)
        digest = hashlib.blake2b(stripped.encode("utf-8"), digest_size=16).digest()
        keys = [] if self._signatures is None else self._signatures.keys(shingles(stripped, rules.shingle_words))
        return Finding(text, digest=digest, keys=keys)

    def _count_tokens(self, text: str) -> int:
        """Count the tokens of a text, or of its start if that has more than enough tokens."""
        assert self._tokenizer is not None
        enough = self._rules.min_tokens * _LENGTH_MARGIN
        begin = text[: enough * _CHARACTERS_PER_TOKEN]
        num_tokens = len(self._tokenizer.tokenize(begin))
        return num_tokens if len(begin) == len(text) or num_tokens >= enough else len(self._tokenizer.tokenize(text))


def examine_batch(examiner: TextExaminer, texts: Sequence[tuple[str, str]]) -> list[Finding]:
    """Examine (place, text) pairs.

    Raises:
        TokenizerError: the tokenizer cannot encode a text; the message names its place.
    """
    findings = []
    for place, text in texts:
        try:
            findings.append(examiner.examine(text))
        except TokenizerError as error:
            raise TokenizerError(f"{place}: {error}") from error
    return findings


BATCH_CHARACTERS: Final = 1 << 19
BATCH_DOCUMENTS: Final = 1024


Item = tuple[Document, Finding | None]
"""A document and its finding, which is None if the text has yet to be examined."""


def examine_all(items: Iterator[Item], rules: TextRules, workers: int) -> Iterator[tuple[Document, Finding]]:
    """Yield each document with its finding, in the order of the input.

    Raises:
        InputError: a rule cannot be applied, in general or to one of the texts.
        MegatronError: a worker died.
    """
    examiner = TextExaminer(rules)  # also with workers, so that missing dependencies are reported once and early
    batches = _gather(items)
    if workers == 1:
        for batch in batches:
            yield from _join(batch, examine_batch(examiner, _texts(batch)))
        return
    # Spawn instead of fork, because the threads of the tokenizer and NumPy do not survive a fork.
    executor = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (rules,)
    )
    under_way: deque[tuple[list[Item], concurrent.futures.Future[list[Finding]]]] = deque()
    try:
        for batch in batches:
            under_way.append((batch, executor.submit(_examine_in_worker, _texts(batch))))
            if len(under_way) > 2 * workers:
                done, future = under_way.popleft()
                yield from _join(done, future.result())
        while under_way:
            done, future = under_way.popleft()
            yield from _join(done, future.result())
    except BrokenProcessPool as error:
        raise MegatronError("a worker died, possibly for lack of memory; use fewer --workers and run again") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _gather(items: Iterator[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    num_characters = 0
    for item in items:
        batch.append(item)
        num_characters += len(item[0].text)
        if num_characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _texts(batch: list[Item]) -> list[tuple[str, str]]:
    return [(document.place, document.text) for document, known in batch if known is None]


def _join(batch: list[Item], findings: list[Finding]) -> Iterator[tuple[Document, Finding]]:
    examined = iter(findings)
    for document, known in batch:
        yield document, next(examined) if known is None else known


class _WorkerState:
    """Examiner of this worker process. A process pool offers no other way to pass state to its calls."""

    examiner: TextExaminer


def _start_worker(rules: TextRules) -> None:
    _WorkerState.examiner = TextExaminer(rules)


def _examine_in_worker(texts: list[tuple[str, str]]) -> list[Finding]:
    return examine_batch(_WorkerState.examiner, texts)
