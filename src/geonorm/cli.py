"""Entry of the ``geonorm`` command: runs a command and turns a user's mistake into one line."""

from __future__ import annotations

import signal
import sys
import threading

from geonorm.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Entry of the ``geonorm`` command.

    Returns:
        0 if all went well; 1 if a trial failed; 2 if the user has to change something; 130 if interrupted.
    """
    # Ending politely when a scheduler asks for it lets a comparison end its trials first.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        import tyro

        from geonorm.commands import COMMANDS

        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="geonorm", description="Where should a Transformer normalise?", args=arguments
        )
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "geonorm":
            raise
        print(f"error: {error.name} is not installed; run pip install 'geonorm[train]'", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{where}; check the path, its permissions and the disk", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
