"""Reports of studies and of single runs: `page` puts the sections together, the other files make them."""

from chasm.studies.report.page import report_runs, write_report
from chasm.studies.report.paper_page import write_paper_page

__all__ = ["report_runs", "write_paper_page", "write_report"]
