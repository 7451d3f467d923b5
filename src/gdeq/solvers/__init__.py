"""One method and its state per file; the loop they share is `gdeq.loop`."""

from gdeq.solvers.anderson import Anderson
from gdeq.solvers.base import Solver
from gdeq.solvers.broyden import Broyden
from gdeq.solvers.gmres import GMRES
from gdeq.solvers.picard import Picard

__all__ = ["GMRES", "Anderson", "Broyden", "Picard", "Solver"]
