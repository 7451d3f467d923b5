"""Bad input: each with an error that names the cause and says what to do."""

import math

import pytest
import torch
from torch import nn

import gdeq

GRADIENTS = {
    "GDEQ": gdeq.GDEQ(),
    "GDEQ-refine": gdeq.GDEQ(refine=2),
    "GDEQ-tolerance": gdeq.GDEQ(tolerance=1e-6),
    "Implicit": gdeq.Implicit(),
    "Implicit-GMRES": gdeq.Implicit(gdeq.GMRES(), precondition=True),
    "JFB": gdeq.JFB(),
    "NPG": gdeq.NPG(),
    "Unrolled": gdeq.Unrolled(),
    "Measured": gdeq.Measured(gdeq.GDEQ()),
}
SOLVERS = {"Broyden": gdeq.Broyden(), "Anderson": gdeq.Anderson(), "Picard": gdeq.Picard()}
every_gradient = pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


def through_layer(f, z0, **kwargs):
    deq = gdeq.DEQ(lambda z, x: f(z), **kwargs)
    z = deq(None, z0=z0)
    return z, deq.solution


def through_function(f, z0, **kwargs):
    found = gdeq.fixed_point(f, z0, **kwargs)
    return found.z, found


def through_solve(f, z0, gradient=None, **kwargs):
    found = gdeq.solve(f, z0, **kwargs)
    return found.z, found


every_entry = pytest.mark.parametrize("call", [through_layer, through_function, through_solve])
with_gradients = pytest.mark.parametrize("call", [through_layer, through_function])


# --- what f returns ------------------------------------------------------------------------------

BAD_MAPS = {
    "shape": (
        lambda z: z[:, :2],
        [r"f\(z\) has shape \(3, 2\)", r"the state there has \(3, 4\)", "f must keep the shape"],
    ),
    "batch": (
        lambda z: z[:1],
        [r"f\(z\) has shape \(1, 4\)", r"has \(3, 4\)", "f must keep the shape"],
    ),
    "transposed": (lambda z: z.T, [r"f\(z\) has shape \(4, 3\)", "f must keep the shape"]),
    "scalar": (lambda z: z.sum(), [r"f\(z\) has shape \(\)", "f must keep the shape"]),
    "wider": (
        lambda z: z.double(),
        ["float64", "the state there has torch.float32", "cast inside f, or give z0 in the dtype"],
    ),
    "narrower": (
        lambda z: z.bfloat16(),
        ["bfloat16", "the state there has torch.float32", "cast inside f, or give z0 in the dtype"],
    ),
    "integer": (lambda z: z.long(), ["int64", "the state there has torch.float32", "cast"]),
    "boolean": (lambda z: z > 0, ["bool", "the state there has torch.float32"]),
    "complex": (lambda z: z + 0j, ["complex64", "the state there has torch.float32"]),
    "tuple": (lambda z: (z,), ["structure", r"\(tensor\)", "f must return what it was given"]),
    "dict": (lambda z: {"z": z}, ["structure", r"\{'z': tensor\}", "same nesting"]),
    "nothing": (lambda z: None, [r"f\(z\) must be a tensor", "NoneType"]),
    "number": (lambda z: 1.0, [r"f\(z\) must be a tensor", "float"]),
    "array": (lambda z: z.tolist(), [r"f\(z\)\[0\]\[0\] must be a tensor", "float"]),
}


@every_entry
@pytest.mark.parametrize(("f", "words"), BAD_MAPS.values(), ids=BAD_MAPS)
def test_f_returns_the_wrong_thing(device, call, f, words):
    with pytest.raises(gdeq.StateError) as error:
        call(f, torch.zeros(3, 4, device=device))
    for word in words:
        assert error.match(word)


@with_gradients
@every_gradient
def test_f_returns_the_wrong_thing_with_every_gradient(device, call, gradient):
    with pytest.raises(gdeq.StateError, match="f must keep the shape"):
        call(lambda z: z[:, :2], torch.zeros(3, 4, device=device), gradient=gradient)


@every_entry
def test_f_changes_the_device(device, call):
    other = "meta" if device.type == "cpu" else "cpu"
    words = rf"f\(z\) is on {other}, but the state is on {device.type}"
    with pytest.raises(gdeq.StateError, match=words):
        call(lambda z: z.to(other), torch.zeros(3, 4, device=device))


