"""Tasks: what can be trained.  One file each: data, model, loss, metric, presets."""

from gdeq.lab.tasks.task import Data, Metric, Task
from gdeq.lab.training.settings import Config

__all__ = ["Config", "Data", "Metric", "Task"]
