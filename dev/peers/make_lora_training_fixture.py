#!/usr/bin/env python3
"""Makes the fixture of LoRA training: the losses and the final adapters of 20 steps with peft, in fp32.

    python dev/peers/make_lora_training_fixture.py

writes dev/fixtures/lora_training from the bases, data and cases of dev/tests/test_lora_training.py, with
dev/peers/compare_finetune.py, whose checks must pass and whose loss must fall by 0.3. Needs ./train_gpt (which gives the
initial adapters), torch, transformers and peft.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import peft
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "dev/tests"))

import test_lora_training as test  # noqa: E402


def main():
    fixtures = ROOT / "dev/fixtures/lora_training"
    fixtures.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data")
        test.make_data(data)
        for name, (family, lora, lr) in test.CASES.items():
            base = os.path.join(folder, name)
            test.make_base(base, family)
            options = ["--driver", ROOT / "train_gpt", "--model", base, "--data", data, "--steps", test.STEPS, "--out",
                       os.path.join(folder, name + "-run"), "--batch-size", test.BATCH, "--seq-len", test.SEQ_LEN,
                       "--lr", lr, "--fall", 0.3, "--fixture", fixtures / f"{name}.safetensors", *lora]
            subprocess.run([sys.executable, ROOT / "dev/peers/compare_finetune.py", *map(str, options)], check=True)
    (fixtures / "README.md").write_text(
        "Losses and adapters of 20 steps, made by `python dev/peers/make_lora_training_fixture.py` with\n"
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__} and peft "
        f"{peft.__version__}.\n")


if __name__ == "__main__":
    main()