MULTISCALE = {
    "missing": (lambda z: {"a": z["a"]}, ["structure", "'a': tensor", "'b': tensor"]),
    "renamed": (lambda z: {"a": z["a"], "c": z["b"]}, ["structure", "'c': tensor"]),
    "extra": (lambda z: {**z, "c": z["a"]}, ["structure", "'c': tensor"]),
    "list": (lambda z: [z["a"], z["b"]], ["structure", r"\(tensor, tensor\)"]),
    "part": (lambda z: {"a": z["a"], "b": z["b"][:, :1]}, [r"f\(z\)\['b'\] has shape \(3, 1\)"]),
    "dtype": (lambda z: {"a": z["a"].double(), "b": z["b"]}, [r"f\(z\)\['a'\] has dtype"]),
    "none": (lambda z: {"a": z["a"], "b": None}, [r"f\(z\)\['b'\] must be a tensor", "NoneType"]),
}


@every_entry
@pytest.mark.parametrize(("f", "words"), MULTISCALE.values(), ids=MULTISCALE)
def test_f_returns_the_wrong_parts(device, call, f, words):
    z0 = {"a": torch.zeros(3, 4, device=device), "b": torch.zeros(3, 2, device=device)}
    with pytest.raises(gdeq.StateError) as error:
        call(f, z0)
    for word in words:
        assert error.match(word)


@every_entry
def test_f_may_return_its_keys_in_another_order_and_a_list_for_a_tuple(device, call):
    z0 = {"a": (torch.zeros(3, 4, device=device),), "b": torch.zeros(3, 2, device=device)}
    z, found = call(lambda z: {"b": 0.5 * z["b"] + 1, "a": [0.5 * z["a"][0] + 2]}, z0)
    assert list(z) == ["a", "b"]
    assert isinstance(z["a"], tuple)
    assert found.converged.all()
    torch.testing.assert_close(z["a"][0], torch.full_like(z["a"][0], 4))
    torch.testing.assert_close(z["b"], torch.full_like(z["b"], 2))


@every_entry
def test_the_wrong_shape_at_a_later_call_only(device, call):
    calls = []

    def f(z):
        calls.append(1)
        return 0.5 * z + 1 if len(calls) < 3 else z[:, :1]

    with pytest.raises(gdeq.StateError, match=r"f\(z\) has shape \(3, 1\)"):
        call(f, torch.zeros(3, 4, device=device), solver=gdeq.Picard(20, 1e-6), gradient=gdeq.JFB())
    assert len(calls) == 3


# --- z0 ------------------------------------------------------------------------------------------

BAD_STATES = {
    "no batch": (
        lambda d: torch.tensor(1.0, device=d),
        gdeq.StateError,
        ["z0 has no batch dimension", r"\(batch, ...\)", "unsqueeze"],
    ),
    "part without batch": (
        lambda d: {"a": torch.zeros(2, 3, device=d), "b": torch.tensor(1.0, device=d)},
        gdeq.StateError,
        [r"z0\['b'\] has no batch dimension"],
    ),
    "batch sizes": (
        lambda d: (torch.zeros(2, 3, device=d), torch.zeros(4, 3, device=d)),
        gdeq.StateError,
        ["batch sizes differ", r"z0\[0\] has 2 samples", r"z0\[1\] has 4", "first dimension"],
    ),
    "devices": (
        lambda d: (torch.zeros(2, 3, device=d), torch.zeros(2, 3, device="meta")),
        gdeq.StateError,
        [r"z0\[0\] is on", r"z0\[1\] is on meta", "one device"],
    ),
    "integer": (
        lambda d: torch.zeros(2, 3, dtype=torch.long, device=d),
        TypeError,
        ["z0 has dtype torch.int64", "floating point", r"z0.float\(\)"],
    ),
    "boolean": (
        lambda d: torch.zeros(2, 3, dtype=torch.bool, device=d),
        TypeError,
        ["z0 has dtype torch.bool", "floating point"],
    ),
    "complex": (
        lambda d: torch.zeros(2, 3, dtype=torch.complex64, device=d),
        TypeError,
        ["z0 has dtype torch.complex64", "view_as_real"],
    ),
    "integer part": (
        lambda d: [torch.zeros(2, 3, device=d), torch.zeros(2, 3, dtype=torch.int32, device=d)],
        TypeError,
        [r"z0\[1\] has dtype torch.int32"],
    ),
    "number": (lambda d: 1.0, TypeError, ["z0 must be a tensor", "got float"]),
    "text": (lambda d: "zeros", TypeError, ["z0 must be a tensor", "got str"]),
    "array": (lambda d: [[0.0, 1.0]], TypeError, [r"z0\[0\]\[0\] must be a tensor", "got float"]),
    "none inside": (
        lambda d: (torch.zeros(2, 3, device=d), None),
        TypeError,
        [r"z0\[1\] must be a tensor", "got NoneType"],
    ),
    "set": (lambda d: {1, 2}, TypeError, ["z0 must be a tensor", "got set"]),
    "module": (lambda d: nn.Linear(2, 2), TypeError, ["z0 must be a tensor", "got Linear"]),
    "empty tuple": (lambda d: (), gdeq.StateError, ["z0 holds no tensor"]),
    "empty nest": (lambda d: {"a": [], "b": ()}, gdeq.StateError, ["z0 holds no tensor"]),
}


