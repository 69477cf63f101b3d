"""Keys that transformers declares and this project ignores, by reason: what is listed changes neither tokens nor logits
here. scripts/check_keys.py fails for a key that is in no list and is neither used nor refused, and for a pattern that
no key needs.

CONFIG: of config.json; `family.key` is for that family, rope_scaling.key inside rope_scaling.
"""

CONFIG = {
    "the weights keep the dtype of their file": ["dtype", "torch_dtype", "use_bfloat16"],
    "there is no dropout here, and none where transformers computes logits": [
        "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"],
    "it says how transformers computes or returns the same": [
        "_attn_implementation", "attn_implementation", "experts_implementation", "use_cache", "gradient_checkpointing",
        "torchscript", "tf_legacy_loss", "output_attentions", "output_hidden_states", "return_dict", "use_return_dict",
        "pretraining_tp", "reorder_and_upcast_attn"],
    "no model of these families reads it": [
        "chunk_size_feed_forward", "is_decoder", "cross_attention_hidden_size", "tie_encoder_decoder",
        "decoder_start_token_id", "number_of_conv_states", "gpt2.head_dim", "gpt2.rope_*", "gpt2.partial_rotary_factor",
        "gpt2.original_max_position_embeddings"],
    "longrope reads it, which is refused": ["phi3.original_max_position_embeddings"],
    "RoPE of types that are refused reads it": [
        "rope_scaling.attention_factor", "rope_scaling.beta_*", "rope_scaling.*_factor", "rope_scaling.mscale*",
        "rope_scaling.mrope_section", "rope_scaling.truncate"],
    "all layers have the window that sliding_window says, whatever it lists": [
        "mistral.layer_types", "phi3.layer_types"],
    "batches here have no padding": ["pad_token_id"],
    "classes are not computed, only logits": [
        "id2label", "label2id", "num_labels", "problem_type", "classifier_dropout", "summary_*", "sep_token_id"],
    "it says where a model comes from": ["architectures", "transformers_version", "name_or_path", "_commit_hash",
                                         "finetuning_task"],
    "pipelines read it, not the model or the tokenizer": ["task_specific_params", "prefix"],
    "tokenizer.json describes the tokenizer": ["tokenizer_class"],
    "an attribute of transformers' classes, the same for all files": [
        "_auto_class", "attribute_map", "base_config_key", "base_model_*_plan", "has_no_defaults_at_init",
        "sub_configs", "default_theta"],
}

GENERATION = {
    "options of sample and chat decide how much is generated": [
        "max_length", "max_new_tokens", "max_time", "num_return_sequences"],
    "it acts beside num_beams only, which is named as ignored": ["early_stopping", "length_penalty", "diversity_penalty"],
    "only finite logits are sampled from, and all are normalized": ["renormalize_logits", "remove_invalid_values"],
    "it says how transformers computes or returns the same": [
        "use_cache", "cache_*", "max_cache_len", "return_*", "output_*", "compile_config", "disable_compile",
        "continuous_batching_config", "low_memory", "prefill_chunk_size"],
    "a draft model or a lookup changes the speed, not the tokens": [
        "assistant_*", "is_assistant", "num_assistant_*", "target_lookbehind", "prompt_lookup_num_tokens",
        "max_matching_ngram_size", "speculation_type", "use_mtp"],
    "encoders and decoders of two parts are refused": [
        "decoder_start_token_id", "force_bos_token_to_be_generated"],
    "it says where a file comes from": [
        "transformers_version", "_commit_hash", "_from_model_config", "_original_object_hash"],
    "transformers keeps it while it runs": ["_*_token_tensor", "_mask_length"],
}

TOKENIZER = {
    "tokenizer.json describes the tokenizer": [
        "tokenizer_class", "slow_tokenizer_class", "legacy", "sp_model_kwargs", "vocab_file*", "tokenizer_file",
        "tokenizer_object", "tokenizer", "unk_id", "backend", "auto_map", "_auto_class", "processor_class", "from_slow",
        "__slow_tokenizer", "init_inputs", "_spm_precompiled_charsmap", "pretrained_vocab_files_map"],
    "the tokens with an id are those of tokenizer.json": [
        "model_specific_special_tokens"],
    "options of commands decide how long a text may be; nothing is padded": [
        "model_max_length", "max_len", "padding_side", "truncation_side", "tokenizer_padding", "tokenizer_truncation",
        "_json_padding", "_json_truncation", "model_input_names"],
    "tokens are written as their bytes say": [
        "clean_up_tokenization_spaces*", "spaces_between_special_tokens"],
    "answers are not taken apart, and typed control tokens are text in any case": [
        "response_schema", "response_template", "chat_control_tokens"],
    "the chat template's author decides about a system prompt": ["use_default_system_prompt"],
    "it says where files come from or what is logged": [
        "name_or_path", "gguf_file", "files_loaded", "is_local", "local_files_only", "verbose"],
}
