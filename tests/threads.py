"""Work in threads of Python, and on different numbers of the threads of kernels."""

import threading

from smallmind.kernels.codegen.threads import set_threads, threads


def in_threads(*works):
    """Calls each in a thread of its own, all at once; the first of their errors is raised."""
    errors = []

    def run(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def on_threads(*counts):
    """Yields each number of threads while kernels use it; at the end they use as many as before."""
    before = threads()
    try:
        for count in counts:
            set_threads(count)
            yield count
    finally:
        set_threads(before)