@every_entry
@pytest.mark.parametrize(("make", "kind", "words"), BAD_STATES.values(), ids=BAD_STATES)
def test_bad_z0(device, call, make, kind, words):
    calls = []
    with pytest.raises(kind) as error:
        call(lambda z: calls.append(1) or z, make(device))
    assert isinstance(error.value, gdeq.StateError)  # one class to catch them all
    for word in words:
        assert error.match(word)
    assert not calls  # noticed before f runs


def test_z0_of_none_in_fixed_point():
    with pytest.raises(TypeError, match=r"z0 must be a tensor.*NoneType"):
        gdeq.fixed_point(lambda z: z, None)


# --- nothing to do -------------------------------------------------------------------------------


@with_gradients
@every_gradient
@pytest.mark.parametrize("shape", [(0, 3), (0, 2, 2), (2, 0), (0,), (0, 0)], ids=str)
def test_empty_tensors_work(device, call, gradient, shape):
    w = torch.tensor(0.5, device=device, requires_grad=True)
    z, found = call(lambda z: w * z + w, torch.zeros(shape, device=device), gradient=gradient)
    assert z.shape == shape
    batch = shape[0]
    assert found.converged.shape == found.residual.shape == found.steps.shape == (batch,)
    assert len(found.status) == batch
    str(found)
    z.sum().backward()
    assert w.grad is None or w.grad == 0
    str(found.backward)


@every_entry
@every_solver
@pytest.mark.parametrize("tol", [0.0, 1e-6])
def test_empty_batch_with_every_solver(device, call, solver, tol):
    solver = type(solver)(max_iter=3, tol=tol)
    z, found = call(
        lambda z: 0.5 * z + 1, torch.zeros(0, 3, device=device), solver=solver, gradient=gdeq.JFB()
    )
    assert z.shape == (0, 3)
    assert found.trace.shape[1] == 0
    assert "empty" in str(found)


def test_empty_batch_through_a_network(device):
    # The last batch of a filtered data set, say.
    model = nn.Sequential(
        nn.Linear(3, 4), gdeq.DEQ(lambda z, x: torch.tanh(0.5 * z + x)), nn.Linear(4, 2)
    ).to(device)
    out = model(torch.zeros(0, 3, device=device))
    assert out.shape == (0, 2)
    out.sum().backward()
    assert (model[0].weight.grad == 0).all()


@with_gradients
def test_an_empty_scale_beside_a_full_one(device, call):
    z0 = {"none": torch.zeros(2, 0, device=device), "some": torch.zeros(2, 3, device=device)}
    z, found = call(lambda z: {"none": z["none"], "some": 0.5 * z["some"] + 1}, z0)
    assert found.converged.all()
    assert z["none"].shape == (2, 0)
    torch.testing.assert_close(z["some"], torch.full_like(z["some"], 2))


# --- f fails -------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


