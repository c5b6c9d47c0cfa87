"""Turns the few reST forms that docstrings use into Markdown, for the site alone.

In a terminal and in an editor docstrings read best with `::` and `.. math::`.
"""

import re
import textwrap
from typing import Any

import griffe

_DISPLAY = re.compile(r"^\.\. math::[ ]?(.*(?:\n(?:[ ]+.*|(?=\n[ ])))*)", re.MULTILINE)
_INLINE = re.compile(r":math:`([^`]*)`")
_LITERAL = re.compile(r"^::\n", re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites each docstring once it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of one object."""
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Replaces formulas by `$` forms, and drops the marks of literal blocks."""
    text = _DISPLAY.sub(_display, text)
    return _LITERAL.sub("", _INLINE.sub(r"$\1$", text))


def _display(match: re.Match[str]) -> str:
    first, _, rest = match[1].partition("\n")
    body = f"{first}\n{textwrap.dedent(rest)}".strip()
    return f"$$\n{body}\n$$"
