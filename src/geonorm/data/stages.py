"""The stages of a preparation: survey, tokenizer, encoded shards, token files; each can be gone on with."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geonorm.data.corpus import GROUP_FILES, TOKEN_BYTES, TOKEN_FILES, TOKENIZER
from geonorm.data.encode import Encoder
from geonorm.data.leaks import NGRAM, Deduplication, overlap
from geonorm.data.records import Document
from geonorm.data.shards import Shards, encode_shards, shard_texts
from geonorm.data.sources import Source
from geonorm.data.split import SIDES, TRAIN, Sample, Split, Survey, num_bytes
from geonorm.data.token_file import TokenFile, TokenWriter, write_tokens
from geonorm.data.tokenizer import EOS, load_tokenizer, plain_copy, token_byte_lengths, train_tokenizer
from geonorm.errors import UserError
from geonorm.progress_bar import ProgressBar
from geonorm.storage import read_json, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_SAMPLE_BYTES = 20_000_000

_SURVEY, _SHARDS, _STREAM = "survey.json", "shards", "stream"
_DOCUMENTS_BETWEEN_REPORTS = 100


@dataclasses.dataclass
class Build:
    """One preparation.

    Attributes:
        final: folder of the corpus.
        work: folder of what an interrupted preparation can go on from.
        source: gives the documents.
        settings: those of the description.
        workers: processes that encode.
        report: takes a line for people.
        progress: shows how far it is.
        num_shards: shards that the corpus was made of, once `run` has ended.
        num_kept: those of them that an interrupted run had left.
    """

    final: Path
    work: Path
    source: Source
    settings: dict[str, Any]
    workers: int
    report: Callable[[str], None]
    progress: ProgressBar
    num_shards: int = 0
    num_kept: int = 0

    def __post_init__(self) -> None:
        self.skipped = Counter[str]()
        self.deduplication = Deduplication(self.settings["dedup"])
        self.shards = Shards(self.work / _SHARDS)
        self.source.folder = self.work / _STREAM

    def run(self, given: tuple[Tokenizer, str] | None) -> dict[str, Any]:
        """Make all files of the corpus but its description.

        Args:
            given: a tokenizer and its end-of-text token; None to train one on the train side.

        Returns:
            The description, see `Corpus`, but for where the tokenizer is from and the key.

        Raises:
            UserError: the source cannot be read, has no text or changed meanwhile; a worker died.
        """
        before = None
        if given is None:
            before, eos = self._trained(), EOS
        else:
            tokenizer, eos = given
            plain_copy(tokenizer, eos).save(str(self.work / TOKENIZER))
        total = self._encode(eos, None if before is None else before["num_bytes"])
        survey = self._survey()
        if before is not None and before["fingerprint"] != survey.fingerprint:
            raise self._changed(f"{shortened(self.source.names)} changed while being read; prepare the data again")
        try:
            self.source.check_unchanged()
        except UserError as error:
            raise self._changed(str(error)) from None
        if not survey.num_documents:
            raise self._no_text()

        split = self._split(survey)
        tokenizer = load_tokenizer(self.work / TOKENIZER)
        encoder = Encoder(tokenizer, eos)
        notes = []
        if not split.cut:
            rows = self._assemble(split, encoder)
        else:
            rows = self._cut(split, tokenizer, eos)
            if survey.num_documents > 1:
                self.skipped["repeat of the only document"] = survey.num_documents - 1
            notes.append(
                f"The corpus is one document; about its last {sum(split.cut.values()):.4g} is held out, the validation"
                " side before the test side, cut at the nearest line breaks."
            )
        files = {side: TokenFile(self.final / name) for side, name in TOKEN_FILES.items()}
        lengths = token_byte_lengths(tokenizer)
        np.save(self.final / TOKEN_BYTES, lengths, allow_pickle=False)
        shutil.copyfile(self.work / TOKENIZER, self.final / TOKENIZER)
        sides = {side: self._facts(side, file, rows[side]) for side, file in files.items()}
        counts = {name: {side: facts[name] for side, facts in sides.items()} for name in sides[TRAIN]}
        if counts["num_labels"] == counts["num_tokens"]:
            del counts["num_labels"]
        num_text_tokens = sum(counts["num_tokens"].values()) - sum(counts["num_documents"].values())
        return {
            "sources": self.source.names,
            **counts,
            "largest_share": {side: counts["largest_share"][side] for side in GROUP_FILES},
            "overlap": {"ngram": NGRAM, **{side: overlap(files[TRAIN], files[side]) for side in GROUP_FILES}},
            "skipped": dict(sorted(self.skipped.items())),
            "bytes_per_token": sum(counts["num_bytes"].values()) / num_text_tokens,
            "vocab_size": len(lengths),
            "eos_id": encoder.eos_id,
            "eos": eos,
            "fingerprint": survey.fingerprint,
            "settings": self.settings,
            "notes": [*notes, *self._notes(total)],
        }

    def _trained(self) -> dict[str, Any]:
        """Survey the documents and train a tokenizer on the train side, unless an earlier run did."""
        with contextlib.suppress(UserError):
            load_tokenizer(self.work / TOKENIZER)
            if (found := read_json(self.work / _SURVEY)) is not None:
                return found
        survey, skipped = Survey(), Counter[str]()
        # As long as the train side has half of the bytes, twice as much as is wanted holds enough of it.
        sample = Sample(2 * TOKENIZER_SAMPLE_BYTES)
        self.progress.begin("reading", unit="MB")
        for text in self._usable(skipped):
            survey.add(text)
            sample.add(text)
            if survey.num_documents % _DOCUMENTS_BETWEEN_REPORTS == 0:
                self._show(survey.num_bytes, self._estimated(survey.num_bytes), documents=survey.num_documents)
        if not survey.num_documents:
            self.skipped = skipped
            raise self._no_text()
        texts = self._train_side(sample, self._split(survey))
        megabytes = sum(map(len, texts)) / 1e6
        self.report(
            f"training a tokenizer on {len(texts):,} of {survey.num_documents:,} documents, {megabytes:.1f}"
            f" of {survey.num_bytes / 1e6:.1f} MB"
        )
        train_tokenizer(texts, self.settings["vocab_size"]).save(str(self.work / TOKENIZER))
        facts = {"fingerprint": survey.fingerprint, "num_bytes": survey.num_bytes}
        write_json(self.work / _SURVEY, facts)
        return facts

    def _train_side(self, sample: Sample, split: Split) -> list[str]:
        texts = sample.texts()
        if split.cut:
            return [split.parts(texts[0])[0][1]]
        mine: Iterable[str] = [text for text in texts if split.side(text) == TRAIN]
        if not sample.complete and sum(map(num_bytes, mine)) < TOKENIZER_SAMPLE_BYTES:
            # A few huge documents of the other side have taken the room.
            mine = (text for text in self._usable(Counter()) if split.side(text) == TRAIN)
        return Sample(TOKENIZER_SAMPLE_BYTES, mine).texts()

    def _encode(self, eos: str, total_bytes: int | None) -> Counter[str]:
        self.shards.folder.mkdir(exist_ok=True)
        self.progress.begin("encoding", unit="MB")
        total, num_read = Counter[str](), 0

        def done(counts: Counter[str]) -> None:
            total.update(counts)
            of = self._estimated(num_read) if total_bytes is None else total_bytes
            self._show(total["num_bytes"], of, documents=total["num_documents"], tokens=total["num_tokens"])

        def tasks() -> Iterator[tuple[int, list[str]]]:
            nonlocal num_read
            for number, texts in enumerate(shard_texts(self._usable(self.skipped))):
                self.num_shards += 1
                num_read += sum(map(num_bytes, texts))
                if (counts := self.shards.finished(number, texts)) is None:
                    yield number, texts
                else:
                    self.num_kept += 1
                    done(counts)

        for counts in encode_shards((self.shards.folder, self.work / TOKENIZER, eos), tasks(), self.workers):
            done(counts)
        if total["num_left_out"]:
            self.skipped["document that does not encode"] = total["num_left_out"]
        return total

    def _survey(self) -> Survey:
        """Survey the documents that became ids, in their order."""
        survey = Survey()
        for number in range(self.num_shards):
            (index,) = self.shards.read(number, "index")
            kept = index[index["num_tokens"] > 0]
            for digest, key, size in zip(kept["digest"], kept["key"].tolist(), kept["num_bytes"].tolist(), strict=True):
                survey.add_digest(digest.tobytes(), key, size)
        return survey

    def _split(self, survey: Survey) -> Split:
        names = ("val_fraction", "test_fraction", "min_documents", "max_share")
        return survey.split(**{name: self.settings[name] for name in names})

    def _assemble(self, split: Split, encoder: Encoder) -> dict[str, np.ndarray]:
        """Copy the ids of all shards into the token files; returns key and size of the documents of each side."""
        rows: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
        with contextlib.ExitStack() as stack:
            writers = {
                side: stack.enter_context(TokenWriter(self.final / TOKEN_FILES[side], encoder)) for side in SIDES
            }
            for shard in range(self.num_shards):
                index, ids, mask = self.shards.read(shard, "index", "ids", "mask")
                index = index[index["num_tokens"] > 0]
                sides = np.array([SIDES.index(split.side_of(key)) for key in index["key"].tolist()], dtype=np.int8)
                sides_of_ids = np.repeat(sides, index["num_tokens"])
                for number, (side, writer) in enumerate(writers.items()):
                    mine, my_ids = index[sides == number], sides_of_ids == number
                    writer.write(ids[my_ids], mask[my_ids] if len(mask) else None)
                    writer.num_documents += len(mine)
                    writer.num_bytes += int(mine["num_bytes"].sum())
                    rows[side].append(mine[["key", "num_tokens"]])
        return {side: np.concatenate(rows[side]) for side in SIDES}

    def _cut(self, split: Split, tokenizer: Tokenizer, eos: str) -> dict[str, np.ndarray]:
        """As `_assemble`, of the only document, which is cut."""
        with contextlib.closing(self._usable(Counter())) as documents:
            document = next(documents)
        rows, start = {}, 0
        for side, text in split.parts(document):
            stop = start + len(text)
            piece = document.piece(start, stop) if isinstance(document, Document) else text
            file = write_tokens([piece], tokenizer, self.final / TOKEN_FILES[side], eos)
            rows[side] = np.array([(0, file.num_tokens)], dtype=[("key", "<u8"), ("num_tokens", "<i8")])
            start = stop
        return rows

    def _facts(self, side: str, file: TokenFile, rows: np.ndarray) -> dict[str, Any]:
        """Facts of a side by the keys of `Corpus.description`; ``rows``, one a document, name its groups."""
        keys, groups = np.unique(rows["key"], return_inverse=True)
        if side in GROUP_FILES:
            np.save(self.final / GROUP_FILES[side], groups.astype(np.int32), allow_pickle=False)
        tokens = np.bincount(groups, weights=rows["num_tokens"])
        return {
            "num_documents": file.metadata["num_documents"],
            "num_groups": len(keys),
            "num_bytes": file.metadata["num_bytes"],
            "num_tokens": file.num_tokens,
            "num_labels": file.num_labels,
            "largest_share": float(tokens.max() / tokens.sum()),
        }

    def _usable(self, skipped: Counter[str]) -> Generator[str, None, None]:
        limit, taken = self.settings["max_documents"], 0
        with contextlib.closing(self.source.documents(skipped)) as documents:
            for text in self.deduplication.distinct(documents, skipped):
                if not text.strip():
                    skipped["blank document"] += 1
                    continue
                yield text
                taken += 1
                if taken == limit:
                    return

    def _show(self, num_bytes: int, total_bytes: int | None, **counts: int) -> None:
        self.progress.show(num_bytes / 1e6, None if total_bytes is None else total_bytes / 1e6, counts=counts)

    def _estimated(self, num_bytes: int) -> int | None:
        """Bytes of text in all of the source, where ``num_bytes`` of it are read; None where nobody knows."""
        share = None if self.settings["max_documents"] else self.source.share_read()
        return round(num_bytes / share) if share else None

    def _notes(self, total: Counter[str]) -> list[str]:
        notes = self.source.notes()
        if total["num_spelled"] != total["num_bytes"]:
            share = total["num_spelled"] / total["num_bytes"]
            notes.append(
                f"This tokenizer's tokens spell {share:.4f} of the text's bytes, so bits per byte are that much off."
            )
        if unknown := total["num_unknown"]:
            notes.append(f"{unknown:,} tokens stand for text that the tokenizer cannot spell.")
        return notes

    def _changed(self, message: str) -> UserError:
        # Nobody will go on from shards of a text that is no more.
        shutil.rmtree(self.work, ignore_errors=True)
        return UserError(message)

    def _no_text(self) -> UserError:
        why = ", ".join(f"{count} x {reason}" for reason, count in self.skipped.items()) or "the files hold no records"
        return UserError(f"no document with text in {shortened(self.source.names)} ({why}); give other files")


def shortened(names: list[str], most: int = 4) -> str:
    """At most ``most`` names and how many more there are."""
    return ", ".join(names if len(names) <= most else [*names[:most], f"{len(names) - most} more"])
