import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import pytest

from dfm_nb.text.workers import LostWorker, ordered_map


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = {p.pid for p in multiprocessing.active_children()}
    yield
    assert {p.pid for p in multiprocessing.active_children()} <= before


def make_square():
    return lambda item: item * item


def make_half_an_answer():
    def half(item: int) -> bytes:
        if item == 5:
            connections = [o for o in gc.get_objects() if isinstance(o, Connection)]
            os.write(connections[0].fileno(), (1000).to_bytes(4, "big") + b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return bytes(item)

    return half


def make_fault():
    return lambda item: 1 // item


def test_results_come_in_the_order_of_the_items():
    assert list(ordered_map(make_square, (), range(50), 3)) == [(i, i * i) for i in range(50)]


@pytest.mark.timeout(60)
def test_worker_killed_halfway_through_its_answer_is_lost_at_once():
    with pytest.raises(LostWorker):
        list(ordered_map(make_half_an_answer, (), range(20), 2))


def test_what_the_function_raises_is_raised_to_the_caller():
    results = ordered_map(make_fault, (), [1, 0], 2)
    assert next(results) == (1, 1)
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_caller_that_stops_early_leaves_no_process():
    results = ordered_map(make_square, (), iter(range(10**9)), 2)
    assert next(results) == (0, 0)
    results.close()
