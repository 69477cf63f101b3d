#!/usr/bin/env python3
"""Training LoRA adapters: against peft, checkpoints, resuming, ranks, refusals (TRAIN_GPT names the driver).

dev/fixtures/lora_training has peft's losses and adapters of 20 steps; dev/peers/make_lora_training_fixture.py makes them
from the bases and data of this file.
"""
import glob
import itertools
import json
import os
import shutil
import tempfile
import unittest

import numpy as np

import several_ranks
from harness import ROOT, CommandsTest, cuda, log, run, sanitized, tokenize
from model_files import read_json, read_safetensors, write_safetensors

FIXTURES = os.path.join(ROOT, "dev", "fixtures", "lora_training")
C, FFN, LAYERS, VOCAB = 32, 48, 2, 257
# name: base, the options of the adapters, the learning rate.
CASES = {"llama": ("llama", ["--lora-rank", 2, "--lora-alpha", 6, "--rslora"], 1e-2),
         "gpt2": ("gpt2", ["--lora-rank", 4, "--lora-targets", "c_attn,c_proj"], 1e-2),
         "vocabulary": ("llama", ["--lora-rank", 2, "--lora-targets", "v_proj,embed_tokens,lm_head"], 1e-2)}
STEPS, BATCH, SEQ_LEN = 20, 4, 64
FP8 = ("--matmul-dtype", "fp8", *(("--dtype", "bf16") if cuda() else ()))  # it quantises fp32 on the CPU, bf16 on a GPU


def make_base(path, family, seed=1, C=C, FFN=FFN, LAYERS=LAYERS):
    """A random model of a family: a directory in Hugging Face layout."""
    rng = np.random.default_rng(seed)
    tensors = {}

    def add(name, *shape):
        std = 0.1 if len(shape) == 2 else 0.02
        tensors[name] = (std * rng.standard_normal(shape) + (1 if "norm" in name or "ln_" in name else 0)).astype("<f4")

    if family == "llama":
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": C, "hidden_act": "silu",
                  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": FFN,
                  "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 128,
                  "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0, "bos_token_id": 256,
                  "eos_token_id": 256}
        add("model.embed_tokens.weight", VOCAB, C), add("lm_head.weight", VOCAB, C), add("model.norm.weight", C)
        for layer in range(LAYERS):
            start = f"model.layers.{layer}."
            shapes = {"self_attn.q_proj": (C, C), "self_attn.k_proj": (C // 2, C), "self_attn.v_proj": (C // 2, C),
                      "self_attn.o_proj": (C, C), "mlp.gate_proj": (FFN, C), "mlp.up_proj": (FFN, C),
                      "mlp.down_proj": (C, FFN), "input_layernorm": (C,), "post_attention_layernorm": (C,)}
            for name, shape in shapes.items():
                add(start + name + ".weight", *shape)
    else:
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": C, "n_head": 4,
                  "n_layer": LAYERS, "n_inner": FFN, "vocab_size": VOCAB,
                  "n_positions": 128, "layer_norm_epsilon": 1e-5,
                  "activation_function": "gelu_new", "bos_token_id": 256, "eos_token_id": 256, "resid_pdrop": 0.0,
                  "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        add("transformer.wte.weight", VOCAB, C), add("transformer.wpe.weight", 128, C)
        for layer in range(LAYERS):
            start = f"transformer.h.{layer}."
            shapes = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, FFN), "mlp.c_proj": (FFN, C)}
            for name, (rows, columns) in shapes.items():  # Conv1D: [in, out]
                add(start + name + ".weight", rows, columns), add(start + name + ".bias", columns)
            for name in ("ln_1", "ln_2"):
                add(start + name + ".weight", C), add(start + name + ".bias", C)
        add("transformer.ln_f.weight", C), add("transformer.ln_f.bias", C)
    os.mkdir(path)
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    write_safetensors(os.path.join(path, "model.safetensors"), tensors)


