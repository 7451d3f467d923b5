"""Each gradient of a trained model in float64, beside the exact one at its equilibrium.

    python benchmarks/trained.py --run runs/paper/adaptive-seed0 --data DATA --device cuda

The weights of a finished run, some training images, dropout off.  Forward solves are Broyden's: of
5 and 18 steps, and to 1e-6.  Rows with "B^-T v" are the same code without secants, from Broyden's
inverse; those with "v" start as JFB does.  Exact: both solves to 1e-9.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import gdeq
from common import Report, parser
from gdeq import refinement
from gdeq.gradients import Needs
from gdeq.lab.training import runs
from gdeq.lab.training.similarity import Problem, exact

SOLVERS = {
    "5 steps": gdeq.Broyden(5, 0.0),
    "18 steps": gdeq.Broyden(18, 0.0),
    "to 1e-6": gdeq.Broyden(200, 1e-6),
}
EXACT = 1e-9


@contextmanager
def starting(start: str) -> Iterator[None]:
    """What a refinement starts from."""

    def needs(method: gdeq.GDEQ) -> Needs:
        refines = method.refine > 0 or method.tolerance is not None
        return Needs(vjp=refines, inverse=True, secants=False, broyden=not refines)

    if start == "secants":
        yield
        return
    with mock.patch.object(gdeq.GDEQ, "needs", property(needs)):
        if start == "B^-T v":
            yield
            return
        plain = lambda v, _: (v, refinement.minus_identity(v))  # noqa: E731
        with mock.patch("gdeq.gradients.first_step", plain):
            yield


def rows() -> Iterator[tuple[str, str, gdeq.Gradient]]:
    yield "JFB", "secants", gdeq.Measured(gdeq.JFB())
    yield "GDEQ", "secants", gdeq.Measured(gdeq.GDEQ())
    refined = {f"refine {k}": gdeq.GDEQ(refine=k) for k in (1, 2, 4)}
    refined["tolerance 0.1"] = gdeq.GDEQ(tolerance=0.1)
    for name, method in refined.items():
        for start in ("secants", "B^-T v", "v"):
            yield name, start, method
    yield "NPG", "secants", gdeq.NPG(steps=5, damping=0.5)
    yield "Implicit", "secants", exact(1e-4)


def compared(args: Any, report: Report) -> Iterator[dict[str, Any]]:
    learner = runs.trained(args.run, args.data, args.device)
    learner.model.double().eval()
    batches = learner.task.train_batches(args.images, plain=True)
    x, *targets = next(batches.epoch(args.seed))[1]
    problem = Problem(learner, (x.double(), *targets))
    everyone = torch.ones(len(x), dtype=torch.bool, device=x.device)
    truth = problem.gradient(gdeq.Broyden(300, EXACT), exact(100 * EXACT), everyone)
    worst = [found.max().item() for found in (truth.forward_residual, truth.backward_residual)]
    report(f"exact: residuals of at most {worst[0]:.1e} and {worst[1]:.1e}, {truth.vjps} VJPs")
    for solved, solver in SOLVERS.items():
        for name, start, method in rows():
            with starting(start):
                found = problem.gradient(solver, method, everyone)
            g, g_exact = found.gradient, truth.gradient
            yield {
                "forward solve": solved,
                "gradient": name,
                "start": start if name.startswith(("refine", "tolerance")) else "",
                "steps": problem.solution.steps.max().item(),
                "VJPs": found.vjps,
                "cosine": f"{g @ g_exact / (g.norm() * g_exact.norm()):.4f}",
                "error": f"{(g - g_exact).norm() / g_exact.norm():.4f}",
            }


def main() -> None:
    wanted = parser(__doc__.splitlines()[0])
    wanted.add_argument("--run", type=Path, required=True, help="a finished run")
    wanted.add_argument("--data", type=Path, default=None, help="folder of the data sets")
    wanted.add_argument("--images", type=int, default=16)
    args = wanted.parse_args()
    report = Report("trained", args)
    report.table(list(compared(args, report)))
    report.close()


if __name__ == "__main__":
    main()
