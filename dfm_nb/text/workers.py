"""Worker processes with one connection each.

`concurrent.futures.ProcessPoolExecutor` has one pipe for the results of all its workers. When a worker is killed
halfway through a result, its reader waits for ever for the rest, as the others keep the pipe open. Here the end of a
worker is the end of its connection.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Callable, Generator, Iterable, TypeVar

from dfm_nb.base.argv import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")


class LostWorker(Exception):
    """A worker process has ended before its work was done."""


class _Worker:
    """A process that answers one item at a time by `make(*arguments)(item)`."""

    def __init__(self, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]):
        context = get_context("spawn")
        self._connection, its_end = context.Pipe()
        self._process = context.Process(target=_work, args=(its_end, make, arguments), daemon=True)
        self._process.start()
        its_end.close()  # else its death would not end the connection

    def answer(self, item: Any) -> Any:
        try:
            self._connection.send(item)
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise LostWorker from error
        if isinstance(result, Exception):
            raise result
        return result

    def terminate(self) -> None:
        self._process.terminate()

    def join(self) -> None:
        self._process.join()
        self._connection.close()


def _work(connection: Connection, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the one that started this ends it
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
    """Each item with `make(*arguments)(item)`, in order, computed by `workers` processes.

    At most `workers + 2` items are in flight. `make`, its arguments, items and results must be picklable. What the
    function raises is raised here; LostWorker when a process ends.
    """
    idle: SimpleQueue[_Worker] = SimpleQueue()
    processes = [_Worker(make, arguments) for _ in range(workers)]
    for process in processes:
        idle.put(process)

    def answer(item: Item) -> Result:
        process = idle.get()
        try:
            return process.answer(item)
        finally:
            idle.put(process)

    waiting: deque[tuple[Item, Future[Result]]] = deque()
    threads = ThreadPoolExecutor(workers)
    try:
        for item in items:
            waiting.append((item, threads.submit(answer, item)))
            if len(waiting) == workers + 2:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    finally:
        for process in processes:  # a thread that waits for its answer ends with it
            process.terminate()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.join()
