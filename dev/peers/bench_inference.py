#!/usr/bin/env python3
"""Benchmarks generation side by side with transformers: same random weights, prompts and token counts, one machine, one run.

    dev/peers/bench_inference.py --driver build/cpu/train_gpt [--model gpt2-124M] [--batch-size 1] [--prompt 128] [--tokens 256]
                               [--dtype fp32] [--device cpu] [--threads 2] [--turns 3]

Contenders are interleaved; figures are medians over the turns in tokens/s, for prompts (prefill) and for greedy decoding,
summed over the batch. Ours come from the driver's statistics. Theirs come from two calls of generate(), one for a single
token and one for all tokens: the first is the prefill time, the difference the decode time. On a GPU transformers runs
with its default cache and with its static cache under torch.compile. The script also prints the fraction of the read
bandwidth, which the driver measures in the same run, and in fp32 whether the completions are equal.

Needs torch, transformers and tokenizers.
"""
import from_scripts  # noqa: F401
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from peer_main import peer_main

SHAPES = {
    "gpt2-124M": dict(kind="gpt2", n_embd=768, n_layer=12, n_head=12),
    "llama-1B": dict(kind="llama", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                     intermediate_size=8192, vocab_size=128256, max_position_embeddings=4096, tie_word_embeddings=True),
    "tiny": dict(kind="gpt2", n_embd=64, n_layer=2, n_head=2),
}


class BenchError(Exception):
    """One line: what failed."""


def make_model(shape, dtype, folder):
    """A directory with random weights and a tokenizer of single bytes, so that a prompt has as many tokens as letters."""
    import tokenizers
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = dict(shape)
    if shape.pop("kind") == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    with torch.no_grad():
        for name, weight in model.named_parameters():  # so large that logits differ by more than rounding
            if weight.dim() == 2:
                weight.mul_(3)
    model.to(dtype).save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    return tokenizer


class Ours:
    name = "train_gpt"

    def __init__(self, args, folder, prompts):
        path = os.path.join(folder, "prompts.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n---\n".join(prompts))  # a newline behind the last would belong to a prompt that is alone
        self.command = [args.driver, "sample", "--model", folder, "--prompt-file", path, "--dtype", args.dtype, "--temperature", "0",
                        "--max-tokens", str(args.tokens), "--batch-size", str(args.batch_size), "--ignore-eos", "--json"]
        self.environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads))
        self.bandwidth = self.bytes_per_second = 0

    def run(self):
        done = subprocess.run(self.command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{' '.join(self.command)}: {done.stderr.strip()}")
        result = json.loads(done.stdout)
        s = result["statistics"]
        self.bandwidth = s.get("read_bandwidth", 0)
        self.bytes_per_second = s["decode_bytes"] / s["decode_seconds"]
        self.texts = [sample["tokens"] for sample in result["samples"]]
        return s["prompt_tokens"] / s["prefill_seconds"], s["decode_tokens"] / s["decode_seconds"]


class Transformers:
    def __init__(self, args, folder, ids, compiled):
        import torch
        import transformers

        self.torch, self.args = torch, args
        self.name = "transformers, static cache, compiled" if compiled else "transformers"
        torch.set_num_threads(args.threads)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        self.ids = torch.tensor(ids, device=args.device)
        self.options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True)
        if compiled:
            self.options["cache_implementation"] = "static"  # generate() then compiles the step by itself
            self.generate(args.tokens), self.generate(1)

    def generate(self, tokens):
        with self.torch.inference_mode():
            out = self.model.generate(self.ids, attention_mask=self.torch.ones_like(self.ids), max_new_tokens=tokens,
                                      min_new_tokens=tokens, **self.options)
        if self.args.device == "cuda":
            self.torch.cuda.synchronize()
        return out[:, self.ids.shape[1]:].tolist()

    def run(self):
        times = []
        for tokens in (1, self.args.tokens):
            begin = time.perf_counter()
            self.texts = self.generate(tokens)
            times.append(time.perf_counter() - begin)
        texts, length = self.ids.shape
        return texts * length / times[0], texts * (self.args.tokens - 1) / (times[1] - times[0])


def compare(args):
    import torch

    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16 if args.dtype == "bf16" else torch.float16
        tokenizer = make_model(SHAPES[args.model], dtype, folder)
        prompts = ["".join(chr(97 + (7 * i + 3 * j * j) % 26) for j in range(args.prompt)) for i in range(args.batch_size)]
        ours = Ours(args, folder, prompts)
        contenders = [ours, Transformers(args, folder, [tokenizer.encode(p).ids for p in prompts], False)]
        if args.device == "cuda":
            contenders.append(Transformers(args, folder, [tokenizer.encode(p).ids for p in prompts], True))
        rates = {c.name: [] for c in contenders}
        for _ in range(args.turns):
            for c in contenders:
                rates[c.name].append(c.run())
        print(f"{args.model}, {args.dtype}, {args.device}, {args.threads} threads: {args.batch_size} sequences, prompts of {args.prompt} tokens, "
              f"completions of {args.tokens}; medians of {args.turns} turns")
        medians = {name: [statistics.median(column) for column in zip(*r)] for name, r in rates.items()}
        for name, (prefill, decode) in medians.items():
            ratio = medians[ours.name][1] / decode
            print(f"  {name:40s} prefill {prefill:12,.1f}   decode {decode:12,.1f} tokens/s   speed-up {ratio:.2f}")
        if ours.bandwidth:
            print(f"  ours reads {ours.bytes_per_second / 1e9:.1f} GB/s, {100 * ours.bytes_per_second / ours.bandwidth:.0f}% of the "
                  f"{ours.bandwidth / 1e9:.1f} GB/s measured")
        if args.dtype == "fp32":
            same = sum(a == b for a, b in zip(ours.texts, contenders[1].texts))
            print(f"  {same} of {args.batch_size} completions are equal")
            return 0 if same == args.batch_size else 1
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", required=True, help="our program")
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124M", help="(default: gpt2-124M)")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences at a time (default: 1)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (default: 128)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each completion (default: 256)")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="(default: fp32)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of transformers (default: cpu); ours depends on the driver")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU (default: 2)")
    parser.add_argument("--turns", type=int, default=3, help="(default: 3)")
    args = parser.parse_args()
    return peer_main("bench_inference", lambda: compare(args), BenchError, "torch, transformers and tokenizers are compared with")


if __name__ == "__main__":
    sys.exit(main())
