"""Traffic: links serve in order, share their root's cap, and lose no byte."""

import random

import pytest

from legroom.core.clock import Road, Traffic


def roads(*rates: float, root: str = "", latency_s: float = 0.0) -> dict[str, Road]:
    names = "abcdef"
    return {names[i]: Road(names[i], r, latency_s, root) for i, r in enumerate(rates)}


def test_one_transfer_takes_its_size_over_the_rate() -> None:
    traffic = Traffic(roads(10.0), {})
    assert traffic.finish(traffic.send("a", 25)) == pytest.approx(2.5)


def test_first_come_first_served() -> None:
    traffic = Traffic(roads(10.0), {})
    one, two = traffic.send("a", 10), traffic.send("a", 20)
    assert (traffic.finish(two), one.done_s) == pytest.approx((3.0, 1.0))
    assert two.started_s == pytest.approx(1.0)


def test_latency_comes_before_each_transfer() -> None:
    traffic = Traffic(roads(10.0, latency_s=0.5), {})
    one, two = traffic.send("a", 10), traffic.send("a", 10)
    assert (traffic.finish(two), one.done_s) == pytest.approx((3.0, 1.5))


def test_links_of_one_root_share_its_cap() -> None:
    """10 + 10 under a cap of 10: half speed each while both run, full speed for what is left."""
    traffic = Traffic(roads(10.0, 10.0, root="bus"), {"bus": 10.0})
    one, two = traffic.send("a", 10), traffic.send("b", 20)
    assert (traffic.finish(two), one.done_s) == pytest.approx((3.0, 2.0))


def test_shares_go_by_speed() -> None:
    """30 and 10 under a cap of 20: 15 and 5."""
    traffic = Traffic(roads(30.0, 10.0, root="bus"), {"bus": 20.0})
    one, two = traffic.send("a", 30), traffic.send("b", 10)
    assert (traffic.finish(one), traffic.finish(two)) == pytest.approx((2.0, 2.0))


def test_a_cap_above_the_sum_slows_nobody() -> None:
    traffic = Traffic(roads(10.0, 10.0, root="bus"), {"bus": 25.0})
    one, two = traffic.send("a", 10), traffic.send("b", 10)
    assert (traffic.finish(one), traffic.finish(two)) == pytest.approx((1.0, 1.0))


def test_links_of_other_roots_do_not_meet() -> None:
    lines = {**roads(10.0, root="bus"), "z": Road("z", 10.0, 0.0, "other")}
    traffic = Traffic(lines, {"bus": 10.0, "other": 10.0})
    one, two = traffic.send("a", 10), traffic.send("z", 10)
    assert (traffic.finish(one), traffic.finish(two)) == pytest.approx((1.0, 1.0))


def test_a_link_that_only_waits_for_its_latency_takes_no_share() -> None:
    """While one link is in its latency the other has the bus for itself."""
    lines = {"a": Road("a", 10.0, 0.0, "bus"), "b": Road("b", 10.0, 5.0, "bus")}
    traffic = Traffic(lines, {"bus": 10.0})
    one = traffic.send("a", 10)
    traffic.send("b", 10)
    assert traffic.finish(one) == pytest.approx(1.0)


def test_time_moves_forward_only() -> None:
    traffic = Traffic(roads(10.0), {})
    traffic.advance(3.0)
    traffic.advance(1.0)
    assert traffic.finish(traffic.send("a", 10)) == pytest.approx(4.0)


@pytest.mark.parametrize("num_bytes", [0, 1e-3, 1, 1e12])
def test_any_size_arrives(num_bytes: float) -> None:
    traffic = Traffic(roads(7.0), {})
    assert traffic.finish(traffic.send("a", num_bytes)) == pytest.approx(num_bytes / 7, abs=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_no_root_carries_more_than_its_cap(seed: int) -> None:
    """Random traffic: all arrive, in order, no faster than links and cap allow."""
    draw = random.Random(seed)
    cap = draw.uniform(20, 30)
    traffic = Traffic(roads(10.0, 20.0, root="bus"), {"bus": cap})
    sent: dict[str, list[tuple[float, float, object]]] = {"a": [], "b": []}
    now = 0.0
    for _ in range(30):
        now += draw.expovariate(1.0)
        traffic.advance(now)
        name, size = draw.choice("ab"), draw.uniform(1, 40)
        sent[name].append((now, size, traffic.send(name, size)))
    ends = {n: [traffic.finish(t) for _, _, t in rows] for n, rows in sent.items()}  # type: ignore
    # Half a byte of each transfer may be left out.
    for name, rate in (("a", 10.0), ("b", 20.0)):
        assert ends[name] == sorted(ends[name])
        for (start, size, _), end in zip(sent[name], ends[name], strict=True):
            assert end - start >= size / min(rate, cap) - 0.2
    total = sum(size for rows in sent.values() for _, size, _ in rows)
    first = min(rows[0][0] for rows in sent.values() if rows)
    assert max(e[-1] for e in ends.values() if e) - first >= total / cap - 1.0
