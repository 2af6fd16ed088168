"""``geonorm inspect`` from end to end: measure, write the report, show it on the terminal."""

from __future__ import annotations

from rich.console import Console

from geonorm.inspection.config import InspectConfig
from geonorm.inspection.run import RESULTS, run
from geonorm.report.inspection.html import write_inspection
from geonorm.report.inspection.table import inspection_tables
from geonorm.report.inspection.words import describe_inspection, text_words


def inspect_and_report(config: InspectConfig) -> int:
    """Inspect, report, and return the exit code.

    Raises:
        UserError: what :func:`geonorm.inspection.run.run` raises.
    """
    console = Console()
    plain = {"markup": False, "highlight": False, "soft_wrap": True}
    results = run(config, console)
    page = write_inspection(config.out, results)
    for table in inspection_tables(results):
        console.print(table)
    found = describe_inspection(results)
    console.print(f"{found.headline}.", style="bold", **plain)
    for sentence in found.sentences:
        console.print(sentence, **plain)
    console.print(f"text: {text_words(results)}", style="dim", **plain)
    for doubt in found.doubts:
        console.print(doubt, style="dim", **plain)
    console.print(f"numbers: {config.out / RESULTS}", **plain)
    console.print(f"report: {page}", **plain)
    return 0
