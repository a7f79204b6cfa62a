"""Why a test of a peer's suite fails or tests nothing on our side, where it passes on the peer's.

A test without a line here makes `make test-peers` exit 1; so does a line whose tests all pass. The key is a
regular expression for the test's whole name, without its class.
"""

TRANSFORMERS = {
    "test_can_set_attention_dynamically": (
        'it sets "sdpa", which has no relative positions and is refused with them; without them it wants '
        "transformers' wording for an unknown kind"
    ),
    "test_sdpa_can_dispatch_non_composite_models": (
        'it wants "sdpa" as the default; ours is "relpos", the kernels of relative attention'
    ),
    "test_model_weights_reload_no_missing_tied_weights": (
        "it loads a file of integers; a folder may be a stranger's, and weights must be floats. Our own "
        "tests lose weights from a folder, which is refused by their names"
    ),
    "test_save_load_keys_to_ignore_on_save": (
        "no weight of ours is left out of a saved folder; Marian leaves out its tables of sinusoids"
    ),
}

TORCH = {
    "test_multihead_attention_average_attn_weights_(False|True)": (
        "it needs add_zero_attn and add_bias_kv, which are refused: an appended key has no position"
    ),
    "test_multihead_attn_3d_attn_mask": (
        "query and key differ in length; with tables of distances that needs query_start"
    ),
    "test_multihead_attn_(fast_path_)?invalid_shape": (
        "it wants an AssertionError in torch's words; ours is a ValueError that names the argument"
    ),
    "test_multihead_attn_nested_tensor_outside_fast_path": (
        "it wants a refusal outside of torch's fast path; ours computes nested tensors everywhere"
    ),
    "test_multihead_attn_fast_path_query_and_bias_have_different_dtypes_cpu_float64": (
        "biases must have the dtype of the weights"
    ),
    "test_multihead_self_attn_two_masks_fast_path_mock_cpu": (
        "it wants a call of torch's fast path, which has no positions"
    ),
    "test_mask_check_fastpath": "it wants a call of torch's fast path, which has no positions",
    "test_train_with_is_causal_device_cpu": "it wants a refusal of is_causal without a mask; ours needs none",
    "test_script_mha_in_proj_weight_none": "torch.jit.script is not supported, as docs/modules.md says",
}

REASONS: dict[str, str] = TRANSFORMERS | TORCH
