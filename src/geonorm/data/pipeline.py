"""From sources to a prepared corpus, built once per content and settings; an interrupted build can be gone on with."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from geonorm.data import VOCAB_SIZE
from geonorm.data.corpus import DESCRIPTION, BuildFacts, Corpus, building, cache_folder, is_whole, prepared
from geonorm.data.given_tokenizer import ChatTemplate, open_tokenizer, template_digest
from geonorm.data.hub import HubSource, is_hub
from geonorm.data.sources import FileSource, Source
from geonorm.data.split import TEST, TRAIN, VAL
from geonorm.data.stages import Build, shortened
from geonorm.data.standard_library import StandardLibrarySource
from geonorm.data.tokenizer import MIN_VOCAB_SIZE
from geonorm.errors import UserError, check_count, check_positive, check_unicode
from geonorm.progress_bar import ProgressBar
from geonorm.provenance import num_cores
from geonorm.signals import is_command
from geonorm.storage import write_json

MAX_HELD_OUT_FRACTION = 0.5

# Part of the key: raise it when the same content and settings would give other files.
_FORMAT = 3

Report = Callable[[str], None]


def prepare(
    paths: Sequence[str | os.PathLike[str]] | None = None,
    vocab_size: int = VOCAB_SIZE,
    val_fraction: float = 0.05,
    cache_dir: str | os.PathLike[str] | None = None,
    max_documents: int | None = None,
    report: Report | None = None,
    text_column: str = "text",
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    eos: str | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
    test_fraction: float = 0.05,
    min_documents: int = 8,
    max_share: float = 0.25,
    group_by: str | None = None,
    dedup: str | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: ProgressBar | None = None,
) -> Corpus:
    """Read text, split it by document, encode it and pack each side into a token file.

    The result lies in ``out``, or in the cache under a key of the content and the settings; a second call with the
    same ones opens it. It does not depend on ``workers``. An interrupted call leaves nothing that looks whole, and
    the same call goes on from the shards that it had finished. Calls may run at the same time.

    Args:
        paths: files, folders and patterns (`geonorm.data.sources.FileSource`), Hub datasets
            (`geonorm.data.hub.HubSource`), or one corpus that is prepared already, which is opened; None for the
            standard-library corpus.
        vocab_size: wanted vocabulary of the byte-level BPE that is trained on at most 20 MB of the train side, at
            least 257; a small corpus may yield fewer ids. Unused if ``tokenizer`` is given.
        val_fraction: wanted share of the bytes for the validation side, on which to choose, above 0. Documents are
            never cut, so the share is near to it rather than equal.
        test_fraction: the same for the test side, which is reported; both together at most 0.5.
        min_documents: fewest documents (or groups) of a held-out side. With 1, a corpus of one document is cut at line
            breaks.
        max_share: largest share of a held-out side's bytes that one document (or group) may have.
        group_by: column of JSON, Parquet and Hub records that names a group, such as an author or a repository;
            a group is never on two sides.
        dedup: ``"exact"``, the default with ``group_by``, leaves out copies that differ in blanks and case at most,
            ``"near"`` also what `geonorm.data.leaks.Deduplication` finds; memory then grows with their number.
        cache_dir: where prepared corpora are kept; ``$GEONORM_CACHE`` or ``~/.cache/geonorm`` if None.
        max_documents: read only the first so many documents that have text.
        report: called with one line of text at each stage.
        text_column: the column of JSON and Parquet files that holds the text. Where it is the default and there is no
            such column, ``prompt`` and ``completion`` are read, or ``messages``; see docs/data.md.
        tokenizer: an existing one in place of a trained one, see `geonorm.data.given_tokenizer.open_tokenizer`.
        eos: spelling of its end-of-text token, where the files beside it do not say.
        workers: processes that encode; one encodes in this process. With more than one, a script has to call this under
            ``if __name__ == "__main__":``, so None is all cores for the ``geonorm`` command and one for any other
            program.
        skip_unreadable: leave a damaged file at its first fault and go on; the description names those files.
        out: folder for the corpus, in place of the cache.
        progress: shows how far it is; None for a line to ``report`` every ten seconds.

    Raises:
        UserError: a path, file, record or setting that cannot be used.
    """
    check_count("vocab_size", vocab_size, MIN_VOCAB_SIZE)
    val_fraction = check_positive("val_fraction", val_fraction)
    test_fraction = check_positive("test_fraction", test_fraction)
    if val_fraction + test_fraction > MAX_HELD_OUT_FRACTION:
        raise UserError(
            f"`val_fraction` and `test_fraction` must be at most {MAX_HELD_OUT_FRACTION} together, got {val_fraction}"
            f" and {test_fraction}"
        )
    check_count("min_documents", min_documents)
    if check_positive("max_share", max_share) > 1:
        raise UserError(f"`max_share` must be at most 1, got {max_share}")
    if dedup not in (None, "exact", "near"):
        raise UserError(f"`dedup` must be 'exact' or 'near', got {dedup!r}")
    if max_documents is not None:
        check_count("max_documents", max_documents)
    if workers is None:
        workers = num_cores() if is_command() else 1
    check_count("workers", workers)
    if group_by is not None and dedup is None:
        # A copy in two groups would stand on two sides.
        dedup = "exact"
    if eos is not None and tokenizer is None:
        raise UserError("`eos` names the end-of-text token of a given tokenizer; give `tokenizer` as well")
    report = report or (lambda line: None)
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    settings: dict[str, Any] = {
        "val_fraction": val_fraction,
        "test_fraction": test_fraction,
        "min_documents": min_documents,
        "max_share": max_share,
        "group_by": group_by,
        "dedup": dedup,
        "max_documents": max_documents,
    }
    if (ready := prepared(paths)) is not None:
        if len(paths or ()) > 1 or tokenizer is not None or out is not None:
            raise UserError(
                f"{ready} is a prepared corpus; give it alone, without `tokenizer` and `out`, or name the text itself"
            )
        corpus = Corpus.load(ready)
        _check_same_settings(corpus, {"vocab_size": vocab_size, **settings})
        report(f"{ready} is prepared: its own vocabulary and split are used")
        return _summarized(corpus, report)

    given = None
    if tokenizer is None:
        settings |= {"vocab_size": vocab_size, "tokenizer": None}
    else:
        given = open_tokenizer(tokenizer, eos)
        settings |= {"tokenizer": hashlib.sha256(given[0].to_str().encode()).hexdigest(), "eos": given[1]}
        if (template := template_digest(tokenizer)) is not None:
            settings["chat_template"] = template
    chat = ChatTemplate(tokenizer, None if given is None else given[1])
    source = open_sources(paths, text_column, skip_unreadable, group_by, chat)
    identity = {"format": _FORMAT, "content": source.fingerprint(), **settings}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    final = Path(out).expanduser().absolute() if out is not None else cache_folder(cache_dir) / key
    check_unicode("out", final)
    facts = None
    if not is_whole(final, key):
        with building(final, key) as work:
            if work is not None:
                report(f"preparing {shortened(source.names)}")
                begun = time.monotonic()
                build = Build(final, work, source, settings, workers, report, progress or ProgressBar(say=report))
                description = build.run(given)
                name = "trained on this corpus" if tokenizer is None else Path(tokenizer).name
                write_json(final / DESCRIPTION, {**description, "tokenizer": name, "key": key})
                seconds = time.monotonic() - begun
                num_tokens = sum(description["num_tokens"].values())
                facts = BuildFacts(seconds, num_tokens / seconds, workers, build.num_shards, build.num_kept)
    corpus = Corpus.load(final)
    corpus.build = facts
    return _summarized(corpus, report)


def open_sources(
    paths: Sequence[str | os.PathLike[str]] | None,
    text_column: str = "text",
    skip_unreadable: bool = False,
    group_by: str | None = None,
    chat: ChatTemplate | None = None,
) -> Source:
    """Make one source of what a user named: files first, then Hub datasets in the order given.

    Args:
        paths: what `FileSource` takes and names that `HubSource` takes; None for the standard-library corpus.
        text_column: the column that holds the text, for files and for datasets that name no other.
        skip_unreadable: see `FileSource`.
        group_by: likewise.
        chat: likewise.

    Raises:
        UserError: something that cannot be found or understood.
    """
    if paths is None:
        if group_by is not None:
            raise UserError(
                "`group_by` names a column; the standard-library corpus is grouped by package already, leave it out"
            )
        return StandardLibrarySource()
    sources: list[Source] = [HubSource(path, text_column, group_by, chat) for path in paths if is_hub(path)]
    files = [path for path in paths if not is_hub(path)]
    if files or not sources:
        sources.insert(0, FileSource(files, text_column, skip_unreadable, group_by, chat))
    return sources[0] if len(sources) == 1 else Source(sources)


def _check_same_settings(corpus: Corpus, asked: dict[str, Any]) -> None:
    """Refuse what was asked for, other than by default, if the corpus was made otherwise; it is opened as it is."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(prepare).parameters.items()}
    made = {"vocab_size": corpus.vocab_size, **corpus.description["settings"]}
    for name, value in asked.items():
        same = value in (defaults[name], made.get(name)) or (name == "vocab_size" and value == corpus.vocab_size)
        if not same:
            raise UserError(
                f"`{name}` is {value!r}, but {corpus.path} was prepared with {made.get(name)!r}; leave `{name}` out, or"
                " name the text itself to prepare it anew"
            )


