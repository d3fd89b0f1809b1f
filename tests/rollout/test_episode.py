from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.envs.errors import EngineError, SandboxDied, UsageError
from palaestra.rollout.chat import PLAIN_SPECIALS, ChatFormat
from palaestra.rollout.episode import (
    TRANSITIONS,
    EpisodeOptions,
    EpisodeResult,
    EpisodeSpec,
    EpisodeState,
    IllegalTransition,
    StageGates,
    StateMachine,
    derive_seed,
    run_episode,
)
from palaestra.rollout.tokenizer import train_word_tokenizer

SPEC = EpisodeSpec(episode_id="e", task_id="task", kind="kind", seed=7)
OPTIONS = EpisodeOptions(max_action_tokens=8, max_context_tokens=64)


async def run(
    script: Any, engine: Any, chat: ChatFormat, options: EpisodeOptions = OPTIONS, **rest: Any
) -> EpisodeResult:
    return await run_episode(SPEC, make_env=script.make_env, engine=engine, chat=chat, options=options, **rest)


class Journal:
    """What the transition hook was told."""

    def __init__(self) -> None:
        self.states = [EpisodeState.QUEUED]

    def __call__(self, spec: EpisodeSpec, before: EpisodeState, after: EpisodeState) -> None:
        assert before == self.states[-1]
        self.states.append(after)


