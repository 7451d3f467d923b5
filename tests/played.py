"""Recordings without a GPU: graphs are functions that are called again."""

from __future__ import annotations

import torch

from gdeq.fast import engine, graphs, product
from gdeq.fast.graphs import Repeated
from gdeq.fast.kernels import sweep


class Event:
    def record(self):
        pass

    def synchronize(self):
        pass


class Graph:
    def __init__(self, replay):
        self.replay = replay


class Played:
    """Stands for a recording: what would be recorded is called whenever it would be played."""

    def __init__(self, monkeypatch):
        self.log = []
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(graphs, "current", lambda: self)
        nobody_looks(monkeypatch)

    def repeat(self, judge, go_on, unfinished, most, every):
        def graph(name, work):
            return Graph(lambda: (self.log.append(name), work()))

        Repeated(graph("judge", judge), graph("go on", go_on), unfinished, most, every).replay()


def nobody_looks(monkeypatch):
    """As in a step that is recorded."""
    for module in (engine, product, sweep):
        monkeypatch.setattr(module, "host_may_look", lambda device: False)
