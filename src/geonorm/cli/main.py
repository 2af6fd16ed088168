"""Entry of the ``geonorm`` command: runs a command and turns a user's mistake into one line."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from geonorm.console import drain, steady
from geonorm.errors import UserError, disk_reason
from geonorm.ranges import check_ranges
from geonorm.signals import INTERRUPTED, StopRequest, stop_requests

if TYPE_CHECKING:
    from geonorm.cli.option_types import Command


# One row a command: the class Train of `train_command` and so on.
COMMANDS = (
    "compare",
    "train",
    "plan",
    "export",
    "prepare",
    "report",
    "inspect",
    "placements",
    "eval",
    "generate",
    "convert",
)


def main(arguments: list[str] | None = None) -> int:
    """Entry of the ``geonorm`` command.

    Args:
        arguments: words of the command line; None for those of this process, which is then taken to end with this:
            signals change nothing any more.

    Returns:
        0 if all went well; 1 if a trial failed or a run diverged; 2 if the user has to change something; 75 if asked to
        end by SIGTERM or SIGUSR1; 130 if interrupted.
    """
    with steady(), _logged(), stop_requests(leaves_at_once=arguments is None) as request:
        try:
            try:
                code = _run(arguments, request)
            finally:
                request.leaves_at_once = False
                request.waiting_for_step = True
        except KeyboardInterrupt:
            code = request.code or INTERRUPTED
            _complain("interrupted")
        if arguments is None:
            request.ignore_further()
        # Somebody else may have asked while what the first had asked for was done.
        return request.code if code == INTERRUPTED and request.code else code


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """What the library logs on standard error, as plain lines."""
    handler, log = logging.StreamHandler(), logging.getLogger("geonorm")
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _run(arguments: list[str] | None, request: StopRequest) -> int:
    try:
        import tyro

        command: Command = tyro.extras.subcommand_cli_from_dict(
            _commands(), prog="geonorm", description="Where should a Transformer normalise?", args=arguments
        )
        check_ranges(command)
        return command.run()
    except Exception as error:
        if request.raised:
            # What an interrupt was turned into on its way, by whoever caught it.
            raise KeyboardInterrupt from error
        message = _message(error)
        if message is None:
            raise
        _complain(f"error: {message}")
        return 2


def _commands() -> dict[str, Any]:
    modules = {name: importlib.import_module(f"geonorm.cli.{name}_command") for name in COMMANDS}
    return {name: getattr(module, name.capitalize()) for name, module in modules.items()}


def _message(error: Exception) -> str | None:
    """What a person has to know of an error; None if it is a bug."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "geonorm":
        return f"{error.name} is not installed; run pip install 'geonorm[train]'"
    if isinstance(error, UserError):
        return str(error)
    reason = disk_reason(error)
    if reason is None:
        return None
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return f"{reason}{where}; check the path, its permissions and the disk"


def _complain(text: str) -> None:
    # Both may be one terminal.
    drain()
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
