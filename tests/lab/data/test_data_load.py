import hashlib

import data_files
import numpy as np
import pytest
import torch

from gdeq.lab.data import NAMES, DataError, load
from gdeq.lab.data.dataset import channel_statistics
from gdeq.lab.data.digits import held_out


def test_digits_need_nothing(device):
    digits = load(device=device)
    assert digits.name == "digits"
    assert digits.train_x.shape == (1437, 1, 8, 8)
    assert digits.test_x.shape == (360, 1, 8, 8)
    assert digits.train_x.dtype == digits.test_x.dtype == torch.uint8
    assert digits.train_y.dtype == digits.test_y.dtype == torch.int64
    assert digits.train_x.device.type == digits.test_y.device.type == device.type
    assert digits.shape == (1, 8, 8)
    assert digits.classes == tuple("0123456789")
    assert len(digits.train_x.unique()) == 17
    assert int(digits.train_x.max()) == 255


def test_digits_split_is_stratified_and_fixed():
    digits = load("digits")
    share = digits.test_y.bincount() / (digits.test_y.bincount() + digits.train_y.bincount())
    assert share.min() > 0.195
    assert share.max() < 0.205
    whole = hashlib.md5()  # scikit-learn's images, and a split without which accuracies are wrong
    for tensor in (digits.train_x, digits.train_y, digits.test_x, digits.test_y):
        whole.update(tensor.numpy().tobytes())
    assert whole.hexdigest() == "991bd973f7757f092ecc6353d0c5654a"


def test_held_out_counts_add_up_for_uneven_classes():
    y = np.repeat(np.arange(3, dtype=np.uint8), [1000, 101, 7])
    chosen = held_out(y)
    assert chosen.sum() == 360
    assert np.abs(np.bincount(y[chosen]) - np.bincount(y) * 360 / len(y)).max() < 1


def test_statistics_are_those_of_numpy():
    x = np.random.default_rng(0).integers(0, 256, (600, 3, 5, 4), dtype=np.uint8)
    x[:, 2] = 7
    mean, std = channel_statistics(x)
    assert mean == pytest.approx((x / 255.0).mean(axis=(0, 2, 3)), rel=1e-13)
    assert std == pytest.approx((x / 255.0).std(axis=(0, 2, 3)), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        *(("cifar-10", "did you mean 'cifar10'"), ("CIFAR10", "did you mean 'cifar10'")),
        *(("digit", "did you mean 'digits'"), ("zzz", r"\(there are: digits, cifar10, .*enwik8\)")),
    ],
)
def test_an_unknown_name_suggests_the_right_one_and_lists_them_all(wrong, told):
    with pytest.raises(DataError, match=f"no data set '{wrong}'.* ?{told}"):
        load(wrong)
    assert NAMES == ("digits", "cifar10", "bsd", "sudoku", "ptb", "wikitext2", "enwik8")


@pytest.mark.usefixtures("cifar10")
def test_a_missing_set_names_the_command(tmp_path):
    with pytest.raises(DataError, match="get it with `gdeq data cifar10"):
        load("cifar10", tmp_path)


@pytest.mark.usefixtures("cifar10")
def test_the_root_is_an_argument_or_a_variable_or_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data_files.write_binary(tmp_path / "data" / "cifar-10-batches-bin")
    data_files.write_binary(tmp_path / "other" / "cifar-10-batches-bin")
    assert len(load("cifar10").test_x) == data_files.COUNT
    monkeypatch.setenv("GDEQ_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere"):
        load("cifar10")
    assert len(load("cifar10", tmp_path / "other").test_x) == data_files.COUNT


def test_digits_without_sklearn_say_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        load("digits")
