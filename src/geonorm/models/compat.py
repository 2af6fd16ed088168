"""Every name inside transformers and peft that geonorm relies on though it is not part of their documented interface.

``tests/test_compat.py`` guards each of them. Not here, because they are defined where they stand: ``_init_weights`` and
``_no_split_modules``, the two hooks that every class of models of transformers defines for itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from logging import CRITICAL, getLogger
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from geonorm.import_hook import PREFIX, when_imported


def set_model_class(model: Any, kind: Any) -> None:
    """Give a model of transformers another class, as if it had been made with it."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    model.__class__ = kind
    # What may be recorded is looked up by the class that a model was made with: else `output_hidden_states` is empty.
    _CAN_RECORD_REGISTRY[model] = kind._can_record_outputs
    # Collected when a model is made: else `device_map="auto"` splits our blocks.
    model._no_split_modules = set(kind._no_split_modules)


def is_from_checkpoint(parameter: Tensor) -> bool:
    """Whether transformers has read a parameter from a file: drawing it anew would lose a trained weight."""
    return getattr(parameter, "_is_hf_initialized", False)


def forget_initialized(module: nn.Module) -> None:
    """Take the mark off a copied module: a new norm that carried it would keep what memory holds when loaded."""
    vars(module).pop("_is_hf_initialized", None)


class HeadsConfig:
    """A configuration whose attention implementation is that of another one, with a module before it."""

    def __init__(self, config: Any) -> None:
        self.config_of_model = config

    def __getattr__(self, name: str) -> Any:
        # Before the model's is there, while a copy is made.
        if name == "config_of_model":
            raise AttributeError(name)
        return getattr(self.config_of_model, name)

    @property
    def _attn_implementation(self) -> str:
        return registered_with_heads(self.config_of_model._attn_implementation or "eager")


def with_heads(attention: Any, heads: nn.Module) -> None:
    """Let queries and keys of an attention module go through ``heads`` after rotation, in every implementation."""
    attention.add_module("heads", heads)
    attention.config = HeadsConfig(attention.config)
    attention.eager = vars(sys.modules[type(attention).__module__])["eager_attention_forward"]


def registered_with_heads(name: str) -> str:
    """Name of an attention implementation of transformers with the module ``heads`` before it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registered = f"{PREFIX}{name}"
    if registered not in ALL_ATTENTION_FUNCTIONS:

        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            *,
            scaling: float,
            **kwargs: Any,
        ) -> Any:
            query, key, scaling = module.heads(query, key, scaling)
            function = ALL_ATTENTION_FUNCTIONS.get_interface(name, module.eager)
            return function(module, query, key, value, mask, scaling=scaling, **kwargs)

        ALL_ATTENTION_FUNCTIONS.register(registered, attend)
    return registered


def without_quantization_marks(model: Any) -> Any:
    """Take off what says that a model read from GGUF is quantised, which its weights no longer are: else no saving."""
    model.hf_quantizer = None
    model.is_quantized = False
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    return model


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without progress bars and reports of transformers: what matters of them is checked and raised by geonorm."""
    import transformers.modeling_gguf_pytorch_utils
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    # The Hub's library warns of each new try before it raises.
    hub = getLogger("huggingface_hub")
    hub_level = hub.level
    # The one bar that does not ask the switch: without the name, reading GGUF shows a bar.
    gguf_utils: Any = transformers.modeling_gguf_pytorch_utils
    gguf_bar = getattr(gguf_utils, "tqdm", None)
    logging.disable_progress_bar()
    # Below even errors: transformers logs its report of a failed load as one, and raises as well.
    logging.set_verbosity(CRITICAL)
    hub.setLevel(CRITICAL)
    if gguf_bar is not None:
        gguf_utils.tqdm = functools.partial(gguf_bar, disable=True)
    try:
        yield
    finally:
        if gguf_bar is not None:
            gguf_utils.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            logging.enable_progress_bar()


def register_with_peft(families: Iterable[str]) -> None:
    """Give each rewired family the target modules that peft has for the stock one, now or once peft is imported.

    A rewired model keeps the names of its attention, MLP, embeddings and head, so what peft names by default for the
    stock model is there. Families that peft does not know stay unknown to it; without its tables it asks for
    ``target_modules``.
    """
    names = tuple(families)

    def add(constants: ModuleType) -> None:
        for name, table in vars(constants).items():
            if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
                table.update({f"{PREFIX}{family}": table[family] for family in names if family in table})

    when_imported("peft.utils.constants", add)
