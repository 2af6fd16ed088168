"""From a configuration to what a run is made of: corpus, data and model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from geonorm import models
from geonorm.data import Corpus, Windows, prepare
from geonorm.data.corpus import TOKEN_FILES
from geonorm.errors import UserError
from geonorm.models.compat import quiet_transformers
from geonorm.models.loading import read_model
from geonorm.models.source import find_source
from geonorm.models.tokens import check_ids, num_embeddings
from geonorm.placements import create
from geonorm.training.config import RunConfig
from geonorm.training.distributed import Ranks
from geonorm.training.outcome import Data

TOKENIZER = "tokenizer.json"
_SPLIT = ("val_fraction", "test_fraction", "min_documents", "max_share", "group_by", "dedup")


def check_batch(config: RunConfig, ranks: Ranks) -> None:
    """Refuse a batch that cannot be shared out among the ranks.

    Raises:
        UserError: it cannot.
    """
    if config.global_batch_size % (ranks.world_size * config.accumulation):
        raise UserError(
            f"`global_batch_size` {config.global_batch_size} is not a multiple of {ranks.world_size} ranks times"
            f" `accumulation` {config.accumulation}"
        )


def open_corpus(config: RunConfig, say: Callable[[str], None]) -> Corpus:
    """Open the prepared corpus, or prepare it; every rank may call this at the same time.

    Raises:
        UserError: the data cannot be read.
    """
    data = config.data
    if data.corpus is not None:
        return Corpus.load(data.corpus)
    return prepare(
        list(data.sources) or None,
        vocab_size=data.vocab_size,
        **{name: getattr(data, name) for name in _SPLIT},
        text_column=data.text_column,
        report=say,
    )


def corpus_identity(corpus: Corpus) -> str:
    """What makes two corpora the same to a run: their tokens and which of them have labels."""
    return "-".join(part.identity for part in (corpus.train, corpus.val, corpus.test))


def open_data(config: RunConfig, corpus: Corpus) -> Data:
    """Cut the corpus into windows.

    Raises:
        UserError: it holds less than one window.
    """
    length = config.data.seq_len
    windows = Windows(corpus.train, length=length, seed=config.seed)
    val, test = (corpus.held_out(side, length, config.evaluation.windows) for side in ("val", "test"))
    return Data(windows, val, corpus.token_bytes, test)


def check_model(config: RunConfig) -> None:
    """Refuse what can be told without text, whose preparation may take hours.

    Raises:
        UserError: a shape, placement or option that does not fit, or no model to start from.
    """
    chosen = config.model
    if chosen.start is None:
        models.ModelShape(chosen.hidden_size, chosen.num_layers, chosen.num_heads, chosen.intermediate_size)
        create(chosen.placement or "geonorm", **chosen.options)
    elif not (chosen.start / "config.json").is_file():
        raise UserError(f"`model.start` {chosen.start} is not a folder with a saved model (no config.json)")


def make_model(config: RunConfig, corpus: Corpus) -> Any:
    """Build the model on the CPU, in float32, the same on every rank.

    Raises:
        UserError: a shape, placement or folder that does not fit.
    """
    if config.model.start is not None:
        return _from_folder(config, corpus, config.model.start)
    return shaped_model(config, corpus.vocab_size, corpus.eos_id)


def shaped_model(config: RunConfig, vocab_size: int, eos_id: int | None = None) -> Any:
    """Build the model from the shape in a configuration.

    Raises:
        UserError: a shape or placement that does not fit.
    """
    chosen = config.model
    more: dict[str, Any] = {"tie_word_embeddings": True} if chosen.tie_embeddings else {}
    if chosen.num_kv_heads is not None:
        more["num_key_value_heads"] = chosen.num_kv_heads
        if chosen.num_heads % chosen.num_kv_heads:
            raise UserError(
                f"`model.num_heads` {chosen.num_heads} is not a multiple of `model.num_kv_heads` {chosen.num_kv_heads}"
            )
    return models.build_model(
        models.ModelShape(chosen.hidden_size, chosen.num_layers, chosen.num_heads, chosen.intermediate_size),
        chosen.placement or "geonorm",
        chosen.options,
        vocab_size=vocab_size,
        length=config.data.seq_len,
        seed=config.seed,
        eos_id=eos_id,
        family=chosen.family,
        **more,
    )


def _from_folder(config: RunConfig, corpus: Corpus, folder: Path) -> Any:
    _check_tokenizer(folder, corpus)
    with quiet_transformers():
        model = read_model(find_source(str(folder)), dtype=torch.float32)
    chosen = config.model
    if not hasattr(model.config, "placement") and chosen.placement is None:
        raise UserError(f"the model in {folder} is a stock one; name its `model.placement`, such as pre")
    if chosen.placement is not None:
        models.rewire(model, chosen.placement, **chosen.options)
    elif chosen.options:
        models.rewire(model, model.config.placement, **{**model.config.placement_options, **chosen.options})
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and config.data.seq_len > most:
        raise UserError(
            f"`data.seq_len` {config.data.seq_len} is longer than the {most} tokens of the model in {folder}"
        )
    _check_embeddings(config, corpus, model)
    # A new model leaves the stream where drawing its weights ended; this one was drawn by somebody else.
    torch.manual_seed(config.seed)
    return model


def _check_embeddings(config: RunConfig, corpus: Corpus, model: Any) -> None:
    if corpus.vocab_size <= num_embeddings(model):
        return
    for name in TOKEN_FILES:
        check_ids(model, [int(getattr(corpus, name).tokens.max())], f"the {name} side of the corpus {corpus.path}")
    if config.sampling.every:
        for prompt in config.sampling.prompts:
            check_ids(model, corpus.tokenizer.encode(prompt, add_special_tokens=False).ids, f"the prompt {prompt!r}")


def _check_tokenizer(folder: Path, corpus: Corpus) -> None:
    from tokenizers import Tokenizer

    if not (folder / TOKENIZER).is_file():
        return
    ours, theirs = (Tokenizer.from_file(str(path)) for path in (corpus.tokenizer_path, folder / TOKENIZER))
    if ours.get_vocab() != theirs.get_vocab():
        raise UserError(
            f"{folder} has another tokenizer than the corpus {corpus.path}; prepare the text with the model's tokenizer"
        )


def save_description(folder: Path, model: Any, corpus: Corpus) -> None:
    """Write what an export needs besides weights: the model's configuration and the tokenizer."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    (folder / TOKENIZER).write_bytes(corpus.tokenizer_path.read_bytes())
    facts = {"eos_id": corpus.eos_id, "length": int(model.config.max_position_embeddings)}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
