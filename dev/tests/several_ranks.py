"""Training on several ranks of this machine: mpirun starts them, or --gpus with the CUDA build."""
import glob
import shlex
import subprocess

import harness
import mpi
from harness import DRIVER

CUDA = harness.cuda()
GPUS = mpi.gpus()
WHY_NOT = mpi.why_not()
ENVIRONMENT = {**harness.ENVIRONMENT, **mpi.ENVIRONMENT, "NCCL_NVLS_ENABLE": "0"}


def command(ranks, *args, name="train"):
    """The command that trains, in fp32 if no option says otherwise."""
    dtype = [] if "--dtype" in args or "--resume" in args else ["--dtype", "fp32"]
    train = [DRIVER, name, *dtype, *map(str, args)]
    if ranks == 1:
        return train
    return [*train, "--gpus", str(ranks)] if CUDA else ["mpirun", "-n", str(ranks), *train]


def run(ranks, *args, limit=300 if harness.sanitized() else 120, name="train"):
    """A run, once it has ended."""
    try:
        return subprocess.run(command(ranks, *args, name=name), stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT,
                              timeout=limit, text=True, errors="replace")
    except subprocess.TimeoutExpired as hung:
        said = (hung.stderr or b"").decode(errors="replace")
        raise AssertionError(f"{ranks} ranks with {args} did not end within {limit} s; "
                             f"their output: {said[-2000:]}") from None


def run_each(*commands):
    """Ranks with commands of their own: (exit status of the launcher or of the first that failed, what all said)."""
    if CUDA:
        ranks = mpi.start_as_torchrun_does(len(commands), list(commands))
        said = "".join(rank.communicate(timeout=120)[0] for rank in ranks)
        return next((rank.returncode for rank in ranks if rank.returncode), 0), said
    # By its rank: with commands of their own, divided by ":", mpirun of Open MPI 5.0.7 (Debian 13) ends by a segmentation fault.
    cases = " ".join(f"{rank}) exec {shlex.join(command)};;" for rank, command in enumerate(commands))
    done = mpi.mpirun(len(commands), ["sh", "-c", f"case $OMPI_COMM_WORLD_RANK in {cases} esac"])
    return done.returncode, done.stdout + done.stderr


def process_of_rank(rank, parent):
    """The process id of a rank among the descendants of a launcher."""
    names = (f"OMPI_COMM_WORLD_RANK={rank}".encode(), f"TRAIN_GPT_RANK={rank}".encode())
    parents = {}
    for path in glob.glob("/proc/[0-9]*"):
        try:
            with open(path + "/stat", encoding="utf-8", errors="replace") as file:
                parents[int(path[6:])] = int(file.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass  # it has ended
    for process in parents:
        above = process
        while above in parents and above != parent:
            above = parents[above]
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if above == parent and process != parent and set(names) & set(file.read().split(b"\0")):
                    return process
        except OSError:
            pass
    return None
