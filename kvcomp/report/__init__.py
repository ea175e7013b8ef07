"""Quantization error reports: what compressors cost in bits and in errors, on tensors or on a model."""

from kvcomp.report.build import Progress, report_tensors
from kvcomp.report.figures import BreakEven, Figures, HeadFigures, ModelFigures, Report
from kvcomp.report.model import quantization_report

__all__ = [
    "BreakEven",
    "Figures",
    "HeadFigures",
    "ModelFigures",
    "Progress",
    "Report",
    "quantization_report",
    "report_tensors",
]
