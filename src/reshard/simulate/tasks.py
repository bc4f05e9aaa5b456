"""Tasks: what ranks do by hand, without a schedule, as copies and messages that wait for each other; when all is done.

For ways of moving weights that are no plan of this library: broadcasts along a tree, chunk by chunk, and the like.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from reshard.errors import ScheduleError
from reshard.simulate.machine import Machine
from reshard.simulate.processor import Thread

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.simulate.costs import Costs
    from reshard.topology.topology import Topology


@dataclass
class _Task:
    rank: int
    peer: int | None
    nbytes: int
    seconds: float
    waits_for: int
    then: list[int] = field(default_factory=list)


class Tasks:
    """Copies and messages, each after some that were added before; a rank's copies keep their order.

    Args:
        topology: What joins the ranks.
        costs: Of copies and messages.
    """

    def __init__(self, topology: Topology, costs: Costs) -> None:
        self._topology, self._costs = topology, costs
        self._tasks: list[_Task] = []

    def copy(self, rank: int, seconds: float, after: Iterable[int] = ()) -> int:
        """A rank is busy for so long; returns the task's number."""
        return self._add(_Task(rank, None, 0, seconds, 0), after)

    def message(self, sender: int, receiver: int, nbytes: int, after: Iterable[int] = ()) -> int:
        """Bytes go from rank to rank; the task is done when they are there."""
        return self._add(_Task(sender, receiver, nbytes, 0.0, 0), after)

    def _add(self, task: _Task, after: Iterable[int]) -> int:
        number = len(self._tasks)
        for before in dict.fromkeys(after):
            self._tasks[before].then.append(number)
            task.waits_for += 1
        self._tasks.append(task)
        return number

    def seconds(self) -> float:
        """From the moment at which all ranks are here to the end of the last task.

        Raises:
            ScheduleError: A copy waits for one of the same rank that was added later. No task waits for a later one.
        """
        run = _Run(self._tasks, Machine(self._topology, self._costs))
        return run.seconds()


class _Run:
    def __init__(self, tasks: list[_Task], machine: Machine) -> None:
        self._tasks, self._machine = tasks, machine
        self._waits_for = [task.waits_for for task in tasks]
        self._threads: dict[int, Thread] = {}
        self._left = len(tasks)

    def seconds(self) -> float:
        for number, waits_for in enumerate(self._waits_for):
            if not waits_for:
                self._machine.clock.at(0.0, partial(self._begin, number))
        self._machine.clock.run()
        if self._left:
            raise ScheduleError(f"{self._left} tasks wait for each other for ever.")
        return self._machine.clock.now

    def _begin(self, number: int) -> None:
        task, machine = self._tasks[number], self._machine
        if task.peer is None:
            thread = self._threads.setdefault(task.rank, Thread(machine.processor))
            thread.work(task.seconds, partial(self._end, number))
            return
        machine.send(task.rank, task.peer, task.nbytes, left=lambda _: None, landed=lambda _: self._end(number))

    def _end(self, number: int) -> None:
        self._left -= 1
        for later in self._tasks[number].then:
            self._waits_for[later] -= 1
            if not self._waits_for[later]:
                self._begin(later)
