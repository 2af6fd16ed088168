"""One training run from its configuration to its result: ``geonorm train``."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from geonorm.errors import UserError
from geonorm.progress_bar import ProgressBar
from geonorm.signals import TRY_AGAIN, begin, stop_requests
from geonorm.training.config import RunConfig
from geonorm.training.distributed import OtherRankFailedError, Ranks, joined
from geonorm.training.rank_run import RankRun, Say

MISTAKE = 2
# What torch says when a process at the other end is gone; not all of it is a DistError.
_LOST = re.compile(r"closed by peer|Connection reset|Broken pipe|gloo|NCCL|Socket|timed out", re.IGNORECASE)


def run(config: RunConfig, out: Path, *, resume: bool = False, overwrite: bool = False) -> int:
    """Train, in this process or as one of the ranks that torchrun started.

    Args:
        config: with its lengths filled in, see :func:`geonorm.training.folder.read_config`.
        out: folder of the run, which all ranks share.
        resume: go on with what the folder holds; overwrite: delete the files of the run that it holds, and no others.

    Returns:
        0 if the run came to its end; 1 if it diverged, or learned nothing in 100 steps or more; 75 if it was told to
        end, or lost a rank, and can be resumed; 130 if it was interrupted by hand, and can be resumed.

    Raises:
        UserError: anything that a person has to change.
    """
    with stop_requests() as request:
        begin()
        try:
            with joined(config.parallel, config.device) as ranks:
                try:
                    with _console(ranks) as (say, bar):
                        return RankRun(config, out, ranks, request, say, bar).execute(
                            resume=resume, overwrite=overwrite
                        )
                except OtherRankFailedError:
                    return MISTAKE
        except KeyboardInterrupt:
            if request.code == TRY_AGAIN:
                return TRY_AGAIN
            raise
        except MemoryError as error:
            raise UserError(f"out of main memory ({error}); take a smaller model, batch or length") from error
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory ({str(error).splitlines()[0]}); raise `accumulation`, or set "
                "gradient_checkpointing=true"
            ) from error
        except (dist.DistError, RuntimeError) as error:
            if "can't allocate memory" in str(error) or "Storage size calculation overflowed" in str(error):
                raise UserError("out of main memory; take a smaller model, or raise `accumulation`") from error
            if config.parallel == "none" or not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
                raise
            reason = re.sub(r"^(\[[^]]*\] *)+", "", str(error).splitlines()[0])
            print(f"lost another rank ({reason}); start all again with --resume", flush=True)
            # torchrun ends what is left, which is ending already.
            request.ignore_further()
            return TRY_AGAIN


@contextlib.contextmanager
def _console(ranks: Ranks) -> Iterator[tuple[Say, ProgressBar | None]]:
    """What takes lines, on rank 0, and a bar below them where a person may be looking."""
    if not ranks.is_main:
        yield lambda text: None, None
    elif not sys.stdout.isatty():
        # One line a row of metrics tells enough.
        yield lambda text: print(text, flush=True), None
    else:
        from rich.console import Console

        with ProgressBar(Console()) as bar:
            yield bar.say, bar
