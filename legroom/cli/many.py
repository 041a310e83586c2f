"""Plan one step many times, by several policies or for several budgets, in several processes."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple, TypeVar

from legroom.core.errors import BudgetError, LegroomError, in_short
from legroom.machine.spec import Machine
from legroom.memory.plan import Plan
from legroom.memory.planner import POLICIES, TIME_LIMIT_S, make_plan
from legroom.memory.trace import Step

T = TypeVar("T")
R = TypeVar("R")
FEW = 4
"""Plans that are not worth processes of their own."""


class Order(NamedTuple):
    """A plan that is wanted."""

    policy: str
    device_bytes: int


class Task(NamedTuple):
    """What all of them are for."""

    step: Step
    machine: Machine
    limits: dict[str, int]
    """The budgets; the device's is as ordered."""
    time_limit_s: float = TIME_LIMIT_S

    def plan(self, order: Order) -> Plan | LegroomError:
        """The plan, or why there is none."""
        limits = {**self.limits, "device": order.device_bytes}
        given = (self.step, self.machine, limits, order.policy)
        try:
            return make_plan(*given, time_limit_s=self.time_limit_s)
        except BudgetError as error:
            missing, smallest = error.missing_bytes, error.smallest_bytes  # not its frames
            return BudgetError(str(error), missing_bytes=missing, smallest_bytes=smallest)
        except LegroomError as error:
            return LegroomError(str(error))
        except Exception as error:  # a policy that fails is a row, not a crash
            return LegroomError(f"failed: {in_short(error)}")


_task: list[Task] = []
"""In a process of its own: what to plan."""


def plan_all(task: Task, orders: Sequence[Order]) -> Iterator[tuple[Order, Plan | LegroomError]]:
    """Each plan or error, as they come: from several processes where there are many.

    Policies of the user's own are known in this one only.
    """
    many = len(orders) > FEW
    here = [order for order in orders if not many or not _is_ours(order.policy)]
    yield from ((order, task.plan(order)) for order in here)
    others = [order for order in orders if order not in here]
    if not others:
        return
    given = (task.step.to_json(), task.machine.to_json(), task.limits, task.time_limit_s)
    yield from spread(_plan_task, others, _take_task, given)


def spread(
    work: Callable[[T], R | LegroomError],
    items: Sequence[T],
    prepare: Callable[..., None] | None = None,
    given: tuple[Any, ...] = (),
) -> Iterator[tuple[T, R | LegroomError]]:
    """The work on each item, or its error, as they come from several processes.

    Each process prepares itself first, with what is given.
    """
    pool = ProcessPoolExecutor(
        min(len(items), os.cpu_count() or 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=prepare,
        initargs=given,
    )
    asked = {pool.submit(work, item): item for item in items}
    try:
        for done in as_completed(asked):
            yield asked[done], result_of(done)
    except BaseException:  # somebody does not want to wait
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(done: "Future[R | LegroomError]") -> R | LegroomError:
    """What came of it."""
    try:
        return done.result()
    except Exception as error:  # its process ended, with all that were in it
        return LegroomError(f"failed: {in_short(error)}")


def _is_ours(name: str) -> bool:
    policy = POLICIES[name]
    return getattr(policy, "func", policy).__module__.startswith("legroom.")


def _take_task(step: str, machine: str, limits: dict[str, int], time_limit_s: float) -> None:
    found = Step.from_bytes(step.encode()), Machine.from_bytes(machine.encode())
    _task[:] = [Task(*found, limits, time_limit_s)]


def _plan_task(order: Order) -> Plan | LegroomError:
    return _task[0].plan(order)
