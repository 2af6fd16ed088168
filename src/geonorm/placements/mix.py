"""Another placement in each layer: Mix-LN (arXiv 2412.13795) and every other mixture."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from geonorm.errors import UserError
from geonorm.placements.base import Connection, InitRule, Placement, Role, Site


@dataclasses.dataclass(frozen=True)
class Mix(Placement):
    """Placement ``first`` in the first part of the layers, ``rest`` in the others; each with its own init.

    ``mix:first=post,share=0.25,rest=pre`` is Mix-LN, and the default. The stream enters as the first layer's placement
    says and leaves, with a final norm or without, as the last layer's says.

    Options:
        first, rest: placements of one row a token, as the command line writes them (``"pre:normalize_entry=true"``).
        share: part of the layers that are ``first``, rounded to whole layers; between 0 and 1 each of the two gets at
            least one layer, so that entry and exit are those of a layer. A single layer is ``first``.
        layers: the placement of each layer, in place of the three others, which then keep their defaults.
    """

    name = "mix"

    first: str = "post"
    share: float = 0.25
    rest: str = "pre"
    layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.share) not in (int, float) or not 0 <= self.share <= 1:
            raise UserError(f"`share` must lie in 0..1, got {self.share}")
        if self.layers is not None:
            if not isinstance(self.layers, (list, tuple)) or not self.layers:
                raise UserError(f"`layers` must be a list of placements, one a layer, got {self.layers!r}")
            for name in ("first", "share", "rest"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise UserError(f"`layers` gives the placement of every layer; leave `{name}` out")
            object.__setattr__(self, "layers", tuple(self.layers))
        for part in self._parts():
            _check(part)

    def _parts(self) -> list[Placement]:
        return [_parsed(text) for text in (self.layers or (self.first, self.rest))]

    def at(self, layer: int, num_layers: int) -> Placement:
        """The placement that rules in one layer, counted from 1.

        Raises:
            UserError: ``layers`` is for another number of layers.
        """
        if self.layers is None:
            return _parsed(self.first if layer <= self._num_first(num_layers) else self.rest)
        if len(self.layers) != num_layers:
            raise UserError(f"`layers` names {len(self.layers)} placements, but the model has {num_layers} layers")
        return _parsed(self.layers[layer - 1])

    def _num_first(self, num_layers: int) -> int:
        rounded = round(self.share * num_layers)
        if not 0 < self.share < 1:
            return rounded
        return max(1, min(rounded, num_layers - 1))

    def slots(self, site: Site) -> tuple[str, ...]:
        """Those of the layer's placement."""
        return self.at(site.layer, site.num_layers).slots(site)

    def connection(self, site: Site) -> Connection:
        """Make that of the layer's placement."""
        return self.at(site.layer, site.num_layers).connection(site)

    def init_rule(self, role: Role, num_layers: int) -> InitRule:
        """For weights outside the layers, which all placements draw alike.

        Raises:
            UserError: the role is one inside the layers, where the layer's placement has the rule.
        """
        if role not in ("embedding", "head"):
            raise UserError(f"the layers of a mixture have rules of their own; say for which layer {role!r} is drawn")
        return InitRule()

    def enter(self, h: Tensor) -> Any:
        """Make the stream as the first layer's placement does."""
        return self._parts()[0 if self.layers or self.share > 0 else -1].enter(h)

    def exit(self, stream: Any) -> Tensor:
        """End the stream as the last layer's placement does."""
        return self._last().exit(stream)

    @property
    def final_norm(self) -> bool:  # type: ignore[override]
        """Whether the last layer's placement keeps the norm before the head."""
        return self._last().final_norm

    def point(self, stream: Any) -> Tensor:
        """The point of a stream; within a layer of parallel sub-layers their sum."""
        if not isinstance(stream, tuple):
            return stream
        # Of the part that made the tuple; the others hand it back.
        return next(point for part in self._parts() if isinstance(point := part.point(stream), Tensor))

    def options(self) -> dict[str, Any]:
        """Every option with its value, JSON-able."""
        return {**super().options(), "layers": None if self.layers is None else list(self.layers)}

    def _last(self) -> Placement:
        return self._parts()[-1 if self.layers or self.share < 1 else 0]


def _parsed(text: str) -> Placement:
    from geonorm.placements.registry import parse  # The table holds this file's class too.

    if not isinstance(text, str):
        raise UserError(f"a mixture takes placements as the command line writes them, such as 'pre', got {text!r}")
    return parse(text)


def _check(part: Placement) -> None:
    plain = type(part).inside is Placement.inside and type(part).exit_module is Placement.exit_module
    if isinstance(part, Mix) or not part.single_stream or not plain or part.weight_axes:
        raise UserError(
            f"a mixture takes placements with one row a token that change nothing but the connections; {part.name!r} "
            "does not fit"
        )
    shared = [field.name for field in dataclasses.fields(Placement) if getattr(part, field.name) != field.default]
    if shared:
        raise UserError(f"give `{shared[0]}` to the mixture, not to {part.name!r} in it")
