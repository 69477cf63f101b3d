#!/usr/bin/env python3
"""Makes the fixture of LoRA adapters: adapters that peft saves, and what it computes with them in float64.

    python dev/peers/make_lora_fixture.py dev/fixtures

reads the models of dev/fixtures/models and writes dev/fixtures/lora; needs torch, transformers and peft. Each case is
an adapter's directory with reference.safetensors: tokens, the logits of the base with the adapter beside it, and
merged/<tensor>, each matrix that peft's merge changes. Both halves of the adapters are random, B ~ N(0, 0.02).
"""

import argparse
import json
import shutil
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# name: base, options of peft, and whether it saves embeddings as by default. The bases have separate, fused, transposed
# and tied tensors; the targets are subsets too.
CASES = {
    "gpt2": ("gpt2-plain", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"],
                            "fan_in_fan_out": True}),
    "llama-all": ("llama-gqa", {"r": 3, "lora_alpha": 12, "target_modules": LLAMA}),
    "llama-rslora": ("llama-sharded", {"r": 8, "lora_alpha": 4, "use_rslora": True,
                                       "target_modules": ["q_proj", "v_proj", "lm_head"]}),
    "llama-tied": ("llama-bias-tied", {"r": 2, "lora_alpha": 2, "target_modules": ["k_proj", "up_proj"],
                                       "layers_to_transform": [1]}),
    "phi3": ("phi3", {"r": 4, "lora_alpha": 16, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "llama-patterns": ("llama-sharded", {
        "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj", "lm_head"],
        "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 2, r"^model\.layers\.0\..*k_proj": 4, "proj": 7},
        "alpha_pattern": {r"layers\.[01]\.self_attn\.(k|v)_proj": 9.5, "lm_head": 4, "attn.v_proj": 1}}),
    "llama-embedding": ("llama-sharded", {"r": 2, "lora_alpha": 6,
                                          "target_modules": ["q_proj", "embed_tokens", "lm_head"]}, True),
    "llama-modules": ("llama-sharded", {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"],
                                        "modules_to_save": ["embed_tokens", "lm_head", "norm", "layers.1.mlp.up_proj"]}),
    "llama-tied-embedding": ("llama-bias-tied", {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "embed_tokens"],
                                                 "ensure_weight_tying": True}, True),
    "gpt2-embedding": ("gpt2-untied", {"r": 2, "lora_alpha": 6, "target_modules": ["wte", "wpe", "lm_head"],
                                       "modules_to_save": ["ln_f"]}, True),
}


def randomise(model, generator):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A" in name or "lora_embedding_B" in name:
                p.normal_(0, p.shape[1] ** -0.5, generator=generator)
            elif "lora_B" in name or "lora_embedding_A" in name:
                p.normal_(0, 0.02, generator=generator)
            elif "modules_to_save" in name:
                p.add_(0.02 * torch.randn(p.shape, generator=generator))


def make_case(models, folder, seed, base, options, save_embeddings=False):
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(models / base, dtype=torch.float32,
                                                              attn_implementation="eager")
    plain = {name: w.clone() for name, w in model.state_dict().items()}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    randomise(model, generator)
    # By default peft saves a copy of an embedding or head beside its adapter.
    model.save_pretrained(folder, save_embedding_layers="auto" if save_embeddings else False)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    config["target_modules"] = sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    model = model.double().eval()
    tokens = torch.randint(model.config.vocab_size, (1, 12), generator=generator)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
        with model.disable_adapter():
            change = (logits - model(input_ids=tokens, use_cache=False).logits).abs().max()
    merged = model.merge_and_unload().state_dict()
    changed = {f"merged/{name}": w.float().contiguous() for name, w in merged.items()
               if not torch.equal(w, plain[name].double())}
    save_file({"tokens": tokens.int(), "logits": logits.contiguous()} | changed, folder / "reference.safetensors")
    print(f"{folder.name}: {len(changed)} matrices, logits change by up to {change:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", type=Path, help="the folder with models/; lora/ is written beside it")
    parser.add_argument("--only", nargs="*", help="cases to make; default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for seed, (name, case) in enumerate(CASES.items(), start=1):
        if args.only and name not in args.only:
            continue
        make_case(args.fixtures / "models", args.fixtures / "lora" / name, seed, *case)
    (args.fixtures / "lora" / "README.md").write_text(
        "Adapters of the tiny models in ../models, made by `python dev/peers/make_lora_fixture.py dev/fixtures` with\n"
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__} and peft "
        f"{peft.__version__}; "
        "the script describes the files.\n")


if __name__ == "__main__":
    main()
