"""From the results of a comparison to a table in the terminal, figures for a paper, and one page to show."""

from geonorm.report.finding import describe
from geonorm.report.html import write_report
from geonorm.report.results import parse_results, read_results
from geonorm.report.table import summary_table

__all__ = ["describe", "parse_results", "read_results", "summary_table", "write_report"]
