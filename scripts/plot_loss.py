#!/usr/bin/env python3
"""Draws the loss curves of runs from their log.jsonl.

    scripts/plot_loss.py runs/quickstart                      writes runs/quickstart/loss.png
    scripts/plot_loss.py runs/a runs/b --output compare.png   several runs in one picture

The training loss is drawn faintly as logged and, over it, smoothed; validation losses are dots. Without matplotlib it
says so in one line and draws nothing (exit status 3, so that callers can tell it from an error).
"""
import argparse
import json
import os
import sys

from plot_main import plot_main


class LogError(Exception):
    """One line: which log, and what is wrong with it."""


def read_log(run):
    """(training, validation): lists of (step, loss) of the run directory or log file."""
    path = os.path.join(run, "log.jsonl") if os.path.isdir(run) else run
    training, validation = [], []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    entry = json.loads(line)
                    # A skipped step has no finite loss: there is nothing to draw for it.
                    if isinstance(entry.get("loss"), (int, float)):
                        training.append((entry["step"], entry["loss"]))
                    if isinstance(entry.get("val_loss"), (int, float)):
                        validation.append((entry["step"], entry["val_loss"]))
                except (ValueError, KeyError, AttributeError):
                    if line.endswith("\n"):
                        raise LogError(f"{path}:{number}: not a log line: {line.strip()[:60]!r}") from None
                    # a last line torn off by a crash
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: cannot be read ({error}); give a run directory that holds log.jsonl") from None
    if not training and not validation:
        raise LogError(f"{path}: holds no losses yet; train some steps first")
    return training, validation


def smoothed(values, weight):
    """Exponential moving average, corrected for its start."""
    total, norm, result = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def draw(runs, logs, output):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
    for run, (training, validation) in zip(runs, logs):
        name = os.path.basename(os.path.normpath(run))
        colour = None  # validation takes the colour of its training curve
        if training:
            steps, losses = zip(*training)
            weight = 1 - 1 / max(1, min(20, len(losses) // 50))
            (line,) = axes.plot(steps, smoothed(losses, weight), label=f"{name}: training", linewidth=1.5)
            colour = line.get_color()
            axes.plot(steps, losses, color=colour, alpha=0.2, linewidth=0.7)
        if validation:
            steps, losses = zip(*validation)
            axes.plot(steps, losses, "o--", color=colour, markersize=4, linewidth=0.8,
                      label=f"{name}: validation, {losses[-1]:.3f} at the end")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run directories, or log.jsonl files")
    parser.add_argument("--output", help="the picture to write (default: loss.png in the first run's directory)")
    args = parser.parse_args()
    first = args.runs[0] if os.path.isdir(args.runs[0]) else os.path.dirname(args.runs[0])
    output = args.output or os.path.join(first, "loss.png")
    return plot_main("plot_loss", output, lambda: draw(args.runs, [read_log(run) for run in args.runs], output), LogError)


if __name__ == "__main__":
    sys.exit(main())
