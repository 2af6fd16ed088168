"""Recipes: YAML files and ``key=value`` overrides to one checked configuration, and back."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from geonorm.errors import UserError, unknown
from geonorm.storage import write_text
from geonorm.training.config import RunConfig
from geonorm.training.yaml_files import dump_data, mapping, parse_yaml, read_file

INCLUDE = "include"
# What `geonorm compare` varies stands in the same file; it is no part of one run.
COMPARE = "compare"
Config = TypeVar("Config")


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
    merged = read(files, overrides)
    merged.pop(COMPARE, None)
    return build(kind, merged)


def read(files: Sequence[Path] = (), overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Merge recipes and overrides as :func:`load` does, into plain data that nothing has checked yet."""
    merged: dict[str, Any] = {}
    for file in files:
        merged = _merge(merged, _read(Path(file).expanduser(), ()))
    for text in overrides:
        merged = _merge(merged, override(*text.partition("=")[::2]) if "=" in text else _no_override(text))
    return merged


def override(key: str, value: str) -> dict[str, Any]:
    """Nested plain data of one dotted key and its value in YAML.

    Raises:
        UserError: the value is not YAML, or there is no key.
    """
    if not key.strip():
        _no_override(f"={value}")
    return nested(key.strip(), parse_yaml(value, f"override {key + '=' + value!r}"))


def nested(key: str, value: Any) -> dict[str, Any]:
    """Nested plain data of one dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _no_override(text: str) -> typing.NoReturn:
    raise UserError(f"override {text!r} is not KEY=VALUE, such as optimizer.lr=1e-3")


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested plain data with what ``over`` says in place of ``base``, key by key."""
    return _merge(base, over)


def build(kind: type[Config], data: dict[str, Any], *, ignore_unknown: bool = False) -> Config:
    """Make a configuration from nested plain data; keys that are missing keep their defaults.

    Args:
        kind: the dataclass to fill.
        data: its values.
        ignore_unknown: leave keys out that the dataclass does not have, instead of refusing them.

    Raises:
        UserError: as :func:`load`; a key is missing that has no default.
    """
    return _build(kind, data, "", None if ignore_unknown else key_paths(kind))


def build_section(kind: type[Config], data: Any, name: str) -> Config:
    """Make the dataclass of one section, named in errors with its place.

    Raises:
        UserError: as :func:`load`.
    """
    known = [f"{name}.{path}" for path in key_paths(kind)]
    return _build(kind, mapping(data, f"`{name}`"), f"{name}.", known)


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


def _build(kind: Any, data: dict[str, Any], prefix: str, known: list[str] | None) -> Any:
    """Fill a dataclass; without ``known`` keys, all of them, others are left out instead of refused."""
    hints = _fields(kind)
    for key in data:
        if key not in hints and known is not None:
            raise _unknown_key(prefix, key, list(hints), known)
    for field in dataclasses.fields(kind):
        if field.name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"`{prefix}{field.name}` is missing")
    given = {key: value for key, value in data.items() if key in hints}
    return kind(**{key: _convert(hints[key], value, f"{prefix}{key}", known) for key, value in given.items()})


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


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested plain data by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def nested_all(data: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flat`."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found = _merge(found, nested(key, value))
    return found


def dump(config: Any) -> str:
    """Return the configuration as YAML that :func:`load` reads."""
    return dump_data(resolved(config))


def save(path: Path, config: Any) -> None:
    """Write the configuration as YAML that :func:`load` reads."""
    write_text(path, dump(config))


def _read(path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in including:
        raise UserError(f"{path} includes itself, by way of {' -> '.join(p.name for p in including)}")
    data = read_file(path)
    included = data.pop(INCLUDE, [])
    names = [included] if isinstance(included, str) else included
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"`include` in {path} must be a path or a list of paths, got {included!r}")
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, _read(path.parent / Path(name).expanduser(), (*including, path.resolve())))
    return _merge(merged, data)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    # Options belong to their placement: another placement's would be unknown to it, or mean something else.
    if "placement" in over and base.get("placement") not in (None, over["placement"]):
        merged["options"] = over.get("options", {})
    return merged


def _convert(kind: Any, value: Any, name: str, known: list[str] | None) -> Any:
    """Bring a plain value to the type of a field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(one for one in arguments if one is not type(None)), value, name, known)
    if dataclasses.is_dataclass(kind):
        return _build(kind, mapping(value, f"`{name}`"), f"{name}.", known)
    if origin is tuple:
        return _tuple(arguments, value, name, known)
    if origin is dict:
        items = mapping(value, f"`{name}`")
        if arguments[1] is Any:
            return items
        return {key: _convert(arguments[1], item, f"{name}.{key}", known) for key, item in items.items()}
    if kind is Any:
        return value
    if origin is typing.Literal:
        if value not in arguments:
            raise unknown(f"value of `{name}`", value, [str(one) for one in arguments])
        return value
    if kind is Path:
        return Path(_scalar(str, value, name)).expanduser()
    return _scalar(kind, value, name)


def _tuple(arguments: tuple, value: Any, name: str, known: list[str] | None) -> tuple:
    endless = arguments[-1] is Ellipsis
    items = value if isinstance(value, (list, tuple)) else [value]
    if not endless and len(items) != len(arguments):
        raise UserError(f"`{name}` needs {len(arguments)} values, got {value!r}")
    kinds = [arguments[0]] * len(items) if endless else arguments
    # A section says by itself which of its values is wrong, so it is named with its place.
    names = [f"{name}[{index}]" if isinstance(item, dict) else name for index, item in enumerate(items)]
    return tuple(_convert(one, item, at, known) for one, item, at in zip(kinds, items, names, strict=True))


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
