"""Rows of a mixed-integer program as they are collected, and the call that solves them (HiGHS)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from legroom.core.quiet import silenced

Values = npt.NDArray[np.float64]


@dataclass
class Rows:
    """Constraints being collected: sum of coefficient * variable <= bound."""

    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    """Where each row ends in the two above, after the beginning of the first."""
    bounds: list[float] = field(default_factory=list)

    def add(self, terms: dict[int, float], bound: float) -> None:
        """One more row."""
        self.columns.extend(terms)
        self.values.extend(terms.values())
        self.ends.append(len(self.columns))
        self.bounds.append(bound)

    def matrix(self, num_columns: int) -> csr_matrix:
        """All of them, without zeros."""
        shape = (len(self.bounds), num_columns)
        found = csr_matrix((self.values, self.columns, self.ends), shape=shape, dtype=np.float64)
        found.eliminate_zeros()
        return found

    def cheapest(
        self,
        cost: Sequence[float] | Values,
        upper: Sequence[float] | Values,
        whole: Sequence[bool] | npt.NDArray[np.bool_],
        *,
        time_limit_s: float,
        gap: float,
    ) -> Values | None:
        """The best values found in time, each from 0 to its upper bound; None if none were."""
        with silenced(1):  # HiGHS prints a stray line now and then
            found = milp(
                np.asarray(cost),
                constraints=LinearConstraint(self.matrix(len(cost)), -np.inf, self.bounds),
                bounds=Bounds(0, np.asarray(upper)),
                integrality=np.asarray(whole, dtype=int),
                options={"time_limit": time_limit_s, "mip_rel_gap": gap},
            )
        return None if found.x is None else np.asarray(found.x)
