"""Several runs at a time, in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_in_processes(
    function: Callable[..., Result],
    tasks: Sequence[Iterable[Any]],
    jobs: int,
    on_result: Callable[[Result], None],
) -> list[Result]:
    """Call a function with the arguments of each task, in at most `jobs` processes; the results in the tasks' order.

    on_result is called here with each result, in the order in which they come. The first error ends everything, and
    is raised.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as executor:
        running = [executor.submit(function, *task) for task in tasks]
        try:
            for ended in as_completed(running):
                on_result(ended.result())
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
        return [each.result() for each in running]
