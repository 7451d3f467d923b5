"""Run folders → a table, figures, a page.  It reads files alone and needs no training code."""

from gdeq.lab.report.runs import ReportError
from gdeq.lab.report.writer import table, write

__all__ = ["ReportError", "table", "write"]
