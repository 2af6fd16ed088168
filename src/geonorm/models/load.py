"""Load a model and its tokenizer from wherever a user has them; every mistake in one line, nothing of theirs run."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from logging import CRITICAL, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from geonorm.errors import UserError
from geonorm.models.source import check_source, one_line

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
        :func:`geonorm.models.ids.check_ids`.

    Raises:
        UserError: no such model; a folder or file that is broken, incomplete, pickled or without a tokenizer; an
            encoder, an encoder-decoder or an architecture that transformers does not know; a GGUF file's tokenizer that
            loses text; an unknown dtype or a device that is not there.
    """
    wanted = _check_dtype(dtype)
    place = check_device(device)
    kind = check_source(str(source))
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source)}
    if kind != "hub":
        path = Path(source).expanduser()
        where = {"pretrained_model_name_or_path": str(path)}
        if kind == "gguf":
            where = {"pretrained_model_name_or_path": str(path.absolute().parent), "gguf_file": path.name}
    with quiet_transformers():
        _check_architecture(read_config(where, source, kind), source)
        tokenizer = _tokenizer(where, source, kind)
        model = _model(where, source, kind, wanted)
    # What libraries save with a model was checked by them; what was rebuilt from another format was not.
    if kind == "gguf":
        _check_round_trip(tokenizer, source)
    return model.to(place).eval(), tokenizer  # type: ignore[arg-type]


def check_device(device: str | torch.device) -> torch.device:
    """Return the device if this machine has it.

    Raises:
        UserError: not the name of a device, or one that is not here.
    """
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device {str(device)!r} cannot be used here ({one_line(error)}); try 'cpu'") from None
    return place


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without progress bars and reports of transformers: what matters of them is checked and raised here."""
    import transformers.modeling_gguf_pytorch_utils
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    gguf_utils: Any = transformers.modeling_gguf_pytorch_utils
    gguf_bar = getattr(gguf_utils, "tqdm", None)
    logging.disable_progress_bar()
    # Below even errors: transformers logs its report of a failed load as one, and raises as well.
    logging.set_verbosity(CRITICAL)
    # The Hub's library warns of each new try before it raises.
    hub = getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(CRITICAL)
    if gguf_bar is not None:
        # This one bar does not ask the switch above.
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


def _check_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    wanted = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if wanted is not None and (not isinstance(wanted, torch.dtype) or not wanted.is_floating_point):
        raise UserError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return wanted


def read_config(where: dict[str, Any], source: str | Path, kind: str) -> Any:
    """Read a model's configuration.

    Args:
        where: arguments for ``AutoConfig.from_pretrained``.
        source: what the user gave, for messages; kind: see :func:`geonorm.models.source.source_kind`.

    Raises:
        UserError: it cannot be read, or transformers does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(**where, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:
        if kind == "hub" and isinstance(error, OSError):
            raise _not_fetched(source, error) from error
        text = str(error)
        if "does not recognize this architecture" in text or "trust_remote_code" in text or "not supported" in text:
            raise UserError(
                f"{source}: unsupported architecture ({one_line(error)}); geonorm loads decoders that transformers "
                "knows, and runs no code that comes with a model"
            ) from error
        raise UserError(f"{source}: the configuration cannot be used ({one_line(error)}); repair it") from error


def _check_architecture(config: Any, source: str | Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    name = config.model_type
    remedy = "give a decoder with a language-model head, such as Llama or GPT-2"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{source} is an encoder-decoder ({name}); {remedy}")
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise UserError(f"{source} is an encoder ({name}), which predicts no next token; {remedy}")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"{source}: unsupported architecture {name}, which has no language-model head; {remedy}")


def _tokenizer(where: dict[str, Any], source: str | Path, kind: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
    except Exception as error:
        if kind == "gguf":
            remedy = "take a GGUF file that carries a tokenizer transformers can read"
        else:
            remedy = "copy tokenizer.json and tokenizer_config.json there from the model that it was made from"
        raise UserError(f"{source}: the tokenizer cannot be loaded ({one_line(error)}); {remedy}") from error


def _model(where: dict[str, Any], source: str | Path, kind: str, dtype: torch.dtype | None) -> Any:
    chosen = dtype or ("auto" if kind != "gguf" else torch.float32)
    # A GGUF file is no safetensors file, and asking for both is refused.
    weights = {} if kind == "gguf" else {"use_safetensors": True}
    model = read_model({**where, **weights, "dtype": chosen, "trust_remote_code": False}, source, kind)
    return _expanded(model) if kind == "gguf" else model


def read_model(options: dict[str, Any], source: str | Path, kind: str) -> Any:
    """Read a model with a language-model head, all of whose weights are there.

    Args:
        options: arguments for ``AutoModelForCausalLM.from_pretrained``.
        source: what the user gave, for messages; kind: see :func:`geonorm.models.source.source_kind`.

    Raises:
        UserError: the weights cannot be read, or some that the configuration calls for are missing.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(**options, output_loading_info=True)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if kind == "hub" and isinstance(error, OSError):
            raise _not_fetched(source, error) from error
        raise UserError(
            f"{source}: the weights cannot be loaded ({_reason(error)}); fetch or save them again"
        ) from error
    model, found = loaded
    if found["missing_keys"]:
        names = sorted(found["missing_keys"])
        raise UserError(
            f"{source}: {len(names)} weights that config.json calls for are not there, the first {names[0]}; the "
            "configuration and the weights are not of one model"
        )
    if found["unexpected_keys"]:
        names = sorted(found["unexpected_keys"])
        warnings.warn(
            f"{source}: {len(names)} weights have no place in the model and are left out, the first {names[0]}",
            stacklevel=5,
        )
    return model


def _reason(error: Exception) -> str:
    if "ignore_mismatched_sizes" in str(error):
        return "their shapes are not those that config.json calls for"
    return one_line(error)


def _expanded(model: Any) -> Any:
    """Drop the marks of quantisation, which the weights no longer have, so that the model can be saved."""
    model.hf_quantizer = None
    model.is_quantized = False
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    return model


def _not_fetched(source: str | Path, error: Exception) -> UserError:
    text = f"{error} {error.__cause__}"
    if "gated" in text.lower():
        why = "the Hub lets only those in who accepted its terms; accept them there and log in"
    elif "not a valid model identifier" in text or "not found" in text.lower():
        why = "the Hub has none of that name; check the spelling"
    elif "connect" in text.lower() or "offline" in text.lower():
        why = "the Hub cannot be reached and the local cache has none; check the path or the network"
    elif "safetensors" in text:
        why = "the Hub has it without safetensors weights; take one that has them"
    else:
        why = one_line(error)
    return UserError(f"no file or folder {source} here, and as a Hub name: {why}")


def _check_round_trip(tokenizer: PreTrainedTokenizerBase, source: str | Path) -> None:
    ids = tokenizer(_ROUND_TRIP, add_special_tokens=False)["input_ids"]
    back = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    if back.strip() != _ROUND_TRIP.strip():
        raise UserError(
            f"{source}: the tokenizer rebuilt from the GGUF file turns {_ROUND_TRIP!r} into {back!r}; use the original "
            "model's folder instead"
        )
