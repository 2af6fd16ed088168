"""Load a model and its tokenizer from wherever a user has them; every mistake in one line, nothing of theirs run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from geonorm.errors import UserError, first_line
from geonorm.models.compat import quiet_transformers, without_quantization_marks
from geonorm.models.source import ModelSource, check_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Blanks, digits, line ends, punctuation and characters of two to four bytes: where converted tokenizers go wrong.
_ROUND_TRIP = "In 1984, a  man's caf\u00e9\n\tcost \u20ac5 \u2014 \u65e5\u672c \U0001f600 (x+1)."


def load_model(
    source: str | Path, *, dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a decoder with a language-model head, and its tokenizer, in evaluation mode.

    Weights are read from safetensors or GGUF only, and no code that comes with a model is run. What GGUF quantised is
    expanded, so the model can be trained and saved like any other; its values stay as coarse as the file has them.

    Args:
        source: a folder that ``save_pretrained`` wrote (stock, or rewired by geonorm), a ``.gguf`` file, or a name on
            the Hub, which is fetched if it is not in the local cache.
        dtype: of the weights: ``"float32"``, ``"bfloat16"``, ``"float16"`` or the torch dtype; None for the one they
            were saved in (float32 for GGUF).
        device: where the model goes.

    Returns:
        The model and its tokenizer, which may know ids that the model has no embedding for; see
        :func:`geonorm.models.tokens.check_ids`.

    Raises:
        UserError: no such model; a folder or file that is broken, incomplete, pickled or without a tokenizer; an
            encoder, an encoder-decoder or an architecture that transformers does not know; a GGUF file's tokenizer that
            loses text; an unknown dtype or a device that is not there.
    """
    wanted = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if wanted is not None and (not isinstance(wanted, torch.dtype) or not wanted.is_floating_point):
        raise UserError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    place, found = check_device(device), check_source(source)
    with quiet_transformers():
        _check_architecture(read_config(found), found)
        tokenizer = _read_tokenizer(found)
        model = read_model(found, dtype=wanted or ("auto" if found.kind != "gguf" else torch.float32))
    return model.to(place).eval(), tokenizer


def check_device(device: str | torch.device) -> torch.device:
    """Return the device if this machine has it.

    Raises:
        UserError: not the name of a device, or one that is not here.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device {str(device)!r} cannot be used here ({first_line(error)}); try 'cpu'") from None
    return place


def read_config(source: ModelSource, **options: Any) -> Any:
    """Read a model's configuration; ``options`` are further arguments of ``AutoConfig.from_pretrained``.

    Raises:
        UserError: it cannot be read, or transformers does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(**source.arguments, trust_remote_code=False, **options)
    except UserError:
        raise
    except Exception as error:
        _raise_if_not_fetched(source, error)
        raise UserError(
            f"{source.name}: the configuration cannot be used ({first_line(error)}); geonorm loads decoders that "
            "transformers knows, and runs no code that comes with a model"
        ) from error


def read_model(source: ModelSource, **options: Any) -> Any:
    """Read a model with a language-model head, all of whose weights are there.

    Args:
        source: where it is.
        options: arguments for ``AutoModelForCausalLM.from_pretrained``; weights come from safetensors or GGUF, and no
            code that comes with the model is run, unless they say so.

    Raises:
        UserError: the weights cannot be read, or are not those that the configuration calls for.
    """
    from transformers import AutoModelForCausalLM

    # A GGUF file is no safetensors file, and asking for both is refused.
    safe = {} if source.kind == "gguf" else {"use_safetensors": True}
    checked = {"trust_remote_code": False, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(**{**source.arguments, **safe, **checked, **options})
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        _raise_if_not_fetched(source, error)
        raise UserError(
            f"{source.name}: the weights cannot be loaded ({first_line(error)}); fetch or save them again"
        ) from error
    model, found = loaded
    unlike = sorted(name for name, *_ in found["mismatched_keys"])
    for names, what in ((sorted(found["missing_keys"]), "are not there"), (unlike, "have another shape")):
        if names:
            raise UserError(
                f"{source.name}: {len(names)} weights that config.json calls for {what}, the first {names[0]}; the "
                "configuration and the weights are not of one model"
            )
    if names := sorted(found["unexpected_keys"]):
        warnings.warn(
            f"{source.name}: {len(names)} weights have no place in the model and are left out, the first {names[0]}",
            stacklevel=3,
        )
    return without_quantization_marks(model) if source.kind == "gguf" else model


def _check_architecture(config: Any, source: ModelSource) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    name = config.model_type
    remedy = "give a decoder with a language-model head, such as Llama or GPT-2"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{source.name} is an encoder-decoder ({name}); {remedy}")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise UserError(f"{source.name} is an encoder ({name}), which predicts no next token; {remedy}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{source.name}: unsupported architecture {name}, which has no language-model head; {remedy}")


def _read_tokenizer(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(**source.arguments, trust_remote_code=False)
    except Exception as error:
        if source.kind == "gguf":
            remedy = "take a GGUF file that carries a tokenizer transformers can read"
        else:
            remedy = "copy tokenizer.json and tokenizer_config.json there from the model that it was made from"
        raise UserError(f"{source.name}: the tokenizer cannot be loaded ({first_line(error)}); {remedy}") from error
    # What libraries save with a model was checked by them; what was rebuilt from another format was not.
    if source.kind == "gguf":
        ids = tokenizer(_ROUND_TRIP, add_special_tokens=False)["input_ids"]
        back = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if back.strip() != _ROUND_TRIP.strip():
            raise UserError(
                f"{source.name}: the tokenizer rebuilt from the GGUF file turns {_ROUND_TRIP!r} into {back!r}; use the "
                "original model's folder instead"
            )
    return tokenizer


def _raise_if_not_fetched(source: ModelSource, error: Exception) -> None:
    """Whatever kept the Hub from giving a model, transformers says it with what to do, on several lines."""
    if source.kind == "hub" and isinstance(error, OSError):
        said = " ".join(str(error).split())
        raise UserError(f"no file or folder {source.name} here, and as a name on the Hub: {said}") from error
