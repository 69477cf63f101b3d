"""Reads log.jsonl of runs and smooths curves, for the scripts that show runs."""
import json
import os


class LogError(Exception):
    """One line: which log, and what is wrong with it."""


def log_path(run):
    """Of a run directory, or of the log itself."""
    return os.path.join(run, "log.jsonl") if os.path.isdir(run) else run


def run_name(run):
    """The run directory's name."""
    path = os.path.abspath(run)
    return os.path.basename(path if os.path.isdir(path) else os.path.dirname(path))


def read_log(run):
    """(training, validation): the log's lines as dicts, in order. A training line has finite numbers or none (a skipped step has no
    loss); with "tokens" and "hours", which is what the run had trained on and taken by then, evaluations left out. Samples
    are not returned."""
    path = log_path(run)
    training, validation = [], []
    tokens = hours = 0.0
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    entry = json.loads(line)
                    if not isinstance(entry["step"], int):
                        raise ValueError("step")
                    if "samples" in entry:
                        continue
                    if "val_loss" in entry:
                        validation.append({**entry, "tokens": tokens, "hours": hours})
                        continue
                    seconds = entry.get("ms", 0) / 1000
                    tokens += seconds * entry.get("tokens_per_s", 0)
                    hours += seconds / 3600
                    training.append({**entry, "tokens": tokens, "hours": hours})
                except (ValueError, KeyError, TypeError, AttributeError):
                    if line.endswith("\n"):
                        raise LogError(f"{path}:{number}: not a log line: {line.strip()[:60]!r}") from None
                    # a last line torn off by a crash
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: cannot be read ({error}); give a run directory that holds log.jsonl") from None
    if not training and not validation:
        raise LogError(f"{path}: holds no steps yet; train some first")
    return training, validation


def values(entries, key, x="step"):
    """(xs, ys) of the lines that have a number under key."""
    pairs = [(entry[x], entry[key]) for entry in entries if isinstance(entry.get(key), (int, float))]
    return [a for a, _ in pairs], [b for _, b in pairs]


def smoothed(numbers, weight):
    """Exponential moving average, corrected for its start."""
    total, norm, result = 0.0, 0.0, []
    for number in numbers:
        total = weight * total + (1 - weight) * number
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def smoothing_weight(count):
    """For a curve of so many points: over a fiftieth of it, at most 20 points."""
    return 1 - 1 / max(1, min(20, count // 50))
