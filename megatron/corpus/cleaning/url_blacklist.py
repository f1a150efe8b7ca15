"""Match URLs against a blacklist of hosts and paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from megatron.core.errors import DataError


class _Address(NamedTuple):
    host: str
    path: str
    query: str


class UrlBlacklist:
    """Match URLs against lists with one entry a line.

    ``example.com`` covers the host and its subdomains; ``example.com/members`` covers that path and all below it;
    ``example.com/page?id=3`` covers that page alone. Scheme, port, ``www.`` before a path, case of the host, fragment
    and a slash at the end do not matter. Empty lines and lines that start with ``#`` are comments.

    Raises:
        DataError: a list cannot be read, or a line is no entry; the error names the line.
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
            raise DataError(f"{place}: {entry!r} is neither a host, such as example.com, nor a URL; correct the line")
        if address.query:
            self._pages.add(address._replace(host=address.host.removeprefix("www.")))
        elif address.path:
            self._paths.add((address.host.removeprefix("www."), address.path))
        else:
            self._hosts.add(address.host)

    def entry_for(self, url: str) -> str | None:
        """Return the entry that covers a URL, or None; a URL without a host is covered by ``malformed``."""
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
    except UnicodeError:  # a label that is too long, or empty: compared as it is
        host = host.lower()
    return _Address(host, parts.path.rstrip("/"), parts.query)
