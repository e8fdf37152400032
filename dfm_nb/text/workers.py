"""Worker processes with one connection each.

`concurrent.futures.ProcessPoolExecutor` has one pipe for the results of all its workers. When a worker is killed
halfway through a result, the reader waits forever for the rest, because the others keep the pipe open. (loky hangs,
too.) Here a connection closes when its worker ends.
"""

import contextlib
import os
import signal
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
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
    with contextlib.suppress(EOFError):  # the parent was killed
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

    At most `workers + 2` items are in flight. `make`, its arguments, items and results must be picklable. Exceptions of
    the function are raised here; LostWorker if a process ends.
    """
    if workers == 1:
        function = make(*arguments)
        yield from ((item, function(item)) for item in items)
        return
    context = get_context("spawn")
    processes = []
    idle = SimpleQueue[Connection]()
    for _ in range(workers):
        connection, its_end = context.Pipe()
        processes.append(context.Process(target=_work, args=(its_end, make, arguments), daemon=True))
        processes[-1].start()
        its_end.close()  # otherwise its death would not close the connection
        idle.put(connection)

    def ask(item: Item) -> tuple[Item, Result]:
        connection = idle.get()
        try:
            connection.send(item)
            result = connection.recv()
        except (EOFError, OSError) as error:
            raise LostWorker("a worker ended, most often for lack of memory; resume with fewer --workers") from error
        finally:
            idle.put(connection)
        if isinstance(result, Exception):
            raise result
        return item, result

    threads = ThreadPoolExecutor(workers)
    waiting = deque[Future[tuple[Item, Result]]]()
    try:
        for item in items:
            waiting.append(threads.submit(ask, item))
            if len(waiting) == workers + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for process in processes:
            process.terminate()  # which ends what its thread waits for
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.join()
