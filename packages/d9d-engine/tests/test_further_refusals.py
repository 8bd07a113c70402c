"""Further parts of the engine alone: refusals, checks of health, devices, and the ends of launched processes."""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import BuildError, DataError, JobError
from d9d_core.strategy import Applied, GradientOwner
from d9d_engine import compat, joining
from d9d_engine.cli import health
from d9d_engine.compose import forward
from d9d_engine.compose.first_pass import frozen
from d9d_engine.distributed import devices
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.packed_reduction import PackedReduction
from d9d_engine.distributed.simulate import simulated_world
from d9d_engine.launch import process
from d9d_engine.launch.link import VARIABLE, Link
from d9d_engine.launch.process import running
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.step.ownership import check_replicas, settle
from d9d_engine.subscribers.config import EarlyStoppingConfig
from d9d_engine.supervision.failure import Failure
from pydantic import ValidationError
from torch import distributed as dist
from torch import nn

CPU = torch.device("cpu")


def test_replicas_that_diverge_without_being_made_equal_are_refused() -> None:
    topology = Topology(sizes=dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1) | {"dp_replicate": 3})
    parameters = {"a": nn.Parameter(torch.zeros(2))}
    claim = GradientOwner("a", "dp_replicate", "none")
    local = Applied(modules=("",), gradients=(claim,))
    owned = settle(parameters, topology, [("local", local)])
    with pytest.raises(
        BuildError, match="^local leaves the gradient of 'a' unreduced over dp_replicate, so that its 3 "
    ):
        check_replicas(parameters, owned, topology, [("local", local)])
    again = Applied(modules=("",), gradients=(claim,), resynchronise=lambda: None)
    check_replicas(parameters, owned, topology, [("local", again)])
    summed = Applied(modules=("",), gradients=(GradientOwner("a", "dp_replicate", "sync"),))
    check_replicas(parameters, settle(parameters, topology, [("sum", summed)]), topology, [("sum", summed)])
    check_replicas(parameters, settle(parameters, topology, []), topology, [("other", local)])  # not its own


@pytest.mark.parametrize(
    ("pack", "problem"),
    [
        (3, "returned an int; return a list of microbatches"),
        ([{"x": torch.zeros(1)}, 3], "returned a list of int; a microbatch maps names to tensors"),
        ([{"x": [1]}], "'x' of a microbatch is a list, not a tensor"),
    ],
)
def test_a_stream_that_yields_no_microbatches_is_named(pack: Any, problem: str) -> None:
    class Stream:
        def next_pack(self) -> Any:
            return pack

    with pytest.raises(DataError, match=rf"Stream.next_pack\(\).* ?{problem}$"):
        DevicePrefetcher(cast("Any", Stream()), CPU, prefetch=0).next()
    with pytest.raises(ValueError, match="^prefetch is -1; give a number of packs, 0 or more$"):
        DevicePrefetcher(cast("Any", Stream()), CPU, prefetch=-1)


def test_packs_are_cut_before_they_are_copied_to_a_device() -> None:
    stream: Any = SimpleNamespace(next_pack=lambda: ({"x": torch.arange(4)}, {"x": torch.arange(6)}))
    prefetcher = DevicePrefetcher(
        stream, torch.device("meta"), prefetch=0, split=lambda microbatch: {"x": microbatch["x"][:2]}
    )
    pack = prefetcher.next()
    assert [(one["x"].device.type, tuple(one["x"].shape)) for one in pack] == [("meta", (2,)), ("meta", (2,))]


def chosen(by: str) -> Any:
    return SimpleNamespace(by=by, where="task.reference")


def test_the_model_of_a_first_pass_is_the_base_if_it_can_be_uncovered() -> None:
    class Off:
        def off(self, model: object) -> None: ...

    def settled(by: str, peft: object) -> str:
        return frozen.settle_first_pass(chosen(by), cast("Any", SimpleNamespace(peft=peft)))

    assert (settled("frozen", Off()), settled("frozen", None), settled("frozen", object())) == (
        "without_adapter", "copy", "copy",
    )  # fmt: skip
    assert (settled("without_adapter", Off()), settled("stored", None)) == ("without_adapter", "stored")
    for peft, why in ((None, "has no 'peft'"), (object(), "has a fine-tuning method that trains the model's own ten")):
        with pytest.raises(JobError, match=f"^task.reference: 'without_adapter' runs .*, but the job {why}"):
            settled("without_adapter", peft)


