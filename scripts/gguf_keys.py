"""What import_gguf.py makes of each key of a GGUF file: it uses the key, demands a value that changes nothing, or
ignores it for a reason. scripts/check_keys.py fails for a key of llama.cpp that stands nowhere here.

{arch} is the architecture's name; * any text.
"""
import fnmatch

# Used, with the type. [x]: a list; one_or_each: one number, or one for each layer.
one_or_each = "a whole number, or a list of them"
USED = {
    "general.architecture": str, "general.alignment": int,
    "{arch}.block_count": int, "{arch}.context_length": int, "{arch}.embedding_length": int,
    "{arch}.feed_forward_length": one_or_each, "{arch}.expert_count": int,
    "{arch}.attention.head_count": one_or_each, "{arch}.attention.head_count_kv": one_or_each,
    "{arch}.attention.key_length": int, "{arch}.attention.value_length": int,
    "{arch}.attention.layer_norm_rms_epsilon": float, "{arch}.attention.sliding_window": one_or_each,
    "{arch}.rope.dimension_count": int, "{arch}.rope.freq_base": float, "{arch}.rope.scaling.type": str,
    "{arch}.rope.scaling.factor": float, "{arch}.rope.scale_linear": float,
    "{arch}.rope.scaling.original_context_length": int,
    "tokenizer.ggml.model": str, "tokenizer.ggml.pre": str, "tokenizer.ggml.tokens": [str],
    "tokenizer.ggml.token_type": [int], "tokenizer.ggml.scores": [float], "tokenizer.ggml.merges": [str],
    "tokenizer.ggml.bos_token_id": int, "tokenizer.ggml.eos_token_id": int, "tokenizer.ggml.eot_token_id": int,
    "tokenizer.ggml.eom_token_id": int, "tokenizer.ggml.unknown_token_id": int, "tokenizer.ggml.padding_token_id": int,
    "tokenizer.ggml.fim_pad_token_id": int, "tokenizer.ggml.fim_rep_token_id": int,
    "tokenizer.ggml.fim_sep_token_id": int, "tokenizer.ggml.add_bos_token": bool,
    "tokenizer.ggml.add_space_prefix": bool, "tokenizer.chat_template": str,
    "general.sampling.temp": float, "general.sampling.top_k": int, "general.sampling.top_p": float,
    "general.sampling.min_p": float, "general.sampling.penalty_repeat": float,
}

# An error unless the value is one of these. (): whatever the value is.
DEMANDED = {
    "general.type": ("model",), "split.count": (0, 1),
    "{arch}.attention.causal": (True,), "{arch}.use_parallel_residual": (False,),
    "{arch}.logit_scale": (0, 1), "{arch}.residual_scale": (0, 1), "{arch}.embedding_scale": (0, 1),
    "{arch}.rope.scaling.attn_factor": (0, 1), "{arch}.rope.scaling.alpha": (0,),
    "{arch}.rope.dimension_sections": (), "{arch}.rope.dimension_count_swa": (), "{arch}.rope.freq_base_swa": (),
    **dict.fromkeys(["{arch}.attention." + key for key in ("key_length_swa", "value_length_swa", "key_length_mla",
                                                           "value_length_mla", "sliding_window_pattern")], ()),
    **dict.fromkeys(["{arch}." + key for key in (
        "embedding_length_out", "leading_dense_block_count", "expert_used_count", "nextn_predict_layers",
        "n_deepstack_layers", "attn_logit_softcapping", "final_logit_softcapping", "attention.max_alibi_bias",
        "attention.clamp_kqv", "attention.scale", "attention.output_scale", "attention.temperature_scale",
        "attention.temperature_length", "attention.shared_kv_layers")], (0,)),
    **dict.fromkeys(["tokenizer.ggml." + key for key in ("add_eos_token", "add_sep_token",
                                                         "remove_extra_whitespaces")], (False,)),
    "tokenizer.ggml.precompiled_charsmap": ([],),
}

