"""Launch of a job's processes from the command line, and start-up of each process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, TypeVar

import typer
from d9d_core.cli.interrupts import interrupts_deferred
from d9d_core.errors import JobError

from d9d_engine.joining import JoinsProcesses, print_note
from d9d_engine.launch.command import VARIABLE, typed_command
from d9d_engine.launch.process import Process
from d9d_engine.launch.startup import StartUp
from d9d_engine.machines import require_whole_groups, sizes_named
from d9d_engine.process_env import ProcessEnv, forget_launchers, refuse_one_of_several_machines
from d9d_engine.run.interrupt import Interrupts, Terminated

if TYPE_CHECKING:
    from d9d_engine.distributed.mesh import Topology
    from d9d_engine.launch.agent import Machines

Runs = TypeVar("Runs", bound=JoinsProcesses)


Nproc = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Start this many processes on this machine; 'auto': as many as the mesh needs, or one per device.",
    ),
]


Alone = Annotated[
    bool, typer.Option("--alone", help="Run on this machine only, and ignore the environment variables of launchers.")
]


def process_of_launcher(environ: MutableMapping[str, str], alone: bool, machines: Machines | None = None) -> ProcessEnv:
    """Rank and sizes of this process, from its launcher's variables; refuses to run alone a job for several processes.

    Args:
        environ: environment variables; with ``alone``, the variables of launchers are removed.
        alone: whether the user gave ``--alone``.
        machines: machines that the user named.

    Raises:
        JobError: variables are missing or malformed, or the job is meant for several processes.
    """
    if alone:
        forget_launchers(environ)
    env = ProcessEnv.from_environment(environ)
    if env.launcher == "mpi" and env.master is None:
        raise JobError(
            f"MPI started this process as rank {env.rank} of {env.world_size}, but MASTER_ADDR, the address of the "
            "rendezvous, is not set; set it to the machine of rank 0, such as mpirun -x MASTER_ADDR=$(hostname) ..., "
            "or give --alone if these variables are left over from another program"
        )
    if env.launcher is None and not alone and machines is None:
        warning = refuse_one_of_several_machines(environ, sys.argv[1:])
        if warning is not None:
            print_note(warning)
    return env


def option_words(overrides: Sequence[str], plugin: Sequence[Path], no_plugins: bool, strict: bool) -> list[str]:
    """Command-line arguments for the launched processes that repeat the options of this command."""
    words = [word for option in overrides for word in ("--set", option)]
    words += [word for file in plugin for word in ("--plugin", str(file))]
    return [*words, *["--no-plugins"] * no_plugins, *["--strict-plugins"] * strict]


class Joined(NamedTuple, Generic[Runs]):
    """Process that has joined the process group of its job.

    Attributes:
        job: loaded job.
        topology: rank, device, meshes and process groups of this process.
        start: clock of the start-up, to be used as an observer of the run.
        alone: whether the process was started without a launcher.
    """

    job: Runs
    topology: Topology
    start: StartUp
    alone: bool


@contextmanager
def joined_process(
    process: Process,
    interrupts: Interrupts,
    load: Callable[[], Runs],
    import_modules: Callable[[], None],
    nothing: str = "trained",
) -> Iterator[Joined[Runs]]:
    """Load a job and join its processes inside the block, and time each phase of the start-up.

    Args:
        process: this process.
        interrupts: stop requests.
        load: loads the job.
        import_modules: imports the modules that build the job.
        nothing: past participle for the message about an interrupted start-up, such as ``trained`` in ``nothing was
            trained``.
    """
    env = process.env
    command = typed_command(sys.argv[1:], os.environ)
    with StartUp(print_note, shown=env.rank == 0, processes=env.world_size, command=command) as start:
        # A single process may end as soon as it is asked, and reports a failure like every command. Ranks of a
        # distributed job stop together, after their first step.
        alone = env.launcher is None
        with start_up(nothing=nothing):  # covers the time between phases, too
            with start_up(interrupts, alone, nothing):
                start.ends("plugins", following="job")
                loaded = load()
                loaded.check(env.world_size)
                if loaded.source.note is not None and not process.repeats:
                    print_note(loaded.source.note)
            start.ends("job", following="torch")
            with interrupts_deferred():
                import torch  # noqa: F401

                start.ends("torch", following="modules")
                import d9d_engine.distributed.world  # noqa: F401
                from d9d_engine.distributed.mesh import describe_rank

                import_modules()
            start.ends("modules", following="plan" if alone else "processes")
            reporter = None if alone else process.reporter(describe_rank(loaded.mesh.sizes(), env.rank))
        with loaded.joined(env, reporter) as topology:
            process.failed_elsewhere = topology.watchdog.failed_elsewhere
            process.interrupted = topology.watchdog.interrupted
            if not alone:
                start.ends("processes", following="plan")
            yield Joined(loaded, topology, start, alone)


@contextmanager
def start_up(interrupts: Interrupts | None = None, alone: bool = False, nothing: str = "trained") -> Iterator[None]:
    """Add ``nothing was trained`` to the text of a KeyboardInterrupt inside the block.

    Args:
        interrupts: stop requests, which end the block at once if ``alone`` is true.
        alone: whether the process was started without a launcher.
        nothing: past participle in the text.
    """
    try:
        with interrupts.raised() if interrupts is not None and alone else nullcontext():
            yield
    except Terminated:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"during start-up; nothing was {nothing}") from None


def for_processes(load: Callable[[int | None, bool], Runs], nproc: str | None, nodes: int = 1) -> Runs:
    """Load a job and check it for the number of processes that will be started.

    Args:
        load: loads the job for a number of processes; the second argument says whether the job is read again.
        nproc: number of processes of a machine, ``auto``, or ``None`` for as many as the mesh needs.
        nodes: number of machines.

    Raises:
        D9dError: ``nproc`` is no number, or the job does not fit the number of processes.
    """
    if nproc is not None and nproc != "auto":
        if not nproc.isdecimal() or int(nproc) < 1:
            raise JobError(f"--nproc: '{nproc}' is not a number of processes; give 1 or more, or auto")
        job = load(int(nproc) * nodes, False)
        with sizes_named(job.mesh.world_size, nodes, int(nproc), "--nproc"):
            job.check(int(nproc) * nodes)
        require_whole_groups(job.mesh.tp, nodes, int(nproc))
        return job
    if nodes > 1:
        raise JobError("--nodes: the number of processes on each machine is not given; give it as --nproc N")
    job = load(1, False)
    processes = job.mesh.world_size
    if job.source.auto is not None or (nproc == "auto" and "mesh" not in job.source.document.values):
        with start_up(), interrupts_deferred():
            from d9d_engine.distributed.devices import count_devices
        processes = count_devices(job.device)
        job = load(processes, True) if processes > 1 else job
    job.check(processes)
    return job


def machines_of(nodes: int | None, node_rank: int | None, master: str | None) -> Machines | None:
    """Machines that share a job, from the command line; ``None`` for this machine alone.

    Raises:
        JobError: an option is missing or wrong.
    """
    given = {"--nodes": nodes, "--node-rank": node_rank, "--master": master}
    if all(value is None for value in given.values()):
        return None
    missing = [name for name, value in given.items() if value is None]
    if nodes is None or node_rank is None or master is None:
        raise JobError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: several machines need "
            "--nodes N, --node-rank 0 to N-1, and --master with the address of machine 0"
        )
    from d9d_engine.launch.agent import PORT, Machines

    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*):(\d+)", master)  # an IPv6 address with a port is in brackets
    if found is None and master.count(":") == 1:
        raise JobError(f"--master {master!r} is not HOST or HOST:PORT, with a number as the port")
    host, port = (found[1], int(found[2])) if found else (master, PORT)
    host = host.strip("[]")
    return Machines(nodes, node_rank, host, port)


def launch(
    job: JoinsProcesses,
    arguments: list[str],
    restarts: int,
    interrupts: Interrupts,
    machines: Machines | None = None,
) -> int:
    """Start the processes of a job on this machine and wait for them; return the exit status.

    Args:
        job: job, loaded for the processes of all machines.
        arguments: arguments of ``d9d`` in each process.
        restarts: largest number of restarts of all processes after failures.
        interrupts: stop requests, which may have arrived already.
        machines: machines that share the job; ``None`` if all processes are on this one.
    """
    from d9d_engine.launch.agent import Launch

    if job.source.note is not None and (machines is None or machines.rank == 0):
        print_note(job.source.note)
    with start_up(), interrupts_deferred():
        from d9d_engine.distributed.mesh import describe_rank

    def name_of(rank: int) -> str:
        return describe_rank(job.mesh.sizes(), rank)

    processes = job.mesh.world_size // (1 if machines is None else machines.count)
    environ = {**os.environ, VARIABLE: typed_command(sys.argv[1:], os.environ)}
    command = ("-m", "d9d_core", *arguments)
    return Launch(command, processes, restarts, name_of, job.timeouts.startup, environ, machines).run(interrupts)
