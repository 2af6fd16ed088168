"""From the results of a comparison to a table in the terminal, figures for a paper, and one page to show."""

from geonorm.report.comparison_page import write_report
from geonorm.report.comparison_tables import print_summary
from geonorm.report.finding import describe
from geonorm.report.results import parse_results, read_results

__all__ = ["describe", "parse_results", "print_summary", "read_results", "write_report"]