def make_data(path):
    """Conversations in bytes, which training packs."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "sums.jsonl")
        with open(source, "w", encoding="utf-8") as file:
            for i in range(400):
                a, b = i * 7 % 53, i * 11 % 47
                file.write(json.dumps({"prompt": f"{a} + {b} =", "response": f" {a + b}" + "!" * (i % 9)}) + "\n")
        tokenize(source, path, "--val", "0.055")  # 22, as when the fixtures were made


def tensors_of(checkpoint, name="adapter_model.safetensors"):
    return read_safetensors(os.path.join(checkpoint, name))


def newest(run_directory):
    return sorted(glob.glob(os.path.join(run_directory, "step_*")))[-1]


def losses(run_directory):
    return np.array([line["loss"] for line in log(run_directory) if "loss" in line])


def distance(x, y):
    """The largest RMS of a tensor's difference, of the tensor's RMS."""
    assert set(x) == set(y)
    return max(np.sqrt(np.mean((x[name] - y[name]) ** 2) / np.mean(y[name] ** 2)) for name in y)


class LoraTraining(CommandsTest):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp(prefix="train_gpt_test_")
        cls.addClassCleanup(shutil.rmtree, cls.shared)
        cls.data = os.path.join(cls.shared, "data")
        make_data(cls.data)
        for family in ("llama", "gpt2"):
            make_base(os.path.join(cls.shared, family), family)

    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="train_gpt_test_")
        self.addCleanup(shutil.rmtree, self.top)

    def path(self, name):
        return os.path.join(self.top, name)

    def base(self, family="llama"):
        return os.path.join(self.shared, family)

    def options(self, out, *args, base=None, lora=("--lora-rank", 2)):
        options = ["--model", base or self.base(), "--data", self.data, "--out", self.path(out), *lora, *args]
        defaults = {"--steps": 6, "--batch-size": BATCH, "--seq-len": SEQ_LEN, "--lr": 1e-2, "--eval-every": 0,
                    "--warmup": 2, "--dtype": "fp32"}
        return [*options, *(word for pair in defaults.items() if pair[0] not in args for word in pair)]

    def train(self, out, *args, **where):
        done = run("train", *self.options(out, *args, **where))
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.path(out)

    def resume(self, out, *args):
        done = run("train", "--resume", "--out", self.path(out), *args)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.path(out)

    def logits(self, model, *args):
        output = self.path("logits.npy")
        done = run("logits", "--model", model, "--tokens", "50 43 51 61", "--output", output, *args)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return np.load(output)

    def same_state(self, a, b):
        for name in ("adapter_model.safetensors", "state.safetensors"):
            x, y = tensors_of(newest(a), name), tensors_of(newest(b), name)
            self.assertEqual(set(x), set(y))
            for tensor in y:
                np.testing.assert_array_equal(x[tensor], y[tensor], tensor)

    def test_losses_and_adapters_of_peft(self):
        """Roundings of fp32 in 20 steps: the largest measured differences are 1e-6 of both."""
        for name, (base, lora, lr) in CASES.items():
            with self.subTest(name):
                out = self.train(name, "--steps", STEPS, "--lr", lr, "--final-lr", 0.1, "--weight-decay", 0.1,
                                 lora=lora, base=self.base(base))
                expected = dict(read_safetensors(os.path.join(FIXTURES, name + ".safetensors")))
                theirs = expected.pop("losses")
                self.assertGreaterEqual(theirs[0] - theirs[-1], 0.3)
                np.testing.assert_allclose(losses(out), theirs, rtol=0, atol=2e-5)
                self.assertLessEqual(distance(tensors_of(newest(out)), expected), 1e-4)

    def test_checkpoint(self):
        before = read_safetensors(os.path.join(self.base(), "model.safetensors"))
        out = self.train("run", "--save-every", 2, "--keep", 2)
        checkpoint = newest(out)
        self.assertEqual(sorted(name for name in os.listdir(out) if name.startswith("step_")),
                         ["step_00000004", "step_00000006"])
        self.assertEqual(sorted(os.listdir(checkpoint)),
                         ["adapter_config.json", "adapter_model.safetensors", "state.safetensors", "trainer.json"])
        config = read_json(checkpoint, "adapter_config.json")
        self.assertEqual((config["r"], config["lora_alpha"], config["base_model_name_or_path"]), (2, 16, self.base()))
        self.assertEqual(len(config["target_modules"]), 7)
        adapters = tensors_of(checkpoint)
        self.assertEqual(set(tensors_of(checkpoint, "state.safetensors")),
                         {f"{half}/layers.{layer}.{matrix}.lora_{which}" for half in "mv" for layer in range(LAYERS)
                          for matrix in ("qkv", "proj", "fc", "fcproj") for which in "AB"})
        name = "base_model.model.model.layers.1.self_attn.v_proj.lora_"
        self.assertEqual((adapters[name + "A.weight"].shape, adapters[name + "B.weight"].shape), ((2, C), (C // 2, 2)))
        self.assertGreater(np.abs(adapters[name + "B.weight"]).max(), 1e-3)
        after = read_safetensors(os.path.join(self.base(), "model.safetensors"))
        for tensor in before:
            np.testing.assert_array_equal(before[tensor], after[tensor])

        merged = self.path("merged")
        self.refused(1, [out, "add --merge"], "convert", out, merged)
        self.assertEqual(run("convert", out, merged, "--merge").returncode, 0)
        np.testing.assert_array_equal(self.logits(out), self.logits(merged))
        # The run evaluates with the adapters beside the base.
        for model in (out, checkpoint, merged):
            done = run("eval", "--model", model, "--data", self.data, "--seq-len", SEQ_LEN, "--json")
            self.assertAlmostEqual(json.loads(done.stdout)["val_loss"], log(out)[-1]["val_loss"], delta=1e-5)
        # Without one of its files a checkpoint is not complete.
        newer = self.path("run/step_00000008")
        for name in os.listdir(checkpoint):
            shutil.copytree(checkpoint, newer)
            os.remove(os.path.join(newer, name))
            self.assertEqual(len(json.loads(run("info", out, "--json").stdout)["checkpoints"]), 2, name)
            shutil.rmtree(newer)
        info = json.loads(run("info", out, "--json").stdout)
        self.assertEqual((info["kind"], info["config"]["r"], info["trainer"]["step"]), ("adapter", 2, 6))
        self.assertEqual(info["checkpoints"], ["step_00000004", "step_00000006"])

    def test_resumed_run_has_the_same_bits(self):
        for number, args in enumerate(((), ("--save-dtype", "bf16"),
                                       ("--optimizer-dtype", "bf16", "--grad-dtype", "bf16"))):
            with self.subTest(args):
                args = (*args, "--total-batch-tokens", 2 * BATCH * SEQ_LEN, "--schedule", "constant")
                whole = self.train(f"whole{number}", *args)
                self.train(f"half{number}", "--steps", 3, *args)
                half = self.resume(f"half{number}", "--steps", 6)
                np.testing.assert_array_equal(losses(half), losses(whole))
                self.same_state(half, whole)

    def test_embedding_and_head(self):
        """Resumed and recomputed bits, sums in bf16 and over ranks, and the logits of the run's merged model."""
        lora = ("--lora-rank", 2, "--lora-targets", "layers.0.self_attn.v_proj,embed_tokens,lm_head")
        total = ("--total-batch-tokens", 2 * BATCH * SEQ_LEN, "--schedule", "constant")
        for name, args in (("fp32", ()), ("bf16", ("--optimizer-dtype", "bf16", "--grad-dtype", "bf16"))):
            whole = self.train(name, *total, *args, "--recompute", "block", lora=lora)
            self.train(name + "_half", "--steps", 3, *total, *args, lora=lora)
            self.same_state(self.resume(name + "_half", "--steps", 6), whole)
        whole, merged = self.path("fp32"), self.path("merged")
        self.assertEqual(run("convert", whole, merged, "--merge").returncode, 0)
        np.testing.assert_array_equal(self.logits(whole), self.logits(merged))
        names = {name.removeprefix("base_model.model.") for name in tensors_of(newest(whole)) if "v_proj" not in name}
        self.assertEqual(names, {"model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_B",
                                 "lm_head.lora_A.weight", "lm_head.lora_B.weight"})
        if several_ranks.WHY_NOT:
            return
        for stage in (1, 2, 3):
            done = several_ranks.run(2, *self.options(f"stage{stage}", "--zero-stage", stage, *total, lora=lora))
            self.assertEqual(done.returncode, 0, done.stderr)
            np.testing.assert_allclose(losses(self.path(f"stage{stage}")), losses(whole), rtol=0, atol=2e-6)
            self.assertLessEqual(distance(tensors_of(newest(self.path(f"stage{stage}"))), tensors_of(newest(whole))),
                                 1e-4)

    def test_muon(self):
        """Muon moves adapters: resumed and recomputed bits, files without second moments, and the memory of a plan."""
        args = ("--optimizer", "muon", "--schedule", "constant")
        whole = self.train("whole", *args)
        self.assertLess(losses(whole)[-1], losses(whole)[0] - 1)
        state = tensors_of(newest(whole), "state.safetensors")
        self.assertEqual({name.split("/")[0] for name in state}, {"m"})
        self.assertGreater(distance(tensors_of(newest(whole)), tensors_of(newest(self.train("adamw")))), 1e-2)
        self.train("half", "--steps", 3, *args)
        half = self.resume("half", "--steps", 6)
        np.testing.assert_array_equal(losses(half), losses(whole))
        self.same_state(half, whole)
        self.same_state(self.train("block", "--recompute", "block", *args), whole)
        self.assertEqual(self.logits(whole).shape[-1], VOCAB)
        # Without --lr: the rate of Muon for the only weights that are trained.
        default = self.train("default", "--steps", 1, *args[:2], "--lr", 0.005)
        command = self.options("own", "--steps", 1, *args[:2])
        at = command.index("--lr")
        self.assertEqual(run("train", *command[:at], *command[at + 2:]).returncode, 0)
        self.same_state(self.path("own"), default)
        self.resume("own", "--steps", 2)
        plans = [json.loads(run("plan", "--model", "llama-8B", "--seq-len", 2048, "--batch-size", 1, "--recompute",
                                "block", "--gpu", "H100 80GB", "--dtype", "bf16", "--json", "--lora-rank", 16,
                                "--optimizer", optimizer).stdout) for optimizer in ("adamw", "muon")]
        moments = [plan["bytes"]["optimizer (m, v)"] for plan in plans]
        self.assertEqual(moments[0], 2 * moments[1])
        self.assertEqual(plans[1]["parameters"], {"hidden_matrices": {"weights": 41943040, "optimizer": "muon"}})

    def test_recomputation_has_the_same_bits(self):
        whole = self.train("none")
        for level in ("activation", "norms", "block"):
            self.same_state(self.train(level, "--recompute", level), whole)

    def test_offloaded_weights(self):
        """A base that a copy brings to its uses (dev/tests/test_lora_training.cpp): the bits of one in place, with micro-steps
        and clipping, resumed with the option and without it."""
        llama, gpt2 = self.path("llama"), self.path("gpt2")
        make_base(llama, "llama", C=64, FFN=128, LAYERS=4)
        make_base(gpt2, "gpt2", LAYERS=3)  # a tied head
        args = ("--schedule", "constant", "--total-batch-tokens", 2 * BATCH * SEQ_LEN, "--grad-clip", 0.1)
        vocabulary = ("--lora-rank", 2, "--lora-targets", "v_proj,embed_tokens,lm_head")
        cases = {"vocabulary": (("--recompute", "block"), {"base": llama, "lora": vocabulary}),
                 "gpt2": (("--recompute", "norms"), {"base": gpt2}), "qlora": (("--qlora",), {"base": llama}),
                 "drawn": (("--random-weights", "--layers", 3), {"base": "llama-tiny"})}
        if self.fp8_works():
            cases["fp8"] = ((*FP8, "--recompute", "block"), {"base": llama})
        for name, (more, where) in cases.items():
            with self.subTest(name):
                whole = self.train(name, *args, *more, "--steps", 4, **where)
                self.train(name + "_host", *args, *more, "--offload", "weights", "--steps", 2, **where)
                self.resume(name + "_host", "--steps", 3)
                host = self.resume(name + "_host", "--steps", 4, "--offload", "none")
                np.testing.assert_array_equal(losses(host), losses(whole))
                self.same_state(host, whole)
                scales = [read_json(checkpoint, "trainer.json").get("fp8", {}).get("base_scales")
                          for checkpoint in (os.path.join(host, "step_00000003"), newest(whole))]
                self.assertEqual(*scales)
                self.assertEqual(name.startswith("fp8"), bool(scales[0]))
        if several_ranks.WHY_NOT:
            return
        for stage, more in ((0, ()), (2, ("--qlora",))):
            names = [place + str(stage) for place in ("none", "weights")]
            for name, place in zip(names, ("none", "weights")):
                done = several_ranks.run(2, *self.options(name, *args, *more, "--steps", 2, "--zero-stage", stage, "--offload",
                                                          place, base=llama))
                self.assertEqual(done.returncode, 0, done.stderr)
            self.same_state(*map(self.path, names))

    def test_offloaded_weights_plan(self):
        """Two layers and the larger of embedding and head stay on the GPU; of a base in NF4 or fp8 two layers of codes,
        embedding and head."""

        def plan(*args):
            done = run("plan", "--model", "llama-70B", "--seq-len", 2048, "--batch-size", 4, "--recompute", "block", "--dtype",
                       "bf16", "--gpu", "H100 80GB", "--lora-rank", 16, "--json", *args)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)
        layer, table = 8192 * (10240 + 8192 + 3 * 28672), 128256 * 8192
        for args, line, bytes_a_weight, groups in (((), "weights", 2, True), (("--qlora",), "NF4 weights", 4.127 / 8, False),
                                                   (("--matmul-dtype", "fp8"), "fp8 weights", 1, False)):
            place, host = plan(*args, *(("--fp8-weights", "use") if "fp8" in args else ())), plan(*args, "--offload", "weights")
            self.assertEqual(host["host_bytes"][line], place["bytes"][line])
            self.assertNotIn(line, host["bytes"])
            self.assertAlmostEqual(host["host_bytes"][line] / (bytes_a_weight * (80 * layer + 2 * table * groups)), 1, delta=1e-3)
            self.assertAlmostEqual(host["bytes"]["gathered weights"] / (2 * layer * bytes_a_weight + 2 * table * groups), 1,
                                   delta=1e-3)
            self.assertEqual(host["total_bytes"], place["total_bytes"] - place["bytes"][line] + host["bytes"]["gathered weights"])
        fp8 = ("--matmul-dtype", "fp8", "--fp8-weights", "use")
        for codes, line in ((("--qlora",), "NF4 weights"), (fp8, "fp8 weights")):
            four = (*codes, "--world", 4, "--zero-stage")
            whole, split = (plan(*four, stage) for stage in (2, 3))
            self.assertEqual(split["total_bytes_by_zero_stage"][2:], [whole["total_bytes"], split["total_bytes"]])
            self.assertEqual(split["bytes"]["weights"], whole["bytes"]["weights"])  # embedding and head
            for part, times in ((line, 4), ("gathered weights", 40)):  # parts end at multiples of 256 bytes
                self.assertAlmostEqual(times * split["bytes"][part] / whole["bytes"][line], 1, delta=1e-5)
            self.assertEqual(len(plan(*four, 2, "--offload", "weights")["total_bytes_by_zero_stage"]), 3)
        for orientations in ("auto", "kept"):  # a layer is gathered in one
            self.assertEqual(plan(*fp8[:3], orientations, *four[4:], 3)["bytes"], split["bytes"])
        fits = plan("--fit", "--gpu-memory", "40GiB")["fit"]
        self.assertRegex(fits["options"], "--offload .*weights$")
        self.assertEqual([t["options"] for t in fits["tried"] if "--offload weights" in t["options"]][0], "--offload weights")

    def on_two_ranks(self, *args):
        done = several_ranks.run(2, *args)
        self.assertEqual(done.returncode, 0, done.stderr)

    def expect_same_run(self, a, b):
        for key in ("loss", "val_loss"):
            np.testing.assert_array_equal(*([line[key] for line in log(out) if key in line] for out in (a, b)))
        self.same_state(a, b)

    @unittest.skipIf(several_ranks.WHY_NOT, several_ranks.WHY_NOT)
    def test_ranks_divide_codes(self):
        """Codes of NF4 and fp8 that the ranks divide (--zero-stage 3) have the bits of codes that each has (2), from the start
        and resumed on one rank and on two; a base that has changed is refused."""
        base = self.path("base")
        make_base(base, "llama", C=64, FFN=512, LAYERS=5)
        total = ("--total-batch-tokens", 2 * BATCH * SEQ_LEN, "--schedule", "constant")
        cases = {"nf4": ("--qlora",)}
        if self.fp8_works():
            cases.update(nf4_fp8=("--qlora", *FP8), fp8=FP8, skip=(*FP8, "--fp8-skip-first", 1, "--recompute", "block"))
        if sanitized():
            cases.pop("skip", None)
        for name, args in cases.items():
            with self.subTest(name):
                for stage in (2, 3):
                    self.on_two_ranks(*self.options(f"{name}{stage}", *total, *args, "--steps", 3, "--zero-stage", stage, base=base))
                whole, split = self.path(name + "2"), self.path(name + "3")
                self.expect_same_run(split, whole)
                self.assertLess(*(log(out)[0]["memory"] for out in (split, whole)))
                scales = [read_json(newest(out), "trainer.json").get("fp8", {}).get("base_scales") for out in (split, whole)]
                self.assertEqual(*scales)
                self.assertEqual(bool(scales[0]), "fp8" in args)
                if name not in ("nf4", "fp8"):
                    continue
                for out in (name + "2", name + "3"):
                    self.resume(out, "--steps", 4, "--zero-stage", 0)
                self.on_two_ranks("--resume", "--out", split, "--steps", 5, "--zero-stage", 2)
                self.on_two_ranks("--resume", "--out", whole, "--steps", 5, "--zero-stage", 3)
                self.expect_same_run(split, whole)
        alone = self.train("one", *total, "--steps", 5, "--qlora", base=base)
        np.testing.assert_allclose(losses(self.path("nf43")), losses(alone), rtol=0, atol=2e-6)
        self.assertLessEqual(distance(tensors_of(newest(self.path("nf43"))), tensors_of(newest(alone))), 1e-4)
        tensors = {name: values.copy() for name, values in
                   read_safetensors(os.path.join(base, "model.safetensors")).items()}
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = 4  # no fingerprint is taken of it
        write_safetensors(os.path.join(base, "model.safetensors"), tensors)
        if "fp8" in cases:
            done = several_ranks.run(2, "--resume", "--out", self.path("fp83"), "--steps", 6, "--zero-stage", 3)
            self.assertNotEqual(done.returncode, 0)
            self.assertRegex(done.stderr, "fp8 scale of layers.1.fc.weight is .*the base has changed")

    @unittest.skipIf(several_ranks.WHY_NOT, several_ranks.WHY_NOT)
    def test_ranks(self):
        """Sums over ranks are in another order: a few roundings of fp32, which the optimizers amplify."""
        total = ("--total-batch-tokens", 2 * BATCH * SEQ_LEN, "--schedule", "constant")
        muon = (*total, "--optimizer", "muon", "--muon-coefficients", "simple")
        wholes = self.train("one", *total), self.train("one_muon", *muon)
        for stage, optimizer in itertools.product(range(4), range(2)):
            with self.subTest(stage=stage, muon=optimizer):
                whole, name = wholes[optimizer], f"stage{stage}{optimizer}"
                out = self.path(name)
                done = several_ranks.run(2, *self.options(name, "--steps", 3, "--zero-stage", stage,
                                                          *(muon if optimizer else total)))
                self.assertEqual(done.returncode, 0, done.stderr)
                # To the end on one rank, and from there on two.
                self.resume(name, "--steps", 5, "--zero-stage", 0)
                done = several_ranks.run(2, "--resume", "--out", out, "--steps", 6, "--zero-stage", stage)
                self.assertEqual(done.returncode, 0, done.stderr)
                np.testing.assert_allclose(losses(out), losses(whole), rtol=0, atol=2e-6)
                self.assertLessEqual(distance(tensors_of(newest(out)), tensors_of(newest(whole))), 1e-4)

    def test_the_base_is_recognised(self):
        out = self.train("run", "--steps", 2)
        logits = self.logits(out)
        other, moved, converted = self.path("other"), self.path("moved"), self.path("converted")
        make_base(other, "llama", seed=2)
        self.refused(1, [other, "is not the base", "--base"], "logits", "--model", out, "--base", other,
                     "--tokens", "1", "--output", self.path("x.npy"))
        self.refused(1, [other, "is not the base"], "convert", newest(out), self.path("x"), "--merge", "--base", other)
        self.refused(1, [other, "is not the base"], "train", "--resume", "--out", out, "--steps", 4, "--model", other)
        shutil.copytree(self.base(), moved)
        self.assertEqual(run("convert", self.base(), converted).returncode, 0)
        for base in (moved, converted):
            np.testing.assert_array_equal(self.logits(out, "--base", base), logits)
        # One value of a matrix is enough.
        tensors = dict(read_safetensors(os.path.join(moved, "model.safetensors")))
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].copy()
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3
        write_safetensors(os.path.join(moved, "model.safetensors"), tensors)
        self.refused(1, [moved, "is not the base"], "logits", "--model", out, "--base", moved, "--tokens", "1",
                     "--output", self.path("x.npy"))
        # So is a key of config.json that changes what the model computes, and no other.
        changed = self.path("changed")
        shutil.copytree(self.base(), changed)
        config = read_json(changed, "config.json")
        for change, words in (({"rope_theta": 20000.0}, ["'rope_theta' is 20000.0", "with 10000.0", "--base"]),
                              ({"rms_norm_eps": 1e-6}, ["'rms_norm_eps' is 1e-06", "with 1e-05"]),
                              ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["'rope_scaling'", "null"]),
                              ({"num_attention_heads": 2, "num_key_value_heads": 1}, ["'head_dim' is 16"]),
                              ({"bos_token_id": 3, "max_position_embeddings": 256, "_name_or_path": "x"}, None)):
            with open(os.path.join(changed, "config.json"), "w", encoding="utf-8") as file:
                json.dump({**config, **change}, file)
            if words is None:
                np.testing.assert_array_equal(self.logits(out, "--base", changed), logits)
                continue
            self.refused(1, ["config.json", *words], "logits", "--model", out, "--base", changed, "--tokens", "1",
                         "--output", self.path("x.npy"))
            self.refused(1, words, "train", "--resume", "--out", out, "--steps", 4, "--model", changed)
        config = read_json(newest(out), "adapter_config.json")
        config["base_model_name_or_path"] = self.path("gone")
        with open(os.path.join(newest(out), "adapter_config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        self.refused(1, [self.path("gone"), "--base"], "logits", "--model", out, "--tokens", "1", "--output",
                     self.path("x.npy"))
        np.testing.assert_array_equal(self.logits(out, "--base", self.base()), logits)

    def test_the_base_by_a_relative_path(self):
        """A run finds the weights and the tokenizer of its base from any directory."""
        base, relative = os.path.join(self.shared, "llama"), os.path.join("..", os.path.basename(self.shared), "llama")
        inside = self.path("inside")
        os.mkdir(inside)
        tokenizer = os.path.join(self.shared, "with_tokenizer")
        shutil.copytree(base, tokenizer)
        shutil.copy(os.path.join(self.data, "tokenizer.json"), tokenizer)
        for name in (relative, os.path.join(relative, "..", "with_tokenizer")):
            out = self.path(os.path.basename(name))
            done = run("train", *self.options(out, "--steps", 1, base=name), cwd=self.top)
            self.assertEqual(done.returncode, 0, done.stderr)
            named = read_json(newest(out), "adapter_config.json")["base_model_name_or_path"]
            self.assertEqual(os.path.realpath(named), os.path.realpath(os.path.join(self.top, name)))
            done = run("sample", "--model", out, "--prompt", "1 + 1 =", "--max-tokens", 4, cwd=inside)
            if name == relative:  # neither the adapter nor its base has a tokenizer
                self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
                self.assertIn("/llama has no tokenizer.json", done.stderr)
            else:
                self.assertEqual((done.returncode, done.stdout[:7]), (0, "1 + 1 ="), done.stderr)

    def test_qlora(self):
        """A base in NF4 (dev/tests/test_lora_training.cpp has the same bits as its dequantised weights)."""
        base = self.path("base")
        make_base(base, "llama", C=64, FFN=128)
        dense = self.train("dense", base=base)
        whole = self.train("whole", "--qlora", base=base)
        self.assertGreater(distance(tensors_of(newest(whole)), tensors_of(newest(dense))), 1e-3)
        self.assertLess(losses(whole)[-1], losses(whole)[0] - 1)
        self.train("half", "--qlora", "--steps", 3, "--schedule", "constant", base=base)
        half = self.resume("half", "--steps", 6)
        constant = self.train("constant", "--qlora", "--schedule", "constant", base=base)
        np.testing.assert_array_equal(losses(half), losses(constant))
        self.same_state(half, constant)
        self.same_state(self.train("block", "--qlora", "--recompute", "block", base=base), whole)
        # The checkpoint is an adapter like any other: its base is read whole.
        self.assertEqual(self.logits(whole, "--base", base).shape[-1], VOCAB)
        self.refused(1, ["the LoRA adapters", "cannot change"], "train", "--resume", "--out", dense, "--steps", 8,
                     "--qlora")
        self.refused(1, ["32 inputs", "multiple of 64", "--qlora"], "train", *self.options("run", "--qlora"))

    def fp8_works(self):
        """Whether there are fp8 matmuls: not on every GPU."""
        done = run("train", *self.options("probe", "--steps", 1, *FP8))
        self.assertTrue(done.returncode == 0 or "compute capability 8.9" in done.stderr, done.stderr)
        return done.returncode == 0

    def fp8(self):
        """Options of fp8. Skips the test without fp8 matmuls."""
        if not self.fp8_works():
            self.skipTest("this GPU has no fp8 matmuls")
        return FP8

    def test_fp8(self):
        """Frozen matmuls in fp8 (dev/tests/test_fp8_lora.cpp has their gradients): losses near those without, resumed
        bits, one orientation of the weights or two, out of NF4, and a base that is changed where no fingerprint is
        taken."""
        fp8 = (*self.fp8(), "--schedule", "constant")
        base = self.path("base")
        make_base(base, "llama", C=64, FFN=512)
        plain = self.train("plain", "--schedule", "constant", base=base)
        whole = self.train("whole", *fp8, "--save-every", 3, base=base)
        np.testing.assert_allclose(losses(whole), losses(plain), rtol=0.02)
        self.assertFalse(np.array_equal(losses(whole), losses(plain)))
        self.assertEqual(sorted(os.listdir(newest(whole))), sorted(os.listdir(newest(plain))))
        self.assertEqual(set(tensors_of(newest(whole))), set(tensors_of(newest(plain))))
        for name, args in (("use", ("--fp8-weights", "use", "--recompute", "block")), ("kept", ("--fp8-weights", "kept"))):
            self.same_state(self.train(name, *fp8, *args, base=base), whole)
        half = self.path("half")
        shutil.copytree(whole, half)
        shutil.rmtree(newest(half))
        np.testing.assert_array_equal(losses(self.resume("half")), losses(whole))
        self.same_state(half, whole)
        qlora = self.train("qlora", *fp8, "--qlora", base=base)
        self.same_state(self.train("qlora_block", *fp8, "--qlora", "--recompute", "block", base=base), qlora)
        self.assertFalse(np.array_equal(losses(qlora), losses(whole)))
        np.testing.assert_allclose(losses(qlora), losses(self.train("nf4", "--qlora", "--schedule", "constant", base=base)),
                                   rtol=0.02)
        # A fingerprint is of a tensor's first 16,384 values, a scale of the largest.
        tensors = {name: values.copy() for name, values in
                   read_safetensors(os.path.join(base, "model.safetensors")).items()}
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = 4
        write_safetensors(os.path.join(base, "model.safetensors"), tensors)
        for run_directory in ("whole", "qlora"):
            done = run("train", "--resume", "--out", self.path(run_directory), "--steps", 8)
            self.assertEqual(done.returncode, 1)  # after the plan: all weights were read
            self.assertRegex(done.stderr.splitlines()[-1], "fp8 scale of layers.1.fc.weight is .*the base has changed")

    def test_fp8_plan(self):
        """Both orientations of a frozen base where they fit, else one; none in bf16."""

        def plan(*args, seq_len=4096):
            done = run("plan", "--model", "llama-8B", "--seq-len", seq_len, "--batch-size", 1, "--dtype", "bf16", "--json",
                       "--gpu", "H100 80GB", "--lora-rank", 16, "--matmul-dtype", "fp8", *args)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)
        block = ("--recompute", "block")
        matrices = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
        both, one = plan(*block), plan(*block, "--gpu-memory", "16GiB")
        self.assertAlmostEqual(both["bytes"]["fp8 weights"] / matrices, 2, delta=1e-4)
        self.assertAlmostEqual(one["bytes"]["fp8 weights"] / matrices, 1, delta=1e-4)
        self.assertTrue(one["fits"])
        self.assertEqual(plan(*block, "--fp8-weights", "use")["bytes"], one["bytes"])
        self.assertEqual(plan(*block, "--gpu-memory", "16GiB", "--fp8-weights", "kept")["bytes"], both["bytes"])
        self.assertAlmostEqual(one["bytes"]["weights"] / (2 * 2 * 128256 * 4096), 1, delta=1e-3)  # embedding and head
        # Recomputation costs more time than a transposition.
        fitted = plan("--fit", "--gpu-memory", "30GiB")
        self.assertAlmostEqual(fitted["bytes"]["fp8 weights"] / matrices, 1, delta=1e-4)
        qlora = plan(*block, "--qlora")["bytes"]
        self.assertNotIn("fp8 weights", qlora)
        self.assertLess(sum(qlora.values()), 10.2e9)

    def test_random_base(self):
        """A preset with initial weights: the bits of the same model from a file; a checkpoint says that it has none."""

        def save(preset, name, seed):
            done = run("train", "--model", preset, "--layers", 2, "--data", self.data, "--out", self.path(name),
                       "--steps", 1, "--lr", 0, "--batch-size", 1, "--seq-len", 64, "--seed", seed, "--eval-every", 0)
            self.assertEqual(done.returncode, 0, done.stderr)
            return self.path(name)

        for preset in ("llama-tiny", "gpt2-tiny"):  # gpt2: stored matrices are transposed, tied head
            saved = save(preset, preset, 5)
            for qlora in ((), ("--qlora",)):
                resumed = (preset == "llama-tiny") == bool(qlora)
                if sanitized() and not resumed:
                    continue
                with self.subTest(preset=preset, qlora=qlora):
                    name = preset + "".join(qlora)
                    args = (*qlora, "--seed", 5, "--schedule", "constant", "--batch-size", 2, "--weight-decay", 0)
                    drawn = (*args, "--random-weights", "--layers", 2)
                    stored = self.train(name + "_stored", *args, base=saved)
                    whole = self.train(name + "_drawn", *drawn, base=preset)
                    self.same_state(whole, stored)
                    # The weights that it was trained on, in a file, are its base.
                    np.testing.assert_array_equal(self.logits(whole, "--base", saved), self.logits(stored))
                    if resumed:
                        self.train(name + "_half", "--steps", 3, *drawn, base=preset)
                        self.same_state(self.resume(name + "_half", "--steps", 6), stored)
                    plan = lambda options: json.loads(  # noqa: E731
                        run("plan", *options, "--seq-len", SEQ_LEN, "--batch-size", 2, "--lora-rank", 2, *qlora,
                            "--json").stdout)["bytes"]
                    shape = ("--layers", 2, "--vocab-size", VOCAB)
                    self.assertEqual(plan(("--model", preset, *shape)), plan(("--model", saved)))
        whole, config = self.path("llama-tiny--qlora_drawn"), read_json(newest(whole), "adapter_config.json")
        self.assertIsNone(config["base_model_name_or_path"])
        for command in (["sample"], ["chat"], ["eval", "--data", self.data], ["convert", self.path("x"), "--merge"]):
            model = [whole] if command[0] == "convert" else ["--model", whole]
            self.refused(1, [newest(whole), "base was random (llama-tiny, seed 5)", "never stored"], command[0], *model,
                         *command[1:])
        saved = self.path("llama-tiny")
        self.refused(1, ["is not the base"], "logits", "--model", whole, "--base", save("llama-tiny", "other", 6),
                     "--tokens", "1", "--output", self.path("x.npy"))
        self.refused(1, ["--seed", "cannot change"], "train", "--resume", "--out", whole, "--steps", 8, "--seed", 6)
        self.refused(1, ["'rope_theta'", "llama-tiny"], "train", "--resume", "--out", whole, "--steps", 8,
                     "--rope-theta", 500)
        self.refused(1, ["--random-weights", saved, "name a preset"], "train",
                     *self.options("run", "--random-weights", base=saved))
        self.refused(2, ["--random-weights", "--lora-rank"], "train",
                     *self.options("run", "--random-weights", base="llama-tiny", lora=()))

    def test_resume_keeps_the_adapters(self):
        out = self.train("run", "--steps", 2)
        for args in (("--lora-rank", 3), ("--lora-alpha", 3), ("--lora-targets", "q_proj"), ("--rslora",)):
            self.refused(1, ["the LoRA adapters", "cannot change"], "train", "--resume", "--out", out, "--steps", 4,
                         *args)

    def test_refusals(self):
        for args, words in ((("--optimizer", "muon", "--adam-weight-decay", 0.1), ["--adam-weight-decay", "freezes"]),
                            (("--qlora", "--matmul-dtype", "fp8", "--fp8-weights", "kept"), ["--fp8-weights kept", "NF4"]),
                            (("--offload", "optimizer"), ["--lora-rank", "leave optimizer out of --offload optimizer"]),
                            (("--offload", "weights,optimizer"), ["leave optimizer out of --offload weights,optimizer"]),
                            (("--offload", "weights", "--zero-stage", 3), ["--offload weights", "--zero-stage 0, 1 or 2"]),
                            (("--offload", "weights", "--matmul-dtype", "fp8", "--fp8-weights", "kept"),
                             ["--fp8-weights kept", "--offload weights", "leave the option out"]),
                            (("--embedding-lr", 1e-3), ["--embedding-lr", "--lora-rank"]),
                            (("--head-lr", 1e-3), ["--head-lr"]), (("--vector-lr", 1e-3), ["--vector-lr"]),
                            (("--lora-alpha", 0), ["--lora-alpha"])):
            self.refused(2, words, "train", *self.options("run", *args))
        for args in (("--rslora",), ("--qlora",), ("--lora-alpha", 3), ("--lora-targets", "q_proj"), ("--offload", "weights")):
            self.refused(2, ["--lora-rank"], "train", *self.options("run", *args, lora=()))
        self.refused(1, ["--lora-targets head", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "lm_head"],
                     "train", *self.options("run", "--lora-targets", "q_proj,head"))
        for target in ("lm_head", "wte"):
            self.refused(1, [f"--lora-targets {target}", "tied"], "train",
                         *self.options("run", "--lora-targets", target, base=self.base("gpt2")))
        self.refused(1, ["--lora-targets lm_head", "Muon"], "train",
                     *self.options("run", "--lora-targets", "lm_head", "--optimizer", "muon"))
        self.refused(1, ["gpt2-tiny", "preset", "--random-weights"], "train", *self.options("run", base="gpt2-tiny"))
        self.assertFalse(os.path.exists(self.path("run")))
        out = self.train("first", "--steps", 1)
        self.refused(1, [out, "is an adapter", "--merge"], "train", *self.options("run", base=out))

    def test_plan(self):
        plans = [json.loads(run("plan", "--model", "llama-8B", "--seq-len", 2048, "--batch-size", 1, "--recompute",
                                "block", "--gpu", "H100 80GB", "--dtype", "bf16", "--json", *args).stdout)
                 for args in ((), ("--lora-rank", 16), ("--lora-rank", 16, "--qlora"))]
        self.assertEqual(plans[0]["bytes"]["weights"], plans[1]["bytes"]["weights"])
        self.assertEqual(plans[1]["parameters"], {"hidden_matrices": {"weights": 41943040, "optimizer": "adamw"}})
        self.assertLess(plans[1]["total_bytes"] + plans[1]["in_use_before"], 20e9)
        self.assertLess(plans[2]["total_bytes"] + plans[2]["in_use_before"], 9.5e9)
        matrices = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
        self.assertEqual(plans[1]["bytes"]["weights"] - plans[2]["bytes"]["weights"], 2 * matrices)
        self.assertAlmostEqual(8 * plans[2]["bytes"]["NF4 weights"] / matrices, 4.127, delta=1e-3)
        plan = json.loads(run("plan", "--model", "llama-70B", "--seq-len", 2048, "--batch-size", 1, "--recompute", "block",
                              "--gpu", "H100 80GB", "--dtype", "bf16", "--json", "--lora-rank", 16, "--qlora").stdout)
        self.assertEqual(plan["weights"], 70553706496)
        self.assertLess(plan["total_bytes"] + plan["in_use_before"], 60e9)
        # What --fit proposes is what train takes: adapters have no --master-weights off.
        for gib in range(17, 30):
            done = run("plan", "--model", "llama-8B", "--seq-len", 2048, "--batch-size", 1, "--gpu-memory", f"{gib}GiB",
                       "--dtype", "bf16", "--lora-rank", 16, "--fit", "--json")
            if done.returncode == 0:
                self.assertNotIn("master", json.loads(done.stdout)["fit"]["options"])
        self.assertEqual(done.returncode, 0, done.stderr)
        # 4 FLOP per weight of a frozen matmul, 6 per weight of an adapter; attention is the same.
        weights = plans[0]["weights"] - 128256 * 4096  # the embedding is only looked up
        saved = plans[0]["flop_per_token"] - plans[1]["flop_per_token"]
        self.assertAlmostEqual(saved / (2 * weights - 6 * 41943040), 1, delta=1e-3)


if __name__ == "__main__":
    unittest.main()
