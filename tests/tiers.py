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
        "yat/row/off-128/bfloat16", "exp/row/off-decode-128/float32",
    ),
    "kernels/test_triton_sums.py::test_kernel_equals_definition": (
        "sko/early/float32", "sq-count/one/float32", "sko-1/memory-bidirectional/float32",
        "sq-raw/decay-packed/float32", "linear/decay-memory/float32", "sq/level/bfloat16",
    ),
    "kernels/test_triton_ridge.py::test_kernel_equals_definition": (
        "ska-1/odd/float32", "ska-2/memory/float32", "ska-2/packed/float32", "ska-1/short/bfloat16",
    ),
    "kernels/test_triton_distance.py::test_kernel_equals_definition": (
        "rewa-gates-dot/odd/float32", "rewa/padding/float32", "other-order/packed/float32", "rewa/decode/float32",
        "rewa-gates-dot/one/bfloat16",
    ),
    "kernels/test_cpp.py::test_a_training_step_compiles_without_a_break": ("softmax",),
    "kernels/test_sums_carried.py::test_rows_that_cancel_are_summed_directly": ("0.01-keys",),
    "nn/test_compiled_layers.py::test_a_layer_is_one_graph": (
        "softmax", "squared_affine", "ska(power=1)", "rewa", "mamba2",
    ),
    "nn/test_compiled_layers.py::test_one_graph_has_gradients_and_serves_several_lengths": ("softmax",),
    "models/test_presets.py::test_comparisons_have_equal_parameters": (),
}  # fmt: skip
"""Of these tests the named cases are in `make test`, the others only in `make test-all`."""

SLOW: frozenset[str] = frozenset(
    {
        "kernels/test_triton.py::test_the_documented_link",
        "kernels/test_triton.py::test_kernels_compile_ahead_of_time",
        "kernels/test_triton.py::test_a_kernel_that_spills_is_seen",
        "kernels/test_triton_sums.py::test_kernels_compile_ahead_of_time",
        "kernels/test_triton_ridge.py::test_kernels_compile_ahead_of_time",
        "kernels/test_triton_distance.py::test_kernels_compile_ahead_of_time",
        "kernels/test_sums.py::test_a_training_step_compiles_without_a_break",
        "kernels/test_ridge.py::test_a_training_step_compiles_without_a_break",
        "kernels/test_distance.py::test_a_training_step_compiles_without_a_break",
    }
)
"""These tests are only in `make test-all`."""
