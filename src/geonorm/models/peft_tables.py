"""Fine-tuning adapters of peft on rewired models: its tables of target modules, which go by ``model_type``.

Everything that is known here about the inside of peft stands in this file.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from types import ModuleType

from geonorm.registration import PREFIX, when_imported

PACKAGE, TABLES = "peft", "peft.utils.constants"
_TABLE_NAME = "TRANSFORMERS_MODELS_TO_"


def register_with_peft(families: Iterable[str]) -> None:
    """Give each rewired family the target modules that peft has for the stock one, now or once peft is imported.

    A rewired model keeps the names of its attention, MLP, embeddings and head, so what peft names by default for the
    stock model is there. Families that peft does not know stay unknown to it.
    """
    names = tuple(families)

    def add(peft: ModuleType) -> None:
        # Importing peft must not fail for want of a table; without one, it asks for `target_modules`.
        with contextlib.suppress(ImportError):
            for name, table in vars(importlib.import_module(TABLES)).items():
                if name.startswith(_TABLE_NAME) and isinstance(table, dict):
                    table.update({f"{PREFIX}{family}": table[family] for family in names if family in table})

    when_imported(PACKAGE, add)
