"""Belady's residency, by hand: who goes, who comes back, and what is there at either end."""

from legroom.memory.belady import Eviction, Fetch, Residency, Tenant, belady_steady

SECONDS = [float(i) for i in range(9)]
"""Eight ops of a second each."""


def tenant(*spans: tuple[int, int], looped: bool = False, writes: tuple[int, ...] = ()) -> Tenant:
    return Tenant(0, 1, spans, looped, writes)


def steady(
    tenants: list[Tenant], room: int, ops: int, idle: list[float] | None = None
) -> Residency:
    return belady_steady(tenants, {0: room}, SECONDS[: ops + 1], idle)


def test_what_is_needed_last_goes_and_comes_back_where_room_was_first_free() -> None:
    """Of a, b, c in a room for two, c pushes out a, needed at op 5; b's room is free from 4 on."""
    tenants = [tenant((0, 0), (5, 5)), tenant((1, 1), (3, 3)), tenant((2, 2), (4, 4))]
    found = steady(tenants, 2, 6)
    assert found.evictions == (Eviction(0, 2, True),)
    assert found.fetches == (Fetch(0, 5, 4, ()),)
    assert found.lacking == 0 and found.first == frozenset()


def test_a_fetch_waits_for_whoever_goes_for_it() -> None:
    """In a room for one, a comes back at op 3 for b, idle since 2; then b, as a is done with."""
    found = steady([tenant((0, 0), (3, 3)), tenant((1, 1), (4, 4))], 1, 5)
    assert found.evictions == (Eviction(0, 1, True), Eviction(1, 3, True))
    assert found.fetches == (Fetch(0, 3, 2, (1,)), Fetch(1, 4, 4, ()))


def test_a_copy_below_that_is_valid_is_not_made_again() -> None:
    """Tensor a goes twice in one step, and is not written between."""
    tenants = [tenant((0, 0), (3, 3), (6, 6)), tenant((1, 2)), tenant((4, 5))]
    assert steady(tenants, 1, 7).evictions == (Eviction(0, 1, True), Eviction(0, 4, False))
    written = [tenant((0, 0), (3, 3), (6, 6), writes=(3,)), *tenants[1:]]
    assert steady(written, 1, 7).evictions == (Eviction(0, 1, True), Eviction(0, 4, True))


def test_weights_that_fit_stay_from_step_to_step() -> None:
    """In a room for two, x pushes out u, needed last; both are there at both ends."""
    u, v, x = (
        tenant((0, 0), (4, 4), looped=True),
        tenant((1, 1), (3, 3), looped=True),
        tenant((2, 2)),
    )
    found = steady([u, v, x], 2, 5)
    assert found.first == {0, 1}
    assert found.evictions == (Eviction(0, 2, False),)  # nothing wrote it: the copy below is good
    assert found.fetches == (Fetch(0, 4, 3, ()),)


def test_weights_that_the_update_wrote_are_copied_in_the_next_step() -> None:
    u = tenant((0, 0), (4, 4), looped=True, writes=(4,))
    v, x = tenant((1, 1), (3, 3), looped=True), tenant((2, 2))
    assert steady([u, v, x], 2, 5).evictions == (Eviction(0, 2, True),)


def test_pressure_before_its_first_use_keeps_a_weight_from_being_there_at_first() -> None:
    """The first scan ends with u and v; x, at op 0, has v not be there: it is fetched for op 2."""
    found = steady([tenant((0, 0)), *(tenant((i, i), looped=True) for i in (1, 2))], 2, 4)
    assert found.first == {1}
    assert found.fetches == (Fetch(2, 2, 1, ()),)
    assert found.evictions == (Eviction(2, 4, False),)


def test_who_was_idle_for_too_short_goes_only_if_no_one_else_does() -> None:
    """Tensor c pushes out b at op 2, idle for 0 s, unless b has to be idle for a second."""
    a, b, c = tenant((0, 0), (3, 3)), tenant((1, 1), (5, 5)), tenant((2, 2))
    assert steady([a, b, c], 2, 6).evictions == (Eviction(1, 2, True),)
    assert steady([a, b, c], 2, 6, [1.0, 1.0, 1.0]).evictions[0] == Eviction(0, 2, True)
    assert steady([a, b, c], 2, 6, [9.0, 9.0, 9.0]).evictions == (Eviction(1, 2, True),)


def test_what_finds_no_room_at_all_is_lacking() -> None:
    """Three tensors needed at once, in a room for two."""
    assert steady([tenant((0, 1)), tenant((0, 1)), tenant((0, 1))], 2, 2).lacking == 1


def test_bytes_are_taken_in_parts() -> None:
    """Without classes: 6 bytes of 10 are free in two parts, one of them since op 2."""
    sizes = [(4, ((0, 0), (4, 4))), (6, ((0, 1),)), (10, ((2, 3),))]
    tenants = [Tenant(0, size, spans) for size, spans in sizes]
    found = belady_steady(tenants, {0: 10}, SECONDS[:6])
    assert found.evictions == (Eviction(0, 2, True),)
    assert found.fetches == (Fetch(0, 4, 4, ()),)
    assert found.lacking == 0
