"""Which tests are left to `make test-all`: tests of more than some seconds whose faults others see sooner.

Tests that are not named here run in `make test`: whole where they have few cases, else in a cover (cover.py).
"""

CHOSEN: dict[str, tuple[str, ...]] = {
    "kernels/test_triton.py::test_kernel_equals_definition": (
        "exp/row/causal/float32", "horner/raw/window/float32", "squared_affine/row/window-both-sides/float32",
        "polynomial_square/row/packed/float32", "euclidean/count/padding/float32", "yat/raw/gqa/float32",
        "squared_affine/row/decode-window/float32", "identity/count/strict/bfloat16", "horner/count/padding/float16",
    ),
    "kernels/test_triton.py::test_kernel_equals_definition_in_its_own_tiles": (
        "exp/row/off-decode-128/float32",
    ),
    "kernels/test_triton_sums.py::test_kernel_equals_definition": (
        "sko/early/float32", "sq-count/one/float32", "sko-1/memory-bidirectional/float32",
        "sq-raw/decay-packed/float32", "linear/decay-memory/float32", "sq/level/bfloat16",
    ),
    "kernels/test_triton_ridge.py::test_kernel_equals_definition": (
        "ska-2/memory/float32", "ska-2/packed/float32", "ska-1/short/bfloat16",
    ),
    "kernels/test_triton_distance.py::test_kernel_equals_definition": (
        "rewa/padding/float32", "other-order/packed/float32", "rewa/decode/float32",
        "rewa-gates-dot/one/bfloat16",
    ),
    "kernels/test_features.py::test_a_call_compiles_without_a_break": (
        "slay-small-chunked", "performer-tiled", "hedgehog-chunked",
    ),
    "kernels/test_sums_carried.py::test_rows_that_cancel_are_summed_directly": ("0.01-keys",),
    "execution/test_planned.py::test_a_plan_is_one_graph": ("softmax", "ska(power=1)"),
    "execution/test_planned.py::test_calls_and_plans_are_exported": ("softmax-False", "ska(power=1)-True"),
    "nn/test_decode_step.py::test_an_exported_step_decodes": (
        "softmax", "local_global", "retention", "ska(fading=True)", "mamba3", "mixture",
    ),
    "nn/test_decode_step.py::test_a_compiled_step_is_one_graph": (
        "squared_affine", "ska", "mamba2",
    ),
    "nn/test_compiled_layers.py::test_a_layer_is_one_graph": (
        "softmax", "squared_affine", "mamba2",
    ),
    "nn/test_compiled_layers.py::test_one_graph_has_gradients_and_serves_several_lengths": ("softmax",),
    "memory/test_ridge_statistics.py::test_a_long_single_precision_stream": ("1-three directions",),
    "memory/test_rows_of_a_batch.py::test_drift_of_long_streams_in_single_precision": ("retention-40005-9",),
    "models/test_export.py::test_a_layer_reads_prompts_of_any_length_and_goes_on": (
        "softmax with a `Window`", "ska", "Mamba2",
    ),
    "models/test_export.py::test_what_cannot_be_exported_says_so": ("sinkhorn",),
    "tasks/test_text_task.py::test_a_short_training_part_is_used_to_its_last_token_and_not_beyond": ("1.7", "3"),
    "training/test_checkpoints.py::test_stopped_and_resumed_is_bit_identical": ("stops0",),
    "training/test_checkpoints.py::test_what_came_after_the_checkpoint_is_cut_and_repeated": ("11-torn4",),
    "training/test_checkpoints.py::test_full_disk_leaves_the_previous_checkpoint": ("fsync",),
    "training/test_comparisons.py::test_stopped_and_continued_is_the_same_comparison": ("True",),
    "execution/test_chunked_blocks.py::test_drift_over_a_hundred_thousand_tokens": ("1-3.0",),
    "hf/test_models_of_transformers.py::test_generation_with_a_cache_is_generation_without": ("layers0", "layers1"),
    "hf/test_models_of_transformers.py::test_assisted_generation_gives_the_same_tokens": ("layers1",),
    "test_docs.py::test_examples_run": ("examples/declare_an_operator.py",),
}  # fmt: skip
"""Of these tests the named cases are in `make test`, the others only in `make test-all`."""

