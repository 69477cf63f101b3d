#!/usr/bin/env python3
"""Makes dev/fixtures/preferences.json: random pairs, and what trl reports of 20 steps of each loss on them, in float64.

    python dev/peers/make_preference_fixture.py

The model is dev/fixtures/models/llama-gqa, the cases and options are those of dev/tests/test_preferences.py. A training
sequence holds one pair: all pairs need more than half of one, and no two as many positions, so that nothing depends on
how ties are packed. Needs torch, transformers and trl (dev/peers/trl_preferences.py).
"""
import json
import os
import random
import sys
import tempfile

import torch
import transformers
import trl

import compare_preferences
import trl_preferences

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "dev/tests"))

import test_preferences as test  # noqa: E402

PAIRS, VOCAB, END, LONGEST = 24, 101, 2, 32  # of the model; an example is no longer than what it is made for


def make_pairs():
    rng = random.Random(1)
    pairs, lengths = [], rng.sample(range(test.SEQ_LEN // 2 + 1, test.SEQ_LEN + 1), PAIRS)
    for length in lengths:
        chosen = rng.randint(max(8, length - LONGEST + 3), min(LONGEST, length - 6))  # tokens of the whole example
        rejected = length + 2 - chosen
        prompt = rng.randint(2, min(chosen, rejected) - 3)
        lengths_of_parts = prompt, chosen - prompt - 1, rejected - prompt - 1
        ids = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths_of_parts]
        pairs.append((ids[0], ids[1] + [END], ids[2] + [END]))
    return pairs


def dumped(steps):
    """A line for each step."""
    return "[\n  " + ",\n  ".join(json.dumps({key: round(x, 9) for key, x in step.items()}) for step in steps) + "]"


def main():
    torch.set_num_threads(1)  # so small a model gains nothing from more
    transformers.utils.logging.disable_progress_bar()
    pairs = make_pairs()
    with tempfile.TemporaryDirectory() as folder:
        data = test.write_pairs(os.path.join(folder, "data"), pairs)
        steps = compare_preferences.steps_of(data, test.SEQ_LEN, test.BATCH, test.SEED, test.STEPS)
    cases = []
    for name, options in test.CASES.items():
        values = trl_preferences.train(test.MODEL, steps, test.LR, **options)
        assert values[-1]["loss"] < values[0]["loss"], name
        cases.append(f'"{name}": {dumped(values)}')
    made_with = json.dumps(f"trl {trl.__version__} and transformers {transformers.__version__}")
    with open(test.FIXTURE, "w", encoding="utf-8") as file:
        file.write('{"made_with": ' + made_with + ',\n"pairs": [\n  ' + ",\n  ".join(map(json.dumps, pairs)) + "],\n" +
                   ",\n".join(cases) + "}\n")


if __name__ == "__main__":
    main()
