"""Slurm of two nodes on this machine: munge, slurmctld and two slurmd in a directory of their own, on free ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
#: A state that has not come after this many seconds never comes.
PATIENCE = 150
_CONF = """\
ClusterName=d9d
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
PlugStackConfig=/dev/null
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=30
JobRequeue=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000
PartitionName=ci Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def reason_not_to_run() -> str | None:
    """Why no Slurm can be started on this machine; ``None`` if one can."""
    tools, path = ("munged", "slurmctld", "slurmd", "sbatch", "unshare"), f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in tools if shutil.which(name, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "slurmctld and slurmd of the tests run as root"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        return "this machine allows no mount namespaces, in which the nodes' names resolve"
    return None


@dataclass
class Cluster:
    """Running Slurm with the nodes ``n1`` and ``n2``.

    Attributes:
        folder: directory of its files.
        env: environment in which Slurm's commands find it.
    """

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, check: bool = True) -> str:
        """Standard output and error of a command."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start_node(self, name: str) -> None:
        """Start a slurmd in a mount namespace in which the nodes' names resolve, as on a cluster."""
        inner = f'mount --bind "{self.folder}/hosts" /etc/hosts; exec slurmd -N {name} -f "{self.folder}/slurm.conf"'
        self.run("unshare", "-m", "sh", "-c", inner)

    def kill_node(self, name: str) -> None:
        """Kill a slurmd, which is how the loss of a machine begins for slurmctld."""
        os.kill(int((self.folder / f"slurmd.{name}.pid").read_text()), signal.SIGKILL)

    def state(self, job: str) -> str:
        """Slurm's word for the state of a job."""
        return self.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()

    def restarts(self, job: str) -> int:
        """Number of requeues of a job."""
        return int(self.run("squeue", "-h", "-j", job, "-t", "all", "-O", "RestartCnt").strip() or 0)

    def start_now(self, job: str) -> None:
        """Let a requeued job start without Slurm's wait of two minutes."""
        wait_for(lambda: self.state(job) == "PENDING", f"job {job} pending")
        # The end of the first start's script would be taken for the end of the second start.
        wait_for(lambda: not _has_supervisor(job), f"the end of the processes of job {job}")
        # Refused while the job still completes on a node.
        command = ("scontrol", "update", f"jobid={job}", "starttime=now")
        wait_for(lambda: "rror" not in self.run(*command, check=False), f"a new start time of job {job}")

    def pid_of_rank(self, job: str, rank: int) -> int:
        """Process of a rank of a job."""
        return wait_for(lambda: _process_with({f"SLURM_JOB_ID={job}", f"SLURM_PROCID={rank}"}), f"rank {rank}")

    def logs(self) -> str:
        """Last lines of the daemons' logs, for a failed test."""
        return "\n".join(f"== {log.name}\n" + log.read_text()[-2000:] for log in (self.folder / "log").glob("*.log"))


@contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Start munge and Slurm; end both after the block, with all their jobs."""
    with tempfile.TemporaryDirectory(prefix="d9d-slurm-", ignore_cleanup_errors=True) as name:
        cluster = Cluster(Path(name))
        _write_files(cluster.folder)
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
        path = f"{Path(sys.executable).parent}:{environ['PATH']}:/usr/sbin"
        cluster.env.update(environ, PATH=path, SLURM_CONF=str(cluster.folder / "slurm.conf"))
        try:
            _start(cluster)
            yield cluster
        finally:
            cluster.run("scancel", "--state=RUNNING,PENDING", "--user=root", check=False)
            with suppress(AssertionError):
                wait_for(lambda: not cluster.run("squeue", "-h", check=False).strip(), "the end of all jobs")
            cluster.run("scontrol", "shutdown", check=False)
            for pid_file in cluster.folder.glob("*.pid"):
                _end(pid_file)


def wait_for(ask: Callable[[], Found], what: str) -> Found:
    """First true answer."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.2)
    return answer


def _write_files(folder: Path) -> None:
    for inner in ("log", "state"):
        (folder / inner).mkdir()
    with closing(socket.socket()) as one, closing(socket.socket()) as two, closing(socket.socket()) as three:
        sockets = (one, two, three)
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, host=host, ports=ports))
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "127.0.0.1 n1\n127.0.0.1 n2\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def _start(cluster: Cluster) -> None:
    names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munged.seed"}
    files = [f"--{option}={cluster.folder}/{name}" for option, name in names.items()]
    cluster.run("munged", *files, f"--log-file={cluster.folder}/log/munged.log", "--force")
    cluster.run("slurmctld", "-f", f"{cluster.folder}/slurm.conf")
    for node in ("n1", "n2"):
        cluster.start_node(node)
    wait_for(lambda: cluster.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == "2", "two nodes")


def _end(pid_file: Path) -> None:
    """End a daemon; scontrol has already asked all but munged."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        with suppress(AssertionError):
            wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"the end of process {pid}")


def _has_supervisor(job: str) -> bool:
    """Whether a slurmstepd of a job exists."""
    words = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words.append((folder / "cmdline").read_bytes() if folder.name.isdecimal() else b"")
    return any(word.startswith(f"slurmstepd: [{job}.".encode()) for word in words)


def _process_with(variables: set[str]) -> int | None:
    """Python process with these variables in its environment; a rank's own children have them too, but other words."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdecimal() else []
            if b"d9d_core" in words and b"python" in words[0]:
                environ = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
                if variables <= set(environ):
                    return int(folder.name)
    return None
