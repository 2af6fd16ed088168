"""Work spread over processes, with a bounded amount of it under way."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from typing import Any

from geonorm.errors import UserError

_worker: Callable[..., Any]


def spread(
    make: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...], tasks: Iterator[tuple[Any, ...]], workers: int
) -> Iterator[Any]:
    """Yield ``make(*arguments)(*task)`` for every task, in the order in which they end.

    At most ``workers + 1`` tasks are taken from the iterator ahead of their results, so that a fast reader does
    not fill the memory. One worker, or a single task, runs in this process.

    Args:
        make: a module-level function or class; called once in each process.
        arguments: for ``make``; they must pickle, as must tasks and results.
        tasks: argument tuples.
        workers: number of processes, at least 1.

    Raises:
        UserError: a worker process died.
    """
    first = list(itertools.islice(tasks, 2))
    tasks = itertools.chain(first, tasks)
    if workers == 1 or len(first) < 2:
        function = make(*arguments)
        for task in tasks:
            yield function(*task)
        return
    pool = ProcessPoolExecutor(workers, _context(make.__module__), _start, (make, arguments))
    waiting: set[Future[Any]] = set()
    try:
        for task in tasks:
            waiting.add(pool.submit(_run, task))
            if len(waiting) > workers:
                ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in ended)
        while waiting:
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ended)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed or could not start; if memory ran out use fewer `workers`, and in a script"
            " call prepare under `if __name__ == '__main__':` (finished shards are kept)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _context(module: str) -> BaseContext:
    # Forking this process, which holds threads of tokenizers, torch or pyarrow, can lock up. A server that has only
    # imported the module is safe to fork, and the package is then imported once and not once a worker.
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def _start(make: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    global _worker
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The processes are the parallelism; threads in each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = make(*arguments)


def _end_with_parent() -> None:
    # A killed parent cannot close the queue, and the worker would wait on it for ever.
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run(task: tuple[Any, ...]) -> Any:
    return _worker(*task)
