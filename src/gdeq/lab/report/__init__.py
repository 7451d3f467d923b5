"""Run folders → a table, figures, a page.  It reads files alone and needs no training code."""

from gdeq.lab.report.page import table, write
from gdeq.lab.report.runs import ReportError

__all__ = ["ReportError", "table", "write"]
