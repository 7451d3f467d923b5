"""Settings: presets, files, key=value, and what is written of them."""

import pytest
import torch
import yaml

from gdeq import data as datasets
from gdeq.training import config as configs
from gdeq.training import loop


@pytest.mark.parametrize("name", list(configs.PRESETS))
def test_every_preset_builds(name):
    config = configs.load(name)
    assert config.data in datasets.NAMES
    shape = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}[config.data]

    class Like:
        classes = tuple("0123456789")

    Like.shape = shape
    with torch.device("meta"):
        model = loop.build_model(config, Like)
    assert model.deq.solver == config.solver.build()
    assert model.deq.gradient == config.gradient.build()
    if config.model.size == "large":
        assert 10e6 < sum(p.numel() for p in model.parameters()) < 12e6


@pytest.mark.parametrize("name", list(configs.PRESETS))
def test_yaml_round_trip(name, tmp_path):
    config = configs.load(name, ["optimizer.lr=1e-5", "optimizer.clip=3", "snapshots=[2,3]"])
    text = yaml.safe_dump(configs.to_dict(config), sort_keys=False)
    (tmp_path / "own.yaml").write_text(text)
    assert configs.load(str(tmp_path / "own.yaml")) == config
    assert configs.from_dict(configs.to_dict(config)) == config


def test_an_empty_file_is_the_default(tmp_path):
    (tmp_path / "own.yaml").write_text("")
    assert configs.load(str(tmp_path / "own.yaml")) == configs.Config()


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


def test_replace():
    config = configs.replace(configs.load("digits"), gradient__name="jfb", seed=3)
    assert (config.gradient.name, config.seed, config.epochs) == ("jfb", 3, 20)


def test_all_keys_are_settings():
    settings = configs.to_dict(configs.Config())
    for key in configs.all_keys():
        value = settings
        for part in key.split("."):
            value = value[part]
    assert len(configs.all_keys()) == sum(
        len(v) if isinstance(v, dict) else 1 for v in settings.values()
    )


def test_dry_runs_write_nothing(gdeq, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = gdeq("train", "epochs=3", "gradient=jfb", "--dry-run")
    assert code == 0
    assert configs.from_dict(yaml.safe_load(said.split("would train")[0])) == configs.load(
        "digits", ["epochs=3", "gradient=jfb"]
    )
    assert "would train into runs/digits-small-jfb-seed0-" in said
    code, said = gdeq("compare", "cifar10-fast", "--dry-run", "--out", "table")
    assert code == 0
    assert said.count("would train into table/") == 8
    assert not list(tmp_path.iterdir())
    (tmp_path / "config.yaml").write_text("epochs: 9\n")
    code, said = gdeq("train", "--resume", ".", "--dry-run", "optimizer.lr=0.5")
    assert code == 0
    assert "epochs: 9" in said
    assert "lr: 0.5" in said
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "epochs: 9\n"
