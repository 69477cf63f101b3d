#!/usr/bin/env python3
"""Shows runs in the terminal while they train, side by side: loss, learning rate, tokens/s, MFU, memory, time left.

    scripts/watch.py runs/mine                     until Ctrl-C
    scripts/watch.py runs/a runs/b --interval 5
    scripts/watch.py runs/a --once                 prints the state now; so does output into a pipe

It reads log.jsonl and run.toml only, so it does not disturb a run and may be started on another machine that sees the
files.
"""
import in_venv  # noqa: F401
import argparse
import os
import re
import statistics
import sys
import time

from printable import printable
from run_log import LogError, RunLog, open_regular, run_name, seconds_before, smoothed, values

RECENT = 50       # steps that rates are the median of
CHART_ROWS = 6
BLOCKS = " ▁▂▃▄▅▆▇█"


def total_steps(run):
    """--steps of the run, None if unknown."""
    try:
        with open_regular(os.path.join(run, "run.toml")) as file:
            found = re.search(rb"^steps=(\d{1,15})$", file.read(1 << 20), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) if found else None


def duration(seconds):
    seconds = round(seconds)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def size(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def chart(numbers, columns, rows=CHART_ROWS):
    """Lines of text that draw the numbers, each column the mean of its part of them."""
    columns = min(columns, len(numbers))
    bounds = [i * len(numbers) // columns for i in range(columns + 1)]
    means = [statistics.fmean(numbers[begin:end]) for begin, end in zip(bounds, bounds[1:])]
    low, high = min(means), max(means)
    heights = [round((mean - low) / (high - low) * (8 * rows - 1)) + 1 if high > low else 4 * rows for mean in means]
    return ["".join(BLOCKS[max(0, min(8, height - 8 * row))] for height in heights) for row in reversed(range(rows))]


def facts(log, steps, now):
    """(name, text) of what a run has come to. steps: that it will have, None if unknown. now: seconds since 1970."""
    last, recent = log.training[-1], log.training[-RECENT:]
    median = {key: statistics.median(values(recent, key)[1] or [0]) for key in ("ms", "tokens_per_s", "mfu")}
    step_seconds = median["ms"] / 1000 + statistics.fmean(map(seconds_before, recent))  # not every step has a rollout
    _, losses = values(recent, "loss")
    _, norms = values(recent, "grad_norm")
    skipped = sum(1 for line in log.training if line.get("skipped"))
    rows = [("step", f"{last['step']:,}" + (f" of {steps:,}" if steps else "")),
            ("loss", f"{statistics.fmean(losses):.4f}" if losses else "not finite")]
    steps_of, scores = values(log.validation, "val_loss")
    if scores:
        best = min(range(len(scores)), key=scores.__getitem__)
        rows.append(("val_loss", f"{scores[-1]:.4f}, best {scores[best]:.4f} at {steps_of[best]:,}"))
    else:
        rows.append(("val_loss", "-"))  # so that the rows of runs side by side are level
    for score in ("accuracy_norm", "perplexity"):
        _, scores = values(log.validation, score)
        if scores:
            rows.append((score, f"{scores[-1]:.4f}"))
    _, rewards = values(recent, "reward")
    if rewards:
        rows += [("reward", f"{statistics.fmean(rewards):.4f}"),
                 ("completion", f"{statistics.fmean(values(recent, 'completion_length')[1]):.0f} tokens")]
    rows += [("lr", "-" if last.get("lr") is None else f"{last['lr']:.3g}"), ("grad_norm", f"{norms[-1]:.3g}" if norms else "-"),
             ("tokens/s", f"{median['tokens_per_s']:,.0f}" if median["tokens_per_s"] else "-"),
             ("MFU", f"{median['mfu']:.1%}" if median["mfu"] else "-"),
             ("memory", size(last["memory"]) if last.get("memory") else "-"),
             ("tokens", f"{last['tokens']:.4g}"), ("trained", duration(3600 * last["hours"]))]
    if skipped:
        rows.append(("skipped", f"{skipped} step" + "s" * (skipped > 1)))
    if steps and last["step"] >= steps:
        rows.append(("state", "done"))
    elif median["ms"]:
        age = now - log.modified
        late = age > 60 + 20 * step_seconds
        rows.append(("state", f"no step for {duration(age)}") if late else
                    ("ETA", duration((steps - last["step"]) * step_seconds) if steps else "-"))
    return rows


def panel(run, log, width):
    """What is shown of a run."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    try:
        log.update()
    except LogError as error:
        log.clear()  # it may be whole at the next look
        return Panel(Text(str(error), style="red"), title=Text(printable(run_name(run))), width=width)
    if not log.training:
        _, scores = values(log.validation, "val_loss")
        text = f"no training step yet, val_loss {scores[-1]:.4f}" if scores else "no step yet"
        return Panel(Text(text), title=Text(printable(run_name(run))), width=width)
    steps, inside = total_steps(run), max(1, width - 4)
    table = Table.grid(padding=(0, 2))
    for name, text in facts(log, steps, time.time()):
        table.add_row(Text(name, style="dim"), Text(text, style="yellow" if name in ("skipped", "state") else "bold"))
    parts = [table]
    if steps:
        bar = ProgressBar(total=steps, completed=log.training[-1]["step"], width=inside)
        parts.insert(0, Padding(bar, 0))  # a line of its own
    _, losses = values(log.training, "loss")
    if len(losses) > 1:
        curve = smoothed(losses)
        last = losses[-max(1, min(41, len(losses) // 25)):]
        parts += [Text(f"loss {curve[0]:.3f} → {sum(last) / len(last):.3f}", style="dim")]
        parts += [Text(line, style="cyan", no_wrap=True) for line in chart(curve, inside)]
    return Panel(Group(*parts), title=Text(printable(run_name(run))), width=width)


def screen(runs, logs, console):
    """All panels, as many beside each other as the terminal is wide."""
    from rich.columns import Columns

    beside = max(1, min(len(runs), console.width // 40))
    width = min(console.width // beside, 80) if beside == 1 else console.width // beside
    return Columns([panel(run, log, width) for run, log in zip(runs, logs)], padding=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument("--interval", type=float, default=1,
                        help="seconds between looks at the logs (default %(default)s)")
    parser.add_argument("--once", action="store_true", help="print the state and exit")
    args = parser.parse_args()
    if not 0 < args.interval < 1e6:
        parser.error(f"--interval is {args.interval}; it must be more than 0 and less than 10^6")
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        print("watch: the Python package rich is missing; `make venv` installs it", file=sys.stderr)
        return 3
    console, logs = Console(), [RunLog(run) for run in args.runs]
    missing = [log.path for log in logs if not os.path.exists(log.path)]
    if missing:
        print(printable(f"watch: {missing[0]}: no such file; give a run directory that holds log.jsonl"), file=sys.stderr)
        return 1
    if args.once or not console.is_terminal:
        console.print(screen(args.runs, logs, console))
        return 0
    try:
        with Live(screen(args.runs, logs, console), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(args.interval)
                live.update(screen(args.runs, logs, console), refresh=True)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
