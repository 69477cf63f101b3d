#!/usr/bin/env python3
"""Times LoRA steps of transformers and peft, to set beside `train_gpt train --lora-rank` or `--qlora` in the same run.

    dev/peers/bench_peft.py --hidden 4096 --layers 32 --seq-len 2048 --batch-size 2 --step-tokens 8192

A LLaMA model with random weights in bf16 on the GPU (its default shape is 8B), adapters of --rank on the seven matrices of
every layer in fp32 under autocast, SDPA attention and the fused AdamW. --checkpointing recomputes each layer, as
`--recompute block` does. --qlora keeps the layers' matrices in bitsandbytes' NF4, whose scales are quantised once more.
Prints tokens/s, the median over all steps but the first two, and the peak of PyTorch's memory.
"""
import argparse
import statistics
import time

import peft
import torch
import transformers

WARMUP = 2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def quantise(model):
    """Puts the matrices of the layers, not the head, into NF4."""
    import bitsandbytes

    for layer in model.model.layers:
        for half in layer.self_attn, layer.mlp:
            for name, linear in list(half.named_children()):
                if not isinstance(linear, torch.nn.Linear):
                    continue
                packed = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False,
                                                    compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
                packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                setattr(half, name, packed.to("cuda"))
    model.is_loaded_in_4bit = True  # peft asks for it
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def make_model(args):
    config = transformers.LlamaConfig(
        hidden_size=args.hidden, intermediate_size=args.ffn, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, vocab_size=args.vocab, max_position_embeddings=8192, rope_theta=500000.0,
        tie_word_embeddings=False, use_cache=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    if args.qlora:
        quantise(model)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    lora = peft.LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora).train()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256, rank=16, seq_len=2048,
                            batch_size=2, step_tokens=8192, steps=6).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--qlora", action="store_true")
    args = parser.parse_args()
    model = make_model(args)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    micro_steps = args.step_tokens // (args.batch_size * args.seq_len)
    seconds = []
    for step in range(args.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(micro_steps):
            tokens = torch.randint(args.vocab, (args.batch_size, args.seq_len), device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / micro_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARMUP:])
    print(f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}: "
          f"{args.step_tokens / median:.0f} tokens/s, {median * 1e3:.0f} ms/step, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
