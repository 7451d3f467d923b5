"""Models outside Python: `torch.export`, ONNX, one compiled graph, and shapes without values."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import gdeq


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, z, x):
        return self.norm(torch.tanh(0.5 * self.inner(z) + x))


class Model(nn.Module):
    """A layer for each solver, one after the other."""

    def __init__(self, *solvers, gradient=gdeq.GDEQ(refine=1)):  # noqa: B008 (frozen)
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(3, 4)
        self.layers = nn.ModuleList(gdeq.DEQ(Cell(), solver, gradient) for solver in solvers)

    def forward(self, x):
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x)
        return x


SOLVERS = (gdeq.Broyden(max_iter=3, memory=2), gdeq.Anderson(max_iter=2), gdeq.Picard(max_iter=2))
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

SERVED = """
import sys
sys.modules["gdeq"] = None  # to import it is an error
import torch
folder = sys.argv[1]
x, want = torch.load(f"{folder}/pair.pt")
program = torch.export.load(f"{folder}/model.pt2").module()
found = {"export": program(x)}
if len(sys.argv) > 2:
    import onnxruntime
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    fed = {session.get_inputs()[0].name: x.numpy()}
    found["onnx"] = torch.from_numpy(session.run(None, fed)[0])
for name, got in found.items():
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")
"""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["fixed steps", "tolerance", "onnx"])
def test_an_exported_model_needs_no_gdeq(tmp_path, form):
    solvers = SOLVERS
    if form == "tolerance":  # loose, so that samples freeze on the way
        solvers = (gdeq.Broyden(max_iter=4, tol=0.02, line_search=1),)
    model = Model(*solvers).eval()
    if form != "tolerance":
        gdeq.fixed_steps(model)
    batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (X[:3],), dynamic_shapes=batch)
    torch.export.save(program, tmp_path / "model.pt2")
    words = [sys.executable, "-c", SERVED, str(tmp_path)]
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
        torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "model.onnx")
        words.append("onnx")
    with torch.no_grad():
        torch.save((X, model(X)), tmp_path / "pair.pt")
        if form == "tolerance":
            assert len(set(model.layers[0].solution.steps.tolist())) > 1
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "gradient", [gdeq.JFB(), gdeq.GDEQ(), gdeq.Unrolled(2), None], ids=lambda g: type(g).__name__
)
def test_one_compiled_graph(gradient):
    torch._dynamo.reset()
    eager = Model(gdeq.Broyden(max_iter=3), gradient=gradient or gdeq.Implicit())
    model = gdeq.fixed_steps(copy.deepcopy(eager))
    gdeq.fixed_steps(eager)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(gradient is not None):
        got, want = call(X), eager(X)
    torch.testing.assert_close(got, want)
    if gradient is not None:
        got.square().sum().backward()
        want.square().sum().backward()
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_one_graph_says_so():
    torch._dynamo.reset()
    model = gdeq.fixed_steps(Model(gdeq.Broyden()), steps=2)
    assert model.layers[0].solver == gdeq.Broyden(max_iter=2, tol=0.0)
    tested = gdeq.DEQ(lambda z, x: 0.5 * z + x, eval_solver=gdeq.Picard(60, 1e-5))
    assert gdeq.fixed_steps(tested, 3).eval_solver == gdeq.Picard(max_iter=3, tol=0.0)
    # PyTorch 2.8 says only that there was an error.
    with pytest.raises(Exception, match=r"cannot trace; use gradient GDEQ|Observed exception"):
        torch.compile(model, fullgraph=True, backend="eager")(X)
    with pytest.raises(Exception, match=r"gdeq\.fixed_steps"):
        torch.compile(Model(gdeq.Broyden()), fullgraph=True, backend="eager")(X)
    with pytest.raises(ValueError, match=r"holds no gdeq\.DEQ"):
        gdeq.fixed_steps(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="at least 1"):
        gdeq.fixed_steps(model, steps=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_would_keep_the_steps_of_its_example():
    """Traced with x = 0, where the solve ends at once, the program made no step for any other x."""
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"use torch\.export\.export"):
        torch.jit.trace(gdeq.DEQ(lambda z, x: 0.5 * z + x), torch.zeros(2, 3), check_trace=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_is_refused_in_a_sentence():
    model = nn.Sequential(nn.Linear(3, 3), gdeq.DEQ(lambda z, x: 0.5 * z + x))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script .* use torch\.export\.export"):
        torch.jit.script(model)


@pytest.mark.parametrize("gradient", [gdeq.GDEQ(refine=1), gdeq.Implicit(), gdeq.Unrolled(2)])
@pytest.mark.parametrize("form", ["meta", "fake"])
def test_shapes_without_values(form, gradient):
    solver = gdeq.Broyden(max_iter=4, line_search=1)
    model = Model(solver, gdeq.Anderson(max_iter=4), gradient=gradient)
    if form == "meta":
        model, x = model.to("meta"), X.to("meta")
        model(x).sum().backward()
        found = model.encoder.weight.grad
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = model(torch.empty(5, 3))
            found.sum().backward()
        assert found.shape == (5, 4)
        found = model.encoder.weight.grad
    assert found.shape == model.encoder.weight.shape