SLOW: frozenset[str] = frozenset(
    {
        "distributed/test_sequence.py::test_all_operators_on_ranks_equal_one_process",
        "cli/test_cli_runs.py::test_mistakes_show_no_traceback_in_a_process",
        "cli/test_cli_runs.py::test_a_reader_that_leaves_is_no_error",
        "cli/test_cli_runs.py::test_ctrl_c_stops_with_130_and_the_same_command_goes_on",
        "cli/test_cli_runs.py::test_demo_puts_both_tasks_on_one_page",
        "data/test_text_sources.py::test_processes_that_prepare_the_same_text_do_not_meet",
        "execution/test_transport.py::test_no_plan_is_kept",
        "execution/test_machine.py::test_processes_at_once_agree",
        "features/test_kernel_fits.py::test_quadrature_that_misses_says_by_how_much",
        "test_verdicts_benchmark.py::test_support_tells_what_was_stored_and_length_does_not",
        "hf/test_models_of_transformers.py::test_the_trainer_compiles_one_graph",
        "mechanisms/test_kernel_ridge.py::test_a_compiled_call_is_the_same",
        "execution/test_fading.py::test_ten_thousand_tokens_of_decode_at_any_rate",
        "kernels/test_triton.py::test_the_documented_link",
        "kernels/test_triton.py::test_kernels_compile_ahead_of_time",
        "kernels/test_triton.py::test_a_kernel_that_spills_is_seen",
        "kernels/test_triton_sums.py::test_a_broken_kernel_is_seen",
        "kernels/test_triton_ridge.py::test_a_broken_kernel_is_seen",
        "kernels/test_triton_distance.py::test_a_broken_kernel_is_seen",
        "kernels/test_triton_sums.py::test_kernels_compile_ahead_of_time",
        "kernels/test_triton_ridge.py::test_kernels_compile_ahead_of_time",
        "kernels/test_triton_distance.py::test_kernels_compile_ahead_of_time",
        "kernels/test_cpp.py::test_a_training_step_compiles_without_a_break",
        "kernels/test_sums.py::test_a_call_compiles_without_a_break",
        "kernels/test_sums.py::test_a_training_step_compiles_without_a_break",
        "kernels/test_ridge.py::test_a_training_step_compiles_without_a_break",
        "kernels/test_distance.py::test_a_training_step_compiles_without_a_break",
        "kernels/test_sets.py::test_every_family_equals_its_definition_with_every_set",
        "models/test_presets.py::test_comparisons_have_equal_parameters",
        "nn/test_compiled_layers.py::test_inductor_gives_the_same_numbers",
        "training/test_checkpoints.py::test_events_of_tensorboard_after_a_resume",
        "training/test_comparisons.py::test_a_budgeted_comparison_keeps_its_plan",
        "training/test_comparisons.py::test_one_failure_does_not_stop_the_others",
        "training/test_transfer.py::test_stopped_while_being_measured_goes_on",
        "training/test_comparisons.py::test_workers_of_a_killed_parent_stop_with_a_checkpoint",
        "training/test_search.py::test_a_regime_that_fails_is_told_and_never_chosen",
        "training/test_comparisons.py::test_ctrl_c_then_again",
        "training/test_comparisons.py::test_two_at_a_time_and_a_killed_worker",
        "training/test_curriculum.py::test_a_run_that_is_stopped_in_every_stage_goes_on_as_one",
        "training/test_killed_runs.py::test_killed_at_random_moments_and_resumed",
        "training/test_search.py::test_a_search_ends_with_a_winner_and_all_that_led_to_it",
        "training/test_search.py::test_a_stop_is_a_stop_and_a_budget_an_end",
        "training/test_search.py::test_killed_and_gone_on_is_the_same_search",
        "cli/test_presets.py::test_a_page_with_the_papers_numbers",
        "kernels/test_cpp.py::test_a_damaged_library_is_compiled_again",
        "kernels/test_decode.py::test_a_long_chain_does_not_drift",
        "test_benchmarks.py::test_the_benchmark_of_distances_runs_and_refuses_a_wrong_kernel",
        "test_benchmarks.py::test_the_benchmark_of_sums_runs_and_refuses_a_wrong_kernel",
        "test_benchmarks.py::test_the_sparse_benchmark_draws_what_tables_buy",
        "test_benchmarks.py::test_peers_compute_the_same_function",
        "test_benchmarks.py::test_rows_of_linear_peers",
        "test_long_context_benchmark.py::test_run",
        "test_transport_benchmark.py::test_the_peak_is_that_of_the_call",
    }
)
"""These tests are only in `make test-all`."""
