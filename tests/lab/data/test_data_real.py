"""The real CIFAR-10, from the unpacked (or packed) npm package that GDEQ_TEST_REAL_DATA names."""

import os

import pytest

from gdeq.lab.data import load, prepare

REAL = os.environ.get("GDEQ_TEST_REAL_DATA")


@pytest.mark.skipif(not REAL, reason="GDEQ_TEST_REAL_DATA does not name the npm package")
def test_the_npm_package_gives_the_official_files(tmp_path):
    prepare("cifar10", tmp_path, REAL)  # raises unless all six MD5s are the official ones
    loaded = load("cifar10", tmp_path)
    assert loaded.train_x.shape == (50_000, 3, 32, 32)
    assert loaded.test_x.shape == (10_000, 3, 32, 32)
    assert loaded.train_y.bincount().tolist() == [5000] * 10
    assert loaded.test_y.bincount().tolist() == [1000] * 10
    assert loaded.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=5e-5)
    assert loaded.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=5e-5)
