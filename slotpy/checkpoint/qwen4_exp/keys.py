"""The keys of a `qwen4_exp` config.json: which must be there, which may have one value only, which change nothing.

Owns the lists and the reasons. config.py reads the values.
"""

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
LINEAR, FULL = "linear_attention", "full_attention"
# transformers has renamed the attention layers twice; the published files keep the first name.
LAYER_TYPES = {LINEAR: LINEAR, FULL: FULL, "indexed_attention": FULL, "qwen_sparse_attention": FULL}

_IMAGES = "image and video prompts are not run"
_HEADERS = "the tensor headers give the stored dtype"
_TRAINING = "training only"
_STOPPING = "generation_config.json says where to stop; the n-gram boundary is text_config.eos_token_id"
_BOOKKEEPING = "bookkeeping of the program that wrote the file"
IGNORED_TOP = {
    "architectures": "model_type names the family",
    "auto_map": _BOOKKEEPING,
    "bos_token_id": _STOPPING,
    "dtype": _HEADERS,
    "eos_token_id": _STOPPING,
    "image_token_id": _IMAGES,
    "language_model_only": "says whether the vision tower is served; only the text model is run here",
    "model_file": "slotpy brings its own model code",
    "model_type": "checked before the keys are read",
    "pad_token_id": _STOPPING,
    "quantization": "parsed on its own",
    "quantization_config": "parsed on its own",
    "torch_dtype": _HEADERS,
    "transformers_version": _BOOKKEEPING,
    "video_token_id": _IMAGES,
    "vision_config": _IMAGES,
    "vision_end_token_id": _IMAGES,
    "vision_start_token_id": _IMAGES,
}
IGNORED_TEXT = {
    "attention_dropout": _TRAINING,
    "bos_token_id": _STOPPING,
    "chunk_size_feed_forward": _BOOKKEEPING,
    "dtype": _HEADERS,
    "id2label": _BOOKKEEPING,
    "index_share_for_mtp_iteration": "changes which drafts are proposed, never which are accepted",
    "initializer_range": _TRAINING,
    "is_encoder_decoder": _BOOKKEEPING,
    "label2id": _BOOKKEEPING,
    "number_of_conv_states": _BOOKKEEPING,
    "output_attentions": _BOOKKEEPING,
    "output_hidden_states": _BOOKKEEPING,
    "output_router_logits": _TRAINING,
    "pad_token_id": _STOPPING,
    "ple_embedding_dtype": _HEADERS,
    "ple_offload_embedding": "n-gram rows are always streamed",
    "problem_type": _BOOKKEEPING,
    "return_dict": _BOOKKEEPING,
    "router_aux_loss_coef": _TRAINING,
    "torch_dtype": _HEADERS,
    "transformers_version": _BOOKKEEPING,
    "use_cache": "the caches are always used",
    "_name_or_path": _BOOKKEEPING,
}
# Keys of which only one value is supported; where one may be absent, that means this value, as in transformers.
FIXED_TEXT = {
    "attention_bias": False,
    "hidden_act": "silu",
    "indexer_kv_heads": 1,
    "mamba_ssm_dtype": "float32",
    "mtp_use_dedicated_embeddings": False,
    "norm_topk_prob": True,
    "output_gate_type": "sigmoid",
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
FIXED_MTP = {"hybrid": True, "mtp_use_hidden_state_from_layer": None}
# Positive integers without a default, taken as they are.
SIZES = (
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "indexer_n_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "hc_count",
    "hc_lowrank",
    "ple_conv_kernel_size",
    "ngram_size",
    "heads_per_ngram",
    "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by",
    "split_ngram_parts",
)
MINIMUM = {"hc_count": 2, "ngram_size": 2}
REQUIRED_TEXT = (
    *SIZES,
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_parameters",
    "output_gate_type",  # an absent one would mean hidden_act, silu
    "indexer_kv_heads",
    "ple_layer_ids",
    "eos_token_id",
)