@every_entry
@pytest.mark.parametrize("at", [1, 2, 4])
def test_what_f_raises_comes_through_as_it_is(device, call, at):
    calls = []

    def f(z):
        calls.append(1)
        if len(calls) == at:
            raise BrokenError("from inside f")
        return torch.cos(z)

    with pytest.raises(BrokenError, match=r"^from inside f$"):
        call(f, torch.zeros(3, 4, device=device))
    assert len(calls) == at


@every_gradient
def test_what_f_raises_in_its_evaluation_with_autograd(device, gradient):
    def f(z):
        if torch.is_grad_enabled():
            raise BrokenError("with autograd")
        return 0.5 * z + 1

    with pytest.raises(BrokenError, match="with autograd"):
        gdeq.fixed_point(f, torch.zeros(3, 4, device=device), gradient=gradient)
    assert torch.is_grad_enabled()


@every_gradient
def test_what_f_raises_in_backward(device, gradient):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, v):
            raise BrokenError("in the backward of f")

    w = torch.tensor(0.5, device=device, requires_grad=True)
    found = gdeq.fixed_point(
        lambda z: Fails.apply(w * z + 1), torch.zeros(3, 4, device=device), gradient=gradient
    )
    with pytest.raises(BrokenError, match="in the backward of f"):
        found.z.sum().backward()
    assert torch.is_grad_enabled()


def bad_rows(value, rows, first=True):
    """cos with a bad value in some samples, at the first call or only later."""
    calls = []

    def f(z):
        calls.append(1)
        out = torch.cos(z)
        bad = torch.zeros(len(z), 1, dtype=torch.bool, device=z.device)
        bad[rows] = first or len(calls) > 3
        return torch.where(bad, value, out)

    return f


@every_entry
@every_solver
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_at_the_first_call_harms_only_its_own_sample(device, call, solver, value):
    z0 = torch.rand(4, 3, dtype=torch.float64, device=device)
    gradient = gdeq.JFB()
    z, found = call(bad_rows(value, [1]), z0, solver=solver, gradient=gradient)
    assert [s is gdeq.Status.NONFINITE_START for s in found.status] == [False, True, False, False]
    sentence = str(found.status[1])
    assert "NaN or infinity at the first call" in sentence
    assert "check the inputs" in sentence
    assert sentence in str(found)
    assert found.converged.tolist() == [True, False, True, True]
    assert torch.equal(z[1], z0[1])
    good = [0, 2, 3]
    clean, alone = call(torch.cos, z0[good], solver=solver, gradient=gradient)
    torch.testing.assert_close(z[good], clean, rtol=1e-12, atol=1e-12)
    assert found.steps[good].tolist() == alone.steps.tolist()
    if found.inverse is not None:
        assert torch.isfinite(found.inverse.as_matrix()).all()


@every_entry
@every_solver
def test_nan_later_gives_the_last_good_iterate(device, call, solver):
    z0 = torch.rand(3, 3, dtype=torch.float64, device=device)
    z, found = call(bad_rows(math.nan, [2], first=False), z0, solver=solver, gradient=gdeq.JFB())
    assert found.status[2] is gdeq.Status.NONFINITE
    assert "NaN or infinity" in str(found.status[2])
    assert torch.isfinite(z).all()
    assert found.converged.tolist() == [True, True, False]
    assert not torch.equal(z[2], z0[2])


@every_gradient
def test_gradients_of_the_other_samples_survive_a_nan_sample(device, gradient):
    x = torch.randn(4, 3, dtype=torch.float64, device=device)
    found = []
    for spoil in (False, True):
        x_in = x.clone()
        if spoil:
            x_in[1] = math.nan
        x_in.requires_grad_()
        deq = gdeq.DEQ(lambda z, x: torch.tanh(0.5 * z.roll(1, 1) + x), gradient=gradient)
        deq(x_in).square().sum().backward()
        found.append(x_in.grad[[0, 2, 3]])
    assert torch.isfinite(found[1]).all()
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


