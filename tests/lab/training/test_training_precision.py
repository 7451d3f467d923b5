"""bf16 training uses the weights of now, and says what it may cost on a CPU."""

import pytest
import torch
from training_runs import TINY

from gdeq.lab.training import config as configs
from gdeq.lab.training import precision


@pytest.mark.parametrize("pretrain", [0, 10])
def test_a_step_sees_the_weights_that_the_last_one_left(trainer, pretrain):
    """Autocast keeps half-precision copies of weights for as long as it is open: the whole run."""
    settings = ["precision=bf16", f"pretrain_steps={pretrain}", "optimizer.lr=0.1"]
    made, again, seen = trainer(*settings), trainer(*settings), []
    _, (images, labels) = next(made.train_batches.epoch())
    with precision.precision(made.config, made.process.device):
        made.one_step(images, labels)
        handle = made.model.register_forward_hook(lambda *call: seen.append(call[-1].detach()))
        made.one_step(images, labels)
        handle.remove()
    # The same forward pass with nothing cached, from the weights before the second step.
    torch.manual_seed(0)
    with precision.precision(again.config, again.process.device):
        again.one_step(images, labels)
    again.set_phase(again.step)
    with precision.precision(again.config, again.process.device):
        fresh = again.model.train()(images).detach()
    (found,) = seen
    torch.testing.assert_close(found.float(), fresh.float(), rtol=1e-3, atol=1e-3)


def test_bf16_on_a_cpu_is_told_before_the_first_step(few_images, tmp_path, gdeq):
    settings = [*TINY, "epochs=1"]
    said = gdeq.ok("train", *settings, "precision=bf16", "--out", tmp_path / "bf16")
    assert said.count("warning: bf16 on a CPU is slow") == 1
    assert said.index("bf16 on a CPU") < said.index("step 1/")
    assert "precision=float32 is the safe choice" in said
    said = gdeq.ok("train", *settings, "--out", tmp_path / "float32")
    assert "on a CPU" not in said


def test_bf16_on_a_gpu_needs_no_word():
    config = configs.load("digits", [*TINY, "precision=bf16"])
    assert precision.caution(config, torch.device("cuda")) is None
    assert "float32" in precision.caution(config, torch.device("cpu"))
