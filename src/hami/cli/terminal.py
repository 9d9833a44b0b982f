"""Text of others on an administrator's terminal.

Names, annotations, conditions and files come from whoever may write them. Nothing in them reaches a terminal
as a control character: no escape sequence, no second line, no reversed reading order.
"""

from __future__ import annotations

import re
from typing import Final

_PLAIN_JSON: Final = re.compile(r"[\n -~]*")
_PAIR: Final = 0x10000


def plain(text: str) -> str:
    r"""One line of text with every character that is no printable one as ``\x1b``, ``\u202e``, ``\n``."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def plain_json(text: str) -> str:
    """A JSON text, which means the same, with such characters inside of its strings escaped."""
    if _PLAIN_JSON.fullmatch(text):
        return text
    return "".join(one if one == "\n" or one.isprintable() else _escaped(one) for one in text)


def _escaped(one: str) -> str:
    number = ord(one)
    if number < _PAIR:
        return f"\\u{number:04x}"
    number -= _PAIR
    return f"\\u{0xD800 | number >> 10:04x}\\u{0xDC00 | number & 0x3FF:04x}"