@every_entry
@every_solver
@pytest.mark.parametrize("tol", [0.0, 1e-6])
@pytest.mark.parametrize("c", [1.0, -1e-3, 1e6])
def test_z_plus_a_constant_has_no_fixed_point(device, call, solver, tol, c):
    solver = type(solver)(max_iter=30, tol=tol)
    z, found = call(
        lambda z: z + c, torch.zeros(3, 4, device=device), solver=solver, gradient=gdeq.JFB()
    )
    assert torch.isfinite(z).all()
    assert torch.isfinite(found.residual).all()
    assert torch.isfinite(found.trace).all()
    assert not found.converged.any()
    for status in found.status:
        assert "no fixed point" in str(status)
        assert "z plus a constant" in str(status)
    if found.inverse is not None:
        assert torch.isfinite(found.inverse.as_matrix()).all()


@every_gradient
def test_backward_through_z_plus_a_constant_does_not_crash(device, gradient):
    # (I − J)ᵀ w = v has no solution there; what comes back must be finite and reported as it is.
    c = torch.ones(4, device=device, requires_grad=True)
    found = gdeq.fixed_point(lambda z: z + c, torch.zeros(3, 4, device=device), gradient=gradient)
    found.z.sum().backward()
    assert torch.isfinite(c.grad).all()
    if found.backward is not None and found.backward.converged is not None:
        assert not found.backward.converged.any()
        assert (found.backward.residual > 0.5).all()


@every_entry
@every_solver
def test_a_diverging_map_says_so(device, call, solver):
    def f(z):
        return torch.exp(z) + 1  # above z everywhere, and growing fast

    z, found = call(f, torch.ones(2, 3, device=device), solver=solver, gradient=gdeq.JFB())
    assert torch.isfinite(z).all()
    assert not found.converged.any()
    assert all(
        "not converged" in str(s) or "diverged" in str(s) or "stopped" in str(s)
        for s in found.status
    )


# --- solver, gradient, cell ----------------------------------------------------------------------

INVERSE_USERS = [
    gdeq.GDEQ(),
    gdeq.Measured(gdeq.GDEQ()),
]


@pytest.mark.parametrize("gradient", INVERSE_USERS, ids=str)
@pytest.mark.parametrize("solver", [gdeq.Anderson(), gdeq.Picard()], ids=["Anderson", "Picard"])
def test_inverse_reuse_needs_broyden(device, gradient, solver):
    words = f"{type(gradient).__name__} reuses the inverse .* {type(solver).__name__} builds none"
    calls = []
    with pytest.raises(ValueError, match=words) as error:
        gdeq.DEQ(lambda z, x: z, solver=solver, gradient=gradient)
    assert error.match(r"use gdeq.Broyden\(\), or another gradient")
    with pytest.raises(ValueError, match=words):
        gdeq.fixed_point(
            lambda z: calls.append(1) or z, torch.zeros(2, 3, device=device), solver, gradient
        )
    assert not calls
    deq = gdeq.DEQ(lambda z, x: z)
    deq.solver, deq.gradient = solver, gradient  # replaced one after the other: checked at the call
    with pytest.raises(ValueError, match=words):
        deq(torch.zeros(2, 3, device=device))


@pytest.mark.parametrize("gradient", [g for n, g in GRADIENTS.items() if n != "Unrolled"], ids=str)
def test_no_solver_is_for_unrolled_alone(device, gradient):
    for make in (
        lambda: gdeq.DEQ(lambda z, x: z, solver=None, gradient=gradient),
        lambda: gdeq.fixed_point(lambda z: z, torch.zeros(2, 3, device=device), None, gradient),
    ):
        with pytest.raises(ValueError, match=r"solver=None .* gdeq.Unrolled alone") as error:
            make()
        assert error.match(r"give a solver such as gdeq.Broyden\(\)")


@pytest.mark.parametrize("name", ["GDEQ", "Implicit", "JFB", "NPG", "Unrolled"])
def test_gradient_class_instead_of_an_instance(device, name):
    made = getattr(gdeq, name)
    for make in (
        lambda: gdeq.DEQ(lambda z, x: z, gradient=made),
        lambda: gdeq.fixed_point(lambda z: z, torch.zeros(2, 3, device=device), gradient=made),
    ):
        with pytest.raises(TypeError, match=f"gradient must be .*the class {name} itself") as error:
            make()
        assert error.match(rf"write {name}\(\)")


