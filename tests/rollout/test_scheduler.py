from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.envs.errors import InfrastructureError, SandboxDied, UsageError
from palaestra.rollout.admission import AdmissionControl
from palaestra.rollout.chat import ChatFormat
from palaestra.rollout.episode import EpisodeOptions
from palaestra.rollout.scheduler import Group, GroupStream, Scheduler, SchedulerLimits

OPTIONS = EpisodeOptions(max_action_tokens=8, max_context_tokens=64)


@dataclass(frozen=True)
class Ref:
    id: str
    kind: str = "kind"


def refs(n: int) -> list[Ref]:
    return [Ref(f"t{i}") for i in range(n)]


def scheduler(script: Any, engine: Any, chat: ChatFormat, **limits: Any) -> Scheduler:
    options = limits.pop("options", OPTIONS)
    return Scheduler(engine, chat, script.make_env, options, SchedulerLimits(**{"max_episodes": 12, **limits}))


async def drain(stream: GroupStream) -> list[Group]:
    async with stream as groups:
        return [group async for group in groups]


async def test_every_task_comes_out_as_one_group_with_all_its_episodes(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    groups = await drain(scheduler(script, scripted_engine, chat).run_groups(refs(7), group_size=3))
    assert sorted(group.task_id for group in groups) == [f"t{i}" for i in range(7)]
    assert all(len(group.results) == 3 for group in groups)
    assert all(result.spec.task_id == group.task_id for group in groups for result in group.results)
    assert len({result.spec.episode_id for group in groups for result in group.results}) == 21
    assert (script.opened, script.closed) == (21, 21)


async def test_episodes_of_a_group_sample_with_different_seeds_and_a_rerun_with_the_same(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    async def seeds(seed: int) -> dict[str, int]:
        groups = await drain(scheduler(script, scripted_engine, chat).run_groups(refs(3), group_size=2, seed=seed))
        return {result.spec.episode_id: result.spec.seed for group in groups for result in group.results}

    first = await seeds(1)
    assert len(set(first.values())) == 6
    assert await seeds(1) == first
    assert not set((await seeds(2)).values()) & set(first.values())


@given(
    fates=st.lists(st.sampled_from(["fine", "reset", "step", "bug", "slow"]), min_size=1, max_size=12),
    group_size=st.integers(1, 4),
    leave_after=st.none() | st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_dispatched_episode_comes_out_exactly_once_whatever_fails(
    make_script: Any, make_engine: Any, chat: ChatFormat, fates: list[str], group_size: int, leave_after: int | None
) -> None:
    """Failures of the infrastructure, bugs, timeouts and a consumer who leaves early; nothing is left running."""

    def fail_reset(task_id: str, attempt: int) -> BaseException | None:
        fate = fates[int(task_id[1:])]
        return {"reset": SandboxDied("gone"), "bug": RuntimeError("bug")}.get(fate)

    script = make_script(
        fail_reset=fail_reset,
        fail_step=lambda task_id, attempt: "SandboxDied" if fates[int(task_id[1:])] == "step" else None,
        step_s=lambda task_id: 9.0 if fates[int(task_id[1:])] == "slow" else 0.0,
        reward=lambda task_id: 0.5,
    )
    engine = make_engine(lambda prompt, sampling: [chat.end_id])
    options = EpisodeOptions(max_action_tokens=8, max_context_tokens=64, retries=1, timeout_s=0.1)

    async def scenario() -> tuple[GroupStream, list[Group]]:
        stream = scheduler(script, engine, chat, options=options, max_failures=10**6).run_groups(
            refs(len(fates)), group_size=group_size
        )
        taken: list[Group] = []
        async with stream as groups:
            while leave_after is None or len(taken) < leave_after:
                try:
                    taken.append(await anext(groups))
                except StopAsyncIteration:
                    break
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return stream, taken

    stream, taken = asyncio.run(scenario())
    came_out = [result.spec for group in taken for result in group.results] + list(stream.cancelled)
    assert max(Counter(spec.episode_id for spec in came_out).values(), default=0) <= 1
    assert len(came_out) == stream.stats.episodes_dispatched
    if leave_after is None:
        assert len(came_out) == group_size * len(fates)
        assert not stream.cancelled
    for group in taken:
        fine = fates[int(group.task_id[1:])] == "fine"
        for result in group.results:
            late = result.failure is not None and "TimeoutError" in result.failure  # a busy machine makes anyone late
            assert result.reward == (0.5 if fine and not late else None)
            assert (result.failure is None) == (fine and not late)
    assert script.opened == script.closed
    assert engine.running == 0


async def test_no_more_episodes_are_open_than_the_limit_even_when_nobody_takes_the_groups(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    drawn = count()
    tasks = (Ref(f"t{next(drawn)}") for _ in range(1000))
    stream = scheduler(script, scripted_engine, chat, max_episodes=10).run_groups(tasks, group_size=4)
    async with stream as groups:
        await asyncio.sleep(0.05)
        assert stream.stats.episodes_dispatched == 8
        await anext(groups)
        await asyncio.sleep(0.05)
        assert stream.stats.episodes_dispatched == 12
    assert stream.stats.episodes_cancelled == len(stream.cancelled) == 8
    assert next(drawn) <= 4


async def test_stages_have_limits_of_their_own(script: Any, scripted_engine: Any, chat: ChatFormat) -> None:
    script.step_s = lambda task_id: 0.01
    scripted_engine.delay_s = 0.001
    busy = scheduler(script, scripted_engine, chat, max_executing=3, max_generating=2)
    await drain(busy.run_groups(refs(6), group_size=2))
    assert script.most_inside == 3
    assert scripted_engine.most_running == 2


def varied(script: Any, flat: set[str]) -> None:
    """Rewards that differ within a group, except for the tasks in ``flat``."""
    turn = count()
    script.reward = lambda task_id: 1.0 if task_id in flat else float(next(turn) % 2)


async def test_groups_without_variance_are_replaced_when_asked_and_still_come_out(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    varied(script, {"t0", "t2", "t3"})
    stream = scheduler(script, scripted_engine, chat).run_groups(
        refs(20), group_size=2, groups=4, refill=True, max_extra_groups=8
    )
    groups = await drain(stream)
    assert sorted(group.task_id for group in groups if not group.zero_variance) == ["t1", "t4", "t5", "t6"]
    assert sorted(group.task_id for group in groups if group.zero_variance) == ["t0", "t2", "t3"]
    assert (stream.stats.groups_kept, stream.stats.groups_zero_variance) == (4, 3)


async def test_refilling_stops_at_its_cap(script: Any, scripted_engine: Any, chat: ChatFormat) -> None:
    stream = scheduler(script, scripted_engine, chat).run_groups(
        refs(100), group_size=2, groups=4, refill=True, max_extra_groups=3
    )
    assert len(await drain(stream)) == 7
    assert (stream.stats.groups_kept, stream.stats.groups_zero_variance) == (0, 7)


async def test_without_refill_exactly_the_asked_number_of_groups_runs(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    assert len(await drain(scheduler(script, scripted_engine, chat).run_groups(refs(9), group_size=2, groups=4))) == 4


async def test_a_failed_episode_belongs_to_no_baseline(script: Any, scripted_engine: Any, chat: ChatFormat) -> None:
    failed = count()
    script.fail_step = lambda task_id, attempt: "SandboxDied" if next(failed) < 1 else None
    rewards = iter([0.0, 0.0, 1.0])
    script.reward = lambda task_id: next(rewards)
    no_retry = EpisodeOptions(max_action_tokens=8, max_context_tokens=64, retries=0)
    stream = scheduler(script, scripted_engine, chat, options=no_retry).run_groups(refs(1), group_size=4)
    (group,) = await drain(stream)
    assert [result.reward for result in group.results].count(None) == 1
    assert len(group.graded) == 3
    assert not group.zero_variance
    assert (stream.stats.episodes_graded, stream.stats.episodes_failed) == (3, 1)


async def test_too_many_failures_in_a_row_end_the_stream_with_the_last_cause(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    script.fail_reset = lambda task_id, attempt: SandboxDied("no space left")
    stream = scheduler(script, scripted_engine, chat, max_failures=5).run_groups(refs(50), group_size=2)
    with pytest.raises(InfrastructureError, match=r"episodes in a row failed; the last cause was .*no space left"):
        await drain(stream)
    assert script.opened == script.closed


async def test_an_error_of_the_caller_ends_the_stream(script: Any, scripted_engine: Any, chat: ChatFormat) -> None:
    tasks = [Ref("t0"), Ref("t" * 100), *refs(50)]
    with pytest.raises(UsageError, match="max_prompt_tokens is 32"):
        await drain(scheduler(script, scripted_engine, chat).run_groups(tasks, group_size=2))
    assert script.opened == script.closed


async def test_an_error_of_the_task_source_ends_the_stream(script: Any, scripted_engine: Any, chat: ChatFormat) -> None:
    def tasks() -> Any:
        yield Ref("t0")
        raise OSError("the task file went away")

    with pytest.raises(OSError, match="went away"):
        await drain(scheduler(script, scripted_engine, chat).run_groups(tasks(), group_size=2))


async def test_a_slow_consumer_hears_of_an_error_as_soon_as_it_asks_and_nothing_more_is_started(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    endless = (Ref("t" if index < 8 else "t" * 100) for index in count())
    stream = scheduler(script, scripted_engine, chat).run_groups(endless, group_size=2)
    taken = []

    async def take_slowly() -> None:
        async with stream as groups:
            async for group in groups:
                taken.append(group)
                await asyncio.sleep(0.002)

    with pytest.raises(UsageError, match="max_prompt_tokens"):
        await take_slowly()
    assert len(taken) <= 8
    assert stream.stats.episodes_dispatched <= 2 * 8 + 12  # what was good, and what max_episodes let start after it
    assert script.opened == script.closed


async def test_an_error_of_the_task_source_gives_its_share_of_the_admission_back(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    def tasks() -> Any:
        yield Ref("t0")
        raise OSError("the task file went away")

    admission = AdmissionControl(max_staleness=0, batch_episodes=8)
    with pytest.raises(OSError, match="went away"):
        await drain(scheduler(script, scripted_engine, chat).run_groups(tasks(), group_size=2, admission=admission))
    assert admission.running == 0


async def test_admission_holds_groups_back_until_the_learner_has_advanced(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    admission = AdmissionControl(max_staleness=1, batch_episodes=4)
    stream = scheduler(script, scripted_engine, chat, max_episodes=100).run_groups(
        refs(50), group_size=2, admission=admission
    )
    async with stream as groups:
        for version in range(1, 5):
            await asyncio.sleep(0.02)
            assert stream.stats.episodes_dispatched == 4 * (version + 1)
            for _ in range(2):
                await anext(groups)
            await admission.advance(version)
    assert admission.running == 0
    assert admission.accepted == 16


async def test_requests_that_cannot_be_are_refused(script: Any, scripted_engine: Any, chat: ChatFormat) -> None:
    small = scheduler(script, scripted_engine, chat, max_episodes=4)
    with pytest.raises(UsageError, match="group_size is 5"):
        small.run_groups(refs(1), group_size=5)
    with pytest.raises(UsageError, match="give groups="):
        small.run_groups(refs(1), group_size=2, refill=True)
    with pytest.raises(UsageError, match="enter the stream first"):
        await anext(small.run_groups(refs(1), group_size=2))
    with pytest.raises(UsageError, match="max_executing is 0"):
        SchedulerLimits(max_episodes=1, max_executing=0)
