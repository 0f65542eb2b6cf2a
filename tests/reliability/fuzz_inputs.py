"""Makes hostile files of valid ones: of their bytes, of their structure, of their own checksums."""

from __future__ import annotations

import json
import re
import struct
from random import Random
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 75, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.5, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf")),
    *("", "0", "-1", "nan", " ", "\0", "\ud800", "é" * 300, "a" * 70_000, "%s%n", "\x1b[2J"),
    *("..", "../../outside", "/outside", "a/../../outside", "~/outside", "\\..\\outside", "."),
    *("file:///outside", "s3://outside/a", "http://me:word@outside/", "$(touch outside)"),
    *("int64", "F32", "BF16", "__class__", "step-00000004", "manifest.json"),
    *([], {}, [[]], [0] * 300, {"": {}}, [-1], [2**62, 2**62], {"a": float("nan")}),
]
"""What stands where something else is expected. Nothing is called `outside`, nor may it be."""

LITERALS = (
    *("1", "-1", "0", "1e400", "nan", "inf", "true", "[]", "[[1], {}]", "{}", '""', "'../outside'"),
    *('"/outside"', "9" * 400, "1979-05-27", "0x7fffffffffffffff", '"""\n"""', "{ kind = 'x' }"),
    *('"\\u0000"', '"none"', '"auto"', "[1, 2, 3, 4]", '["a"]', "0.1", "1_000_000_000_000"),
)
"""Values of TOML, some of them none."""

SNIPPETS = (
    *("{{ ", " }}", "{% for m in messages %}", "{% for i in range(9999) %}", "{% endfor %}"),
    *("{% if m %}", "{% endif %}", "{% set x = messages %}", "{% set m.x = 1 %}", "{% break %}"),
    *("{% generation %}", "{% endgeneration %}", "{% raw %}", "{% macro f(x) %}", "{% endmacro %}"),
    *("{{ f(f) }}", "{{ self }}", "{% include 'a.jsonl' %}", "{% import 'os' as os %}", "{#"),
    *(" | batch(99999999, 'x')", " | round(99999999, 'floor')", " | sum(start=[])", " | tojson"),
    *(" | int(base=16)", " | list", " | map('batch', 99999999)", " | replace('', 'aaaa')", "[1:]"),
    *(" * 99999999", " ** 99999999", " ~ messages", " % messages", ".join(messages)", "[::-1]"),
    *(".__class__.__mro__", ".format(messages)", ".__globals__", "['__class__']", " in messages"),
    *("\ufdd0", "'\\ufdd0\\U000f0000'", "'\\ufdd1'", "'\\ufdd2'", "<|eos|>", "<|e", "os|>"),
    *("{{ raise_exception('no') }}", "{{ strftime_now('%Y' * 99) }}", "{{ namespace(x=1) }}"),
)
"""What templates are made of, and what they must not come to."""

_DEEP = 3_000


def of_bytes(data: bytes, draw: Random, other: bytes = b"") -> bytes:
    """One to four small damages, anywhere; `other` is a file to take pieces from."""
    made = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(7):
            case 0 if made:
                made[at % len(made)] ^= 1 << draw.randrange(8)
            case 1 if made:
                made[at % len(made)] = draw.choice(b'\0\xff "{}[]:,0129-.eE/\\\n')
            case 2:
                del made[at : at + draw.choice((1, 2, 8, 64, 1024))]
            case 3:
                made[at:at] = made[at : at + draw.choice((1, 8, 64))]
            case 4:
                made[at:at] = draw.randbytes(draw.choice((1, 4, 16)))
            case 5:
                del made[at:]
            case _:
                start = draw.randrange(len(other) + 1)
                made[at:at] = other[start : start + draw.choice((4, 32, 256))]
    return bytes(made)


def of_json(data: bytes, draw: Random) -> bytes:
    """A JSON document with one or two of its values, names or members changed."""
    value = json.loads(data)
    for _ in range(draw.randint(1, 2)):
        value = _changed(value, draw)
    text = json.dumps(value)
    if draw.random() < 0.05:  # a name twice
        text = text.replace("{", f'{{"{draw.choice(("step", "format", "files"))}": 1, ', 1)
    if draw.random() < 0.02:  # deeper than any stack
        opened, closed = draw.choice((("[", "]"), ('{"a":', "}")))
        text = opened * _DEEP + text + closed * _DEEP
    return text.encode("utf-8", "surrogatepass")


