"""YAML files by the rules of version 1.2, where ``1e-4`` is a number and ``no`` a word; only plain data is built."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from geonorm.errors import UserError

_SEQUENCE = "tag:yaml.org,2002:seq"


def read_file(path: Path) -> dict[str, Any]:
    """Keys and values of one YAML file; nothing is included.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"the recipe {path} is no regular file; give a file of YAML")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read the recipe {path}: it is not UTF-8 text") from None
    return mapping(parse_yaml(text, str(path)), str(path))


def mapping(data: Any, where: str) -> dict[str, Any]:
    """Keys and values, each key a word; nothing counts as none of them.

    Raises:
        UserError: it is something else.
    """
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{where} must hold keys and values, got {type(data).__name__}")
    for key in data:
        if not isinstance(key, str):
            raise UserError(f"{where} has the key {key!r}; keys are words")
    return data


def dump_data(data: dict[str, Any]) -> str:
    """Return plain data as YAML, keys in their order."""
    stream = io.StringIO()
    _yaml().dump(data, stream)
    return stream.getvalue()


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML 1.2 text.

    Args:
        text: the document.
        where: its name in an error.

    Raises:
        UserError: not YAML, a key given twice, an alias, or a tag that asks for an object.
    """
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.events import AliasEvent

    try:
        # A few lines of aliases can stand for gigabytes.
        for event in _yaml().parse(text):
            if isinstance(event, AliasEvent):
                raise MarkedYAMLError(problem="aliases are not taken; use `include`", problem_mark=event.start_mark)
        return _yaml().load(text)
    except (YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"cannot read {where}{line}: {problem.splitlines()[0]}") from None


def _yaml() -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import SafeConstructor
    from ruamel.yaml.representer import SafeRepresenter

    class Constructor(SafeConstructor):
        """Dates stay text, as in the core schema."""

    class Representer(SafeRepresenter):
        """Lists on one line."""

    Representer.add_representer(list, lambda to, data: to.represent_sequence(_SEQUENCE, data, flow_style=True))
    Constructor.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Representer = Constructor, Representer
    yaml.default_flow_style = False
    # Keys in the order of the configuration.
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.width = 10_000
    return yaml
