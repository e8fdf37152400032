"""Worker processes with one connection each.

`concurrent.futures.ProcessPoolExecutor` has one pipe for the results of all its workers. When a worker is killed
halfway through a result, the reader waits forever for the rest, because the others keep the pipe open. (loky hangs,
too.) Here a connection closes when its worker ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Generator, Iterable, TypeVar

from dfm_nb.base.process import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")


class LostWorker(ValueError):
    """A worker process ended before its work was done."""


def _work(connection: Connection, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent ends this one
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    function = make(*arguments)
    while True:
        item = connection.recv()
        try:
            result = function(item)
        except Exception as error:
            result = error
        connection.send(result)


def ordered_map(
    make: Callable[..., Callable[[Item], Result]], arguments: tuple[Any, ...], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Each item with `make(*arguments)(item)`, in order, computed by `workers` processes (1: in this process).

    At most `workers + 2` items are in flight, and one more is read ahead. `make`, its arguments, items and results must
    be picklable. Exceptions of the function are raised here; LostWorker if a process ends.
    """
    if workers == 1:
        function = make(*arguments)
        yield from ((item, function(item)) for item in items)
        return
    context, processes, idle = get_context("spawn"), [], deque[Connection]()
    for _ in range(workers):
        connection, its_end = context.Pipe()
        processes.append(context.Process(target=_work, args=(its_end, make, arguments), daemon=True))
        processes[-1].start()
        its_end.close()  # otherwise its death would not close the connection
        idle.append(connection)
    busy: dict[Connection, tuple[int, Item]] = {}  # the item's number, from 0, and the item
    done: dict[int, tuple[Item, Any]] = {}
    numbered, given = enumerate(items), 0
    try:
        upcoming = next(numbered, None)
        while upcoming or busy or done:
            while idle and upcoming and upcoming[0] < given + workers + 2:
                connection = idle.popleft()
                busy[connection] = upcoming
                with contextlib.suppress(OSError):  # it has died, which `recv` will raise
                    connection.send(upcoming[1])
                upcoming = next(numbered, None)
            while given in done:
                item, result = done.pop(given)
                if isinstance(result, Exception):
                    raise result
                yield item, result
                given += 1
            ready = wait(list(busy), timeout=None if busy else 0)
            for connection in [c for c in busy if c in ready]:
                number, item = busy.pop(connection)
                try:
                    done[number] = item, connection.recv()
                except (EOFError, OSError) as error:
                    raise LostWorker(
                        "a worker ended, most often for lack of memory; resume with fewer --workers"
                    ) from error
                idle.append(connection)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
