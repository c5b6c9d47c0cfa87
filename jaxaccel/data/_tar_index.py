"""Where the members of a tar file are, grouped into samples."""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxaccel.data._errors import DataCorruptionError

BLOCK = 512
# The key of what the writer says about labels, in the file's global header.
NOTE = "JAXACCEL.dtypes"
# The types whose content belongs to the next member, or to all.
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_FILES = (b"0", b"\0", b"7")
_HARD_LINK, _SYMBOLIC_LINK = b"1", b"2"
_NO_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")
_MOST_NAME = 1 << 20
# One after the other, as on Linux; they may lead around in a circle.
_MOST_LINKS = 40
# The part of a path before the first dot of the file's name, and what follows.
_SAMPLE = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]*)", re.DOTALL)


class Member(NamedTuple):
    """A regular file in a tar file.

    Attributes:
      name: Its path.
      start: Where its content begins.
      size: Bytes of content.
    """

    name: str
    start: int
    size: int


class _Link(NamedTuple):
    name: str
    target: str
    header: int


class Samples(NamedTuple):
    """The members of a tar file by sample, in order of first appearance.

    Attributes:
      kinds: The kinds of member, `0001.seg.png` being of kind `seg.png`.
      starts: `(samples, kinds)`, where each member's content begins; -1 where a
        sample lacks it.
      sizes: Bytes of content.
      note: What the writer left in the file's global header.
    """

    kinds: list[str]
    starts: np.ndarray
    sizes: np.ndarray
    note: str


def find_samples(
    path: Path,
    data: np.ndarray,
    check: Callable[[np.ndarray, np.ndarray], None] | None,
) -> Samples:
    """Reads all headers of a tar file.

    Args:
      path: The file, for messages.
      data: All of it, uint8.
      check: Compares byte ranges, by their starts and stops, with checksums.

    Returns:
      Its samples.

    Raises:
      DataCorruptionError: If it is damaged.
      ValueError: If it holds no sample, or two members of the same name, or a link
        to something else than one of its members.
    """
    view, notes = memoryview(data), {}  # pyright: ignore[reportArgumentType]
    heads: list[tuple[int, int]] = []
    found = list(_members(path, view, notes, heads))
    if check:
        check(*np.array(heads, np.int64).reshape(-1, 2).T)
    samples: dict[str, dict[str, Member]] = {}
    for member in _linked(path, found):
        match = _SAMPLE.fullmatch(member.name)
        assert match is not None
        sample = samples.setdefault(match[1], {})
        kind = match[2].lower()
        if kind in sample:
            raise ValueError(
                f"{path} holds two members named {member.name!r} (byte offset "
                f"{sample[kind].start} and {member.start}); give samples names of "
                "their own"
            )
        sample[kind] = member
    if not samples:
        raise ValueError(
            f"{path} holds no member named <sample>.<kind>, as a WebDataset does: "
            "0001.jpg and 0001.cls"
        )
    kinds = sorted({kind for sample in samples.values() for kind in sample})
    nothing = Member("", -1, 0)
    rows = [[s.get(kind, nothing) for kind in kinds] for s in samples.values()]
    table = np.array([[m[1:] for m in row] for row in rows], np.int64)
    return Samples(kinds, table[..., 0], table[..., 1], notes.get(NOTE, ""))


def _linked(path: Path, found: list[Member | _Link]) -> Iterator[Member]:
    """The members that are named as parts of samples, links replaced by files."""
    by_name = {posixpath.normpath(each.name): each for each in found}
    for each in found:
        if each.name.startswith("__") or not _SAMPLE.fullmatch(each.name):
            continue
        target, steps = each, 0
        while isinstance(target, _Link) and steps < _MOST_LINKS:
            target, steps = by_name.get(posixpath.normpath(target.target)), steps + 1
        if not isinstance(target, Member):
            assert isinstance(each, _Link)
            raise ValueError(
                f"{path}: the member {each.name!r} (byte offset {each.header}) is a "
                f"link to {each.target!r}, which is no file in this archive; pack what "
                "it refers to: tar --dereference"
            )
        yield target._replace(name=each.name)


def _members(
    path: Path,
    view: memoryview,
    notes: dict[str, str],
    heads: list[tuple[int, int]],
) -> Iterator[Member | _Link]:
    at, override = 0, {}
    while True:
        header = bytes(view[at : at + BLOCK])
        if len(header) < BLOCK:
            reason = "the file ends without the empty block that marks a tar file's end"
            raise DataCorruptionError(path, None, at, reason)
        if not any(header):
            return
        kind, start = header[156:157], at + BLOCK
        try:
            _check_header(header)
            size = int(override.get("size", "") or _number(header[124:136]))
            if kind in _NO_CONTENT:
                size = 0
            if not 0 <= size <= len(view) - start:
                left = len(view) - start
                raise ValueError(f"a member of {size} bytes, but only {left} follow")
            content = view[start : start + size]
            if kind in (_LONG_NAME, _LONG_LINK):
                key = "path" if kind == _LONG_NAME else "linkpath"
                override[key] = _text(content[:_MOST_NAME])
            elif kind in (_PAX, _PAX_GLOBAL):
                target = override if kind == _PAX else notes
                target.update(_pax(bytes(content[:_MOST_NAME])))
            elif kind == b"S" or "GNU.sparse.major" in override:
                raise ValueError("a sparse member, which is not supported")
        except ValueError as error:
            raise DataCorruptionError(path, None, at, str(error)) from None
        about_others = kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL)
        heads.append((at, start + size * about_others))
        name = override.get("path") or _name(header)
        if kind in _FILES:
            yield Member(name, start, size)
        elif kind in (_HARD_LINK, _SYMBOLIC_LINK):
            target = override.get("linkpath") or _text(memoryview(header)[157:257])
            if kind == _SYMBOLIC_LINK:
                target = posixpath.join(posixpath.dirname(name), target)
            yield _Link(name, target, at)
        if not about_others:
            override = {}
        at = start + -(-size // BLOCK) * BLOCK


def _check_header(header: bytes) -> None:
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    stored = _number(header[148:156])
    # Old programs summed signed bytes.
    signed = total - 256 * sum(b > 127 for b in header[:148] + header[156:])
    if stored not in (total, signed):
        raise ValueError(f"the header's sum is {total}, but it says {stored}")


def _number(field: bytes) -> int:
    if field[0] & 128:
        # GNU's way to write what eleven octal digits do not hold.
        return int.from_bytes(bytes([field[0] & 127]) + field[1:], "big")
    text = field.split(b"\0")[0].strip()
    try:
        return int(text or b"0", 8)
    except ValueError:
        raise ValueError(f"{field!r} is no octal number") from None


def _name(header: bytes) -> str:
    name = _text(memoryview(header)[:100])
    prefix = _text(memoryview(header)[345:500])
    # GNU's own variant keeps other things where the prefix is.
    ustar = header[257:263] == b"ustar\0"
    return f"{prefix}/{name}" if ustar and prefix else name


def _text(content: memoryview) -> str:
    return bytes(content).split(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes) -> Mapping[str, str]:
    found = {}
    while content.strip(b"\0"):
        digits = content.split(b" ", 1)[0]
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = content[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or content[length - 1 : length] != b"\n":
            raise ValueError("a damaged extended header")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[length:]
    if not found.get("size", "0").isdigit():
        raise ValueError(f"an extended header with the size {found['size']!r}")
    return found
