"""Which tests `python -m pytest` leaves to --thorough, and why: they take seconds, and quicker tests look at the same.

By file or by test, without the cases.  A file that is named on the command line runs with them.
"""

EMULATED = "kernels emulated on the CPU take seconds a case; test_kernels_forward.py and tests/mpi run some"
COMMANDS = "launches of commands; test_words.py, test_run.py and test_decode_cli.py run each command once"
PROGRAMS = "compiles or runs whole programs; test_examples.py and tests/mpi call the same functions"
WORKSHOP = "tests a tool of those who work on mpiattn, which no user runs"
RARE = "makes up hosts, networks, disks or processors that few machines have"

WHY = {
    "test_bench.py": COMMANDS,
    "test_bench_kernel.py": COMMANDS,
    "test_callers.py": PROGRAMS,
    "test_cli_bench.py": COMMANDS,
    "test_cli_tune.py": COMMANDS,
    "test_cpu_ranks.py": "tests/mpi runs on the kernels that the processor has",
    "test_cuda_bias.py": EMULATED,
    "test_cuda_ipc.py": EMULATED,
    "test_cudnn.py": EMULATED,
    "test_decoding_docs.py": PROGRAMS,
    "test_faults.py": RARE,
    "test_fields_docs.py": PROGRAMS,
    "test_files_faults.py": RARE,
    "test_fortran.py": PROGRAMS,
    "test_fuzzed_files.py": "many odd files; test_run_errors.py has one of each kind",
    "test_gpu_aware.py": RARE,
    "test_gpu_script.py": WORKSHOP,
    "test_hopper.py": WORKSHOP,
    "test_kernels_backward.py": EMULATED,
    "test_kernels_ranks.py": EMULATED,
    "test_netcluster.py": RARE,
    "test_nodes.py": RARE,
    "test_packaging.py": PROGRAMS,
    "test_parallel_hdf5.py": RARE,
    "test_plots_files.py": "test_plots.py and test_plots_page.py draw the same pictures",
    "test_slurm.py": "starts a Slurm; test_cli_slurm.py and test_slurm_launchers.py look at the same scripts",
    "test_startup.py": COMMANDS,
    "test_your_code_docs.py": PROGRAMS,
    "test_check.py::test_the_mpiexec_of_another_mpi": RARE,
    "test_check.py::test_two_nodes": COMMANDS,
    "test_check.py::test_versions_that_differ": COMMANDS,
    "test_check.py::test_probe_from_inside_a_launch": COMMANDS,
    "test_check.py::test_all_ranks_on_one_core": COMMANDS,
    "test_check.py::test_too_many_threads": COMMANDS,
    "test_cuda.py::test_commands_and_one_call": EMULATED,
    "test_failures.py::test_timeout_must_be_a_time": COMMANDS,
    "test_generate.py::test_larger_than_memory": "writes files larger than a limit of memory",
    "test_launch.py::test_selections": WORKSHOP,
    "test_launch.py::test_time_limit_ends_every_rank": WORKSHOP,
    "test_launch.py::test_whole_suite_under_a_launcher": WORKSHOP,
    "test_output_lock.py::test_two_runs_of_one_output": COMMANDS,
    "test_run_log.py::test_more_threads_than_cores": COMMANDS,
    "test_run_many.py::test_more_groups_of_a_shape_take_no_more_messages": COMMANDS,
    "test_run_masks.py::test_verify_fails_on_a_wrong_gradient": COMMANDS,
    "test_run_masks.py::test_documents_without_verify": COMMANDS,
    "test_shared_blocks.py::test_tiles_of_other_architectures": EMULATED,
    "test_convert.py::test_larger_than_memory": "writes files larger than a limit of memory",
    "test_run_resume.py::test_the_launcher_hands_the_signal_on": COMMANDS,
}


def why(item):
    """Why a test is left to --thorough; None if it is not."""
    name = getattr(item, "originalname", item.name)
    return WHY.get(item.path.name) or WHY.get(f"{item.path.name}::{name}")
