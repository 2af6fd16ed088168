"""The stages of a preparation: survey, tokenizer, encoded shards, token files; each can be gone on with."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geonorm.data.assemble import Side, assemble, survey_shards
from geonorm.data.corpus import GROUP_FILES, TOKEN_BYTES, TOKEN_FILES, TOKENIZER
from geonorm.data.dedup import Deduplication
from geonorm.data.document import Document
from geonorm.data.encode import Encoder
from geonorm.data.overlap import NGRAM, overlap
from geonorm.data.packed import TokenFile, TokenWriter
from geonorm.data.parallel import spread
from geonorm.data.progress import Progress
from geonorm.data.shards import NO_TOKEN, ShardEncoder, ShardFacts, finished, group
from geonorm.data.sources import Source
from geonorm.data.split import TRAIN, Sample, Split, Survey, sample_documents
from geonorm.data.tokenizer import EOS, load_tokenizer, plain_copy, token_byte_lengths, train_tokenizer
from geonorm.errors import UserError
from geonorm.storage import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_SAMPLE_BYTES = 20_000_000

_SURVEY, _SHARDS, _STREAM = "survey.json", "shards", "stream"
_READS_BETWEEN_TICKS = 100


class Build:
    """One preparation.

    Attributes:
        final: folder of the corpus.
        description: facts about the corpus, once `run` has ended.
        num_shards: shards that it was made of.
        num_kept: those of them that an interrupted run had left.
    """

    def __init__(
        self,
        final: Path,
        work: Path,
        source: Source,
        settings: dict[str, Any],
        workers: int,
        say: Callable[[str], None],
        tick: Callable[[Progress], None],
    ) -> None:
        self.final, self.work, self.source, self.settings = final, work, source, settings
        self.workers, self.say, self.tick = workers, say, tick
        self.description: dict[str, Any] = {}
        self.num_shards = self.num_kept = 0
        self.skipped: Counter[str] = Counter()
        self.deduplication = Deduplication(settings["dedup"])
        source.folder = work / _STREAM

    def run(self, given: tuple[Tokenizer, str] | None) -> None:
        """Make all files of the corpus but its description.

        Args:
            given: a tokenizer and its end-of-text token; None to train one on the train side.

        Raises:
            UserError: the source cannot be read, has no text or changed meanwhile; a worker died.
        """
        before = None
        if given is None:
            before, eos = self._trained(), EOS
        else:
            tokenizer, eos = given
            plain_copy(tokenizer, eos).save(str(self.work / TOKENIZER))
        shards = self._encode(eos, None if before is None else before["num_bytes"])
        survey = survey_shards(self.work / _SHARDS, shards)
        if before is not None and before["fingerprint"] != survey.fingerprint:
            raise self._changed(f"{self._names()} changed while being read; prepare the data again")
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
            sides = assemble(self.work / _SHARDS, shards, split, encoder, self.final)
        else:
            sides = self._cut(split, tokenizer, eos)
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
        num_bytes = sum(side.num_bytes for side in sides.values())
        text_tokens = sum(side.num_tokens - side.num_documents for side in sides.values())
        self.description = {
            "sources": self.source.names,
            **{
                count: {name: getattr(side, count) for name, side in sides.items()}
                for count in ("num_documents", "num_groups", "num_bytes", "num_tokens")
            },
            **self._labels(sides),
            "largest_share": {name: sides[name].largest_share for name in GROUP_FILES},
            "overlap": {"ngram": NGRAM, **{name: overlap(files[TRAIN], files[name]) for name in GROUP_FILES}},
            "skipped": dict(sorted(self.skipped.items())),
            "bytes_per_token": num_bytes / text_tokens,
            "vocab_size": len(lengths),
            "eos_id": encoder.eos_id,
            "eos": eos,
            "fingerprint": survey.fingerprint,
            "settings": self.settings,
            "notes": [*notes, *self._notes(shards)],
        }

    def _labels(self, sides: dict[str, Side]) -> dict[str, Any]:
        if all(side.num_labels == side.num_tokens for side in sides.values()):
            return {}
        return {"num_labels": {name: side.num_labels for name, side in sides.items()}}

    def _trained(self) -> dict[str, Any]:
        """Survey the documents and train a tokenizer on the train side, unless an earlier run did."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.work / _SURVEY).read_text(encoding="utf-8"))
            load_tokenizer(self.work / TOKENIZER)
            return found
        survey, skipped = Survey(), Counter[str]()
        # As long as the train side has half of the bytes, twice as much as is wanted holds enough of it.
        sample = Sample(2 * TOKENIZER_SAMPLE_BYTES)
        for text in self._usable(skipped):
            survey.add(text)
            sample.add(text)
            if survey.num_documents % _READS_BETWEEN_TICKS == 0:
                self.tick(Progress("reading", survey.num_documents, survey.num_bytes, 0, None))
        if not survey.num_documents:
            self.skipped = skipped
            raise self._no_text()
        split = self._split(survey)
        texts = self._train_side(sample, split)
        megabytes = sum(map(len, texts)) / 1e6
        self.say(
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
        mine = [text for text in texts if split.side(text) == TRAIN]
        if sample.complete or sum(len(text.encode("utf-8")) for text in mine) >= TOKENIZER_SAMPLE_BYTES:
            return sample_documents(mine, TOKENIZER_SAMPLE_BYTES)
        # A few huge documents of the other side have taken the room.
        mine = (text for text in self._usable(Counter()) if split.side(text) == TRAIN)
        return sample_documents(mine, TOKENIZER_SAMPLE_BYTES)

    def _encode(self, eos: str, total_bytes: int | None) -> list[ShardFacts]:
        folder = self.work / _SHARDS
        folder.mkdir(exist_ok=True)
        shards: dict[int, ShardFacts] = {}
        total = Counter[str]()

        def done(facts: ShardFacts) -> None:
            shards[facts.number] = facts
            total.update(documents=facts.num_documents, bytes=facts.num_bytes, tokens=facts.num_tokens)
            self.tick(Progress("encoding", total["documents"], total["bytes"], total["tokens"], total_bytes))

        def tasks() -> Iterator[tuple[int, list[str]]]:
            for number, texts in enumerate(group(self._usable(self.skipped))):
                if (facts := finished(folder, number, texts)) is None:
                    yield number, texts
                else:
                    self.num_kept += 1
                    done(facts)

        for facts in spread(ShardEncoder, (folder, self.work / TOKENIZER, eos), tasks(), self.workers):
            done(facts)
        self.num_shards = len(shards)
        if left_out := sum(shard.skipped for shard in shards.values()):
            self.skipped[NO_TOKEN] = left_out
        return [shards[number] for number in sorted(shards)]

    def _split(self, survey: Survey) -> Split:
        names = ("val_fraction", "test_fraction", "min_documents", "max_share")
        return survey.split(**{name: self.settings[name] for name in names})

    def _cut(self, split: Split, tokenizer: Tokenizer, eos: str) -> dict[str, Side]:
        with contextlib.closing(self._usable(Counter())) as documents:
            document = next(documents)
        sides, start = {}, 0
        for side, text in split.parts(document):
            stop = start + len(text)
            with TokenWriter(self.final / TOKEN_FILES[side], tokenizer, eos) as writer:
                writer.add(document.piece(start, stop) if isinstance(document, Document) else text)
            start = stop
            sides[side] = Side(1, writer.num_bytes, writer.num_tokens, 1, 1.0, writer.num_labels)
            if side in GROUP_FILES:
                np.save(self.final / GROUP_FILES[side], np.zeros(1, dtype=np.int32), allow_pickle=False)
        return sides

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

    def _notes(self, shards: list[ShardFacts]) -> list[str]:
        notes = self.source.notes()
        spelled, num_bytes = (sum(getattr(s, name) for s in shards) for name in ("num_spelled_bytes", "num_bytes"))
        if spelled != num_bytes:
            notes.append(
                f"This tokenizer's tokens spell {spelled / num_bytes:.4f} of the text's bytes, so bits per byte are"
                " that much off."
            )
        if unknown := sum(shard.num_unknown for shard in shards):
            notes.append(f"{unknown:,} tokens stand for text that the tokenizer cannot spell.")
        return notes

    def _names(self) -> str:
        names = self.source.names
        return ", ".join(names[:4]) + (f", {len(names) - 4} more" if len(names) > 4 else "")

    def _changed(self, message: str) -> UserError:
        # Nobody will go on from shards of a text that is no more.
        shutil.rmtree(self.work, ignore_errors=True)
        return UserError(message)

    def _no_text(self) -> UserError:
        why = ", ".join(f"{count} x {reason}" for reason, count in self.skipped.items()) or "the files hold no records"
        return UserError(f"no document with text in {self._names()} ({why}); give other files")
