"""Recipes: YAML files and ``key=value`` overrides to one checked configuration, and back.

YAML is read by the rules of YAML 1.2, where ``1e-4`` is a number and ``no`` and ``on`` are words; PyYAML follows 1.1,
in which it is the other way round. Only plain data is built, never an object.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from geonorm.errors import UserError, unknown
from geonorm.storage import write_text
from geonorm.training.config import RunConfig

INCLUDE = "include"
Config = TypeVar("Config")


class _Loader(yaml.SafeLoader):
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
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0 if text[:2] in ("0o", "0x") else 10)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(re.sub(r"\.(inf|nan)", r"\1", str(loader.construct_scalar(node)).lower()))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML 1.2 text.

    Args:
        text: the document.
        where: its name in an error.

    Raises:
        UserError: not YAML, a key given twice, or a tag that asks for an object.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"cannot read {where}{line}: {getattr(error, 'problem', None) or error}") from None


def load(files: Sequence[Path] = (), overrides: Iterable[str] = (), kind: type[Config] = RunConfig) -> Config:
    """Read recipes and overrides; what comes later wins, key by key.

    A recipe may name others, relative to its own folder, under ``include``; they come before it.

    Args:
        files: YAML recipes.
        overrides: ``key=value`` with dotted keys, the value in YAML, such as ``optimizer.lr=1e-3``.
        kind: the dataclass to fill.

    Raises:
        UserError: a file that cannot be read, an unknown key (suggests the nearest), a value of the wrong type or out
            of range.
    """
    merged: dict[str, Any] = {}
    for file in files:
        merged = _merge(merged, _read(Path(file).expanduser(), ()))
    for text in overrides:
        merged = _merge(merged, _override(text))
    return build(kind, merged)


def build(kind: type[Config], data: dict[str, Any]) -> Config:
    """Make a configuration from nested plain data; keys that are missing keep their defaults.

    Raises:
        UserError: as :func:`load`.
    """
    return _build(kind, data, "", key_paths(kind))


def key_paths(kind: Any) -> list[str]:
    """Dotted path of every value that a configuration holds."""
    paths = []
    for name, hint in _fields(kind).items():
        inner = [f"{name}.{path}" for path in key_paths(hint)] if dataclasses.is_dataclass(hint) else [name]
        paths.extend(inner)
    return paths


def _fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _build(kind: Any, data: dict[str, Any], prefix: str, known: list[str]) -> Any:
    fields = _fields(kind)
    for key in data:
        if key not in fields:
            raise _unknown_key(prefix, key, list(fields), known)
    return kind(**{key: _convert(fields[key], value, f"{prefix}{key}", known) for key, value in data.items()})


def _unknown_key(prefix: str, key: str, here: list[str], known: list[str]) -> UserError:
    # The right word in the wrong section first, then a slip of the pen here, then one elsewhere.
    ends: dict[str, str] = {}
    for path in known:
        ends.setdefault(path.rpartition(".")[2], path)
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    elsewhere = [ends[name] for name in difflib.get_close_matches(key, ends, n=1, cutoff=0.6)]
    found = [ends[key]] if key in ends else [f"{prefix}{name}" for name in near] or elsewhere
    hint = f"; did you mean {found[0]!r}?" if found else f" (known: {', '.join(f'{prefix}{name}' for name in here)})"
    return UserError(f"unknown key {prefix + key!r}{hint}")


def resolved(config: Any) -> dict[str, Any]:
    """Every value of a configuration as plain data; :func:`build` gives the configuration back."""
    return _plain(dataclasses.asdict(config))


def dump(config: Any) -> str:
    """Return the configuration as YAML that :func:`load` reads."""
    return yaml.dump(resolved(config), Dumper=_Dumper, sort_keys=False)


def save(path: Path, config: Any) -> None:
    """Write the configuration as YAML that :func:`load` reads."""
    write_text(path, dump(config))


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something else than text; lists on one line."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {  # type: ignore[misc]
        first: [*_Loader.yaml_implicit_resolvers.get(first, []), *rules]
        for first, rules in {
            **{key: [] for key in _Loader.yaml_implicit_resolvers},
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


def _read(path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in including:
        raise UserError(f"{path} includes itself, by way of {' -> '.join(p.name for p in including)}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read the recipe {path}: it is not UTF-8 text") from None
    data = _mapping(parse_yaml(text, str(path)), str(path))
    included = data.pop(INCLUDE, [])
    names = [included] if isinstance(included, str) else included
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"`include` in {path} must be a path or a list of paths, got {included!r}")
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, _read(path.parent / Path(name).expanduser(), (*including, path.resolve())))
    return _merge(merged, data)


def _mapping(data: Any, where: str) -> dict[str, Any]:
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{where} must hold keys and values, got {type(data).__name__}")
    for key in data:
        if not isinstance(key, str):
            raise UserError(f"{where} has the key {key!r}; keys are words")
    return data


def _override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"override {text!r} is not KEY=VALUE, such as optimizer.lr=1e-3")
    data = parse_yaml(value, f"override {text!r}")
    for name in reversed(key.strip().split(".")):
        data = {name: data}
    return data


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    # Options belong to their placement: another placement's would be unknown to it, or mean something else.
    if "placement" in over and base.get("placement") not in (None, over["placement"]):
        merged["options"] = over.get("options", {})
    return merged


def _convert(kind: Any, value: Any, name: str, known: list[str]) -> Any:
    """Bring a plain value to the type of a field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(one for one in arguments if one is not type(None)), value, name, known)
    if dataclasses.is_dataclass(kind):
        return _build(kind, _mapping(value, f"`{name}`"), f"{name}.", known)
    if origin is tuple:
        return _tuple(arguments, value, name, known)
    if origin is dict:
        return _mapping(value, f"`{name}`")
    if origin is typing.Literal:
        if value not in arguments:
            raise unknown(f"value of `{name}`", value, [str(one) for one in arguments])
        return value
    if kind is Path:
        return Path(_scalar(str, value, name)).expanduser()
    return _scalar(kind, value, name)


def _tuple(arguments: tuple, value: Any, name: str, known: list[str]) -> tuple:
    endless = arguments[-1] is Ellipsis
    items = value if isinstance(value, (list, tuple)) else [value]
    if not endless and len(items) != len(arguments):
        raise UserError(f"`{name}` needs {len(arguments)} values, got {value!r}")
    kinds = [arguments[0]] * len(items) if endless else arguments
    return tuple(_convert(one, item, name, known) for one, item in zip(kinds, items, strict=True))


def _scalar(kind: type, value: Any, name: str) -> Any:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number:
        return float(value)
    # 1e9 is how people write a large count.
    if kind is int and is_number and value == value and abs(value) != float("inf") and int(value) == value:
        return int(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise UserError(f"`{name}` must be {words[kind]}, got {value!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
