"""Charts and pages of runs, made from the metrics files that they write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.plotting.chart import charts_of, write_png
    from megatron.plotting.dashboard_server import DashboardServer, address
    from megatron.plotting.metrics_record import read_several
    from megatron.plotting.run_page import to_page

__getattr__ = lazy_exports(
    __name__,
    {
        "chart": "charts_of write_png",
        "dashboard_server": "DashboardServer address",
        "metrics_record": "read_several",
        "run_page": "to_page",
    },
)
