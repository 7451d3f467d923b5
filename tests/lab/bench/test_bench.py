"""`gdeq bench`: what it measures, prints and refuses."""

import json

import pytest
import torch

from gdeq.lab import bench as benches
from gdeq.lab.bench import subjects, table

FEW = ("--batch", "2", "--forward", "2", "--backward", "2", "--rounds", "1")


def test_times_every_gradient(gdeq, tmp_path):
    said = gdeq.ok("bench", *FEW, "--peers", "float32", "--out", tmp_path / "bench")
    found = json.loads((tmp_path / "bench" / "step.json").read_text())
    names = [f"gdeq: {name}" for name in ("gdeq", "gdeq refine 1", "jfb", "npg", "implicit")]
    peers = ("implicit", "implicit by a hook", "jfb")
    names += [f"torchdeq: {peer}, float32" for peer in peers]
    assert [row["name"] for row in found["rows"]] == names
    assert all(name in said for name in names)
    assert all(row["ms"] > 0 for row in found["rows"])
    assert (tmp_path / "bench" / "step.txt").read_text().strip() in said
    assert "GDEQ step ÷ (6 evaluations × f)" in said
    if not torch.cuda.is_available():
        assert "in a graph" not in said
    assert " 0 TFLOP/s" not in said
    assert "FLOP/s of a large matrix product" in said


def test_refuses_what_there_is_not(gdeq, tmp_path):
    said = gdeq.refused("bench", "--size", "huge")
    assert "small" in said
    for peers in ("foo", "float32,foo", "none,foo"):
        said = gdeq.refused("bench", "--peers", peers)
        assert "is no precision; write some of float32,tf32,bf16 with commas" in said
    (tmp_path / "file").write_text("")
    for place, problem in (("file", "File exists"), ("file/inner", "Not a directory")):
        said = gdeq.refused("bench", *FEW, "--out", tmp_path / place)
        assert said == f"error: {tmp_path / place}: {problem}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_says_what_to_do(gdeq):
    said = gdeq.refused("bench", "--device", "cuda")
    assert "PyTorch sees no GPU here; use --device cpu or --device auto" in said


@pytest.mark.parametrize("gpu", [False, True])
def test_on_a_cpu_is_small_and_in_float32_also_where_there_is_a_gpu(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    small = benches.default_setup("cpu")
    assert (small.size, small.precision, small.device) == ("small", "float32", "cpu")
    assert benches.default_setup() == (benches.Setup() if gpu else small)
    assert benches.default_setup("cuda:1") == benches.Setup(device="cuda:1")


def test_peers():
    cpu, gpu = benches.Setup(device="cpu"), benches.Setup(device="cuda")
    assert benches.read_peers(None, cpu) == ("float32",)  # bf16 may be an illegal instruction
    assert benches.read_peers(None, gpu) == ("float32", "tf32", "bf16")
    assert benches.read_peers("none", gpu) == benches.read_peers("", gpu) == ()
    assert benches.read_peers("tf32, float32", cpu) == ("tf32", "float32")


@pytest.mark.parametrize(
    ("precision", "peers", "named"),
    [
        ("bf16", (), "float32 for --precision is"),
        ("float32", ("bf16",), "float32 for --peers is"),
        ("bf16", ("bf16",), "float32 for --precision and --peers is"),
        ("float32", None, None),
    ],
)
def test_warns_of_bf16_on_a_cpu_before_it_begins(monkeypatch, precision, peers, named):
    said = []
    monkeypatch.setattr(table, "_measure", lambda *args: said.append("begun"))
    setup = benches.Setup(precision=precision, device="cpu")
    benches.run(setup, peers=peers, tell=said.append)
    assert said.pop() == "begun"
    assert len(said) == (named is not None)
    if named:
        assert said[0].startswith("warning: bf16 on a CPU")
        assert named in said[0]


@pytest.mark.parametrize(
    ("amount", "text"),
    [(12.0, "12.0 "), (4.5e6, "4.5 M"), (85e9, "85.0 G"), (7.9e14, "790.0 T"), (4e15, "4000.0 T")],
)
def test_figures_have_a_fitting_prefix(amount, text):
    assert table.scaled(amount) == text


@pytest.mark.parametrize("cell", ["transformer", "convolution", "mlp"])
def test_cells_of_plain_modules(gdeq, tmp_path, cell):
    said = gdeq.ok("bench", "--cell", cell, *FEW, "--out", tmp_path)
    found = json.loads((tmp_path / "step.json").read_text())
    assert found["setup"]["cell"] == cell
    names = {row["name"] for row in found["rows"]}
    assert {"gdeq: gdeq", "gdeq: implicit", "torchdeq: implicit, float32"} <= names
    assert said.startswith(f"{cell} cell, batch ")
    mine = next(row["ms"] for row in found["rows"] if row["name"] == "gdeq: gdeq")
    ratio = mine / (6 * found["cell"]["f"])
    told = f"GDEQ step {mine:.2f} ms, f {found['cell']['f']:.3f} ms, "
    assert f"{told}GDEQ step ÷ (6 evaluations × f): {ratio:.3f}" in said
    assert found["roofline"]["f_gflop"] > 0


def test_cells_as_large_as_published():
    shapes = {
        "transformer": (32, 256, 512),
        "convolution": (128, 48, 32, 32),
        "mlp": (512, 1024),
    }
    for cell, shape in shapes.items():
        setup = benches.default_setup("cuda", cell)
        assert (setup.forward, setup.precision) == (18, "bf16")
        on_cpu = benches.Setup(**{**vars(setup), "device": "cpu"})
        assert on_cpu.draw()[0].shape == shape


@pytest.mark.parametrize("cell", ["transformer", "convolution", "mlp"])
def test_cells_have_an_equilibrium(cell):
    """Or the step would be timed on numbers that are none."""
    setup = benches.default_setup("cpu", cell)
    model = subjects.build(setup, setup.gradients()["jfb"])
    x, _ = setup.draw()
    with torch.no_grad():
        z = model(x)
    assert z.isfinite().all()
    assert z.shape == x.shape
    assert model.deq.solution.residual.max() < 0.1


def test_a_cell_that_there_is_not(gdeq):
    said = gdeq.refused("bench", "--cell", "gru")
    assert "--cell must be one of mdeq, transformer, convolution, mlp, got 'gru'" in said