async def test_an_episode_is_opening_then_actions_and_observations_in_turn(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    journal = Journal()
    result = await run(script, scripted_engine, chat, on_transition=journal)
    assert chat.tokenizer.decode(result.trajectory.ids) == "<user>task<assistant>ok<eot><tool>no<assistant>ok<eot>"
    assert script.actions == ["ok", "ok"]
    assert (result.ending, result.reward, result.passed, result.pass_turn) == ("graded", 1.0, True, 2)
    assert [turn.observation for turn in result.turns] == ["no", "no"]
    assert journal.states == [
        EpisodeState.QUEUED, EpisodeState.ACQUIRING, EpisodeState.GENERATING, EpisodeState.EXECUTING,
        EpisodeState.GENERATING, EpisodeState.EXECUTING, EpisodeState.GRADING, EpisodeState.DONE,
    ]  # fmt: skip


async def test_every_prompt_is_the_trajectory_so_far(script: Any, scripted_engine: Any, chat: ChatFormat) -> None:
    script.turns = 3
    result = await run(script, scripted_engine, chat)
    for prompt in scripted_engine.prompts:
        assert list(prompt) == result.trajectory.ids[: len(prompt)]
    lengths = [len(prompt) for prompt in scripted_engine.prompts]
    assert all(before < after for before, after in pairwise(lengths))


WORDS = ChatFormat.plain(
    train_word_tokenizer(["hello he llo"] * 4, pattern=r"\w+|.", vocab_size=300, special_tokens=PLAIN_SPECIALS),
    max_prompt_tokens=32,
    max_observation_tokens=6,
)


@given(
    actions=st.lists(st.lists(st.integers(0, 260), max_size=9), min_size=3, max_size=3),
    observation=st.text(max_size=12) | st.sampled_from(["<eot>", "<assistant>he", "llo", "é"]),
    mode=st.sampled_from(["zero", "run"]),
)
def test_what_is_trained_on_is_exactly_what_was_sampled(
    make_script: Any, make_engine: Any, actions: list[list[int]], observation: str, mode: Any
) -> None:
    """Ids that decoding and encoding again would change (half characters, merges, markers) stay as they are."""
    said = iter([[*(i for i in action if i != WORDS.end_id), WORDS.end_id] for action in actions])
    engine = make_engine(lambda prompt, sampling: next(said))
    options = EpisodeOptions(max_action_tokens=8, max_context_tokens=200, truncated_action=mode)
    result = asyncio.run(run(make_script(turns=3, observation=observation), engine, WORDS, options))

    trajectory, sampled = result.trajectory, engine.generations
    mask = np.array(trajectory.mask, bool)
    assert np.array(trajectory.ids)[mask].tolist() == [i for g in sampled for i in g.ids]
    assert np.array(trajectory.logprobs)[mask].tolist() == [p for g in sampled for p in g.logprobs]
    assert np.array(trajectory.versions)[mask].tolist() == [v for g in sampled for v in g.versions]
    assert set(np.array(trajectory.versions)[~mask]) == {-1}
    assert (trajectory.ids[-1], trajectory.mask[-1]) == (sampled[-1].ids[-1], 1)
    assert trajectory.ids.count(WORDS.end_id) == sum(g.finish_reason == "stop" for g in sampled)


async def test_an_action_cut_off_by_length_ends_the_episode_with_zero_and_is_never_run(
    script: Any, make_engine: Any, chat: ChatFormat
) -> None:
    engine = make_engine(lambda prompt, sampling: list(b"a long action"))
    result = await run(script, engine, chat)
    assert (result.ending, result.reward, result.passed, result.truncated_actions) == ("truncated", 0.0, False, 1)
    assert script.actions == []
    assert chat.tokenizer.decode(result.trajectory.ids) == "<user>task<assistant>a long a"
    assert result.trajectory.mask[-1] == 1
    assert result.pass_turn is None


async def test_an_action_cut_off_by_length_is_run_where_the_options_say_so(
    script: Any, make_engine: Any, chat: ChatFormat
) -> None:
    engine = make_engine(lambda prompt, sampling: list(b"a long action"))
    result = await run(script, engine, chat, replace(OPTIONS, truncated_action="run"))
    assert script.actions == ["a long a"] * 2
    assert chat.end_id not in result.trajectory.ids
    assert (result.ending, result.truncated_actions) == ("graded", 2)


async def test_an_action_that_fills_the_context_is_not_run_and_what_is_there_is_graded(
    script: Any, make_engine: Any, chat: ChatFormat
) -> None:
    engine = make_engine(lambda prompt, sampling: list(b"abcdefgh"))
    script.reward = lambda task_id: 0.25
    result = await run(script, engine, chat, replace(OPTIONS, max_context_tokens=10))
    assert (result.ending, result.reward, result.failure) == ("context", 0.25, None)
    assert len(result.trajectory.ids) == 10
    assert script.actions == []


@pytest.mark.parametrize("truncated_action", ["zero", "run"])
async def test_an_engine_with_less_room_than_the_episode_ends_the_context_and_not_the_action(
    script: Any, make_engine: Any, chat: ChatFormat, truncated_action: Any
) -> None:
    engine = make_engine(lambda prompt, sampling: list(b"ab"))  # cut after two tokens, whatever was asked for
    script.reward = lambda task_id: 0.25
    result = await run(script, engine, chat, replace(OPTIONS, truncated_action=truncated_action))
    assert (result.ending, result.reward) == ("context", 0.25)
    assert script.actions == []


async def test_a_prompt_that_fills_the_context_is_the_callers_error(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    with pytest.raises(UsageError, match="has 6 tokens and max_context_tokens is 6"):
        await run(script, scripted_engine, chat, replace(OPTIONS, max_context_tokens=6))
    assert scripted_engine.prompts == []
    assert (script.opened, script.closed) == (1, 1)


async def test_an_observation_that_leaves_no_room_ends_the_episode_and_what_is_there_is_graded(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    result = await run(script, scripted_engine, chat, replace(OPTIONS, max_context_tokens=13))
    assert (result.ending, result.reward, result.pass_turn) == ("context", 1.0, 1)
    assert chat.tokenizer.decode(result.trajectory.ids) == "<user>task<assistant>ok<eot>"


@pytest.mark.parametrize("where", ["reset", "step", "engine"])
async def test_an_infrastructure_failure_is_retried_with_a_fresh_episode(
    script: Any, scripted_engine: Any, chat: ChatFormat, where: str
) -> None:
    say, calls = scripted_engine.say, []

    def fail_once(prompt: Any, sampling: Any) -> list[int]:
        calls.append(sampling)
        if len(calls) == 2:
            raise EngineError("gone")
        ids: list[int] = say(prompt, sampling)
        return ids

    if where == "reset":
        script.fail_reset = lambda task_id, attempt: SandboxDied("gone") if attempt == 1 else None
    elif where == "step":
        script.fail_step = lambda task_id, attempt: "SandboxDied" if attempt == 1 else None
    else:
        scripted_engine.say = fail_once
    journal = Journal()
    result = await run(script, scripted_engine, chat, on_transition=journal)
    assert (result.reward, result.attempts, result.failure) == (1.0, 2, None)
    assert chat.tokenizer.decode(result.trajectory.ids) == "<user>task<assistant>ok<eot><tool>no<assistant>ok<eot>"
    assert journal.states.count(EpisodeState.ACQUIRING) == 2
    assert (script.opened, script.closed) == (2, 2)


async def test_a_failure_that_outlives_its_retries_is_a_result_without_reward(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    script.fail_step = lambda task_id, attempt: "SandboxDied"
    journal = Journal()
    result = await run(script, scripted_engine, chat, on_transition=journal)
    assert (result.ending, result.reward, result.passed) == ("failed", None, False)
    assert (result.failure, result.attempts) == ("SandboxDied: scripted", 3)
    assert journal.states[-1] == EpisodeState.FAILED
    assert (script.opened, script.closed) == (3, 3)


async def test_an_ending_without_a_verdict_is_a_failure_and_not_a_zero(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    script.reward = lambda task_id: None
    result = await run(script, scripted_engine, chat)
    assert result.reward is None
    assert "ended without a verdict" in str(result.failure)


async def test_an_episode_that_takes_too_long_fails_and_closes_its_environment(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    script.step_s = lambda task_id: 60.0
    journal = Journal()
    result = await run(script, scripted_engine, chat, replace(OPTIONS, timeout_s=0.05), on_transition=journal)
    assert (result.ending, result.failure) == ("failed", "TimeoutError: it took more than 0.05 s")
    assert journal.states[-1] == EpisodeState.FAILED
    assert script.closed == 1


async def test_a_cancelled_episode_closes_its_environment(script: Any, scripted_engine: Any, chat: ChatFormat) -> None:
    script.step_s = lambda task_id: 60.0
    journal = Journal()
    task = asyncio.create_task(run(script, scripted_engine, chat, on_transition=journal))
    await script.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert journal.states[-1] == EpisodeState.CANCELLED
    assert (script.opened, script.closed) == (1, 1)


async def test_an_instruction_that_is_too_long_is_the_callers_error(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    with pytest.raises(UsageError, match="max_prompt_tokens is 3"):
        await run(script, scripted_engine, replace(chat, max_prompt_tokens=3))
    assert (script.opened, script.closed) == (1, 1)


async def test_gates_limit_how_many_generate_and_execute_at_once(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    gates = StageGates(generating=asyncio.Semaphore(3), executing=asyncio.Semaphore(2))
    script.step_s = lambda task_id: 0.001
    scripted_engine.delay_s = 0.001
    await asyncio.gather(*(run(script, scripted_engine, chat, gates=gates) for _ in range(10)))
    assert scripted_engine.most_running == 3
    assert script.most_inside == 2


def test_every_turn_and_every_seed_samples_with_a_seed_of_its_own() -> None:
    seeds = {derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), (1, "2", 3), (1, 23), ()]}
    assert len(seeds) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derive_seed(1, 2) == derive_seed(1, 2)


@given(path=st.lists(st.sampled_from(EpisodeState), max_size=6))
def test_only_transitions_of_the_table_are_allowed(path: list[EpisodeState]) -> None:
    machine = StateMachine(SPEC)
    for state in path:
        before = machine.state
        if state in TRANSITIONS[before]:
            machine.to(state)
        else:
            with pytest.raises(IllegalTransition, match=f"{before} -> {state} is not a transition"):
                machine.to(state)
            assert machine.state == before


def test_every_state_is_reached_and_every_state_but_the_last_three_can_still_be_cancelled() -> None:
    reached = {state for following in TRANSITIONS.values() for state in following} | {EpisodeState.QUEUED}
    assert reached == set(EpisodeState)
    final = {state for state, following in TRANSITIONS.items() if not following}
    assert final == {EpisodeState.DONE, EpisodeState.FAILED, EpisodeState.CANCELLED}
    assert all(EpisodeState.CANCELLED in TRANSITIONS[state] for state in set(EpisodeState) - final)


@pytest.mark.parametrize("wrong", [{"max_action_tokens": 0}, {"max_context_tokens": 0}, {"retries": -1}])
def test_options_that_cannot_be_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(OPTIONS, **wrong)


async def test_an_episode_that_is_cancelled_while_its_environment_closes_is_cancelled(
    script: Any, scripted_engine: Any, chat: ChatFormat
) -> None:
    closing = asyncio.Event()

    def make_env() -> Any:
        env = script.make_env()

        async def close() -> None:
            closing.set()
            await asyncio.sleep(60)

        env.close = close
        return env

    journal = Journal()
    task = asyncio.create_task(
        run_episode(SPEC, make_env=make_env, engine=scripted_engine, chat=chat, options=OPTIONS, on_transition=journal)
    )
    await closing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert journal.states[-2:] == [EpisodeState.GRADING, EpisodeState.CANCELLED]
