"""Each gradient of a trained model in float64, beside the exact one at its equilibrium.

    python benchmarks/trained.py --run runs/paper/adaptive-seed0 --data DATA --device cuda

The weights of a finished run, some training images, dropout off.  Forward solves are Broyden's: of
5 and 18 steps, and to 1e-6.  Rows with "B^-T v" start from Broyden's inverse where that is trusted
(`gdeq.refinement.first_step`), those with "v" are `JFB(refine=k)`.  Exact: both solves to 1e-9.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gdeq
from common import Report, parser
from gdeq.gradients import Needs
from gdeq.lab.training import runs
from gdeq.lab.training.similarity import Problem, exact

SOLVERS = {
    "5 steps": gdeq.Broyden(5, 0.0),
    "18 steps": gdeq.Broyden(18, 0.0),
    "to 1e-6": gdeq.Broyden(200, 1e-6),
}
EXACT = 1e-9


class WithoutSecants(gdeq.GDEQ):
    """As in half precision, where none are kept."""

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return super().needs._replace(secants=False)


def rows() -> Iterator[tuple[str, str, gdeq.Gradient]]:
    yield "JFB", "", gdeq.Measured(gdeq.JFB())
    yield "GDEQ", "", gdeq.Measured(gdeq.GDEQ())
    for k in (1, 2, 4):
        yield f"refine {k}", "secants", gdeq.GDEQ(refine=k)
        yield f"refine {k}", "B^-T v", WithoutSecants(refine=k)
        yield f"refine {k}", "v", gdeq.JFB(refine=k)
    yield "tolerance 0.1", "secants", gdeq.GDEQ(tolerance=0.1)
    yield "tolerance 0.1", "B^-T v", WithoutSecants(tolerance=0.1)
    yield "NPG", "", gdeq.NPG(steps=5, damping=0.5)
    yield "Implicit", "", exact(1e-4)


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
            found = problem.gradient(solver, method, everyone)
            g, g_exact = found.gradient, truth.gradient
            yield {
                "forward solve": solved,
                "gradient": name,
                "start": start,
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
