"""GGUF files as models: what the commands make of them (TRAIN_GPT names the driver), compared with the Python package gguf
and with model directories. scripts/test_import*.py have more files: config, keys, tokenizers and damaged headers."""
import json
import os
import shutil
import struct
import sys
import tempfile
import unittest

import numpy as np
from harness import ROOT, CommandsTest, make_data, run

sys.path.insert(0, os.path.join(ROOT, "scripts"))
from hf_directory import write_safetensors  # noqa: E402
import test_import  # noqa: E402
import test_import_families  # noqa: E402
import tokenizer_json  # noqa: E402
from test_import import fixture_tokenizer, missing, read_json, read_safetensors  # noqa: E402

FAMILIES = test_import_families.GgufFamiliesTest.FAMILIES

MODELS = os.path.join(ROOT, "dev", "fixtures", "models")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
TOKENS = "1 5 7 9 20 3 2 1"


def finite_blocks(rng, kind, shape):
    """Random blocks with scales that are finite: [rows, bytes of a row]."""
    import gguf

    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // size, width), np.uint8)
    scales = {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0]}.get(kind.name, [0, 2])
    for at in scales if size > 1 else ():
        blocks[..., at:at + 2] = rng.standard_normal(blocks.shape[:2]).astype("<f2").view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(shape[0], -1)


