"""``geonorm inspect`` from end to end: measure, write the report, show it on the terminal."""

from __future__ import annotations

from rich.console import Console

from geonorm.inspection.inspect_command import RESULTS, inspect_models
from geonorm.model_options import InspectConfig
from geonorm.report.inspection.html import write_inspection
from geonorm.report.inspection.table import inspection_tables
from geonorm.report.inspection.words import describe_inspection, text_words


def inspect_and_report(config: InspectConfig) -> int:
    """Inspect, report, and return the exit code.

    Raises:
        UserError: what :func:`geonorm.inspection.inspect_command.inspect_models` raises.
    """
    console = Console()

    def say(text: str, style: str | None = None) -> None:
        # Names and paths are the user's: no markup in them, and no line break that a copy would keep.
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    results = inspect_models(config, console)
    page = write_inspection(config.out, results)
    for table in inspection_tables(results):
        console.print(table)
    found = describe_inspection(results)
    say(f"{found.headline}.", "bold")
    for sentence in found.sentences:
        say(sentence)
    say(f"text: {text_words(results)}", "dim")
    for doubt in found.doubts:
        say(doubt, "dim")
    say(f"numbers: {config.out / RESULTS}")
    say(f"report: {page}")
    return 0
