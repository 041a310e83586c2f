"""Roads and their traffic over simulated time: first come, first served, with shared roots.

Time only moves forward. A transfer is put on a link at some moment; the link serves its queue in
order. Links of one root slow each other down when busy together: each keeps its share of the
root's cap in proportion to its own speed.
"""

from collections import deque
from collections.abc import Mapping


class Transfer:
    """Bytes on their way; `done_s` is set when the last one has arrived."""

    __slots__ = ("after", "done_s", "label", "left", "started_s")

    def __init__(self, num_bytes: float, label: int, after: "Transfer | None" = None) -> None:
        self.left = float(num_bytes)
        self.label = label
        self.after = after
        """Another transfer that must be done before this one may begin."""
        self.started_s = -1.0
        self.done_s = -1.0


class Road:
    """One link with its queue."""

    __slots__ = ("latency_s", "name", "queue", "rate", "root", "served_bytes", "wait_s")

    def __init__(self, name: str, rate: float, latency_s: float, root: str) -> None:
        self.name, self.rate, self.latency_s, self.root = name, rate, latency_s, root
        self.queue: deque[Transfer] = deque()
        self.wait_s = 0.0
        self.served_bytes = 0.0


class Traffic:
    """All roads of a machine under one clock."""

    def __init__(self, roads: Mapping[str, Road], caps: Mapping[str, float]) -> None:
        self.now_s = 0.0
        self._roads = dict(roads)
        self._caps = dict(caps)
        self._busy: list[Road] = []
        self._waiting: list[Road] = []
        """Roads whose first transfer waits for another road's."""

    def send(
        self, road: str, num_bytes: float, label: int = 0, after: Transfer | None = None
    ) -> Transfer:
        """Queue a transfer on a road at the present moment; it begins when `after` is done."""
        line, transfer = self._roads[road], Transfer(num_bytes, label, after)
        line.served_bytes += num_bytes
        line.queue.append(transfer)
        if len(line.queue) == 1:
            self._waiting.append(line)
            self._begin_ready()
        return transfer

    def advance(self, until_s: float) -> None:
        """Let traffic flow up to a moment."""
        while self._busy and self.now_s < until_s:
            self._flow(until_s)
        self.now_s = max(self.now_s, until_s)

    def finish(self, transfer: Transfer) -> float:
        """Let traffic flow until this transfer is done; return when that is."""
        while transfer.done_s < 0:
            self._flow(float("inf"))
        return transfer.done_s

    def _begin_ready(self) -> None:
        """Start the first transfer of each road that has nothing more to wait for."""
        for line in self._waiting.copy():
            head = line.queue[0]
            if head.after is None or head.after.done_s >= 0:
                self._waiting.remove(line)
                self._busy.append(line)
                line.wait_s, head.started_s = line.latency_s, self.now_s

    def _flow(self, until_s: float) -> None:
        """Move to the next completion, or to `until_s` if that comes first."""
        busy, step = self._busy, until_s - self.now_s
        if len(busy) == 1:  # most of the time
            line = busy[0]
            step = min(step, line.wait_s + line.queue[0].left / line.rate)
            self.now_s += step
            self._serve(line, line.rate, step)
        else:
            rates = [self._rate(line) for line in busy]
            for line, rate in zip(busy, rates, strict=True):
                step = min(step, line.wait_s + line.queue[0].left / rate)
            self.now_s += step
            for line, rate in zip(busy.copy(), rates, strict=True):
                self._serve(line, rate, step)
        if self._waiting:
            self._begin_ready()

    def _serve(self, line: Road, rate: float, step: float) -> None:
        if line.wait_s:
            waited = min(line.wait_s, step)
            line.wait_s -= waited
            step -= waited
        head = line.queue[0]
        head.left -= step * rate
        if head.left < 0.5:
            head.done_s = self.now_s
            line.queue.popleft()
            self._busy.remove(line)
            if line.queue:
                self._waiting.append(line)

    def _rate(self, line: Road) -> float:
        cap = self._caps.get(line.root) if line.root else None
        if cap is None or len(self._busy) == 1:
            return line.rate
        moving = (x for x in self._busy if x.wait_s <= 0 or x is line)
        together = sum(x.rate for x in moving if x.root == line.root)
        return line.rate if together <= cap else line.rate * cap / together
