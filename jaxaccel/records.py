"""Records: one format for every measurement, and how ratios are measured.

Times of one machine say little on another, and little on a busy one. What is
kept here is the ratio of contenders that took turns in one process.
"""

import dataclasses
import datetime
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel._environment import commit, hardware, versions
from jaxaccel._measure import Ratio, interleave, paired_ratio, three_digits

__all__ = ("VERDICTS", "Headline", "Ratio", "Record", "interleave", "paired_ratio")

VERDICTS = ("helps", "trade-off", "no evidence")

# Absolute paths, which would name a user or a machine. "images/s" is none.
_PATH = re.compile(r"(^|[\s'\"=:])(/\w|~/|[A-Za-z]:\\)")


@dataclasses.dataclass(frozen=True)
class Headline:
    """A row of the table of results in the README.

    Args:
      what: What was measured.
      against: What it was compared with.
      figure: Name of the ratio or figure of the record that the row shows.
    """

    what: str
    against: str
    figure: str


@dataclasses.dataclass(frozen=True)
class Record:
    """A stored measurement; build it with `create`.

    Attributes:
      name: Lower-case letters, digits and `_`; the file is `<name>.json`.
      claim: The sentence that the measurement tests.
      verdict: `"helps"`, `"trade-off"` or `"no evidence"`.
      date: Day of the measurement in UTC, `YYYY-MM-DD`.
      commit: Git commit of the code, with `+changes` where the working tree
        differed from it; None outside of a repository.
      versions: Of Python and the packages that matter.
      hardware: Processor, logical cores, platform, kind and number of devices.
      parameters: Settings of the measurement.
      unit: Unit of the rounds.
      rounds: Raw values of each contender, one a round.
      ratios: `"a / b"` to the ratio of the contenders a and b.
      figures: Exact figures by name, numbers or text.
      headline: Rows of the README's table.

    Raises:
      TypeError: If a field has the wrong type.
      ValueError: If a value breaks what is said above, or a text holds an absolute
        path (records are published).
    """

    name: str
    claim: str
    verdict: str
    date: str
    commit: str | None
    versions: dict[str, str]
    hardware: dict[str, str | int]
    parameters: dict[str, Any]
    unit: str
    rounds: dict[str, list[float]]
    ratios: dict[str, Ratio]
    figures: dict[str, str | int | float]
    headline: tuple[Headline, ...]

    def __post_init__(self):
        _check_types(self)
        _check_values(self)

    @classmethod
    def create(
        cls,
        name: str,
        claim: str,
        *,
        verdict: str,
        parameters: Mapping[str, Any],
        unit: str = "",
        rounds: Mapping[str, Sequence[float]] | None = None,
        ratios: Sequence[str] = (),
        figures: Mapping[str, str | int | float] | None = None,
        headline: Sequence[Headline] = (),
    ) -> "Record":
        """Makes a record of a measurement that was just made here.

        Fills in date, commit, versions and hardware, and computes the ratios.

        Args:
          name: As in the attributes, like the other arguments.
          claim: The sentence that was tested.
          verdict: One of `VERDICTS`.
          parameters: Settings; values as JSON has them.
          unit: Unit of the rounds.
          rounds: Values of each contender; kept to six digits.
          ratios: `"a / b"` for each pair of contenders to compare.
          figures: Exact figures.
          headline: Rows for the README.

        Returns:
          The record.

        Raises:
          TypeError: As for the class.
          ValueError: As for the class; if a ratio names no contender.

        Examples:
          >>> from jaxaccel.records import Record
          >>> record = Record.create(
          ...     "half", "b takes half the time of a", verdict="helps",
          ...     parameters={"rounds": 3}, unit="s",
          ...     rounds={"a": [2.0, 4.0, 6.0], "b": [1.0, 2.0, 3.0]},
          ...     ratios=["a / b"])
          >>> print(record.ratios["a / b"])
          2.00x (2.00 to 2.00)
          >>> Record.from_json(record.to_json()) == record
          True
        """
        kept = {
            contender: [_six_digits(x) for x in values]
            for contender, values in (rounds or {}).items()
        }
        return cls(
            name=name,
            claim=claim,
            verdict=verdict,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            commit=commit(),
            versions=versions(),
            hardware=hardware(),
            parameters=_as_json(parameters),
            unit=unit,
            rounds=kept,
            ratios={key: _ratio(key, kept) for key in ratios},
            figures=dict(figures or {}),
            headline=tuple(headline),
        )

    def to_json(self) -> str:
        """Returns the record as JSON text, the same text for equal records."""
        text = json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)
        # A list of numbers on one line: a hundred rounds stay readable.
        return re.sub(r"\[[^][{}\"]*\]", lambda m: " ".join(m[0].split()), text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """Reads a record from JSON text.

        Args:
          text: What `to_json` returned.

        Returns:
          The record.

        Raises:
          TypeError: As for the class.
          ValueError: As for the class; if the text is no JSON object, or fields are
            unknown or missing.
        """
        fields = _fields(cls, json.loads(text), "record")
        if isinstance(fields["ratios"], dict):
            fields["ratios"] = {
                key: Ratio(**_fields(Ratio, value, f"ratio {key!r}"))
                for key, value in fields["ratios"].items()
            }
        if isinstance(fields["headline"], list):
            fields["headline"] = tuple(
                Headline(**_fields(Headline, row, "headline row"))
                for row in fields["headline"]
            )
        return cls(**fields)

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `<name>.json` into a folder, which is made if it is missing.

        Args:
          folder: The folder.

        Returns:
          The file's path.
        """
        path = Path(folder) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Record":
        """Reads a record from a file.

        Args:
          path: The file.

        Returns:
          The record.

        Raises:
          FileNotFoundError: If there is no such file.
          TypeError: As for the class, naming the file.
          ValueError: As for `from_json`, naming the file.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls.from_json(text)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{path} is no valid record: {error}") from error

    def table(self) -> str:
        """Returns the record as text for a terminal."""
        width = max(map(len, [*self.rounds, *self.ratios, *self.figures, ""]))
        lines = [self.claim]
        if self.rounds:
            lines.append(f"\n  {'contender':<{width}}    median  {self.unit}")
        for name, values in self.rounds.items():
            low, mid, high = (
                three_digits(x) for x in (min(values), np.median(values), max(values))
            )
            lines.append(f"  {name:<{width}}  {mid:>8}  (rounds {low} to {high})")
        if self.ratios:
            lines.append(f"\n  {'ratio':<{width}}  median and 95 % interval")
        for name, ratio in self.ratios.items():
            lines.append(f"  {name:<{width}}  {ratio}")
        if self.figures:
            lines.append(f"\n  {'figure':<{width}}")
        for name in self.figures:
            lines.append(f"  {name:<{width}}  {self.figure(name)}")
        return "\n".join([*lines, f"\nverdict: {self.verdict}"])

    def figure(self, name: str) -> str:
        """Returns a ratio or a figure as text.

        Args:
          name: Its name in `ratios` or `figures`.

        Returns:
          The text, with the interval of a ratio.

        Raises:
          ValueError: If the record has neither.
        """
        if name in self.ratios:
            return str(self.ratios[name])
        if name not in self.figures:
            raise ValueError(
                f"record {self.name!r} has no ratio or figure {name!r}; it has "
                f"{[*self.ratios, *self.figures]}"
            )
        value = self.figures[name]
        return three_digits(value) if isinstance(value, float) else str(value)


_SHAPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "claim": (str,),
    "verdict": (str,),
    "date": (str,),
    "commit": (str, type(None)),
    "versions": (dict,),
    "hardware": (dict,),
    "parameters": (dict,),
    "unit": (str,),
    "rounds": (dict,),
    "ratios": (dict,),
    "figures": (dict,),
    "headline": (tuple,),
}


