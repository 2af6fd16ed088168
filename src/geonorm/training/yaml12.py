"""YAML by the rules of version 1.2, where ``1e-4`` is a number and ``no`` and ``on`` are words.

PyYAML follows version 1.1, in which it is the other way round. Only plain data is built, never an object.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Hashable
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from geonorm.errors import UserError


class _SafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema; no key twice, no aliases."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}  # type: ignore[misc]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            # A few lines of them can stand for gigabytes.
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "aliases are not taken; use `include`", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise ConstructorError(None, None, f"key {name!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_NUMBER = list("-+.0123456789")
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _NUMBER),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", _NUMBER),
):
    _SafeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _construct_int(loader: _SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0 if text[:2] in ("0o", "0x") else 10)


def _construct_float(loader: _SafeLoader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(inf|nan)", r"\1", str(loader.construct_scalar(node)).lower()))


_SafeLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_SafeLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML 1.2 text.

    Args:
        text: the document.
        where: its name in an error.

    Raises:
        UserError: not YAML, a key given twice, or a tag that asks for an object.
    """
    try:
        return yaml.load(text, _SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"cannot read {where}{line}: {problem}") from None


def write_yaml(data: Any) -> str:
    """Return plain data as YAML that :func:`parse_yaml` reads, and readers of version 1.1 too."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something else than text; lists on one line."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {  # type: ignore[misc]
        first: [*_SafeLoader.yaml_implicit_resolvers.get(first, []), *rules]
        for first, rules in {
            **{key: [] for key in _SafeLoader.yaml_implicit_resolvers},
            **yaml.SafeDumper.yaml_implicit_resolvers,
        }.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    float, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:float", _float_text(value))
)
_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)
)


def _float_text(value: float) -> str:
    if value != value:
        return ".nan"
    if value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return repr(value)
