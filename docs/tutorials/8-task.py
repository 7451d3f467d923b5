# %% [markdown]
# # Your own task with `gdeq train`
#
# You can write your own training loop, since a DEQ is a module like any other. Or describe the task
# in one file, and `gdeq train` does the rest: checkpoints and resume, several GPUs, capture,
# adaptive budgets, comparisons of gradients, and a report.
#
# A task has five parts: data, model, loss, score and presets. The one below tells which of two
# circles a point is on. This page keeps the file in a string, so that it can run it; to try it
# yourself, save what stands between the quotes as `circles.py`.

# %%
TASK = '''
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
        loss = nn.functional.binary_cross_entropy_with_logits
        return loss(output, outer, reduction="none")

    def score(self, output, outer):  # one per sample; the metric is their mean
        return 100.0 * ((output > 0) == (outer > 0.5))
'''

# %% [markdown]
# The solver and the gradient are settings of a run, such as `gradient=implicit` or
# `gradient.refine=1`. They replace those that the file gives to `DEQ`.
#
# ## Train
#
# In a shell, run `gdeq train circles.py device=cpu epochs=6`. Any setting is given as `key=value`;
# `gdeq train --help` lists them. This page runs the same command from Python:

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
(folder / "circles.py").write_text(TASK)


def gdeq(*arguments):
    """Run the command, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "gdeq", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        # 50 points are too few for more threads.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


printed = gdeq("train", "circles.py", "device=cpu", "epochs=6")
print(*(line for line in printed.splitlines() if line.startswith("epoch")), sep="\n")

# %% [markdown]
# ## What a run leaves behind
#
# The run folder holds the configuration, metrics, checkpoints, weights and a summary. All of them
# are plain formats: YAML, JSON lines, safetensors.

# %%
(run,) = (folder / "runs").iterdir()
names = sorted(path.name for path in run.iterdir())
print(*(name for name in names if not name.startswith("events")), sep="\n")
summary = json.loads((run / "summary.json").read_text())
for key in ("test_accuracy", "gradient", "steps", "parameters"):
    print(f"{key}: {summary[key]}")

# %% [test]
assert summary["test_accuracy"] > 70

# %% [markdown]
# ## Go on from here
#
# ```sh
# gdeq train --resume runs/NAME              # after an interruption
# gdeq compare circles.py --out compared     # the paper's four gradients, side by side
# gdeq report runs/NAME --out page           # one HTML page with figures
# torchrun --nproc-per-node 4 -m gdeq train circles.py
# ```
