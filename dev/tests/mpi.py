"""Starts the ranks of multi-process tests on one machine: for the CPU build with mpirun, for the CUDA build with the
environment variables of torchrun."""
import os
import shutil
import socket
import subprocess

import harness

# Allows more ranks than processors, root in containers, and processes that may not read each other's memory.
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
               "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
               "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none",
               "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
               "LSAN_OPTIONS": "detect_leaks=0"}  # MPI's own


def collectives():
    """The communication library of the driver, from `info`: "MPI (...)", "NCCL ...", "none"; empty if the driver
    fails."""
    build = harness.run("info").stdout
    return dict(line.split(" ", 1) for line in build.splitlines() if " " in line).get("collectives", "")


def gpus():
    """As many as CUDA_VISIBLE_DEVICES leaves to programs."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True) if shutil.which("nvidia-smi") else None
    count, visible = listed.stdout.count("GPU ") if listed else 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len(list(filter(None, visible.split(",")))))


def why_not():
    """Why two ranks cannot be started here, or None."""
    library = collectives()
    if library.startswith("NCCL"):
        return None if gpus() >= 2 else "there are fewer than 2 GPUs here"
    if not library.startswith("MPI"):
        return "the driver was built without MPI or NCCL"
    return None if shutil.which("mpirun") else "mpirun is missing (make deps installs Open MPI)"


def run(command, timeout=120, **variables):
    """Runs one rank without a launcher. Returns the finished process."""
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT, **variables}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=timeout)


def mpirun(ranks, command, timeout=120, **variables):
    """Runs mpirun. Returns the finished process, with the stdout and stderr of all ranks."""
    return run(["mpirun", "-n", str(ranks), *command], timeout, **variables)


def start_as_torchrun_does(ranks, command, **variables):
    """Starts one process for each rank; command: one for all, or a list with one for each. Returns the processes."""
    commands = command if isinstance(command[0], list) else [command] * ranks
    with socket.socket() as taken:  # rank 0 listens on the next port
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [subprocess.Popen(commands[r], env={**os.environ, **ENVIRONMENT, **world, **variables, "RANK": str(r), "LOCAL_RANK": str(r)},
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for r in range(ranks)]


def run_test_on_several_ranks(case, name):
    """Runs the GoogleTest binary `name` beside the driver on 2 and 3 ranks, or on as many as there are GPUs. Every rank
    must pass."""
    reason = why_not()
    if reason:
        case.skipTest(reason)
    binary = os.path.join(os.path.dirname(harness.DRIVER), "dev", name)
    on_gpus = collectives().startswith("NCCL")
    for ranks in (2, 3):
        if on_gpus and ranks > gpus():
            break
        with case.subTest(ranks=ranks):
            if on_gpus:
                outputs = [process.communicate(timeout=120)[0] for process in start_as_torchrun_does(ranks, [binary])]
            else:
                done = mpirun(ranks, [binary])
                outputs = [done.stdout + done.stderr]
            case.assertEqual(sum(text.count("[  PASSED  ]") for text in outputs), ranks, "\n".join(outputs))
            case.assertEqual([text for text in outputs if "[  FAILED  ]" in text], [])
