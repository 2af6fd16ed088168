"""Our classes, made from the stock ones: ``MistralModel`` becomes ``GeonormMistralModel``."""

from __future__ import annotations

import types
from typing import Any

from geonorm.models.adapter import Classes
from geonorm.models.blocks import RewiredBlock
from geonorm.models.pretrained import RewiredConfigMixin, RewiredModelMixin


def rewired_classes(module: str, stock: Classes) -> Classes:
    """Make the classes that add a placement to a family's stock classes.

    Args:
        module: name of the module that assigns the result to attributes of the same names, ``Geonorm`` before the stock
            name, so that the classes can be imported and pickled.
        stock: the family's own classes.
    """

    def subclass(mixin: type, parent: type[Any], **fields: Any) -> type[Any]:
        fields |= {"__module__": module, "__doc__": f"``{parent.__name__}`` with a placement."}
        name = f"Geonorm{parent.__name__}"
        return types.new_class(name, (mixin, parent), exec_body=lambda namespace: namespace.update(fields))

    config = subclass(
        RewiredConfigMixin,
        stock.config,
        model_type=f"geonorm_{stock.config.model_type}",
        placement="geonorm",
        placement_options=None,
        # transformers makes a dataclass of every configuration class.
        __annotations__={"placement": str, "placement_options": dict[str, Any] | None},
    )
    block = subclass(RewiredBlock, stock.block)
    own = {"config_class": config, "_no_split_modules": [block.__name__]}
    return Classes(
        config,
        block,
        subclass(RewiredModelMixin, stock.model, **own),
        subclass(RewiredModelMixin, stock.causal_lm, **own),
    )
