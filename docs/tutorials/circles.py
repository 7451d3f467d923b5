"""Which of two circles is a point on?  The task of the eighth tutorial."""

import torch
from torch import nn

from gdeq import DEQ
from gdeq.lab.tasks import Config, Data, Metric, Task


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.mix(z) + x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.judge = nn.Linear(2, 16), nn.Linear(16, 1)
        self.deq = DEQ(Cell())  # the attribute must be called deq

    def forward(self, points):
        return self.judge(self.deq(self.read(points)))[:, 0]


class Circles(Task[Config]):
    """Which of two circles is a point on?"""

    presets = {"circles": {"epochs": 12, "batch_size": 50, "optimizer": {"lr": 0.02}}}
    metric = Metric("accuracy", "%", digits=1)

    def load(self):
        angle = 6.28 * torch.rand(600, generator=torch.Generator().manual_seed(0))
        outer = (torch.arange(600) % 2).float()
        points = (1 + outer)[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        points, outer = points.to(self.device), outer.to(self.device)
        return Data(train=(points[:500], outer[:500]), test=(points[500:], outer[500:]))

    def model(self):
        return Model()

    def losses(self, output, outer):  # one per sample
        return nn.functional.binary_cross_entropy_with_logits(output, outer, reduction="none")

    def score(self, output, outer):  # one per sample; the metric is their mean
        return 100.0 * ((output > 0) == (outer > 0.5))
