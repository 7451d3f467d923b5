"""Options: wrong names, types and values raise at construction, and say what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

import gdeq
from gdeq import (
    GDEQ,
    GMRES,
    JFB,
    NPG,
    Anderson,
    Broyden,
    Gradient,
    Implicit,
    Measured,
    Picard,
    Solver,
    Unrolled,
)


@dataclass
class Refused:
    make: Callable[..., object]
    given: dict[str, object]
    error: type[Exception]
    says: str

    def __str__(self) -> str:
        text = ", ".join(f"{key}={value!r}" for key, value in self.given.items())
        return f"{self.make.__name__}({text})"


UNKNOWN = [
    Refused(Broyden, {"max_iters": 5}, TypeError, "did you mean 'max_iter'"),
    Refused(Broyden, {"mem": 5}, TypeError, "did you mean 'memory'"),
    Refused(Broyden, {"linesearch": 5}, TypeError, "did you mean 'line_search'"),
    Refused(Broyden, {"steps": 5}, TypeError, "did you mean 'max_iter'"),
    Refused(Broyden, {"maxstep": 5}, TypeError, "did you mean 'max_step'"),
    Refused(Broyden, {"stop_mode": "abs"}, TypeError, "did you mean 'stop'"),
    Refused(Anderson, {"tolerance": 1e-3}, TypeError, "did you mean 'tol'"),
    Refused(Anderson, {"beta": 0.5}, TypeError, "options: .*mixing"),
    Refused(Anderson, {"regularisation": 1e-3}, TypeError, "did you mean 'regularization'"),
    Refused(Picard, {"dampening": 0.5}, TypeError, "did you mean 'damping'"),
    Refused(GMRES, {"check_evry": 5}, TypeError, "did you mean 'check_every'"),
    Refused(GMRES, {"restart": 5}, TypeError, "options: max_iter, tol, stop, check_every"),
    Refused(JFB, {"steps": 5}, TypeError, "JFB has no option 'steps'"),
    Refused(NPG, {"step": 5}, TypeError, "did you mean 'steps'"),
    Refused(Implicit, {"solvers": Broyden()}, TypeError, "did you mean 'solver'"),
    Refused(Implicit, {"preconditioned": True}, TypeError, "did you mean 'precondition'"),
    Refused(GDEQ, {"refine_steps": 2}, TypeError, "did you mean 'refine'"),
    Refused(GDEQ, {"tol": 0.1}, TypeError, "did you mean 'tolerance'"),
    Refused(GDEQ, {"tolerence": 0.1}, TypeError, "did you mean 'tolerance'"),
    Refused(Measured, {"gradients": JFB()}, TypeError, "did you mean 'gradient'"),
    Refused(Unrolled, {"dampng": 0.5}, TypeError, "did you mean 'damping'"),
]

# Every solver inherits these.
SHARED = [
    *(("max_iter", 2.0, TypeError), ("max_iter", True, TypeError), ("max_iter", 0, ValueError)),
    *(("tol", "1e-3", TypeError), ("tol", None, TypeError), ("tol", -1e-3, ValueError)),
    *(("tol", float("nan"), ValueError), ("tol", float("inf"), ValueError)),
    *(("stop", 1, TypeError), ("stop", "rel", ValueError)),
    *(("check_every", 1.5, TypeError), ("check_every", 0, ValueError)),
]
OWN = {
    Broyden: [
        *(("memory", 2.5, TypeError), ("memory", 0, ValueError), ("max_step", "1", TypeError)),
        *(("max_step", 0.0, ValueError), ("line_search", True, TypeError)),
        *(
            ("line_search", -1, ValueError),
            ("step_bits", "8", TypeError),
            ("step_bits", True, TypeError),
        ),
        ("step_bits", 12, ValueError),
    ],
    Anderson: [
        *(("memory", None, TypeError), ("memory", 0, ValueError), ("mixing", "1", TypeError)),
        *(("mixing", 0.0, ValueError), ("mixing", 1.1, ValueError)),
        *(("regularization", None, TypeError), ("regularization", -1.0, ValueError)),
    ],
    Picard: [("damping", "1", TypeError), ("damping", 0, ValueError), ("damping", 2, ValueError)],
    GMRES: [],
    JFB: [("refine", 1.0, TypeError), ("refine", -1, ValueError)],
    NPG: [
        *(("steps", 5.0, TypeError), ("steps", 0, ValueError), ("damping", None, TypeError)),
        *(("damping", 0.0, ValueError), ("damping", 1.5, ValueError)),
    ],
    Implicit: [
        *(
            ("solver", None, TypeError),
            ("solver", JFB(), TypeError),
            ("precondition", 1, TypeError),
        ),
        ("double_backward", "no", TypeError),
    ],
    GDEQ: [
        *(("refine", 1.0, TypeError), ("refine", -1, ValueError), ("tolerance", "0.1", TypeError)),
        *(("tolerance", 0.0, ValueError), ("tolerance", 2.0, ValueError)),  # no w could miss it
    ],
    Measured: [("gradient", Broyden(), TypeError)],
    Unrolled: [
        *(("steps", 2.0, TypeError), ("steps", 0, ValueError), ("damping", "1", TypeError)),
        ("damping", 0.0, ValueError),
    ],
}
WRONG = [
    *(
        Refused(make, {name: value}, error, rf"{make.__name__}\.{name} must be")
        for make, rows in OWN.items()
        for name, value, error in [*(SHARED if issubclass(make, Solver) else []), *rows]
    ),
    Refused(Broyden, {"step_bits": 12}, ValueError, "must be 16 or 8, got 12"),
    Refused(Implicit, {"solver": Broyden}, TypeError, r"write Broyden\(\)"),
    Refused(Implicit, {"solver": Broyden(20, 1e-6, stop="absolute")}, ValueError, "relative"),
    Refused(GDEQ, {"max_refine": 3}, ValueError, "needs a tolerance"),
    Refused(GDEQ, {"tolerance": 0.1, "max_refine": 1.5}, TypeError, r"GDEQ\.max_refine"),
    Refused(GDEQ, {"tolerance": 0.1, "max_refine": 0}, ValueError, r"GDEQ\.max_refine"),
    Refused(GDEQ, {"tolerance": 0.1, "refine": 1}, ValueError, "not both"),
    Refused(Measured, {"gradient": JFB}, TypeError, r"write JFB\(\)"),
    Refused(Measured, {"gradient": Unrolled()}, ValueError, "Unrolled"),
]


@pytest.mark.parametrize("row", UNKNOWN + WRONG, ids=str)
def test_wrong_options_raise_at_construction(row):
    with pytest.raises(row.error, match=row.says):
        row.make(**row.given)


def public(base: type) -> set[type]:
    found = {getattr(gdeq, name) for name in gdeq.__all__}
    return {kind for kind in found if isinstance(kind, type) and issubclass(kind, base)} - {base}


def test_every_option_has_a_wrong_type_and_every_class_an_unknown_name():
    kinds = public(Solver) | public(Gradient)
    assert {row.make for row in UNKNOWN} == kinds
    refused = {(row.make, name) for row in WRONG if row.error is TypeError for name in row.given}
    assert {(kind, f.name) for kind in kinds for f in fields(kind)} <= refused


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("grad", r"did you mean 'gradient'\? \(options: cell, solver, gradient"),
        ("slover", "did you mean 'solver'"),
        ("zzz", r"DEQ has no option 'zzz' \(options: cell"),
    ],
)
def test_an_unknown_option_of_a_layer_names_the_nearest(wrong, says):
    with pytest.raises(TypeError, match=says):
        gdeq.DEQ(abs, **{wrong: None})


def test_an_option_cannot_be_changed_and_says_what_to_do():
    solver = gdeq.Broyden()
    with pytest.raises(FrozenInstanceError, match=r"dataclasses\.replace\(this, tol=1e-05\)"):
        solver.tol = 1e-5
    assert replace(solver, tol=1e-5).tol == 1e-5
