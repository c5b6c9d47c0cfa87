"""Which arrays and which layers are quantized how: rules by path."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from jaxaccel.quant._observers import Observer, ema_minmax
from jaxaccel.quant._spec import INT8_ACTIVATION, INT8_WEIGHT, QuantSpec

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """How the layers of a model are quantized that a pattern finds.

    Args:
      weight: Format of the kernel; None leaves it floating. Its scales follow from the
        weights of each step, unless they are learned.
      activation: Format of the layer's input, one scale (or `channel_axis=-1`); None
        leaves it floating.
      observer: Makes the observer of the input: `minmax`, `ema_minmax`, `percentile`,
        `mse_range`, or `functools.partial` of one.
      learned: Whether the scales of the kernel are parameters, trained as `lsq` says.

    Raises:
      TypeError: If a format is no `QuantSpec`, or `observer` is no function.
      ValueError: If the input's format has blocks, or its scales are along another axis
        than the last; if `learned` and the kernel's format is not what `lsq` takes.

    Examples:
      >>> from jaxaccel import quant
      >>> quant.LayerRule(activation=None).weight.bits
      8
    """

    weight: QuantSpec | None = INT8_WEIGHT
    activation: QuantSpec | None = INT8_ACTIVATION
    observer: Callable[[QuantSpec], Observer] = ema_minmax
    learned: bool = False

    def __post_init__(self) -> None:
        for name in ("weight", "activation"):
            spec = getattr(self, name)
            if spec is not None and not isinstance(spec, QuantSpec):
                raise TypeError(f"{name} must be a QuantSpec or None; got {spec!r}")
        if not callable(self.observer):
            raise TypeError(f"observer must be a function; got {self.observer!r}")
        for name in ("weight", "activation"):
            spec = getattr(self, name)
            if spec is not None and spec.rounding == "stochastic":
                raise ValueError(
                    f"{name} rounds stochastically, which needs keys that layers do "
                    "not have; call quantize or fake_quant yourself"
                )
        spec = self.activation
        if spec is not None and (
            spec.block_size is not None or spec.channel_axis not in (None, -1)
        ):
            raise ValueError(
                "activation must have one scale, or channel_axis=-1; got "
                f"channel_axis={spec.channel_axis}, block_size={spec.block_size}"
            )
        spec = self.weight
        if self.learned and (
            spec is None or not spec.symmetric or spec.is_float or spec.pow2_scale
        ):
            raise ValueError(
                "learned=True needs symmetric weights of integer codes, and any "
                f"scale; got {spec}"
            )

    def make_observer(self) -> Observer | None:
        """Returns the observer of the layer's input, None without one."""
        return None if self.activation is None else self.observer(self.activation)


LayerPolicy = LayerRule | Mapping[str, LayerRule | None]


class Rules:
    """An ordered policy that remembers which of its rules found something.

    Args:
      policy: One rule for everything; or patterns (regular expressions, found
        anywhere in `"path/like/this"`) with a rule, or None to leave alone. The first
        that fits counts.
      kind: What a rule is.

    Raises:
      TypeError: If a rule is of another kind.
      ValueError: If there is no rule, or a pattern is no regular expression.
    """

    def __init__(self, policy: Any, kind: type):
        rules = {"": policy} if isinstance(policy, kind) else policy
        if not isinstance(rules, Mapping):
            raise TypeError(
                f"a policy is a {kind.__name__} or a dict of patterns; got {policy!r}"
            )
        if not rules:
            raise ValueError("the policy holds no rule; give at least one pattern")
        self.patterns: dict[str, tuple[re.Pattern[str], Any]] = {}
        for pattern, rule in rules.items():
            if rule is not None and not isinstance(rule, kind):
                raise TypeError(
                    f"the rule of {pattern!r} must be a {kind.__name__} or None; got "
                    f"{rule!r}"
                )
            try:
                self.patterns[pattern] = re.compile(pattern), rule
            except re.error as error:
                raise ValueError(
                    f"{pattern!r} is no regular expression: {error}"
                ) from error
        self._used: set[str] = set()

    def find(self, path: str) -> Any:
        """Returns the first rule that fits, or None."""
        for pattern, (expression, rule) in self.patterns.items():
            if expression.search(path):
                self._used.add(pattern)
                return rule
        return None

    def check_all_used(self, paths: Iterable[str]) -> None:
        """Raises ValueError if a rule found nothing, naming it and what there is."""
        unused = [pattern for pattern in self.patterns if pattern not in self._used]
        if unused:
            known = list(paths)
            shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
            raise ValueError(
                f"the rule {unused[0]!r} fits nothing (or only what a rule before it "
                f"takes); there are: {shown or 'no paths at all'}"
            )
