"""Make saved models loadable by transformers after ``import geonorm`` alone, without importing transformers for it.

A configuration whose ``model_type`` begins with ``geonorm_`` is looked up in transformers' ``CONFIG_MAPPING``. That
look-up imports :mod:`geonorm.models`, which adds the classes. The mapping lives in a module that may not be imported
yet; then a finder waits for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

PREFIX = "geonorm_"


def find_models_on_demand() -> None:
    """See to it that transformers finds our classes, whichever of the two is imported first."""
    when_imported("transformers.models.auto.configuration_auto", _ask_geonorm_too)


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with a submodule of a package: now if it is imported already, else once it is."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    # One action a module, so that asking twice does no harm.
    finder.actions[name] = action


def _ask_geonorm_too(module: Any) -> None:
    # Importing our classes at once would fail where transformers' own modules are only half imported at this point.
    mapping = type(module.CONFIG_MAPPING)
    for look_up in (mapping.__contains__, mapping.__getitem__):
        if not hasattr(look_up, "__wrapped__"):
            setattr(mapping, look_up.__name__, _importing_ours_first(look_up))


def _importing_ours_first(look_up: Callable[[Any, object], Any]) -> Callable[[Any, object], Any]:
    @functools.wraps(look_up)
    def find(mapping: Any, name: object) -> Any:
        if isinstance(name, str) and name.startswith(PREFIX):
            importlib.import_module("geonorm.models")
        return look_up(mapping, name)

    return find


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and has an action done once one that is waited for is executed."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self.actions.get(fullname)
        spec = action and importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if not action or not spec or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_and_act
        return spec