@unittest.skipIf(missing("gguf"), missing("gguf"))
class GgufModelTest(CommandsTest):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="train_gpt_test_")
        self.addCleanup(shutil.rmtree, self.top)

    def path(self, name):
        return os.path.join(self.top, name)

    def run_ok(self, *args, said=""):
        done = run(*args)
        self.assertEqual((done.returncode, done.stderr), (0, said), args)
        return done.stdout

    def logits(self, model):
        self.run_ok("logits", "--model", model, "--tokens", TOKENS, "--output", self.path("logits.npy"))
        return np.load(self.path("logits.npy"))

    def write_family(self, family):
        """A model directory with random weights."""
        config, weights = test_import_families.family_model(family, np.random.default_rng(3))
        os.mkdir(self.path(family))
        with open(self.path(f"{family}/config.json"), "w", encoding="utf-8") as file:
            json.dump({**config, "bos_token_id": 1, "eos_token_id": 2}, file)
        tensors = [(name, x.shape, lambda x=x: x) for name, x in weights.items()]
        write_safetensors(self.path(f"{family}/model.safetensors"), tensors, "fp32")
        return self.path(family)

    def write_small(self, tokenizer=None, **config):
        """A LLaMA directory whose widths blocks of 256 divide, with weights that differ in scale from row to row."""
        rng = np.random.default_rng(5)
        config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
                  "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 320,
                  "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, **config}
        C, F, V, L = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"))
        K = C // config["num_attention_heads"] * config["num_key_value_heads"]
        shapes = {"model.embed_tokens": (V, C), "model.norm": (C,)}
        if not config["tie_word_embeddings"]:
            shapes["lm_head"] = V, C
        for layer in range(L):
            shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in {
                "self_attn.q_proj": (C, C), "self_attn.k_proj": (K, C), "self_attn.v_proj": (K, C),
                "self_attn.o_proj": (C, C), "mlp.gate_proj": (F, C), "mlp.up_proj": (F, C), "mlp.down_proj": (C, F),
                "input_layernorm": (C,), "post_attention_layernorm": (C,)}.items()})
        self.weights = {}
        for name, shape in shapes.items():
            x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-6, 3, shape[:1])).reshape(-1, *[1] * (len(shape) - 1))
            self.weights[name + ".weight"] = x.astype(np.float32)
        # Blocks that quantisers get wrong: zeros, one value, equal extremes of both signs, values that fp16 makes 0.
        odd = self.weights["model.embed_tokens.weight"]
        odd[0], odd[1], odd[2, ::2], odd[2, 1::2], odd[3] = 0, 0.7, -1.5, 1.5, odd[3] * 1e-30
        odd[4], odd[5] = 0, odd[5] * 1e-38
        odd[4, 31::32] = -3
        folder = self.path("small")
        os.mkdir(folder)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        write_safetensors(os.path.join(folder, "model.safetensors"),
                          [(name, x.shape, lambda x=x: x) for name, x in self.weights.items()], "fp32")
        if tokenizer:
            with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
                json.dump(tokenizer, file)
        return folder

    def test_every_family_comes_back_as_it_was(self):
        models = [self.write_family(family) for family in FAMILIES]
        models += [os.path.join(MODELS, name) for name in ("gpt2-fp16", "gpt2-inner-eps", "gpt2-untied", "llama-bf16",
                                                           "llama-bias-tied", "llama-mqa-head-dim", "llama-rope-linear")]
        for model in models:
            name = os.path.basename(model)
            with self.subTest(name):
                file, back = self.path(name + ".gguf"), self.path(name + "-back")
                window = name in ("mistral", "phi3")
                done = run("convert", model, file)
                self.assertEqual((done.returncode, done.stderr.count("\n")), (0, int(window)), done.stderr)
                self.run_ok("convert", file, back)
                theirs, ours = read_safetensors(model + "/model.safetensors"), read_safetensors(back + "/model.safetensors")
                self.assertEqual(theirs.keys(), ours.keys())
                for tensor, x in theirs.items():
                    vector = x.ndim == 1 or "wpe" in tensor  # fp32 in a GGUF file
                    wanted = x.astype(np.float32) if vector and x.dtype == np.float16 else x
                    if vector and x.dtype == np.uint16:
                        wanted = (x.astype(np.uint32) << 16).view(np.float32)
                    np.testing.assert_array_equal(ours[tensor], wanted, tensor)
                info = [json.loads(self.run_ok("info", path, "--json"))["config"] for path in (model, file, back)]
                self.assertEqual(info[0], info[1])
                self.assertEqual(info[0], info[2])
                np.testing.assert_array_equal(self.logits(model), self.logits(file))

    @staticmethod
    def rewrite(base, file, change):
        """A copy of a GGUF file. change(tensor) is a tensor's other data with its type; None: it stays."""
        import gguf

        reader = gguf.GGUFReader(base)
        writer = gguf.GGUFWriter(file, "llama")
        for key, field in reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        for tensor in reader.tensors:
            data, kind = change(tensor) or (tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    def test_tensor_types_are_those_of_the_package(self):
        """Random blocks of every type have the values that the package gives them, bit for bit."""
        import gguf

        model, rng = self.write_small(), np.random.default_rng(1)
        self.run_ok("convert", model, self.path("base.gguf"))
        for kind in TYPES:
            with self.subTest(kind):
                number = gguf.GGMLQuantizationType[kind]
                expected = {}

                def blocks(tensor, kind=kind, number=number, expected=expected):
                    shape = [int(n) for n in reversed(tensor.shape)]
                    if len(shape) == 1 or kind == "F32":
                        expected[tensor.name] = tensor.data
                        return None
                    blocks = (gguf.quants.quantize(tensor.data, number) if kind in ("F16", "BF16")
                              else finite_blocks(rng, number, shape))
                    expected[tensor.name] = gguf.quants.dequantize(blocks, number).reshape(shape)
                    return blocks, number
                file = self.rewrite(self.path("base.gguf"), self.path(kind + ".gguf"), blocks)
                self.run_ok("convert", file, self.path(kind), "--dtype", "fp32")
                ours = read_safetensors(self.path(kind) + "/model.safetensors")
                heads = {"q_proj": 4, "k_proj": 2}
                for name, tensor in self.names(1).items():
                    x = expected[tensor]
                    if name.split(".")[-2] in heads:
                        n = heads[name.split(".")[-2]]
                        x = x.reshape(n, x.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(x.shape)
                    np.testing.assert_array_equal(ours[name].view(np.uint32), np.ascontiguousarray(x).view(np.uint32), name)
                if kind != "F32":
                    np.testing.assert_array_equal(self.logits(file), self.logits(self.path(kind)))

    @staticmethod
    def names(layers):
        import gguf

        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
        parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                 "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
        all_names = ["model.embed_tokens", "model.norm", "lm_head"]
        all_names += [f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts]
        return {name + ".weight": names.get_name(name) + ".weight" for name in all_names}

    def test_quantisers_are_those_of_the_package(self):
        import gguf

        model = self.write_small()
        for weights, kind in ("int8", "Q8_0"), ("int4", "Q4_0"), ("fp16", "F16"), ("bf16", "BF16"), ("fp32", "F32"):
            with self.subTest(weights):
                file = self.path(weights + ".gguf")
                self.run_ok("convert", model, file, "--weights", weights)
                tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
                self.assertEqual(len(tensors), len(self.weights))
                counts = {kind: 9, "F32": 3} if kind != "F32" else {"F32": 12}
                self.assertEqual(json.loads(self.run_ok("info", file, "--json"))["tensors"], counts)
                for name, tensor in self.names(1).items():
                    found, x = tensors[tensor], self.weights[name]
                    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
                    if heads:
                        x = x.reshape(heads, 2, x.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)
                    wanted = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
                    self.assertEqual(found.tensor_type, wanted, name)
                    with np.errstate(all="ignore"):
                        blocks = gguf.quants.quantize(np.ascontiguousarray(x), wanted)
                    got = np.array(found.data).view(np.uint8)
                    if name == "model.embed_tokens.weight":  # 1/d of its row 5 overflows, and the package then has NaN
                        np.testing.assert_array_equal(gguf.quants.dequantize(found.data[5:6], wanted),
                                                      0 if kind in ("Q8_0", "Q4_0", "F16") else found.data.reshape(320, -1)[5:6].view(np.float32)
                                                      if kind == "F32" else gguf.quants.dequantize(blocks.reshape(320, -1)[5:6], wanted))
                        got, blocks = np.delete(got.reshape(320, -1), 5, 0), np.delete(blocks.view(np.uint8).reshape(320, -1), 5, 0)
                    np.testing.assert_array_equal(got, blocks.view(np.uint8), name)
                self.logits(file)

    def test_a_file_of_one_packed_type_runs_in_its_codes(self):
        """As a packed directory with the same codes, to the bit, also where the quantiser would choose others: codes halved
        in both need twice the scale in no block."""
        data = make_data(self.top)
        model = self.write_small(num_hidden_layers=2, vocab_size=257, eos_token_id=256)
        shutil.copy(os.path.join(data, "tokenizer.json"), model)
        for packing in "int8", "int4":
            file, folder = self.path(packing + ".gguf"), self.path(packing)
            self.run_ok("convert", model, file, "--weights", packing)
            self.run_ok("convert", model, folder, "--weights", packing)

            def sampled(of, *args):
                done = run("sample", "--model", of, "--max-tokens", 20, "--seed", 3, "--num-samples", 2, "--ignore-eos",
                           "--logprobs", "--json", *args)
                self.assertEqual(done.returncode, 0, done.stderr)
                return json.loads(done.stdout)["samples"]
            untouched = sampled(folder)
            self.halve_codes(file, folder, packing)
            halved = sampled(folder)
            self.assertNotEqual(halved, untouched)
            self.assertEqual(sampled(file), halved)
            self.assertEqual(sampled(file, "--weights", packing), halved)

    def test_a_head_of_another_type_is_rounded_to_int8(self):
        """llama-quantize writes Q4_0 with a head, or a tied embedding, in Q6_K. The same with the head that the package
        rounds to Q8_0, to the bit; blocks of another type than Q4_0 are dequantised as before."""
        import gguf

        q6, q8 = gguf.GGMLQuantizationType.Q6_K, gguf.GGMLQuantizationType.Q8_0
        rng, V = np.random.default_rng(7), 500
        for tied, name in (False, "output.weight"), (True, "token_embd.weight"):
            with self.subTest(name):
                model = self.write_small(fixture_tokenizer("gpt2")["tokenizer"], vocab_size=V, tie_word_embeddings=tied)
                base = self.path(f"{name}.gguf")
                self.run_ok("convert", model, base, "--weights", "int4")
                shutil.rmtree(model)
                six = finite_blocks(rng, q6, (V, 256))
                values = gguf.quants.dequantize(six, q6)
                eight = gguf.quants.quantize(values, q8)

                def head(blocks, kind, name=name):
                    return lambda tensor: (blocks, kind) if tensor.name == name else None
                mixed = self.rewrite(base, self.path(f"6_{name}.gguf"), head(six, q6))
                rounded = self.rewrite(base, self.path(f"8_{name}.gguf"), head(eight, q8))
                args = ["--max-tokens", 20, "--seed", 3, "--ignore-eos", "--logprobs", "--json"]
                line = f"{mixed}: tensor {name} is Q6_K; it is rounded to int8\n"
                sampled = json.loads(self.run_ok("sample", "--model", mixed, *args, said=line))["samples"]
                self.assertEqual(json.loads(self.run_ok("sample", "--model", rounded, *args))["samples"], sampled)
                self.run_ok("sample", "--model", mixed, "--weights", "int8", *args)  # what is asked for is not told
                other = self.rewrite(mixed, self.path(f"other_{name}.gguf"), head(
                    finite_blocks(rng, q6, (512, 256)), q6, "blk.0.ffn_up.weight"))
                plan = [self.run_ok("plan", "--model", file, "--generate", "--seq-len", 8, "--batch-size", 1)
                        for file in (mixed, other)]
                self.assertEqual([("int4 weights" in text) for text in plan], [True, False])

    def halve_codes(self, file, folder, packing):
        import gguf
        code_bytes = 32 if packing == "int8" else 16

        def halve(codes):
            if packing == "int8":
                codes[:] = (codes.view(np.int8) // 2).view(np.uint8)
            else:
                low, high = ((codes >> shift & 15).astype(np.int8) - 8 for shift in (0, 4))
                codes[:] = (low // 2 + 8).astype(np.uint8) | (high // 2 + 8).astype(np.uint8) << 4
        with open(file, "r+b") as f:
            for tensor in gguf.GGUFReader(file).tensors:
                if tensor.tensor_type.name not in ("Q8_0", "Q4_0"):
                    continue
                blocks = np.array(tensor.data).reshape(-1, 2 + code_bytes)
                codes = np.ascontiguousarray(blocks[:, 2:])
                halve(codes)
                blocks[:, 2:] = codes
                f.seek(tensor.data_offset)
                f.write(blocks.tobytes())
        path = os.path.join(folder, "model.safetensors")
        with open(path, "rb") as f:
            size, = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(size))
            body = bytearray(f.read())
        config = read_json(folder, "config.json")
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] != "U8":
                continue
            begin, end = entry["data_offsets"]
            rows = np.frombuffer(body, np.uint8, end - begin, begin).reshape(entry["shape"])
            columns = config["intermediate_size"] if "down_proj" in name else config["hidden_size"]
            codes = np.ascontiguousarray(rows[:, :columns * code_bytes // 32])
            halve(codes)
            rows[:, :columns * code_bytes // 32] = codes
        with open(path, "r+b") as f:
            f.seek(8 + size)
            f.write(body)

    def test_rows_that_blocks_do_not_divide_stay_in_16_bits(self):
        import gguf

        model = self.write_small(hidden_size=80, intermediate_size=96)
        done = run("convert", model, self.path("x.gguf"), "--weights", "int4")
        self.assertEqual(done.returncode, 0, done.stderr)
        tensors = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(self.path("x.gguf")).tensors}
        self.assertEqual(tensors["blk.0.ffn_down.weight"], "Q4_0")
        for name in "blk.0.attn_q.weight", "token_embd.weight", "output.weight":
            self.assertEqual(tensors[name], "F16")
            self.assertIn(f"tensor {name} stays F16: its rows of 80 are no whole number of blocks of 32", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 8)
        self.logits(self.path("x.gguf"))

    def test_values_that_a_type_cannot_hold(self):
        for value, weights, words in ((np.nan, "int8", "holds NaN"), (-np.inf, "int4", "holds NaN"),
                                      (1e9, "int8", "too large for Q8_0"), (1e7, "int4", "too large for Q4_0"),
                                      (1e5, "fp16", "too large for fp16")):
            model = self.write_small()
            self.weights["model.layers.0.mlp.up_proj.weight"][3, 7] = value
            write_safetensors(model + "/model.safetensors",
                              [(name, x.shape, lambda x=x: x) for name, x in self.weights.items()], "fp32")
            self.refused(1, ["tensor blk.0.ffn_up.weight", words], "convert", model, self.path("x.gguf"), "--weights", weights)
            shutil.rmtree(model)

    def test_tokenizers_come_back_as_they_were(self):
        """A tokenizer.json from our file gives the ids of the one that went in."""
        import tokenizers

        cases = [fixture_tokenizer(name)["tokenizer"] for name in ("gpt2", "digits", "llama3", "bytes")]
        cases += [test_import_families.GgufFamiliesTest.fixture(None, name)["tokenizer"]
                  for name in ("qwen", "tekken", "smollm3", "olmo2")]
        vocab = fixture_tokenizer("llama2")["tokenizer"]["model"]["vocab"]
        pieces = sorted(vocab, key=vocab.get)
        added = [tokenizer_json.added_token(i, pieces[i]) for i in range(3)]
        for space, start in (True, ("<s>", 1)), (False, None):
            scores = [float(-(7 * i % 1001)) for i in range(len(pieces))]
            cases.append(tokenizer_json.sentencepiece(pieces, scores, added, "<unk>", space, start))
        texts, not_special = read_json(ROOT, "dev/fixtures/tokenizer/tokenizers.json")["texts"], 0
        for case in cases:
            model = self.write_small(case, vocab_size=2048, hidden_size=32, intermediate_size=32, num_attention_heads=2)
            self.run_ok("convert", model, self.path("x.gguf"))
            self.run_ok("convert", self.path("x.gguf"), self.path("back"))
            before = tokenizers.Tokenizer.from_str(json.dumps(case))
            after = tokenizers.Tokenizer.from_file(self.path("back/tokenizer.json"))
            self.assertEqual(before.get_vocab(), after.get_vocab())
            added = [{token["content"]: token["special"] for token in json.loads(one.to_str())["added_tokens"]}
                     for one in (before, after)]
            self.assertEqual(added[0], added[1])
            not_special += list(added[0].values()).count(False)
            for text in texts:
                for special in False, True:
                    self.assertEqual(after.encode(text, add_special_tokens=special).ids,
                                     before.encode(text, add_special_tokens=special).ids, text)
            os.remove(self.path("x.gguf"))
            shutil.rmtree(model)
            shutil.rmtree(self.path("back"))
        self.assertGreater(not_special, 0)

    def test_tokenizers_that_llama_cpp_cannot_express(self):
        for name, words in (("prefix-space", "with these words"), ("literal-split", "with these words"),
                            ("unknown", "with these words"), ("metaspace-first", "does not merge"),
                            ("llama2", "does not merge")):
            model = self.write_small(fixture_tokenizer(name)["tokenizer"], vocab_size=2048, hidden_size=32,
                                     intermediate_size=32, num_attention_heads=2)
            self.refused(1, ["tokenizer.json: llama.cpp has no tokenizer", words], "convert", model, self.path("x.gguf"))
            shutil.rmtree(model)

    def test_commands_take_a_file(self):
        """A chat model of a byte tokenizer: text, template, sampling, training and adapters are those of the directory."""
        data = make_data(self.top)
        model = self.write_small(hidden_size=64, intermediate_size=96, vocab_size=257, eos_token_id=256,
                                 max_position_embeddings=128)
        shutil.copy(os.path.join(data, "tokenizer.json"), model)
        with open(model + "/tokenizer_config.json", "w", encoding="utf-8") as file:
            json.dump({"eos_token": "<|endoftext|>", "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}, file)
        with open(model + "/generation_config.json", "w", encoding="utf-8") as file:
            json.dump({"eos_token_id": [256, 10], "temperature": 0.5, "top_k": 7, "min_p": 0.25}, file)
        file = self.path("x.gguf")
        self.run_ok("convert", model, file)
        self.run_ok("convert", file, self.path("back"))
        self.assertEqual(read_json(self.path("back"), "generation_config.json"),
                         {"eos_token_id": [256, 10], "temperature": 0.5, "top_k": 7, "min_p": 0.25})
        pair = lambda *args: [run(*[x if x != "MODEL" else m for x in args]) for m in (model, file)]  # noqa: E731
        for args in (["sample", "--model", "MODEL", "--prompt", "The cat", "--max-tokens", "12", "--seed", "3"],
                     ["eval", "--model", "MODEL", "--data", data], ["plan", "--model", "MODEL", "--batch-size", "2", "--gpu", "H100 80GB HBM3"]):
            a, b = pair(*args)
            self.assertEqual((a.returncode, b.returncode), (0, 0), a.stderr + b.stderr)
            self.assertEqual(a.stdout.replace(model, file), b.stdout)
        for name, m in ("a", model), ("b", file):
            done = run("train", "--model", m, "--data", data, "--out", self.path("run" + name), "--steps", 2, "--batch-size", 2,
                       "--seq-len", 32, "--save-every", 2)
            self.assertEqual(done.returncode, 0, done.stderr)
        weights = [read_safetensors(self.path(f"run{x}/step_00000002/model.safetensors")) for x in "ab"]
        for name, x in weights[0].items():
            np.testing.assert_array_equal(x, weights[1][name], name)
        self.assertIn("chat_template.jinja", os.listdir(self.path("runb/step_00000002")))
        done = run("train", "--model", file, "--lora-rank", 2, "--data", data, "--out", self.path("lora"), "--steps", 2,
                   "--batch-size", 2, "--seq-len", 32, "--save-every", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        sampled = [run("sample", "--model", self.path("lora"), *base, "--prompt", "The", "--max-tokens", "6")
                   for base in ([], ["--base", file], ["--base", model])]  # known by its weights, whichever file holds them
        self.assertEqual([done.returncode for done in sampled], [0] * 3, [done.stderr for done in sampled])
        self.assertEqual(len({done.stdout for done in sampled}), 1)
        done = run("chat", "--model", file, "--max-tokens", "4", "--seed", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("x.gguf: chat_template.jinja", done.stderr)

    def test_what_is_not_written(self):
        llama = os.path.join(MODELS, "llama-gqa")
        self.run_ok("convert", llama, self.path("there.gguf"))
        self.refused(1, ["there.gguf: exists already"], "convert", llama, self.path("there.gguf"))
        for name in "x.GGUF", "x.ggml", "x.safetensors":
            self.refused(2, [name, "let DST end in .gguf"], "convert", llama, self.path(name))
        self.refused(2, ["--weights bf16", ".gguf"], "convert", llama, self.path("out"), "--weights", "bf16")
        self.refused(2, ["--weights fp8", "int8"], "convert", llama, self.path("x.gguf"), "--weights", "fp8")
        self.refused(2, ["--weights", "--dtype"], "convert", llama, self.path("x.gguf"), "--weights", "int8", "--dtype", "bf16")
        self.refused(1, ["no dynamic RoPE scaling", "train --model llama-tiny"], "convert",
                     os.path.join(MODELS, "llama-rope-dynamic"), self.path("x.gguf"))
        self.refused(1, ["no windows in models of type qwen2"], "convert", os.path.join(MODELS, "qwen2"), self.path("x.gguf"))

    def test_models_of_this_project_alone(self):
        data = make_data(self.top)
        for name, options, words in (("modern", ["--model", "modern-tiny"], "llama.cpp has no "),
                                     ("linear", ["--model", "llama-tiny", "--attention", "L"], "no linear attention")):
            done = run("train", *options, "--layers", 1, "--data", data, "--out", self.path(name), "--steps", 1, "--batch-size", 1,
                       "--seq-len", 16)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.refused(1, [words, f"`train_gpt train --model llama-tiny --data {data} --out runs/llama`"], "convert",
                         self.path(name), self.path("x.gguf"))

    def test_damaged_files(self):
        """One line that names the tensor or the key, from every command that reads the file."""
        import gguf

        model = self.write_small()
        self.run_ok("convert", model, self.path("good.gguf"), "--weights", "int8")
        with open(self.path("good.gguf"), "rb") as file:
            good = file.read()
        reader = gguf.GGUFReader(self.path("good.gguf"))
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        at = tensors["blk.0.ffn_up.weight"].data_offset
        name = b"blk.0.ffn_up.weight"
        info = good.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)  # rank, sizes, type, offset

        def changed(offset, form, *values):
            new = struct.pack(form, *values)
            return good[:offset] + new + good[offset + len(new):]
        down = tensors["blk.0.ffn_down.weight"].data_offset - reader.data_offset
        header = ["info", self.path("bad.gguf")]
        convert = ["convert", self.path("bad.gguf"), self.path("out")]
        for content, words, command in (
            (changed(at + 34 * 5, "<H", 0x7C00), "tensor blk.0.ffn_up.weight: a scale of its Q8_0 blocks is infinite or NaN", convert),
            (changed(at + 34 * 6, "<H", 0x7E01), "tensor blk.0.ffn_up.weight: a scale of its Q8_0 blocks is infinite or NaN", convert),
            (good[:-40], "which ends at", header),
            (changed(info + 4, "<QQ", 250, 512), "tensor blk.0.ffn_up.weight is Q8_0 with rows of 250", header),
            (changed(info + 4, "<QQ", 512, 256), "tensor blk.0.ffn_up.weight: shape [256, 512], expected [512, 256]", header),
            (changed(info + 4, "<QQ", 256, 0), "tensor blk.0.ffn_up.weight has a dimension of 0", header),
            (changed(info + 4, "<QQ", 1 << 40, 1 << 40), "tensor blk.0.ffn_up.weight has a dimension of 1099511627776", header),
            (changed(info + 20, "<I", 200), "tensor blk.0.ffn_up.weight has the unknown type 200", header),
            (changed(info + 20, "<I", 28), "tensor blk.0.ffn_up.weight", header),
            (changed(info + 24, "<Q", down), "overlaps tensor blk.0.ffn_", header),
            (changed(info + 24, "<Q", down + 32), "overlaps tensor blk.0.ffn_", header),
            (changed(info + 24, "<Q", down + 1), "which is no multiple of 32", header),
            (changed(info + 24, "<Q", 1 << 40), "tensor blk.0.ffn_up.weight takes", header),
            (changed(info + 24, "<Q", 1 << 63), "tensor blk.0.ffn_up.weight has the offset", header),
        ):
            with open(self.path("bad.gguf"), "wb") as file:
                file.write(content)
            self.refused(1, ["bad.gguf", words], *command)

    def test_types_that_a_script_reads(self):
        import gguf

        rng = np.random.default_rng(2)
        model = self.write_small()
        self.run_ok("convert", model, self.path("base.gguf"))
        blocks = rng.integers(0, 60, (256, 2 * 84), np.uint8)  # scales are small
        kind = gguf.GGMLQuantizationType.Q2_K
        self.rewrite(self.path("base.gguf"), self.path("q2.gguf"),
                     lambda tensor: (blocks, kind) if tensor.name == "blk.0.ffn_down.weight" else None)
        for args in (["info", self.path("q2.gguf")], ["convert", self.path("q2.gguf"), self.path("x")],
                     ["sample", "--model", self.path("q2.gguf"), "--prompt", "x"]):
            self.refused(1, ["tensor blk.0.ffn_down.weight is Q2_K", "scripts/import_gguf.py"], *args)
        test_import.ImportTest.imported(self, "import_gguf.py", self.path("q2.gguf"), self.path("out"))
        got = read_safetensors(self.path("out/model.safetensors"))
        np.testing.assert_array_equal(got["model.layers.0.mlp.down_proj.weight"], gguf.quants.dequantize(blocks, kind))
        np.testing.assert_array_equal(got["model.layers.0.mlp.up_proj.weight"], self.weights["model.layers.0.mlp.up_proj.weight"])

    script = test_import.ImportTest.script


if __name__ == "__main__":
    unittest.main()
