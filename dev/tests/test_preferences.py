#!/usr/bin/env python3
"""Training on preference pairs: against trl, packing, checkpoints, ranks, references, refusals (TRAIN_GPT names the
driver).

dev/fixtures/preferences.json has random pairs and trl's values of 20 steps; dev/peers/make_preference_fixture.py makes
it with the cases and options of this file.
"""
import json
import os
import shutil
import tempfile
import unittest

from harness import ROOT, CommandsTest, log, run, write_tokens
from model_files import MODELS

FIXTURE = os.path.join(ROOT, "dev", "fixtures", "preferences.json")
MODEL = os.path.join(MODELS, "llama-gqa")
CASES = {"dpo": {"loss": "dpo", "beta": 0.1}, "smoothed_dpo": {"loss": "dpo", "beta": 0.2, "label_smoothing": 0.1},
         "ipo": {"loss": "ipo", "beta": 0.1}, "simpo": {"loss": "simpo", "beta": 2.0, "simpo_margin": 1.0},
         "smoothed_simpo": {"loss": "simpo", "beta": 2.5, "simpo_margin": 0.5, "label_smoothing": 0.1},
         "orpo": {"loss": "orpo", "beta": 0.1}}
STEPS, BATCH, SEQ_LEN, LR, SEED = 20, 4, 60, 1e-3, 42
LOSS, EXAMPLE_START, REJECTED = 1, 2, 4  # flags of a token (data/token_files.h)


def write_pairs(data, pairs, split="train"):
    """Makes a split of a data directory of pairs: (prompt, chosen, rejected) as lists of ids."""
    tokens, flags = [], []
    for prompt, *responses in pairs:
        for response, start in zip(responses, (EXAMPLE_START, EXAMPLE_START | REJECTED)):
            tokens += prompt + response
            flags += [start] + [0] * (len(prompt) - 1) + [LOSS] * len(response)
    return write_tokens(data, tokens, flags, mask_version=3, split=split)
