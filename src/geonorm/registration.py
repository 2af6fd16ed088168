"""Make saved models loadable by transformers after ``import geonorm`` alone, without importing transformers for it.

A configuration whose ``model_type`` begins with ``geonorm_`` is looked up in transformers' table of configurations.
That look-up imports :mod:`geonorm.models`, which registers the classes. The table lives in a module that may not be
imported yet; then a finder waits for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

TABLE = "transformers.models.auto.configuration_auto"
PREFIX = "geonorm_"


def register_on_demand() -> None:
    """See to it that transformers finds our classes, whichever of the two is imported first."""
    when_imported(TABLE, _prepare)


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with a module: now if it is imported already, else once it is."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    # One action a module, so that asking twice does no harm.
    finder.actions[name] = action


class _Names(dict):
    """Names that users registered with transformers; the first question for one of ours imports our classes."""

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and name.startswith(PREFIX) and not super().__contains__(name):
            importlib.import_module("geonorm.models")
        return super().__contains__(name)


def _prepare(module: Any) -> None:
    # Importing our classes at once would fail where transformers' own modules are only half imported at this point.
    table = module.CONFIG_MAPPING
    if not isinstance(table._extra_content, _Names):
        table._extra_content = _Names(table._extra_content)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders would, and has an action done once one that is waited for is executed."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self.actions.get(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, action)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, with a step after it."""

    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self.loader, self.action = loader, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.action(module)
