from __future__ import annotations

import json
import random

import numpy as np
import pytest

from megatron.data.json_lines import ExtractTexts, JsonLines, find_compiled_reader, list_lines, read_json_lines

COMPILED = find_compiled_reader()
PARTS = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b" ",
        b"\t",
        b"\r",
        b"\x0b",
        b'""',
        b"true",
        b"false",
        b"null",
        b"NaN",
        b"nul",
    ),
    *(
        b"1",
        b"-0.5e3",
        b"01",
        b"1.",
        b"-",
        b"1e",
        b"9" * 5000,
        b"[[1,{}],[]]",
        b'{"text":"no"}',
        b"[" * 200 + b"]" * 200,
    ),
    *(
        b'"text"',
        b'"t\\u0065xt"',
        b'"k"',
        b'"a\\n\\u2013 b\\/"',
        b'"\\ud83d\\ude00"',
        b'"\\ud83d"',
        b'"\\ude00\\ud83d"',
    ),
    *(b'"\xe4\xbd\xa0\xf0\x9f\x99\x82"', b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\x80"', b'"\xf4\x90\x80\x80"', b'"\x01"'),
    *(b'"\\x"', b'"\\u12g4"', b'"' + b"x" * 40 + b"\\\\" + b"y" * 17 + b'"', b'"\\"', b'"\\u0000"', b"\xef\xbb\xbf"),
]


def assert_equal(a: JsonLines, b: JsonLines) -> None:
    assert (a.texts, a.num_lines, a.problems) == (b.texts, b.num_lines, b.problems)
    assert a.lines.tolist() == b.lines.tolist()
    assert [counts.tolist() for counts in a.num_texts] == [counts.tolist() for counts in b.num_texts]


@pytest.fixture
def compiled() -> ExtractTexts:
    if COMPILED is None:
        pytest.skip("the compiled reader was not built")
    return COMPILED


@pytest.mark.parametrize("keys", [["text"], ["text", "k"]])
def test_the_compiled_reader_gives_what_python_gives(compiled: ExtractTexts, keys: list[str]) -> None:
    draw = random.Random(17)
    num_fast = 0
    for _ in range(4000):
        lines = []
        for _ in range(draw.randrange(1, 4)):
            if draw.random() < 0.4:
                line = b"".join(draw.choice(PARTS) for _ in range(draw.randrange(0, 9)))
            else:
                names = [b'"text"', b'"t\\u0065xt"', b'"k"', b'"k" ']
                line = b"{" + b", ".join(draw.choice(names) + b": " + draw.choice(PARTS) for _ in range(2)) + b"}"
            if line and draw.random() < 0.1:
                place = draw.randrange(len(line))
                line = line[:place] + bytes([draw.randrange(256)]) + line[place + 1 :]
            lines.append(line)
        block = b"\n".join(lines) + draw.choice([b"", b"\n"])
        num_fast += sum(text is not None for text in compiled(block, [key.encode() for key in keys])[0])
        assert_equal(read_json_lines(block, keys, compiled), read_json_lines(block, keys))
    assert num_fast > 100


def test_the_compiled_reader_leaves_plain_lines_to_nobody(compiled: ExtractTexts) -> None:
    texts = ["", "plain", 'naïve 你好 🙂 \n\t"\\ \x00 \u2028', "x" * 100_000]
    lines = [json.dumps({"id": 1, "meta": {"a": [1.5e-3, None]}, "text": text}) for text in texts]
    lines += [json.dumps({"text": text, "tail": []}, ensure_ascii=False) for text in texts]
    found, places, num_lines = compiled("\r\n".join(lines).encode(), [b"text"])
    assert found == [text.encode() for text in texts * 2]
    assert num_lines == 8
    assert places[:, 0].tolist() == list(range(8))


@pytest.mark.parametrize("extract", [None, COMPILED], ids=["python", "compiled"])
def test_texts_and_lists_and_what_is_wrong(extract: ExtractTexts | None) -> None:
    block = b'\n{"a": "1", "b": ["2", "3"]}\n  \n{"a": 5, "b": ""}\r\n{"a": [], "b": "4"}\n[1]\n{"b": "x"}\n{"a"'
    result = read_json_lines(block, ["a", "b"], extract)
    assert result.texts == ([b"1"], [b"2", b"3", b"4"])
    assert [counts.tolist() for counts in result.num_texts] == [[1, 0], [2, 1]]
    assert result.lines.tolist() == [1, 4]
    assert result.num_lines == 8
    assert [(problem.line, problem.message.partition(":")[0]) for problem in result.problems] == [
        (3, "'a' contains int; a string or a list of strings is expected"),
        (5, "a JSON object is expected, but the line contains list"),
        (6, "no key 'a' (found"),
        (7, "not a JSON line"),
    ]


def test_an_empty_block() -> None:
    for extract in [None, COMPILED]:
        result = read_json_lines(b"", ["a", "b"], extract)
        assert result.texts == ([], [])
        assert result.num_lines == 0
        assert result.lines.dtype == np.int64
    assert list_lines(b"\n\n \t\n", [b"a"])[2] == 3
