"""SwapAdvisor's genes: what they mean, how they are made to fit, and what is searched."""

from legroom.memory.handmade import chain
from legroom.memory.planner import Problem, make_plan
from legroom.memory.policies.swapadvisor import Genes, Nursery, _classes, _shrunk, _steps
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from tests.null.test_policies import budget, machine


def nursery(step: Step, limit: int, rate: float = 1000.0) -> Nursery:
    limits = {"device": limit, "host": 10**6}
    return Nursery(Problem(Simulator(step, machine(rate)), limits))


def moved(step: Step, found: Nursery, genes: Genes | None) -> set[str]:
    return {step.storages[move.storage].name for move in found.moves(genes)}


def test_what_is_needed_last_goes() -> None:
    """Five tensors of 10 and a gradient of 10, in a room for four: the first two go."""
    step = chain(5, 10, output_bytes=0)
    found = nursery(step, 40)
    assert found.steps == [10] and moved(step, found, None) == {"s0.0", "s1.0"}
    assert moved(step, found, Genes((0,), (4,))) == {"s0.0", "s1.0"}
    assert moved(step, found, Genes((0,), (3,))) == {"s0.0", "s1.0", "s2.0"}


def test_a_tensor_goes_for_one_of_its_own_class_alone() -> None:
    """Two large ones and a gradient in two objects; four small ones and a gradient in three."""
    step = chain(6, [20, 10, 10, 10, 10, 20], output_bytes=0)
    found = nursery(step, 70)
    assert found.steps == [10, 20]
    assert moved(step, found, Genes((0, 1), (5, 2))) == {"s0.0"}
    assert moved(step, found, Genes((0, 1), (3, 3))) == {"s1.0", "s2.0"}
    # In one class all six and the gradient of the last need seven objects.
    assert moved(step, found, Genes((0, 0), (7,))) == set()
    assert moved(step, found, Genes((0, 0), (6,))) == {"s0.0"}


def test_who_comes_into_an_object_starts_when_the_one_before_is_gone() -> None:
    """No copy in begins before the copies out of those whose objects it takes are done."""
    step = chain(8, 10, output_bytes=0)
    found = nursery(step, 30)
    residency = found._residency(None)
    moves = {move.storage: move for move in found.moves(None)}
    assert len(moves) >= 5
    for fetch in residency.fetches:
        move = moves[found.owners[fetch.tenant]]
        assert move.in_start >= fetch.since or move.in_start == move.in_wait
        for other in fetch.after:
            assert move.in_start >= moves[found.owners[other]].out_wait


def test_too_many_objects_go_by_as_many_bytes_of_each_class() -> None:
    """50 bytes over: 25 of each, but the small class has only 9 to give; then what is left."""
    assert _shrunk([10, 10], [1, 1], [1, 10], 60) == [1, 5]
    assert _shrunk([3, 4], [3, 4], [1, 10], 5) == [3, 4]


def test_classes_never_skip_and_never_fall() -> None:
    step = chain(6, [20, 10, 15, 5, 30, 25], output_bytes=3)
    found = nursery(step, 120)
    genes = list(found._founders())
    for one, two in zip(genes, genes[1:], strict=False):
        child = found._mutated(found._crossed(one, two))
        assert set(_steps(child.classes)) <= {0, 1} and child.classes[0] == 0
        assert len(child.counts) == child.classes[-1] + 1
        assert _classes(_steps(child.classes)) == child.classes
        most, least = found._demand(child.classes)
        limits = zip(least, child.counts, most, strict=True)
        assert all(low <= count <= high for low, count, high in limits)


def test_search_is_no_worse_than_all_it_began_with() -> None:
    step = chain(12, [20, 10, 15] * 4, output_bytes=3)
    limit = budget(step, 0.5)["device"]
    found = nursery(step, limit, 20.0)
    best = found.rank(found.search())
    assert best == min(found.rank(genes) for genes in found._known)
    assert best <= min(found.rank(genes) for genes in nursery(step, limit, 20.0)._founders())


def test_a_time_limit_leaves_the_best_so_far() -> None:
    step = chain(120, 100, num_saved=3, output_bytes=10)
    limits = budget(step, 0.5, host=10**6)
    plan = make_plan(step, machine(20.0), limits, "swapadvisor", time_limit_s=0.2)
    assert plan.moves and plan.planning_s < 3.0
