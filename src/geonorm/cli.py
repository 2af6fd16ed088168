"""The command line: ``geonorm compare``, ``geonorm report``, ``geonorm placements``."""

import dataclasses
import inspect
import sys
from pathlib import Path

from geonorm.errors import UserError
from geonorm.experiments.config import CompareConfig


def compare(config: CompareConfig) -> int:
    """Train one small model for every placement under equal conditions, and report."""
    from rich.console import Console

    from geonorm.experiments.compare import compare as run
    from geonorm.report import summary_table, write_report

    console = Console()
    results = run(config, console)
    console.print(summary_table(results))
    console.print(f"report: {write_report(config.out)}", markup=False, highlight=False, soft_wrap=True)
    return 1 if any(trial["status"] == "failed" for trial in results["trials"]) else 0


def report(out: Path) -> int:
    """Write the report of a finished comparison again.

    Args:
        out: folder of the comparison.
    """
    from geonorm.report import write_report

    print(f"report: {write_report(out)}")
    return 0


def placements() -> int:
    """List the placements with their options and defaults."""
    from geonorm.placements import REGISTRY

    for name, kind in REGISTRY.items():
        options = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(kind)) or "no options"
        summary = (inspect.getdoc(kind) or "").split("\n")[0].replace("``", "")
        print(f"{name}: {summary}\n    {options}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry of the ``geonorm`` command.

    Returns:
        0 if all went well; 1 if a trial failed; 2 if the user has to change something; 130 if interrupted.
    """
    try:
        import tyro

        commands = {
            "compare": tyro.conf.configure(tyro.conf.OmitArgPrefixes)(compare),
            "report": tyro.conf.configure(tyro.conf.Positional)(report),
            "placements": placements,
        }

        return tyro.extras.subcommand_cli_from_dict(
            commands, prog="geonorm", description="Where should a Transformer normalise?", args=arguments
        )
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "geonorm":
            raise
        print(f"error: {error.name} is not installed; run pip install 'geonorm[train]'", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command with --resume to continue", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
