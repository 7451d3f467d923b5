"""Settings: presets, files, key=value, and what is written of them; what a dry run says."""

import dataclasses
import shutil

import pytest
import torch
import yaml
from training_runs import RICH, TINY, begun, checkpoints

from gdeq import Broyden
from gdeq.lab import data as datasets
from gdeq.lab.tasks import registry
from gdeq.lab.tasks.images import PRESETS, Images
from gdeq.lab.training import checkpoint, process, runs, settings
from gdeq.lab.training import config as configs


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_builds(name, monkeypatch):
    config = configs.load(name)
    shape = {"digits": (1, 8, 8), "cifar10": (3, 32, 32)}[config.data]
    x, y = torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    like = datasets.Dataset(config.data, x, y, x, y, tuple("0123456789"), (0.5,), (0.5,))
    monkeypatch.setattr(datasets, "load", lambda *_: like)
    with torch.device("meta"):
        model = Images(config, process.Process(torch.device("cpu"))).model()
    assert model.deq.solver == config.solver.build()
    assert model.deq.gradient == config.gradient.build()
    if config.model.size == "large":
        assert 10e6 < sum(p.numel() for p in model.parameters()) < 12e6


@pytest.mark.parametrize("name", list(registry.presets()))
def test_yaml_round_trip(name, tmp_path):
    config = configs.load(name, ["optimizer.lr=1e-5", "optimizer.clip=3", "snapshots=[2,3]"])
    text = yaml.safe_dump(configs.to_dict(config), sort_keys=False)
    (tmp_path / "own.yaml").write_text(text)
    assert configs.load(str(tmp_path / "own.yaml")) == config
    assert configs.from_dict(configs.to_dict(config)) == config


def test_overrides_lie_on_top_of_a_file(tmp_path):
    (tmp_path / "own.yaml").write_text("epochs: 7\nsolver: {max_iter: 5, tol: 1e-2}\n")
    config = configs.load(str(tmp_path / "own.yaml"), ["solver.max_iter=6"])
    assert (config.epochs, config.solver.max_iter, config.solver.tol) == (7, 6, 0.01)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optimizer.lr=1e-3", 1e-3),
        ("optimizer.lr=2", 2.0),
        ("optimizer.clip=null", None),
        ("optimizer.clip=1", 1.0),
        ("solver.memory=4", 4),
        ("solver.memory=null", None),
        ("gradient.tolerance=5e-2", 0.05),
        ("snapshots=[]", ()),
        ("snapshots=[3, 4]", (3, 4)),
        ("augment.flip=true", True),
        ("checkpoint_seconds=0", 0.0),
        ("data=cifar10", "cifar10"),
        (" epochs = 3", 3),
    ],
)
def test_key_value_typing(setting, value):
    config = configs.load("digits", [setting])
    for part in setting.split("=")[0].strip().split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


def test_short_names():
    config = configs.load("digits", ["gradient=npg", "gradient.steps=3", "model=tiny"])
    assert (config.gradient.name, config.gradient.steps, config.model.size) == ("npg", 3, "tiny")
    assert configs.load("cifar10", ["solver=anderson", "gradient=jfb"]).solver.max_iter == 18


def test_a_preset_is_not_changed_by_its_use():
    configs.load("cifar10", ["optimizer.lr=0.5", "model.dropout=0"])
    assert configs.load("cifar10").optimizer.lr == 1e-3
    assert configs.load("cifar10").model.dropout == 0.25