@pytest.mark.parametrize("error", [JobError("no heads"), BuildError("no heads")])
def test_an_error_of_a_frozen_model_names_the_field_of_the_task(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(frozen, "select", fail)
    job = SimpleNamespace(model_copy=lambda update: update)
    root: Any = SimpleNamespace(job=job, registry=None)
    with pytest.raises(type(error), match="^task.reference: no heads$"):
        frozen.assemble_frozen(root, cast("Any", SimpleNamespace(where="task.reference", other="m")), "other")
    monkeypatch.setattr(frozen, "assemble", lambda given, trains: (given, trains))
    assert frozen.assemble_frozen(root, chosen("copy"), "copy") == cast("Any", (root, (root, False)))


def test_a_world_is_simulated_unless_there_is_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_world(4, rank=3):
        assert (dist.get_world_size(), dist.get_rank()) == (4, 3)
        with simulated_world(4):
            assert dist.get_rank() == 3
        with pytest.raises(RuntimeError, match="this process is one of 4; it cannot simulate a world of 2"):
            simulated_world(2).__enter__()
    assert not dist.is_initialized()


@pytest.mark.parametrize("series", ["tokens_per_second", "tokens", "lr", "skipped_steps", "mfu"])
def test_early_stopping_observes_measures_of_the_model_only(series: str) -> None:
    with pytest.raises(ValidationError, match=f"'{series}' does not measure the model; use a loss or a metric"):
        EarlyStoppingConfig(series=series)
    config = EarlyStoppingConfig()
    assert (config.series, config.patience, config.min_delta, config.mode) == ("eval/loss", 3, 0.0, "min")
    for wrong in ({"patience": 0}, {"min_delta": -0.1}, {"min_delta": float("inf")}):
        with pytest.raises(ValidationError):
            EarlyStoppingConfig(**cast("Any", wrong))


def test_notes_are_lines_that_control_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    joining.print_note("a\x1b[2J")
    joining.silent("b")
    assert capsys.readouterr().out == "a\\x1b[2J\n"

    class Full:
        def write(self, _text: str) -> None:
            raise OSError("no space")

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdout", Full())
    joining.print_note("lost")


@pytest.mark.parametrize(
    ("pp", "world", "ordered", "only"),
    [(2, 2, True, True), (2, 4, True, False), (1, 1, True, False), (2, 2, False, False)],
)
def test_transfers_are_the_only_communication_of_a_pipeline_alone(
    monkeypatch: pytest.MonkeyPatch, pp: int, world: int, ordered: bool, only: bool
) -> None:
    class Spec:
        ordered_transfers = ordered

    monkeypatch.setattr(joining, "ScheduleSpec", Spec)
    registry = SimpleNamespace(find=lambda _kind, _name: SimpleNamespace(spec=Spec()))
    mesh = SimpleNamespace(pp=pp, world_size=world)
    job: Any = SimpleNamespace(pipeline=SimpleNamespace(name="x"), mesh=mesh, registry=registry)
    assert joining.JoinsProcesses._only_transfers(job) is only
    job.pipeline = None
    assert joining.JoinsProcesses._only_transfers(job) is False


def test_health_names_the_version_the_device_and_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(health, "version", lambda name: f"of {name}")
    for version, good in (("2.10.1", False), ("2.11.0", True), ("2.11.0+cpu", True), ("3.0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        found = health.check_torch()
        text = f"torch {version}, CUDA 13.0, triton of triton" + ("" if good else "; d9d needs torch 2.11 or newer")
        assert (found.ok, found.message) == (good, text)
    monkeypatch.setattr(devices, "choose_device", lambda _name: CPU)
    assert (
        f"no accelerator; training runs on the CPU with {torch.get_num_threads()} thr" in health.check_device().message
    )
    monkeypatch.setattr(devices, "choose_device", lambda _name: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    assert (health.check_device().ok, health.check_device().message) == (True, "3 x xpu")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert health.check_network().message.startswith("--nproc listens on the loopback only; ")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    text = health.check_network().message
    assert text.startswith("--nproc listens on the interfaces named here; ")
    assert text.endswith("Trust); NCCL_SOCKET_IFNAME=eth0")


def test_a_model_that_only_runs_forward_has_no_losses() -> None:
    task = forward.WithoutLoss(cast("Any", lambda microbatch: microbatch))
    assert (task.late, task.weigh({}, {}), task.coefficients) == (False, {}, {})
    assert task.inputs({"x": torch.zeros(1)}).keys() == {"x"}  # type: ignore[attr-defined]


def test_packed_tensors_keep_their_places_by_operation_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0), "c": torch.tensor([4]), "d": torch.tensor(5.0),
    }  # fmt: skip
    packed = PackedReduction.of(tensors, {"a": "sum", "b": "max", "c": "sum", "d": "sum"}, None)
    assert {key: buffer.tolist() for key, buffer in packed.buffers.items()} == {
        ("sum", torch.float32): [1.0, 2.0, 5.0], ("max", torch.float32): [3.0], ("sum", torch.int64): [4],
    }  # fmt: skip
    reduced: list[Any] = []

    def all_reduce(buffer: torch.Tensor, operation: Any, group: object) -> None:
        reduced.append((str(operation).rpartition(".")[2], group))
        buffer *= 10

    monkeypatch.setattr("d9d_engine.distributed.packed_reduction.dist", SimpleNamespace(all_reduce=all_reduce))
    found = packed.reduce(cast("Any", "group"))
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [[10.0, 20.0]], "b": 30.0, "c": [40], "d": 50.0,
    }  # fmt: skip
    assert reduced == [("SUM", "group"), ("MAX", "group"), ("SUM", "group")]
    assert tensors["d"] == 5.0


@pytest.mark.parametrize(
    ("device", "started", "given", "found"),
    [
        ("cuda", False, None, ("EAGER", "2")), ("auto", False, None, ("EAGER", "2")),
        ("cuda:1", False, None, ("EAGER", "2")), ("cpu", False, None, (None, None)),
        ("cuda", True, None, (None, None)), ("cuda", False, "own", ("own", "own")),
    ],
)  # fmt: skip
def test_settings_of_cuda_are_made_before_it_starts_unless_the_user_makes_them(
    monkeypatch: pytest.MonkeyPatch, device: str, started: bool, given: str | None, found: Any
) -> None:
    names = ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS")
    for name in names:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    devices.load_kernels_eagerly(device)
    devices.share_hardware_queues(device)
    assert tuple(os.environ.get(name) for name in names) == found
    for name in names:
        os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("name", "local_rank", "size", "count", "device"),
    [("auto", 1, 2, 2, "cuda:1"), ("cuda", 1, 2, 1, "cuda:0"), ("cuda:1", 0, 1, 2, "cuda:1"), ("cpu", 5, 9, 2, "cpu")],
)
def test_each_process_of_a_machine_gets_its_own_device(
    monkeypatch: pytest.MonkeyPatch, name: str, local_rank: int, size: int, count: int, device: str
) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(devices, "choose_device", lambda name: torch.device("cuda" if name == "auto" else name))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", made.append)
    assert str(devices.device_of(name, local_rank, size)) == device
    assert [str(one) for one in made] == ([] if device == "cpu" else [device])
    if device == "cpu":
        return
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(JobError, match=r"device: 3 processes on this machine, but 2 cuda devices; start one process"):
        devices.device_of("cuda", 2, 3)
    with pytest.raises(
        JobError, match=r"device: 'cuda:0' is a single device, but there are 2 processes; set device to"
    ):
        devices.device_of("cuda:0", 0, 2)


