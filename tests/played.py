"""Recordings without a GPU: graphs are functions that are called again."""

from __future__ import annotations

from gdeq.fast.recording import Repeated, Stage


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

    def __init__(self):
        self.log = []

    def repeat(self, judge, go_on, unfinished, most, every, changes=()):
        def graph(name, work):
            return Graph(lambda: (self.log.append(name), work()))

        stages = [Stage(graph("judge", judge), graph("go on", go_on))]
        for few, change in changes:
            once = graph(f"at most {few}", change)
            stages.append(Stage(graph("judge", judge), graph("go on", go_on), once, few))
        Repeated(stages, unfinished, most, every).replay()