@pytest.mark.parametrize("name", ["Broyden", "Anderson", "Picard"])
def test_solver_class_instead_of_an_instance(device, name):
    made = getattr(gdeq, name)
    for make in (
        lambda: gdeq.DEQ(lambda z, x: z, solver=made),
        lambda: gdeq.fixed_point(lambda z: z, torch.zeros(2, 3, device=device), made),
        lambda: gdeq.solve(lambda z: z, torch.zeros(2, 3, device=device), made),
        lambda: gdeq.Implicit(made),
    ):
        with pytest.raises(TypeError, match=f"solver must be .*the class {name} itself") as error:
            make()
        assert error.match(rf"write {name}\(\)")


def test_solver_and_gradient_swapped(device):
    with pytest.raises(TypeError, match=r"gradient must be a gradient such as gdeq.GDEQ\(\)"):
        gdeq.DEQ(lambda z, x: z, solver=gdeq.GDEQ(), gradient=gdeq.Broyden())
    with pytest.raises(TypeError, match=r"solver must be a solver such as gdeq.Broyden\(\)"):
        gdeq.fixed_point(lambda z: z, torch.zeros(2, 3, device=device), gdeq.GDEQ())


@pytest.mark.parametrize("word", ["broyden", 5, 1e-3])
def test_solver_by_name_or_number(device, word):
    with pytest.raises(TypeError, match=r"solver must be a solver such as gdeq.Broyden\(\)"):
        gdeq.solve(lambda z: z, torch.zeros(2, 3, device=device), word)


def test_linear_solver_for_a_nonlinear_map(device):
    with pytest.raises(ValueError, match="GMRES solves linear systems only") as error:
        gdeq.DEQ(lambda z, x: z, solver=gdeq.GMRES())
    assert error.match(r"gdeq.Implicit\(solver=gdeq.GMRES\(\)\)")
    with pytest.raises(ValueError, match="GMRES solves linear systems only"):
        gdeq.solve(lambda z: z, torch.zeros(2, 3, device=device), gdeq.GMRES())


@pytest.mark.parametrize("cell", [None, 3, "cell", torch.zeros(2)], ids=str)
def test_cell_that_cannot_be_called(cell):
    with pytest.raises(TypeError, match=r"cell must be a module or function cell\(z, x\)"):
        gdeq.DEQ(cell)


def test_cell_class_instead_of_an_instance():
    # A class can be called, so this slips through a plain check.
    with pytest.raises(TypeError, match="Linear"):
        gdeq.DEQ(nn.Linear)


def test_f_that_cannot_be_called(device):
    for call in (gdeq.solve, gdeq.fixed_point):
        with pytest.raises(TypeError, match="callable"):
            call(None, torch.zeros(2, 3, device=device))


def test_arguments_in_the_wrong_order(device):
    for call in (gdeq.solve, gdeq.fixed_point):
        with pytest.raises(TypeError, match=r"z0 must be a tensor.*function"):
            call(torch.zeros(2, 3, device=device), lambda z: z)


@pytest.mark.parametrize(
    "inputs",
    [
        (),
        (torch.zeros(2, 3, dtype=torch.long),),
        (torch.tensor(1.0),),
        ({"x": torch.zeros(2, 3)},),
        (None,),
    ],
    ids=["nothing", "tokens", "scalar", "dict", "none"],
)
def test_unknown_shape_of_the_state(inputs):
    deq = gdeq.DEQ(lambda z, *inputs: z)
    with pytest.raises(ValueError, match="the shape of the state is not known") as error:
        deq(*inputs)
    assert error.match(r"deq\(x, z0=...\)")
    assert error.match(r"initial_state\(x\)")


def test_an_x_that_is_no_tensor_or_has_a_name():
    deq = gdeq.DEQ(lambda z, x: z)
    with pytest.raises(ValueError, match="x must be a tensor, got ndarray"):
        deq(torch.zeros(2, 3).numpy())
    with pytest.raises(ValueError, match=r"pass x by position, deq\(x\)"):
        deq(x=torch.zeros(2, 3))


def test_initial_state_of_the_wrong_kind(device):
    class Cell(nn.Module):
        def initial_state(self, x):
            return x.shape  # forgot to make a tensor of it

        def forward(self, z, x):
            return z

    with pytest.raises(TypeError, match=r"must be a tensor.*got int"):
        gdeq.DEQ(Cell())(torch.zeros(2, 3, device=device))


