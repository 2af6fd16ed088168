"""From the numbers of an inspection to tables in the terminal, figures for a paper, and one page to show."""

from geonorm.report.inspection.html import write_inspection
from geonorm.report.inspection.table import inspection_tables
from geonorm.report.inspection.words import describe_inspection

__all__ = ["describe_inspection", "inspection_tables", "write_inspection"]