IGNORED = {
    "it describes the file, not the model": [
        "general.name", "general.author", "general.version", "general.organization", "general.finetune",
        "general.basename", "general.description", "general.quantized_by", "general.size_label", "general.license",
        "general.license.*", "general.url", "general.doi", "general.uuid", "general.repo_url", "general.source.*",
        "general.base_model.*", "general.dataset.*", "general.tags", "general.languages"],
    "each tensor names its own type": ["general.quantization_version", "general.file_type"],
    "sample and chat have no such sampler": [
        "general.sampling.sequence", "general.sampling.xtc_*", "general.sampling.penalty_last_n",
        "general.sampling.mirostat*"],
    "split.count is 1 if everything is in the file": ["split.no", "split.tensors.count"],
    "the tensors' shapes say it": ["{arch}.vocab_size"],
    "llama.cpp reads it without a use for it": ["{arch}.tensor_data_layout", "{arch}.rope.scaling.finetuned"],
    "YaRN reads it, which is refused": ["{arch}.rope.scaling.yarn_*"],
    "embeddings and classes are not computed, only logits": ["{arch}.pooling_type", "{arch}.classifier.output_labels"],
    "it says nothing without experts, which are refused": [
        "{arch}.expert_*", "{arch}.experts_per_group", "{arch}.moe_*", "{arch}.interleave_moe_layer_step",
        "{arch}.router_logit_softcapping", "{arch}.swiglu_clamp_*"],
    "architectures that are refused read it": [
        "{arch}.features_length", "{arch}.decoder_*", "{arch}.swin_norm", "{arch}.rescale_every_n_layers",
        "{arch}.time_*_extra_dim", "{arch}.token_shift_count", "{arch}.full_attention_interval",
        "{arch}.activation_sparsity_scale", "{arch}.altup.*", "{arch}.embedding_length_per_layer_input",
        "{arch}.*_feat_in", "{arch}.*_feat_out", "{arch}.attention.layer_norm_epsilon", "{arch}.attention.group_norm_*",
        "{arch}.attention.*_lora_rank", "{arch}.attention.relative_buckets_count", "{arch}.attention.indexer.*",
        "{arch}.ssm.*", "{arch}.kda.*", "{arch}.wkv.*", "{arch}.posnet.*", "{arch}.convnext.*", "{arch}.shortconv.*",
        "clip.*", "diffusion.*", "xielu.*", "tokenizer.rwkv.world", "tokenizer.ggml.token_type_count"],
    "general.type says that the file is no model, and is refused": ["adapter.*", "imatrix.*"],
    "text is not filled in at a middle, classified or masked": [
        "tokenizer.ggml.fim_*", "tokenizer.ggml.prefix_token_id", "tokenizer.ggml.suffix_token_id",
        "tokenizer.ggml.middle_token_id", "tokenizer.ggml.mask_token_id", "tokenizer.ggml.seperator_token_id"],
    "llama.cpp reads the vocabulary's other keys instead": ["tokenizer.huggingface.json"],
    "the default template is imported; to take another is a choice of each request": [
        "tokenizer.chat_templates", "tokenizer.chat_template.*"],
}
# Keys that tools of llama.cpp write about a file and the Python package does not declare.
WRITTEN_BY_TOOLS = ["general.datasets", "quantize.imatrix.*"]


def is_ignored(key):
    lists = (*IGNORED.values(), WRITTEN_BY_TOOLS)
    return any(fnmatch.fnmatchcase(key, pattern) for patterns in lists for pattern in patterns)


def has_type(value, kind):
    if isinstance(kind, list):
        return isinstance(value, list) and all(has_type(x, kind[0]) for x in value)
    if kind is one_or_each:
        return has_type(value, int) or has_type(value, [int])
    if kind is bool or kind is str:
        return isinstance(value, kind)
    return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)


def type_name(kind):
    if isinstance(kind, list):
        return "a list of " + {str: "texts", int: "whole numbers", float: "numbers"}[kind[0]]
    names = {int: "a whole number", float: "a number", bool: "a boolean", str: "text", one_or_each: one_or_each}
    return names[kind]
