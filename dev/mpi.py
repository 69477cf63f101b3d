"""What the tests of several processes share: mpirun on one machine, whatever it has."""
import os
import shutil
import subprocess

# More ranks than processors, in containers that are root and may not read each other's memory.
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
               "OMPI_MCA_hwloc_base_binding_policy": "none", "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
               "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none",
               "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
               "LSAN_OPTIONS": "detect_leaks=0"}  # MPI's own


def why_not(driver):
    """Why nothing can be launched with mpirun, or None."""
    if not shutil.which("mpirun"):
        return "there is no mpirun here (make deps installs Open MPI)"
    build = subprocess.run([driver, "info"], capture_output=True, text=True, timeout=60).stdout
    return None if "MPI" in build else "the driver was built without MPI"


def run(command, timeout=120, **variables):
    """The finished process of one rank that no launcher started."""
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT, **variables}, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=timeout)


def mpirun(ranks, command, timeout=120, **variables):
    """The finished mpirun: its stdout and stderr are those of all ranks."""
    return run(["mpirun", "-n", str(ranks), *command], timeout, **variables)
