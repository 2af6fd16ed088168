"""Windows of a token file in an endless order that depends on the seed and the epoch alone."""

from __future__ import annotations

import numpy as np

from geonorm.data.packed import TokenFile
from geonorm.errors import UserError, check_count


class Windows:
    """Non-overlapping windows of a token file, each with one token more for the shifted targets.

    Window ``i`` holds tokens ``i * length`` to ``i * length + length`` inclusive. The run order is endless: epoch
    after epoch, each a permutation of all windows drawn from ``(seed, epoch)``, so that a run can be resumed at
    any position and every run with the same seed sees the same batches. A permutation takes 8 bytes a window.

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
            UserError: the file holds less than one window.
        """
        self.length = check_count("length", length)
        self.seed = check_count("seed", seed, minimum=0)
        self.token_file = token_file
        self.num_windows = (token_file.num_tokens - 1) // self.length
        if self.num_windows < 1:
            raise UserError(
                f"{token_file.path} holds {token_file.num_tokens} tokens, but one window of length {length} needs"
                f" {length + 1}; use a shorter length or more text"
            )
        self._epoch: tuple[int, np.ndarray] | None = None

    def batch(self, start: int, size: int) -> np.ndarray:
        """Windows number ``start`` to ``start + size - 1`` of the endless order.

        Args:
            start: position in the order, at least 0.
            size: number of windows, at least 1.

        Returns:
            int64 array ``[size, length + 1]``.
        """
        start, size = check_count("start", start, minimum=0), check_count("size", size)
        positions = np.arange(start, start + size)
        epochs, places = np.divmod(positions, self.num_windows)
        chosen = np.empty(size, dtype=np.int64)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            chosen[rows] = self._permutation(int(epoch))[places[rows]]
        return self._gather(chosen)

    def fixed(self, count: int) -> np.ndarray:
        """Evenly spaced windows for evaluation; the same for every seed.

        Args:
            count: number of windows, at least 1.

        Returns:
            int64 array ``[min(count, num_windows), length + 1]``.
        """
        count = min(check_count("count", count), self.num_windows)
        return self._gather(np.arange(count, dtype=np.int64) * self.num_windows // count)

    def _gather(self, windows: np.ndarray) -> np.ndarray:
        index = windows[:, None] * self.length + np.arange(self.length + 1)
        return self.token_file.tokens[index].astype(np.int64)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._epoch is None or self._epoch[0] != epoch:
            # numpy keeps the raw stream of a bit generator stable across versions, but not that of permutation().
            bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            self._epoch = epoch, np.argsort(bits.random_raw(self.num_windows), kind="stable")
        return self._epoch[1]
