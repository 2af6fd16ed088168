"""Windows of a token file in an endless order that depends on the seed and the epoch alone."""

from __future__ import annotations

import dataclasses

import numpy as np

from geonorm.data.token_file import TokenFile
from geonorm.errors import MAX_SEED, UserError, check_count


class Windows:
    """Non-overlapping windows of a token file, each with one token more for the shifted targets.

    Window ``i`` holds tokens ``i * length`` to ``i * length + length`` inclusive. The run order is endless: epoch
    after epoch, each a permutation of all windows drawn from ``(seed, epoch)``, so that a run can be resumed at
    any position and every run with the same seed sees the same batches. A permutation takes 8 bytes a window.

    Where the file has a mask, windows none of whose targets has a label are left out: they would teach nothing.

    Attributes:
        length: tokens per window, the target shift not counted.
        seed: seed of the order.
        num_windows: windows per epoch.
    """

    def __init__(self, token_file: TokenFile, length: int = 128, seed: int = 0) -> None:
        """Cut a token file into windows.

        Args:
            token_file: the tokens.
            length: tokens per window, at least 1.
            seed: seed of the order, at least 0.

        Raises:
            UserError: the file holds less than one window, or none with a label.
        """
        self.length = check_count("length", length)
        self.seed = check_count("seed", seed, 0, MAX_SEED)
        self.token_file = token_file
        self.num_windows = (token_file.num_tokens - 1) // self.length
        if self.num_windows < 1:
            raise UserError(
                f"{token_file.path} holds {token_file.num_tokens} tokens, but one window of length {length} needs"
                f" {length + 1}; use a shorter length or more text"
            )
        self._kept: np.ndarray | None = None
        if token_file.mask is not None:
            targets = token_file.mask[1 : self.num_windows * self.length + 1].reshape(self.num_windows, self.length)
            self._kept = np.flatnonzero(targets.any(axis=1))
            self.num_windows = len(self._kept)
            if not self.num_windows:
                raise UserError(f"{token_file.path} has no window of length {length} in which a token has a label")
        self._epoch: tuple[int, np.ndarray] | None = None

    def batch(self, start: int, size: int) -> np.ndarray:
        """Windows number ``start`` to ``start + size - 1`` of the endless order.

        Args:
            start: position in the order, at least 0.
            size: number of windows, at least 1.

        Returns:
            int64 array ``[size, length + 1]``.
        """
        return self.gather(self._numbers(start, size))

    def mask(self, start: int, size: int) -> np.ndarray | None:
        """Which tokens of `batch` have a label, bool ``[size, length + 1]``; None if all have."""
        return None if self._kept is None else self.gather_mask(self._numbers(start, size))

    def _numbers(self, start: int, size: int) -> np.ndarray:
        start, size = check_count("start", start, 0, MAX_SEED), check_count("size", size)
        positions = np.arange(start, start + size)
        epochs, places = np.divmod(positions, self.num_windows)
        chosen = np.empty(size, dtype=np.int64)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            chosen[rows] = self._permutation(int(epoch))[places[rows]]
        return chosen

    def gather(self, windows: np.ndarray) -> np.ndarray:
        """Windows by number in the order of the text, int64 ``[len(windows), length + 1]``."""
        return self.token_file.tokens[self._index(windows)].astype(np.int64)

    def gather_mask(self, windows: np.ndarray) -> np.ndarray | None:
        """Which tokens of `gather` have a label, bool ``[len(windows), length + 1]``; None if all have."""
        return None if self.token_file.mask is None else np.asarray(self.token_file.mask[self._index(windows)])

    def starts(self, windows: np.ndarray) -> np.ndarray:
        """Places of the first tokens of windows, which are given by number in the order of the text."""
        return (windows if self._kept is None else self._kept[windows]) * self.length

    def _index(self, windows: np.ndarray) -> np.ndarray:
        return self.starts(windows)[:, None] + np.arange(self.length + 1)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._epoch is None or self._epoch[0] != epoch:
            # numpy keeps the raw stream of a bit generator stable across versions, but not that of permutation().
            bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            self._epoch = epoch, np.argsort(bits.random_raw(self.num_windows), kind="stable")
        return self._epoch[1]


@dataclasses.dataclass(frozen=True)
class HeldOutWindows:
    """Windows for evaluation, in the order of the text.

    Attributes:
        ids: int64 ``[num_windows, length + 1]``.
        groups: int64 ``[num_windows]``, the document or group that each window begins in.
        mask: which ids have a label, bool ``[num_windows, length + 1]``; None if all have.
    """

    ids: np.ndarray
    groups: np.ndarray
    mask: np.ndarray | None = None


def spread_windows(token_file: TokenFile, groups: np.ndarray, length: int, count: int) -> HeldOutWindows:
    """Choose windows so that every group gives as many as any other, as far as it has them.

    Candidates are those of `Windows`. A group that has fewer than its share gives all, and the rest is shared among the
    others; within a group the windows are evenly spaced.

    Args:
        token_file: a held-out side.
        groups: ``[num_documents]``, the group of each of its documents.
        length: tokens per window, the target shift not counted.
        count: number of windows, at least 1; fewer are returned if there are not as many.

    Raises:
        UserError: the file holds less than one window.
    """
    windows = Windows(token_file, length)
    starts = windows.starts(np.arange(windows.num_windows, dtype=np.int64))
    ends = np.flatnonzero(np.asarray(token_file.tokens) == int(token_file.metadata["eos_id"]))
    group = groups.astype(np.int64)[np.minimum(np.searchsorted(ends, starts), len(groups) - 1)]
    names, first, sizes = np.unique(group, return_index=True, return_counts=True)
    taken = _shares(sizes, first, check_count("count", count))
    chosen = [
        np.flatnonzero(group == name)[np.arange(number, dtype=np.int64) * size // number]
        for name, size, number in zip(names, sizes, taken, strict=True)
        if number
    ]
    places = np.sort(np.concatenate(chosen))
    return HeldOutWindows(windows.gather(places), group[places], windows.gather_mask(places))


def _shares(sizes: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """How many of its windows each group gives: the same number, or all it has; who comes first gives what is left."""
    level = int(np.searchsorted([np.minimum(sizes, level + 1).sum() for level in range(sizes.max())], count, "right"))
    taken = np.minimum(sizes, level)
    more = np.argsort(order)
    more = more[sizes[more] > level][: max(0, count - int(taken.sum()))]
    taken[more] += 1
    return taken
