"""The processes that train together, connected by jax.distributed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import jax

from xrex.cuda.async_emb.comm_utils import distributed_store
from xrex.train.share_exchange import Alone, ShareExchange, StoreExchange

# What JAX finds its place in a SLURM job by.
_SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """This process among those that train together.

    Attributes:
      process: its index; 0 is the one that writes metrics and shows progress.
      num_processes: how many there are.
    """

    process: int = 0
    num_processes: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes for all."""
        return self.process == 0

    def exchange(self, name: str) -> ShareExchange:
        """What makes batches of the processes' parts; another name for every stream of a run."""
        if self.num_processes == 1:
            return Alone()
        return StoreExchange(
            distributed_store(), name, process=self.process, num_processes=self.num_processes
        )


def connect_processes(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    environ: Mapping[str, str] = os.environ,
) -> ProcessGroup:
    """Connects this process with the others. To be called before JAX makes its devices.

    Args:
      coordinator_address: HOST:PORT at which process 0 listens.
      num_processes: how many processes there are.
      process_id: index of this one.
      environ: where SLURM says these three, if all are None.

    Raises:
      ValueError: some are missing or out of range, or all are and this is no SLURM job.
    """
    given = {
        "--coordinator_address": coordinator_address,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        absent = [name for name in _SLURM_VARIABLES if name not in environ]
        if absent:
            raise ValueError(
                "--distributed finds its place among the processes by --coordinator_address, "
                "--num_processes and --process_id, or in a SLURM job; none of the three is given "
                f"and SLURM's {', '.join(absent)} not set: give the flags, or start by srun"
            )
        jax.distributed.initialize()
        return ProcessGroup(jax.process_index(), jax.process_count())
    if coordinator_address is None or num_processes is None or process_id is None:
        raise ValueError(
            f"{', '.join(missing)} missing beside "
            f"{', '.join(name for name in given if name not in missing)}; --distributed needs all "
            "three of them, or none in a SLURM job"
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process_id={process_id} with --num_processes={num_processes}; it must be at least "
            f"0 and less than {num_processes}"
        )
    jax.distributed.initialize(coordinator_address, num_processes, process_id)
    return ProcessGroup(process_id, num_processes)
