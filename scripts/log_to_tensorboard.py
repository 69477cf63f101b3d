#!/usr/bin/env python3
"""Exports the log.jsonl of runs for TensorBoard.

    scripts/log_to_tensorboard.py runs/a runs/b       writes runs/a/tensorboard/ and runs/b/tensorboard/
    scripts/log_to_tensorboard.py runs/* --output tb  writes tb/a/, tb/b/, ...
    tensorboard --logdir runs                         shows them (install it with: pip install tensorboard)

Training values are named train/loss, train/lr and so on, evaluations val/loss and val/bits_per_byte. The last step gets
the modification time of the log; earlier steps are placed by their durations. Earlier exports are replaced.
"""
import in_venv  # noqa: F401
import argparse
import glob
import os
import sys

from printable import printable
from run_log import LogError, log_path, read_log, run_name

NOT_SCALARS = ("step", "tokens", "minutes", "hours", "skipped", "spike", "no_loss_tokens")
VALIDATION = {"val_loss": "val/loss", "bits_per_byte": "val/bits_per_byte", "accuracy": "val/accuracy",
              "accuracy_norm": "val/accuracy_norm", "perplexity": "val/perplexity"}


def export(run, folder, writer_class):
    training, validation = read_log(run)
    end = os.path.getmtime(log_path(run))
    last = max(entry["hours"] for entry in training + validation)
    for old in glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*")):
        os.remove(old)
    with writer_class(folder) as writer:
        for entry in sorted(training + validation, key=lambda e: e["step"]):
            time = end - 3600 * (last - entry["hours"])
            for key, value in entry.items():
                if key in NOT_SCALARS or isinstance(value, bool) or not isinstance(value, (int, float)):
                    continue
                writer.add_scalar(VALIDATION.get(key, f"train/{key}"), value, entry["step"], walltime=time)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run directories, or log.jsonl files")
    parser.add_argument("--output", help="a folder that gets a subfolder for each run (default: tensorboard/ in each run)")
    args = parser.parse_args()
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        print("log_to_tensorboard: the Python package tensorboardX is not here (make venv installs it).", file=sys.stderr)
        return 3
    try:
        for run in args.runs:
            folder = os.path.join(args.output, run_name(run)) if args.output else \
                os.path.join(os.path.dirname(log_path(run)), "tensorboard")
            export(run, folder, SummaryWriter)
            print(printable(folder))
    except LogError as error:
        print(f"log_to_tensorboard: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(printable(f"log_to_tensorboard: {error.filename}: cannot be written ({error.strerror})"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
