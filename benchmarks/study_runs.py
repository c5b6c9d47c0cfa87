"""The study's run list: what a run is, and a file that survives being killed.

One finished run is one line of JSON. A line that a kill cut short is skipped when the
file is read again, and that run is done again.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Spec:
    """All that a run depends on; equal specs are the same run."""

    phase: str
    """`"tune"` chooses the learning rate, `"final"` is compared."""
    dataset: str
    network: str
    optimizer: str
    transform: str
    call: str
    """The transformation with its arguments."""
    learning_rate: float
    seed: int
    epochs: int
    train_images: int
    validation_images: int
    test_images: int
    batch_size: int
    widths: tuple[int, ...]
    blocks: int
    """Residual blocks a width."""

    @property
    def setting(self) -> tuple[str, str, str]:
        """Data set, network and optimizer."""
        return self.dataset, self.network, self.optimizer


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run measured."""

    validation_accuracies: list[float]
    """After each epoch; ends early where the run diverged."""
    losses: list[float | None]
    """Mean training loss of each epoch; None where it is not finite."""
    test_accuracy: float | None
    """At the end; None for a run of phase `"tune"`, which never sees the test set."""
    seconds: list[float]
    """Wall time of each epoch's steps, without compilation and evaluation."""
    cpu_seconds: list[float]
    """CPU time of all threads for the same."""
    wall_seconds: float
    """Of the whole run, everything included."""
    jax: str

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite."""
        return None in self.losses


class RunList:
    """Finished runs, in a file of JSON lines.

    Args:
      path: The file; made with the first run.

    Raises:
      ValueError: If a whole line is JSON, but of another form.
    """

    def __init__(self, path: Path):
        self.path = path
        self.runs: dict[Spec, Outcome] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._cut_short = bool(text) and not text.endswith("\n")
        for number, line in enumerate(text.splitlines(), 1):
            try:
                fields = json.loads(line)
            except ValueError:
                print(
                    f"{path.name}, line {number} is damaged: that run is done again",
                    file=sys.stderr,
                )
                continue
            spec, outcome = _parse(fields, f"{path.name}, line {number}")
            self.runs[spec] = outcome

    def __contains__(self, spec: Spec) -> bool:
        return spec in self.runs

    def __getitem__(self, spec: Spec) -> Outcome:
        return self.runs[spec]

    def __iter__(self) -> Iterator[Spec]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def add(self, spec: Spec, outcome: Outcome) -> None:
        """Appends a finished run; it is on the disk when this returns."""
        fields = {
            "spec": dataclasses.asdict(spec),
            "outcome": dataclasses.asdict(outcome),
        }
        line = json.dumps(fields, allow_nan=False) + "\n"
        if self._cut_short:
            line = "\n" + line
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._cut_short = False
        self.runs[spec] = outcome


def _parse(fields: Any, where: str) -> tuple[Spec, Outcome]:
    try:
        spec = fields["spec"]
        widths = tuple(spec["widths"])
        return Spec(**{**spec, "widths": widths}), Outcome(**fields["outcome"])
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{where} is no run of this study ({error}); give another file, or "
            "remove the line"
        ) from error
