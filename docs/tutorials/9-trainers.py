# %% [markdown]
# # Lightning and the Hugging Face Trainer
#
# A DEQ is an `nn.Module`, so trainers need no adapter. Add a few numbers from the record to the
# log, so that you notice when solves stop converging.

# %%
import logging
import tempfile
import warnings

import pytorch_lightning as lightning
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gdeq

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
points = torch.randn(256, 8)
labels = (points[:, 0] * points[:, 1] > 0).long()


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, z, x):
        return torch.tanh(0.5 * self.mix(z) + x)


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.read, self.judge = nn.Linear(8, width), nn.Linear(width, 2)
        self.deq = gdeq.DEQ(Cell(width))

    def forward(self, points):
        return self.judge(self.deq(self.read(points)))


# %% [markdown]
# ## Lightning
#
# Log the record in the hook after the backward pass. By then it also has the gradient's error.


# %%
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.seen = Model(), []

    def training_step(self, batch, _):
        points, labels = batch
        return nn.functional.cross_entropy(self.model(points), labels)

    def on_after_backward(self):
        solution = self.model.deq.solution
        self.log("converged", solution.converged.float().mean())
        self.log("gradient_error", solution.backward.batch_error.float())
        self.seen.append(solution.residual.max().item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


module = Lit()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about workers and loggers
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet
    )
    trainer.fit(module, DataLoader(TensorDataset(points, labels), batch_size=64))
metrics = trainer.callback_metrics.items()
logged = {name: round(value.item(), 3) for name, value in metrics}
print(f"Lightning logged {logged}")

# %% [markdown]
# ## Hugging Face Trainer
#
# The Trainer expects a model that returns its loss. Override `log` to add the record.


# %%
class ForTrainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, points, labels):
        score = self.model(points)
        return {"loss": nn.functional.cross_entropy(score, labels), "logits": score}


class WithRecord(transformers.Trainer):
    """Adds the layer's record to every line of the log."""

    def log(self, logs, *args, **kwargs):
        solution = self.model.model.deq.solution
        logs["converged"] = solution.converged.float().mean().item()
        logs["residual"] = solution.residual.max().item()
        super().log(logs, *args, **kwargs)


samples = [{"points": p, "labels": c} for p, c in zip(points, labels, strict=True)]
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(),
    num_train_epochs=2,
    per_device_train_batch_size=64,
    learning_rate=0.01,
    logging_steps=4,
    use_cpu=True,
    **{"save_strategy": "no", "report_to": [], "disable_tqdm": True},
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    hf = WithRecord(model=ForTrainer(), args=arguments, train_dataset=samples)
    result = hf.train()
print(f"Trainer: {result.global_step} steps, loss {result.training_loss:.2f}")

# %% [test]
assert len(module.seen) == 8
assert logged["converged"] > 0.9
assert hf.state.log_history[0]["converged"] > 0.9

# %% [markdown]
# Both trainers move the model to its device, and use mixed precision and many GPUs, as for any
# other module. See the guides on [mixed precision](../guides/precision.md) and
# [many GPUs](../guides/distributed.md).