OTHER_VALUES = {
    "solver.memory": 3,
    "solver.step_bits": 8,
    "solver.damping": 0.25,
    "gradient.refine": 3,
    "gradient.tolerance": 0.1,
    "gradient.max_refine": 3,
    "gradient.max_iter": 3,
    "gradient.tol": 0.1,
    "gradient.solver": "gmres",
    "gradient.steps": 3,
    "gradient.damping": 0.25,
}


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_who_reads_what(key):
    """The table says what the objects show: they differ where the setting is read."""
    section, setting = key.split(".")
    kind, names = {
        "solver": (settings.SolverConfig, ("broyden", "anderson", "picard")),
        "gradient": (settings.GradientConfig, ("gdeq", "implicit", "jfb", "npg", "unrolled")),
    }[section]
    needed = {"tolerance": 0.1} if setting == "max_refine" else {}
    readers = [
        name
        for name in names
        if kind(name=name, **needed, **{setting: OTHER_VALUES[key]}).build()
        != kind(name=name, **needed).build()
    ]
    assert set(readers) == set(kind.read_by[setting])
    assert all(f"{section}.{name}" in OTHER_VALUES for name in kind.read_by)


def test_presets_may_hold_what_the_chosen_gradient_does_not_read(tmp_path):
    """It is there to be switched to; only what is given by hand must be read."""
    for gradient in ("implicit", "jfb", "npg", "gdeq"):
        config = configs.load("cifar10-fast", [f"gradient={gradient}"])
        assert (config.gradient.name, config.gradient.refine) == (gradient, 1)
    (tmp_path / "own.yaml").write_text("gradient: {name: jfb, refine: 2}\n")
    assert configs.load(str(tmp_path / "own.yaml"), ["epochs=2"]).gradient.refine == 2
    # Back to the default, whatever the preset said.
    assert configs.load("digits", ["gradient.tol=1e-6"]).gradient.tol == 1e-6


def test_all_of_the_gradients_of_a_command_count():
    every = ("implicit", "jfb", "npg", "gdeq")
    config = configs.load("digits", ["gradient.max_iter=3", "gradient.refine=2"], every)
    assert (config.gradient.max_iter, config.gradient.refine) == (3, 2)
    with pytest.raises(configs.ConfigError, match="read by gradient=implicit alone"):
        configs.load("digits", ["gradient.max_iter=3"], ("jfb", "npg"))


# -- dry runs --------------------------------------------------------------------------------------


def files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_dry_run_tells_what_would_happen(gdeq, tmp_path, monkeypatch, few_images):
    monkeypatch.chdir(tmp_path)
    said = gdeq.ok("train", *TINY, "epochs=3", "gradient=jfb", "--dry-run")
    assert configs.from_dict(yaml.safe_load(said.split("device: CPU")[0])) == configs.load(
        "digits", [*TINY, "epochs=3", "gradient=jfb"]
    )
    assert "device: CPU (" in said
    assert "data set: 12 train and 21 test images" in said
    assert "steps: 3 an epoch, 9 in all" in said
    assert "parameters: 91,514" in said
    assert "would train into runs/digits-small-jfb-seed0-" in said
    assert ", a new folder" in said
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    said = gdeq.ok("train", *TINY, "--out", "empty", "--dry-run")
    assert "would train into empty, which is there and holds nothing yet" in said
    assert "a new folder" not in said


def test_a_dry_run_of_a_resume(gdeq, tmp_path, few_images):
    begun(tmp_path, "epochs=9", "batch_size=4")
    before = files(tmp_path)
    said = gdeq.ok("train", "--resume", tmp_path, "--dry-run", "optimizer.lr=0.5")
    for text in ("epochs: 9", "lr: 0.5", "steps: 3 an epoch, 27 in all", "no checkpoint yet: st"):
        assert text in said
    assert files(tmp_path) == before


