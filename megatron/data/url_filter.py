"""Filter URLs of web pages: remove unwanted sites, files that are no pages, malformed URLs and duplicates."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

_SITES: Final = """
500px bandcamp dailymotion deviantart artstation flickr gfycat giphy gifsoup imagebam imageshack imgflip imgur kym-cdn
livestream liveleak lmgtfy memegenerator mixcloud photobucket pinimg pixiv postimg prntscr quickmeme redgifs soundcloud
spotify streamable tenor tiktok tinypic twimg twitch vimeo vine vocaroo youtu youtube ytimg

discord discordapp facebook fbcdn instagram linkedin myspace pinterest redd reddit redditmedia snapchat telegram tumblr
twitter vk whatsapp

aliexpress alibaba amazon apple bestbuy ebay etsy newegg pcpartpicker walmart

akamaihd bitbucket dropbox gitlab github google mediafire mega sourceforge wetransfer

wikimedia wikipedia wiktionary xkcd

chaturbate e621 erome furaffinity imagefap onlyfans pornhub redtube rule34 spankbang xhamster xnxx xvideos youporn
"""
"""Media, social networks, shops, files and code, encyclopedias (whose text is in evaluation tasks), adult content."""
_SUFFIXES: Final = """
.ai .bmp .eps .gif .gifv .ico .jpeg .jpg .png .psd .svg .tif .tiff .webp
.3gp .aac .aif .avi .flac .flv .m4a .m4v .mid .midi .mkv .mov .mp3 .mp4 .mpeg .mpg .ogg .ogv .qt .swf .wav .webm .wma
.wmv .csv .dat .doc .docx .epub .json .log .mobi .odt .pdf .pps .ppt .pptx .ps .rtf .sql .txt .xls .xlsx .xml
.7z .apk .app .bin .bz2 .css .deb .dmg .exe .gz .iso .jar .js .msi .otf .pkg .py .rar .rpm .tar .tgz .torrent .ttf .woff
.xz .zip
"""
"""Endings of paths that are no pages."""
SITES: Final = frozenset(_SITES.split())
"""Names of unwanted sites, without their top-level domain."""
SUFFIXES: Final = tuple(_SUFFIXES.split())
_SECOND_LEVELS: Final = ("ac", "co", "com", "edu", "go", "gov", "ne", "net", "or", "org")
"""Labels that precede a country, as in co.uk."""
_MOST_SHORT: Final = 8
_LABEL: Final = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)", re.ASCII)


def site_of(host: str) -> str:
    """Return the name of a site: ``example`` for ``www.example.com`` and for ``example.co.uk``."""
    labels = host.lower().split(".")[:-1]
    if len(labels) > 1 and labels[-1] in _SECOND_LEVELS:
        labels.pop()
    return labels[-1] if labels else host


def is_well_formed(url: str) -> bool:
    """Return whether a text is the URL of a web page: http or https, a host with a dot, and no white space."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # such as a port that is no number
        return False
    if parts.scheme not in ("http", "https") or port == 0 or any(character.isspace() for character in url):
        return False
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        pass
    else:
        return True
    try:
        labels = host.rstrip(".").encode("idna").decode("ascii").split(".")
    except UnicodeError:  # a label is empty or too long
        return False
    return len(labels) > 1 and all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdecimal()


class UrlFilter:
    """Filter that sees URLs one at a time and remembers a hash of each URL that it keeps."""

    DOMAIN: Final = "domain"
    SUFFIX: Final = "suffix"
    SHORT: Final = "short"
    MALFORMED: Final = "malformed"
    DUPLICATE: Final = "duplicate"

    def __init__(self) -> None:
        self._kept: set[bytes] = set()

    def reason_to_remove(self, url: str) -> str | None:
        """Return why a URL is removed, or None if it is kept."""
        try:
            parts = urlsplit(url if "://" in url else f"//{url}")
            host, path = parts.hostname or "", parts.path
        except ValueError:  # such as an unfinished IPv6 address
            host, path = "", ""
        if site_of(host.rstrip(".")) in SITES:
            return self.DOMAIN
        if path.lower().endswith(SUFFIXES):
            return self.SUFFIX
        if len(url) <= _MOST_SHORT:
            return self.SHORT
        if not is_well_formed(url):
            return self.MALFORMED
        digest = hashlib.blake2b(url.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        if digest in self._kept:
            return self.DUPLICATE
        self._kept.add(digest)
        return None
