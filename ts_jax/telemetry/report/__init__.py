"""The report of a run: one self-contained HTML page."""

from ts_jax.telemetry.report.page import build_report

__all__ = ['build_report']
