"""`Metric`: what a task is judged by, known to trainings and to reports."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What a task is judged by: the mean of its samples' scores.

    exponential: it is e to the power of that mean, as perplexity is.

    Examples:
        >>> from gdeq.lab.tasks import Metric
        >>> Metric("accuracy", "%", digits=1).text(97.5)
        'accuracy 97.5 %'
    """

    name: str
    unit: str = ""
    digits: int = 3
    higher_is_better: bool = True
    exponential: bool = False

    def of_mean(self, score: float) -> float:
        """The metric from the mean score."""
        return math.exp(min(score, 700.0)) if self.exponential else score

    @property
    def key(self) -> str:
        """Its name in metrics and summaries."""
        return f"test_{self.name}"

    @property
    def words(self) -> str:
        return self.name.replace("_", " ")

    @property
    def title(self) -> str:
        return f"test {self.words.lower()}" + f" ({self.unit})" * bool(self.unit)

    @property
    def percent(self) -> bool:
        """Whether it is the share of test samples that were right."""
        return self.higher_is_better and self.unit == "%"

    def number(self, value: float) -> str:
        return f"{value:.{self.digits}f}"

    def text(self, value: float) -> str:
        """``accuracy 97.50 %``"""
        return f"{self.words} {self.number(value)} {self.unit}".rstrip()