def _check_types(record: Record) -> None:
    for name, kinds in _SHAPES.items():
        value = getattr(record, name)
        if not isinstance(value, kinds):
            raise TypeError(
                f"{name} must be {' or '.join(k.__name__ for k in kinds)}, got "
                f"{value!r}"
            )
    for name, values in record.rounds.items():
        if not isinstance(values, list) or not all(map(_is_number, values)):
            raise TypeError(
                f"rounds of {name!r} must be a list of finite numbers, got {values!r}"
            )
    for name, value in record.figures.items():
        if not (isinstance(value, str) or _is_number(value)):
            raise TypeError(
                f"figure {name!r} must be a finite number or text, got {value!r}"
            )


def _check_values(record: Record) -> None:
    if not re.fullmatch(r"[a-z0-9_]+", record.name):
        raise ValueError(
            f"name must be lower-case letters, digits and '_', got {record.name!r}"
        )
    if record.verdict not in VERDICTS:
        raise ValueError(f"verdict must be one of {VERDICTS}, got {record.verdict!r}")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", record.date):
        raise ValueError(f"date must be YYYY-MM-DD, got {record.date!r}")
    lengths = {name: len(values) for name, values in record.rounds.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise ValueError(
            f"all contenders need the same rounds, at least one, got {lengths}"
        )
    for key in record.ratios:
        _contenders(key, record.rounds)
    for row in record.headline:
        record.figure(row.figure)
    for text in _texts(dataclasses.asdict(record)):
        if _PATH.search(text):
            raise ValueError(
                f"a record must not hold the path {text!r}; leave it out of the "
                "parameters"
            )


def _as_json(parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(parameters), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"parameters must be finite numbers, text, booleans, None, lists or dicts "
            f"of them: {error}; got {parameters!r}"
        ) from error


def _contenders(key: str, rounds: Mapping[str, Any]) -> list[str]:
    names = key.split(" / ")
    if len(names) != 2 or not all(name in rounds for name in names):
        raise ValueError(
            f"ratio {key!r} must be 'a / b' with two of the contenders {list(rounds)}"
        )
    return names


def _ratio(key: str, rounds: Mapping[str, list[float]]) -> Ratio:
    ratio = paired_ratio(*(rounds[name] for name in _contenders(key, rounds)))
    return Ratio(*map(_six_digits, dataclasses.astuple(ratio)))


def _fields(cls: type, value: Any, what: str) -> dict[str, Any]:
    """Checks that a JSON object has exactly the fields of a dataclass."""
    if not isinstance(value, dict):
        raise ValueError(f"a {what} must be a JSON object, got {value!r}")
    known = {field.name for field in dataclasses.fields(cls)}
    unknown, missing = sorted(set(value) - known), sorted(known - set(value))
    if unknown or missing:
        raise ValueError(
            f"{what}: unknown fields {unknown}, missing fields {missing}; it has "
            f"exactly {sorted(known)}"
        )
    return dict(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")
