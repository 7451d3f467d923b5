"""Run folders → a table, figures, a page.  It reads files alone and needs no training code."""

from gdeq.report.runs import ReportError
from gdeq.report.writer import table, write

__all__ = ["ReportError", "table", "write"]