def test_fsdp_units_of_later_releases_have_their_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.set: list[Any] = []

        def set_reduce_scatter_unused_params(self, on: bool, recurse: bool) -> None:
            self.set.append((on, recurse))

    monkeypatch.setattr(compat, "FSDPModule", Unit)
    inner, outer = Unit(), Unit()
    outer.add_module("inner", nn.Sequential(inner))
    compat.prepare_fsdp_gradients(outer)
    assert (inner.set, outer.set) == ([(True, False)], [(True, False)])


class Waits:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


def test_a_reduction_of_ones_own_is_registered_with_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as of_torch

    monkeypatch.setattr(of_torch, "ReduceScatterState", lambda *given: given)
    stream = Waits()
    handle = SimpleNamespace(current_stream=lambda: stream)
    old = SimpleNamespace(comm_ctx=SimpleNamespace(reduce_scatter_state=None), device_handle=handle)
    compat.settle_fsdp_reduction(old, "kept", cast("Any", "event"), "side")
    assert (old._post_reduce_event, old.comm_ctx.reduce_scatter_state) == ("event", ("kept", "event"))
    old.comm_ctx.reduce_scatter_state = SimpleNamespace(event="before")
    compat.settle_fsdp_reduction(old, "kept", cast("Any", "event"), "side")
    assert stream.waited == ["before"]
    states = [SimpleNamespace(event="one"), SimpleNamespace(event="two")]
    shared = SimpleNamespace(reduce_scatter_states=states, _last_post_reduce_events={})
    new = SimpleNamespace(comm_ctx=shared, device_handle=handle, _post_backward_pending=True)
    compat.settle_fsdp_reduction(new, "kept", cast("Any", "event"), "side")
    assert stream.waited == ["before", "one", "two"]
    assert states == [("kept", "event", stream, new)]
    assert (shared._last_post_reduce_events, new._post_backward_pending) == ({"side": "event"}, False)


RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Environment of a launched process, and the launcher's end of its link. No thread follows the launcher."""
    here, there = socket.socketpair()
    monkeypatch.setattr(process, "_follow", lambda _link, _interrupts, _process: None)
    environ = {**RANK_1, VARIABLE: str(there.fileno())}
    made: list[Link] = []
    original = Link.from_environment

    def once(given: Any) -> Any:
        there.detach()
        made.append(cast("Link", original(given)))
        return made[-1]

    monkeypatch.setattr(Link, "from_environment", once)
    yield environ, Link(here)
    here.close()
    for link in made:
        link.connection.close()


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (None, None, [{"done": True}]),
        (KeyboardInterrupt(), 130, []),
        (JobError("bad"), 2, [{"failure": {"text": "error: bad", "exit_code": 2, "second_hand": False}}]),
    ],
)
def test_a_launched_process_tells_its_launcher_how_it_ends(
    launched: Any, error: BaseException | None, status: int | None, told: list[Any]
) -> None:
    environ, launcher = launched
    env = ProcessEnv.from_environment(RANK_1)

    def run() -> None:
        with running(env, environ, Interrupts()) as found:
            assert found.repeats is True
            if error is not None:
                raise error

    shown = warnings.showwarning
    if status is None:
        run()
    else:
        with pytest.raises(SystemExit) as caught:
            run()
        assert caught.value.code == status
    assert warnings.showwarning is shown
    launcher.connection.setblocking(False)
    try:
        heard = list(launcher.receive())
    except BlockingIOError:
        heard = []
    assert heard == told


def test_a_failure_before_the_ranks_join_names_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    env = ProcessEnv.from_environment(RANK_1)
    made = process.Process(env, None, repeats=True)
    reporter = made.reporter("rank 1 (dp 1)")
    assert reporter.who == f"rank 1 (dp 1) on {env.node}"
    reporter.tell(Failure("told"), lambda who: who)
    with pytest.raises(SystemExit) as caught:
        made.fail(ValueError("again"))
    assert (caught.value.code, capsys.readouterr().err) == (1, "told\n")
    assert threading.current_thread() is threading.main_thread()


def test_a_simulated_world_leaves_the_hook_of_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", hook := (lambda *_: None))
    with simulated_world(2):
        assert sys.excepthook is hook
    assert sys.excepthook is hook