def _summarized(corpus: Corpus, report: Report) -> Corpus:
    facts = corpus.description

    def sides(name: str) -> str:
        train, val, test = (f"{facts[name][side]:,}" for side in (TRAIN, VAL, TEST))
        return f"{train} train, {val} validation and {test} test"

    size = sum(facts["num_bytes"].values()) / 1e6
    skipped = ", ".join(f"{count:,} x {reason}" for reason, count in facts["skipped"].items()) or "nothing"
    report(f"{sides('num_documents')} documents, {size:,.1f} MB; skipped: {skipped}")
    share, repeated, groups = facts["largest_share"], facts["overlap"], facts["num_groups"]
    report(
        f"held out: {groups[VAL]:,} and {groups[TEST]:,} distinct documents or groups, the largest {share[VAL]:.1%} and"
        f" {share[TEST]:.1%} of its side's tokens; {repeated[VAL]:.1%} and {repeated[TEST]:.1%} of the tokens lie in a"
        f" run of {repeated['ngram']} that is in the training text too"
    )
    for note in facts["notes"]:
        report(note)
    if (build := corpus.build) is not None:
        kept = f", {build.num_kept_shards} of {build.num_shards} shards kept from before" * bool(build.num_kept_shards)
        report(f"{build.seconds:.1f} s, {build.tokens_per_second:,.0f} tokens/s, workers: {build.workers}{kept}")
    report(
        f"{sides('num_tokens')} tokens, vocabulary {facts['vocab_size']}, {facts['bytes_per_token']:.2f} bytes per"
        f" token, in {corpus.path}"
    )
    if "num_labels" in facts:
        report(f"{sides('num_labels')} tokens have a label; the others are context, without a loss")
    return corpus