UNKNOWN = [
    (lambda: gdeq.Broyden(max_iters=3), "Broyden has no option 'max_iters'.*'max_iter'"),
    (lambda: gdeq.Broyden(stop_mode="relative"), "Broyden has no option 'stop_mode'"),
    (lambda: gdeq.Anderson(beta=0.5), "Anderson has no option 'beta'.*mixing"),
    (lambda: gdeq.Picard(damp=0.5), "Picard has no option 'damp'.*'damping'"),
    (lambda: gdeq.GDEQ(refined=2), "GDEQ has no option 'refined'.*'refine'"),
    (lambda: gdeq.GDEQ(tol=1e-3), "GDEQ has no option 'tol'.*tolerance"),
    (lambda: gdeq.NPG(step=2), "NPG has no option 'step'.*'steps'"),
    (lambda: gdeq.JFB(steps=1), "JFB has no option 'steps'"),
    (lambda: gdeq.DEQ(torch.tanh, grad=gdeq.JFB()), "grad"),
]


@pytest.mark.parametrize(("make", "words"), UNKNOWN)
def test_unknown_options(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_a_tolerance_that_no_w_could_miss():
    with pytest.raises(ValueError, match="tolerance"):
        gdeq.GDEQ(tolerance=2.0)


@pytest.mark.parametrize("cell", [torch.nn.Linear(3, 3), lambda z: z])
def test_a_cell_that_takes_no_x_is_told_how_it_is_called(cell):
    with pytest.raises(TypeError) as caught:
        gdeq.DEQ(cell)(torch.zeros(2, 3))
    assert any("called as cell(z, x)" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError) as caught:  # one that is called well fails on its own
        gdeq.DEQ(lambda z, x: len(3))(torch.zeros(2, 3))
    assert not any("called as cell(z, x)" in note for note in caught.value.__notes__)


# --- afterwards ----------------------------------------------------------------------------------


class Moody(nn.Module):
    """A cell that can be told to misbehave."""

    def __init__(self):
        super().__init__()
        self.inner = gdeq.weight_norm(nn.Linear(3, 3))
        self.drop = gdeq.VariationalDropout(0.5)
        self.mood = None

    def forward(self, z, x):
        out = torch.tanh(0.5 * self.drop(self.inner(z)) + x)
        if self.mood == "raise":
            raise BrokenError("today not")
        if self.mood == "raise late" and torch.is_grad_enabled():
            raise BrokenError("today not")
        if self.mood == "shape":
            return out[:, :1]
        if self.mood == "dtype":
            return out.double()
        return out


@every_gradient
@pytest.mark.parametrize("mood", ["raise", "raise late", "shape", "dtype", "state"])
def test_layer_is_usable_after_an_error_and_keeps_nothing(device, gradient, mood):
    deq = gdeq.DEQ(Moody().to(device), gradient=gradient)
    x = torch.randn(2, 3, device=device)

    def step():
        deq.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        z = deq(x)
        z.sum().backward()
        return z.detach(), [p.grad for p in deq.parameters()]

    z, gradients = step()
    deq.cell.mood = mood
    with pytest.raises((BrokenError, gdeq.StateError)):
        deq(x, z0=torch.zeros(2, 3, dtype=torch.long) if mood == "state" else None)
    assert deq.solution is None  # not the record of the call before
    deq.cell.mood = None
    ones = torch.ones(64, 3, device=device)
    assert not torch.equal(deq.cell.drop(ones), deq.cell.drop(ones))
    assert torch.is_grad_enabled()
    z_again, gradients_again = step()
    assert torch.equal(z_again, z)
    assert all(torch.equal(a, b) for a, b in zip(gradients_again, gradients, strict=True))


def test_autocast_is_as_before_after_an_error(device):
    def f(z):
        raise BrokenError

    with torch.autocast(device.type, dtype=torch.bfloat16):
        with pytest.raises(BrokenError):
            gdeq.fixed_point(f, torch.zeros(2, 3, device=device))
        assert torch.is_autocast_enabled(device.type)
    assert not torch.is_autocast_enabled(device.type)
