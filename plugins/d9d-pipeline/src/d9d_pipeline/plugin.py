"""Declaration of the pipeline schedules and of the command ``d9d pipeline``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import CommandSpec, Ref, ScheduleSpec, hookimpl

D9D_API = 2
_HANDLERS = Ref("d9d_pipeline.runtime.handlers:handlers")
_SIMULATE = Ref("d9d_pipeline.simulator.seconds:seconds")


@hookimpl
def d9d_schedules() -> Iterator[ScheduleSpec]:
    """Declare the pipeline schedules, which a job selects by the name in its section ``pipeline``."""
    yield ScheduleSpec(
        name="gpipe",
        summary="All forwards, then all backwards; memory grows with the microbatches.",
        config=Ref("d9d_pipeline.config:GPipeConfig"),
        build=Ref("d9d_pipeline.build:build_gpipe"),
        handlers=_HANDLERS,
        simulate=_SIMULATE,
    )
    yield ScheduleSpec(
        name="looped_bfs",
        summary="gpipe with several stages on each rank, which divides the bubble by their number.",
        config=Ref("d9d_pipeline.config:LoopedBfsConfig"),
        build=Ref("d9d_pipeline.build:build_looped_bfs"),
        handlers=_HANDLERS,
        simulate=_SIMULATE,
    )
    yield ScheduleSpec(
        name="1f1b",
        summary="A forward and a backward in turn; holds at most as many microbatches as ranks.",
        config=Ref("d9d_pipeline.config:OneForwardOneBackwardConfig"),
        build=Ref("d9d_pipeline.build:build_1f1b"),
        handlers=_HANDLERS,
        simulate=_SIMULATE,
        ordered_transfers=True,
    )
    yield ScheduleSpec(
        name="interleaved_1f1b",
        summary="1f1b with several stages on each rank, which divides the bubble by their number.",
        config=Ref("d9d_pipeline.config:InterleavedConfig"),
        build=Ref("d9d_pipeline.build:build_interleaved_1f1b"),
        handlers=_HANDLERS,
        simulate=_SIMULATE,
    )
    yield ScheduleSpec(
        name="zb1p",
        summary="1f1b with weight gradients computed in the bubble, in the same memory (ZB-H1).",
        config=Ref("d9d_pipeline.config:Zb1pConfig"),
        build=Ref("d9d_pipeline.build:build_zb1p"),
        handlers=_HANDLERS,
        simulate=_SIMULATE,
    )
    yield ScheduleSpec(
        name="zero_bubble_v",
        summary="Two stages on each rank in a V, weight gradients in the bubble, which is almost empty.",
        config=Ref("d9d_pipeline.config:ZeroBubbleVConfig"),
        build=Ref("d9d_pipeline.build:build_zero_bubble_v"),
        handlers=_HANDLERS,
        simulate=_SIMULATE,
    )
    yield ScheduleSpec(
        name="dual_pipe_v",
        summary="Two stages on each rank in a V, forwards overlapped with backwards to hide communication.",
        config=Ref("d9d_pipeline.config:DualPipeVConfig"),
        build=Ref("d9d_pipeline.build:build_dual_pipe_v"),
        handlers=_HANDLERS,
        simulate=_SIMULATE,
    )


@hookimpl
def d9d_commands() -> Iterator[CommandSpec]:
    """Declare the command ``d9d pipeline``, which shows and compares schedules."""
    yield CommandSpec(
        name="pipeline",
        summary="Show a pipeline schedule, and compare schedules, without a GPU.",
        app=Ref("d9d_pipeline.cli.commands:app"),
    )
