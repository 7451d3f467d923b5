# %% [markdown]
# # Your own task with `gdeq train`
#
# You can write your own training loop: a DEQ is a module like any other. Or describe the task in
# one file, and `gdeq train` does the rest: checkpoints and resume, several GPUs, capture,
# adaptive budgets, comparisons of gradients, and a report.
#
# A task has five parts: data, model, loss, score and presets. This is the whole file. The solver
# and the gradient are settings of the run, such as `gradient=implicit` or `gradient.refine=1`, and
# replace those that the file gives to `DEQ`.

# %%
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
task = shutil.copy(Path(__file__).resolve().with_name("circles.py"), folder)
print(Path(task).read_text())

# %% [markdown]
# ## Train
#
# In a shell you would write `gdeq train circles.py device=cpu epochs=6`. Any setting is given as
# `key=value`; `gdeq train --help` lists them.


# %%
def gdeq(*arguments):
    """Run the command, and return what it says."""
    command = [sys.executable, "-m", "gdeq", *map(str, arguments)]
    # One thread: a batch of 50 points is too small for more.
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "90"},
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


said = gdeq("train", "circles.py", "device=cpu", "epochs=6")
print(*(line for line in said.splitlines() if line.startswith("epoch")), sep="\n")

# %% [markdown]
# ## What a run leaves behind
#
# The folder holds the configuration, a line of numbers for every epoch, a checkpoint, the weights
# and a summary. All of it is plain: YAML, JSON lines, safetensors.

# %%
(run,) = (folder / "runs").iterdir()
print(*sorted(path.name for path in run.iterdir() if not path.name.startswith("events")), sep="\n")
summary = json.loads((run / "summary.json").read_text())
print({key: summary[key] for key in ("test_accuracy", "gradient", "steps", "parameters")})

# %% [test]
assert summary["test_accuracy"] > 70

# %% [markdown]
# ## Go on from here
#
# ```sh
# gdeq train --resume runs/NAME              # after a stop or a power cut
# gdeq compare circles.py --out compared     # the paper's four gradients, side by side
# gdeq report runs/NAME --out page           # one HTML page with figures
# torchrun --nproc-per-node 4 -m gdeq train circles.py
# ```
