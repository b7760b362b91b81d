# SPDX-License-Identifier: Apache-2.0
"""Reports: one HTML file that opens offline, made from ``results.json``, ``diagnosis.json`` or ``summary.json`` alone.

The page is rendered from templates, charts as SVG; a little JavaScript adds reading values, neighbor sets and hiding
strategies. The same result gives the same bytes.
"""

from ngrpo.workbench.report.page import write_report

__all__ = ["write_report"]