def test_a_dry_run_names_the_checkpoint(gdeq, tmp_path, reference, few_images):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    before = files(run)
    said = gdeq.ok("train", "--resume", run, "epochs=3", "--dry-run")
    assert "\ncontinuing at step 6 of 9 (epoch 3)\n" in said
    assert f"\nwould go on in {run}\n" in said
    said = gdeq.ok("train", "--resume", run, "--dry-run")
    assert f"{run} is already finished: 2 epochs, test accuracy" in said
    newest = checkpoints(run)[-1]
    newest.write_bytes(b"")
    said = gdeq.ok("train", "--resume", run, "epochs=3", "--dry-run")
    assert f"warning: {newest.name} is not a file of gdeq" in said
    assert "continuing at step 5 of 9" in said
    assert files(run) == {**before, newest: b""}
    state = checkpoint.latest(run)
    state["model"].popitem()
    checkpoint.save(run, 9, state, configs.to_dict(configs.load("digits", RICH)))
    said = gdeq.refused("train", "--resume", run, "epochs=3", "--dry-run")
    assert "does not fit its configuration: Error(s) in loading" in said


def test_a_dry_run_of_a_comparison(gdeq, tmp_path, few_images):
    out = tmp_path / "table"
    given = [*TINY, "epochs=1", "gradient.max_iter=3", "--out", out]
    said = gdeq.ok("compare", *given, "--dry-run", "--seeds", "2")
    assert said.count(f"missing: would train into {out}/") == 16
    assert "steps: 3 an epoch, 3 in all" in said
    assert "parameters: 91,514" in said
    assert not out.exists()
    for name in ("jfb", "npg"):
        wanted = ["epochs=1", "gradient.max_iter=3"]
        config = configs.load("digits", [*TINY, *wanted], runs.GRADIENTS)
        runs.train(out / f"{name}-seed0", configs.replace(config, gradient__name=name))
    (out / "npg-seed0" / "summary.json").unlink()
    before = files(out)
    said = gdeq.ok("compare", *given, "--no-pretraining", "--dry-run")
    assert f"missing: would train into {out / 'implicit-seed0'}" in said
    assert f"finished: would keep {out / 'jfb-seed0'}" in said
    assert f"half: would go on with {out / 'npg-seed0'}" in said
    assert f"missing: would train into {out / 'gdeq-seed0'}" in said
    said = gdeq.refused("compare", *given, "optimizer.lr=0.5", "--no-pretraining", "--dry-run")
    assert f"{out / 'jfb-seed0'} was made with other settings; choose another --out" in said
    (out / "implicit-seed0").mkdir()
    (out / "implicit-seed0" / "thesis.txt").write_text("years of work")
    for dry in (["--dry-run"], []):  # before it has begun with any of them
        said = gdeq.refused("compare", *given, "--no-pretraining", *dry)
        assert f"{out / 'implicit-seed0'} exists already" in said
    (out / "implicit-seed0" / "thesis.txt").unlink()
    assert files(out) == before


def test_all_settings_of_augmentation_reach_the_batches():
    wanted = {"crop": 2, "flip": True, "fill": "reflect"}
    wanted |= {"cutmix": 0.5, "alternate": True}
    assert wanted.keys() == {field.name for field in dataclasses.fields(datasets.Augment)}
    config = configs.load("digits", [f"augment.{name}={value}" for name, value in wanted.items()])
    task = Images(config, process.start("cpu"))
    assert dataclasses.asdict(task.train_batches(4).augment) == wanted
    assert task.train_batches(4, plain=True).augment is task.test_batches(4).augment is None


def test_steps_in_eight_bits_are_asked_for_where_the_steps_are_fixed():
    assert configs.load("digits").solver.build().step_bits == 16
    for preset in ("cifar10-fast", "cifar10-paper"):
        config = configs.load(preset)
        assert config.solver.tol == 0
        expected = Broyden(config.solver.max_iter, 0.0, step_bits=8, stop="whole")
        assert config.solver.build() == expected


def test_what_may_be_given_though_nobody_reads_it():
    configs.load("digits", ["adapt.backward=0.3"])  # its default
    configs.load("digits", ["adapt.backward=0.2", "adapt.enabled=false"])  # switched off by hand
    configs.load("cifar10-adaptive", ["adapt.backward=0.2"])
    assert not configs.load("cifar10-adaptive", ["adapt.enabled=false"]).adapt.enabled
