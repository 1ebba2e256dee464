"""Which cases of tests/mpi the CUDA back end is tried with on a GPU, by four ranks: file, and pytest's -k."""

CASES = {
    "test_kernels.py": "",
    "test_decode.py": "case_17 or case_18 or case_28 or masks_dtypes",
    "test_cases.py": "case_1_even or case_3 or case_5 or case_6 or case_9 or case_10 or case_12 or case_14 or "
    "sinks or wire_dtype",
}
