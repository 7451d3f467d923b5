"""CIFAR-10 in every form it comes in, with a few images per file."""

import hashlib
import io
import json
import struct
import tarfile

import numpy as np
from PIL import Image

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
COUNT = 3


def records():
    """name -> (3, 3073) uint8: labels, then planes."""
    random = np.random.default_rng(7)
    made = {}
    for name in BATCHES:
        pixels = random.integers(0, 256, (COUNT, 3073), dtype=np.uint8)
        pixels[:, 0] = random.integers(0, 10, COUNT)
        made[name] = pixels
    return made


def md5s():
    return {f"{name}.bin": hashlib.md5(r.tobytes()).hexdigest() for name, r in records().items()}


def write_binary(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, r in records().items():
        (folder / f"{name}.bin").write_bytes(r.tobytes())
    return folder


def pickles():
    return {name: python2_pickle(r[:, 0].tolist(), r[:, 1:]) for name, r in records().items()}


def pickle_md5s():
    return {name: hashlib.md5(data).hexdigest() for name, data in pickles().items()}


def write_python(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in pickles().items():
        (folder / name).write_bytes(data)
    return folder


def write_npm(folder):
    folder.mkdir(parents=True, exist_ok=True)
    made = records()
    for name, r in made.items():
        rows = r[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)  # (n, 1024, 3)
        Image.fromarray(np.ascontiguousarray(rows)).save(folder / f"{name}.png")
    train = [int(v) for name in BATCHES[:-1] for v in made[name][:, 0]]
    (folder / "train_lables.json").write_text(json.dumps(train))
    (folder / "test_lables.json").write_text(json.dumps(made["test_batch"][:, 0].tolist()))
    return folder


def python2_pickle(labels, data):
    """The instructions of the official files: protocol 2 as Python 2 wrote it."""

    def text(s):
        return b"U" + bytes([len(s)]) + s

    shape = b"".join(b"J" + struct.pack("<i", n) for n in data.shape)
    raw = data.tobytes()
    dtype = b"cnumpy\ndtype\nq\x06" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|")
    dtype += b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
    array += text(b"b") + b"\x87R(K\x01" + shape + b"\x86" + dtype
    array += b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    items = text(b"batch_label") + text(b"batch 1 of 5") + text(b"labels") + b"q\x02" + numbers
    return b"\x80\x02}q\x01(" + items + text(b"data") + array + b"u."


def tar(path, folder, prefix="", mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, arcname=prefix + file.name)
    return path


def tar_of(path, entries, mode="w:gz"):
    """entries: (TarInfo or name, bytes)."""
    with tarfile.open(path, mode) as archive:
        for entry, data in entries:
            info = entry if isinstance(entry, tarfile.TarInfo) else tarfile.TarInfo(entry)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path
