"""Damage and malice for files of any format, drawn by a generator: bytes, JSON, pickles, safetensors, texts."""

from __future__ import annotations

import io
import json
import pickletools
import struct
import zipfile
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        2,
        255,
        65536,
        2**31 - 1,
        2**31,
        -(2**31),
        2**32,
        2**53,
        2**62,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64,
        10**400,
    ),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")),
)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(None, True, False, "", "x" * 3000, "../../etc/passwd", "/dev/zero", "\x00", "\ud800", "é\n\x1b[2J"),
    *([], [[]], {}, {"": None}, [2**62] * 4, [0] * 3, [1] * 200, [-1], ["1"], {"shape": [1]}, [[[[[]]]]]),
)
_WORDS = (
    b"\x00" * 8,
    b"\xff" * 8,
    b"\xff\xff\xff\x7f",
    b"\xff" * 7 + b"\x7f",
    b"[" * 3000,
    b"}{",
    b"PK\x05\x06",
    b"\n",
)


def mutated_bytes(data: bytes, draw: Random) -> bytes:
    """Return bytes that differ in one to four places: flipped, overwritten, cut off, cut out, doubled or moved."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if not data:
            return bytes(draw.getrandbits(8) for _ in range(draw.randint(0, 40)))
        start = draw.randrange(len(data)) if draw.random() < 0.7 else draw.randrange(min(len(data), 256))
        end = min(len(data), start + draw.choice((1, 2, 4, 8, 30, 500)))
        kind = draw.randrange(7)
        if kind == 0:
            data = data[:start] + bytes([data[start] ^ 1 << draw.randrange(8)]) + data[start + 1 :]
        elif kind == 1:
            data = data[:start] + bytes(draw.getrandbits(8) for _ in range(end - start)) + data[end:]
        elif kind == 2:
            data = data[:start] + draw.choice(_WORDS) + data[end if draw.random() < 0.5 else start :]
        elif kind == 3:
            data = data[:start]
        elif kind == 4:
            data = data[:start] + data[end:]
        elif kind == 5:
            data = data[:end] + data[start:]
        else:
            target = draw.randrange(len(data))
            data = data[:target] + data[start:end] + data[target:]
    return data


def mutated_value(value: Any, draw: Random, depth: int = 0) -> Any:
    """Return a JSON value with one of its parts replaced, taken out, doubled or renamed."""
    if isinstance(value, dict) and value and (depth == 0 or draw.random() < 0.85):
        name = draw.choice(list(value))
        kind = draw.random()
        rest = {other: item for other, item in value.items() if other != name}
        if kind < 0.06:
            return rest
        if kind < 0.1:
            return rest | {draw.choice((name + "x", "", "__metadata__", "x" * 500)): value[name]}
        if kind < 0.13:
            return value | {"surplus": draw.choice(VALUES)}
        return value | {name: mutated_value(value[name], draw, depth + 1)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        kind = draw.random()
        if kind < 0.1:
            return value[:place] + value[place + 1 :]
        if kind < 0.2:
            return value[: place + 1] + value[place:]
        return [*value[:place], mutated_value(value[place], draw, depth + 1), *value[place + 1 :]]
    if type(value) is int and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 8, -8, 2**31, 2**62))
    return draw.choice(VALUES)


def mutated_json(text: bytes, draw: Random) -> bytes:
    """Return the text of a JSON value with parts replaced, or with damaged bytes."""
    if draw.random() < 0.25:
        return mutated_bytes(text, draw)
    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 2))):
        value = mutated_value(value, draw)
    return json.dumps(value).encode()


def mutated_safetensors(data: bytes, draw: Random) -> bytes:
    """Return a safetensors file with another header, or with damaged bytes."""
    kind = draw.random()
    if kind < 0.3:
        return mutated_bytes(data, draw)
    (length,) = struct.unpack("<Q", data[:8])
    header = mutated_json(data[8 : 8 + length], draw)
    claimed = draw.choice((0, 1, len(header) + 1, 2**31, 2**63, 2**64 - 1)) if kind < 0.4 else len(header)
    return struct.pack("<Q", claimed) + header + data[8 + length :]


_OPERATIONS = (
    *(b"\x8f", b"]", b"}", b")", b"(", b"N", b"\x88", b"0", b"a", b"e", b"s", b"u", b"t", b"l", b"d", b"R", b"\x81"),
    *(b"b", b"\x85", b"\x86", b"\x87", b"\x90", b"\x91", b"\x93", b"\x94", b"Q", b".", b"q\x00", b"h\x00", b"h\x05"),
    *(b"j\x07\x00\x00\x00", b"K\x00", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\x00"),
    *(b"\x8a\xff" + b"\x7f" * 255, b"\x8b\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\xff", b"\x8d" + b"\xff" * 7 + b"\x7f"),
    *(b"B\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"I" + b"9" * 5000 + b"\n", b"L" + b"9" * 4000 + b"L\n"),
    *(b"G\x7f\xf0" + bytes(6), b"\x8c\x03abc", b"C\x01x", b"Vabc\n", b"h\x00h\x00\x86q\x00" * 60, b")" + b"\x85" * 400),
    *(b"]" * 300 + b"a" * 299, b"]q\x00h\x00a", b"}q\x00h\x00h\x00s", b"cposix\nsystem\n", b"ctorch\nFloatStorage\n"),
    *(
        b"ccollections\nOrderedDict\n",
        b"c__builtin__\nset\n",
        b"ctorch\nSize\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
    ),
    *(b"c_codecs\nencode\n", b"cargparse\nNamespace\n", b"cnumpy\ndtype\n"),
)


def mutated_pickle(data: bytes, draw: Random) -> bytes:
    """Return a pickle with operations put in, taken out, doubled or exchanged, or with damaged bytes."""
    if draw.random() < 0.2:
        return mutated_bytes(data, draw)
    starts = [position or 0 for _, _, position in pickletools.genops(data)]
    operations = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)])]
    for _ in range(draw.choice((1, 1, 2, 5))):
        place = draw.randrange(len(operations)) if operations else 0
        kind = draw.randrange(5)
        if kind == 0 or not operations:
            operations.insert(place, draw.choice(_OPERATIONS))
        elif kind == 1:
            operations[place] = draw.choice(_OPERATIONS)
        elif kind == 2:
            del operations[place]
        elif kind == 3:
            operations[place:place] = [operations[place]] * draw.choice((1, 2, 60))
        else:
            other = draw.randrange(len(operations))
            operations[place], operations[other] = operations[other], operations[place]
    return b"".join(operations)


def mutated_torch_file(data: bytes, draw: Random) -> bytes:
    """Return a file of torch's zip format with another pickle or other entries, or with damaged bytes."""
    kind = draw.random()
    if kind < 0.25:
        return mutated_bytes(data, draw)
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as stored, zipfile.ZipFile(written, "w") as archive:
        entries = stored.infolist()
        chosen = draw.choice(entries).filename
        for entry in entries:
            content, way = stored.read(entry), zipfile.ZIP_STORED
            if entry.filename.endswith("/data.pkl"):
                content = mutated_pickle(content, draw) if kind < 0.85 else content
                way = zipfile.ZIP_DEFLATED if kind > 0.98 else way
            elif entry.filename == chosen and kind > 0.85:
                if kind > 0.95:
                    continue
                content = mutated_bytes(content, draw)
            archive.writestr(zipfile.ZipInfo(entry.filename), content, way)
    return written.getvalue()


def mutated_text(data: bytes, draw: Random) -> bytes:
    """Return a text with lines taken out, doubled, exchanged or replaced, or with damaged bytes."""
    lines = data.split(b"\n")
    kind = draw.randrange(5)
    place, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    if kind == 0:
        return mutated_bytes(data, draw)
    if kind == 1:
        return b"\n".join(lines[:place])
    if kind == 2:
        lines[place:place] = lines[min(place, other) : max(place, other)][:1000]
    elif kind == 3:
        lines[place], lines[other] = lines[other], lines[place]
    else:
        lines[place] = draw.choice((b"", b" ", b"a b c", b"\xff", b"a" * 5000, lines[other] + b" " + lines[place]))
    return b"\n".join(lines)
