"""Reads log.jsonl of runs and smooths curves, for the scripts that show runs."""
import json
import os
import stat

from printable import printable

MAX_LINE = 1 << 24  # bytes
# The keys that hold numbers, or null: a loss that is not finite.
NUMBERS = ("loss", "lr", "grad_norm", "ms", "tokens_per_s", "mfu", "memory", "val_loss", "bits_per_byte", "accuracy", "accuracy_norm",
           "perplexity", "rollout_seconds", "scoring_seconds", "log_probability_seconds")


class LogError(Exception):
    """One line: which log, what failed, the remedy."""


def seconds_before(entry):
    """What comes before a step of `rl` and is not in its "ms": the rollout, if it has one of its own. 0: another run."""
    return sum(entry.get(key) or 0 for key in ("rollout_seconds", "scoring_seconds", "log_probability_seconds"))


def log_path(run):
    """Of a run directory, or of the log itself."""
    return os.path.join(run, "log.jsonl") if os.path.isdir(run) else run


def run_name(run):
    """The run directory's name."""
    path = os.path.abspath(run)
    return os.path.basename(path if os.path.isdir(path) else os.path.dirname(path))


def open_regular(path):
    """A file opened for reading in binary; OSError for another kind, whose reading may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO without a writer would block
    file = os.fdopen(descriptor, "rb") if stat.S_ISREG(os.fstat(descriptor).st_mode) else os.close(descriptor)
    if file is None:
        raise OSError("not a regular file")
    return file


def check_numbers(entry):
    """Throws ValueError for a log line with a value of the wrong type, or out of all bounds."""
    for key, value in entry.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (number and not abs(value) < 1e100) or (key in NUMBERS and not number and value is not None):
            raise ValueError(key)
    step = entry["step"]
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise ValueError("step")


class RunLog:
    """log.jsonl of a run, which may still be written. training, validation: its lines as dicts, in order. A training
    line has finite numbers or none (a skipped step has no loss). Both have "tokens", which the run had trained on by
    then, and its time in "minutes" and "hours", rollouts included, evaluations left out. Samples are not kept."""

    def __init__(self, run):
        self.path = log_path(run)
        self.clear()

    def clear(self):
        self.training, self.validation = [], []
        self.tokens = self.hours = 0.0
        self.offset = self.lines = 0
        self.file_id = self.modified = None

    def update(self):
        """Reads the lines that are new; from the start of a log that was replaced, or cut back as a resumed run's."""
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if self.file_id != (status.st_dev, status.st_ino) or status.st_size < self.offset:
                    self.clear()
                    self.file_id = status.st_dev, status.st_ino
                self.modified = status.st_mtime
                file.seek(self.offset)
                while line := file.readline(MAX_LINE):
                    if len(line) == MAX_LINE:
                        raise OSError(f"line {self.lines + 1} has {MAX_LINE >> 20} MiB or more")
                    if not line.endswith(b"\n"):
                        break  # not whole yet, or torn off by a crash
                    self.offset += len(line)
                    self.lines += 1
                    self.add(line.decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            message = f"{self.path}: cannot be read ({error}); give a run directory that holds log.jsonl"
            raise LogError(printable(message)) from None

    def with_totals(self, entry):
        return {**entry, "tokens": self.tokens, "minutes": 60 * self.hours, "hours": self.hours}

    def add(self, line):
        try:
            entry = json.loads(line)
            check_numbers(entry)
            if "samples" in entry:
                return
            if "ms" not in entry:
                self.validation.append(self.with_totals(entry))
                return
            seconds = (entry["ms"] or 0) / 1000
            self.tokens += seconds * (entry.get("tokens_per_s") or 0)
            self.hours += (seconds + seconds_before(entry)) / 3600
            self.training.append(self.with_totals(entry))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise LogError(printable(f"{self.path}:{self.lines}: not a log line: {line.strip()[:60]!r}")) from None


def read_log(run):
    """(training, validation) of a RunLog with at least one line."""
    log = RunLog(run)
    log.update()
    if not log.training and not log.validation:
        raise LogError(printable(f"{log.path}: holds no steps yet; train some first"))
    return log.training, log.validation


def values(entries, key, x="step"):
    """(xs, ys) of the lines that have a number under key."""
    pairs = [(entry[x], entry[key]) for entry in entries if isinstance(entry.get(key), (int, float))]
    return [a for a, _ in pairs], [b for _, b in pairs]


def smoothed(numbers):
    """The mean of the points around each, over a twenty-fifth of the curve and at most 41 of them. The window is
    symmetric, so that the curve does not lag behind; it becomes narrower towards both ends."""
    widest, last = min(20, len(numbers) // 50), len(numbers) - 1
    result = []
    for i in range(len(numbers)):
        half = min(widest, i, last - i)
        result.append(sum(numbers[i - half:i + half + 1]) / (2 * half + 1))
    return result