def of_json_lines(data: bytes, draw: Random) -> bytes:
    """Lines of JSON with some changed, doubled, moved or dropped."""
    lines = data.splitlines(keepends=True)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines)) if lines else 0
        match draw.randrange(6) if lines else 5:
            case 0 | 1 | 2:
                try:
                    lines[at] = of_json(lines[at], draw) + b"\n"
                except (ValueError, RecursionError):  # changed twice
                    lines[at] = of_bytes(lines[at], draw)
            case 3:
                lines.insert(at, draw.choice(lines))
            case 4:
                del lines[at]
            case _:
                lines.append(b"")
    return b"".join(lines)


def of_toml(data: bytes, draw: Random) -> bytes:
    """A TOML document with values replaced, lines doubled, dropped or moved to other tables."""
    lines = data.decode().splitlines()
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines))
        name = lines[at].partition("=")[0]
        match draw.randrange(8):
            case 0 | 1 | 2 | 3:
                lines[at] = f"{name}= {draw.choice(LITERALS)}"
            case 4:
                lines[at] = draw.choice(("[model]", "[[data.corpus.parts]]", "kind = 'x'", "a.b=1"))
            case 5:
                del lines[at]
            case 6:
                lines.insert(draw.randrange(len(lines) + 1), lines[at])
            case _:
                value = draw.choice(lines).partition("=")[2]
                lines[at] = f"{name}={value}"
        lines = lines or [""]
    return "\n".join(lines).encode()


def of_template(data: bytes, draw: Random) -> bytes:
    """A chat template with pieces of others put into it, some of them hostile, or left out."""
    text = data.decode()
    for _ in range(draw.randint(1, 4)):
        borders = [found.start() for found in re.finditer(r"\b|(?<=})|(?={)", text)] or [0]
        at, end = draw.choice(borders), draw.choice(borders)
        put = draw.choice(SNIPPETS)
        text = text[:at] + put + (text[end:] if at <= end and draw.random() < 0.2 else text[at:])
    return text.encode("utf-8", "surrogatepass")


def of_safetensors(data: bytes, draw: Random) -> bytes:
    """A safetensors file with its header changed; its length mostly told rightly."""
    (length,) = struct.unpack("<Q", data[:8])
    header = of_json(data[8 : 8 + length].rstrip(), draw)
    if draw.random() < 0.9:
        length = len(header)
    else:
        length = draw.choice((0, 1, length, 2**31, 2**63, 2**64 - 1))
    return struct.pack("<Q", length) + header + data[8 + struct.unpack("<Q", data[:8])[0] :]


def of_array(data: bytes, draw: Random) -> bytes:
    """A file of NumPy with its header changed: objects, other sizes, other shapes."""
    (length,) = struct.unpack("<H", data[8:10])
    header = data[10 : 10 + length].decode("latin-1")
    kind = draw.choice(("|O", "<i8", "<f4", "|V8", "<U4", "|S0", ">u4", "nonsense", "<M8[s]"))
    shape = draw.choice(("()", "(0,)", "(1, 1)", "(-1,)", "(99999999999999999999,)", "(2, 3, 4)"))
    order = draw.choice(("True", "False", "__import__('os')"))
    match draw.randrange(4):
        case 0:
            header = re.sub(r"'descr': '[^']*'", f"'descr': '{kind}'", header)
        case 1:
            header = re.sub(r"'shape': \([^)]*\)", f"'shape': {shape}", header)
        case 2:
            header = re.sub(r"'fortran_order': \w+", f"'fortran_order': {order}", header)
        case _:
            header = header.replace("descr", draw.choice(("", "shape", "dscr")), 1)
    encoded = header.encode("latin-1")
    return data[:8] + struct.pack("<H", len(encoded)) + encoded + data[10 + length :]


def _changed(value: Any, draw: Random) -> Any:
    """The value with one thing in it changed."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.05:
        return _other(value, draw)
    how = draw.random()
    if isinstance(value, list):
        at = draw.randrange(len(value))
        put = [] if how < 0.1 else [value[at]] * 2 if how < 0.2 else [_changed(value[at], draw)]
        return [*value[:at], *put, *value[at + 1 :]]
    name = draw.choice(list(value))
    rest = {key: each for key, each in value.items() if key != name}
    if how < 0.1:
        return rest
    if how < 0.2:
        return {**rest, str(draw.choice(VALUES)): value[name]}
    return {**rest, name: _changed(value[name], draw)}


def _other(value: Any, draw: Random) -> Any:
    """Something else in its place, sometimes close to it."""
    if type(value) is int and draw.random() < 0.4:
        return value + draw.choice((-1, 1, -value, 8, 2**32))
    if isinstance(value, str) and draw.random() < 0.3:
        return value + draw.choice((".", "/", "\0", "x", "/../../outside"))
    return draw.choice(VALUES)
