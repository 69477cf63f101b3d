"""Work in several processes, with results in order."""
import collections
import concurrent.futures
import multiprocessing
import os
import signal

from errors import DataError, option


class Pool:
    """Maps a function over items in order, in `jobs` processes (in this process if jobs is 1), with a bounded number of
    pending results. Each process first calls start(*arguments)."""

    def __init__(self, jobs, start=None, *arguments):
        self.jobs, self.start, self.arguments = jobs, start, arguments

    def map(self, function, items):
        if self.jobs == 1:
            if self.start:
                self.start(*self.arguments)
            yield from map(function, items)
            return
        context = multiprocessing.get_context("spawn")  # forking a process that has threads (tokenizers') can hang
        executor = concurrent.futures.ProcessPoolExecutor(self.jobs, context, start_process,
                                                          (self.start, *self.arguments))
        try:
            pending = collections.deque()
            for item in items:
                pending.append(self.submit(executor, function, item))
                if len(pending) >= 2 * self.jobs:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise DataError(f"a worker process died, probably for lack of memory; lower {option('jobs')} "
                            "(1 needs the least)") from None
        finally:
            executor.shutdown(cancel_futures=True)

    @staticmethod
    def submit(executor, *work):
        """Submits with SIGINT blocked. Ctrl-C reaches every process of the terminal. A process that starts here
        inherits the mask, so Ctrl-C cannot end it with a traceback before start_process() ignores SIGINT. The parent
        ends the pool."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return executor.submit(*work)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_process(start, *arguments):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    if start:
        start(*arguments)
